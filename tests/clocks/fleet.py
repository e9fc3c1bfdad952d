"""The live dispatcher over reference engines on a virtual clock: what a fleet of servers would do, without the servers.

It is the oracle of the compiled simulator. In the place of HTTP stands a list of what happens in order of time. Of the
product it uses what the gateway's process uses: records of the port, `apply_inventory`, and the sweeps at their periods.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any, NamedTuple

import msgspec
import numpy as np

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import InstanceSpec, Inventory, SwapGroupSpec
from controlplane.dispatch.live_fleet.kv_caches import KvCache
from controlplane.dispatch.live_fleet.topology import Replica, Topology
from controlplane.dispatch.port import (
    Admission,
    Advanced,
    Asked,
    Evict,
    FellBack,
    Finished,
    Held,
    Left,
    Lost,
    Placed,
    PrefixWarmed,
    Queued,
    Refused,
    Rerouted,
    Waiting,
    Warm,
    WarmPrefix,
)  # fmt: skip
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.gateway.upstream.bodies import upstream_priority
from scheduling.queueing.held_work import LOOK_S
from scheduling.queueing.ordering import ORDERINGS
from scheduling.routing.adapters import TIERS, load_s
from scheduling.routing.cached_blocks import chain
from scheduling.routing.prefix_affinity import recorded
from scheduling.routing.regions import SWEEP_S
from scheduling.routing.requests_ahead import ROUND_TRIP_S
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.engine.reference import EngineRequest, ReferenceEngine, StepResult
from tests.scheduling.simulation.engine.test_warm_prefix import warm
from workers.vllm.kv_events import Removed, Stored

COMMAND, ARRIVAL, ITERATION, CHANGE, LANDING, SWEEP = range(6)
"""What happens at one moment, in this order."""
TOO_LATE_S = 20_000.0


class Event(NamedTuple):
    """What the dispatcher said of a request."""

    at_s: float
    what: str
    request: int
    where: str = ""
    """Region, or instance."""


@dataclass(slots=True)
class Course:
    """A request, and how it goes."""

    submit: Asked
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Contents of the leading blocks of its prompt."""
    pools: bool = False
    placed: Placed | None = None
    number: int = -1
    """Instance that has it; -1 for none."""
    tokens: int = 0
    reported_tokens: int = 0
    kept_tokens: int = 0
    first_queue_s: float | None = None
    first_token_s: float | None = None
    token_s: float = -inf
    finished_s: float | None = None
    outcome: str = ""
    refused: str = ""
    evictions: int = 0
    preemptions: int = 0
    fell_back: FellBack | None = None


class Engine(ReferenceEngine):
    """The engine of a server. A prefix that is warmed makes its next step that admits a request longer.

    Blocks of requests that end are free once the step is over.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.owed_s, self._ended = 0.0, None

    def warm(self, contents: Sequence[int], busy: bool) -> bool:
        missing = warm(self._pool, contents)
        if missing > 0 and busy:
            tokens, profile = missing * self.config.block_size_tokens, self.config.profile
            self.owed_s += profile.prefill_b_s_per_token * tokens + profile.prefill_c_s_per_token2 * tokens**2
        return missing >= 0

    def here(self) -> list[int]:
        """Return the numbers of its requests: in order of admission, then of the queue, then those not yet read."""
        return [int(each) for each in (*self._running, *self._waiting, *self._unread)]

    def step(self, now_s: float) -> StepResult | None:
        ended, self._ended = self._ended or (), None
        for sequence in ended:
            self._free(sequence)
        return super().step(now_s)

    def _free(self, sequence: Any) -> None:
        if self._ended is None:
            super()._free(sequence)
        else:
            self._ended.append(sequence)

    def _execute(self, batch: Any, preempted: Any, now_s: float) -> StepResult:
        owed_s = self.owed_s if any(not each.decoding for each in batch.tokens) else 0.0
        self.owed_s -= owed_s
        self._ended = []
        result = super()._execute(batch, preempted, now_s)
        return replace(result, ends_s=result.ends_s + owed_s, duration_s=result.duration_s + owed_s)


@dataclass
class Server:
    """A place for an instance: its row, its engine, and the iteration in progress."""

    spec: InstanceSpec
    engine: Engine
    step: StepResult | None = None
    event_s: float = inf


class VirtualFleet:
    """*engines*: by instance of *inventory*, in its order. *count_s*: period at which the dispatcher counts streamed
    tokens; 0 for at once.
    """

    def __init__(
        self, inventory: Inventory, engines: Iterable[EngineConfig], round_trip_s: float = 0.0, count_s: float = 0.0
    ) -> None:
        self.inventory, self.round_trip_s, self.count_s = inventory, round_trip_s, count_s
        self.servers = [Server(*each) for each in zip(inventory.instances, map(Engine, engines), strict=True)]
        self.now_s = self.looked_s = self.counted_s = 0.0
        self.courses: dict[int, Course] = {}
        self.streaming: dict[int, None] = {}
        """Numbers of those that an instance has, in order of their first tokens there."""
        self.expected = self.ended = 0
        """Requests that come, and that have ended."""
        self.events: list[Event] = []
        self.decisions: list[tuple[float, int, str, str, int]] = []
        """When a request, of which number, was given to which model, region and instance."""
        self.warmed: list[Warm | WarmPrefix] = []
        self.ahead = -inf
        """Most requests beyond its sequences that an instance had."""
        self.swap_groups: Callable[[], tuple[SwapGroupSpec, ...]] = lambda: inventory.swap_groups
        self.on_tick: list[Callable[[], None]] = []
        self.on_end: list[Callable[[int], None]] = []
        self.on_idle: list[Callable[[int], None]] = []
        """Called with an instance after each of its iterations, and after its requests were lost."""
        self.removed: Server | None = None
        """Server whose row is gone."""
        self._timers: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._leaving, self._ending, self._lost = set[int](), set[int](), list[int]()
        self._prefixes: list[WarmPrefix] = []
        self._tiers = Counter[str]()
        self.topology = Topology()
        self.dispatcher = Dispatcher(self.topology, lambda: self.now_s, deliver=self.hear)
        self.dispatcher.fleet.wall_clock = lambda: self.now_s
        self.apply()
        self.dispatcher.queue.keep_order()

    # The inventory

    def apply(self, *, pump: bool = True) -> None:
        """Have the dispatcher read the rows."""
        specs = [each.spec for each in self.servers if each is not self.removed]
        rows = replace(self.inventory, instances=tuple(specs), swap_groups=self.swap_groups())
        self.dispatcher.apply_inventory(rows)
        self.topology.fleet.round_trips[:, ROUND_TRIP_S] = self.round_trip_s
        if pump:
            self.dispatcher.pump_all()

    def put(self, number: int, state: InstanceState, *, pump: bool = True, **columns: Any) -> None:
        """Change the row of an instance."""
        server = self.servers[number]
        server.spec = replace(server.spec, state=state, state_changed_at=self.now_s, **columns)
        self.apply(pump=pump)

    def replica(self, number: int) -> Replica:
        return self.topology.replicas[self.servers[number].spec.instance_id]

    def has(self, number: int) -> list[int]:
        """Return the numbers of the requests that were given to an instance and have not left it."""
        return [at for at, course in self.courses.items() if course.number == number]

    def lose(self, number: int) -> None:
        """Have a server die: the dispatcher gives up its requests, of which those that can go on are queued again."""
        server = self.servers[number]
        replica = self.replica(number)
        self._lost.clear()
        self.put(number, InstanceState.FAILED, pump=False)  # the dispatcher knows before the rows are read
        if not self._lost:
            self.dispatcher.lose(replica)
        engine, server.step, server.event_s = server.engine, None, inf
        way = [each for each in self._timers if each[1] == LANDING and each[4][0] == number]
        there, sent = engine.here(), [int(each[4][1].request_id) for each in sorted(way)]
        # In order of admission, also those that would have ended with this iteration; at last those on their way.
        placed_at = {request: at for at, (_, request, *_) in enumerate(self.decisions)}
        for each in [each for each in self._lost if each not in there and each not in sent]:
            there.insert(sum(placed_at[other] < placed_at[each] for other in there), each)
        lost = there + sent
        assert sorted(lost) == sorted(self._lost)
        self._timers = [each for each in self._timers if each not in way]
        heapify(self._timers)
        self._lost.clear()
        server.engine = Engine(engine.config)
        for each in lost:
            course = self.courses[each]
            again = not course.tokens or (course.placed is not None and course.placed.keep_tokens)
            self._leave(each, again=again)
        for act in self.on_idle:
            act(number)

    def cancel(self, number: int) -> None:
        """Have the caller of a request close its connection."""
        self.servers[self.courses[number].number].engine.abort(str(number))
        self._leave(number, again=False)

    def publish(self) -> None:
        """Have the engines publish their KV events. A block has its content as each of its tokens."""
        for server in self.servers:
            size = server.engine.config.block_size_tokens
            cache = KvCache(self.dispatcher.queue, self.topology.replicas[server.spec.instance_id])
            cache.block_tokens = size
            cache.known()

            def stored(block: Any, cache: KvCache = cache, size: int = size) -> None:
                if isinstance(block, int):
                    cache.take([Stored([block], block - 1 if block % 1000 else None, [block] * size, size, "GPU")])
                    assert not cache.why

            def removed(block: Any, cache: KvCache = cache) -> None:
                if isinstance(block, int):
                    cache.take([Removed([block], "GPU")])

            server.engine.watch(stored, removed)

    # Time

    def at(self, at_s: float, what: int, act: Callable[..., None], *arguments: Any) -> None:
        """Have *act* happen at *at_s*; *what* says before or after what else."""
        heappush(self._timers, (at_s, what, next(self._order), act, arguments))

    def expect(self, courses: Iterable[Course]) -> None:
        """Let requests come, each at the time that its record says."""
        for course in courses:
            self.at(course.submit.arrived_s, ARRIVAL, self.arrive, course)
            self.expected += 1

    def run(self, until_s: float = inf) -> None:
        """Let everything happen before *until_s*, or until all that is expected has ended."""
        while self.ended < self.expected or until_s < inf:
            event_s, slot = min((each.event_s, at) for at, each in enumerate(self.servers))
            timer = self._timers[0][:2] if self._timers else (inf, SWEEP)
            look_s = self.looked_s + LOOK_S
            count_s = self.counted_s + self.count_s if self.count_s else inf
            next_s = min(event_s, timer[0], look_s, count_s)
            if next_s >= until_s:
                self.now_s = until_s
                return
            assert next_s < TOO_LATE_S, f"{self.expected - self.ended} requests wait for ever"
            self.now_s = next_s
            if look_s == next_s:
                self._look()
            elif timer < (event_s, ITERATION):
                _, _, _, act, arguments = heappop(self._timers)
                act(*arguments)
            elif event_s == next_s:
                self._work(slot)
            else:
                self.counted_s = count_s
                self.report()

    def _look(self) -> None:
        """Do what the gateway's process does twice a second, and every other time.

        What fits groups and moves requests comes after all else of the moment, as in a simulation.
        """
        self.looked_s = self.now_s
        self.dispatcher.holding.release_due()
        if self.now_s % SWEEP_S == 0:
            late = self.dispatcher.queue.sweep, self.dispatcher.sweeping.sweep
            steps = self.dispatcher.sweep_steps
            for act in (*(each for each in steps if each not in late), self._warm_prefixes, *self.on_tick):
                act()
            for act in (each for each in steps if each in late):
                self.at(self.now_s, SWEEP, act)

    # What happens to requests

    def arrive(self, course: Course) -> None:
        asked = msgspec.structs.replace(course.submit, arrived_s=self.now_s)
        course.submit = asked
        self.courses[asked.number] = course
        self.dispatcher.take(asked)

    def hear(self, record: object) -> None:
        """Record a delivery to the gateway."""
        match record:
            case Placed():
                self._place(record)
            case Refused():
                course = self.courses[record.number]
                course.outcome, course.refused, course.number = "refused", record.code, -1
                self._note("refused", record.number, record.code)
                self._end(record.number)
            case Rerouted():
                self._note("moved", record.number, record.region)
            case Held():
                self._note("held", record.number, record.region)
            case Queued():
                what = "queued" if record.released is None else f"released: {record.released['why']}"
                self._note(what, record.number, record.region)
            case FellBack():
                self.courses[record.number].fell_back = record
                self._note(f"fell back: {record.rule}", record.number, record.region)
            case Admission():
                self._note(f"admitted as {record.slo_class}", record.number)
            case Waiting():
                self.waiting(record)
            case Warm():
                self.warmed.append(record)
            case WarmPrefix():
                self.warmed.append(record)
                self._prefixes.append(record)
            case Evict():
                self._leaving.add(record.number)
            case Lost():
                self._lost.append(record.number)
                if record.reclaimed:
                    self._leaving.add(record.number)
                    self._ending.add(record.number)

    def waiting(self, record: Waiting) -> None:
        """Hear an estimate of a wait."""

    def _note(self, what: str, number: int, where: str = "") -> None:
        self.events.append(Event(self.now_s, what, number, where))

    def _place(self, placed: Placed) -> None:
        course = self.courses[placed.number]
        number = next(at for at, each in enumerate(self.servers) if each.spec.name == placed.instance)
        server = self.servers[number]
        course.placed, course.number = placed, number
        course.first_queue_s = self.now_s if course.first_queue_s is None else course.first_queue_s
        self._note("placed", placed.number, placed.instance)
        self.decisions.append((self.now_s, placed.number, server.spec.model, placed.region, number))
        self.ahead = max(self.ahead, len(self.has(number)) - server.engine.config.max_num_seqs)
        load = 0.0
        if placed.adapter:
            tiers = self.dispatcher.adapters.tiers
            tier = next(at for at, name in enumerate(TIERS) if tiers[name] > self._tiers[name])
            self._tiers = Counter(tiers)
            load = load_s(self.topology.fleet, number, tier)
        request = EngineRequest(
            str(placed.number),
            course.submit.prompt_tokens + course.kept_tokens,
            course.output_tokens - course.kept_tokens,
            upstream_priority(ORDERINGS[placed.ordering], placed.priority, 0, placed.queue_key_s),
            self.now_s,
            course.blocks,
            load,
            placed.number if server.engine.config.offload_blocks else None,
        )
        if self.round_trip_s:
            self.at(self.now_s + self.round_trip_s, LANDING, self._land, number, request)
        else:
            self._land(number, request)

    def _land(self, number: int, request: EngineRequest) -> None:
        server = self.servers[number]
        server.engine.add(request)
        if server.step is None:
            server.event_s = self.now_s

    def _work(self, number: int) -> None:
        server = self.servers[number]
        step, server.step = server.step, None
        if step is not None:
            self._hand_out(step, number)
            for each in server.engine.here():
                if each in self._leaving:
                    server.engine.abort(str(each))
                    again = each not in self._ending
                    self.courses[each].evictions += again
                    self._leave(each, again=again, evicted=again)
            for act in self.on_idle:
                act(number)
        server.step = step = server.engine.step(self.now_s)
        server.event_s = inf if step is None else step.ends_s
        for each in step.preempted if step is not None else ():
            self.courses[int(each)].preemptions += 1

    def _hand_out(self, step: StepResult, number: int) -> None:
        emitted = [
            int(each) for each in step.emitted if self.courses[int(each)].number == number
        ]  # or it was cancelled
        for each in emitted:
            course = self.courses[each]
            course.tokens += 1
            self.streaming[each] = None
            course.token_s = self.now_s
            course.first_token_s = self.now_s if course.first_token_s is None else course.first_token_s
        if not self.count_s:
            self.report(emitted)
        for each in emitted:
            if str(each) in step.finished:
                course = self.courses[each]
                course.outcome, course.finished_s, course.number = "done", self.now_s, -1
                self._leaving.discard(each)
                del self.streaming[each]
                self.dispatcher.take(Finished(each, 0 if course.pools else course.tokens))
                self._end(each)

    def report(self, numbers: Iterable[int] | None = None) -> dict[int, float]:
        """Have the dispatcher count streamed tokens; return when each request streamed last."""
        moved = []
        for number in self.streaming if numbers is None else numbers:
            course = self.courses[number]
            if not course.pools and course.tokens != course.reported_tokens:
                course.reported_tokens = course.tokens
                moved.append((number, course.tokens))
        if moved:
            self.dispatcher.take(Advanced(tuple(moved)))
        return {number: self.courses[number].token_s for number in self.streaming}

    def _leave(self, number: int, *, again: bool, evicted: bool = False) -> None:
        """Say that a request has left its instance."""
        course = self.courses[number]
        self._leaving.discard(number)
        self.streaming.pop(number, None)
        course.number = -1
        self._note("evicted" if evicted else "left", number)
        if again:
            course.kept_tokens = course.tokens
            self.dispatcher.take(Left(number, again=True, evicted=evicted, kept_tokens=course.tokens))
            return
        course.outcome = "failed"
        self.dispatcher.take(Left(number))
        self._end(number)

    def _end(self, number: int) -> None:
        self.ended += 1
        for act in self.on_end:
            act(number)

    def _warm_prefixes(self) -> None:
        """Answer requests for one token: within the sweep, once the instance has memory for them."""
        for record in list(self._prefixes):
            server = next(each for each in self.servers if each.spec.name == record.instance)
            contents = next(
                each.blocks
                for each in self.courses.values()
                if each.blocks and recorded(np.array(each.blocks))[-1] == record.prefix
            )
            if server.engine.warm(contents, server.step is not None):
                self._prefixes.remove(record)
                self.dispatcher.take(PrefixWarmed(record.instance, record.ready_at, record.prefix))


def token_blocks(blocks: Sequence[int], size: int) -> bytes:
    """Return the hashes of the full blocks of a prompt whose tokens are published by `VirtualFleet.publish`."""
    hashes = np.zeros(len(blocks), np.int64)
    chain(hashes, np.array([token for block in blocks for token in [block] * size], np.int64), size, 0)
    return hashes.tobytes()
