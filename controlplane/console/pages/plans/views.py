"""Plans and moves: every plan that was made with all that it was made from, and every instance that scaling moved."""

import json

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.lists import list_page
from controlplane.console.live.hub import hub
from controlplane.console.live.views import live_context
from controlplane.console.pages.plans import inputs
from controlplane.console.pages.plans.cards import card_of, cards_of, with_undone, without_place
from controlplane.console.pages.plans.tables import MOVES, PLANS, TARGETS
from controlplane.console.selectors.events import event_row
from controlplane.events.selectors import events_about
from controlplane.planning import selectors as planning
from controlplane.planning.forecasts.selectors import generated_past
from controlplane.planning.models import MoveSource, PlanStatus, ScalingPlan
from controlplane.planning.titles import title_of
from controlplane.resources.filters import Filters, Select, every, last_hours, model_select
from controlplane.resources.names import model_names, place_titles, region_names
from controlplane.resources.tables import table


@require_safe
@fleet_role(Role.VIEWER)
def plans(request: HttpRequest) -> HttpResponseBase:
    filters = Filters(
        request.GET,
        model_select(model_names()),
        Select("status", "Status", every("statuses", PlanStatus.choices)),
        Select(
            "strategy", "Strategy", every("strategies", [(name, title_of(name)) for name in planning.plan_strategies()])
        ),
        Select("hours", "Made", [("", "Any time"), *last_hours(1, 6, 24, 168)]),
    )
    rows = planning.plans(
        model=filters["model"], status=filters["status"], strategy=filters["strategy"], since=filters.since
    )
    titles, now = place_titles(), timezone.now()
    context = {**live_context(hub.state(), "events"), "filters": filters, "generated": generated_past(now)}
    return list_page(
        request,
        "console/plans/plans.html",
        rows,
        PLANS,
        "plans",
        context,
        lambda plans: cards_of(plans, titles, now),
    )


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
        **live_context(hub.state(), "events"),
        "titles": titles,
        "card": card_of(row, titles, timezone.now()),
        "plan": row,
        "targets": targets,
        "moves": with_undone(row.moves.select_related("plan").order_by("-pk")),
        "others": planning.plans().filter(round=row.round).exclude(pk=row.pk).order_by("model__name"),
        "events": [event_row(event, with_subject=False) for event in events_about(row, limit=8)],
        "inputs": inputs.read(row, titles),
        "inputs_json": json.dumps(row.inputs, indent=2, sort_keys=True),
    }
    return render(request, "console/plans/plan.html", context)


@require_safe
@fleet_role(Role.VIEWER)
def moves(request: HttpRequest) -> HttpResponseBase:
    filters = Filters(
        request.GET,
        model_select(model_names()),
        Select("region", "Region", every("regions", region_names())),
        Select("source", "Asked by", [("", "Asked by anything"), *MoveSource.choices]),
        Select("hours", "Moved", [("", "Any time"), *last_hours(1, 6, 24, 168)]),
    )
    rows = planning.moves(
        model=filters["model"], region=filters["region"], source=filters["source"], since=filters.since
    )
    context = {**live_context(hub.state(), "events"), "filters": filters, "titles": place_titles()}
    return list_page(request, "console/plans/moves.html", rows, MOVES, "moves", context, with_undone)
