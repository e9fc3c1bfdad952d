"""A living fleet on a virtual clock: the gateway's dispatcher over engines of emulated servers, and their ledger.

What a fork is made of is the real thing: rows of the inventory as the gateway reads them, its dispatcher, its snapshot. In
the place of HTTP stands a list of events in order of time, so that nothing depends on the machine.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.accounts.models import Tenant
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.topology import Replica, Topology
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.port import Advanced, Asked, Evict, FellBack, Finished, Left, Placed, Refused
from controlplane.dispatch.snapshot import Snapshot
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Model, PerformanceProfile, SloClass, SloKind
from controlplane.gateway.admission.keys import SloTerms
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.gateway.upstream.client import upstream_priority
from scheduling.fleet.state import FleetState
from scheduling.queueing.held_work import LOOK_S
from scheduling.queueing.ordering import ORDERINGS
from scheduling.routing.cached_blocks import drop, hold
from scheduling.routing.models import ModelRule
from scheduling.routing.prefix_affinity import filled
from scheduling.routing.requests_ahead import ROUND_TRIP_S
from scheduling.simulation.engine.reference import EngineConfig, EngineRequest, ReferenceEngine, StepResult

SWEEP_S = 1.0
BLOCK_TOKENS = 16
BEGAN_AT = datetime(2026, 1, 5, 9, 0, tzinfo=UTC)
"""When the virtual clock stands at 0."""


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """A request that comes."""

    arrived_s: float
    region: str
    slo_class: str
    prompt_tokens: int
    output_tokens: int
    predicted_tokens: int
    application: str = ""
    run: str = ""
    run_due_s: float | None = None
    recorded: tuple[int, ...] = ()
    """Hashes of the recorded blocks of its prompt."""
    model: str = ""
    """Model that the weights of the name it asked for gave it; "": that of the fleet."""
    name: str = ""
    """That public name."""


@dataclass(slots=True)
class Course:
    """How it goes."""

    asked: DrawnRequest
    placed: Placed | None = None
    first_queue_s: float | None = None
    first_token_s: float | None = None
    token_s: float = -inf
    finished_s: float | None = None
    tokens: int = 0
    reported_tokens: int = 0
    refused: str = ""
    evictions: int = 0
    fell_back: FellBack | None = None


class VirtualFleet:
    """*count_s*: period at which the dispatcher counts streamed tokens; 0 for at once."""

    def __init__(self, model: str, round_trip_s: float, count_s: float = 0.0) -> None:
        self.model, self.round_trip_s, self.count_s = model, round_trip_s, count_s
        self.now_s = self.swept_s = self.looked_s = self.counted_s = self.forked_s = 0.0
        self.topology = Topology()
        self.dispatcher = Dispatcher(self.topology, lambda: self.now_s, deliver=self._hear)
        self.dispatcher.apply_inventory(inventory.read())
        self.topology.fleet.round_trips[:, ROUND_TRIP_S] = round_trip_s
        self.observation = Observation(
            self.topology,
            self.dispatcher.queue.count,
            self.dispatcher.outlook,
            lambda: self.now_s,
            wall_clock=self.wall_s,
        )
        self.publishes = False
        """Whether instances publish their KV events."""
        self.snapshot = Snapshot(self.dispatcher, self.observation, self.report, wall_clock=self.wall_s)
        replicas = sorted(self.topology.replicas.values(), key=lambda one: one.slot)
        self.slot_of = {one.name: one.slot for one in replicas}
        rows = Deployment.objects.select_related("region", "model")
        deployments = {(row.model.name, row.region.name): row for row in rows}
        self.engines = [
            ReferenceEngine(_engine(deployments[one.spec.model, one.spec.region], one.spec)) for one in replicas
        ]
        self.models = {row.name: row for row in Model.objects.select_related("fallback")}
        for one in replicas:
            if one.endpoint.spec.policy.exact_prefixes:
                self._publish(one.slot)
        self.steps: list[StepResult | None] = [None] * len(self.engines)
        self.events_s = [inf] * len(self.engines)
        self.sent: deque[tuple[float, int, int]] = deque()
        self.courses: list[Course] = []
        self.streaming: dict[int, None] = {}
        """Numbers of those that an instance has, in order of their first tokens there."""
        self.leaving: set[int] = set()
        self.decided: list[tuple[float, int, int]] = []
        """When a request of which number was given to which slot, in that order."""
        self.classes = {row.name: row for row in SloClass.objects.all()}
        self.tenant = Tenant.objects.get()

    def _publish(self, slot: int) -> None:
        """Have the dispatcher know what the engine in *slot* stores and removes."""
        queue, self.publishes = self.dispatcher.queue, True
        queue.affinity.blocks.block_tokens[slot] = BLOCK_TOKENS

        def store(content: object) -> None:
            if isinstance(content, int):
                queue.fit_blocks(1)
                hold(queue.affinity.blocks, slot, np.array([content], np.int64), 0, 1)

        def remove(content: object) -> None:
            if isinstance(content, int):
                drop(queue.affinity.blocks, slot, np.array([content], np.int64), 0, 1)

        self.engines[slot].watch(store, remove)

    def wall_s(self) -> float:
        return BEGAN_AT.timestamp() + self.now_s

    def seen(self) -> FleetState:
        """Return the present state, as another process reads it."""
        self.forked_s = self.now_s
        return msgspec.json.decode(msgspec.json.encode(self.snapshot()), type=FleetState)

    def report(self) -> dict[int, float]:
        """Have the dispatcher count streamed tokens; when each request streamed last."""
        moved = []
        for number in self.streaming:
            course = self.courses[number]
            if course.tokens != course.reported_tokens:
                course.reported_tokens = course.tokens
                moved.append((number, course.tokens))
        if moved:
            self.dispatcher.take(Advanced(tuple(moved)))
        return {number: self.courses[number].token_s for number in self.streaming}

    # What happens

    def reclaim(self, name: str) -> None:
        """Take the donated instance *name* back."""
        self._set(name, InstanceState.RECLAIMING)
        self.dispatcher.spot.reclaim(self._replica(name), late=False)

    def _replica(self, name: str) -> Replica:
        return next(one for one in self.topology.replicas.values() if one.name == name)

    def _set(self, name: str, state: InstanceState) -> None:
        Instance.objects.filter(name=name).update(state=state)
        self.dispatcher.apply_inventory(inventory.read())
        self.dispatcher.pump_all()

    def run(self, asked: Sequence[DrawnRequest], until_s: float = inf) -> None:
        """Let come what is *asked*, in order of time, and everything else happen before *until_s*."""
        arrivals = deque(asked)
        while True:
            arrival_s = arrivals[0].arrived_s if arrivals else inf
            sent_s = self.sent[0][0] if self.sent else inf
            event_s, slot = min((each_s, slot) for slot, each_s in enumerate(self.events_s))
            waiting = len(self.dispatcher.queue) + len(self.dispatcher.holding)
            if min(arrival_s, sent_s, event_s) == inf and not waiting:
                return
            sweep_s, look_s = self.swept_s + SWEEP_S, self.looked_s + LOOK_S
            count_s = self.counted_s + self.count_s if self.count_s else inf
            now_s = min(arrival_s, sent_s, event_s, sweep_s, look_s, count_s)
            if now_s >= until_s:
                self.now_s = until_s
                return
            self.now_s = now_s
            if now_s == look_s:
                self.looked_s = look_s
                self.dispatcher.holding.release_due()
            elif now_s == arrival_s:
                self._arrive(arrivals.popleft())
            elif now_s == event_s:
                self._work(slot)
            elif now_s == sent_s:  # of two that reach an idle instance together, it begins with the first
                _, to, number = self.sent.popleft()
                self._land(to, number)
            elif now_s == sweep_s:
                self.swept_s = sweep_s
                self.dispatcher.sweep()
            else:
                self.counted_s = count_s
                self.report()

    def _arrive(self, asked: DrawnRequest) -> None:
        number, slo = len(self.courses), self.classes[asked.slo_class]
        model = self.models[asked.model or self.model]
        self.courses.append(Course(asked))
        terms = SloTerms.of(slo)
        self.dispatcher.take(
            Asked(
                number,
                f"r{number}",
                model.name,
                asked.region,
                asked_model=asked.name,
                model_rule=ModelRule.WEIGHTS if asked.name else "",
                fallback=model.fallback.name if model.fallback else "",
                fallback_wait_s=model.fallback_wait_s,
                tenant_id=self.tenant.pk,
                tenant=self.tenant.name,
                priority=slo.priority,
                due_s=terms.due_s,
                end_s=terms.end_s,
                deadline_s=slo.deadline_s,
                slo_class=slo.name,
                evictable=True,
                interactive=slo.kind == SloKind.INTERACTIVE,
                opportunistic=slo.kind == SloKind.OPPORTUNISTIC,
                arrived_at=self.wall_s(),
                arrived_s=self.now_s,
                prompt_tokens=asked.prompt_tokens,
                predicted_tokens=asked.predicted_tokens,
                max_tokens=None,
                sequences=1,
                streamed=True,
                prefix_hashes=asked.recorded,
                block_tokens=BLOCK_TOKENS if asked.recorded else 0,
                token_blocks=_blocks(asked).tobytes() if self.publishes else b"",
                token_block_size=BLOCK_TOKENS,
                application=asked.application,
                run=asked.run,
                run_due_s=asked.run_due_s,
            )
        )

    def _hear(self, record: object) -> None:
        """Record a delivery to the gateway."""
        match record:
            case Placed():
                course = self.courses[record.number]
                course.placed = record
                self.decided.append((self.now_s, record.number, self.slot_of[record.instance]))
                if course.first_queue_s is None:
                    course.first_queue_s = self.now_s - course.asked.arrived_s
                self.sent.append((self.now_s + self.round_trip_s, self.slot_of[record.instance], record.number))
            case FellBack():
                self.courses[record.number].fell_back = record
            case Refused():
                self.courses[record.number].refused = record.code
            case Evict():
                self.leaving.add(record.number)

    def _land(self, slot: int, number: int) -> None:
        course = self.courses[number]
        placed, asked = course.placed, course.asked
        assert placed is not None
        priority = upstream_priority(ORDERINGS[placed.ordering], placed.priority, 0, placed.queue_key_s)
        prompt, output = asked.prompt_tokens + course.tokens, asked.output_tokens - course.tokens
        blocks = tuple(_blocks(asked).tolist())
        self.engines[slot].add(EngineRequest(str(number), prompt, output, priority, self.now_s, blocks))
        if self.steps[slot] is None:
            self.events_s[slot] = self.now_s

    def _work(self, slot: int) -> None:
        step, self.steps[slot] = self.steps[slot], None
        if step is not None:
            self._hand_out(step)
            engine = self.engines[slot]
            for number in [int(one) for one in (*engine._running, *engine._waiting)]:
                if number in self.leaving:
                    self._evict(number, engine)
            replica = self.topology.by_slot[slot]
            if replica.spec.state == InstanceState.RECLAIMING and not replica.requests:
                self._set(replica.name, InstanceState.READY)
        self.steps[slot] = step = self.engines[slot].step(self.now_s)
        self.events_s[slot] = inf if step is None else step.ends_s

    def _hand_out(self, step: StepResult) -> None:
        for request_id in step.emitted:
            course = self.courses[int(request_id)]
            course.tokens += 1
            course.token_s = self.now_s
            course.first_token_s = course.first_token_s or self.now_s
            self.streaming[int(request_id)] = None
        if not self.count_s:
            self.report()
        for request_id in step.finished:
            number = int(request_id)
            self.leaving.discard(number)
            self.courses[number].finished_s = self.now_s
            del self.streaming[number]
            self.dispatcher.take(Finished(number, self.courses[number].tokens))

    def _evict(self, number: int, engine: ReferenceEngine) -> None:
        course = self.courses[number]
        self.leaving.discard(number)
        engine.abort(str(number))
        course.evictions += 1
        self.streaming.pop(number, None)
        self.dispatcher.take(Left(number, again=True, evicted=True, kept_tokens=course.tokens))

    # What is written

    def write_ledger(self) -> None:
        """Return a row for each request that arrived."""
        LedgerRow.objects.bulk_create(self._row(number, course) for number, course in enumerate(self.courses))

    def _row(self, number: int, course: Course) -> LedgerRow:
        asked, placed = course.asked, course.placed
        done = course.finished_s is not None
        first_s, ended_s = course.first_token_s, course.finished_s

        def since_ms(moment_s: float | None) -> float | None:
            return None if moment_s is None else 1000 * (moment_s - asked.arrived_s)

        return LedgerRow(
            request_id=f"r{number}",
            arrived_at=BEGAN_AT + timedelta(seconds=asked.arrived_s),
            tenant=self.tenant,
            model=course.fell_back.model if course.fell_back else asked.model or self.model,
            asked_model=asked.name or (self.model if course.fell_back else ""),
            model_rule=course.fell_back.rule if course.fell_back else ModelRule.WEIGHTS if asked.name else "",
            slo_class=asked.slo_class,
            region=placed.region if placed else asked.region,
            own_region=asked.region if placed and placed.region != asked.region else "",
            instance=placed.instance if placed else "",
            streamed=True,
            outcome=Outcome.DONE if done else Outcome.REJECTED,
            status_code=200 if done else 503,
            prompt_tokens=asked.prompt_tokens,
            output_tokens=course.tokens,
            predicted_prompt_tokens=asked.prompt_tokens,
            predicted_output_tokens=asked.predicted_tokens,
            queue_ms=None if course.first_queue_s is None else 1000 * course.first_queue_s,
            ttft_ms=since_ms(first_s),
            e2e_ms=since_ms(ended_s),
            unserved=not done,
            attempts=placed.attempt if placed else 0,
            evictions=course.evictions,
        )


def _blocks(asked: DrawnRequest) -> NDArray[np.int64]:
    return filled(np.array(asked.recorded, np.int64), BLOCK_TOKENS, BLOCK_TOKENS)


def _engine(row: Deployment, spec: inventory.InstanceSpec) -> EngineConfig:
    """Return the engine of an emulated server of that deployment, with the memory in *spec*."""
    profile = PerformanceProfile.objects.get(model=row.model)
    return EngineConfig(
        max_num_seqs=row.max_num_seqs,
        max_num_batched_tokens=row.max_num_batched_tokens,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=spec.kv_capacity_tokens // BLOCK_TOKENS,
        policy=row.scheduling_policy,
        max_model_len=row.model.context_tokens,
        profile=profile.coefficients(),
        front_end=profile.front_end(),
        prefix_caching=row.routing_policy == "least_delay",
    )
