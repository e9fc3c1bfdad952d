"""Columns and curves of a simulation for a comparison, small enough for a row.

Requests that arrive within the counted time are judged, whenever they end; hours and dollars are those of that time. A
fleet is paid for in every state but those of `UNPAID`, as in `results`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from scheduling.simulation.cluster.world import UNPAID
from scheduling.simulation.measures.results import kept, latency_s, spells
from scheduling.simulation.result import Result

Floats = NDArray[np.float64]
PERCENTILES: Final = (50.0, 95.0, 99.0)
MOST_SAMPLES: Final = 200
"""Maximum samples of a series, for each model and region."""
MAX_TIMES: Final = 60
"""Parts of the counted time whose latency is measured."""


@dataclass(frozen=True, slots=True)
class Counted:
    """From *from_s* until *until_s*, for requests of all classes, or of those numbered *classes*."""

    from_s: float
    until_s: float
    classes: frozenset[int] | None = None

    def of(self, result: Result) -> NDArray[np.bool_]:
        """Return a mask of the counted requests."""
        arrival_s = result.requests.arrival_s
        inside: NDArray[np.bool_] = (arrival_s >= self.from_s) & (arrival_s < self.until_s)
        if self.classes is not None:
            inside &= np.isin(result.requests.slo_class, sorted(self.classes))
        return inside


def columns(result: Result, counted: Mapping[str, Counted]) -> dict[str, dict[str, Any]]:
    """Return a row of columns for each of *counted*, by its name; None for values that could not be measured.

    Columns: requests, judged (promised anything), missed, slo_met (ratio), ttft_p50_ms, ttft_p95_ms, ttft_p99_ms,
    cost_usd, cost_usd_per_h, instance_hours, queue_peak (requests that waited at once, all endpoints).
    """
    judged, met = kept(result, result.cluster.promises)
    ttft_ms = 1000 * latency_s(result, "ttft")
    rate_usd = np.array([one.usd_per_hour for one in result.cluster.instances])
    rows = {}
    for name, each in counted.items():
        inside = each.of(result)
        among = int(judged[inside].sum())
        missed = among - int(met[inside].sum())
        finite = ttft_ms[inside & np.isfinite(ttft_ms)]
        percentiles = np.percentile(finite, PERCENTILES) if finite.size else [None] * len(PERCENTILES)
        hours = paid_s(result, each.from_s, each.until_s) / 3600
        lasts_h = (each.until_s - each.from_s) / 3600
        cost_usd = float(hours @ rate_usd)
        rows[name] = {
            "requests": int(inside.sum()),
            "judged": among,
            "missed": missed,
            "slo_met": 1 - missed / among if among else None,
            **{
                f"ttft_p{percent:.0f}_ms": None if value is None else round(float(value), 3)
                for percent, value in zip(PERCENTILES, percentiles, strict=True)
            },
            "cost_usd": round(cost_usd, 4),
            "cost_usd_per_h": round(cost_usd / lasts_h, 4),
            "instance_hours": round(float(hours.sum()), 4),
            "queue_peak": _queue_peak(result, each),
        }
    return rows


def latency_over_time(result: Result, counted: Counted) -> dict[str, Any]:
    """Return the 95th percentile of TTFT in ms by time of arrival: until_s, the ends of MAX_TIMES equal parts of the
    counted time, and ttft_p95_ms by SLO class, a value a part; None where no request had a first token.
    """
    ends_s = np.linspace(counted.from_s, counted.until_s, MAX_TIMES + 1)[1:]
    ttft_ms = 1000 * latency_s(result, "ttft")
    known = counted.of(result) & np.isfinite(ttft_ms)
    part = np.searchsorted(ends_s, result.requests.arrival_s, side="right")
    rows = {}
    for number, terms in enumerate(result.cluster.classes):
        own = known & (result.requests.slo_class == number)
        if own.any():
            values = [ttft_ms[own & (part == at)] for at in range(MAX_TIMES)]
            rows[terms.slo_class] = [round(float(np.percentile(each, 95)), 3) if each.size else None for each in values]
    return {"until_s": ends_s.round(3).tolist(), "ttft_p95_ms": rows}


def over_time(result: Result, until_s: float) -> dict[str, Any]:
    """Return ready instances and waiting requests by endpoint: t_s, endpoints (model, region), ready, waiting.

    At most MOST_SAMPLES times: each has the highest queue and the last number of instances of the samples joined.
    """
    series = result.series
    assert series is not None  # callers keep one
    t_s = series["t_s"]
    count = int(np.searchsorted(t_s, until_s, side="right"))
    step = max(1, -(-count // MOST_SAMPLES))
    firsts = np.arange(0, count, step)
    waiting = np.maximum.reduceat(series["waiting"][:count], firsts, axis=0)
    lasts = np.minimum(firsts + step, count) - 1
    return {
        "t_s": np.round(t_s[firsts], 3).tolist(),
        "endpoints": [list(key) for key in result.cluster.endpoints],
        "ready": series["ready"][lasts].T.tolist(),
        "waiting": waiting.T.tolist(),
    }


def paid_s(result: Result, from_s: float, until_s: float) -> Floats:
    """Return the seconds from *from_s* until *until_s* for which each instance was paid."""
    of = spells(result, np.inf)
    lasts_s = np.clip(np.minimum(of.ended_s, until_s) - np.maximum(of.began_s, from_s), 0.0, None)
    paid = ~np.isin(of.state, UNPAID)
    return np.bincount(of.instance, lasts_s * paid, len(result.cluster.instances)).astype(np.float64)


def _queue_peak(result: Result, counted: Counted) -> int | None:
    """Return the most requests of any class that waited at once; None without a series."""
    if result.series is None:
        return None
    inside = (result.series["t_s"] >= counted.from_s) & (result.series["t_s"] <= counted.until_s)
    return int(result.series["waiting"].sum(axis=1)[inside].max(initial=0))
