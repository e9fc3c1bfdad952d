"""A future that becomes the plan: its changes are applied to the models, and its instances are proposed.

Policies and bounds change at once, if the user may change them. Instances are proposals (plans with the status advice) that
an operator approves as any other plan. Everything is one event, and one `undo` reverts it.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
from django.db import transaction
from django.db.models import Sum
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from controlplane.accounts.models import Role, User
from controlplane.events.services import record
from controlplane.fleet.inventory import services as rows_of_fleet
from controlplane.fleet.inventory.kinds import DEPLOYMENT
from controlplane.fleet.lifecycle.states import COMING, ActionError, InstanceState
from controlplane.fleet.models import Deployment, Model
from controlplane.gateway.models import LedgerRow, MinuteRow
from controlplane.planning import bundles, services
from controlplane.planning import selectors as planning
from controlplane.planning.execution import plan_rollout
from controlplane.planning.models import WHAT_IF, PlanStatus, ScalingPlan
from controlplane.planning.plans import inventory
from controlplane.simulation.whatif import selectors
from controlplane.simulation.whatif.changes.applying import parsed
from controlplane.simulation.whatif.changes.base import region_title
from controlplane.simulation.whatif.changes.policies import PolicyChange
from controlplane.simulation.whatif.changes.supply import BoundsChange
from controlplane.simulation.whatif.models import Future, WhatIf
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
SOON_S: Final = 900.0
"""Instances are proposed that the future has ready this many seconds from now."""
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


def obstacles(row: WhatIf, future: Future) -> list[str]:
    """Describe changed conditions of *future*; empty if it can become the plan."""
    now = selectors.present_scenario()
    then, texts = row.start["scenario"], list[str]()
    for model in then["models"]:
        if model not in now["models"]:
            texts.append(f"{model} is no longer served")
    for group in then["fleet"]:
        own = [each for each in now["fleet"] if each["model"] == group["model"]]
        for region in group["regions"]:
            here = [each for each in own if region in each["regions"] and each["gpu"] == group["gpu"]]
            if own and not here:
                texts.append(f"{group['model']} has no deployment on {group['gpu']} in {region} now")
            elif own and group["instances"] and not any(each["instances"] for each in here):
                texts.append(f"no instance of {group['model']} is left in {region}")
    texts += _policies_changed(then, now)
    return list(dict.fromkeys(texts))


def _policies_changed(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe policies and bounds of endpoints that changed since the what-if began."""
    known = ("routing", "ordering", "strategy", "forecaster", "min_instances", "max_instances")
    before, after = (
        {(each["model"], each.get("region")): each for each in one.get("endpoints", [])} for one in (then, now)
    )
    return [
        f"{name.replace('_', ' ')} of {model} in {region} is {after[model, region][name]}, and was {old[name]}"
        for (model, region), old in before.items()
        if (model, region) in after
        for name in known
        if name in old and name in after[model, region] and old[name] != after[model, region][name]
    ]


def changed_since(row: WhatIf) -> list[str]:
    """Describe instance counts that differ from the start of *row*; a plan need not fail by them."""
    now, then = (_ready(one) for one in (selectors.present_scenario(), row.start["scenario"]))
    return [
        f"{model} in {region_title(region)}: {now.get((model, region), 0)} instead of {count} instance{'s' * (count != 1)}"
        for (model, region), count in then.items()
        if now.get((model, region), 0) != count
    ]


def _ready(values: dict[str, Any]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for group in values["fleet"]:
        for region in group["regions"]:
            counts[group["model"], region] = counts.get((group["model"], region), 0) + group["instances"]
    return counts


def misses_target(row: WhatIf, letter: str) -> str:
    """Say that the future *letter* misses its SLO target in every seed; empty if it holds in any."""
    one = next((each for each in selectors.comparison(row)["futures"] if each["letter"] == letter), None)
    if one is None or one["holds"] or not one["seeds_done"]:
        return ""
    seeds = f"any of its {one['seeds_done']} seeds" if one["seeds_done"] > 1 else "its only seed"
    return f"{letter} does not keep {100 * row.slo_target:g}% of requests in time in {seeds}."


@transaction.atomic
def make_plan(row: WhatIf, letter: str, actor: User, note: str = "", *, confirmed: bool = False) -> WhatIf:
    """Make the future *letter* of *row* the plan; if it misses its target in every seed, only when *confirmed*.

    Raises ActionError if it is not done or not confirmed, if another of its futures is the plan, if its conditions have
    changed, or if it changes bounds and *actor* may not; ValidationError as the services of planning and of the
    inventory.
    """
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    future = row.futures.filter(letter=letter).first()
    if future is None or future.runs.filter(state="done").count() < row.seeds:
        raise ActionError(f"Future {letter} is not done.")
    if row.plan and not row.plan.get("undone_at"):
        raise ActionError(f"{row.plan['letter']} is the plan already. Undo it first.")
    if (misses := misses_target(row, letter)) and not confirmed:
        raise ActionError(f"{misses} Confirm to make it the plan anyway.")
    if gone := obstacles(row, future):
        raise ActionError(f"Since its start, this has changed: {'; '.join(gone)}. Run it again.")
    asked = wanted(row, future)
    if asked.bounds and actor.fleet_role() != Role.ADMIN:
        raise ActionError("Bounds are changed by an admin.")
    before: dict[str, Any] = {"values": {}, "bounds": {}}
    for name, values in asked.values.items():
        before["values"][name] = services.give(Model.objects.get(name=name), values, actor)
    for pk, bounds in asked.bounds.items():
        before["bounds"][str(pk)] = _bound(pk, bounds, actor, note)
    plans = _proposals(row, future)
    words = selectors.changes_in_words(row, future)
    event = record(
        "what_if.made_the_plan",
        row,
        actor=actor,
        before=before,
        after={"values": asked.values, "bounds": {str(pk): each for pk, each in asked.bounds.items()}},
        reason=note,
        inputs={
            "future": f"{letter} {future.name}",
            "changes": words,
            "plans": plans,
            "assumed": asked.assumed,
            "misses": misses,
        },
    )
    row.chosen = future
    row.plan = {
        "letter": letter, "name": future.name, "at": timezone.now().isoformat(), "by": actor.get_username(), "note": note,
        "changes": words, "assumed": asked.assumed, "before": before, "plans": plans, "event": event.pk,
    }  # fmt: skip
    row.save(update_fields=["chosen", "plan"])
    return row


@transaction.atomic
def undo(row: WhatIf, actor: User, note: str = "") -> WhatIf:
    """Revert the changes of `make_plan`, reject its proposals, and stop its approved plans.

    Instances that were moved stay as they are. Raises ActionError if *row* is not the plan.
    """
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    if not row.plan or row.plan.get("undone_at"):
        raise ActionError("It is not the plan.")
    before = row.plan["before"]
    if before["bounds"] and actor.fleet_role() != Role.ADMIN:
        raise ActionError("Bounds are changed by an admin.")
    for name, values in before["values"].items():
        services.give(Model.objects.get(name=name), values, actor)
    for pk, bounds in before["bounds"].items():
        _bound(int(pk), bounds, actor, note)
    plans, now = ScalingPlan.objects.filter(pk__in=row.plan["plans"]), timezone.now()
    for approved in plans.filter(status__in=plan_rollout.TO_CARRY_OUT).select_related("model"):
        plan_rollout.end(approved, PlanStatus.SUPERSEDED, now)
    waiting = plans.filter(status=PlanStatus.ADVICE)
    waiting.update(status=PlanStatus.REJECTED, decided_by=actor.get_username(), decided_at=now)
    record("what_if.undone", row, actor=actor, after=before, reason=note, inputs={"event": row.plan["event"]})
    row.plan = {**row.plan, "undone_at": timezone.now().isoformat()}
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
    series = selectors.curves(row).get(future.letter, {}).get("series")
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


MOST_ROWS: Final = 20_000
"""Maximum newest requests that measure the present."""


def followed(row: WhatIf) -> dict[str, Any] | None:
    """Return the plan's prediction and the measurement since *row* became the plan; None if it is not.

    Keys: since, until, over (whether the simulated time has passed), assumed (assumptions of the future beyond the
    plan), requests, slo_met, ttft_p95_ms and both as predicted for the whole horizon, instances (by model and region:
    began, predicted for this time, ready, starting, draining), proposed plans, and slo_met of each minute. Predictions
    are None for a future that assumed other demand, a loss or other prices.
    """
    if not row.plan or row.plan.get("undone_at"):
        return None
    since, began = parse_datetime(row.plan["at"]), parse_datetime(str(row.start["at"]))
    assert since is not None
    assert began is not None
    now, end = timezone.now(), began + timedelta(seconds=row.horizon_s)
    until = max(since, min(now, end))
    models = list(row.start["scenario"]["models"])
    asked = LedgerRow.objects.filter(arrived_at__gte=since, arrived_at__lt=until, model__in=models)
    came = list(asked.order_by("-arrived_at").values_list("slo_met", "ttft_ms")[:MOST_ROWS])
    judged = [met for met, _ in came if met is not None]
    ttft_ms = [value for _, value in came if value is not None]
    rows = selectors.comparison(row)["futures"]
    future = next(each for each in rows if each["letter"] == row.plan["letter"])
    assumed = [*row.plan["assumed"], *selectors.edits_in_words(row)]

    def predicted(name: str) -> float | None:
        return None if assumed or future[name] is None else float(future[name]["mean"])

    minutes = MinuteRow.objects.filter(minute__gte=since, minute__lt=until, model__in=models).order_by("minute")
    sums = minutes.values("minute").annotate(met=Sum("slo_met"), judged=Sum("slo_judged"))
    return {
        "since": since,
        "until": until,
        "over": now >= end,
        "assumed": assumed,
        "requests": len(came),
        "slo_met": sum(judged) / len(judged) if judged else None,
        "predicted_slo_met": predicted("slo_met"),
        "ttft_p95_ms": float(np.percentile(ttft_ms, 95)) if ttft_ms else None,
        "predicted_ttft_p95_ms": predicted("ttft_p95_ms"),
        "instances": _instances(row, (until - began).total_seconds(), not assumed),
        "plans": _plans(row),
        "minutes": [{"at": each["minute"], "slo_met": each["met"] / each["judged"]} for each in sums if each["judged"]],
    }


def ready_since(row: WhatIf, region: str = "") -> list[tuple[datetime, int]]:
    """Return ready instances of the models of *row*, in *region* or in all, as steps from its start to its end."""
    began = parse_datetime(str(row.start["at"]))
    assert began is not None
    until = min(timezone.now(), began + timedelta(seconds=row.horizon_s))
    count: dict[str, int] = {}
    changes = [
        (at, model, sum(ready.values()))
        for model in row.start["scenario"]["models"]
        for at, ready in planning.ready_over_time(model, region, began)
    ]
    steps: dict[datetime, int] = {}
    for at, model, ready in sorted(changes, key=lambda each: each[0]):
        if at > until:
            break
        count[model] = ready
        steps[at] = sum(count.values())
    return [*steps.items(), (until, sum(count.values()))]


def _instances(row: WhatIf, after_s: float, comparable: bool) -> list[dict[str, Any]]:
    series = selectors.curves(row)[row.plan["letter"]]["series"]
    at = max(0, int(np.searchsorted(series["t_s"], after_s, side="right")) - 1)
    there: dict[tuple[str, str], Counter[str]] = {}
    for (model, region, _), states in planning.instances_by_place().items():
        there.setdefault((model, region), Counter()).update(states)
    return [
        {
            "model": model,
            "region": region,
            "began": ready[0],
            "predicted": ready[at] if comparable else None,
            "ready": states[InstanceState.READY],
            "starting": sum(states[state] for state in COMING),
            "draining": states[InstanceState.DRAINING],
        }
        for key, ready in sorted(series["ready"].items())
        for model, _, region in [key.rpartition(" ")]
        for states in [there.get((model, region), Counter())]
    ]


def _plans(row: WhatIf) -> list[dict[str, Any]]:
    rows = ScalingPlan.objects.filter(pk__in=row.plan["plans"]).select_related("model").order_by("pk")
    return [
        {
            "id": each.pk,
            "model": each.model.name,
            "status": each.status,
            "targets": each.targets,
            "moves": each.moves.count(),
        }
        for each in rows
    ]
