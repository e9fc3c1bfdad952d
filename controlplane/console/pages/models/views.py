"""Models: what is served where, within SLO, at what cost, and by which policy; a policy is switched here."""

from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action
from controlplane.console.lists import list_page, viewer_of
from controlplane.console.live import at_door
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, of_charts
from controlplane.console.pages.models.details import adapters_served, classes_of, parts_of
from controlplane.console.pages.models.selectors import ModelRow, chart_of, model_rows, regions
from controlplane.console.pages.models.tables import ENDPOINTS, bundle_rows, tiles
from controlplane.console.pages.scaling.tables import bundle_choices
from controlplane.events import since
from controlplane.fleet.inventory import services as inventory
from controlplane.fleet.inventory.kinds import DEPLOYMENT, MODEL
from controlplane.fleet.models import Deployment, Model, WeightedTarget
from controlplane.planning import bundles, services
from controlplane.planning.parts import PARTS
from controlplane.resources.filters import number
from controlplane.resources.inventory import MODELS, TARGET_COMPARISONS
from controlplane.resources.tables import table

BOUNDS = ("min_instances", "max_instances")


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
        if one and request.GET.get("table") == "endpoints":
            return table(ENDPOINTS, one.there).csv(f"{one.name}-endpoints")
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
        **(at_door.panel(state, model=one.name) if one else {}),
        "chart": chart,
        "fallbacks": Model.objects.filter(active=True, task=one.model.task).exclude(pk=one.model.pk) if one else [],
        "bundles": bundle_choices([row.model for row in every]),
        "bundle_rows": bundle_rows(every),
        "part_titles": [part.title for part in PARTS],
    }
    return render(request, "console/models/models.html", context)


@action(Role.ADMIN, Model, page="console:models", unchanged="Bounds of {row} stay")
@transaction.atomic
def bounds(form: ActionForm, model: Model) -> str:
    """Change the least and the most instances of a model's deployments: all that the form changes, or nothing."""
    rows = Deployment.objects.filter(model=model, active=True).select_related("region", "gpu_type")
    changed = sum(_bounds_changed(row, form) for row in rows.select_for_update(of=("self",)))
    return f"Bounds of {model}: {changed} changed." if changed else f"Bounds of {model} are as they were."


@action(Role.ADMIN, Model, page="console:models", unchanged="{row} keeps its fallback")
@transaction.atomic
def fallback(form: ActionForm, model: Model) -> str:
    """Change which model serves the requests that this one does not, and after which wait."""
    given = form.fields.get("fallback_wait_s", "").strip()
    try:
        wait_s = float(given) if given else None
    except ValueError:
        raise ValidationError(f"{given!r} is no number of seconds.") from None
    name = form.fields.get("fallback", "") or None
    values = {"fallback": name, "fallback_wait_s": wait_s if name else None}
    form.check(
        Model.objects.select_for_update().get(pk=model.pk),
        fields=values,
        given=f"{name} {given}".strip() if name else "none",
    )
    inventory.change(MODEL, model, values, form.user, form.reason)
    return f"{name} is the fallback of {model}." if name else f"{model} has no fallback."


def _bounds_changed(row: Deployment, form: ActionForm) -> bool:
    given = {name: number(form.fields.get(f"{name}-{row.pk}", "")) for name in BOUNDS}
    values = {name: value for name, value in given.items() if value is not None and value != getattr(row, name)}
    if values:
        form.check(
            row, fields=values, given=f"{', '.join(f'{value} for {name}' for name, value in values.items())} of {row}"
        )
        inventory.change(DEPLOYMENT, row, values, form.user, form.reason)
    return bool(values)


@action(Role.OPERATOR, Model, page="console:models", unchanged="{row} keeps its policy")
@transaction.atomic
def parts(form: ActionForm, model: Model) -> str:
    """Give one model other parts than it has; those that the form does not name stay."""
    values = {part.name: str(form.fields[part.name]) for part in PARTS if part.name in form.fields}
    form.check(*bundles.rows_of(Model.objects.select_for_update().get(pk=model.pk)), fields=values)
    made = services.switch_parts(model, values, form.user, form.reason)
    return f"The policy of {model}: {made.title}; the next decisions follow it."


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
