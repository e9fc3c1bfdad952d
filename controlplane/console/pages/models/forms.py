"""Forms that change one model: bounds, fallback, shard, its policy by bundle or by parts, and how it is scaled."""

import json

from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponseBase

from controlplane.accounts.models import Role
from controlplane.console.actions import ActionForm, action
from controlplane.fleet.inventory import services as inventory
from controlplane.fleet.inventory.kinds import DEPLOYMENT, MODEL, SCHEDULE
from controlplane.fleet.models import Deployment, Model
from controlplane.planning import bundles, services
from controlplane.planning.models import PolicyMode
from controlplane.planning.parts import PARTS
from controlplane.planning.titles import title_of
from controlplane.resources.filters import number

BOUNDS = ("min_instances", "max_instances")


@transaction.atomic
def bounds(form: ActionForm, model: Model) -> str:
    """Change the least and the most instances of a model's deployments: all that the form changes, or nothing."""
    rows = Deployment.objects.filter(model=model, active=True).select_related("region", "gpu_type")
    changed = sum(_bounds_changed(row, form) for row in rows.select_for_update(of=("self",)))
    return f"Bounds of {model}: {changed} changed." if changed else f"Bounds of {model} are as they were."


def _bounds_changed(row: Deployment, form: ActionForm) -> bool:
    given = {name: number(form.fields.get(f"{name}-{row.pk}", "")) for name in BOUNDS}
    values = {name: value for name, value in given.items() if value is not None and value != getattr(row, name)}
    if values:
        words = ", ".join(f"{value} for {name}" for name, value in values.items())
        form.check(row, fields=values, given=f"{words} of {row}")
        inventory.change(DEPLOYMENT, row, values, form.user, form.reason)
    return bool(values)


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
    row = Model.objects.select_for_update().get(pk=model.pk)
    form.check(row, fields=values, given=f"{name} {given}".strip() if name else "none")
    inventory.change(MODEL, model, values, form.user, form.reason)
    return f"{name} is the fallback of {model}." if name else f"{model} has no fallback."


@transaction.atomic
def shard(form: ActionForm, model: Model) -> str:
    """Deal one model to another shard, with those that are in one with it."""
    given = number(form.fields.get("shard", ""))
    if given is None:
        raise ValidationError("Name the number of a shard.")
    form.check(Model.objects.select_for_update().get(pk=model.pk), fields=("shard",), given=str(given))
    dealt = [str(row) for row in inventory.deal(model, given, form.user, form.reason)]
    return f"{' and '.join(dealt)}: shard {given} from now on."


@transaction.atomic
def unschedule(form: ActionForm, model: Model) -> str:
    """Delete one of the schedules of a model."""
    row = model.schedules.filter(name=form.fields.get("schedule", "")).first()
    if row is None:
        raise ValidationError("That schedule is gone.")
    inventory.delete(SCHEDULE, row, form.user, form.reason)
    return f"The schedule {row} of {model} is deleted."


@transaction.atomic
def parts(form: ActionForm, model: Model) -> str:
    """Give one model other parts than it has; those that the form does not name stay."""
    values = {part.name: str(form.fields[part.name]) for part in PARTS if part.name in form.fields}
    form.check(*bundles.rows_of(Model.objects.select_for_update().get(pk=model.pk)), fields=values)
    made = services.switch_parts(model, values, form.user, form.reason)
    return f"The policy of {model}: {made.title}; the next decisions follow it."


@transaction.atomic
def bundle(form: ActionForm, model: Model) -> str:
    """Give one model the values of a policy bundle."""
    form.check(*bundles.rows_of(Model.objects.select_for_update().get(pk=model.pk)), fields=bundles.SET)
    made = services.switch_bundle(model, form.fields.get("bundle", ""), form.user, form.reason)
    return f"{model} now uses {made.title}."


@transaction.atomic
def policy(form: ActionForm, model: Model) -> str:
    """Set the strategy and mode of one model."""
    given = form.fields
    rows = bundles.rows_of(Model.objects.select_for_update().get(pk=model.pk))
    form.check(*rows, fields=("strategy", "mode", "parameters"))
    try:
        parameters = json.loads(given.get("parameters", "").strip() or "{}")
    except ValueError as error:
        raise ValidationError(f"The parameters are not JSON ({error}).") from error
    strategy, mode = given.get("strategy", ""), given.get("mode", "")
    row = services.set_policy(model, strategy, mode, parameters, form.user, form.reason)
    mode = PolicyMode(row.mode).label.partition(":")[0].lower()
    return f"{model} is scaled by {title_of(row.strategy)}, mode {mode}, from now on."


FORMS = {
    each.__name__: action(least, Model, page=page, unchanged="{row} is unchanged")(each)
    for each, least, page in (
        (bounds, Role.ADMIN, "console:models"),
        (fallback, Role.ADMIN, "console:models"),
        (parts, Role.OPERATOR, "console:models"),
        (unschedule, Role.ADMIN, "console:calendar"),
        (shard, Role.OPERATOR, "console:models"),
        (bundle, Role.OPERATOR, "console:models"),
        (policy, Role.OPERATOR, "console:scaling"),
    )
}


def change(request: HttpRequest, pk: int, form: str) -> HttpResponseBase:
    """`POST /models/PK/FORM/`: one of `FORMS`."""
    if form not in FORMS:
        raise Http404(f"A model has no form {form}.")
    return FORMS[form](request, pk=pk)
