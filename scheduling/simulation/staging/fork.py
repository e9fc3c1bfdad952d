"""The requests of a live fleet as those of a scenario: the start of a forked simulation (`state.placing`)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduling.fleet.state import FleetState, PromptState, RequestState, RunningRequest
from scheduling.routing.prefix_affinity import filled
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging.requests import requests_of
from scheduling.simulation.state.placing import Fork
from scheduling.simulation.workload.columns import Coded, Workload
from scheduling.simulation.workload.requests import Requests

OVERRUN: float = 1.2
"""Expected length of an output that exceeds all known ratios, over what it has; as look-ahead maps have it."""


def fork(state: FleetState, scenario: Scenario, cluster: Cluster, tenants: list[str], seed: int) -> Fork:
    """Put *state* on *cluster*, that of *scenario*. Appends to *tenants* those that are not in it.

    *seed* draws the lengths that are still unknown.
    """
    listed, keys = state.requests, set(cluster.endpoints)
    there = [at for at, one in enumerate(listed) if (one.model, one.served_in) in keys]
    there.sort(key=lambda at: listed[at].arrival_s)
    row_of = [-1] * len(listed)
    for row, at in enumerate(there):
        row_of[at] = row
    known = [listed[at] for at in there]
    drawn = sum(model.adapters.count for model in scenario.models.values() if model.adapters)
    loaded = (name for one in state.instances for name in one.adapters)
    names = dict.fromkeys(name for name in (*(one.adapter for one in known), *loaded) if name)
    adapters = {name: drawn + at for at, name in enumerate(names)}
    sizes = cluster.cached_block_sizes()
    block_tokens = min(sizes) if len(sizes) == 1 else 0
    prompts = [_blocks(one, block_tokens) for one in state.prompts] if block_tokens else []
    requests = requests_of(scenario, cluster, _workload(state, known, scenario, cluster, tenants, seed), seed)
    requests = _with_own(requests, known, scenario, cluster, adapters)
    if prompts:
        requests = _with_prompts(requests, known, prompts, block_tokens)
    return Fork(state, cluster, requests, row_of, adapters, prompts, block_tokens)


def _workload(
    state: FleetState,
    known: Sequence[RequestState],
    scenario: Scenario,
    cluster: Cluster,
    tenants: list[str],
    seed: int,
) -> Workload:
    """Return *known* with lengths that fit their instances."""
    random = np.random.default_rng([seed, 3])
    longest = dict(zip(cluster.models, cluster.longest_tokens(), strict=True))
    limits = np.array([longest[one.model] for one in known], np.int64)
    outputs = np.array([_output(state, one, random) for one in known], np.int64)
    least = np.array([_emitted(one) + 1 for one in known], np.int64)
    outputs = np.minimum(np.maximum(np.minimum(outputs, limits - 1), least), np.maximum(limits - 1, 1))
    prompts = np.array([one.prompt_tokens for one in known], np.int64)
    prompts = np.clip(prompts, 1, np.maximum(limits - outputs, 1))
    tenants += [name for name in dict.fromkeys(one.tenant for one in known) if name not in tenants]

    def coded(values: Sequence[str], names: list[str]) -> Coded:
        codes = {name: at for at, name in enumerate(names)}
        return Coded(np.array([codes.get(value, 0) for value in values], np.int32), names)

    return Workload(
        arrival_s=np.array([one.arrival_s for one in known], np.float64),
        prompt_tokens=prompts.astype(np.int32),
        output_tokens=outputs.astype(np.int32),
        model=coded([one.model for one in known], list(cluster.models)),
        region=coded([one.region for one in known], list(scenario.regions)),
        slo_class=coded([one.slo_class for one in known], list(scenario.classes)),
        tenant=coded([one.tenant for one in known], tenants),
        predicted_tokens=np.array([max(1, one.predicted_tokens) for one in known], np.int32),
    )


def _with_own(
    requests: Requests, known: Sequence[RequestState], scenario: Scenario, cluster: Cluster, adapters: dict[str, int]
) -> Requests:
    """Return *requests* with the adapters, names and priorities of *known*."""
    without = {spec.model for spec in cluster.instances if not spec.engine.max_loras}
    names = {name: at for at, name in enumerate(scenario.names)}
    own = [-1 if one.model in without else adapters.get(one.adapter, -1) for one in known]
    priority = np.array(requests.priority)
    for at, one in enumerate(known):
        if one.priority is not None:
            priority[at] = one.priority
    return requests._replace(
        adapter=np.array(own, np.int32),
        asked=np.array([names.get(one.asked_model, -1) for one in known], np.int16),
        priority=priority,
    )


def _blocks(prompt: PromptState, block_tokens: int) -> NDArray[np.int64]:
    """Return hashes of the full blocks of *prompt* as engines have them, those of its tokens where they are known."""
    if prompt.tokens and prompt.tokens_block == block_tokens:
        return np.frombuffer(prompt.tokens, np.int64).copy()
    return filled(np.frombuffer(prompt.recorded, np.int64), prompt.block_tokens, block_tokens)


def _with_prompts(
    requests: Requests, known: Sequence[RequestState], prompts: list[NDArray[np.int64]], block_tokens: int
) -> Requests:
    none = np.zeros(0, np.int64)
    most = (requests.prompt_tokens // block_tokens).tolist()
    blocks = [
        (none if one.prompt is None else prompts[one.prompt])[:count] for one, count in zip(known, most, strict=True)
    ]
    first = np.cumsum([0, *(each.size for each in blocks)], dtype=np.int64)
    return requests._replace(prefix_first=first, prefix_hashes=np.concatenate([none, *blocks]))


def _output(state: FleetState, one: RequestState, random: np.random.Generator) -> int:
    """Return output tokens of *one*: known, or drawn from recent ratios to the prediction, beyond those emitted."""
    if one.true_output is not None:
        return one.true_output
    emitted, predicted = _emitted(one), max(1, one.predicted_tokens)
    ratios = np.asarray(state.lengths.get(one.model, ()), np.float64)
    ratios = ratios[ratios * predicted > emitted]
    if ratios.size:
        return int(max(emitted + 1, round(float(random.choice(ratios)) * predicted)))
    return int(predicted if predicted > emitted else max(emitted + 1, round(OVERRUN * emitted)))


def _emitted(one: RequestState) -> int:
    return one.output_tokens if isinstance(one, RunningRequest) else 0
