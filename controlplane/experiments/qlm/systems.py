"""Models, workloads and systems of QLM's evaluation (section 8), as scenarios.

Lengths follow ShareGPT as vLLM's paper has them (prompts of 161 tokens on average, outputs of 338), drawn from lognormal
distributions, for the data set is not at hand. The dispatcher knows no output: it takes the mean of ordinary requests, or
of mega prompts. The paper does not give the shares of classes; our choice stands with each workload.

`qlm` has all four operations: an instance pulls from its own virtual queue, running requests are evicted for ones that
would be late, the global scheduler balances queues, and models are swapped in the order of the queues. Each `without-` lacks
one of them. `RULE+evictions` has them all too, with a rule of `reordering.rules` in place of the search. `edf` is the plain
queue by deadline, and `edf-swapping` the paper's: it swaps to the model of the request that is due first, whenever that is
another's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np

from controlplane.experiments.experiment import Case, Row, read_data
from controlplane.experiments.shared.scenes import ServedModel, requests_of, scenario_of
from controlplane.simulation.running import Simulated
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.columns import Coded, Workload

CLASSES: Final = ("interactive", "batch-1", "batch-2")
SLO_S: Final = (20.0, 60.0, 3600.0)
"""To the first token, by class; the paper's are of the 99th percentile."""
INTERACTIVE, BATCH_1, BATCH_2 = range(3)

DATA: Final = read_data("qlm")
MODELS: Final = {
    key: ServedModel.read(each["name"], {"max_num_seqs": 256, "context_tokens": 4096, **each})
    for key, each in DATA["models"].items()
}


@dataclass(frozen=True, slots=True)
class Tuned:
    """A fine-tuned model of W_B: the class of its requests, and the times of a swap on a node of four A100."""

    name: str
    base: ServedModel
    slo_class: int
    weights_gb: float

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> "Tuned":
        return cls(**{**table, "base": MODELS[table["base"]]})

    @property
    def wake_s(self) -> float:
        """From CPU memory, at 20 GB/s for each GPU, and two seconds more."""
        return 2.0 + self.weights_gb / 80

    @property
    def reload_s(self) -> float:
        """From storage, at 3 GB/s, and five seconds more."""
        return 5.0 + self.weights_gb / 3


OFFLOAD_GB: Final = 80.0
"""CPU memory of an instance of Vicuna-13B for evicted requests (section 8.3)."""
VICUNA_BYTES: Final = 819_200
"""Of a token of Vicuna-13B."""
SLEEP_S: Final = 2.0
CPU_GB: Final = 320.0
"""Of a node, for sleeping models: the paper reserves it for Llama-70B (section 8.3)."""
TUNED: Final = tuple(Tuned.read(each) for each in DATA["tuned"])
"""Models of W_B: Batch-1 of two, Batch-2 of three."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Poisson arrivals from time 0; *waiting* requests are there at the start."""

    slo_class: int
    requests_per_s: float
    model: int = 0
    waiting: int = 0


MEAN_TOKENS: Final = (161.0, 338.0)
"""Of ShareGPT's prompts and outputs."""
SPREAD: Final = (1.1, 0.8)
"""Standard deviations of their logarithms, chosen to look like the paper's figure 8."""
MOST_TOKENS: Final = (2048, 1900)
MEGA_TOKENS: Final = (3000, 4000)
"""Prompt and output together of a mega prompt (section 8, W_C)."""
MEGA_OUTPUT: Final = (100, 1000)


def lognormal(mean: float, spread: float, most: int, count: int, random: np.random.Generator) -> Any:
    """Return *count* lengths from 4 to *most* with this mean and standard deviation of the logarithm."""
    return np.clip(np.rint(mean * np.exp(spread * random.standard_normal(count) - spread**2 / 2)), 4, most)


def draw(
    streams: Sequence[Stream], models: Sequence[str], duration_s: float, seed: int, mega_share: float = 0.0
) -> Workload:
    """Return the requests of *streams* over *duration_s*; *mega_share* of them, of any class, are mega prompts."""
    random = np.random.default_rng([seed, 8])
    arrivals, slo_classes, numbers = [], [], []
    for stream in streams:
        count = int(random.poisson(stream.requests_per_s * duration_s))
        times = [np.zeros(stream.waiting), random.uniform(0.0, duration_s, count)]
        arrivals.append(np.concatenate(times))
        slo_classes.append(np.full(stream.waiting + count, stream.slo_class))
        numbers.append(np.full(stream.waiting + count, stream.model))
    order = np.argsort(np.concatenate(arrivals), kind="stable")
    arrival_s, slo_class, model = (np.concatenate(each)[order] for each in (arrivals, slo_classes, numbers))
    prompt, output = (
        lognormal(mean, spread, most, order.size, random).astype(np.int64)
        for mean, spread, most in zip(MEAN_TOKENS, SPREAD, MOST_TOKENS, strict=True)
    )
    mega = random.random(order.size) < mega_share
    mega_output = random.integers(*MEGA_OUTPUT, order.size)
    total = random.integers(*MEGA_TOKENS, order.size)
    output = np.where(mega, mega_output, output)
    prompt = np.where(mega, total - mega_output, prompt)
    predicted = np.full(order.size, 1)
    for kind in (mega, ~mega):
        if kind.any():
            predicted[kind] = max(1, round(float(output[kind].mean())))
    return requests_of(
        arrival_s, prompt, output, predicted, models=models, model=model, classes=CLASSES, slo_class=slo_class
    )


EVICTIONS: Final = 2
"""Most evictions of one request, as in the bundle *QLM*."""
WITH_EVICTIONS: Final = "+evictions"
SWAPPING_EDF: Final = "edf-swapping"
BATCH_PERCENTILE: Final = 95.0
"""Of a request's tokens, by which fixed batches are sized, so that they fit the memory."""
LONGEST_S: Final = 4 * 3600.0
"""After which requests that still wait count as not served."""
AT_ONCE: Final = 2000
"""Requests that all come together, to measure the throughput of an instance in the long run."""

Drawn = tuple[Scenario, Workload]
"""A fleet under a system, and its requests."""


def policies_of(system: str, served: Sequence[ServedModel], requests: Workload) -> dict[str, Any]:
    """Return the policies of a scenario that make *system*; fixed batches are sized for all of *served*."""
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


def batch_size(served: ServedModel, requests: Workload) -> int:
    """Return the requests in a fixed batch: as many long ones as memory holds, at most those that the engine runs."""
    tokens = np.percentile(requests.prompt_tokens + requests.output_tokens, BATCH_PERCENTILE)
    return max(1, min(served.max_num_seqs, int(served.kv_tokens / tokens)))


def fleet(
    groups: Sequence[dict[str, Any]], policies: Mapping[str, Any], slo_s: Sequence[float] = SLO_S, **tables: Any
) -> Scenario:
    """Return *groups* under *policies*, with *slo_s* to the first token by class; queues are swept, as live."""
    classes = {
        name: {"ttft_ms": 1000 * each_s, "priority": at}
        for at, (name, each_s) in enumerate(zip(CLASSES, slo_s, strict=False))
    }
    return scenario_of(
        groups, policies={"sweeps": True, **policies}, classes=classes,
        **{"sample_s": 1.0, "until_h": LONGEST_S / 3600, **tables},
    )  # fmt: skip


def one_model(
    instances: Sequence[tuple[ServedModel, str]], system: str, requests: Workload,
    slo_s: Sequence[float] = SLO_S, link_gb_s: float | None = None, **policies: Any,
) -> Drawn:  # fmt: skip
    """Return one model, (how it is served, GPU type) by instance, under *system* with further *policies*, and with
    `OFFLOAD_GB` for the KV of evicted requests behind a link of *link_gb_s*.
    """
    queue = {"queue": "fcfs"} if system in ("fcfs", "without-pulling") else {}
    groups = [served.group(gpu=gpu, takes_all=system == "without-pulling", **queue) for served, gpu in instances]
    if link_gb_s is not None:
        groups = [
            group | served.offload(OFFLOAD_GB, link_gb_s, VICUNA_BYTES)
            for group, (served, _) in zip(groups, instances, strict=True)
        ]
    if system == "without-balance":
        # Each instance is a separate model, and requests are dealt to these one after another, as they come.
        groups = [group | {"model": f"{group['model']} {at}"} for at, group in enumerate(groups)]
        dealt = Coded(np.asarray(np.arange(len(requests)) % len(groups), np.int16), [each["model"] for each in groups])
        requests = replace(requests, model=dealt)
    chosen = policies_of(system, [served for served, _ in instances], requests) | policies
    return fleet(groups, chosen, slo_s), requests


def nodes(count: int, system: str, requests: Workload) -> Drawn:
    """Return *count* nodes of four A100 for the models of W_B, of which each node has one at a time; under `shepherd` and
    `without-swapping` every model has separate nodes, and the models with the tightest SLO most.
    """
    if system not in ("shepherd", "without-swapping"):
        return nodes_of(TUNED, count, system, requests)
    tightest_first = sorted(range(len(TUNED)), key=lambda at: TUNED[at].slo_class)
    of_node = [tightest_first[at % len(TUNED)] for at in range(max(count, len(TUNED)))]
    groups = [TUNED[at].base.group(model=TUNED[at].name, gpu="A100") for at in sorted(of_node)]
    policies = policies_of("qlm" if system == "without-swapping" else system, [each.base for each in TUNED], requests)
    return fleet(groups, policies), requests


def nodes_of(
    models: Sequence[Tuned], count: int, system: str, requests: Workload, slo_s: Sequence[float] = SLO_S
) -> Drawn:
    """Return *count* nodes for *models*, of which each node has one at a time."""
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
    return fleet(groups, policies, slo_s, swap_groups=memory), requests


def case(part: str, varied: float | str, system: str, per_s: float, draw: Callable[[int], Drawn]) -> Case:
    """Return *system* on its requests by seed; *per_s* is the rate of the stream that is varied, in requests a second."""
    hooks = {"swapping": lambda simulation: by_deadline_alone} if system == SWAPPING_EDF else {}
    return Case({"part": part, "varied": varied, "system": system, "requests_per_s": per_s}, draw, hooks)


def measured(run: Simulated) -> Row:
    """Return the measures of a run to the end of the last request: seconds, requests a second, shares of requests.

    `ttft_p99_s` is that of the class with the tightest SLO; `attainment` is the share of all requests whose first token came
    within the SLO of their class, `goodput` the rate of these.
    """
    result = run.result
    requests, outcomes = result.requests, result.outcomes
    done, slo_class = outcomes["state"] == Outcome.DONE, np.asarray(requests.slo_class)
    in_time = done & (outcomes["ttft_s"] <= requests.deadline_s)
    there = np.unique(slo_class).tolist()
    last_s = float((requests.arrival_s + np.where(done, outcomes["e2e_s"], 0.0)).max())
    assert result.series is not None
    return {
        "requests": requests.count,
        "attainment": float(in_time.mean()),
        "by_class": {CLASSES[each]: float(in_time[slo_class == each].mean()) for each in there},
        "ttft_p99_s": float(np.nanpercentile(outcomes["ttft_s"][slo_class == there[0]], 99)),
        "throughput": float(done.sum() / last_s),
        "goodput": float(in_time.sum() / last_s),
        "most_waiting": int(result.series["waiting"].sum(axis=-1).max()),
        **{name: result.counters[name] for name in ("swaps", "evictions", "reorderings", "restored_tokens")},
    }


def by_deadline_alone(simulation: Simulation) -> None:
    """Swap as the paper's EDF does: *n* nodes have the models of the *n* requests that are due first, whatever a swap costs.

    A node that has one of these models keeps it.
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


def ends_per_s(served: ServedModel, requests: Workload) -> float:
    """Return the requests a second that one instance ends of *requests*, which are there at once."""
    result = (
        Case.of({}, fleet([served.group()], {"sweeps": False}, sample_s=0.0, until_h=None), requests).simulate().result
    )
    end_s, most = np.sort(result.outcomes["e2e_s"]), 0.9 * len(requests)  # the last ones leave it idle
    return float(most / end_s[int(most)])


@lru_cache
def full_per_s(served: ServedModel) -> float:
    """Return the same of interactive requests."""
    return ends_per_s(served, draw([Stream(INTERACTIVE, 0.0, waiting=AT_ONCE)], [served.name], 1.0, 0))


# Mixes of work that were not used to choose anything: the search of the global scheduler against simple rules, all with
# evictions. Lengths, profiles, promises and seeds differ from those of the paper's workloads. Arrivals are a renewal process
# with gamma distributed gaps, of CV 1 (Poisson) or more (bursts); an output is predicted with an error.

MIX_S: Final = 120.0
MIX_AT_ONCE: Final = 1000
"""Requests that all come together, to measure the throughput of an instance in the long run."""
MIX_SEED: Final = 900
PREDICTION_SPREAD: Final = 0.5
"""Standard deviation of the logarithm of predicted over true output."""
RULES: Final = ("fcfs", "sjf", "edf", "edf-per-queue", "edf-earliest-completion")
"""With evictions, in place of the search."""
OF_ONE_MODEL: Final = ("qlm", *(f"{rule}+evictions" for rule in RULES), "edf", "priority")
OF_SEVERAL: Final = ("qlm", *(f"{rule}+evictions" for rule in RULES), "edf", "edf-swapping")


@dataclass(frozen=True, slots=True)
class Mix:
    """Work of one model, or of several that share the instances; see the experiment's file."""

    served: ServedModel
    instances: int
    prompt: tuple[float, float, int]
    output: tuple[float, float, int]
    slo_s: tuple[float, ...]
    shares: tuple[float, ...]
    models: tuple[Tuned, ...] = ()
    """That share the instances; none: *served* alone."""

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> "Mix":
        models = tuple(Tuned.read(each) for each in table.get("models", ()))
        return cls(**{**table, "served": MODELS[table["served"]], "models": models})

    def requests(self, arrival_s: Any, random: np.random.Generator) -> Workload:
        """Return requests at these times."""
        count = arrival_s.size
        prompt, output = (lognormal(*lengths, count, random) for lengths in (self.prompt, self.output))
        slo_class = random.choice(len(self.shares), count, p=self.shares)
        noise = np.exp(PREDICTION_SPREAD * random.standard_normal(count))
        predicted = np.clip(np.rint(output * noise), 1, self.output[2])
        names = [each.name for each in self.models] or [self.served.name]
        return requests_of(
            arrival_s, prompt, output, predicted, models=names, model=random.integers(0, len(names), count),
            classes=CLASSES[: len(self.shares)], slo_class=slo_class,
        )  # fmt: skip


def arrivals(per_s: float, variation: float, random: np.random.Generator) -> Any:
    """Return times within `MIX_S`, of gaps with that coefficient of variation."""
    shape, count = variation**-2, int(2 * per_s * MIX_S) + 200
    gaps = random.gamma(shape, 1.0 / (shape * per_s), count)
    moments = np.cumsum(gaps)
    return moments[moments < MIX_S]


def mix_per_s(mix: Mix, served: ServedModel) -> float:
    """Return the requests a second that an instance ends while it never runs out of work."""
    requests = mix.requests(np.zeros(MIX_AT_ONCE), np.random.default_rng(MIX_SEED))
    return ends_per_s(served, replace(requests, model=Coded(requests.model.codes * 0, [served.name])))


def mixes(names: Iterable[str], loads: Sequence[float], variations: Sequence[float], scale: float) -> Iterator[Case]:
    """Yield every mix of *names* at each load and variation of gaps under each system."""
    for name in names:
        mix = Mix.read(DATA["mixes"][name])
        count = max(1, round(mix.instances * scale))
        each = [mix_per_s(mix, tuned.base) for tuned in mix.models] or [mix_per_s(mix, mix.served)]
        rate = count * len(each) / sum(1.0 / per_s for per_s in each)
        for variation in variations:
            for load in loads:
                for system in OF_SEVERAL if mix.models else OF_ONE_MODEL:
                    varied = f"{name}, load {load:g}, CV {variation:g}"
                    draw = partial(_mixed, mix, count, load * rate, variation, system)
                    yield case("mixes", varied, system, load * rate, draw)


def _mixed(mix: Mix, count: int, per_s: float, variation: float, system: str, seed: int) -> Drawn:
    random = np.random.default_rng([MIX_SEED, seed])
    requests = mix.requests(arrivals(per_s, variation, random), random)
    if mix.models:
        return nodes_of(mix.models, count, system, requests, mix.slo_s)
    return one_model([(mix.served, "GPU")] * count, system, requests, mix.slo_s)
