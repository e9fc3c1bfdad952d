"""A plan as the page shows it: what would change, what that costs and why, beside demand, use and service now."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from controlplane.planning import selectors
from controlplane.planning.execution import plan_rollout, strategies
from controlplane.planning.models import PlanStatus, ScalingPlan
from controlplane.planning.plans import load_now
from controlplane.planning.plans.load_now import LoadNow
from controlplane.planning.titles import title_of
from controlplane.tuning.selectors import tuned


def without_place(reason: str, model: str) -> str:
    """Return a planner's reason without its beginning `+1 MODEL on … in …: `, for use next to the place."""
    head, colon, rest = reason.partition(": ")
    return rest if colon and head[:1] in "+-" and model in head else reason


def titled(text: str, titles: Mapping[str, str]) -> str:
    """Return *text* of a planner with the titles of its regions and GPU types."""
    names = "|".join(map(re.escape, sorted(titles, key=len, reverse=True)))
    return re.sub(rf"(?<![\w-])(?:{names})(?![\w-])", lambda name: titles[name[0]], text) if titles else text


def card_of(plan: ScalingPlan, titles: Mapping[str, str], now: datetime) -> dict[str, Any]:
    """Return the card of *plan*; *titles* are those of regions and GPU types.

    Its `load` is what the model is asked for now, where the plan is for the time that is now: `use` is its share of what the
    instances served that were there, and `below` says that a plan that waits leaves less than that.
    """
    changes = [
        {
            "where": f"{titles.get(row['region'], row['region'])}, {titles.get(row['gpu_type'], row['gpu_type'])}",
            "present": row["present"],
            "target": row["target"],
            "delta": row["target"] - row["present"],
            "reason": titled(without_place(row.get("reason") or "", plan.model.name), titles),
        }
        for row in plan.targets
        if row["target"] != row["present"]
    ]
    deltas, inputs, expired = [change["delta"] for change in changes], plan.inputs, plan.valid_until <= now
    rates = {
        name: float(sum((inputs.get(f"{name}_tokens_per_s") or {}).values()))
        for name in ("forecast", "deferred", "reserve")
    }
    decidable = plan.status == PlanStatus.ADVICE and not expired
    load = None if expired else load_now.read(now).get(plan.model.name, LoadNow())
    before, after = (load_now.capacity_of(plan.targets, inputs, when) for when in ("present", "target"))
    progress = plan_rollout.not_moved(plan) if plan.status == PlanStatus.IN_PROGRESS else ""
    if plan.status == PlanStatus.IN_FORCE and changes:
        progress = strategies.pace(plan.strategy, tuned(plan.model.name))
    return {
        "plan": plan,
        "strategy": title_of(plan.strategy),
        "changes": sorted(changes, key=lambda change: (-abs(change["delta"]), change["where"])),
        "more": sum(max(delta, 0) for delta in deltas),
        "fewer": sum(max(-delta, 0) for delta in deltas),
        "usd_delta": round(plan.cost_usd_per_hour_after - plan.cost_usd_per_hour_before, 2),
        "expired": expired,
        "decidable": decidable,
        "newer": selectors.replaced_by(plan),
        "limits": [titled(str(row), titles) for row in (*plan.binding, *inputs.get("short_rows", ()))],
        "note": titled(plan.note, titles),
        "short": bool(inputs.get("shortage")),
        "progress": progress,
        "load": load,
        "below": load.above(plan) if load and decidable else "",
        "use": (load.interactive + load.deferred) / before if load and before else None,
        "capacity": after,
        "expected": rates["forecast"] + rates["deferred"],
        **rates,
    }
