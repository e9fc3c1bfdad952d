"""Plans and moves: every plan that was made with all that it was made from, and every instance that scaling moved."""

import json

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.filters import choice, number, view_of
from controlplane.console.live.hub import hub
from controlplane.console.live.views import live_context
from controlplane.console.pages.plans import inputs
from controlplane.console.pages.plans.cards import card_of, without_place
from controlplane.console.pages.plans.tables import MOVES, PLANS, TARGETS
from controlplane.console.selectors.events import event_row
from controlplane.console.selectors.names import model_names, place_titles, region_names
from controlplane.console.tables import table
from controlplane.events.selectors import events_about
from controlplane.exports import ROW_LIMIT
from controlplane.paging import page_of
from controlplane.planning import selectors as planning
from controlplane.planning.models import MoveSource, PlanStatus, ScalingPlan
from controlplane.planning.titles import title_of


@require_safe
@fleet_role(Role.VIEWER)
def plans(request: HttpRequest) -> HttpResponseBase:
    """Every plan, newest first, in pages by cursor."""
    models, known = model_names(), planning.plan_strategies()
    filters = {
        "model": choice(request.GET, "model", models),
        "status": choice(request.GET, "status", PlanStatus.values),
        "strategy": choice(request.GET, "strategy", known),
    }
    rows = planning.plans(**filters)
    if request.GET.get("format") == "csv":
        return table(PLANS, rows[:ROW_LIMIT].iterator(chunk_size=500)).csv("plans")
    cursor = number(request.GET, "before")
    page = page_of(rows, cursor)
    titles, now = place_titles(), timezone.now()
    context = {
        **live_context(hub.state(), view_of(request, ()), "overview,events"),
        "plans": [card_of(row, titles, now) for row in page.rows],
        "cursor": cursor,
        "next_cursor": page.next_cursor,
        "filters": filters,
        "filtered": any(filters.values()),
        "models": models,
        "statuses": PlanStatus.choices,
        "strategies": [(name, title_of(name)) for name in known],
        "row_limit": ROW_LIMIT,
    }
    return render(request, "console/plans/plans.html", context)


@require_safe
@fleet_role(Role.VIEWER)
def plan(request: HttpRequest, pk: int) -> HttpResponseBase:
    """One plan with all that it was made from."""
    row = get_object_or_404(ScalingPlan.objects.select_related("model"), pk=pk)
    titles = place_titles()
    targets = [
        {
            **target,
            "title": titles.get(target["region"], target["region"]),
            "delta": target["target"] - target["present"],
            "why": without_place(target.get("reason") or "", row.model.name),
        }
        for target in row.targets
    ]
    if request.GET.get("format") == "csv":
        return table(TARGETS, targets).csv(f"plan-{row.pk}")
    context = {
        **live_context(hub.state(), view_of(request, ()), "overview,events"),
        "titles": titles,
        "card": card_of(row, titles, timezone.now()),
        "plan": row,
        "targets": targets,
        "moves": row.moves.select_related("plan").order_by("-pk"),
        "others": planning.plans().filter(round=row.round).exclude(pk=row.pk).order_by("model__name"),
        "events": [event_row(event, with_subject=False) for event in events_about(row, limit=8)],
        "inputs": inputs.read(row, titles),
        "inputs_json": json.dumps(row.inputs, indent=2, sort_keys=True),
    }
    return render(request, "console/plans/plan.html", context)


@require_safe
@fleet_role(Role.VIEWER)
def moves(request: HttpRequest) -> HttpResponseBase:
    """Every move, newest first, in pages by cursor."""
    models, regions = model_names(), region_names()
    filters = {
        "model": choice(request.GET, "model", models),
        "region": choice(request.GET, "region", [name for name, _ in regions]),
        "source": choice(request.GET, "source", MoveSource.values),
    }
    rows = planning.moves(**filters)
    if request.GET.get("format") == "csv":
        return table(MOVES, rows[:ROW_LIMIT].iterator(chunk_size=500)).csv("moves")
    cursor = number(request.GET, "before")
    page = page_of(rows, cursor)
    context = {
        **live_context(hub.state(), view_of(request, ()), "overview,events"),
        "titles": place_titles(),
        "moves": page.rows,
        "cursor": cursor,
        "next_cursor": page.next_cursor,
        "filters": filters,
        "filtered": any(filters.values()),
        "models": models,
        "regions": regions,
        "sources": MoveSource.choices,
        "row_limit": ROW_LIMIT,
    }
    return render(request, "console/plans/moves.html", context)
