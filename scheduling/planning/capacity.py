"""Capability of one instance (PreServe Algorithm 1), and instances for a forecast (Algorithm 2).

An instance has three limits: prompt tokens per second (prefill is compute-bound), output tokens per second (decoding is
memory-bound), and both together. They are learned from past windows in which SLOs were kept. With too few such windows,
or none that shows a limit, a simulation of the performance profile is used (`simulated_capability`), and the result
says so. The effect of bursts on n instances is in `bursts`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduling.planning.bursts import POISSON_CV, highest_load_kept, instances_for, usable_instances

LEAST_WINDOWS = 12
"""Windows with work and without violation from which on they are used: two hours of ten minutes."""
HOUR_S, DAY_S = 3600.0, 86_400.0
LEAST_USABLE = 0.2
"""Usable share of an endpoint's instances under its bursts, below which its windows say little of one."""
LEAST_LEFT_S = 600.0
"""Work that is due sooner, or late, is planned for this time: an instance that is started for it takes as long."""

MEASURED, SIMULATED, UNKNOWN = "measured", "simulated", "unknown"
"""`Capability.source`: from windows; from a simulation of the performance profile; unknown, so nothing can be planned.
"""


@dataclass(frozen=True, slots=True)
class Capability:
    """Tokens per second of one instance of many, over a window (mu); n serve as much as `usable_instances` of them."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    source: str
    """`MEASURED`, `SIMULATED` or `UNKNOWN`."""
    windows: int = 0
    """Windows without violation that it was learned from."""
    note: str = ""
    """Why it was not measured, or its weakness."""
    reserve: float = 0.0
    """Reserve of one instance per unit of the arrivals' CV; of n instances sqrt(n) times that."""
    percentile: float = 100.0
    """Percentile of requests within SLO for which it was measured."""
    cv: float = POISSON_CV
    """CV of arrivals at which it was measured; `reserve` gives it at others."""
    instances: float = 1.0
    """Mean instances of an endpoint at which it was measured."""
    out_of_reach: float = 0.0
    """Share of requests whose promise even an idle instance breaks, if that is more than may."""

    def at(self, prompt_share: float) -> float:
        """Return theta: tokens per second, prompt and output together, when *prompt_share* of them are prompt tokens.

        Demand / theta is then the N of Algorithm 2: the limit that is reached first decides.
        """
        if not 0.0 <= prompt_share <= 1.0:
            raise ValueError(f"prompt_share must be from 0 to 1, not {prompt_share}")
        needed = _instances_for(self, prompt_share, 1.0 - prompt_share)
        return 0.0 if math.isinf(needed) else 1.0 / needed

    def with_reserve(self, tokens_per_s: ArrayLike, prompt_share: float, cv: float) -> NDArray[np.float64]:
        """Return the tokens per second needed at `at` for *tokens_per_s* to keep their SLO under arrivals of *cv*."""
        theta = self.at(prompt_share)
        asked = np.asarray(tokens_per_s, np.float64)
        return asked if theta == 0 else theta * instances_for(asked / theta, self.reserve, cv)


def _instances_for(capability: Capability, prompt: float, output: float) -> float:
    """Return the largest of the three ratios; infinity if there is work that cannot be done."""
    pairs = (
        (prompt, capability.prompt_tokens_per_s),
        (output, capability.output_tokens_per_s),
        (prompt + output, capability.total_tokens_per_s),
    )
    return max((need / able if able > 0 else math.inf) if need > 0 else 0.0 for need, able in pairs)


def instances_needed(
    capability: Capability, prompt_tokens_per_s: float, output_tokens_per_s: float, cv: float = POISSON_CV
) -> int:
    """Return N of Algorithm 2: instances for a forecast of prompt and output tokens per second with arrivals of *cv*.

    Rounded up. Raise ValueError for a negative forecast, NaN, or work for an instance that cannot do any.
    """
    if not (prompt_tokens_per_s >= 0 and output_tokens_per_s >= 0):
        raise ValueError(f"a forecast must be at least 0, not {prompt_tokens_per_s} and {output_tokens_per_s}")
    needed = _instances_for(capability, prompt_tokens_per_s, output_tokens_per_s)
    if math.isinf(needed):
        raise ValueError(f"no number of instances can serve this: {capability.note or 'the capability is 0'}")
    # A forecast that is whole except for rounding must not cost an instance.
    return math.ceil(float(instances_for(needed, capability.reserve, cv)) * (1.0 - 1e-12))


def profile_capability(
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    violations: ArrayLike,
    requests: ArrayLike,
    instances: ArrayLike,
    window_s: float,
    *,
    expected: Capability | None = None,
    violations_allowed: ArrayLike = 0.0,
    cv: float = POISSON_CV,
    least_windows: int = LEAST_WINDOWS,
) -> Capability:
    """Return the capability by Algorithm 1: the most tokens per second that an instance served in a window within SLO.

    The windows are those of one model on one GPU type, one element per window, oldest first: tokens and *requests*
    that its *instances* completed (their mean number if it changed), of which *violations* violated an SLO. NaN
    anywhere is a gap. The paper allows no violation in a window; *violations_allowed* is the allowed share, for all
    windows or each. Windows count up to the load at which that share is reached (`highest_load_kept`): the highest of
    them alone would be the luckiest.

    *expected* is the capability by the performance profile. It is used with fewer than *least_windows* usable windows.
    It is also a lower bound while no window has a violation, because instances that were never loaded show only the
    demand: a fleet planned with that would stay too large forever. Its reserve says how much of the *instances* could
    be used under arrivals of *cv*, so that windows of endpoints of different sizes are comparable.
    """
    prompt, output, broken, count, serving = (
        np.atleast_1d(np.asarray(value, np.float64))
        for value in (prompt_tokens, output_tokens, violations, requests, instances)
    )
    shapes = {array.shape for array in (prompt, output, broken, count, serving)}
    if len(shapes) != 1 or prompt.ndim != 1:
        raise ValueError(f"windows must be one-dimensional and of one length, not {sorted(shapes)}")
    if not window_s > 0:
        raise ValueError(f"window_s must be above 0, not {window_s}")
    reserve = expected.reserve if expected else 0.0
    known = np.isfinite(prompt + output + broken + count + serving) & (count > 0) & (serving > 0)
    pool = np.where(known, serving, 1.0)
    usable = window_s * usable_instances(pool, reserve, cv)
    known &= usable >= LEAST_USABLE * window_s * pool
    share = np.broadcast_to(np.asarray(violations_allowed, np.float64), count.shape)
    allowed = share * count
    load = (prompt + output) / usable
    limit = highest_load_kept(load[known], broken[known], allowed[known], count[known])
    kept = known & (load <= limit)
    windows, limit_seen = int(kept.sum()), bool((known & ~kept).any())

    if windows < least_windows:
        few = f"{windows} of {least_windows} windows without violation are known"
        if expected is not None and expected.source != UNKNOWN:
            return replace(expected, windows=windows, note=f"{few}; {expected.note}".rstrip("; "))
        if windows == 0:
            return Capability(0.0, 0.0, 0.0, UNKNOWN, 0, f"{few}, and there is no performance profile")
    seconds = usable[kept]
    measured = Capability(
        float((prompt[kept] / seconds).max()),
        float((output[kept] / seconds).max()),
        float(load[kept].max()),
        MEASURED,
        windows,
        "" if windows >= least_windows else f"{few}, and there is no performance profile",
        reserve,
        100.0 * (1.0 - float(share[kept].mean())),
        cv,
        float(serving[kept].mean()),
        expected.out_of_reach if expected else 0.0,
    )
    if limit_seen or expected is None or expected.total_tokens_per_s <= measured.total_tokens_per_s:
        return measured
    return replace(
        expected,
        prompt_tokens_per_s=max(measured.prompt_tokens_per_s, expected.prompt_tokens_per_s),
        output_tokens_per_s=max(measured.output_tokens_per_s, expected.output_tokens_per_s),
        windows=windows,
        note=f"no window of {windows} shows a limit: at most {measured.total_tokens_per_s:,.0f} tok/s were asked of an"
        " instance",
    )


def must_run(due: Iterable[tuple[float, float]], now_s: float) -> float:
    """Return the least constant tokens per second that do all work that is *due*, (deadline, tokens), in time.

    The speed is that of "Optimal Available" (Yao, Demers, Shenker 1995), as in `queueing.held_work`.
    """
    tokens_per_s, tokens = 0.0, 0.0
    for due_s, more in sorted(due):
        tokens += more
        tokens_per_s = max(tokens_per_s, tokens / max(due_s - now_s, LEAST_LEFT_S))
    return tokens_per_s


def arrivals_over_s(deadlines_s: Iterable[float]) -> float:
    """Return the period over which arrivals of deferred classes with *deadlines_s* are averaged: the longest of them, from
    an hour to a day.

    What arrives may wait that long, so it needs the mean rate and not the highest.
    """
    return min(max([HOUR_S, *deadlines_s]), DAY_S)
