"""The systems that QLM's evaluation compares, as fleets of the simulator, and what is measured of a run.

`qlm` has all four operations: an instance pulls from its own virtual queue, what runs is evicted for what would be late, the
global scheduler balances queues, and models are exchanged in the order of the queues. Each `without-` lacks one of them.
`RULE+evictions` has them all too, with a rule of `reordering.rules` in place of the search. `edf` is the plain queue by
deadline, and `edf-swapping` the paper's: it exchanges models for whatever is due first, whenever that is another's.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from controlplane.experiments.qlm.workloads import CLASSES, CPU_GB, INTERACTIVE, SLEEP_S, TUNED, Stream, Tuned, draw
from controlplane.experiments.shared.scenes import ServedModel, fleet
from scheduling.scaling.swapping import LOOK_S
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.swapping import Swapping
from scheduling.simulation.workload.requests import Requests

EVICTIONS: Final = 2
"""Of one request at the most, as in the bundle *QLM*."""
WITH_EVICTIONS: Final = "+evictions"
SWAPPING_EDF: Final = "edf-swapping"
BASELINES: Final = ("edf", "fcfs", "shepherd")
SYSTEMS: Final = (
    "qlm",
    *BASELINES,
    "priority",
    *(f"{rule}{WITH_EVICTIONS}" for rule in ("fcfs", "edf", "edf-per-queue", "shepherd")),
)
"""`shepherd` has fixed batches, `shepherd+evictions` its order of groups with continuous batching."""
WITHOUT: Final = ("without-pulling", "without-eviction", "without-balance", "without-search")
BATCH_PERCENTILE: Final = 95.0
"""Of a request's tokens, by which fixed batches are sized, so that they fit the memory."""
LONGEST_S: Final = 4 * 3600.0
"""After which what still waits is counted as not served."""
AT_ONCE: Final = 2000
"""Requests that all come together, to find what an instance ends in the long run."""

Made = tuple[Cluster, Requests]
"""A fleet under a system, and what it is asked."""


def policies_of(system: str, served: Sequence[ServedModel], requests: Requests) -> dict[str, Any]:
    """The policies of a scenario that make *system*; fixed batches are sized for all of *served*."""
    if system in ("fcfs", "priority"):
        return {"ordering": system}
    if system in ("edf", SWAPPING_EDF):
        return {"ordering": "deadline"}
    if system == "shepherd":
        size = min(batch_size(each, requests) for each in served)
        batching = {"mode": "dynamic", "max_batch_size": size, "wait_timeout_s": 0.5}
        return {"ordering": "deadline", "batching": batching}
    policies = {"ordering": "qlm", "eviction_limit": 0 if system == "without-eviction" else EVICTIONS}
    if system == "without-search":
        return {**policies, "reordering": "edf-per-queue"}
    if system.endswith(WITH_EVICTIONS):
        return {**policies, "reordering": system.removesuffix(WITH_EVICTIONS)}
    return policies


def batch_size(served: ServedModel, requests: Requests) -> int:
    """Requests in a fixed batch: what memory holds of long ones, and at the most what the engine runs."""
    tokens = np.percentile(requests.prompt_tokens + requests.output_tokens, BATCH_PERCENTILE)
    return max(1, min(served.max_num_seqs, int(served.kv_tokens / tokens)))


def one_model(instances: Sequence[tuple[ServedModel, str]], system: str, requests: Requests, **policies: Any) -> Made:
    """One model, (how it is served, GPU type) by instance, under *system* with further *policies*."""
    queue = {"queue": "fcfs"} if system in ("fcfs", "without-pulling") else {}
    groups = [served.group(gpu=gpu, **queue) for served, gpu in instances]
    if system == "without-balance":
        # Each instance is a model of its own, and requests are dealt to these one after another, as they come.
        groups = [group | {"model": f"{group['model']} {at}"} for at, group in enumerate(groups)]
        requests = requests._replace(model=np.asarray(np.arange(requests.count) % len(groups), np.int16))
    chosen = policies_of(system, [served for served, _ in instances], requests) | policies
    return fleet(groups, deep=system == "without-pulling", sweeps=True, policies=chosen), requests


def nodes(count: int, system: str, requests: Requests) -> Made:
    """*count* nodes of four A100 for the models of W_B, of which each node has one at a time; under `shepherd` and
    `without-swapping` every model has nodes of its own, and the models with the tightest SLO most."""
    if system not in ("shepherd", "without-swapping"):
        return nodes_of(TUNED, count, system, requests)
    tightest_first = sorted(range(len(TUNED)), key=lambda at: TUNED[at].slo_class)
    of_node = [tightest_first[at % len(TUNED)] for at in range(max(count, len(TUNED)))]
    groups = [TUNED[at].base.group(model=TUNED[at].name, gpu="A100") for at in sorted(of_node)]
    policies = policies_of("qlm" if system == "without-swapping" else system, [each.base for each in TUNED], requests)
    return fleet(groups, sweeps=True, policies=policies), requests


def nodes_of(models: Sequence[Tuned], count: int, system: str, requests: Requests) -> Made:
    """*count* nodes for *models*, of which each node has one at a time."""
    queue = {"queue": "fcfs"} if system == "fcfs" else {}
    groups = []
    for node in range(count):
        for at, each in enumerate(models):
            awake = at == node % len(models)
            sharing = {
                "group": f"node {node}", "sleep_s": SLEEP_S, "wake_s": each.wake_s, "reload_s": each.reload_s,
                "weights_gb": each.weights_gb,
            }  # fmt: skip
            state = {"instances": int(awake), "asleep": int(not awake)}
            groups.append(each.base.group(model=each.name, gpu="A100", sharing=sharing, **state, **queue))
    memory = {f"node {node}": {"cpu_memory_gb": CPU_GB} for node in range(count)}
    policies = policies_of(system, [each.base for each in models], requests)
    return fleet(groups, sweeps=True, swap_groups=memory, policies=policies), requests


def measured(made: Made, part: str, varied: float | str, system: str, per_s: float) -> dict[str, Any]:
    """Run *system* to the end of the last request: seconds, requests a second, shares of requests.

    `requests_per_s` is that of the stream whose rate is varied, `ttft_p99_s` that of the class with the tightest SLO;
    `attainment` is the share of all requests whose first token came within the SLO of their class, `goodput` of these.
    """
    cluster, requests = made
    simulation = Simulation(cluster, requests, sample_s=1.0)
    swaps: Callable[[Simulation], None] | None = Swapping(simulation) if cluster.swap_groups() else None
    if swaps is not None and system == SWAPPING_EDF:
        swaps = by_deadline_alone
    result = simulation.run(swaps, LOOK_S, until_s=LONGEST_S)
    outcomes, slo_class = result.outcomes, np.asarray(requests.slo_class)
    done = outcomes["state"] == Outcome.DONE
    in_time = done & (outcomes["ttft_s"] <= requests.deadline_s)
    there = np.unique(slo_class).tolist()
    last_s = float((requests.arrival_s + np.where(done, outcomes["e2e_s"], 0.0)).max())
    assert result.series is not None
    return {
        "part": part,
        "varied": varied,
        "system": system,
        "requests": requests.count,
        "requests_per_s": per_s,
        "attainment": float(in_time.mean()),
        "by_class": {CLASSES[each]: float(in_time[slo_class == each].mean()) for each in there},
        "ttft_p99_s": float(np.nanpercentile(outcomes["ttft_s"][slo_class == there[0]], 99)),
        "throughput": float(done.sum() / last_s),
        "goodput": float(in_time.sum() / last_s),
        "most_waiting": int(result.series["waiting"].sum(axis=-1).max()),
        **{name: result.counters[name] for name in ("swaps", "evictions", "reorderings")},
    }


def by_deadline_alone(simulation: Simulation) -> None:
    """Swap as the paper's EDF does: each node has the model of a request that is due first, whatever a swap costs.

    With as many nodes as requests that are due first, the models of these; a node that has one of them keeps it.
    """
    waiting, lives = simulation.waiting, simulation.world.lives
    groups: dict[int, list[int]] = {}
    for instance, group in enumerate(lives.instances["swap_group"].tolist()):
        groups.setdefault(group, []).append(instance)
    slots = np.flatnonzero(waiting.position >= 0)
    first = slots[np.lexsort((waiting.sequence[slots], waiting.key[slots]))][: len(groups)]
    wanted = waiting.endpoint[first].tolist()
    free = []
    for members in groups.values():
        holders = [each for each in members if simulation.states[each] not in (State.ASLEEP, State.EMPTY)]
        held = int(simulation.fleet.endpoint[holders[0]]) if holders else -1
        if held in wanted:
            wanted.remove(held)
        elif not holders or simulation.states[holders[0]] == State.READY:
            free.append(members)
    for members, endpoint in zip(free, wanted, strict=False):
        target = next(each for each in members if simulation.fleet.endpoint[each] == endpoint)
        if simulation.states[target] in (State.ASLEEP, State.EMPTY):
            simulation.lives.swap_to(target)


def ends_per_s(served: ServedModel, requests: Requests) -> float:
    """Requests a second that one instance ends of *requests*, which are there at once; the last ones leave it idle."""
    result = Simulation(fleet([served.group()]), requests).run()
    end_s, most = np.sort(result.outcomes["e2e_s"]), 0.9 * requests.count
    return float(most / end_s[int(most)])


@lru_cache
def full_per_s(served: ServedModel) -> float:
    """The same of interactive requests."""
    return ends_per_s(served, draw([Stream(INTERACTIVE, 0.0, waiting=AT_ONCE)], 1.0, 0))
