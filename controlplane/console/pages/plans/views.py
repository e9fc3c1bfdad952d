"""Plans and moves: every plan that was made with all that it was made from, and every instance that scaling moved."""

import json

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.lists import list_page
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context
from controlplane.console.pages.plans.cards import card_of, cards_of, without_place
from controlplane.console.selectors.events import event_row
from controlplane.events.selectors import events_about
from controlplane.planning import selectors as planning
from controlplane.planning.models import ScalingPlan
from controlplane.resources.names import place_titles
from controlplane.resources.plans import MOVES, PLANS


@require_safe
@fleet_role(Role.VIEWER)
def plans(request: HttpRequest) -> HttpResponseBase:
    titles, now = place_titles(), timezone.now()
    return list_page(request, PLANS, lambda plans: cards_of(plans, titles, now))


@require_safe
@fleet_role(Role.VIEWER)
def plan(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Show one plan with all its inputs."""
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
    context = {
        **live_context(feed.state(), "events"),
        "titles": titles,
        "card": card_of(row, titles, timezone.now()),
        "plan": row,
        "targets": targets,
        "moves": row.moves.select_related("plan").order_by("-pk"),
        "others": planning.plans().filter(round=row.round).exclude(pk=row.pk).order_by("model__name"),
        "events": [event_row(event, with_subject=False) for event in events_about(row, limit=8)],
        "inputs_json": json.dumps(row.inputs, indent=2, sort_keys=True),
    }
    return render(request, "console/plans/plan.html", context)


@require_safe
@fleet_role(Role.VIEWER)
def moves(request: HttpRequest) -> HttpResponseBase:
    return list_page(request, MOVES, titles=place_titles())
