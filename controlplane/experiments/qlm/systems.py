"""The systems that QLM's evaluation compares, as clusters of the simulator, and what is measured of a run.

`qlm` has all four operations: an instance pulls from its own virtual queue, what runs is evicted for what would be late, the
global scheduler balances queues, and models are exchanged in the order of the queues. Each `without-` lacks one of them.
`RULE+evictions` has them all too, with a rule of `reordering.rules` in place of the search. `edf` is the plain queue by
deadline, and `edf-swapping` the paper's: it exchanges models for whatever is due first, whenever that is another's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from controlplane.experiments.qlm.workloads import (
    CLASSES,
    CPU_BYTES,
    INTERACTIVE,
    SLEEP_S,
    TUNED,
    Stream,
    Tuned,
    draw,
)
from controlplane.experiments.shared.scenes import ServedModel
from scheduling.policy import Batching, EndpointPolicy
from scheduling.scaling.swapping import LOOK_S
from scheduling.simulation.cluster.description import Cluster, InstanceSpec, Sharing
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.swapping import Swapping
from scheduling.simulation.workload.requests import Requests

HERE: Final = "here"
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
MANY: Final = 100_000
"""Requests that an instance is given at once where it queues by itself."""


@dataclass(frozen=True, slots=True)
class Line:
    """What came of a run. Seconds, requests a second, shares of requests."""

    part: str
    varied: float | str
    system: str
    requests: int
    requests_per_s: float
    """Of the stream whose rate is varied."""
    attainment: float
    """Of all requests: first token within the SLO of the class."""
    by_class: dict[str, float]
    ttft_p99_s: float
    """Of the class with the tightest SLO."""
    throughput: float
    """Requests that ended, by the time until the last one did."""
    goodput: float
    """Of those, the ones in time."""
    most_waiting: int
    """Requests that waited at once."""
    swaps: int
    evictions: int
    reorderings: int


def with_policy(system: str, sizes: Sequence[int], **knobs: Any) -> dict[str, Any]:
    """The options of `Cluster` that make *system*; *sizes* are those of fixed batches, by model."""
    if system in ("fcfs", "priority"):
        return {"policies": EndpointPolicy(ordering=system, **knobs)}
    if system in ("edf", SWAPPING_EDF):
        return {"policies": EndpointPolicy(ordering="deadline", **knobs)}
    if system == "shepherd":
        batching = Batching("dynamic", min(sizes), 0.5)
        return {"policies": EndpointPolicy(ordering="deadline", batching=batching, **knobs)}
    evictions = 0 if system == "without-eviction" else EVICTIONS
    options: dict[str, Any] = {"policies": EndpointPolicy(ordering="qlm", eviction_limit=evictions, **knobs)}
    if system == "without-search":
        options["reordering"] = "edf-per-queue"
    if system.endswith(WITH_EVICTIONS):
        options["reordering"] = system.removesuffix(WITH_EVICTIONS)
    return options


def batch_size(served: ServedModel, requests: Requests) -> int:
    """Requests in a fixed batch: what memory holds of long ones, and at the most what the engine runs."""
    tokens = np.percentile(requests.prompt_tokens + requests.output_tokens, BATCH_PERCENTILE)
    return max(1, min(served.max_num_seqs, int(served.kv_tokens / tokens)))


def one_model(
    instances: Sequence[tuple[ServedModel, str]], system: str, requests: Requests, **knobs: Any
) -> tuple[Cluster, Requests]:
    """A fleet of one model, (how it is served, GPU type) by instance, under *system*, and what it is asked."""
    specs = []
    for served, gpu in instances:
        engine = served.engine()
        if system in ("fcfs", "without-pulling"):
            engine = replace(engine, policy="fcfs")
        specs.append(InstanceSpec(served.name, HERE, engine, gpu))
    if system == "without-pulling":
        specs = [replace(spec, dispatch_max_num_seqs=MANY, dispatch_kv_tokens=MANY * MANY) for spec in specs]
    if system == "without-balance":
        # Each instance is a model of its own, and requests are dealt to these one after another, as they come.
        specs = [replace(spec, model=f"{spec.model} {at}") for at, spec in enumerate(specs)]
        dealt = np.arange(requests.count, dtype=np.int16) % len(specs)
        requests = requests._replace(model=np.asarray(dealt, np.int16))
    sizes = [batch_size(served, requests) for served, _ in instances]
    return Cluster(specs, sweeps=True, **with_policy(system, sizes, **knobs)), requests


def measured(result_of: tuple[Cluster, Requests], part: str, varied: float | str, system: str, per_s: float) -> Line:
    """Run *system* to the end of the last request."""
    cluster, requests = result_of
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
    return Line(
        part=part,
        varied=varied,
        system=system,
        requests=requests.count,
        requests_per_s=per_s,
        attainment=float(in_time.mean()),
        by_class={CLASSES[each]: float(in_time[slo_class == each].mean()) for each in there},
        ttft_p99_s=float(np.nanpercentile(outcomes["ttft_s"][slo_class == there[0]], 99)),
        throughput=float(done.sum() / last_s),
        goodput=float(in_time.sum() / last_s),
        most_waiting=int(result.series["waiting"].sum(axis=-1).max()),
        swaps=result.counters["swaps"],
        evictions=result.counters.get("evictions", 0),
        reorderings=result.counters["reorderings"],
    )


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
        lives_on = simulation.states[target] in (State.ASLEEP, State.EMPTY)
        if lives_on:
            simulation.lives.swap_to(target)


LONGEST_S: Final = 4 * 3600.0
"""After which what still waits is counted as not served."""


AT_ONCE: Final = 2000
"""Requests that all come together, to find what an instance ends in the long run."""


def full_per_s(served: ServedModel) -> float:
    """Requests a second that one instance ends while it never runs out of work."""
    requests = draw([Stream(INTERACTIVE, 0.0, waiting=AT_ONCE)], 1.0, 0)
    result = Simulation(Cluster([InstanceSpec(served.name, HERE, served.engine())]), requests).run()
    end_s = np.sort(result.outcomes["e2e_s"])
    return float(0.9 * AT_ONCE / end_s[int(0.9 * AT_ONCE)])  # the last ones leave it idle


def nodes(count: int, system: str, requests: Requests) -> tuple[Cluster, Requests]:
    """*count* nodes of four A100 for the models of W_B, of which each node has one at a time; under `shepherd` and
    `without-swapping` every model has nodes of its own, and the models with the tightest SLO most."""
    if system not in ("shepherd", "without-swapping"):
        return nodes_of(TUNED, count, system, requests)
    tightest_first = sorted(range(len(TUNED)), key=lambda at: TUNED[at].slo_class)
    of_node = [tightest_first[at % len(TUNED)] for at in range(max(count, len(TUNED)))]
    specs = [InstanceSpec(TUNED[at].name, HERE, TUNED[at].base.engine(), "A100") for at in sorted(of_node)]
    sizes = [batch_size(each.base, requests) for each in TUNED]
    options = with_policy("qlm" if system == "without-swapping" else system, sizes)
    return Cluster(specs, sweeps=True, **options), requests


def nodes_of(models: Sequence[Tuned], count: int, system: str, requests: Requests) -> tuple[Cluster, Requests]:
    """*count* nodes for *models*, of which each node has one at a time."""
    specs = [_sharing(each, node, at == node % len(models)) for node in range(count) for at, each in enumerate(models)]
    memory = {f"node {node}": CPU_BYTES for node in range(count)}
    if system == "fcfs":
        specs = [replace(spec, engine=replace(spec.engine, policy="fcfs")) for spec in specs]
    options = with_policy(system, [batch_size(each.base, requests) for each in models])
    return Cluster(specs, sweeps=True, swap_memory_bytes=memory, **options), requests


def _sharing(tuned: Tuned, node: int, awake: bool) -> InstanceSpec:
    sharing = Sharing(f"node {node}", SLEEP_S, tuned.wake_s, tuned.reload_s, tuned.weights_bytes)
    state = State.READY if awake else State.ASLEEP
    return InstanceSpec(tuned.name, HERE, tuned.base.engine(), "A100", state=state, sharing=sharing)
