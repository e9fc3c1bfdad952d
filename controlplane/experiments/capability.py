"""What an instance can serve, measured: a small fleet under a rising rate, and PreServe's Algorithm 1 over it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from scheduling.planning.capacity import Capability, profile_capability
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.measures.results import latency_s
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.generator import Client
from scheduling.simulation.workload.requests import make_requests

INSTANCES = 4
WINDOW_S = 600.0
WINDOWS = 40
FROM, TO = 0.3, 1.5
"""The rate rises from this to this share of a rough estimate."""


def rough_requests_per_s(engine: EngineConfig, prompt_tokens: float, output_tokens: float) -> float:
    """What an instance might serve, from its profile: prefills one by one, decoding in full batches."""
    profile = engine.profile
    batch = min(engine.max_num_seqs, engine.kv_capacity_tokens / (prompt_tokens + output_tokens))
    context = batch * (prompt_tokens + output_tokens / 2)
    decode_s = profile.decode_a_s + profile.decode_b_s_per_sequence * batch + profile.decode_c_s_per_token * context
    prefill_s = profile.prefill_a_s + profile.prefill_b_s_per_token * prompt_tokens
    return 1 / (max(prefill_s, 0.0) + output_tokens * decode_s / batch)


def measured_capability(
    engine: EngineConfig,
    clients: Sequence[Client],
    ttft_s: float = np.inf,
    normalised_s: float = np.inf,
    allowed: float = 0.05,
    seed: int = 0,
) -> Capability:
    """What an instance with *engine* serves of the mix of *clients*, promised *ttft_s* and *normalised_s*.

    Algorithm 1 takes windows in which no request broke its promise. Under random arrivals one in a thousand does at any
    load, so a window counts while no more than *allowed* of its requests do.
    """
    random = np.random.default_rng([seed, 3])
    shares = np.array([client.requests_per_s for client in clients])

    def draw(count: int) -> tuple[Any, Any]:
        """Prompts and outputs of *count* requests of the mix, within the context."""
        prompt, output = np.empty(count, np.int64), np.empty(count, np.int64)
        of = random.choice(len(clients), count, p=shares / shares.sum())
        for at, client in enumerate(clients):
            prompt[of == at], output[of == at] = client.lengths.draw(random, int((of == at).sum()))
        output = np.minimum(output, engine.max_model_len // 2)
        return np.minimum(prompt, engine.max_model_len - output), output

    prompt, output = draw(10_000)
    rough = INSTANCES * rough_requests_per_s(engine, float(prompt.mean()), float(output.mean()))
    # Moments of a Poisson process whose rate rises window by window.
    edges = np.arange(WINDOWS + 1) * WINDOW_S
    due = np.concatenate([[0.0], np.cumsum(np.linspace(FROM, TO, WINDOWS) * rough * WINDOW_S)])
    moments = np.sort(random.uniform(0.0, due[-1], random.poisson(due[-1])))
    arrival_s = np.interp(moments, due, edges)
    prompt, output = draw(arrival_s.size)
    cluster = Cluster([InstanceSpec("one", "here", engine) for _ in range(INSTANCES)])
    simulation = Simulation(cluster, make_requests(arrival_s, prompt, output), seed=seed)
    result = simulation.run(until_s=float(edges[-1]))
    window = np.minimum((arrival_s // WINDOW_S).astype(np.int64), WINDOWS - 1)
    broken = ~(latency_s(result, "ttft") <= ttft_s) | ~(latency_s(result, "normalised") <= normalised_s)
    return profile_capability(
        np.bincount(window, prompt, WINDOWS),
        np.bincount(window, output, WINDOWS),
        np.bincount(window, broken, WINDOWS),
        np.bincount(window, minlength=WINDOWS),
        np.full(WINDOWS, INSTANCES),
        WINDOW_S,
        violations_allowed=allowed,
    )
