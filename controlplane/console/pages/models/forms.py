"""Forms that change one model: bounds, engine settings, fallback, shared names, shard, policy, and how it is scaled."""

import json
from collections.abc import Callable
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponseBase
from django.urls import reverse

from controlplane.accounts.models import Role
from controlplane.console.actions import ActionForm, Page, action
from controlplane.fleet.inventory import services as inventory
from controlplane.fleet.inventory.kinds import DEPLOYMENT, MODEL, SCHEDULE
from controlplane.fleet.models import Deployment, Model, Rollout
from controlplane.fleet.rollouts import services as rollouts
from controlplane.lengths import training
from controlplane.planning import bundles, services
from controlplane.planning.models import PolicyMode
from controlplane.planning.parts import PARTS
from controlplane.planning.titles import title_of
from controlplane.resources.filters import number

BOUNDS = ("min_instances", "max_instances")
ENGINE = (
    *("tensor_parallel", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_loras"),
    *("max_cpu_loras", "kv_offload_gib", "vllm_args"),
)
"""Columns of a deployment that its instances are started with."""


def page_of(model: Model) -> str:
    return reverse("console:model", args=[model.name])


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
def engine(form: ActionForm, model: Model) -> str:
    """Change engine settings of one deployment and, where asked for, roll them out to its instances."""
    rows = Deployment.objects.select_related("model", "region", "gpu_type").filter(model=model, active=True)
    row = rows.select_for_update(of=("self",)).filter(pk=number(form.fields.get("deployment", "")) or 0).first()
    if row is None:
        raise ValidationError(f"That deployment of {model} is gone.")
    given = {name: _value(Deployment, name, str(form.fields[name])) for name in ENGINE if name in form.fields}
    values = {name: value for name, value in given.items() if value != getattr(row, name)}
    if not values:
        return f"The engine settings of {row} are as they were."
    form.check(
        row, fields=values, given=f"{', '.join(f'{value} for {name}' for name, value in values.items())} of {row}"
    )
    row = inventory.change(DEPLOYMENT, row, values, form.user, form.reason)
    if "roll_out" not in form.fields or not rollouts.read_fleet(row).stale:
        return f"The engine settings of {row} are changed; instances take them when they start."
    bake_s = _value(Rollout, "bake_s", form.fields.get("bake_s") or "60")
    rollouts.start(row, form.user, form.reason, bake_s=bake_s, auto_back="auto_back" in form.fields)
    return f"The engine settings of {row} are changed, and the rollout begins within seconds."


def _value(of: Any, name: str, text: str) -> Any:
    column = of._meta.get_field(name)
    try:
        return column.clean(text.strip(), None)
    except ValidationError as error:
        raise ValidationError(f"{str(column.verbose_name).capitalize()}: {' '.join(error.messages)}") from None


@transaction.atomic
def share(form: ActionForm, model: Model) -> str:
    """Share the requests for a name among the targets that the form gives as `target weight, target weight`."""
    name, weights = form.fields.get("name", "").strip(), {}
    for each in filter(None, map(str.strip, form.fields.get("targets", "").split(","))):
        target, _, weight = each.rpartition(" ")
        try:
            weights[target.strip()] = float(weight)
        except ValueError:
            raise ValidationError(f"{each!r} is no target with a weight, such as {model} 95.") from None
    inventory.share(name, weights, form.user, form.reason)
    if not weights:
        return f"{name} is no longer shared."
    return f"{name} is shared among {', '.join(weights)}; requests follow within a second."


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


OFFERED: tuple[tuple[Callable[..., str], Role, Page], ...] = (
    *((each, Role.ADMIN, page_of) for each in (bounds, engine, fallback, share, unschedule)),
    *((each, Role.OPERATOR, page_of) for each in (parts, shard, bundle)),
    (policy, Role.OPERATOR, "console:scaling"),
)
FORMS = {
    each.__name__: action(least, Model, page=page, unchanged="{row} is unchanged")(each)
    for each, least, page in OFFERED
}


def change(request: HttpRequest, pk: int, form: str) -> HttpResponseBase:
    """`POST /models/PK/FORM/`: one of `FORMS`."""
    if form not in FORMS:
        raise Http404(f"A model has no form {form}.")
    return FORMS[form](request, pk=pk)


@action(Role.OPERATOR, page="console:models", unchanged="Nothing was changed")
def train(form: ActionForm) -> str:
    """Train a new version of a kind of length model from the samples there are, now."""
    kind = form.fields.get("kind", training.USUAL)
    training.ask(form.user, form.reason, kind)
    return f"A worker trains a new version of {kind}. It predicts in shadow first; an event says why if it fails."
