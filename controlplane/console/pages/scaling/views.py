"""Scaling page: present and planned instances, reasons, moves, and each model's policy."""

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.charts.demand import demand_and_capacity
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, of_charts
from controlplane.console.pages.plans.cards import cards_of
from controlplane.console.pages.scaling import tables
from controlplane.events import since
from controlplane.planning import selectors as planning
from controlplane.planning.execution import strategies
from controlplane.planning.models import PolicyMode
from controlplane.planning.titles import title_of
from controlplane.resources.filters import Filters, model_select
from controlplane.resources.names import model_names, place_titles
from controlplane.simulation.whatif import nightly
from controlplane.tuning.selectors import tuned

PLANS_SHOWN = 8
MOVES_SHOWN = 8


@require_safe
@fleet_role(Role.VIEWER)
def scaling(request: HttpRequest) -> HttpResponseBase:
    now, drawn_after = timezone.now(), str(since.newest())
    filters = Filters(request.GET, model_select(model_names()))
    model = filters["model"]
    titles = place_titles()
    current = planning.current_plans()
    asked = demand_and_capacity(model, now)
    if (answer := of_charts(request, [asked])) is not None:
        return answer
    matrix = tables.matrix(model, current, titles, now)
    waiting = [plan for plan in planning.waiting_plans() if plan.valid_until > now]
    shown = {plan.pk: plan for plan in [*waiting, *current.values()] if model in ("", plan.model.name)}
    cards = cards_of(list(shown.values()), titles, now, judged=True)
    cards.sort(key=lambda card: (not card.decidable, card.expired, card.plan.model.name))
    operator = may(request, Role.OPERATOR)
    policies = [(row, policy) for row, policy in planning.policies() if model in ("", row.name)]
    context = {
        **live_context(feed.state(), "events"),
        "drawn_after": drawn_after,
        "filters": filters,
        "now": now,
        "titles": titles,
        "matrix": matrix,
        "cards": cards,
        "waiting_count": len(waiting),
        "newest_plan": planning.plans(model=model).first(),
        "moves_day": planning.moves_since(planning.hours_ago(24), model),
        "unmet": [card for card in cards if card.shortage and not card.expired],
        "nightly": nightly.summary(),
        "demand_chart": asked,
        "policies": policies,
        "bundles": tables.bundle_choices([row for row, _ in policies]),
        "modes": PolicyMode.choices,
        "plan_every": tuned().PLAN_EVERY_S,
        "strategies": [(name, title_of(name)) for name in strategies.names()] if operator else [],
        "moves": planning.moves(model=model)[:MOVES_SHOWN],
        "plans": cards_of(planning.plans(model=model)[:PLANS_SHOWN], titles, now),
    }
    return render(request, "console/scaling/scaling.html", context)
