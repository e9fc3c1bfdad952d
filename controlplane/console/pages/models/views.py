"""Models: the list, and the page of one with its demand and forecast, policy, engine settings and lengths."""

from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.charts.demand import demand_chart, unforecast_words
from controlplane.console.lists import list_page
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, of_charts
from controlplane.console.pages.models import lengths
from controlplane.console.pages.models.forms import ENGINE
from controlplane.console.pages.models.selectors import adapters_served, classes_of, model_rows, tiles
from controlplane.events import since
from controlplane.fleet import shards
from controlplane.fleet.models import Deployment, Model
from controlplane.fleet.rollouts.selectors import statuses
from controlplane.gateway import targets
from controlplane.planning import bundles
from controlplane.planning.models import PolicyMode, ScalingPolicy, mode_of
from controlplane.planning.outlook import see
from controlplane.planning.parts import PARTS
from controlplane.planning.titles import title_of
from controlplane.resources.filters import Filters, Select, every, last_hours
from controlplane.resources.inventory import MODELS, TARGET_COMPARISONS
from controlplane.resources.lengths import LENGTH_VERSIONS
from controlplane.tuning.selectors import tuned
from forecasting import models_extra


@require_safe
@fleet_role(Role.VIEWER)
def models(request: HttpRequest) -> HttpResponseBase:
    now, state = timezone.now(), feed.state()
    rows = model_rows(state, now)
    return list_page(
        request,
        MODELS,
        known=rows,
        fleet=state.tile() or {},
        tiles=tiles(rows),
        versions=lengths.version_rows(now),
        version_columns=LENGTH_VERSIONS.named(*LENGTH_VERSIONS.page),
        version_actions=LENGTH_VERSIONS.actions if may(request, Role.OPERATOR) else "",
        kinds=lengths.kinds(),
        models_extra=models_extra.missing_for("An encoder"),
    )


@require_safe
@fleet_role(Role.VIEWER)
def model(request: HttpRequest, name: str) -> HttpResponseBase:
    now, state = timezone.now(), feed.state()
    drawn_after = str(since.newest())
    row = next(iter(model_rows(state, now, name)), None)
    if row is None:
        raise Http404(f"There is no model {name}.")
    filters = Filters(
        request.GET,
        Select("region", "Region", every("regions", [(each.region, each.title) for each in row.there])),
        Select("hours", "Time range", last_hours(1, 6, 24, 72, 168), "6"),
    )
    outlook = see(name, filters["region"], int(filters["hours"]), now)
    titles = {each.region: each.title for each in row.there}
    chart = demand_chart(outlook, name, titles.get(filters["region"], ""), "large")
    if (answer := of_charts(request, [chart], f"{name.replace('/', '-')}-{{}}")) is not None:
        return answer
    policy = ScalingPolicy.objects.filter(model=row.model).first()
    context = {
        **live_context(state, "instances,events"),
        "drawn_after": drawn_after,
        "filters": filters,
        "row": row,
        "model": row.model,
        "chart": chart,
        "outlook": outlook,
        "short": unforecast_words(outlook) if outlook.unforecast and outlook.forecast else "",
        "window_s": tuned().FORECAST_WINDOW_S,
        "every_s": tuned().FORECAST_EVERY_S,
        "classes": classes_of(name, now),
        "lengths": lengths.line_of(name, now),
        "parts": [(part, part.choice(row.present.values[part.name])) for part in PARTS],
        "bundles": bundles.choices([row.model]),
        "mode": PolicyMode(mode_of(policy)),
        "autoscaler": title_of(policy.strategy) if policy else "",
        **_shared(row.model),
        "adapters_served": adapters_served(row.model),
        "schedules": row.model.schedules.select_related("region"),
        "usual_zone": settings.TIME_ZONE,
        "fallbacks": Model.objects.filter(active=True, task=row.model.task).exclude(pk=row.model.pk),
        "shards": sorted(shards.numbers()),
        "together": shards.together(row.model)[1:],
        **_deployments(name),
    }
    return render(request, "console/models/model.html", context)


def _deployments(name: str) -> dict[str, Any]:
    """Return the deployments with their engine settings, and the rollouts that need attention."""
    standing, columns = statuses(model=name), [Deployment._meta.get_field(each) for each in ENGINE]
    return {
        "shown": [each for each in columns if any(getattr(status.deployment, each.name) for status in standing)],
        "deployments": [
            (each, each.deployment, [(column, getattr(each.deployment, column.name)) for column in columns])
            for each in standing
        ],
        "rollouts": [each for each in standing if each.needs_attention],
    }


def _shared(model: Model) -> dict[str, Any]:
    """Return the public names whose requests the model, or one of its adapters, shares with others."""
    own = {model.name, *model.adapters.values_list("name", flat=True)}
    every_target = targets.comparisons(timezone.now())
    names = {each.name for each in every_target if each.target in own}
    shared: dict[str, list[str]] = {name: [] for name in sorted(names)}
    for each in every_target:
        if each.name in shared:
            shared[each.name].append(f"{each.target} {each.weight:g}")
    return {
        "targets": [each for each in every_target if each.name in names],
        "target_columns": TARGET_COMPARISONS.named(*TARGET_COMPARISONS.page),
        "shared": {name: ", ".join(given) for name, given in shared.items()},
    }
