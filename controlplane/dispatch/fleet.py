"""The live fleet as the concerns of `scheduling.control` see it and act on it: `control.fleet.Fleet` over the dispatcher."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, cast

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from controlplane.dispatch import port
from controlplane.dispatch.core import Core
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request
from controlplane.dispatch.port import Asked, Warm, WarmPrefix
from controlplane.dispatch.waiting_queue import first_due_of
from controlplane.fleet.lifecycle.stages import COMING_LIMIT_S
from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from scheduling.applications.prewarming import Warmable
from scheduling.control.fleet import FallbackTerms, SwapGroup
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.carried import OUTPUT, PROMPT
from scheduling.queueing.groups import NONE
from scheduling.queueing.held_work import Release
from scheduling.queueing.ordering import NO_DEADLINE_S, Standing
from scheduling.queueing.promises import ClassTerms
from scheduling.queueing.running import Running, running_of
from scheduling.queueing.waiting_set import WaitingArrays
from scheduling.queueing.waits.starting import NOT_KNOWN, SPREAD, left_of_start_s
from scheduling.routing.models import ModelRule
from scheduling.routing.prefix_affinity import Affinity

WAKE_S: Final = 5.0
"""Taken for waking an instance that shares no GPUs; those that do have measured times."""
START_S: Final = 5.0
"""Taken for what another platform does to warm a backend (`controlplane.applications.warming`)."""
AT_REST: Final = frozenset({InstanceState.SLEEPING, InstanceState.STOPPED})
LEAVING_S: Final = 5.0
"""Time after which a request to be evicted is assumed to stay: it had begun to emit what cannot be continued."""
RETURNS_S: Final = 3.0
"""Time until heartbeats find an unreachable instance again, as measured on a busy machine."""
terms_of = attrgetter(*port.TERMS)


def fallback_terms(asked: Asked) -> FallbackTerms:
    """Return the terms of the fallback of *asked*, which has one."""
    origin = asked.region, asked.regions
    return FallbackTerms(asked.model, asked.fallback, asked.fallback_wait_s, origin, asked.opportunistic)


class LiveFleet:
    """Requests and actions of *core*. *expire* refuses a held request or holds it on, *hold* holds one if its class is held,
    and *become* makes it one of the model of an endpoint.
    """

    def __init__(
        self,
        core: Core,
        *,
        expire: Callable[[Request], None],
        spot_with_room: Callable[[Asked], Endpoint | None],
        hold: Callable[[Request], bool],
        become: Callable[[Request, Endpoint, ModelRule], None],
    ) -> None:
        self.topology, self.waiting_queue, self.placement, self.requests = (
            core.topology, core.queue, core.placement, core.table,
        )  # fmt: skip
        self.backends: Collection[str] = ()
        """Containers and DNN models that are kept warm, by name."""
        self.wall_clock = time.time
        self._deliver, self._evict, self._spot_with_room = core.deliver, core.evict, spot_with_room
        self._enqueue, self._expire, self._hold, self._become = core.guarded(core.enqueue), expire, hold, become

    @property
    def now_s(self) -> float:
        return self.waiting_queue.clock()

    @property
    def instances(self) -> FleetArrays:
        return self.topology.fleet

    @property
    def members(self) -> EndpointArrays:
        return self.topology.arrays

    @property
    def waiting(self) -> WaitingArrays:
        return self.waiting_queue.arrays

    @property
    def affinity(self) -> Affinity:
        return self.waiting_queue.affinity

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        return self.topology.endpoints

    def request(self, row: int) -> Request:
        """Return the open request of *row*."""
        request = self.requests.of[row]
        assert request is not None
        return request

    def row_at(self, slot: int) -> int:
        return self.waiting_queue.at(slot).row

    def preferred(self, model: str, region: str, within: tuple[str, ...] = ()) -> int:
        candidates = self.topology.candidates(model, region, within=within)
        return int(candidates[0]) if candidates.size else -1

    def origin(self, row: int) -> tuple[str, tuple[str, ...]]:
        asked = self.request(row).asked
        return asked.region, asked.regions

    def serves(self, endpoint: int) -> bool:
        return self.topology.serves(self.topology.endpoints[endpoint])

    def spot_with_room(self, row: int) -> int:
        endpoint = self._spot_with_room(self.request(row).asked)
        return -1 if endpoint is None else endpoint.index

    def occupancy(self) -> NDArray[np.int64]:
        topology, fleet = self.topology, self.topology.fleet
        rows = np.zeros((len(topology.endpoints), 10), np.int64)
        held = list[tuple[int, Request]]()
        for replica in topology.replicas.values():
            slot, at = replica.slot, replica.endpoint.index
            if not fleet.accepting[slot]:
                continue
            prompt, output = fleet.given_tokens[slot, PROMPT], fleet.given_tokens[slot, OUTPUT]
            given = (1, int(prompt), int(output)) if output > 0 else (0, 0, 0)
            rows[at] += (
                int(fleet.kv_capacity_tokens[slot]), topology.at_once(replica), 0, 0, 0, 0, 1, *given,
            )  # fmt: skip
            held += ((at, request) for request in replica.requests)
        for endpoint in topology.endpoints:
            held += ((endpoint.index, request) for request in self.waiting_queue.of(endpoint))
        for at, request in held:
            other = not request.asked.interactive
            rows[at, 2 + other] += request.expected_tokens
            rows[at, 4 + other] += request.asked.sequences
        return rows

    def produced(self, rows: Collection[int] | None = None) -> Callable[[int], int]:
        return self._produced

    def _produced(self, row: int) -> int:
        request = self.requests.of[row] if row >= 0 else None
        return request.output_tokens if request is not None and request.replica is not None else 0

    def record_standing(self, rows: Sequence[int], standing: Standing) -> None:
        for row in rows:
            self.request(row).standing = standing

    @property
    def prewarm_k(self) -> float:
        return self.topology.tuned.PREWARM_K

    @property
    def any_cold(self) -> bool:
        return bool(self.topology.adapter_names or self.backends)

    def system_prompt(self, row: int) -> int | None:
        return system_prompt(self.request(row).asked)

    def warm_s(self, kind: str, name: str) -> float | None:
        return START_S if name in self.backends else None

    def sleeping(self) -> dict[int, float]:
        wakes_s, replicas = dict[int, float](), self.topology.replicas.values()
        for one in replicas:
            if one.spec.state == InstanceState.SLEEPING:
                wakes_s[one.endpoint.index] = WAKE_S
        for group in self.topology.swap_groups:
            for member in group.members:
                endpoint = self.topology.endpoint(member.model, member.region)
                if endpoint is not None:
                    wakes_s[endpoint.index] = member.swap_s
        for one in replicas if wakes_s else ():
            if one.spec.state in PRESENT:
                wakes_s.pop(one.endpoint.index, None)
        return wakes_s

    def slot(self, row: int) -> int:
        return self.request(row).slot

    def slo_class(self, row: int) -> str:
        return self.request(row).asked.slo_class

    def max_tokens(self, row: int) -> float:
        asked = self.request(row).asked
        return float(asked.max_tokens * asked.sequences) if asked.max_tokens else math.inf

    def terms(self, row: int) -> tuple[ClassTerms, tuple[ClassTerms, ...]]:
        asked = self.request(row).asked
        return ClassTerms(*terms_of(asked)), asked.fallbacks

    def running(self, endpoint: int) -> tuple[int, int]:
        of = self.topology.endpoints[endpoint]
        return of.running_sequences, of.running_output_tokens

    def serves_in(self, instance: int) -> tuple[float, float] | None:
        """An instance that is unreachable or paused is back at an unknown time."""
        if (one := self.topology.by_slot.get(instance)) is None:
            return None
        if one.spec.start_s is not None:
            passed_s = self.wall_clock() - one.spec.start_began_at
            in_s = left_of_start_s(one.spec.start_s, max(0.0, passed_s))
            return (in_s, SPREAD) if passed_s < COMING_LIMIT_S else None
        asleep = one.metrics is not None and one.metrics.sleeping
        is_well = one.spec.state == InstanceState.READY and not one.lost and not one.wedged and not asleep
        if not is_well or self.topology.fleet.accepting[instance] or not self.topology.serves(one.endpoint):
            return None
        return max(RETURNS_S, one.health.until_s - self.now_s), NOT_KNOWN

    def serving(self, model: str, origin: tuple[str, tuple[str, ...]], opportunistic: bool = False) -> int:
        region, within = origin
        endpoint = self.placement.serving(self.topology.candidates(model, region, opportunistic, within))
        return -1 if endpoint is None else endpoint.index

    def fallback_of(self, row: int) -> FallbackTerms | None:
        request = self.request(row)
        may = not request.has_begun and request.released_s is None and not request.endpoint.is_spot
        return fallback_terms(request.asked) if request.asked.fallback and may else None

    def queue_on(self, row: int, terms: ClassTerms) -> None:
        request = self.request(row)
        self.waiting_queue.take_out(request.slot)
        request.asked = request.asked.on(terms)
        self.requests.write(request)
        if not self._hold(request):
            self._queue_again(request, request.endpoint)

    def fall_back(self, row: int, endpoint: int, rule: ModelRule) -> None:
        request, there = self.request(row), self.topology.endpoints[endpoint]
        if request.slot >= 0:
            self.waiting_queue.take_out(request.slot)
        self._become(request, there, rule)
        self.requests.write(request)
        self._queue_again(request, there)

    def _queue_again(self, request: Request, endpoint: Endpoint) -> None:
        self.waiting_queue.add(request, endpoint)
        self.placement.pump(endpoint)

    def running_requests(self) -> Running:
        return running_of(
            self._running(request, replica)
            for replica in self.topology.replicas.values()
            if self.waiting_queue.grouped(replica.endpoint)
            for request in replica.requests
        )

    def _running(self, request: Request, replica: Replica) -> tuple[Any, ...]:
        """Return the fields of `Running`. The output of an answer that is not streamed is unknown, so it stays."""
        asked, now_s = request.asked, self.now_s
        resumable = asked.evictable or not request.output_tokens
        output = request.expected_tokens - request.expected_prompt
        due_s = first_due_of(replica.endpoint.profile, asked, request.expected_prompt, output)
        return (
            request.row,
            replica.slot,
            asked.arrived_s + (due_s if due_s < math.inf else NO_DEADLINE_S),
            asked.allowed_s,
            asked.priority,
            asked.prompt_tokens,
            request.output_tokens,
            request.expected_tokens,
            request.evictions,
            resumable and asked.streamed and asked.sequences == 1,
            request.evicting_s is not None and now_s - request.evicting_s < LEAVING_S,
        )

    def swap_groups(self) -> Iterator[SwapGroup]:
        wall_s, replicas = self.wall_clock(), self.topology.replicas
        for group in self.topology.swap_groups:
            slots = {
                one.instance_id: replicas[one.instance_id].slot for one in group.members if one.instance_id in replicas
            }
            known, awake = [one for one in group.members if one.instance_id in slots], group.awake
            yield SwapGroup(
                name=group.name,
                at_rest={slots[one.instance_id]: one.swap_s for one in known if one.state in AT_REST},
                awake=slots.get(awake.instance_id, NONE) if awake else NONE,
                is_ready=awake is not None and awake.state == InstanceState.READY,
                ready_s=wall_s - awake.state_changed_at if awake else 0.0,
                in_progress=group.in_progress,
                target=NONE if group.target is None else slots.get(group.target, NONE),
            )

    def name(self, instance: int) -> str:
        return self.topology.by_slot[instance].name

    def is_served(self, endpoint: int) -> bool:
        members = self.topology.members(self.topology.endpoints[endpoint])
        return any(one.spec.state in PRESENT for one in members)

    def pump(self, endpoint: int) -> None:
        self.placement.pump(self.topology.endpoints[endpoint])

    def evict(self, row: int) -> None:
        self._evict(self.request(row).asked.number)

    def queue(self, row: int, endpoint: int, release: Release | None = None) -> None:
        request = self.request(row)
        if release is not None:
            priority = release.priority and max(1, request.asked.priority)
            request.asked = replace(request.asked, priority=priority)
            request.release, request.released_s = release, self.now_s
        self._enqueue(request, self.topology.endpoints[endpoint])

    def expire(self, row: int) -> None:
        self._expire(self.request(row))

    def warm(self, instance: int, target: Warmable, leaves: int = -1, *, again: bool = False) -> None:
        topology, spec, number = self.topology, self.topology.by_slot[instance].spec, cast("int", target.name)
        server = spec.name, spec.state_changed_at, spec.url, spec.api_key
        if target.kind == "prefix":
            self._deliver(WarmPrefix(*server, number))
            return
        name, unload = topology.adapter_names[number], (topology.adapter_names[leaves],) if leaves >= 0 else ()
        self._deliver(Warm(*server, name, topology.adapter_source(name), unload, again))


def system_prompt(asked: Asked) -> int | None:
    """Return the hash that stands for the system prompt of *asked*, that of its last whole block."""
    return asked.prefix_hashes[asked.system_blocks - 1] if asked.system_blocks else None
