"""One policy, two clocks: the live dispatcher under a simulated clock and the compiled simulator decide alike.

The dispatcher is the gateway's own, over reference engines in place of servers; the simulator has the same fleet and trace.
Every request must go to the same instance, in the same order, at the same moment.
"""

from collections import deque
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.kv_caches import KvCache
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import Advanced, Asked, Evict, Finished, Left, Placed, Refused, Rerouted, Warm
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.gateway.upstream.client import upstream_priority
from controlplane.tuning.selectors import without_rows
from scheduling.fleet.front_end import NO_LIMIT, FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.global_scheduler import GlobalScheduler
from scheduling.queueing.held import ENDS_ON_RECLAIM, HELD, OPPORTUNISTIC
from scheduling.queueing.held_work import LOOK_S
from scheduling.queueing.ordering import ORDERINGS, hold_s
from scheduling.queueing.release_rule import ReleaseRule
from scheduling.routing.adapters import load_s
from scheduling.routing.cached_blocks import USED, chain
from scheduling.routing.regions import SWEEP_S
from scheduling.routing.requests_ahead import ROUND_TRIP_S
from scheduling.scaling import make_strategy
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.engine.reference import EngineConfig, EngineRequest, ReferenceEngine
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.strategies import Control
from scheduling.simulation.workload.requests import make_requests
from tests.examples import at_night_but
from tests.oracles.lookahead import PREDICTIVE, noted_places
from workers.vllm.kv_events import Removed, Stored

NEVER = float("inf")
REQUESTS = 150
BLOCK_TOKENS = 4


class RecordingDispatcher(Dispatcher):
    """The gateway's dispatcher, telling what it decides."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.decided = []
        self._explain = self.placement._explain
        self.placement._explain = self.note

    def note(self, request, endpoint, replica, pulled):
        self.decided.append((self.clock(), request, endpoint.index, replica.slot))
        return self._explain(request, endpoint, replica, pulled)


def inventory_of(fleet: simulated.Cluster) -> Inventory:
    """Return *fleet* as inventory rows, with every instance ready."""
    return Inventory(
        models={
            model: ModelSpec(model, 4096, 0, fallback=fleet.fallbacks[model].model if model in fleet.fallbacks else "")
            for model in fleet.models
        },
        endpoints=tuple(
            EndpointSpec(
                model, region, fleet.policy((model, region)), profile=fleet.reference_profile((model, region)),
                max_loras=max(spec.engine.max_loras for spec in fleet.instances),
                tuned=without_rows().model_copy(update={"PREWARM_SHARE": fleet.prewarm_share}),
                front_end=fleet.reference_engine((model, region)).front_end,
                max_num_seqs=fleet.requests_at_once((model, region)),
            )
            for model, region in fleet.endpoints
        ),
        instances=tuple(
            InstanceSpec(
                number, f"i{number}", f"http://127.0.0.1:1/i{number}", InstanceState.READY, 0.0, spec.model,
                spec.region, "", spec.engine.max_num_seqs, spec.engine.kv_capacity_tokens,
                profile=spec.engine.profile, front_end=spec.engine.front_end,
                adapter_slots=(spec.engine.max_loras, spec.engine.max_cpu_loras),
            )
            for number, spec in enumerate(fleet.instances)
        ),
    )  # fmt: skip


class Live:
    """The dispatcher, a clock that is set, and an engine for each instance."""

    def __init__(self, fleet: simulated.Cluster, max_tokens: int | None = None, max_hold_s: float = NEVER):
        self.max_tokens = max_tokens
        self.moved = self.warmed = 0
        self.hashes = {}
        """Of the leading blocks of prompts, by number of the request."""
        self.token_blocks = {}
        """Of those blocks' tokens, where the instances publish their KV events."""
        self.now_s = 0.0
        self.topology = Topology()
        self.topology.apply(inventory_of(fleet))
        self.round_trip_s = fleet.policy(fleet.endpoints[0]).round_trip_s
        self.topology.fleet.round_trips[:, ROUND_TRIP_S] = self.round_trip_s
        self.topology.tuned = self.topology.tuned.model_copy(update={"PREWARM_K": fleet.prewarm_k})
        for endpoint in self.topology.endpoints:
            tuned = endpoint.spec.tuned.model_copy(update={"MAX_HOLD_S": max_hold_s})
            endpoint.spec = replace(endpoint.spec, tuned=tuned)
        self.dispatcher = RecordingDispatcher(self.topology, lambda: self.now_s, deliver=self.take)
        self.dispatcher.queue.keep_order()
        self.engines = [ReferenceEngine(spec.engine) for spec in fleet.instances]
        self.steps = [None] * len(self.engines)
        self.events_s = [NEVER] * len(self.engines)
        self.output = {}
        """Tokens that each request really produces, and how many have come."""
        self.came = {}
        self.placed = {}
        self.given = 0
        self.sent = deque()
        """What is on its way: (moment, slot, request)."""
        self.refused = []
        self.leaving = set()
        """Numbers of those that are to leave at the end of an iteration."""
        self.evicted = 0
        self.sweep_s = NEVER
        """When what waits is looked at next; as in the simulator that is due once anything waits."""

    def looks(self):
        """Do the check of the queues that runs once a second."""
        self.dispatcher.reordering.sweep()

    def change_s(self) -> float:
        """Return when the state of an instance changes next."""
        return NEVER

    def change(self):
        """Let it change."""

    def arrive(
        self,
        number: int,
        model: str,
        region: str,
        prompt: int,
        predicted,
        output: int,
        priority: int,
        due,
        end_s,
        deadline_s,
        held=0,
        tenant=0,
        **more,
    ):
        hashes = self.hashes.get(number, ())
        self.output[number], self.came[number] = output, 0
        self.dispatcher.take(
            Asked(
                number,
                str(number),
                model,
                region,
                tenant_id=1 + tenant,
                tenant=f"t{tenant}",
                priority=priority,
                due_s=due,
                end_s=end_s,
                arrived_at=self.now_s,
                arrived_s=self.now_s,
                prompt_tokens=prompt,
                predicted_tokens=predicted,
                max_tokens=self.max_tokens,
                sequences=1,
                streamed=True,
                # Those of the trace, at the places that are noted.
                prefix_hashes=tuple(hashes[place - 1] for place in noted_places(len(hashes))),
                block_tokens=BLOCK_TOKENS,
                token_blocks=self.token_blocks.get(number, b""),
                token_block_size=BLOCK_TOKENS,
                deadline_s=deadline_s,
                slo_class=str(priority),
                evictable=True,
                interactive=not held,
                opportunistic=bool(held & OPPORTUNISTIC),
                ends_on_reclaim=bool(held & ENDS_ON_RECLAIM),
                **more,
            )
        )
        self.give()

    def take(self, record):
        """Record a delivery to the gateway."""
        if isinstance(record, Refused):
            self.refused.append((record.number, record.code))
        elif isinstance(record, Rerouted):
            self.moved += 1
        elif isinstance(record, Placed):
            self.placed[record.number] = record
        elif isinstance(record, Warm):
            self.warmed += 1
        elif isinstance(record, Evict):
            self.leaving.add(record.number)

    def give(self):
        """Pass decisions to the engines."""
        for _, decided, _, slot in self.dispatcher.decided[self.given :]:
            asked = decided.asked
            placed = self.placed[asked.number]
            priority = upstream_priority(ORDERINGS[placed.ordering], asked.priority, 0, placed.queue_key_s)
            output = self.output[asked.number] - decided.kept_tokens
            hashes = self.hashes.get(asked.number, ())
            load = load_s(self.topology.fleet, slot, decided.adapter_tier) if decided.adapter >= 0 else 0.0
            request = EngineRequest(
                asked.request_id, asked.prompt_tokens, output, priority, self.now_s, tuple(hashes), load
            )
            if self.round_trip_s:
                self.sent.append((self.now_s + self.round_trip_s, slot, request))
            else:
                self.land(slot, request)
        self.given = len(self.dispatcher.decided)

    def land(self, slot: int, request: EngineRequest):
        self.engines[slot].add(request)
        if self.steps[slot] is None:
            self.events_s[slot] = self.now_s

    def work(self, slot: int):
        step, self.steps[slot] = self.steps[slot], None
        if step is not None:
            for request_id in step.emitted:
                self.came[int(request_id)] += 1
            came = ((int(request_id), self.came[int(request_id)]) for request_id in step.emitted)
            self.dispatcher.take(Advanced(tuple(came)))
            for request_id in step.finished:
                self.leaving.discard(int(request_id))
                self.dispatcher.take(Finished(int(request_id), self.output[int(request_id)]))
                self.give()
            engine = self.engines[slot]
            for request_id in [*engine._running, *engine._waiting]:
                if int(request_id) in self.leaving:
                    self.evict(int(request_id), engine)
        self.steps[slot] = self.engines[slot].step(self.now_s)
        self.events_s[slot] = NEVER if self.steps[slot] is None else self.steps[slot].ends_s

    def evict(self, number: int, engine: ReferenceEngine):
        """Report that the gateway has closed the connection of that request."""
        self.leaving.discard(number)
        self.evicted += 1
        engine.abort(str(number))
        self.dispatcher.take(Left(number, again=True, evicted=True, kept_tokens=self.came[number]))
        self.give()

    def run(self, fleet: simulated.Cluster, requests, predictions=None, until_s=NEVER, deadlines=None):
        """Serve *requests* until just before *until_s*, with *predictions* in place of what they say of themselves.

        *deadlines* are those of their classes, None for none.
        """
        arrived = 0
        while True:
            arrival_s = float(requests.arrival_s[arrived]) if arrived < requests.arrival_s.size else NEVER
            event_s, slot = min((event_s, slot) for slot, event_s in enumerate(self.events_s))
            sent_s = self.sent[0][0] if self.sent else NEVER
            change_s, look_s = self.change_s(), NEVER
            next_s = min(arrival_s, event_s, change_s, sent_s)
            if any(fleet.policy(key).ordering == "qlm" for key in fleet.endpoints) and len(self.dispatcher.queue):
                look_s = self.now_s // GlobalScheduler.EVERY_S + GlobalScheduler.EVERY_S
            if len(self.dispatcher.holding):
                held_s = (self.now_s // LOOK_S + 1) * LOOK_S
                if held_s <= min(next_s, look_s, self.sweep_s):
                    self.now_s = held_s
                    self.dispatcher.holding.release_due()
                    self.give()
                    continue
            if look_s < NEVER and look_s <= min(next_s, self.sweep_s):
                self.now_s = look_s
                self.looks()
                self.give()
                continue
            if fleet.sweeps and len(self.dispatcher.queue) and self.sweep_s == NEVER:
                self.sweep_s = (self.now_s // SWEEP_S + 1) * SWEEP_S
            if self.sweep_s < next_s:
                self.now_s, self.sweep_s = self.sweep_s, NEVER
                self.dispatcher.queue.keep_order()
                self.dispatcher.sweeping.sweep()
                self.give()
                continue
            self.now_s = next_s
            if self.now_s >= until_s:
                return
            if arrival_s == next_s:
                self.arrive(
                    arrived,
                    fleet.models[requests.model[arrived]],
                    fleet.regions[requests.region[arrived]],
                    int(requests.prompt_tokens[arrived]),
                    int(requests.predicted_tokens[arrived]) if predictions is None else predictions[arrived],
                    int(requests.output_tokens[arrived]),
                    int(requests.priority[arrived]),
                    int(requests.deadline_s[arrived]) if requests.deadline_s[arrived] < NEVER else None,
                    float(requests.end_s[arrived]) if requests.end_s[arrived] < NEVER else None,
                    None if deadlines is None else deadlines[arrived],
                    int(requests.held[arrived]),
                    int(requests.tenant[arrived]),
                    adapter=f"a{adapter}" if (adapter := int(requests.adapter[arrived])) >= 0 else "",
                )
                arrived += 1
            elif event_s == next_s:
                self.work(slot)
            elif change_s == next_s:
                self.change()
                self.give()
            else:
                _, slot, request = self.sent.popleft()
                self.land(slot, request)


def assert_alike(live: Live, result) -> list[tuple[int, int, int]]:
    """Assert that both clocks gave each request to the same instance, in the same order, at the same moment; return
    request, endpoint and instance of each decision."""
    decided = [(each.asked.number, endpoint, slot) for _, each, endpoint, slot in live.dispatcher.decided]
    assert result.decisions[["request", "endpoint", "instance"]].tolist() == decided
    np.testing.assert_allclose(result.decisions["time_s"], [row[0] for row in live.dispatcher.decided], atol=1e-6)
    return decided


def serve_both(live: Live, fleet: simulated.Cluster, requests, **options):
    """Return the result of the simulation of *requests*, having asserted that *live* decides alike."""
    live.run(fleet, requests, **options)
    result = Simulation(fleet, requests, decisions=True).run()
    assert_alike(live, result)
    return result


ROUTINGS = ["join_shortest_queue", "minimum_use", "least_request", "round_robin", *PREDICTIVE]


def publish(live: Live) -> None:
    """Let the engines of *live* publish their KV events. A block has its number as each of its tokens."""

    def tokens_of(block: int) -> list[int]:
        return [block] * BLOCK_TOKENS

    for replica in live.topology.replicas.values():
        cache = KvCache(live.dispatcher.queue, replica)
        cache.block_tokens = BLOCK_TOKENS
        cache.known()

        def stored(block, cache=cache):
            if isinstance(block, int):
                parent = block - 1 if block % 1000 else None
                cache.take([Stored([block], parent, tokens_of(block), BLOCK_TOKENS, "GPU")])
                assert not cache.why

        def removed(block, cache=cache):
            if isinstance(block, int):
                cache.take([Removed([block], "GPU")])

        live.engines[replica.slot].watch(stored, removed)
    for number, blocks in live.hashes.items():
        hashes = np.zeros(len(blocks), np.int64)
        chain(hashes, np.array([token for block in blocks for token in tokens_of(block)], np.int64), BLOCK_TOKENS, 0)
        live.token_blocks[number] = hashes.tobytes()


def simulated_fleet(random, routing, ordering, round_trip_s=0.0, limit=None, sweeps=False, **policy):
    """Two models in three regions, with one to three small instances each."""
    specs = []
    for model, speed in (("m", 1.0), ("n", 0.6)):
        for region in ("east", "north", "west"):
            for _ in range(int(random.integers(1, 4))):
                engine = EngineConfig(
                    max_num_seqs=int(random.integers(2, 7)),
                    max_num_batched_tokens=int(random.integers(8, 64)),
                    block_size_tokens=BLOCK_TOKENS,
                    kv_blocks=int(random.integers(30, 60)),
                    policy="fcfs" if ordering == "fcfs" else "priority",
                    max_model_len=120,
                    profile=Profile(0.05, 0.04, 1e-3, 0.0, 0.04, 0.002, 1e-5 * speed),
                    prefix_caching=routing == "least_delay",
                    front_end=FrontEnd(40.0, 60.0) if model == "n" else NO_LIMIT,  # carries four of these requests
                )
                specs.append(simulated.InstanceSpec(model, region, engine))
    return simulated.Cluster(
        specs, policies=EndpointPolicy(
            routing=routing, ordering=ordering, ordering_stretch=0.7, queue_bound=40,
            dispatch_round_trip_ms=1000 * round_trip_s, requests_ahead_limit=limit, **policy,
        ), sweeps=sweeps,
    )  # fmt: skip


KNOWING = "least_delay by KV events"
FAST = [
    *((routing, "priority", 40.0, 0.0, None) for routing in ROUTINGS),
    *(("join_shortest_queue", ordering, 40.0, 0.0, None) for ordering in ("ssjf", "qlm")),
    *(("least_request", ordering, 40.0, 0.0, None) for ordering in ("deadline", "slack", "vtc")),
    ("preserve", "ssjf", 40.0, 0.3, None),
    ("least_delay", "wfq", 40.0, 0.0, None),
    (KNOWING, "fcfs", 40.0, 0.0, None),
    ("join_shortest_queue", "run_slack", 40.0, 0.0, None),
    ("join_shortest_queue", "priority", 40.0, 0.3, 1),
    ("join_shortest_queue", "fcfs", 200.0, 0.0, None),
    ("join_shortest_queue", "qlm", 200.0, 0.0, None),
]
"""Each routing, each ordering and each other part once; by night each routing under each load, and more."""
CASES = [
    *(
        (routing, ordering, load, 0.0, None)
        for routing in ROUTINGS
        for ordering in ("fcfs", "priority")
        for load in (1.0, 40.0)
    ),
    *(("join_shortest_queue", ordering, 40.0, 0.0, None) for ordering in ("ssjf", "deadline", "slack", "qlm")),
    *(("least_request", ordering, 40.0, 0.0, None) for ordering in ("ssjf", "deadline", "slack", "qlm")),
    *(
        (routing, ordering, 40.0, 0.0, None)
        for ordering in ("application", "srpt", "hermes", "run_deadline", "run_slack", "vtc", "wfq")
        for routing in ("join_shortest_queue", "preserve")
    ),
    *((routing, "ssjf", 40.0, 0.3, None) for routing in ROUTINGS),
    *(("join_shortest_queue", "priority", 40.0, 0.3, limit) for limit in (0, 1)),
    *(("join_shortest_queue", "fcfs", load, 0.0, None) for load in (60.0, 100.0, 200.0)),
    ("least_delay", "qlm", 200.0, 0.0, None),
    *((KNOWING, ordering, load, 0.0, None) for ordering in ("fcfs", "priority") for load in (20.0, 40.0)),
    *((KNOWING, "ssjf", 40.0, 0.3, limit) for limit in (None, 1)),
    ("join_shortest_queue", "qlm", 200.0, 0.0, None),
]


@pytest.mark.parametrize(("routing", "ordering", "load_per_s", "round_trip_s", "limit"), at_night_but(FAST, CASES))
async def test_the_dispatcher_and_the_simulator_decide_alike(routing, ordering, load_per_s, round_trip_s, limit):
    routing, _, events = routing.partition(" by ")
    random = np.random.default_rng([len(routing), len(ordering), int(load_per_s)])
    fleet = simulated_fleet(random, routing, ordering, round_trip_s, limit, follow_kv_events=bool(events))
    output = np.clip(random.geometric(1 / 20, REQUESTS), 1, 60)
    prompt = random.integers(1, 55, REQUESTS)
    # Four kinds of prompts that begin alike, each for some way.
    shared = random.integers(0, prompt // BLOCK_TOKENS + 1)
    blocks = [
        [1000 * int(kind) + at for at in range(count)]
        for kind, count in zip(random.integers(1, 5, REQUESTS), shared, strict=True)
    ]
    requests = make_requests(
        np.cumsum(random.exponential(1 / load_per_s, REQUESTS)),
        prompt,
        output,
        prefix_blocks=blocks if routing == "least_delay" else None,
        predicted_tokens=np.clip(output + random.integers(-15, 15, REQUESTS), 1, None),
        model=random.integers(0, 2, REQUESTS),
        region=random.integers(0, 3, REQUESTS),
        priority=random.integers(0, 3, REQUESTS),
        deadline_s=np.where(random.random(REQUESTS) < 0.7, random.integers(1, 9, REQUESTS), NEVER),
        end_s=np.where(random.random(REQUESTS) < 0.5, random.integers(2, 9, REQUESTS), NEVER),
        tenant=random.choice(3, REQUESTS, p=[0.6, 0.3, 0.1]),
    )

    live = Live(fleet)
    if routing == "least_delay":
        live.hashes = dict(enumerate(blocks))
    if events:
        publish(live)
    result = serve_both(live, fleet, requests)
    if events:
        assert any(placed.why.get("cached", {}).get("by") == "kv_events" for placed in live.placed.values())
        assert live.dispatcher.queue.affinity.blocks.counters[USED] > 0
    refused = np.flatnonzero(result.outcomes["state"] == Outcome.REFUSED).tolist()
    assert [(number, "queue_full") for number in refused] == live.refused
    assert len(live.dispatcher.decided) + len(live.refused) == REQUESTS
    ahead = [placed.why["requests_ahead"] for placed in live.placed.values()]
    assert max(ahead) == 0 if limit == 0 or not round_trip_s else max(ahead) >= 1
    if ordering == "qlm":
        assert result.counters["reorderings"] == len(live.dispatcher.reordering.recent)
        assert load_per_s < 200 or result.counters["reorderings"] > 0
    if load_per_s > 1:
        assert (result.outcomes["queue_s"] > 0).sum() >= 10, "or order would hardly matter"


async def test_the_threshold_of_a_model_decides_where_its_requests_go():
    """Two models alike: the one with the lower threshold spills sooner."""
    requests = make_requests(
        np.repeat(np.arange(1, REQUESTS // 2 + 1) / 20, 2),
        np.full(REQUESTS, 30),
        np.full(REQUESTS, 20),
        model=np.tile([0, 1], REQUESTS // 2),
    )
    engine = EngineConfig(8, 64, BLOCK_TOKENS, 100, "fcfs", 120, Profile(0.05, 0.04, 1e-3, 0.0, 0.04, 0.002, 1e-5))
    specs = [simulated.InstanceSpec(model, region, engine) for model in "mn" for region in ("east", "west")]
    policies = {
        (model, region): EndpointPolicy(ordering_stretch=0.7, queue_bound=200, region_threshold=above)
        for model, above in (("m", 0.9), ("n", 0.2))
        for region in ("east", "west")
    }
    fleet = simulated.Cluster(specs, policies=policies)
    live = Live(fleet)
    serve_both(live, fleet, requests)
    endpoints = [endpoint for _, _, endpoint, _ in live.dispatcher.decided]
    assert endpoints.index(3) < endpoints.index(1), "that of n in the west before that of m"


@pytest.mark.parametrize("at_s", at_night_but([2.3], [0.9, 2.3, 4.1]))
async def test_both_clocks_see_alike_what_is_coming(at_s):
    random = np.random.default_rng(7)
    fleet = simulated_fleet(random, "join_shortest_queue", "fcfs")
    output = np.clip(random.geometric(1 / 20, REQUESTS), 1, 60)
    requests = make_requests(
        np.cumsum(random.exponential(1 / 40, REQUESTS)),
        random.integers(1, 55, REQUESTS),
        output,
        predicted_tokens=np.clip(output + random.integers(-15, 15, REQUESTS), 1, None),
        model=random.integers(0, 2, REQUESTS),
        region=random.integers(0, 3, REQUESTS),
    )
    live, simulation = Live(fleet), Simulation(fleet, requests)
    live.run(fleet, requests, until_s=at_s)
    simulation.advance(at_s)
    views = Control(simulation, make_strategy("preserve")).views(simulation)
    outlooks = [live.dispatcher.outlook(endpoint) for endpoint in live.topology.endpoints]
    assert [(each.overloaded_instances, each.peak_kv_sum, each.peak_kv_most) for each in views] == outlooks
    assert any(each.peak_kv_most > 0.5 for each in outlooks)
    assert any(view.waiting for view in views), "or what waits would not be counted"


@pytest.mark.parametrize("routing", ["join_shortest_queue", "least_delay"])
@pytest.mark.parametrize("ordering", at_night_but(["slack"], ["priority", "slack"]))
async def test_both_clocks_hold_and_rehome_alike(routing, ordering):
    """All callers are in one region; requests of classes with a deadline are held until it, others for half a second."""
    random = np.random.default_rng([3, len(routing), len(ordering)])
    fleet = simulated_fleet(random, routing, ordering, sweeps=True)
    output = np.clip(random.geometric(1 / 20, REQUESTS), 1, 60)
    deadlines = [None if random.random() < 0.5 else float(random.integers(2, 4)) for _ in range(REQUESTS)]
    requests = make_requests(
        np.cumsum(random.exponential(1 / 100, REQUESTS)),
        random.integers(1, 55, REQUESTS),
        output,
        predicted_tokens=np.clip(output + random.integers(-15, 15, REQUESTS), 1, None),
        model=random.integers(0, 2, REQUESTS),
        region=np.where(random.random(REQUESTS) < 0.8, 0, 1),
        priority=random.integers(0, 3, REQUESTS),
        hold_s=[hold_s(NEVER if each is None else each, 0.5) for each in deadlines],
    )
    live = Live(fleet, max_hold_s=0.5)
    result = serve_both(live, fleet, requests, deadlines=deadlines)
    expired = {number for number, code in live.refused if code == "hold_expired"}
    refused = np.flatnonzero(result.outcomes["state"] == Outcome.REFUSED).tolist()
    assert sorted(number for number, _ in live.refused) == refused
    assert (result.counters["expired"], result.counters["rehomed"]) == (len(expired), live.moved)
    assert live.moved
    assert any(deadlines[number] is None for number in expired)
    promised = [each is not None for each in deadlines]
    assert np.nanmax(result.outcomes["queue_s"][promised]) > 1.0, "one with a deadline is held for longer"


HOLDING = [
    (by, ordering, routing)
    for by in ("slack", "use", "at_once")
    for ordering in ("priority", "ssjf", "fcfs")
    for routing in ("join_shortest_queue", "least_request")
]


@pytest.mark.parametrize(
    ("by", "ordering", "routing"),
    at_night_but([("slack", "priority", "join_shortest_queue"), ("use", "fcfs", "join_shortest_queue")], HOLDING),
)
async def test_both_clocks_hold_non_interactive_work_and_release_it_alike(by, ordering, routing):
    """Four of ten requests are held: some until there is room, some until their slack is used up, some opportunistic."""
    random = np.random.default_rng([11, len(by), len(ordering)])
    fleet = simulated_fleet(random, routing, ordering, sweeps=True)
    fleet.policies = msgspec.structs.replace(fleet.policies, niw=ReleaseRule(by=by))
    output = np.clip(random.geometric(1 / 20, REQUESTS), 1, 60)
    kinds = random.choice([0, 1, 2], REQUESTS, p=[0.6, 0.3, 0.1])
    deadlines = [float(random.integers(61, 68)) if kind else None for kind in kinds]
    due_s = np.array([NEVER if each is None else each for each in deadlines])
    requests = make_requests(
        np.cumsum(random.exponential(1 / 40, REQUESTS)),
        random.integers(1, 55, REQUESTS),
        output,
        predicted_tokens=np.clip(output + random.integers(-15, 15, REQUESTS), 1, None),
        model=random.integers(0, 2, REQUESTS),
        region=random.integers(0, 3, REQUESTS),
        priority=np.minimum(kinds, 1),
        end_s=due_s,
        hold_s=due_s,
        held=np.array([0, HELD, HELD + OPPORTUNISTIC])[kinds] if by != "at_once" else 0,
    )
    live = Live(fleet)
    result = serve_both(live, fleet, requests, deadlines=deadlines)
    assert len(live.dispatcher.decided) == REQUESTS
    assert result.counters["released"] == (np.count_nonzero(kinds) if by != "at_once" else 0)
    if by == "slack":
        whys = {release.why for _, release in live.dispatcher.holding.control.released}
        assert whys >= {"trough", "slack"}, "or the rules were hardly tried"
