"""Scaling: present and planned instances with a model's plan and policy, what was planned and moved, and the calendar."""

from dataclasses import replace
from zoneinfo import ZoneInfo

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.actions import ActionForm, action
from controlplane.console.charts.demand import demand_and_capacity
from controlplane.console.lists import viewer_of
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, of_charts
from controlplane.console.pages.scaling import calendar as weeks
from controlplane.console.pages.scaling import tables
from controlplane.console.pages.scaling.cards import card_of
from controlplane.events import since
from controlplane.fleet.inventory import services as inventory
from controlplane.fleet.inventory.kinds import SCHEDULE
from controlplane.fleet.models import Model, Region
from controlplane.planning import history
from controlplane.planning import selectors as planning
from controlplane.planning.execution import strategies
from controlplane.planning.models import PolicyMode
from controlplane.planning.titles import title_of
from controlplane.resources.filters import Filters, Select, every, last_hours, model_select, number
from controlplane.resources.names import model_names, place_titles, region_names
from controlplane.resources.plans import MOVES, PLANS
from controlplane.tuning.selectors import tuned
from scheduling.scaling.schedule import WEEKDAYS


@require_safe
@fleet_role(Role.VIEWER)
def scaling(request: HttpRequest) -> HttpResponseBase:
    """The matrix, one model of it open: that of `?plan=`, of `?open=`, else the first with a plan that awaits approval."""
    now, drawn_after = timezone.now(), str(since.newest())
    filters = Filters(
        request.GET, model_select(model_names()), Select("hours", "Time", last_hours(1, 6, 24, 168), "24")
    )
    for resource in (PLANS, MOVES):
        if (request.GET.get("format"), request.GET.get("table")) == ("csv", resource.name):
            return resource.csv(resource.listed(viewer_of(request), request.GET)[1])
    model, titles, current = filters["model"], place_titles(), planning.current_plans()
    waiting = [plan for plan in planning.waiting_plans() if plan.valid_until > now and model in ("", plan.model.name)]
    named = planning.plans().filter(pk=number(request.GET.get("plan", "")) or 0).first()
    opened = request.GET.get("open", model or (waiting[0].model.name if waiting else ""))
    opened = named.model.name if named else opened
    chart = demand_and_capacity(opened, now) if opened else None
    if chart and (answer := of_charts(request, [chart])) is not None:
        return answer
    matrix = tables.matrix(model, current, titles, now)
    plans = [named, *(plan for plan in waiting if plan.model.name == opened), current.get(opened)]
    operator = may(request, Role.OPERATOR)
    context = {
        **live_context(feed.state(), "events"),
        "drawn_after": drawn_after,
        "filters": filters,
        "now": now,
        "titles": titles,
        "matrix": matrix,
        "opened": opened,
        "row": Model.objects.filter(name=opened).select_related("scaling_policy").first(),
        "cards": [card_of(plan, titles, now) for plan in {plan.pk: plan for plan in plans if plan}.values()],
        "chart": chart,
        "waiting": waiting,
        "short": [plan for plan in current.values() if plan.inputs.get("shortage") and plan.valid_until > now],
        "plan_every": tuned().PLAN_EVERY_S,
        "modes": PolicyMode.choices,
        "strategies": [(name, title_of(name)) for name in strategies.names()] if operator else [],
        "entries": history.entries(model, filters.since or now),
        "undoable": set(planning.last_approved().values_list("pk", flat=True)) if operator else (),
    }
    return render(request, "console/scaling/scaling.html", context)


@require_safe
@fleet_role(Role.VIEWER)
def calendar(request: HttpRequest) -> HttpResponseBase:
    """A week back and a week ahead, by the clock of the region that is chosen."""
    now, regions = timezone.now(), region_names()
    filters = Filters(request.GET, model_select(model_names()), Select("region", "Region", every("regions", regions)))
    model, region = filters["model"], filters["region"]
    place = Region.objects.filter(name=region).first()
    zone = place.time_zone if place and place.time_zone else settings.TIME_ZONE
    with timezone.override(ZoneInfo(zone)):
        lying = weeks.items(model, region, now)
        chart = weeks.chart(model, region, dict(regions).get(region, ""), lying, now)
        admin = may(request, Role.ADMIN)
        chart = replace(chart, opens="schedule" if admin else "")
        if (answer := of_charts(request, [chart])) is not None:
            return answer
        coming = [(each, window) for each in lying for window in [w for w in each.windows if w[1] > now][:1]]
        context = {
            **live_context(feed.state(), "events"),
            "drawn_after": str(since.newest()),
            "filters": filters,
            "chart": chart,
            "coming": sorted(coming, key=lambda each: each[1][0]),
            "now": now,
            "regions": regions,
            "models": model_names(),
            "weekdays": WEEKDAYS,
            "usual_zone": zone,
        }
        return render(request, "console/scaling/calendar.html", context)


@action(Role.ADMIN, page="console:calendar", unchanged="Nothing is scheduled")
@transaction.atomic
def schedule(form: ActionForm) -> str:
    """Keep at least so many instances of a model by the clock."""
    given = form.fields
    count = number(given.get("instances", ""))
    if count is None:
        raise ValidationError("Give the number of instances.")
    texts = ("name", "model", "begins", "ends", "time_zone", "except_on")
    values = {name: given.get(name, "").strip() for name in texts}
    days = " ".join(day for day in WEEKDAYS if given.get(f"on-{day}"))
    more = {"region": given.get("region", "") or None, "instances": count, "weekdays": days}
    row = inventory.create(SCHEDULE, {**values, **more}, form.user, form.reason)
    return f"{row.model} keeps at least {count} by the schedule {row}."
