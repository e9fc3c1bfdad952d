"""Small fleets, traces and commands as Hypothesis draws them, on which the compiled engine must agree with the reference.

What is drawn is a tree of small numbers, so that a failure shrinks to the fewest requests, instances and commands. Times
and coefficients are whole multiples of a power of two in half of the scenarios: sums are exact there, and ties, of which
there are many, are ties for both. In the others they are not.
"""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from scheduling.fleet.front_end import NO_LIMIT, FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.policy import Batching, EndpointPolicy
from scheduling.queueing.ordering import BY_RUN, FAIR, ORDERINGS, QLM
from scheduling.routing.routers import POLICY_CODES
from scheduling.scaling import Reactive
from scheduling.simulation.cluster.description import Cluster, Delays, InstanceSpec, Sharing
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.workload.requests import Requests, make_requests
from tests.oracles.fleet import Command

REFERENCE_ORDERINGS = [name for name, code in ORDERINGS.items() if code not in (QLM, *BY_RUN, *FAIR)]
"""Orders by groups, runs and shares of tenants have twins that know these."""
LONGEST = 60
"""Tokens of a prompt and of an output, at most half of this each."""


@dataclass(frozen=True)
class Drawn:
    """A scenario."""

    cluster: Cluster
    requests: Requests
    commands: tuple[Command, ...]
    seed: int


@dataclass(frozen=True)
class Load:
    """The gaps between requests, and how much memory there is for them."""

    gap_s: float
    spare_blocks: int
    prefixes: bool = False
    priorities: bool = False
    chunked: bool = False
    lives: bool = False
    evicts: bool = False
    scales: bool = False
    batches: bool = False


LOADS = {
    "light": Load(4.0, 500),
    "memory": Load(0.3, 4),
    "overload": Load(0.05, 500),
    "priorities": Load(0.2, 2, priorities=True),
    "chunked": Load(0.5, 12, chunked=True),
    "prefixes": Load(0.3, 12, prefixes=True),
    "cached_and_preempted": Load(0.2, 3, prefixes=True, priorities=True, chunked=True),
    "batches": Load(1.0, 20, batches=True),
    "lives": Load(0.5, 8, lives=True),
    "evictions": Load(0.3, 3, evicts=True),
    "scaling": Load(0.3, 30, scales=True),
    "everything": Load(0.4, 6, True, True, True, True, True, True, True),
}
"""Kinds of scenarios by name."""

FRONT_ENDS = FrontEnd(tokens_per_s=4.0), FrontEnd(2.0), FrontEnd(4.0, 8.0)
"""Binary fractions of a second, as times in exact scenarios are."""

number = st.integers


def coefficient(exact: bool, low: float, high: float) -> st.SearchStrategy[float]:
    if exact:
        return number(round(low * 1024), round(high * 1024)).map(lambda drawn: drawn / 1024)
    return st.floats(low, high, allow_nan=False)


def profiles(exact: bool) -> st.SearchStrategy[Profile]:
    return st.builds(
        Profile,
        coefficient(exact, 0, 0.5),
        coefficient(exact, -0.005, 0.5),
        coefficient(exact, 0.0075, 0.02),
        st.sampled_from([0.0, 1 / 2**20]),
        coefficient(exact, 0.01, 0.6),
        coefficient(exact, 0, 0.1),
        st.sampled_from([0.0, 1 / 1024, 3 / 1024]),
    )


@st.composite
def engines(draw, load: Load, profile: Profile, block: int, over: bool) -> tuple[EngineConfig, int | None, int | None]:
    """Draw an engine and the dispatcher's view of it: more sequences than it runs at once, or more memory than it has."""
    seqs = draw(number(1, 8))
    spare = draw(number(0, 12 if load.chunked else 100))
    blocks = -(-LONGEST // block) + draw(number(0, load.spare_blocks))
    config = EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + spare,
        block_size_tokens=block,
        kv_blocks=blocks,
        policy=draw(st.sampled_from(["fcfs", "priority"])) if load.priorities else "fcfs",
        max_model_len=LONGEST + 1,
        profile=profile,
        prefix_caching=load.prefixes and draw(number(0, 4)) > 0,
        front_end=draw(st.sampled_from([NO_LIMIT, NO_LIMIT, *FRONT_ENDS])),
    )
    if not over:
        return config, None, None
    return config, draw(number(1, 20)), blocks * block * draw(number(1, 4))


@st.composite
def sharing(draw, specs: list[InstanceSpec]) -> list[InstanceSpec]:
    """Let some of *specs* share their GPUs, in at most two groups per region; surplus awake members sleep."""
    made, awake, memory_bytes = [], set(), {}
    for spec in specs:
        at = draw(number(0, 2))
        group = f"{spec.region}-{at}"
        if at == 2:
            made.append(spec)
            continue
        state = spec.state
        if state in (State.READY, State.SPOT):
            state = draw(st.sampled_from([State.ASLEEP, State.EMPTY])) if group in awake else state
            awake.add(group)
        times = [draw(number(0, 4)) / 4 for _ in range(3)]
        memory_bytes.setdefault(group, draw(st.sampled_from([0.0, 1.0, 2.0])))
        shared = Sharing(group, *times, float(draw(number(0, 2))), memory_bytes[group])
        made.append(replace(spec, state=state, sharing=shared))
    return made


@st.composite
def clusters(draw, load: Load, exact: bool) -> Cluster:
    models, regions = draw(number(1, 2)), draw(number(1, 3 if load.gap_s > 0.35 else 1))
    blocks = draw(st.sampled_from([1, 2, 4, 5, 16]))
    of_model = [draw(profiles(exact)) for _ in range(models)]
    over = draw(st.booleans())
    rests = [State.READY] * 4 + ([State.SPOT, State.ASLEEP, State.EMPTY] if load.lives or load.scales else [])
    specs = []
    for model in range(models):
        for region in range(regions):
            for at in range(draw(number(1, 3))):
                # One block size where prefixes are shared: a hash stands for blocks of one size.
                block = blocks if load.prefixes else draw(st.sampled_from([1, 2, 4, 5, 16]))
                config, seqs, tokens = draw(engines(load, of_model[model], block, over))
                state = State.READY if at == 0 else draw(st.sampled_from(rests))
                specs.append(InstanceSpec(f"m{model}", f"r{region}", config, "g", "", state, seqs, tokens))
    if load.lives and draw(st.booleans()):
        specs = draw(sharing(specs))
    latency_s = np.zeros((regions, regions))
    if draw(st.booleans()):
        latency_s[:] = [[draw(coefficient(exact, 0.01, 0.3)) for _ in range(regions)] for _ in range(regions)]
        np.fill_diagonal(latency_s, 0.0)
    batching = Batching()
    if load.batches and draw(st.booleans()):
        batching = Batching("dynamic", draw(number(1, 5)), draw(number(0, 12)) / 4)
    elif draw(number(0, 9)) == 0:
        batching = Batching("none")
    reactive = None
    if load.scales and draw(number(0, 3)) > 0:
        reactive = Reactive(0.6, 0.2, draw(number(0, 4)) / 2, draw(number(0, 1)), draw(number(1, 3)))
    return Cluster(
        specs,
        latency_s=latency_s,
        policies=EndpointPolicy(
            routing=draw(st.sampled_from(sorted(POLICY_CODES))),
            ordering=draw(st.sampled_from(REFERENCE_ORDERINGS)),
            ordering_stretch=draw(st.sampled_from([0.5, 4.0, 0.0, 1000.0])),
            dispatch_round_trip_ms=draw(st.sampled_from([0.0, 0.0, 125.0, 1000.0])),
            requests_ahead_limit=draw(st.sampled_from([None, None, 0, 1, 3])),
            room_margin=draw(st.sampled_from([1.5, 0.5])),
            batching=batching,
            queue_bound=draw(st.sampled_from([None, 2, 8])),
            region_threshold=draw(st.sampled_from([0.2, 0.7, 1.5])),
        ),
        delays=Delays(
            spot_median_s=1.0,
            spot_max_s=3.0,
            start_s=1.0,
            local_weights_s=2.0,
            remote_weights_s=5.0,
            sleep_s=0.5,
            wake_s=0.75,
            swap_gpu_s=0.125,
            swap_cpu_s=0.5,
            swap_storage_s=1.5,
            cpu_models=draw(number(0, 1)),
            repair_s=2.0,
        ),
        reactive=reactive,
        share_spot=draw(st.booleans()),
    )


@st.composite
def traces(draw, load: Load, exact: bool, cluster: Cluster, most: int) -> Requests:
    sizes = cluster.cached_block_sizes()
    count = draw(number(1, most))
    gaps = number(0, round(4 * 2 * load.gap_s) + 1).map(lambda drawn: drawn / 4)
    if not exact:
        gaps = st.floats(0, 2 * load.gap_s, allow_nan=False)
    rows = draw(
        st.lists(
            st.tuples(
                gaps,
                number(1, LONGEST // 2),
                number(1, LONGEST // 2),
                number(-10, 10),
                number(0, len(cluster.models) - 1),
                number(0, len(cluster.regions) - 1),
                number(-1, 1) if load.priorities else st.just(0),
                number(1, 9),
                number(0, 2),  # which prefix it begins with
                number(0, LONGEST),  # how much of it
            ),
            min_size=count,
            max_size=count,
        )
    )
    gap, prompt, output, error, model, region, priority, deadline, family, shared = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    blocks = None
    if sizes:
        block = min(sizes)
        # Prefixes fork: what follows the first two blocks depends on the request too.
        blocks = [
            [1000 * int(of) + at if at < 2 else 7919 * (at + 50 * (int(of) + 3 * (request % 2))) for at in range(full)]
            for request, (of, full) in enumerate(
                zip(family, np.minimum(prompt, shared) // block, strict=True),
            )
        ]
    return make_requests(
        np.cumsum(gap),
        prompt,
        output,
        predicted_tokens=output if draw(st.booleans()) else np.maximum(output + error, 1),
        model=model,
        region=region,
        priority=priority,
        deadline_s=deadline * 1.0 if draw(st.booleans()) else np.inf,
        end_s=deadline * 2.0 if draw(st.booleans()) else np.inf,
        prefix_blocks=blocks,
    )


@st.composite
def commands(draw, load: Load, cluster: Cluster, requests: Requests, most: int) -> tuple[Command, ...]:
    """Draw commands to the fleet until after the last arrival, valid or not."""
    end_s, evicted = float(requests.arrival_s[-1]), number(0, requests.arrival_s.size - 1)
    instances, endpoints = number(0, len(cluster.instances) - 1), number(0, len(cluster.endpoints) - 1)
    times = number(0, 4 * round(end_s + 2)).map(lambda drawn: drawn / 4)
    evictions = st.tuples(times, st.just("evict"), st.tuples(evicted))
    if not load.lives:
        drawn = draw(st.lists(evictions, min_size=most, max_size=4 * most))
        return tuple(sorted((Command(*one) for one in drawn), key=lambda command: command.time_s))
    each = st.one_of(
        st.tuples(times, st.sampled_from(["drain", "stop", "sleep", "wake", "start"]), st.tuples(instances)),
        st.tuples(times, st.just("fail"), st.tuples(instances, st.sampled_from([0.0, 0.5, 3.0]))),
        st.tuples(times, st.just("swap"), st.tuples(instances, endpoints)),
        *([st.tuples(times, st.just("swap_to"), st.tuples(instances))] * (4 if cluster.swap_groups() else 0)),
        st.tuples(times, st.just("redeploy"), st.tuples(instances, endpoints, st.booleans())),
        st.tuples(times, st.sampled_from(["scale_out", "scale_in"]), st.tuples(endpoints, number(1, 3))),
        *([evictions] * (4 if load.evicts else 0)),
    )
    drawn = draw(st.lists(each, min_size=most // 2, max_size=most))
    return tuple(sorted((Command(*one) for one in drawn), key=lambda command: command.time_s))


@st.composite
def scenarios(draw, kind: str, most: int = 40) -> Drawn:
    """Draw a scenario of *kind* with at most *most* requests."""
    load = LOADS[kind]
    exact = draw(st.booleans())
    cluster = draw(clusters(load, exact))
    requests = draw(traces(load, exact, cluster, most))
    done = draw(commands(load, cluster, requests, 12)) if load.lives or load.evicts else ()
    return Drawn(cluster, requests, done, draw(number(0, 3)))
