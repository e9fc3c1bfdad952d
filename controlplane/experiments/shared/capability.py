"""What an instance can serve of a scene's clients, measured by simulation with the bursts that its past shows."""

from collections.abc import Sequence

import numpy as np

from scheduling.planning.bursts import POISSON_CV
from scheduling.planning.capacity import Capability
from scheduling.planning.simulated_capability import SIZES, simulated_capability
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.measures.results import Promise
from scheduling.simulation.workload.generator import Client

PAIRS = 10_000
"""Lengths that are drawn of the mix."""


def measured_capability(
    engine: EngineConfig,
    clients: Sequence[Client],
    ttft_s: float = np.inf,
    normalised_s: float = np.inf,
    percentile: float = 95.0,
    cv: float = POISSON_CV,
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
) -> Capability:
    """What an instance with *engine* serves of the mix of *clients*, *percentile* of whose requests keep *ttft_s* and
    *normalised_s*, when their arrivals have *cv*."""
    random = np.random.default_rng([seed, 3])
    shares = np.array([client.requests_per_s for client in clients])
    prompt, output = np.empty(PAIRS, np.int64), np.empty(PAIRS, np.int64)
    of = random.choice(len(clients), PAIRS, p=shares / shares.sum())
    for at, client in enumerate(clients):
        prompt[of == at], output[of == at] = client.lengths.draw(random, int((of == at).sum()))
    return simulated_capability(
        engine,
        prompt,
        output,
        Promise(ttft_s=ttft_s),
        normalised_s=normalised_s,
        percentile=percentile,
        cv=cv,
        sizes=sizes,
        seed=seed,
    )
