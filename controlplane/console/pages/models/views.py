"""Models: what is served where, within SLO, at what cost, and by which policy; a policy is switched here."""

from django.conf import settings
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action
from controlplane.console.lists import list_page, viewer_of
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, of_charts
from controlplane.console.pages.models.details import adapters_served, classes_of, parts_of
from controlplane.console.pages.models.selectors import ModelRow, chart_of, model_rows, regions
from controlplane.console.pages.models.tables import bundle_rows, tiles
from controlplane.events import since
from controlplane.fleet import shards
from controlplane.fleet.inventory import services as inventory
from controlplane.fleet.models import Model, WeightedTarget
from controlplane.planning import bundles
from controlplane.planning.parts import PARTS
from controlplane.resources.inventory import MODELS, TARGET_COMPARISONS


def opened(request: HttpRequest, rows: list[ModelRow]) -> ModelRow | None:
    """The row that the query string opens, if it is there."""
    return next((row for row in rows if row.name == request.GET.get("open")), None)


@require_safe
@fleet_role(Role.VIEWER)
def models(request: HttpRequest) -> HttpResponseBase:
    now, state = timezone.now(), feed.state()
    drawn_after = str(since.newest())
    every = model_rows(state, now)
    filters, _ = MODELS.listed(viewer_of(request), request.GET, every)
    rows = MODELS.arranged(every, filters)
    one = opened(request, rows)
    chart = chart_of(one.name, now) if one else None
    if chart and (answer := of_charts(request, [chart], f"{request.GET['open']}-demand")) is not None:
        return answer
    if request.GET.get("format") == "csv":
        return MODELS.csv(rows)
    context = {
        **live_context(state, "instances,events"),
        "drawn_after": drawn_after,
        "filters": filters,
        "rows": rows,
        "any_models": bool(every),
        "regions": regions(),
        "fleet": state.tile() or {},
        "tiles": tiles(every),
        "one": one,
        "classes": classes_of(one.name, now) if one else [],
        "parts": parts_of(one) if one else [],
        "adapters_served": adapters_served(one.model) if one else "",
        "chart": chart,
        "schedules": one.model.schedules.select_related("region") if one else [],
        "usual_zone": settings.TIME_ZONE,
        "fallbacks": Model.objects.filter(active=True, task=one.model.task).exclude(pk=one.model.pk) if one else [],
        "shards": sorted(shards.numbers()),
        "together": shards.together(one.model)[1:] if one else [],
        "bundles": bundles.choices([row.model for row in every]),
        "bundle_rows": bundle_rows(every),
        "part_titles": [part.title for part in PARTS],
    }
    return render(request, "console/models/models.html", context)


@require_safe
@fleet_role(Role.VIEWER)
def targets(request: HttpRequest) -> HttpResponseBase:
    """Weighted targets of public names, and how they compare."""
    shared: dict[str, list[str]] = {}
    for row in WeightedTarget.objects.filter(active=True):
        shared.setdefault(row.name, []).append(f"{row.target} {row.weight:g}")
    return list_page(request, TARGET_COMPARISONS, shared={name: ", ".join(its) for name, its in shared.items()})


@action(Role.ADMIN, page="console:targets", unchanged="The weights stay")
def share(form: ActionForm) -> str:
    """Share the requests for a name among the targets that the form gives as `target weight, target weight`."""
    name, weights = form.fields.get("name", "").strip(), {}
    for each in filter(None, map(str.strip, form.fields.get("targets", "").split(","))):
        target, _, weight = each.rpartition(" ")
        try:
            weights[target.strip()] = float(weight)
        except ValueError:
            raise ValidationError(f"{each!r} is no target with a weight, such as llama-8b 95.") from None
    inventory.share(name, weights, form.user, form.reason)
    if not weights:
        return f"{name} is no longer shared."
    return f"{name} is shared among {', '.join(weights)}; requests follow within a second."
