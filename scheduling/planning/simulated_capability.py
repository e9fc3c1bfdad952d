"""Capability of instances within an SLO under bursts, by simulation: PreServe's Algorithm 1 at several fleet sizes.

The paper learns an instance's capability from past windows. Here the windows are simulated: fleets of several sizes
under a rising rate, with the observed coefficient of variation of arrivals. That shows what windows of one fleet size
do not: the usable share of fewer or more instances (`scheduling.planning.bursts`). Interactive requests are to keep the
promise; deferred ones, which have hours, are only not to pile up.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduling.planning.bursts import POISSON_CV, highest_load_kept
from scheduling.planning.capacity import SIMULATED, Capability
from scheduling.queueing.promises import Promise
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.measures.results import latency_s
from scheduling.simulation.result import Result
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests

SIZES = (1, 2, 4, 8)
"""Instances of the simulated fleets."""
WINDOWS = 40
FROM, TO = 0.03, 1.3
"""The rate rises from this to this share of a rough estimate, by equal steps of its root."""
WINDOW_S, LEAST_REQUESTS, MOST_REQUESTS = 300.0, 1000, 10_000
"""Length of a window, and the most requests in it at the highest rate, by which it is lengthened or shortened."""
ALONE, ALONE_EVERY_S = 300, 3600.0
"""Requests served one by one, to see whether any violates the SLO at any load; if so, all are."""
REACHABLE = 2.0
"""Latency that counts as in time, relative to that on an idle instance, once as many requests as may break the promise
there."""
PILED = 0.1
"""Of a window, for which a deferred request waits at most where work does not pile up."""
MOST_ABOVE = 1.1
"""Most that an instance of very many may serve, relative to the highest limit found."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SETTLE_S = 3600.0
"""Time after the last arrival within which it may be served."""


def fleet_sizes(most: int) -> list[int]:
    """Return the fleet sizes to simulate, up to *most* instances: each twice the previous one."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def rough_requests_per_s(engine: EngineConfig, prompt_tokens: float, output_tokens: float) -> float:
    """Return a rough estimate of an instance's rate from its profile: prefills one by one, decoding in full batches."""
    profile = engine.profile
    batch = min(engine.max_num_seqs, engine.kv_capacity_tokens / (prompt_tokens + output_tokens))
    context = batch * (prompt_tokens + output_tokens / 2)
    decode_s = profile.decode_a_s + profile.decode_b_s_per_sequence * batch + profile.decode_c_s_per_token * context
    prefill_s = profile.prefill_a_s + profile.prefill_b_s_per_token * prompt_tokens
    computing_s = max(prefill_s, 0.0) + output_tokens * decode_s / batch
    return 1 / max(computing_s, output_tokens / engine.front_end.tokens_per_s + 1 / engine.front_end.requests_per_s)


def simulated_capability(
    engine: EngineConfig,
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    promise: Promise,
    *,
    interactive: ArrayLike = True,
    normalised_s: float = np.inf,
    percentile: float = 95.0,
    cv: float = POISSON_CV,
    sizes: Sequence[int] = SIZES,
    most_above: float = MOST_ABOVE,
    most_requests: int = MOST_REQUESTS,
    seed: int = 0,
) -> Capability:
    """Return the capability of *engine* for requests drawn from the pairs of lengths under arrivals of *cv*.

    *percentile* of those that are *interactive* must keep *promise* (and *normalised_s* per output token), and of the
    others start within `PILED`. *sizes* are those of the simulated fleets; *most_above* is the most that an instance of
    very many may serve, relative to their highest limit; *most_requests* bounds those of a window.
    Lengths are cut to what the engine accepts. Raise ValueError without lengths or for an invalid percentile.
    """
    random = np.random.default_rng([seed, 3])
    prompts, outputs = np.asarray(prompt_tokens, np.int64), np.asarray(output_tokens, np.int64)
    if not prompts.size or prompts.shape != outputs.shape:
        raise ValueError(f"lengths must be pairs, at least one, not {prompts.shape} and {outputs.shape}")
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile must be above 0 and at most 100, not {percentile}")
    longest = min(engine.max_model_len, engine.kv_capacity_tokens)
    outputs = np.clip(outputs, 1, longest // 2)
    prompts = np.clip(prompts, 1, longest - outputs)
    judged = np.broadcast_to(np.asarray(interactive, np.bool_), prompts.shape)
    rough = rough_requests_per_s(engine, float(prompts.mean()), float(outputs.mean()))

    limits_s = {"ttft": promise.ttft_s, "itl": promise.itl_s, "e2e": promise.end_s, "normalised": normalised_s}
    limits_s = {name: limit_s for name, limit_s in limits_s.items() if limit_s < np.inf}

    def served(arrival_s: Floats, at: Ints, size: int = 1) -> Result:
        cluster = Cluster([InstanceSpec("one", "here", engine)] * size)
        requests = make_requests(arrival_s, prompts[at], outputs[at], priority=np.where(judged[at], 0, 1))
        return Simulation(cluster, requests).run(until_s=float(arrival_s[-1]) + SETTLE_S)

    def alone(at: Ints) -> Result:
        return served(ALONE_EVERY_S * np.arange(at.size, dtype=np.float64), at)

    def broken(result: Result, at: Ints, goals_s: Mapping[str, ArrayLike]) -> NDArray[np.bool_]:
        late = np.zeros(at.size, np.bool_) if not goals_s else np.isnan(latency_s(result, "e2e"))
        for name, goal_s in goals_s.items():
            late |= latency_s(result, name) > np.broadcast_to(goal_s, prompts.shape)[at]
        return late

    allowed = 1.0 - percentile / 100.0
    note = "from a simulation of the performance profile"
    goals_s: dict[str, ArrayLike] = dict(limits_s)
    idle, some = 0.0, random.integers(0, prompts.size, ALONE)
    some = some[judged[some]]
    if some.size and broken(alone(some), some, limits_s).any():
        each = np.flatnonzero(judged)
        reached = alone(each)
        idle = float(broken(reached, each, limits_s).mean())
        # What breaks on an idle instance is no limit of load. The nearer it is to all that may break, the less else could
        # be late, so goals give way with it.
        factor = 1.0 + (REACHABLE - 1.0) * (min(1.0, idle / allowed) if allowed else 1.0)
        for name, limit_s in limits_s.items():
            alone_s = np.zeros(prompts.size)
            alone_s[each] = np.nan_to_num(latency_s(reached, name))
            goals_s[name] = np.maximum(limit_s, factor * alone_s)
    if idle > allowed:
        note += (
            f"; out of reach at any number of instances: {idle:.0%} of requests break their promise on an idle instance,"
            f" so it counts as kept within {REACHABLE:g} times what they take there"
        )
    fleets = [(size, each) for each in sorted({POISSON_CV, cv}) for size in sizes]
    limits = []
    for size, of_cv in fleets:
        rates, arrival_s, window, window_s = _arrivals(size, rough, of_cv, random, most_requests)
        drawn = random.integers(0, prompts.size, arrival_s.size)
        result = served(arrival_s, drawn, size)
        late = np.where(
            judged[drawn], broken(result, drawn, goals_s), ~(latency_s(result, "queue") <= PILED * window_s)
        )
        # By the intended rate, as in a plan, not the one that was drawn.
        kept = []
        for own in (judged[drawn], ~judged[drawn]):
            count = np.bincount(window[own], minlength=WINDOWS)
            if own.any():
                broke = np.bincount(window[own], late[own], WINDOWS)
                kept.append(highest_load_kept(rates, broke, allowed * count, count))
        limits.append(min(kept))
    requests_per_s, reserve = _fitted(fleets, limits, most_above)
    tokens = requests_per_s * np.array([prompts.mean(), outputs.mean()])
    if not requests_per_s:
        note += f"; {max(sizes)} instances keep the promise at no load"
    return Capability(
        float(tokens[0]),
        float(tokens[1]),
        float(tokens.sum()),
        SIMULATED,
        note=note,
        reserve=reserve,
        percentile=percentile,
        cv=cv,
        instances=max(sizes),
        out_of_reach=idle if idle > allowed else 0.0,
    )


def strictest(
    promises: Iterable[tuple[float | None, float | None, float | None, float]],
) -> tuple[Promise, float]:
    """Return the strictest of each of *promises* (TTFT, ITL, E2E in ms, percentile), and the highest percentile."""
    known = list(promises)
    least_s = [min((ms / 1000 for one in known if (ms := one[at]) is not None), default=np.inf) for at in range(3)]
    return Promise(*least_s), max((one[3] for one in known), default=95.0)


def _arrivals(
    size: int, rough: float, cv: float, random: np.random.Generator, most_requests: int
) -> tuple[Floats, Floats, Ints, float]:
    """Return requests per second and instance by window, arrivals, their windows and a window's length, for *size*
    instances.
    """
    rates = rough * np.linspace(FROM**0.5, TO**0.5, WINDOWS) ** 2
    most_per_s = float(size * rates[-1])
    window_s = min(max(WINDOW_S, LEAST_REQUESTS / most_per_s), most_requests / most_per_s)
    due = np.concatenate([[0.0], np.cumsum(size * rates * window_s)])
    # A renewal process in operational time (one request due each second), mapped to the clock.
    shape = cv**-2
    moments = np.cumsum(random.standard_gamma(shape, int(due[-1] + 6 * cv * np.sqrt(due[-1])) + 1) / shape)
    arrival_s = np.interp(moments[moments < due[-1]], due, np.arange(WINDOWS + 1) * window_s)
    return rates, arrival_s, np.minimum((arrival_s // window_s).astype(np.int64), WINDOWS - 1), window_s


def _fitted(fleets: Sequence[tuple[int, float]], limits: Sequence[float], most_above: float) -> tuple[float, float]:
    """Return the rate of one instance of many, and `Capability.reserve`, by least squares from the
    *limits* of *fleets* (size, cv).

    The limit falls from the first by the second times cv / sqrt(size). The first is at most *most_above*
    times the highest limit, since many instances saturate. Fleets that keep the SLO at no load say no
    more than that, and are left out.
    """
    limit = np.array(limits)
    highest, able = float(limit.max()), limit > 0
    if highest == 0 or len(limits) == 1:
        return highest, 0.0
    slope = np.array([cv / size**0.5 for size, cv in fleets])[able]
    (theta, _), *_ = np.linalg.lstsq(np.stack([np.ones(slope.size), -slope], axis=1), limit[able], rcond=None)
    theta = min(max(float(theta), highest), most_above * highest)
    return theta, float((slope * (1.0 - limit[able] / theta)).sum() / (slope**2).sum())
