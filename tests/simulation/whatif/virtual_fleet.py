"""A living fleet on a virtual clock: the gateway's dispatcher over engines of emulated servers, and their ledger.

What a fork is made of is the real thing: rows of the inventory as the gateway reads them, its dispatcher, its snapshot. In
the place of HTTP stands a list of events in order of time, so that nothing depends on the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.accounts.models import Tenant
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.topology import Replica
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.port import Asked
from controlplane.dispatch.snapshot import Snapshot
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Model, PerformanceProfile, SloClass, SloKind
from controlplane.gateway.admission.keys import SloTerms
from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.fleet.state import FleetState
from scheduling.routing.cached_blocks import drop, hold
from scheduling.routing.models import ModelRule
from scheduling.routing.prefix_affinity import filled
from scheduling.simulation.engine.config import EngineConfig
from tests.clocks.fleet import Course, Engine, VirtualFleet

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


class RowsFleet(VirtualFleet):
    """The fleet of the inventory's rows. *count_s*: period at which the dispatcher counts streamed tokens; 0 for at once."""

    def __init__(self, model: str, round_trip_s: float, count_s: float = 0.0) -> None:
        self.model, self.forked_s, self.publishes = model, 0.0, False
        self.models = {row.name: row for row in Model.objects.select_related("fallback")}
        self.classes = {row.name: row for row in SloClass.objects.all()}
        self.tenant = Tenant.objects.get()
        rows = Deployment.objects.select_related("region", "model")
        deployments = {(row.model.name, row.region.name): row for row in rows}
        read = inventory.read()
        engines = [_engine(deployments[one.model, one.region], one) for one in read.instances]
        super().__init__(read, engines, round_trip_s, count_s)
        self.observation = Observation(
            self.topology,
            self.dispatcher.queue.count,
            self.dispatcher.outlook,
            lambda: self.now_s,
            wall_clock=self.wall_s,
        )
        self.snapshot = Snapshot(self.dispatcher, self.observation, self.report, wall_clock=self.wall_s)
        self.dispatcher.fleet.wall_clock = self.wall_s
        self.slot_of = {one.name: one.slot for one in self.topology.replicas.values()}
        self.on_idle.append(self._reclaimed)
        for replica in self.topology.replicas.values():
            if replica.endpoint.spec.policy.exact_prefixes:
                self._publish(replica)

    def _publish(self, replica: Replica) -> None:
        """Have the dispatcher know what an engine stores and removes."""
        queue, slot, self.publishes = self.dispatcher.queue, replica.slot, True
        queue.affinity.blocks.block_tokens[slot] = BLOCK_TOKENS

        def store(content: object) -> None:
            if isinstance(content, int):
                queue.fit_blocks(1)
                hold(queue.affinity.blocks, slot, np.array([content], np.int64), 0, 1)

        def remove(content: object) -> None:
            if isinstance(content, int):
                drop(queue.affinity.blocks, slot, np.array([content], np.int64), 0, 1)

        next(one for one in self.servers if one.spec.name == replica.name).engine.watch(store, remove)

    @property
    def engines(self) -> list[Engine]:
        return [server.engine for server in self.servers]

    @property
    def decided(self) -> list[tuple[float, int, int]]:
        """When a request of which number was given to which slot, in that order."""
        slots = [self.slot_of[server.spec.name] for server in self.servers]
        return [(at_s, number, slots[server]) for at_s, number, _, _, server in self.decisions]

    def wall_s(self) -> float:
        return BEGAN_AT.timestamp() + self.now_s

    def seen(self) -> FleetState:
        """Return the present state, as another process reads it."""
        self.forked_s = self.now_s
        return msgspec.json.decode(msgspec.json.encode(self.snapshot()), type=FleetState)

    # What happens

    def reclaim(self, name: str) -> None:
        """Take the donated instance *name* back."""
        number = next(at for at, one in enumerate(self.servers) if one.spec.name == name)
        self.put(number, InstanceState.RECLAIMING)
        self.dispatcher.spot.reclaim(self.replica(number), late=False)

    def _reclaimed(self, number: int) -> None:
        if self.servers[number].spec.state == InstanceState.RECLAIMING and not self.has(number):
            self.put(number, InstanceState.READY)

    def put(self, number: int, state: InstanceState, **columns: Any) -> None:
        Instance.objects.filter(name=self.servers[number].spec.name).update(state=state)
        super().put(number, state, **columns)

    def let_come(self, asked: Sequence[DrawnRequest], until_s: float = inf) -> None:
        """Let come what is *asked*, and everything else happen before *until_s*."""
        first = self.expected
        self.expect(self._course(first + at, each) for at, each in enumerate(asked))
        self.run(until_s)

    def _course(self, number: int, asked: DrawnRequest) -> Course:
        slo, model = self.classes[asked.slo_class], self.models[asked.model or self.model]
        terms = SloTerms.of(slo)
        submit = Asked(
            number, f"r{number}", model.name, asked.region, asked_model=asked.name,
            model_rule=ModelRule.WEIGHTS if asked.name else "", fallback=model.fallback.name if model.fallback else "",
            fallback_wait_s=model.fallback_wait_s, tenant_id=self.tenant.pk, tenant=self.tenant.name,
            priority=slo.priority, due_s=terms.due_s, end_s=terms.end_s, deadline_s=slo.deadline_s,
            slo_class=slo.name, evictable=True, interactive=slo.kind == SloKind.INTERACTIVE,
            opportunistic=slo.kind == SloKind.OPPORTUNISTIC, arrived_at=BEGAN_AT.timestamp() + asked.arrived_s,
            arrived_s=asked.arrived_s,
            prompt_tokens=asked.prompt_tokens, predicted_tokens=asked.predicted_tokens, max_tokens=None, sequences=1,
            streamed=True, prefix_hashes=asked.recorded, block_tokens=BLOCK_TOKENS if asked.recorded else 0,
            token_blocks=_blocks(asked).tobytes() if self.publishes else b"", token_block_size=BLOCK_TOKENS,
            application=asked.application, run=asked.run, run_due_s=asked.run_due_s,
        )  # fmt: skip
        return Course(submit, asked.output_tokens, tuple(_blocks(asked).tolist()))

    # What is written

    def write_ledger(self) -> None:
        """Return a row for each request that arrived."""
        LedgerRow.objects.bulk_create(self._row(number, course) for number, course in self.courses.items())

    def _row(self, number: int, course: Course) -> LedgerRow:
        asked, placed = course.submit, course.placed
        done = course.finished_s is not None
        first_s, ended_s = course.first_token_s, course.finished_s

        def since_ms(moment_s: float | None) -> float | None:
            return None if moment_s is None else 1000 * (moment_s - asked.arrived_s)

        return LedgerRow(
            request_id=f"r{number}",
            arrived_at=BEGAN_AT + timedelta(seconds=asked.arrived_s),
            tenant=self.tenant,
            model=course.fell_back.model if course.fell_back else asked.model,
            asked_model=asked.asked_model or (self.model if course.fell_back else ""),
            model_rule=course.fell_back.rule if course.fell_back else asked.model_rule,
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
        prefix_caching=True,
    )
