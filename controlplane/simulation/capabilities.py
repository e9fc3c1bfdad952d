"""Capability of an instance, measured once in a process for the futures of a what-if, which have the same requests."""

from functools import lru_cache
from math import inf

import numpy as np

from scheduling.planning import simulated_capability as measuring
from scheduling.planning.bursts import POISSON_CV, arrival_cv
from scheduling.planning.capacity import MEASURED, Capability
from scheduling.queueing.promises import Promise
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.scenario.fleet import gpus_as_type
from scheduling.simulation.staging import Stage
from scheduling.simulation.staging.demand_minutes import MINUTE_S, DemandMinutes


def capabilities(staged: Stage) -> dict[tuple[str, str], Capability]:
    """Return capability by (model, GPUs of an instance): the scenario's, else simulated from the profile as live.

    Simulated for the lengths of the recent requests, or else the future ones, of the classes that plans count, the
    strictest interactive promise, and the arrivals of the burstiest endpoint.
    """
    scenario = staged.scenario
    given = {(one.model, gpus_as_type(one.gpu, one.tensor_parallel)): one for one in scenario.capabilities}
    requests, cluster = staged.recent or staged.requests, staged.cluster
    promise, percentile = measuring.strictest(
        (one.ttft_ms, one.itl_ms, one.e2e_ms, one.percentile)
        for one in scenario.classes.values()
        if one.kind == "interactive"
    )
    minutes = int(requests.arrival_s[-1] // MINUTE_S) + 1
    shown = [at for at, one in enumerate(scenario.classes.values()) if one.kind == "interactive"]
    asked = DemandMinutes.of(cluster, requests, shown, minutes)
    endpoints = cluster.endpoints
    kinds = np.array([one.kind for one in scenario.classes.values()] or ["interactive"])[requests.slo_class]
    known: dict[tuple[str, str], Capability] = {}
    for key, engine in cluster.engines().items():
        if (one := given.get(key)) is not None:
            prompt, output = (
                inf if limit is None else limit for limit in (one.prompt_tokens_per_s, one.output_tokens_per_s)
            )
            known[key] = Capability(prompt, output, one.total_tokens_per_s, MEASURED, note="as the scenario says")
            continue
        own = (requests.model == cluster.models.index(key[0])) & (kinds != "opportunistic")
        if not own.any():
            continue
        cv = max(arrival_cv(asked.requests[at]) for at, (model, _) in enumerate(endpoints) if model == key[0])
        columns = requests.prompt_tokens[own], requests.output_tokens[own], kinds[own] == "interactive"
        of = scenario.planner.capability_instances, scenario.planner.capability_most_above
        known[key] = measured(
            engine, *(each.tobytes() for each in columns), promise, percentile, max(POISSON_CV, cv), *of
        )
    return known


@lru_cache(maxsize=64)
def measured(
    engine: EngineConfig,
    prompt_tokens: bytes,
    output_tokens: bytes,
    interactive: bytes,
    promise: Promise,
    percentile: float,
    cv: float,
    instances: int,
    most_above: float,
) -> Capability:
    """Measure by simulation, in a tenth of a second or more; lengths are int32, *interactive* bool."""
    prompt, output = (np.frombuffer(each, np.int32) for each in (prompt_tokens, output_tokens))
    sizes, judged = tuple(measuring.fleet_sizes(instances)), np.frombuffer(interactive, np.bool_)
    of = {"interactive": judged, "percentile": percentile, "cv": cv, "sizes": sizes, "most_above": most_above}
    return measuring.simulated_capability(engine, prompt, output, promise, **of)  # type: ignore[arg-type]
