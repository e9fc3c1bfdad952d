"""Capability of an instance, measured once in a process for the futures of a what-if, which have the same requests."""

from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from controlplane.simulation.forecasts import MINUTE_S, DemandMinutes
from scheduling.planning import simulated_capability as measuring
from scheduling.planning.bursts import POISSON_CV, arrival_cv
from scheduling.planning.capacity import MEASURED, Capability
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.measures.results import Promise
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging import Stage
from scheduling.simulation.staging.fleet import gpus_as_type


@dataclass(frozen=True, slots=True)
class Measurement:
    """All inputs of a measured capability."""

    engine: EngineConfig
    prompt_tokens: bytes
    """int32"""
    output_tokens: bytes
    promise: Promise
    percentile: float
    cv: float
    sizes: tuple[int, ...]
    most_above: float

    def made(self) -> Capability:
        """Measure it by simulation, in a tenth of a second or more."""
        prompts, outputs = (np.frombuffer(each, np.int32) for each in (self.prompt_tokens, self.output_tokens))
        return measuring.simulated_capability(
            self.engine,
            prompts,
            outputs,
            self.promise,
            percentile=self.percentile,
            cv=self.cv,
            sizes=self.sizes,
            most_above=self.most_above,
        )


def capabilities(scenario: Scenario, staged: Stage) -> dict[tuple[str, str], Capability]:
    """Return capability by (model, GPUs of an instance): the scenario's, else simulated from the profile as live.

    Simulated for the lengths of the recent requests, or else the future ones, the strictest interactive promise, and the
    arrivals of the burstiest endpoint.
    """
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
    known: dict[tuple[str, str], Capability] = {}
    wanted: dict[tuple[str, str], Measurement] = {}
    for key, engine in cluster.engines().items():
        if (one := given.get(key)) is not None:
            prompt, output = (
                inf if limit is None else limit for limit in (one.prompt_tokens_per_s, one.output_tokens_per_s)
            )
            known[key] = Capability(prompt, output, one.total_tokens_per_s, MEASURED, note="as the scenario says")
            continue
        own = requests.model == cluster.models.index(key[0])
        if not own.any():
            continue
        cv = max(arrival_cv(asked.requests[at]) for at, (model, _) in enumerate(endpoints) if model == key[0])
        lengths = (requests.prompt_tokens[own].tobytes(), requests.output_tokens[own].tobytes())
        sizes = tuple(measuring.fleet_sizes(scenario.planner.capability_instances))
        most_above = scenario.planner.capability_most_above
        wanted[key] = Measurement(engine, *lengths, promise, percentile, max(POISSON_CV, cv), sizes, most_above)
    return known | {key: measured(one) for key, one in wanted.items()}


@lru_cache(maxsize=64)
def measured(one: Measurement) -> Capability:
    """Measure *one* once for the futures of a what-if, which have the same requests."""
    return one.made()
