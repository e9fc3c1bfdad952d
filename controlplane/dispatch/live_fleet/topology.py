"""The gateway's live picture of the fleet: inventory rows as slots of the arrays that the kernels read."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple as struct_astuple
from msgspec.structs import replace as struct_replace
from numpy.typing import NDArray

from controlplane.dispatch.live_fleet.health import Breaker, Health, Notice, RoundTrip
from controlplane.dispatch.live_fleet.inventory import (
    AdapterSpec,
    EndpointSpec,
    InstanceSpec,
    Inventory,
    ModelSpec,
    SwapGroupSpec,
)  # fmt: skip
from controlplane.dispatch.port import Asked, WeightedTargets
from controlplane.events.models import Severity
from controlplane.fleet.lifecycle.states import PRESENT, SERVING, InstanceState
from controlplane.tuning.selectors import Values
from scheduling.compiled import uncompiled
from scheduling.fleet.adapter_memory import FROM_MEMORY_S, FROM_STORAGE_S
from scheduling.fleet.arrays import (
    EMPTY,
    allocate_endpoints,
    allocate_fleet,
    at_once,
    grow_endpoints,
    grow_fleet,
    index_members,
)
from scheduling.fleet.carried import set_front_end
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.kv_cost import OFFLOADED, RESTORE_S_PER_TOKEN
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy, array_value
from scheduling.queueing.held_work import Release
from scheduling.queueing.ordering import Standing
from scheduling.routing.adapters import forget_adapters
from scheduling.routing.prefix_affinity import forget
from scheduling.routing.regions import by_preference, latency_ms
from scheduling.routing.requests_ahead import ROUND_TRIP_S, requests_ahead
from scheduling.routing.routers import LEAST_DELAY, POLICY_CODES
from scheduling.scaling.spot import spot_policy
from scheduling.scaling.view import DEMAND_WINDOW_S
from workers.vllm.metrics import VllmMetrics

_GONE = EndpointPolicy(ordering="priority", queue_bound=0)
"""Policy of an endpoint whose deployment is not active: it takes no requests."""


class Request(Struct, eq=False):
    asked: Asked
    predicted_tokens: int  # possible output
    endpoint: Endpoint  # where it waits or runs
    row: int = -1  # in the request table
    slot: int = -1  # in the waiting set, while waiting
    group: int = -1  # number of its last request group
    run: int = -1  # number of its application run, -1 for none
    adapter: int = -1  # number of its LoRA adapter, -1 for none
    blocks: NDArray[np.int64] | None = None  # `Asked.token_blocks`, while an instance holds a copy of each for it
    adapter_tier: int = 0  # where that was when it was placed last: `routing.adapters`
    unload: tuple[str, ...] = ()  # adapters that leave its instance for that
    standing: Standing | None = None  # of its run, as of when it was queued or the run's rank was refreshed
    queue_key_s: float = 0.0  # there, on the clock of `Asked.arrived_at`
    replica: Replica | None = None
    again: bool = False  # another dispatcher had admitted it
    attempts: int = 0
    evictions: int = 0  # attempts that ended by eviction
    failed_before: int = 0  # attempts that failed at another model, whose fallback serves it
    evicting_s: float | None = None  # when its instance was asked to give it up
    kept_tokens: int = 0  # output of earlier instances: part of the prompt in `asked`
    placed_s: float = 0.0
    cached_tokens: int = 0  # of its prompt at its instance when it was placed, as its router knew
    output_tokens: int = 0  # so far
    expected_tokens: int = 0  # prompt and output, as the fleet arrays reserved them
    counted_tokens: int = 0  # of those, counted as done in the arrays
    expected_prompt: int = 0  # of those, the prompt
    queued_tokens: int = 0  # of the prompt, counted as not prefilled
    ahead: int = -1  # in the look-ahead maps, while an instance has it
    ahead_tokens: int = 0  # output tokens that the maps count
    own_region: str = ""  # of its caller, until the gateway knows it
    release: Release | None = None  # by the queue manager, until the gateway knows it
    released_s: float | None = None  # when the queue manager released it; None: it held it never
    failed_at: list[Replica] = []  # instances that failed it
    unproved: list[tuple[Replica, str]] = []
    """Of those, the ones that count as failing once another instance serves it, with the reason."""

    @property
    def has_begun(self) -> bool:
        """Whether an instance had it and gave it up, or it asks for a continuation: it is not refused."""
        return self.evictions > 0 or self.kept_tokens > 0


class Counted(NamedTuple):
    """Counters of a heartbeat, of which rates are made."""

    at_s: float  # monotonic
    output_tokens: float
    prompt_tokens: float
    preemptions: float
    prefix_queries: float
    prefix_hits: float


MOST_NOTICES = 1000
MEASURED_TOKENS = 1000
"""Restored tokens from which on the time of a restore is as measured."""
NOWHERE = "?"
"""Region of callers in a zone that has none."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """All instances of a model in a region."""

    index: int
    spec: EndpointSpec
    largest_kv_tokens: int = 0  # capacity of its largest instance, where known
    running_sequences: int = 0  # of requests given to its instances
    running_output_tokens: int = 0  # streamed so far by those
    base: Endpoint | None = None  # of a spot endpoint: that of its model and region
    starting: bool = False  # none of its instances serves, and one starts
    up_s: float = -math.inf  # when the last such start ended
    can_start: bool = False  # the floor would start an instance for the requests that wait here
    demand: deque[tuple[int, int]] = field(default_factory=deque)  # (second, tokens asked for), oldest first

    @property
    def model(self) -> str:
        return self.spec.model

    @property
    def region(self) -> str:
        return self.spec.region

    @property
    def policy(self) -> EndpointPolicy:
        return self.spec.policy

    @property
    def profile(self) -> Profile:
        return self.spec.profile

    @property
    def front_end(self) -> FrontEnd:
        return self.spec.front_end

    @property
    def prewarm_share(self) -> float:
        return self.spec.tuned.PREWARM_SHARE

    @property
    def is_spot(self) -> bool:
        """Whether its instances are donated: it serves opportunistic requests alone."""
        return self.base is not None

    def count_demand(self, asked: Asked, now_s: float) -> None:
        """Count the tokens of *asked*, whose caller prefers this endpoint, wherever it is served.

        Only interactive classes: forecasts cover those, and demand is compared with them (SageServe 6.4, 6.5.1).
        """
        if not asked.interactive:
            return
        predicted = asked.predicted_tokens if math.isfinite(asked.predicted_tokens) else 0.0
        second, tokens, demand = int(now_s), asked.prompt_tokens + int(predicted), self.demand
        if demand and demand[-1][0] == second:
            demand[-1] = (second, demand[-1][1] + tokens)
        else:
            demand.append((second, tokens))
            while demand[0][0] < second - DEMAND_WINDOW_S:
                demand.popleft()


@dataclass(slots=True, eq=False)
class Replica:
    """A live instance: its slot in the fleet arrays, the requests there, its last reported metrics."""

    slot: int
    endpoint: Endpoint
    spec: InstanceSpec
    reachable: bool = True
    wedged: str = ""  # why it is lost, if its work stalls
    lost: str = ""  # why it will answer no request, though its server still answers heartbeats
    silent_count: int = 0  # heartbeats missed in a row
    missed_s: float = -math.inf  # time of the last missed one, on the clock
    in_doubt: bool = False  # it failed a request in a way that calls for a check
    health: Health = field(default_factory=Health)
    heartbeat_at: float | None = None  # epoch seconds
    metrics: VllmMetrics | None = None
    preemptions_per_min: float | None = None
    prefix_hit_ratio: float | None = None
    cached_blocks: int | None = None  # in its prefix cache by its KV events; None where these do not say
    cache_unknown: str = ""  # why they do not, though its deployment asks for them
    moving: bool = False  # a change of state is being written
    output_tokens_per_s: float = 0.0  # by its counters
    prompt_tokens_per_s: float = 0.0
    readings: deque[Counted] = field(default_factory=deque)  # of the last minute
    obstacle: str = ""  # why it is not considered present, as noted on the row of one started elsewhere
    identified_s: float = -math.inf  # when it was identified as another server
    round_trip: RoundTrip = field(default_factory=RoundTrip)
    request_ended_s: float = -math.inf  # when the last one ended
    requests: set[Request] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def trouble(self) -> str:
        """Return why it is ready but gets no requests, or few; empty if all is well."""
        if self.lost:
            return f"is lost: {self.lost}"
        return self.health.reason or ("is silent: its /metrics are slow" if self.health.slow else "")


class Topology:
    """Slots, endpoints and the arrays over them. `apply` takes in a reading of the inventory.

    A slot is given back only when its instance has gone and nothing runs there, so that bookkeeping never lands on a
    stranger.
    """

    def __init__(self, instances: int = 64, endpoints: int = 16) -> None:
        self.fleet = allocate_fleet(instances)
        self.arrays = allocate_endpoints(endpoints, instances)
        self.models: dict[str, ModelSpec] = {}
        self.values = Values()
        self.tuned = self.values.of()
        self.latency_ms: Mapping[tuple[str, str], float] = {}
        self.zones: Mapping[str, str] = {}
        """As in `Inventory`."""
        self.swap_groups: tuple[SwapGroupSpec, ...] = ()
        self.adapters: dict[str, AdapterSpec] = {}
        self.targets: tuple[WeightedTargets, ...] = ()
        self.dark_rows: frozenset[str] = frozenset()
        """Regions that are dark by their rows."""
        self.shares: dict[str, float] = {}
        """By dark or returning region: share that its instances are given of what they run at once."""
        self.adapter_names: list[str] = []
        """By number; an adapter keeps its number."""
        self._adapter_numbers: dict[str, int] = {}
        self.endpoints: list[Endpoint] = []
        self.replicas: dict[int, Replica] = {}  # by instance id
        self.by_slot: dict[int, Replica] = {}
        self.by_prefix: frozenset[str] = frozenset()  # models with a router that considers the start of prompts
        self.changed = asyncio.Event()  # set on every change that may make room
        self.doubted = asyncio.Event()
        """Set together with `Replica.in_doubt` of any instance."""
        self.notices: deque[Notice] = deque(maxlen=MOST_NOTICES)
        """Events to be written."""
        self.on_growth: list[Callable[[], None]] = []
        """Called when there are more endpoints or slots: all that is sized by these grows there, and nowhere else."""
        self._active: set[tuple[str, str]] = set()
        self._endpoint_of: dict[tuple[str, str], Endpoint] = {}
        self._candidates: dict[tuple[str, str, bool, tuple[str, ...]], NDArray[np.int32]] = {}
        self._members: dict[int, list[Replica]] | None = None  # by index of the endpoint, made when it is asked for
        self._spot: dict[int, Endpoint] = {}  # by index of the endpoint that lends
        self._regions: dict[str, int] = {}
        self._models: dict[str, int] = {}

    def endpoint(self, model: str, region: str) -> Endpoint | None:
        return self._endpoint_of.get((model, region))

    def candidates(
        self, model: str, region: str, opportunistic: bool = False, within: tuple[str, ...] = ()
    ) -> NDArray[np.int32]:
        """Return the endpoints of *model* in the zone of *region*, in the order that a caller there prefers.

        They are *within* some regions, where these are given.

        For *opportunistic* requests the donated instances of each region come before all others.
        """
        indices = self._candidates.get((model, region, opportunistic, within))
        if indices is None:
            serving = (each for each in self.endpoints if each.model == model and self.serves(each))
            of_model = {each.region: each.index for each in serving if not within or each.region in within}
            of_model = {name: at for name, at in of_model.items() if self._zone_of(name) == self._zone_of(region)}
            nearest = by_preference(region, of_model, lambda to: latency_ms(self.latency_ms, region, to))
            nearest.sort(key=self.is_dark)  # a dark one comes last, also for the demand that counts there
            ordered = [of_model[to] for to in nearest]
            lent = [self._spot[at].index for at in ordered if at in self._spot] if opportunistic else []
            indices = np.array([*lent, *ordered], np.int32)
            if len(self._candidates) < 10_000:  # X-Region is the tenant's to choose: bound the cache
                self._candidates[model, region, opportunistic, within] = indices
        return indices

    def _zone_of(self, region: str) -> str:
        """Return the zone of *region*; of none (`NOWHERE`), one that no other has."""
        return self.zones.get(region, region) if self.zones else ""

    def within(self, asked: Asked) -> Asked:
        """Return *asked* with a region of its zone: the nearest one, where its caller is in another."""
        if not self.zones or self._zone_of(asked.region) == asked.zone:
            return asked
        regions = [region for region, zone in self.zones.items() if zone == asked.zone]
        nearest = by_preference(asked.region, regions, lambda to: latency_ms(self.latency_ms, asked.region, to))
        return struct_replace(asked, region=next(iter(nearest), NOWHERE))

    def serving(self, instance: str, url: str) -> Replica | None:
        """Return the instance of that name if it serves at *url* still, also where it drains meanwhile or is reclaimed."""
        of_name = (one for one in self.replicas.values() if one.name == instance)
        return next((one for one in of_name if one.spec.url == url and one.spec.state in SERVING), None)

    def spot(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint of the donated instances of *endpoint*: their own queue, which no other request enters."""
        spot = self._spot.get(endpoint.index)
        if spot is None:
            spot = self._append(Endpoint(len(self.endpoints), endpoint.spec, base=endpoint))
            self._spot[endpoint.index] = spot
            self._candidates.clear()
        spot.spec = replace(endpoint.spec, policy=spot_policy(endpoint.spec.policy))
        return spot

    def own_region(self, model: str, region: str) -> str:
        """Return the region of the endpoint that a caller in *region* prefers, where its demand counts; "" without any."""
        candidates = self.candidates(model, region)
        return self.endpoints[int(candidates[0])].region if candidates.size else ""

    def adapter_number(self, name: str) -> int:
        """Return the number of the adapter *name*, -1 for ""."""
        if not name:
            return -1
        if name not in self._adapter_numbers:
            self._adapter_numbers[name] = len(self.adapter_names)
            self.adapter_names.append(name)
        return self._adapter_numbers[name]

    def adapter_source(self, name: str) -> str:
        """Return the folder or repository of the adapter *name*, "" if it is unknown."""
        known = self.adapters.get(name)
        return known.source if known else ""

    def serves_adapters(self, endpoint: Endpoint) -> bool:
        """Whether *endpoint* can serve a request with an adapter, now or soon.

        Not while all of its instances that accept work were started without: the request would hold up others.
        """
        slots, accepting = self.fleet.adapter_slots, self.fleet.accepting
        taking = [one for one in self.members(endpoint) if accepting[one.slot]]
        return endpoint.spec.max_loras > 0 and (not taking or any(slots[one.slot, 0] > 0 for one in taking))

    def lent(self, model: str, region: str, within: tuple[str, ...] = ()) -> NDArray[np.int32]:
        """Return the endpoints of donated instances of *model*, as `candidates`."""
        candidates = self.candidates(model, region, True, within)
        return candidates[: candidates.size - self.candidates(model, region, within=within).size]

    @property
    def own_endpoints(self) -> list[Endpoint]:
        """All endpoints but those of donated instances."""
        return [endpoint for endpoint in self.endpoints if not endpoint.is_spot]

    def members(self, endpoint: Endpoint) -> Sequence[Replica]:
        if self._members is None:
            self._members = {}
            for replica in self.replicas.values():
                self._members.setdefault(replica.endpoint.index, []).append(replica)
        return self._members.get(endpoint.index, [])

    def present(self, endpoint: Endpoint) -> list[Replica]:
        """Return the replicas of *endpoint* that are not stopped, donated ones included."""
        lent = self._spot.get(endpoint.index)
        every = [*self.members(endpoint), *(self.members(lent) if lent else ())]
        return [one for one in every if one.spec.state != InstanceState.STOPPED]

    def coming(self, endpoint: Endpoint) -> bool:
        """Whether an instance of *endpoint* is present or starting, or a swap can bring one up; of no spot endpoint."""
        if endpoint.is_spot:
            return False
        return endpoint.spec.shares_gpus or any(one.spec.state in PRESENT for one in self.members(endpoint))

    def apply(self, inventory: Inventory) -> list[Replica]:
        """Update the live picture from *inventory*; return the instances whose requests are lost."""
        lost: list[Replica] = []
        self.models, self.latency_ms, self.zones = inventory.models, inventory.latency_ms, inventory.zones
        self.values, self.tuned = inventory.values, inventory.values.of()
        self.swap_groups = inventory.swap_groups
        self.adapters, self.targets = {one.name: one for one in inventory.adapters}, inventory.targets
        self.dark_rows = inventory.dark_regions
        active = {(spec.model, spec.region): spec for spec in inventory.endpoints}
        for key, endpoint_spec in active.items():
            known = self._endpoint_of.get(key)
            if known is None:
                self._add_endpoint(endpoint_spec)
            else:
                known.spec = endpoint_spec
        self._active = set(active)
        self.by_prefix = frozenset(
            spec.model for spec in active.values() if POLICY_CODES[spec.policy.routing] == LEAST_DELAY
        )
        self._candidates.clear()

        seen = set()
        for spec in inventory.instances:
            seen.add(spec.instance_id)
            self._take(spec, lost)
        for instance_id in list(self.replicas):
            if instance_id not in seen:
                replica = self.replicas[instance_id]
                self.fleet.accepting[replica.slot] = 0
                if not replica.requests:
                    self._forget(replica)
        index_members(self.fleet, self.arrays)
        self.changed.set()
        return lost

    def settle(self, replica: Replica) -> None:
        """Write into the arrays whether *replica* accepts work."""
        accepting = (
            replica.spec.state == (InstanceState.DONATED if replica.endpoint.is_spot else InstanceState.READY)
            and replica.reachable
            and not replica.lost
            and not self.is_dark(replica.spec.region)
            and self.serves(replica.endpoint.base or replica.endpoint)
            and self.fleet.kv_capacity_tokens[replica.slot] > 0
            and not (replica.metrics and replica.metrics.sleeping)  # a request would hang until it is woken
            and replica.health.takes(len(replica.requests))
            and not replica.health.slow
        )
        self.fleet.accepting[replica.slot] = accepting
        endpoint = replica.endpoint
        endpoint.largest_kv_tokens = max(endpoint.largest_kv_tokens, int(self.fleet.kv_capacity_tokens[replica.slot]))
        if accepting:
            self.changed.set()

    def is_dark(self, region: str) -> bool:
        """Whether *region* is left as a whole (`DarkRegions`)."""
        return self.shares.get(region) == 0.0

    def settle_regions(self, regions: Collection[str]) -> None:
        """Write into the arrays what the instances of *regions* accept, after a change of `shares`."""
        for replica in self.replicas.values():
            if replica.spec.region in regions:
                self._give_room(replica)
                self.settle(replica)
        self._candidates.clear()
        self.changed.set()

    def _give_room(self, replica: Replica) -> None:
        """Write how many requests *replica* is given at once: while its region returns, a share."""
        spec, share = replica.spec, self.shares.get(replica.spec.region) or 1.0
        self.fleet.max_num_seqs[replica.slot] = (
            max(1, int(share * spec.max_num_seqs)) if share < 1.0 else spec.max_num_seqs
        )
        set_front_end(self.fleet, replica.slot, spec.front_end, replica.endpoint.spec.policy.room_margin)

    def doubt(self, replica: Replica) -> None:
        """Have `Heartbeats` check immediately whether the server of *replica* is alive."""
        replica.in_doubt = True
        self.doubted.set()

    def alone(self, replica: Replica) -> bool:
        """Whether no other instance of its endpoint accepts work: then its breaker stays closed, whatever it does."""
        others = (one for one in self.members(replica.endpoint) if one is not replica)
        return not any(self.fleet.accepting[one.slot] for one in others)

    def request_failed(self, replica: Replica, why: str, now_s: float) -> None:
        """Record that *replica* failed a request. Its breaker opens after too many, while another serves."""
        if replica.health.failed(now_s) and not self.alone(replica):
            inputs = {"open_s": replica.health.open(why, now_s), "failure": why}
            self.notices.append(Notice("instance.circuit_open", replica.name, replica.health.reason, inputs=inputs))
        self.settle(replica)

    def request_succeeded(self, replica: Replica, now_s: float) -> None:
        """Record that *replica* answered a request completely."""
        replica.health.heard(now_s, served=True)
        replica.health.answered += 1
        if replica.health.succeeded(now_s):
            self._add_closed(replica, "the request that it was tried with was answered")
        if not self.fleet.accepting[replica.slot]:
            self.settle(replica)

    def pause(self, replica: Replica, why: str, now_s: float, wait_s: float) -> None:
        """Let *replica* pause for *wait_s*, as it asked, while another of its endpoint serves."""
        replica.health.heard(now_s)
        if not self.alone(replica):
            replica.health.pause(why, now_s, wait_s)
        self.settle(replica)

    def half_open_circuits(self, now_s: float) -> None:
        """Try instances whose breaker was open for long enough, and those without which none serves. Call once a second."""
        for replica in self.replicas.values():
            health = replica.health
            if health.breaker is not Breaker.CLOSED:
                alone = self.alone(replica)
                is_over = alone or (health.breaker is Breaker.OPEN and now_s >= health.until_s)
                if is_over and health.end_opening(alone=alone):
                    self._add_closed(replica, "no other instance of its endpoint serves")
                self.settle(replica)
            elif health.slow and self.alone(replica):
                health.slow = False
                self.settle(replica)

    def _add_closed(self, replica: Replica, why: str) -> None:
        self.notices.append(Notice("instance.serves_again", replica.name, why, Severity.INFO))

    @contextmanager
    def without(self, replicas: Iterable[Replica]) -> Iterator[None]:
        """Treat *replicas* as not accepting work."""
        slots = [replica.slot for replica in replicas if self.by_slot.get(replica.slot) is replica]
        before = self.fleet.accepting[slots]
        self.fleet.accepting[slots] = 0
        try:
            yield
        finally:
            self.fleet.accepting[slots] = before

    def observe(self, replica: Replica, metrics: VllmMetrics) -> None:
        """Take in the metrics of an instance."""
        replica.metrics = metrics
        self.fleet.observed_waiting[replica.slot] = metrics.waiting
        capacity = metrics.kv_cache_size_tokens or replica.spec.kv_capacity_tokens
        if not capacity:  # not reported: assume every sequence can fill the context
            capacity = replica.spec.max_num_seqs * self.models[replica.spec.model].context_tokens
        self.fleet.kv_capacity_tokens[replica.slot] = capacity
        self.settle(replica)

    def round_trip_ms(self, replica: Replica) -> float | None:
        """Return the measured dispatch round trip; None before the first."""
        return float(self.fleet.round_trips[replica.slot, ROUND_TRIP_S]) * 1000 or None

    def outcomes(self) -> dict[str, tuple[int, int]]:
        """Return (answered, failed) requests by instance since its server became ready."""
        return {one.name: (one.health.answered, one.health.failures) for one in self.replicas.values()}

    def at_once(self, replica: Replica) -> int:
        """Return the most requests that *replica* is given at once."""
        return uncompiled(at_once)(self.fleet, replica.slot)

    def requests_ahead(self, replica: Replica) -> int:
        """Return the number of requests given to *replica* beyond its room."""
        return int(requests_ahead(self.fleet, replica.slot))

    def running(self, replica: Replica) -> int:
        """Return the number of requests given to *replica* that it has room for."""
        return int(self.fleet.running[replica.slot]) - self.requests_ahead(replica)

    def serves(self, endpoint: Endpoint) -> bool:
        """Whether its deployment is active, so that it gets requests; of no spot endpoint."""
        return not endpoint.is_spot and (endpoint.model, endpoint.region) in self._active

    def _add_endpoint(self, spec: EndpointSpec) -> Endpoint:
        endpoint = self._append(Endpoint(index=len(self.endpoints), spec=spec))
        self._endpoint_of[spec.model, spec.region] = endpoint
        return endpoint

    def _append(self, endpoint: Endpoint) -> Endpoint:
        if endpoint.index >= self.arrays.cursor.size:
            self.arrays = grow_endpoints(self.fleet, self.arrays, 2 * self.arrays.cursor.size)
            self._grown()
        self.endpoints.append(endpoint)
        return endpoint

    def _grown(self) -> None:
        for grow in self.on_growth:
            grow()

    def _take(self, spec: InstanceSpec, lost: list[Replica]) -> None:
        endpoint = self._endpoint_of.get((spec.model, spec.region))
        if endpoint is None:  # its deployment is not active; running requests may finish
            endpoint = self._add_endpoint(EndpointSpec(spec.model, spec.region, _GONE))
        replica = self.replicas.get(spec.instance_id)
        drains = spec.state == InstanceState.DRAINING and replica is not None and replica.endpoint.is_spot
        if drains or spec.state in (InstanceState.DONATED, InstanceState.RECLAIMING):
            endpoint = self.spot(endpoint)
        if replica is not None and replica.spec.url != spec.url:  # nothing known of it holds
            if replica.requests:  # they run, or hang, at the old address
                lost.append(replica)
                self.fleet.accepting[replica.slot] = 0
                return
            self._forget(replica)
            replica = None
        if replica is None:
            replica = self._add_replica(spec, endpoint)
        elif replica.endpoint is not endpoint and not replica.requests:
            if replica.spec.model == spec.model:  # it is donated, or reclaimed
                replica.endpoint, self._members = endpoint, None
                self.fleet.endpoint[replica.slot] = endpoint.index
            else:
                self._forget(replica)
                replica = self._add_replica(spec, endpoint)
        if spec.state == InstanceState.SLEEPING and replica.requests:
            lost.append(replica)  # they came too late, and would hang there until it wakes
        if replica.spec.state != spec.state and spec.state == InstanceState.READY:
            replica.reachable, replica.silent_count = True, 0
            was_wedged = bool(replica.wedged)
            replica.lost, replica.wedged, replica.health = "", "", Health()
            if was_wedged:
                replica.health.half_open("after it was wedged")
            forget(self.fleet, replica.slot)  # restarted, or was asleep: nothing is cached there
            forget_adapters(self.fleet, replica.slot)
        replica.spec = spec
        self.fleet.adapter_slots[replica.slot] = spec.adapter_slots
        self.fleet.adapter_load_s[replica.slot] = FROM_STORAGE_S, FROM_MEMORY_S
        self.time_restores(replica)
        policy = replica.endpoint.spec.policy
        self.fleet.ahead_limit[replica.slot] = array_value(policy, "requests_ahead_limit")
        self.fleet.profile[replica.slot] = astuple(spec.profile) if spec.profile else 0.0
        self._give_room(replica)
        self.fleet.look_ahead[replica.slot] = struct_astuple(policy.look_ahead)
        if not self.fleet.kv_capacity_tokens[replica.slot]:
            self.fleet.kv_capacity_tokens[replica.slot] = spec.kv_capacity_tokens
        self.settle(replica)

    def time_restores(self, replica: Replica) -> None:
        """Write what *replica* holds in CPU memory, and how long a restore takes: as it has measured, else as is usual."""
        offload, metrics = self.fleet.offload[replica.slot], replica.metrics
        offload[:] = replica.spec.offload
        if metrics is not None and metrics.restored_tokens_total >= MEASURED_TOKENS and offload[OFFLOADED]:
            offload[RESTORE_S_PER_TOKEN] = metrics.restore_s_total / metrics.restored_tokens_total

    def _add_replica(self, spec: InstanceSpec, endpoint: Endpoint) -> Replica:
        free = np.flatnonzero(self.fleet.endpoint == EMPTY)
        if not free.size:
            self.fleet = grow_fleet(self.fleet, 2 * self.fleet.endpoint.size)
            self.arrays = grow_endpoints(self.fleet, self.arrays, self.arrays.cursor.size)
            self._grown()
            free = np.flatnonzero(self.fleet.endpoint == EMPTY)
        slot = int(free[0])
        placed_tokens = int(self.fleet.placed_tokens[slot])
        for array in self.fleet:
            array[slot] = 0
        self.fleet.placed_tokens[slot] = placed_tokens
        forget(self.fleet, slot)
        self.fleet.endpoint[slot] = endpoint.index
        self.fleet.model[slot] = self._models.setdefault(spec.model, len(self._models))
        self.fleet.region[slot] = self._regions.setdefault(spec.region, len(self._regions))
        replica = Replica(slot, endpoint, spec)
        self.replicas[spec.instance_id] = self.by_slot[slot] = replica
        self._members = None
        return replica

    def _forget(self, replica: Replica) -> None:
        self.fleet.accepting[replica.slot] = 0
        self.fleet.endpoint[replica.slot] = EMPTY
        del self.replicas[replica.spec.instance_id], self.by_slot[replica.slot]
        self._members = None
