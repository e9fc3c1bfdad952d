"""Scenarios drawn from a seed. A feature is how it changes what is drawn, and how it is seen that it acted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

import msgspec
import numpy as np

from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.standings import KnownGraph, Reading
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.held import ENDS_ON_RECLAIM, HELD, OPPORTUNISTIC
from scheduling.queueing.ordering import hold_s
from scheduling.queueing.promises import DEGRADE, REFUSE, ClassTerms
from scheduling.queueing.release_rule import ReleaseRule
from scheduling.routing.models import Fallback
from scheduling.simulation.cluster.description import Cluster, Delays, InstanceSpec, Sharing
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.workload.requests import make_requests
from scheduling.simulation.workload.runs import ApplicationToCome, RunsToCome, RunToCome
from tests.clocks.both import Both, Command, Scenario

BLOCK_TOKENS = 4
PROFILE = Profile(0.05, 0.04, 1e-3, 0.0, 0.04, 0.002, 1e-5)
FAST = Profile(0.02, 0.01, 2e-4, 0.0, 0.04, 0.002, 1e-5)


@dataclass
class Draft:
    """A scenario that is being drawn: two models in three regions, one to three small instances each."""

    random: np.random.Generator
    policies: Sequence[dict[str, Any]]
    """Of each model."""
    count: int = 150
    per_s: float = 40.0
    specs: list[InstanceSpec] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    """Of the cluster."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Of the requests."""
    arrival_s: Any = None
    prompt: Any = None
    output: Any = None
    more: dict[str, Any] = field(default_factory=dict)
    """Of the scenario."""

    def __post_init__(self) -> None:
        random = self.random
        for model, policy, speed in zip("mn", self.policies, (1.0, 0.6), strict=False):
            for region in ("east", "north", "west"):
                for _ in range(int(random.integers(1, 4))):
                    self.specs.append(InstanceSpec(model, region, self.engine(policy, speed)))
        self.draw_requests()

    def engine(self, policy: dict[str, Any], speed: float) -> EngineConfig:
        by_prefix = policy.get("routing") == "least_delay"  # a hash stands for a block of one size
        block = BLOCK_TOKENS if by_prefix else int(self.random.choice([1, 2, 4, 5, 16]))
        return EngineConfig(
            max_num_seqs=int(self.random.integers(2, 7)),
            max_num_batched_tokens=int(self.random.integers(8, 64)),
            block_size_tokens=block,
            kv_blocks=-(-int(self.random.integers(120, 240)) // block),
            policy="fcfs" if policy.get("ordering", "fcfs") == "fcfs" else "priority",
            max_model_len=120,
            profile=replace(PROFILE, decode_c_s_per_token=1e-5 * speed),
            prefix_caching=by_prefix,
        )

    def draw_requests(self, mean_tokens: float = 20.0) -> None:
        random, count = self.random, self.count
        self.arrival_s = np.cumsum(random.exponential(1 / self.per_s, count))
        self.output = np.clip(random.geometric(1 / mean_tokens, count), 1, 60)
        self.prompt = random.integers(1, 55, count)
        self.columns = {
            "predicted_tokens": np.clip(self.output + random.integers(-15, 15, count), 1, None),
            "model": random.integers(0, len({spec.model for spec in self.specs}), count),
            "region": random.integers(0, 3, count),
            "priority": random.integers(0, 3, count),
            "tenant": random.choice(3, count, p=[0.6, 0.3, 0.1]),
        }

    def engines(self, **changed: Any) -> None:
        self.specs = [replace(spec, engine=replace(spec.engine, **changed)) for spec in self.specs]

    def policy(self, **changed: Any) -> None:
        self.policies = [policy | changed for policy in self.policies]

    def done(self) -> Scenario:
        defaults = {"ordering_stretch": 0.7, "queue_bound": 40}
        of_model = dict(zip("mno", self.policies, strict=False))
        policies = {(spec.model, spec.region): EndpointPolicy(**defaults | of_model[spec.model]) for spec in self.specs}
        cluster = Cluster(self.specs, policies=policies, sweeps=True, **self.options)
        blocks = self.more.get("blocks")
        requests = make_requests(self.arrival_s, self.prompt, self.output, prefix_blocks=blocks, **self.columns)
        return Scenario(cluster, requests, **self.more)


# What traffic there is


def due(draft: Draft) -> None:
    random, count = draft.random, draft.count
    draft.columns["deadline_s"] = np.where(random.random(count) < 0.7, random.integers(1, 9, count), inf)
    draft.columns["end_s"] = np.where(random.random(count) < 0.5, random.integers(2, 9, count), inf)


def flood(draft: Draft) -> None:
    draft.per_s = 200.0
    draft.arrival_s = np.cumsum(draft.random.exponential(1 / draft.per_s, draft.count))
    draft.policy(queue_bound=12)


def one_sided(draft: Draft) -> None:
    """Nearly all callers are in one region."""
    draft.columns["region"] = np.where(draft.random.random(draft.count) < 0.8, 0, 1)


def bound(draft: Draft) -> None:
    """Of three tenants, requests of one are bound to one region, and of another to another and one that does not exist."""
    regions = list(dict.fromkeys(spec.region for spec in draft.specs))
    draft.options["residency"] = (regions[-1],), (*regions[:1], "nowhere")
    draft.columns["region"] = draft.columns["region"] + len(regions) * draft.columns["tenant"]


def impatient(draft: Draft) -> None:
    """Requests of classes with a deadline are held until it, others for half a second."""
    random = draft.random
    deadlines_s = [inf if random.random() < 0.5 else float(random.integers(2, 4)) for _ in range(draft.count)]
    draft.options["max_hold_s"] = 0.5
    draft.more["deadlines_s"] = deadlines_s
    draft.columns["hold_s"] = [hold_s(each, 0.5) for each in deadlines_s]


def held(draft: Draft) -> None:
    """Four of ten requests are held: some until there is room, some until their slack is used up, some opportunistic."""
    random, count = draft.random, draft.count
    draft.policies = [
        policy | {"niw": ReleaseRule(by=by)} for policy, by in zip(draft.policies, ("slack", "use"), strict=True)
    ]
    kinds = random.choice([0, 1, 2], count, p=[0.6, 0.3, 0.1])
    due_s = np.where(kinds > 0, random.integers(61, 68, count).astype(float), inf)
    draft.more["deadlines_s"] = due_s
    draft.columns |= {"priority": np.minimum(kinds, 1), "end_s": due_s, "hold_s": due_s}
    draft.columns["held"] = np.array([0, HELD, HELD + OPPORTUNISTIC])[kinds]


def weights(draft: Draft) -> None:
    draft.options["tenant_weights"] = (1.0, 2.0, 0.5)  # powers of two: sums are exact


def prefixes(draft: Draft) -> None:
    """Four kinds of prompts begin alike, each for some way."""
    random = draft.random
    shared = random.integers(0, draft.prompt // BLOCK_TOKENS + 1)
    kinds = random.integers(1, 5, draft.count)
    draft.more["blocks"] = [
        [1000 * int(kind) + at for at in range(count)] for kind, count in zip(kinds, shared, strict=True)
    ]


def kv_events(draft: Draft) -> None:
    draft.policy(follow_kv_events=True)
    draft.more["tuned"] = {"publishes": True}


def offloads(draft: Draft) -> None:
    """KV that leaves the GPU of an instance stays in its CPU memory, as far as it fits there."""
    blocks, link = draft.random.integers(20, 200), {"restore_s": 0.003, "restore_s_per_token": 5e-5}
    draft.engines(prefix_caching=True, block_size_tokens=BLOCK_TOKENS, kv_blocks=70, offload_blocks=int(blocks), **link)


def adapters(draft: Draft) -> None:
    random = draft.random
    draft.options["prewarming"] = "hermes"
    draft.specs = [
        replace(spec, engine=replace(spec.engine, max_loras=int(random.integers(1, 3)), max_cpu_loras=4))
        for spec in draft.specs
    ]
    draft.columns["adapter"] = random.integers(-1, 8, draft.count)


def urgent(draft: Draft) -> None:
    """Long answers that may wait for minutes fill every instance; a quarter of what comes is short and due in seconds."""
    random, count = draft.random, draft.count
    draft.arrival_s = np.cumsum(random.exponential(1 / 8.0, count))
    interactive = random.random(count) < 0.25
    draft.output = np.where(interactive, random.integers(1, 15, count), random.integers(80, 200, count))
    draft.columns |= {
        "predicted_tokens": np.clip(draft.output + random.integers(-20, 20, count), 1, None),
        "priority": np.where(interactive, 0, 1),
        "deadline_s": np.where(
            interactive, random.integers(1, 3, count), np.where(random.random(count) < 0.5, 600, inf)
        ),
    }
    draft.policy(eviction_limit=2, queue_bound=200)
    draft.engines(block_size_tokens=4, kv_blocks=250, max_model_len=400, profile=FAST, max_num_batched_tokens=64)


def evicted_kv(draft: Draft) -> None:
    """Evicted requests return to the one instance of their model when others have taken their memory on its GPU."""
    urgent(draft)
    draft.specs = [replace(spec, region="east") for spec in (draft.specs[0], draft.specs[-1])]
    draft.prompt = np.where(draft.columns["priority"] == 0, 54, draft.prompt)
    draft.arrival_s, draft.columns["region"] = 2.0 * draft.arrival_s, 0
    draft.policy(eviction_limit=3)
    offloads(draft)
    draft.engines(kv_blocks=110, max_num_seqs=3, offload_blocks=1000)


# What the fleet is like


def round_trip(draft: Draft) -> None:
    draft.policy(dispatch_round_trip_ms=300.0)


def front_ends(draft: Draft) -> None:
    draft.engines(front_end=FrontEnd(40.0, 60.0), max_num_seqs=6)  # carries four of these requests


def overcommitted(draft: Draft) -> None:
    """The dispatcher gives instances more than they run at once and have memory for: they preempt."""
    draft.specs = [
        replace(
            spec,
            dispatch_max_num_seqs=2 * spec.engine.max_num_seqs,
            dispatch_kv_tokens=3 * spec.engine.kv_capacity_tokens,
        )
        for spec in draft.specs
    ]


def pooling(draft: Draft) -> None:
    draft.options["pooling"] = ("m",)
    draft.output = np.where(draft.columns["model"] == 0, 1, draft.output)
    draft.columns["predicted_tokens"] = np.where(draft.columns["model"] == 0, 1, draft.columns["predicted_tokens"])
    draft.engines(max_num_batched_tokens=120)


def failures(draft: Draft) -> None:
    last = len(draft.specs) - 1
    fails = (1.503, 0), (2.119, last), (3.017, 1), (3.411, last - 1)
    draft.more["commands"] = [Command(at_s, "fail", (number, inf)) for at_s, number in fails]


def fallbacks(draft: Draft) -> None:
    draft.options["fallbacks"] = {"m": Fallback("n")}
    draft.policies = [draft.policies[0] | {"queue_bound": 6}, draft.policies[1] | {"queue_bound": None}]


def late_fallbacks(draft: Draft) -> None:
    flood(draft)
    draft.options["fallbacks"] = {"m": Fallback("n", 0.5)}
    draft.policy(queue_bound=None)


def promises(draft: Draft, if_unreachable: str = REFUSE) -> None:
    """The promises of the first class are judged at the door; the second takes what is degraded."""
    lower = ClassTerms("batch", priority=5, deadline_s=1800.0, interactive=False)
    first = ClassTerms("chat", due_s=1.0, if_unreachable=if_unreachable, degrades_to="batch")
    draft.options["classes"] = first, lower
    draft.columns |= {"deadline_s": 1.0, "judged": 1, "priority": 0, "slo_class": 0}


def degrades(draft: Draft) -> None:
    promises(draft, DEGRADE)


def spot(draft: Draft) -> None:
    """Instances are donated, reclaimed and redeployed; four in ten requests are opportunistic, half of which end then."""
    draft.count = 400
    draft.draw_requests()
    random, count = draft.random, draft.count
    engine = EngineConfig(5, 64, 4, 100, "priority", 120, PROFILE)
    places = [("m", "east")] * 3 + [("m", "west")] * 2 + [("n", "east")] * 3
    draft.specs = [
        InstanceSpec(*place, engine, state=State.SPOT if at == 4 else State.READY) for at, place in enumerate(places)
    ]
    draft.policy(region_threshold=0.5, queue_bound=None, ordering_stretch=100.0)
    draft.options["delays"] = Delays(spot_median_s=1.0, local_weights_s=3.0)
    kinds = np.array([0, HELD, HELD + OPPORTUNISTIC, HELD + OPPORTUNISTIC + ENDS_ON_RECLAIM])
    kind = random.choice(kinds, count, p=[0.5, 0.1, 0.2, 0.2])
    draft.arrival_s = np.cumsum(random.exponential(1 / 16, count))
    draft.columns |= {
        "model": random.choice([0, 1], count, p=[0.7, 0.3]),
        "region": random.integers(0, 2, count),
        "priority": np.minimum(kind, 1),
        "held": kind,
    }
    draft.more["commands"] = [
        Command(2.003, "drain", (1,)), Command(4.003, "drain", (5,)), Command(9.003, "start", (4,)),
        Command(13.003, "start", (1,)), Command(14.003, "redeploy", (5, 0)),
    ]  # fmt: skip


def lives(draft: Draft) -> None:
    """Instances stop, start, sleep, wake, fail and are repaired."""
    random = draft.random
    draft.per_s = 12.0
    draft.draw_requests()
    engine = EngineConfig(4, 64, 4, 100, "priority", 120, PROFILE)
    states = [State.READY, State.READY, State.READY, State.EMPTY, State.ASLEEP]
    draft.specs = [InstanceSpec(model, "east", engine, state=state) for model in "mn" for state in states]
    draft.columns["region"] = 0
    draft.policy(queue_bound=None)
    draft.options["delays"] = Delays(
        spot_median_s=1.0, start_s=1.01, local_weights_s=2.03, remote_weights_s=0.52, wake_s=0.76
    )
    times = np.sort(random.uniform(0.2, 9.0, 8)).tolist()
    names = ["start", "stop", "wake", "sleep", "fail", "start", "wake", "drain"]
    numbers = [3, 0, 4, 1, 7, 8, 9, 6]
    draft.more["commands"] = [
        Command(at_s, name, (number, 1.37) if name == "fail" else (number,))
        for at_s, name, number in zip(times, names, numbers, strict=True)
    ]


def shared_gpus(
    draft: Draft, per_s: Sequence[float] = (1.5, 1.5), due_s: Sequence[float] = (20.0, 60.0), for_s: float = 75.0
) -> None:
    """Two models have the same GPUs, at most one of them awake; one in ten of their requests may come at any time."""
    random = draft.random
    engine = EngineConfig(8, 64, 4, 600, "priority", 400, FAST)
    draft.specs = [
        InstanceSpec("m", "east", engine, sharing=Sharing("pair", 1.0, 2.0, 20.0, 1.0)),
        InstanceSpec("n", "east", engine, state=State.ASLEEP, sharing=Sharing("pair", 0.4, 3.0, 20.0, 1.0)),
    ]
    draft.policy(queue_bound=10_000, ordering_stretch=100.0)
    draft.options["delays"] = Delays(local_weights_s=6.0)
    arrival_s = [random.uniform(0.0, for_s, random.poisson(rate * for_s)) for rate in per_s]
    model = np.repeat(np.arange(len(per_s)), [each.size for each in arrival_s])
    order = np.argsort(np.concatenate(arrival_s))
    model, count = model[order], order.size
    draft.arrival_s, draft.count = np.concatenate(arrival_s)[order], count
    draft.output = np.clip(random.geometric(1 / 40, count), 1, 150)
    draft.prompt = random.integers(1, 40, count)
    draft.columns = {
        "predicted_tokens": np.clip(draft.output + random.integers(-15, 15, count), 1, None),
        "model": model,
        "deadline_s": np.where(random.random(count) < 0.9, np.array(due_s)[model], inf),
    }


def short_memory(draft: Draft) -> None:
    """A third model is needed more often than the second, which has the CPU memory at first: room for one's weights."""
    shared_gpus(draft, (0.2, 0.02, 0.2), (20.0, 60.0, 20.0), 300.0)
    first, second = draft.specs
    draft.specs = [
        replace(each, model=model, sharing=Sharing("pair", 0.4, 1.0, 3.0, 1.0, 1.0))
        for each, model in ((first, "m"), (second, "n"), (second, "o"))
    ]


def woken_from_memory(both: Both, instance: int) -> int:
    """Return how often *instance* woke in less than two seconds."""
    changes = both.result.changes
    times_s = {
        of: changes["time_s"][(changes["instance"] == instance) & (changes[of] == State.WAKING)]
        for of in ("before", "after")
    }
    ended = times_s["before"]
    return int((ended - times_s["after"][: ended.size] < 2.0).sum())


def stopped_model(draft: Draft) -> None:
    """The second model on the GPUs is stopped at first: it starts, and sleeps from then on."""
    shared_gpus(draft)
    draft.specs[1] = replace(draft.specs[1], state=State.EMPTY)


# Application runs

UNITS = {name: Backend("llm", model) for name, model in (("plan", "m"), ("work", "n"), ("check", "m"))} | {
    "test": Backend("container", "python")
}
RATES = {name: ServiceRate(0.04, 1e-3, 0.04) if unit.kind == "llm" else ServiceRate() for name, unit in UNITS.items()}
PROMPTS = {"plan": 4, "work": 6, "check": 3}
"""Blocks of the system prompt of each unit."""
RUNS = 50


def drawn_record(random: np.random.Generator, loops: int) -> RunRecord:
    """Draw a plan, work in parallel, its tests, and checks, of which each leads to more work with a chance of one half."""
    steps = [Step("plan", -1, int(random.integers(5, 40)), int(random.integers(2, 30)))]
    for _ in range(1 + random.binomial(loops, 0.5)):
        prompt, output = int(random.integers(5, 40)), int(random.integers(2, 40))
        steps.append(Step("work", len(steps) - 1, prompt, output, parallelism=int(random.integers(1, 4))))
        if random.random() < 0.5:
            duration_s = float(random.uniform(0.05, 1.5))
            steps.append(Step("test", len(steps) - 1, duration_s=duration_s, parallelism=int(random.integers(1, 3))))
        steps.append(Step("check", len(steps) - 1, 10, int(random.integers(1, 10))))
    return RunRecord(tuple(steps))


def runs(draft: Draft, gap_s: float = 0.15, kinds: Sequence[tuple[int, int]] = ((0, 40), (6, 3))) -> None:
    """Two applications, of which one loops; calls come once the steps before them have ended."""
    random = draft.random
    orderings = {policy.get("ordering") for policy in draft.policies}
    late_last = bool(orderings & {"run_deadline", "run_slack"})
    graphs = [
        KnownGraph.of(DemandGraph(f"a{at}", UNITS, [drawn_record(random, loops) for _ in range(recorded)]), RATES)
        for at, (loops, recorded) in enumerate(kinds)
    ]
    applications = [ApplicationToCome(f"a{at}", UNITS, graph) for at, graph in enumerate(graphs)]
    began_s = np.cumsum(random.exponential(gap_s, RUNS)).tolist()
    made = []
    for began in began_s:
        kind = int(random.integers(0, len(kinds)))
        made.append(RunToCome(kind, began, float(random.integers(5, 60)), drawn_record(random, kinds[kind][0])))
    of_runs(draft, RunsToCome(applications, made, reading=Reading(late_last=late_last)))
    draft.more["graph_names"] = [(f"a{at}", graph) for at, graph in enumerate(graphs)]
    draft.more["tuned"] = {"LATE_RUNS_LAST": late_last}


def of_runs(draft: Draft, runs: RunsToCome) -> None:
    """Let the requests be the calls of *runs*."""
    random = draft.random
    units = [each.units for each in runs.applications]
    models = list(dict.fromkeys(spec.model for spec in draft.specs))
    rows = [
        (number, run.began_s, step.input_tokens, step.output_tokens, models.index(unit.name))
        for number, run in enumerate(runs.runs)
        for step in run.record.steps
        for _ in range(step.parallelism)
        if (unit := units[run.application][step.unit]).kind == "llm"
    ]
    run_of, draft.arrival_s, draft.prompt, draft.output, model = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    draft.count, count = draft.output.size, len(runs.runs)
    places = len({spec.region for spec in draft.specs})
    draft.columns = {
        "predicted_tokens": np.clip(draft.output + random.integers(-15, 15, draft.count), 1, None),
        "region": random.integers(0, places, count)[run_of],
        "tenant": random.integers(0, 3, count)[run_of],
        "model": model,
        "run": run_of,
    }
    draft.policy(queue_bound=None)
    draft.more["runs"] = runs


def many_runs(draft: Draft) -> None:
    runs(draft, gap_s=0.02)


def classes_of_runs(draft: Draft) -> None:
    """Each tenant's calls are of one class, so groups are: due so soon that some would be late in the order they came."""
    tenant = draft.columns["tenant"]
    classes = ((0, 1.0, inf), (1, inf, 8.0), (2, inf, inf))
    priority, due_s, end_s = (np.array(column)[tenant] for column in zip(*classes, strict=True))
    draft.columns |= {"priority": priority, "deadline_s": due_s, "end_s": end_s}


def prewarmed_adapters(draft: Draft) -> None:
    draft.options["prewarming"] = "hermes"
    draft.engines(max_loras=2, max_cpu_loras=4)
    draft.columns["adapter"] = draft.random.integers(0, 12, RUNS)[draft.columns["run"]]


def system_prompts(draft: Draft) -> None:
    """Six versions of an application, each with its own prompts; memory holds a few of them."""
    random, versions = draft.random, 6
    draft.options |= {"prewarming": "hermes", "prewarm_share": 1.0}
    graph = KnownGraph.of(DemandGraph("a0", UNITS, [drawn_record(random, 6) for _ in range(40)]), RATES)
    began_s, version = np.cumsum(random.exponential(0.6, RUNS)), random.integers(0, versions, RUNS)
    units = {
        name: msgspec.structs.replace(unit, prompt=name) if name in PROMPTS else unit for name, unit in UNITS.items()
    }
    made = [
        RunToCome(0, float(began), inf, drawn_record(random, 6), int(of))
        for began, of in zip(began_s, version, strict=True)
    ]
    of_runs(draft, RunsToCome([ApplicationToCome("a0", units, graph)], made))
    whose = [
        step.unit for run in made for step in run.record.steps for _ in range(step.parallelism) if step.unit in PROMPTS
    ]
    draft.more["blocks"] = [
        [1_000_000 * (1 + int(version[run])) + 1000 * list(PROMPTS).index(unit) + at for at in range(PROMPTS[unit])]
        for run, unit in zip(draft.columns["run"], whose, strict=True)
    ]
    draft.prompt = draft.prompt + BLOCK_TOKENS * np.array([len(each) for each in draft.more["blocks"]])
    draft.more["system_blocks"] = [PROMPTS[unit] for unit in whose]
    draft.more["name_of"] = lambda run: f"a{run.application} {run.prompts}"
    draft.more["graph_names"] = [(f"a0 {number}", graph) for number in range(versions)]
    del draft.columns["tenant"]


def sleeping_model(draft: Draft) -> None:
    """The second unit of a run is served by a model that sleeps."""
    random = draft.random
    engine = EngineConfig(4, 64, 4, 400, "fcfs", 400, PROFILE)
    states = ("m", State.READY), ("m", State.READY), ("n", State.ASLEEP)
    draft.specs = [InstanceSpec(model, "east", engine, state=state) for model, state in states]
    draft.options |= {"prewarming": "hermes", "delays": Delays(wake_s=5.0)}
    draft.policy(ordering_stretch=100.0)

    def record() -> RunRecord:
        plan = Step("plan", -1, 20, int(random.integers(200, 260)))
        return RunRecord((plan, Step("test", 0, duration_s=4.0), Step("work", 1, 20, 15)))

    graph = KnownGraph.of(DemandGraph("a0", UNITS, [record() for _ in range(40)]), RATES)
    made = [RunToCome(0, 0.3 + 2.1 * number, inf, record()) for number in range(6)]
    of_runs(draft, RunsToCome([ApplicationToCome("a0", UNITS, graph)], made))
    draft.more["graph_names"] = [("a0", graph)]


class Feature(NamedTuple):
    draw: Callable[[Draft], None]
    acted: Callable[[Both], bool]
    """Whether it made a difference: a scenario in which it did not would pass for nothing."""


def refused(code: str, least: int = 1) -> Callable[[Both], bool]:
    return lambda both: sum(each.refused == code for each in both.live.courses.values()) >= least


def said(what: str, least: int = 1) -> Callable[[Both], bool]:
    return lambda both: len(both.said(what)) >= least


FEATURES = {
    "due": Feature(due, lambda both: bool((both.result.outcomes["queue_s"] > 0).sum() >= 10)),
    "flood": Feature(flood, refused("queue_full")),
    "one-sided": Feature(one_sided, lambda both: both.counters["rehomed"] > 0),
    "bound": Feature(bound, lambda both: bool((both.result.outcomes["queue_s"] > 0).sum() >= 20)),
    "impatient": Feature(impatient, lambda both: both.counters["expired"] > 0),
    "held": Feature(held, lambda both: bool(both.said("released: trough") and both.said("released: slack"))),
    "weights": Feature(weights, lambda both: bool((both.result.outcomes["queue_s"] > 0).sum() >= 20)),
    "prefixes": Feature(prefixes, lambda both: both.counters["prefix_hit_tokens"] > 0),
    "KV events": Feature(kv_events, lambda both: both.counters["prefix_hit_tokens"] > 0),
    "offloads": Feature(offloads, lambda both: both.counters["restored_tokens"] > 0),
    "evicted KV": Feature(
        evicted_kv, lambda both: min(both.counters[of] for of in ("evictions", "restored_tokens")) > 0
    ),
    "adapters": Feature(
        adapters,
        lambda both: min(both.counters[f"adapter_{tier}"] for tier in ("not_loaded", "in_memory", "on_gpu")) > 0,
    ),
    "urgent": Feature(
        urgent, lambda both: both.counters["evictions"] >= 5 and both.result.outcomes["evictions"].max() <= 2
    ),
    "round trip": Feature(round_trip, lambda both: both.live.ahead >= 1),
    "front ends": Feature(front_ends, lambda both: both.live.ahead < 0),
    "overcommitted": Feature(overcommitted, lambda both: both.counters["preemptions"] > 5 and both.live.ahead > 0),
    "pooling": Feature(pooling, lambda both: both.result.output_tokens.min() == 0),
    "failures": Feature(failures, lambda both: both.counters["requeued"] > 0 and both.counters["failed"] > 0),
    "failures of groups": Feature(
        failures, lambda both: both.counters["requeued"] > 0 == both.counters["failed"] and bool(both.said("left"))
    ),
    "fallbacks": Feature(fallbacks, said("fell back", 11)),
    "late fallbacks": Feature(late_fallbacks, said("fell back: wait", 8)),
    "promises": Feature(promises, refused("deadline_unreachable", 8)),
    "degrades": Feature(degrades, said("admitted as batch", 8)),
    "spot": Feature(
        spot,
        lambda both: (
            min(both.counters[each] for each in ("spot_evicted", "spot_ended", "redeploys")) > 0
            and both.counters["spot_served"] > 20
        ),
    ),
    "lives": Feature(lives, lambda both: len({after for *_, after in both.result.changes.tolist()}) >= 8),
    "shared GPUs": Feature(shared_gpus, lambda both: both.counters["swaps"] >= 3),
    "short memory": Feature(short_memory, lambda both: woken_from_memory(both, 2) > 0),
    "stopped model": Feature(stopped_model, lambda both: State.LOADING in both.result.changes["after"]),
    "groups": Feature(lambda draft: None, lambda both: both.counters["reorderings"] > 0),
    "runs": Feature(runs, lambda both: bool(np.isfinite(both.result.runs.ended_s).all())),
    "many runs": Feature(many_runs, lambda both: bool(np.isfinite(both.result.runs.ended_s).all())),
    "classes": Feature(classes_of_runs, lambda both: both.counters["reorderings"] > 0),
    "prewarmed adapters": Feature(
        prewarmed_adapters, lambda both: min(both.counters["prewarmed_used"], both.counters["prewarmed_wasted"]) > 0
    ),
    "system prompts": Feature(
        system_prompts, lambda both: min(both.counters["prefix_used"], both.counters["prefix_wasted"]) > 0
    ),
    "sleeping model": Feature(
        sleeping_model, lambda both: both.counters["model_warmed"] == both.counters["model_used"] == 1
    ),
}


def draw(seed: int, policies: Sequence[dict[str, Any]], features: Sequence[str]) -> Scenario:
    draft = Draft(np.random.default_rng([seed, len(features)]), policies)
    for name in features:
        FEATURES[name].draw(draft)
    return draft.done()
