"""Planning writes: operators' decisions about plans and policies.

Approval is stored as a row, which the scaling loop reads within seconds. Planners' writes are in `forecasts`, `plans` and
`execution` (approved plans, strategies between plans, instances).
"""

from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.audit import record_change, record_creation, snapshot
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Model
from controlplane.planning import bundles, parts, selectors
from controlplane.planning.execution import executor, plan_rollout
from controlplane.planning.models import WHAT_IF, PlanStatus, ScalingPlan, ScalingPolicy
from controlplane.planning.plans import load_now
from controlplane.planning.plans.load_now import LoadNow
from controlplane.tuning import services as settings
from scheduling.bundles import BUNDLES

UNDO_FOR = timedelta(hours=1)
"""Time in which instances that are missing are started again."""


@transaction.atomic
def approve(plan: ScalingPlan, actor: User, reason: str = "") -> ScalingPlan:
    """Approve *plan* for the scaling loop to carry out. Raises ActionError unless it is valid advice.

    The model's other unfinished plans are superseded.
    """
    row = _to_decide(plan, "approved")
    others = ScalingPlan.objects.filter(model=row.model, status__in=plan_rollout.TO_CARRY_OUT)
    for old in others.select_related("model"):
        plan_rollout.end(old, PlanStatus.SUPERSEDED, timezone.now())
    return _decide(plan, row, PlanStatus.APPROVED, actor, reason)


@transaction.atomic
def reject(plan: ScalingPlan, actor: User, reason: str = "") -> ScalingPlan:
    """Reject *plan*. Raises ActionError unless it is valid advice."""
    return _decide(plan, _to_decide(plan, "rejected"), PlanStatus.REJECTED, actor, reason)


@transaction.atomic
def undo(plan: ScalingPlan, actor: User, reason: str) -> str:
    """Move instances back to what there was before *plan*, by a plan that is approved at once.

    Raises ActionError unless *plan* is the last of its model that an operator approved, and if the load of now forbids it.
    """
    if not selectors.last_approved().filter(pk=plan.pk).exists():
        raise ActionError(f"Plan {plan.pk} is not the last that was approved for {plan.model}")
    back = [
        {name: row[name] for name in ("region", "gpu_type")}
        | {"present": executor.present(plan.model.name, row["region"], row["gpu_type"]), "target": row["present"]}
        | {"demand_tokens_per_s": row.get("demand_tokens_per_s"), "reason": f"as before plan {plan.pk}"}
        for row in plan.targets
    ]
    values = {"targets": back, "inputs": plan.inputs}
    now = timezone.now()
    if below := load_now.read(now).get(plan.model.name, LoadNow()).above(values):
        raise ActionError(below)
    made = ScalingPlan.objects.create(
        **values,
        model=plan.model,
        strategy=WHAT_IF,
        valid_until=now + UNDO_FOR,
        cost_usd_per_hour_before=plan.cost_usd_per_hour_after,
        cost_usd_per_hour_after=plan.cost_usd_per_hour_before,
        note=f"Undoes plan {plan.pk}",
    )
    approve(made, actor, reason)
    return f"Plan {made.pk} undoes plan {plan.pk}: instances of {plan.model} go back to what they were."


@transaction.atomic
def set_policy(
    model: Model, strategy: str, mode: str, parameters: dict[str, Any], actor: User | str, reason: str = ""
) -> ScalingPolicy:
    """Set the scaling policy of *model*. Raises ValidationError naming the invalid field.

    Plans waiting for approval under another strategy or mode are superseded.
    """
    Model.objects.select_for_update(no_key=True).get(pk=model.pk)  # of two who give it its first policy, one waits
    row = ScalingPolicy.objects.select_for_update().filter(model=model).first()
    before = snapshot(row) if row else None
    row = row or ScalingPolicy(model=model)
    row.strategy, row.mode, row.parameters = strategy, mode, parameters
    row.full_clean()
    row.save()
    if before is None:
        record_creation(row, actor, reason=reason)
    elif record_change(row, before, actor, reason=reason) is not None:
        supersede_open(model)
    return row


@transaction.atomic
def switch_bundle(model: Model, name: str, actor: User | str, reason: str = "") -> bundles.Present:
    """Apply the bundle *name* to *model*: its deployments' policies, strategy, length model and settings.

    One event records before and after. The mode is kept, or shadow without a policy. Plans of another strategy are
    superseded as by `set_policy`. Raises ValidationError for an unknown bundle.
    """
    if name not in BUNDLES:
        raise ValidationError({"bundle": f"There is no bundle {name!r}; there are {', '.join(BUNDLES)}."})
    bundle, model = BUNDLES[name], Model.objects.select_for_update().get(pk=model.pk)
    return _switched(bundles.present(model), bundles.values_of(bundle), actor, reason, name)


@transaction.atomic
def switch_parts(model: Model, values: dict[str, str], actor: User | str, reason: str = "") -> bundles.Present:
    """Set single parts of *model*, named as in `parts.PARTS`; others stay. One event records before and after.

    A new strategy has its own parameters, and supersedes plans like `set_policy`. Raises ValidationError naming the part.
    """
    model = Model.objects.select_for_update().get(pk=model.pk)
    before = bundles.present(model)
    for name, value in values.items():
        known = [choice.value for each in parts.PARTS if each.name == name for choice in each.choices()]
        if value not in known and value != before.values.get(name):
            there = f"there are {', '.join(filter(None, known))}" if known else "it is no part"
            raise ValidationError({name: f"There is no {name} {value!r}; {there}."})
    given: dict[str, Any] = dict(values)
    if given.get("strategy", before.values["strategy"]) != before.values["strategy"]:
        given["parameters"] = {}
    return _switched(before, given, actor, reason)


def _switched(
    before: bundles.Present, values: dict[str, Any], actor: User | str, reason: str, bundle: str = ""
) -> bundles.Present:
    """Apply *values*, those of *bundle* if it is named, to a locked model that is as *before*; record one event."""
    differences = before.changed(values)
    if not differences:
        return before
    _give(before, differences, actor)
    record(
        "model.bundle_switched" if bundle else "model.parts_switched",
        before.model,
        actor=actor,
        before=({"bundle": before.name} if bundle else {}) | {each.what: each.present for each in differences},
        after=({"bundle": bundle} if bundle else {}) | {each.what: each.bundled for each in differences},
        reason=reason,
    )
    return bundles.present(before.model)


@transaction.atomic
def give(model: Model, values: dict[str, Any], actor: User | str, reason: str = "") -> dict[str, Any]:
    """Apply *values*, named as in `bundles.values_of`, to *model* like `switch_parts`; return the previous ones.

    The strategy `none` deletes the policy. Raises ValidationError for invalid values.
    """
    before = bundles.present(Model.objects.select_for_update().get(pk=model.pk))
    _switched(before, values, actor, reason)
    return {each.what: each.present for each in before.changed(values)}


def _give(before: bundles.Present, differences: list[bundles.Difference], actor: User | str) -> None:
    """Write *differences* from *before* to the rows of its model, which is locked."""
    model, given = before.model, {each.what: each.bundled for each in differences}
    if policies := {name: given[name] for name in bundles.COLUMNS if name in given}:
        model.deployments.update(**policies)
    strategy = given.get("strategy", before.values["strategy"])
    if given.get("strategy") == bundles.NONE:
        ScalingPolicy.objects.filter(model=model).delete()
        supersede_open(model)
    elif strategy != bundles.NONE and given.keys() & {"strategy", "parameters"}:
        row = ScalingPolicy.objects.select_for_update().filter(model=model).first() or ScalingPolicy(model=model)
        if row.strategy != strategy:
            supersede_open(model)
        row.strategy, row.parameters = strategy, dict(given.get("parameters", before.values["parameters"]))
        row.full_clean()
        row.save()
    for setting in bundles.SETTINGS:
        if setting in given:
            settings.put(setting, given[setting], actor, model)


def supersede_open(model: Model) -> int:
    """Supersede plans of *model* that are undecided or followed by its strategy; return their number."""
    undecided = [PlanStatus.ADVICE, PlanStatus.SHADOW, PlanStatus.IN_FORCE]
    return ScalingPlan.objects.filter(model=model, status__in=undecided).update(status=PlanStatus.SUPERSEDED)


def _to_decide(plan: ScalingPlan, wanted: str) -> ScalingPlan:
    """Return the locked row of *plan*. Raises ActionError unless it is advice for a time that is not over."""
    row = ScalingPlan.objects.select_for_update(of=("self",)).select_related("model").get(pk=plan.pk)
    newer = selectors.replaced_by(row)
    instead = f" Plan {newer.pk} came in its place." if newer else ""
    if row.status != PlanStatus.ADVICE:
        status = row.get_status_display().lower()
        raise ActionError(f"Plan {row.pk} for {row.model} is {status} and cannot be {wanted}.{instead}")
    if row.valid_until <= timezone.now():
        until = f"{row.valid_until:%F %H:%M} UTC"
        raise ActionError(f"Plan {row.pk} for {row.model} was for the time until {until}.{instead}")
    return row


def _decide(plan: ScalingPlan, row: ScalingPlan, status: PlanStatus, actor: User, reason: str) -> ScalingPlan:
    before = row.status
    row.status, row.decided_by, row.decided_at = status, actor.get_username(), timezone.now()
    row.save(update_fields=["status", "decided_by", "decided_at"])
    record(
        f"plan.{status}",
        row,
        actor=actor,
        before={"status": before},
        after={"status": status, "round": str(row.round), "targets": row.targets},
        reason=reason,
    )
    plan.status, plan.decided_by, plan.decided_at = row.status, row.decided_by, row.decided_at
    return plan
