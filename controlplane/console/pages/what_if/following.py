"""The plan that a future became: who made it, the plans it proposed, and predicted and actual numbers."""

from datetime import datetime
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.formats import NONE, milliseconds, percent_fine, signed
from controlplane.console.pages.plans.cards import cards_of
from controlplane.planning.models import ScalingPlan
from controlplane.resources.names import place_titles
from controlplane.simulation.whatif.models import LETTERS, WhatIf
from controlplane.simulation.whatif.results.following import followed


class Endpoint(NamedTuple):
    """Instances of a model in a region: ready at the fork, predicted for now, and as they are."""

    model: str
    region: str
    began: str
    predicted: str
    ready: int
    moving: str
    difference: str
    """Of ready from predicted, in words."""
    agrees: bool


def made(row: WhatIf) -> str:
    """Who made which future the plan, and whether it still is; empty if none ever was."""
    if not row.plan:
        return ""
    at = timezone.localtime(datetime.fromisoformat(row.plan["at"]))
    if back := row.plan.get("undone_at"):
        return f"It was the plan from {at:%d %b %H:%M} until {timezone.localtime(datetime.fromisoformat(back)):%d %b %H:%M}."
    return f"{row.plan['letter']} is the plan since {at:%d %b %H:%M}, by {row.plan['by']}: {row.plan['note']}"


def following(row: WhatIf) -> dict[str, Any] | None:
    """What the page shows of it; None if no future of *row* is the plan."""
    came = followed(row)
    if came is None:
        return None
    titles, now = place_titles(), timezone.now()
    plans = ScalingPlan.objects.filter(pk__in=row.plan["plans"]).select_related("model").order_by("model__name")
    cards = cards_of(plans, titles, now)
    return {
        "letter": row.plan["letter"],
        "name": row.plan["name"],
        "at": LETTERS.index(row.plan["letter"]),
        "made": made(row),
        "over": came["over"],
        "assumed": came["assumed"],
        "cards": [{"card": card, "plan": card.plan} for card in cards],
        "waiting": sum(card.decidable and not card.expired for card in cards),
        "measures": [
            ("Requests", f"{came['requests']:,}", "since it is the plan"),
            ("SLO met", percent_fine(came["slo_met"]), _predicted(percent_fine(came["predicted_slo_met"]))),
            ("TTFT p95", milliseconds(came["ttft_p95_ms"]), _predicted(milliseconds(came["predicted_ttft_p95_ms"]))),
            _instances(came["instances"]),
        ],
        "endpoints": [_endpoint(each, titles) for each in came["instances"]],
    }


@require_safe
@fleet_role(Role.VIEWER)
def panel(request: HttpRequest, pk: int) -> HttpResponse:
    """What comes of the plan alone, for a page of that what-if with the same query; empty once none is the plan."""
    row = get_object_or_404(WhatIf, pk=pk)
    came = following(row)
    if came is None:
        return HttpResponse()
    page = f"{reverse('console:what-if', args=[pk])}?{request.GET.urlencode()}"
    return render(request, "console/what_if/followed.html", {"followed": came, "what_if": row, "page_address": page})


def _predicted(text: str) -> str:
    return "not comparable" if text == NONE else f"predicted {text} over all of it"


def _instances(endpoints: list[dict[str, Any]]) -> tuple[str, str, str]:
    ready = sum(each["ready"] for each in endpoints)
    if any(each["predicted"] is None for each in endpoints):
        return "Ready instances", f"{ready}", "not comparable"
    return "Ready instances", f"{ready}", f"predicted {sum(each['predicted'] for each in endpoints):.1f} for now"


def _endpoint(each: dict[str, Any], titles: dict[str, str]) -> Endpoint:
    # Predictions are means over seeds: a difference below a half is none.
    known = each["predicted"] is not None
    more = round(each["ready"] - each["predicted"]) if known else 0
    moving = [f"{each[name]} {name}" for name in ("starting", "draining") if each[name]]
    return Endpoint(
        model=each["model"],
        region=titles.get(each["region"], each["region"]),
        began=f"{round(each['began']):d}",
        predicted=f"{round(each['predicted'], 1):g}" if known else NONE,
        ready=each["ready"],
        moving=", ".join(moving),
        difference=f"{signed(more)} against predicted" if more else "as predicted" if known else "not comparable",
        agrees=not more,
    )
