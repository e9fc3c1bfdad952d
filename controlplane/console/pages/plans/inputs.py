"""Inputs of a plan as tables: demand by region, what an instance can do, and prices.

Missing values are allowed: plans are stored for long, and older ones have fewer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.console.live.tiles import spark
from controlplane.planning.models import ScalingPlan

BANDS = {"upper_80": "80%", "upper_95": "95%"}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tables for a template. Rows are dicts; `facts` are (what, value) pairs in words."""

    demand: list[dict[str, Any]]
    hardware: list[dict[str, Any]]
    facts: list[tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.demand or self.hardware or self.facts)


def read(plan: ScalingPlan, titles: Mapping[str, str]) -> Inputs:
    given = plan.inputs
    return Inputs(_demand(given, titles), _hardware(given, titles), _facts(given))


def _demand(given: Mapping[str, Any], titles: Mapping[str, str]) -> list[dict[str, Any]]:
    deferred, cvs = given.get("deferred_tokens_per_s") or {}, given.get("arrival_cv") or {}
    reserves = given.get("reserve_tokens_per_s") or {}
    return [
        {
            "region": titles.get(region, region),
            "first": values[0],
            "peak": max(values),
            "mean": sum(values) / len(values),
            "deferred": deferred.get(region),
            "cv": cvs.get(region),
            "reserve": reserves.get(region),
            "spark": spark(values),
        }
        for region, values in (given.get("demand_tokens_per_s") or {}).items()
        if values
    ]


def _hardware(given: Mapping[str, Any], titles: Mapping[str, str]) -> list[dict[str, Any]]:
    capability, prices = given.get("capability_tokens_per_s") or {}, given.get("usd_per_gpu_hour") or {}
    starts = given.get("start_times") or {}
    return [
        {
            "gpu_type": titles.get(name, name),
            **{
                key: (capability.get(name) or {}).get(key)
                for key in ("used", "prompt", "output", "source", "windows", "percentile", "cv", "instances")
            },
            "note": (capability.get(name) or {}).get("note", ""),
            "start": _start_words(starts.get(name)),
            "usd": float(prices[name]) if name in prices else None,
        }
        for name in sorted({*capability, *prices})
    ]


def _start_words(start: Mapping[str, Any] | None) -> str:
    """Describe the start time in the plan and its source; empty for older plans."""
    if start is None:
        return ""
    count = start["starts"]
    known = f"median of {count} start{'s' if count > 1 else ''}" if count else "usual, none measured yet"
    return f"{start['seconds']:,.0f} s, {known}"


def _facts(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if "demand_of" in given:
        facts.append(("Demand is", _demand_of(given["demand_of"])))
    if "window_s" in given:
        facts.append(("In windows of", f"{given['window_s'] // 60} min"))
    if "epsilon" in given:
        facts.append(("Served in its own region", f"at least {given['epsilon']:.0%} of a region's peak"))
    if given.get("planned_with"):
        facts.append(("Planned with", ", ".join(given["planned_with"])))
    return facts


def _demand_of(demand: Mapping[str, Any] | str) -> str:
    """Describe the planned demand; older plans name one end of the band alone."""
    if isinstance(demand, str):
        demand = {"band": demand, "kept": 0.0 if demand == "mean" else 1.0}
    kept, end = demand["kept"], f"upper end of the forecast's {BANDS.get(demand['band'], demand['band'])} band"
    soon = demand.get("soon", kept)
    words = {0.0: "the mean of the forecast", 1.0: f"the {end}"}.get(
        kept, f"{kept:.0%} of the way from the mean to the {end}"
    )
    if demand.get("by_capability"):
        return f"{words}, in the windows until the next plan (PreServe's Algorithm 2)"
    return words if soon == kept else f"{words}; {soon:.0%} for what is added soon"
