"""A future that becomes the plan: its changes are applied to the models, and its instances are proposed.

Policies and bounds change at once, if the user may change them. Instances are proposals (plans with the status advice) that
an operator approves as any other plan. One event records everything, with what was before, beside those of each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
from django.db import transaction
from django.utils import timezone

from controlplane.accounts.models import Role, User
from controlplane.events.services import record
from controlplane.fleet.inventory import services as rows_of_fleet
from controlplane.fleet.inventory.kinds import DEPLOYMENT
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Deployment, Model
from controlplane.fleet.models.hardware import region_title
from controlplane.planning import bundles, services
from controlplane.planning.models import WHAT_IF, ScalingPlan
from controlplane.planning.plans import inventory
from controlplane.simulation.whatif import selectors
from controlplane.simulation.whatif.changes.applying import parsed
from controlplane.simulation.whatif.changes.policies import PolicyChange
from controlplane.simulation.whatif.changes.supply import BoundsChange
from controlplane.simulation.whatif.models import Future, WhatIf
from controlplane.simulation.whatif.services import MAX_SEEDS
from scheduling.bundles import BUNDLES

PARTS: Final = {
    "routing": "routing_policy",
    "ordering": "ordering_policy",
    "strategy": "strategy",
    "forecaster": "FORECASTER",
    "demand_level": "PLAN_DEMAND",
    "release": "NIW_RELEASE",
}
"""Column of each part of a change of policy."""
MORE_SEEDS: Final = 5
"""To add where no number of repetitions is known to decide."""
SOON_S: Final = 900.0
"""Instances are proposed that the future has ready this many seconds from now."""
COMPARED: Final = ("routing", "ordering", "strategy", "forecaster", "min_instances", "max_instances")
"""Keys of an endpoint that are compared with the start."""
VALID: Final = timedelta(hours=1)


@dataclass(slots=True)
class PlanChanges:
    """Values by model and bounds by deployment to write, and assumptions of the future."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    bounds: dict[int, dict[str, int]] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)


def wanted(row: WhatIf, future: Future) -> PlanChanges:
    """Return the changes of the fleet that *future* needs. Raise ActionError naming missing parts of the fleet."""
    made = PlanChanges()
    for change, words in zip(parsed(future.changes), selectors.changes_in_words(row, future), strict=True):
        match change:
            case PolicyChange():
                for model in change.models or list(row.start["scenario"]["models"]):
                    made.values.setdefault(model, {}).update(_values(change))
            case BoundsChange():
                for deployment in _deployments(change):
                    given = {"min_instances": change.min_instances, "max_instances": change.max_instances}
                    own = made.bounds.setdefault(deployment.pk, {})
                    own.update({name: value for name, value in given.items() if value is not None})
            case _:
                made.assumed.append(words)
    return made


def check_rights(wanted: PlanChanges, actor: User) -> None:
    """Raise ActionError if *actor* may not make the changes."""
    if wanted.bounds and actor.fleet_role() != Role.ADMIN:
        raise ActionError("Bounds are changed by an admin.")


def needs_of(one: dict[str, Any], what: str) -> str:
    """Say how many repetitions would make sure *what* (delta, verdict) is, of the future *one* of a comparison."""
    if one["seeds_done"] < 2:
        return "one repetition decides nothing"
    needed = one["decides"][what]
    return f"{MAX_SEEDS} repetitions would not decide" if needed is None else f"{needed} repetitions would decide"


def more_of(futures: Sequence[dict[str, Any]]) -> int:
    """Return how many repetitions to add to a comparison's *futures*: those that decide what can be decided, else a few."""
    seeds: int = futures[0]["seeds"]
    needed: int = max((each for one in futures for each in one["decides"].values() if each is not None), default=0)
    return needed - seeds if needed > seeds else min(MORE_SEEDS, MAX_SEEDS - seeds)


def review(row: WhatIf, one: dict[str, Any], actor: User) -> dict[str, Any]:
    """Return what becomes of the fleet if the future *one* of a comparison is the plan, why it cannot be, else what speaks
    against it, and the doubt that has to be confirmed."""
    future = row.futures.get(letter=one["letter"])
    why = "" if one["seeds_done"] == one["seeds"] else "It can become the plan once all its repetitions are done."
    why = why if one["changes"] else "As now needs no plan."
    if row.start.get("kind") != "fleet":
        why = "Only a what-if that began from the live fleet can become a plan."
    try:
        asked = wanted(row, future)
        check_rights(asked, actor)
    except ActionError as refusal:
        return {"becomes": [("In it", text) for text in one["changes"]], "why_not": why or str(refusal)}
    becomes = [("Changes", text) for text in one["changes"] if text not in asked.assumed]
    becomes += [("Assumed", text) for text in [*selectors.edits_in_words(row), *asked.assumed]]
    if why:
        return {"becomes": becomes, "why_not": why}
    becomes.append(("Instances", "proposed as plans, which an operator approves"))
    return {"becomes": becomes, "can_become": True, "warnings": warnings(row, future), "doubt": doubt_of(one)}


def _values(change: PolicyChange) -> dict[str, Any]:
    if change.part == "bundle":
        return bundles.values_of(BUNDLES[change.value])
    values: dict[str, Any] = {PARTS[change.part]: change.value}
    return values | ({"parameters": dict(change.parameters)} if change.part == "strategy" else {})


def _deployments(change: BoundsChange) -> list[Deployment]:
    query = Deployment.objects.filter(active=True, model__name=change.model)
    if change.region:
        query = query.filter(region__name=change.region)
    rows = list(query.select_related("region"))
    where = f" in {change.region}" if change.region else ""
    if not rows:
        raise ActionError(f"{change.model} has no deployment{where}.")
    regions = [each.region.name for each in rows]
    if len(set(regions)) < len(regions):
        raise ActionError(f"{change.model} has several deployments{where}: change their bounds on the Models page.")
    return rows


def warnings(row: WhatIf, future: Future) -> list[str]:
    """Describe what speaks against *future* as the plan: changes of the fleet since its start, and a missed target."""
    now, then = (_endpoints(one) for one in (selectors.present_scenario(), row.start["scenario"]))
    texts = []
    for place, before in then.items():
        where = f"{place[0]} in {region_title(place[1])}"
        after = now.get(place)
        if after is None:
            texts.append(f"{where} is no longer served")
            continue
        texts += [
            f"{where}: {name.replace('_', ' ')} is {after.get(name)}, and was {value}"
            for name, value in before.items()
            if after.get(name) != value
        ]
    one = next((each for each in selectors.comparison(row)["futures"] if each["letter"] == future.letter), None)
    if one and one["unranked"]:
        texts.append(f"{future.letter} is not ranked. {one['unranked']}")
    if one and (doubt := doubt_of(one)):
        texts.append(f"{future.letter}: {doubt}")
    return texts


def doubt_of(one: dict[str, Any]) -> str:
    """Say how seldom the future *one*, of a comparison, keeps its promises; empty if it does in half of its repetitions."""
    if one["promised"] <= 2 * one["holds"]:
        return ""
    broken = f" ({', '.join(one['breaks'])})" if one["breaks"] else ""
    return f"It keeps its promises in {one['holds']} of {one['promised']} repetitions{broken}"


def _endpoints(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return policies, bounds and the number of instances by model and region."""
    places: dict[tuple[str, str], dict[str, Any]] = {}
    for group in values["fleet"]:
        for region in group["regions"]:
            own = places.setdefault((group["model"], region), {"instances": 0})
            own["instances"] += group["instances"]
    for one in values.get("endpoints", []):
        if (known := places.get((one["model"], one.get("region")))) is not None:
            known.update({name: one[name] for name in COMPARED if name in one})
    return places


@transaction.atomic
def make_plan(row: WhatIf, letter: str, actor: User, note: str = "", *, anyway: bool = False) -> WhatIf:
    """Make the future *letter* of *row* the plan: one event records what was before, by which an operator can undo it.

    Raises ActionError if it is not done, if it breaks its promises in most repetitions and that is not wanted *anyway*, if a
    model is no longer served, or if it changes bounds and *actor* may not; ValidationError as the services of planning and
    of the inventory.
    """
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    future = row.futures.filter(letter=letter).first()
    if future is None or future.runs.filter(state="done").count() < row.seeds:
        raise ActionError(f"Future {letter} is not done.")
    one = next(each for each in selectors.comparison(row)["futures"] if each["letter"] == letter)
    if not anyway and (doubt := doubt_of(one)):
        raise ActionError(f"{doubt}. It becomes the plan only if that is confirmed (`anyway`).")
    asked, warned = wanted(row, future), warnings(row, future)
    check_rights(asked, actor)
    before: dict[str, Any] = {"values": {}, "bounds": {}}
    for name, values in asked.values.items():
        model = Model.objects.filter(name=name).first()
        if model is None:
            raise ActionError(f"{name} is no longer served.")
        before["values"][name] = services.give(model, values, actor, note)
    for pk, bounds in asked.bounds.items():
        before["bounds"][str(pk)] = _bound(pk, bounds, actor, note)
    plans = _proposals(row, future)
    record(
        "what_if.made_the_plan",
        row,
        actor=actor,
        before=before,
        after={"values": asked.values, "bounds": {str(pk): each for pk, each in asked.bounds.items()}},
        reason=note,
        inputs={
            "future": f"{letter} {future.name}",
            "changes": selectors.changes_in_words(row, future),
            "plans": plans,
            "assumed": asked.assumed,
            "warnings": warned,
        },
    )
    row.plan = {
        "letter": letter, "name": future.name, "at": timezone.now().isoformat(), "by": actor.get_username(), "note": note,
        "plans": plans,
    }  # fmt: skip
    row.save(update_fields=["plan"])
    return row


def _bound(pk: int, bounds: dict[str, int], actor: User, note: str) -> dict[str, int]:
    """Set *bounds* of a deployment; return the previous ones."""
    deployment = Deployment.objects.get(pk=pk)
    had = {name: getattr(deployment, name) for name in bounds}
    rows_of_fleet.change(DEPLOYMENT, deployment, bounds, actor, note)
    return had


def _proposals(row: WhatIf, future: Future) -> list[int]:
    """Create plans for models whose instance counts in *future* soon differ from the present; return their keys."""
    fleet = inventory.read(set(row.start["scenario"]["models"]))
    series = selectors.curves(row).get(future.letter)
    if series is None:
        return []
    keys, now = [], timezone.now()
    passed_s = (now - datetime.fromisoformat(row.start["at"])).total_seconds()
    soon = np.array(series["t_s"]) <= max(passed_s, 0.0) + SOON_S
    for model in sorted({place[0] for place in fleet.deployments}):
        targets, usd = [], {"present": 0.0, "target": 0.0}
        for place, deployment in fleet.deployments.items():
            ready = series["ready"].get(f"{model} {place[1]}")
            alone = sum(each[:2] == place[:2] for each in fleet.deployments) == 1
            if place[0] != model or ready is None or not alone:
                continue
            present = fleet.present[place]
            most, least = deployment.max_instances, deployment.min_instances
            target = min(most, max(least, round(float(np.array(ready)[soon][-1]))))
            price = float(deployment.gpu_type.on_demand_usd_per_hour) * deployment.tensor_parallel
            usd["present"] += present * price
            usd["target"] += target * price
            reason = f"{future.letter} {future.name} of what-if {row.pk} has as many ready"
            asked = {"region": place[1], "gpu_type": place[2], "present": present, "target": target}
            targets.append({**asked, "demand_tokens_per_s": 0.0, "reason": reason})
        if all(each["present"] == each["target"] for each in targets):
            continue
        plan = ScalingPlan.objects.create(
            model=Model.objects.get(name=model), made_at=now, valid_until=now + VALID, strategy=WHAT_IF,
            inputs={"what_if": row.pk, "future": future.letter}, targets=targets, solver="what-if",
            cost_usd_per_hour_before=usd["present"], cost_usd_per_hour_after=usd["target"],
            note=f"What-if {row.pk}: {row.title}"[:255],
        )  # fmt: skip
        keys.append(plan.pk)
    return keys
