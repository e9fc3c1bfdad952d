"""Build the arrays of the compiled loop from a cluster and its requests."""

from dataclasses import asdict, astuple
from typing import Any

import numpy as np
from msgspec.structs import astuple as struct_astuple
from numpy.typing import NDArray

from scheduling.fleet.arrays import FleetArrays, allocate_endpoints, allocate_fleet, index_members
from scheduling.fleet.carried import set_front_end
from scheduling.fleet.front_end import NO_LIMIT
from scheduling.fleet.sleep_level import IN_MEMORY, sleep_level
from scheduling.policy import write_record
from scheduling.queueing.fair_shares import NO_SHARES
from scheduling.queueing.held import OPPORTUNISTIC
from scheduling.queueing.ordering import FAIR, QLM
from scheduling.queueing.virtual_queues import fit_groups
from scheduling.queueing.waiting_set import allocate_waiting, grow_waiting
from scheduling.routing.cached_blocks import LEAST_PLACES
from scheduling.routing.candidates import NO_ROWS
from scheduling.routing.models import RULES, ModelRule
from scheduling.routing.prefix_affinity import BLOCK_TOKENS, Affinity, allocate_affinity
from scheduling.routing.requests_ahead import ROUND_TRIP_S
from scheduling.routing.routers import LEAST_DELAY, LOOK_AHEAD
from scheduling.scaling.spot import redeploy_s, spot_policy
from scheduling.simulation.cluster.description import Cluster, EndpointKey
from scheduling.simulation.cluster.event_queue import allocate_events
from scheduling.simulation.cluster.world import (
    CHANGE,
    DECISION,
    ENDPOINT,
    LIFE,
    OUTCOME,
    RUN_STATE,
    SWAP_GROUP,
    Arrivals,
    LifeArrays,
    Outcome,
    State,
    World,
)
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.engine.state import allocate_engines
from scheduling.simulation.workload.requests import Requests, check_prefixes, check_requests

FIRST_WAITING = 4096
FIRST_CHANGES = 1024


def build_world(cluster: Cluster, requests: Requests, *, decisions: bool, held: int = 0) -> World:
    """Return the world at time 0. Raise ValueError for requests invalid on *cluster*; the first *held* arrived earlier."""
    came_s = requests.arrival_s if not held else np.maximum(requests.arrival_s, 0.0)
    check_requests(requests._replace(arrival_s=came_s), cluster.models, cluster.origins, cluster.longest_tokens())
    check_prefixes(requests, cluster.cached_block_sizes())
    specs, keys = cluster.instances, cluster.endpoints
    instances, own, origins = len(specs), len(keys), len(cluster.origins)
    count = int(requests.arrival_s.size)
    judges = bool(requests.judged.any())  # a request may be degraded to any class
    lends = bool((requests.held & OPPORTUNISTIC).any()) or (
        judges and any(one.opportunistic for one in cluster.classes)
    )
    endpoints = 2 * own if lends else own  # the second ones are those of donated instances

    fleet, members = allocate_fleet(instances), allocate_endpoints(endpoints, instances)
    for at, spec in enumerate(specs):
        key = spec.model, spec.region
        policy = cluster.policy(key)
        lent = lends and spec.state == State.SPOT and spec.sharing is None
        fleet.endpoint[at] = keys.index(key) + (own if lent else 0)
        fleet.model[at], fleet.region[at] = cluster.models.index(spec.model), cluster.regions.index(spec.region)
        fleet.accepting[at] = spec.state == State.READY or lent
        fleet.max_num_seqs[at] = spec.dispatch_max_num_seqs or spec.engine.max_num_seqs
        if policy.batching.mode == "none":
            fleet.max_num_seqs[at] = 1
        fleet.kv_capacity_tokens[at] = spec.dispatch_kv_tokens or spec.engine.kv_capacity_tokens
        fleet.memory_tokens[at] = spec.engine.kv_capacity_tokens
        fleet.profile[at] = astuple(spec.engine.profile)
        give_memory(fleet, at, spec.engine)
        front_end = NO_LIMIT if spec.dispatch_max_num_seqs else spec.engine.front_end
        set_front_end(fleet, at, front_end, policy.room_margin)
        fleet.look_ahead[at], fleet.round_trips[at, ROUND_TRIP_S] = (
            struct_astuple(policy.look_ahead),
            policy.round_trip_s,
        )
    index_members(fleet, members)
    policies = _policies(cluster, lends)
    fleet.ahead_limit[:] = policies["requests_ahead_limit"][fleet.endpoint]

    catalog = list(cluster.engines().values())
    most_seqs = max(engine.max_num_seqs for engine in catalog)
    held_at_once = int(np.maximum(fleet.max_num_seqs.astype(np.int64), most_seqs).sum())
    first, candidates = [0], list[int]()
    for opportunistic in range(1 + lends):
        for model in cluster.models:
            for origin in cluster.origins:
                nearest = cluster.candidates(model, *origin)
                candidates += [own + at for at in nearest] * opportunistic + nearest
                first.append(len(candidates))
    slots = max(1, min(count, FIRST_WAITING))
    takes_time = any(cluster.policy(key).round_trip_s for key in keys)
    nodes = 2 * instances + origins * origins + endpoints * (1 + takes_time)
    sweeps = cluster.sweeps or lends  # what waits for donated instances when these are reclaimed has to move
    if takes_time:
        held_at_once *= 2  # an allowance never exceeds what runs at once
    serves = [spec.state == State.READY or (spec.sharing is not None and spec.state != State.SPOT) for spec in specs]
    np.add.at(policies["serving"], fleet.endpoint, serves)
    np.maximum.at(policies["largest_kv_tokens"], fleet.endpoint % own, fleet.kv_capacity_tokens)
    policies["largest_kv_tokens"][own:] = policies["largest_kv_tokens"][: endpoints - own]
    waiting = allocate_waiting(endpoints, slots, instances)
    if (fair := np.isin(policies["ordering"], FAIR)).any():
        tenants = int(requests.tenant.max(initial=0)) + 1
        waiting = grow_waiting(waiting, slots, tenants=tenants)
        waiting.shares.ordering[:] = np.where(fair, policies["ordering"], NO_SHARES)
        known = list(cluster.tenant_weights)[:tenants]
        waiting.shares.weight[: len(known)] = known
    in_runs = int(np.count_nonzero(requests.run >= 0))
    for endpoint in np.flatnonzero(policies["ordering"] == QLM).tolist():
        batches = float(policies["group_batches"][endpoint])
        waiting.groups.limit[endpoint] = fit_groups(fleet, members, waiting.groups, endpoint, batches)
        waiting.groups.within[endpoint] = policies["group_order"][endpoint]
    return World(
        fleet=fleet,
        endpoints=members,
        waiting=waiting,
        engines=allocate_engines(
            [spec.engine for spec in specs],
            catalog,
            endpoints,
            max(1, min(count, held_at_once)),
            requests,
            anticipate=bool(np.isin(policies["routing"], LOOK_AHEAD).any()),
        ),
        events=allocate_events(nodes + sweeps),
        arrivals=_arrivals(requests),
        outcomes=_outcomes(requests),
        policies=policies,
        candidate_first=np.array(first, np.int64),
        candidates=np.array(candidates, np.int32),
        latency_s=np.tile(cluster.latency_s, (1 + len(cluster.residency),) * 2),
        held=np.zeros(slots, np.int64),
        kept_tokens=np.zeros(count if lends else 1, np.int32),
        **_fallbacks(cluster),
        may_fall_back=(requests.adapter < 0).astype(np.uint8) if cluster.fallbacks else np.zeros(1, np.uint8),
        standings=np.zeros((count if in_runs else 1, 5)),
        ended_in_runs=np.zeros(max(1, in_runs), np.int64),
        lives=_lives(cluster),
        no_rows=NO_ROWS,
        travelling=np.zeros(count if cluster.latency_s.any() else 1, np.int64),
        link=np.full((2, origins * origins), -1, np.int64),
        sent=np.full((2, endpoints), -1, np.int32),
        decisions=np.zeros(count + 2 * slots if decisions else 0, DECISION),
        busy=np.zeros(instances, np.uint8),
        least_tokens=np.zeros(instances),
        kept_kinds=np.zeros(2 + 2 * len(cluster.residency), np.uint8),
        affinity=_affinity(cluster, policies, slots),
        run_state=_run_state(cluster, nodes if sweeps else -1),
    )


def _fallbacks(cluster: Cluster) -> dict[str, NDArray[Any]]:
    """Return `World.fallback` and `World.fallback_wait_s`."""
    given = [cluster.fallbacks.get(name) for name in cluster.models] if cluster.fallbacks else []
    return {
        "fallback": np.array([-1 if one is None else cluster.models.index(one.model) for one in given], np.int16),
        "fallback_wait_s": np.array([np.inf if one is None or one.wait_s is None else one.wait_s for one in given]),
    }


def give_memory(fleet: FleetArrays, instance: int, engine: EngineConfig) -> None:
    """Give *instance* what *engine* has in CPU memory: adapters and KV, with their load times."""
    fleet.adapter_slots[instance] = engine.max_loras, max(engine.max_loras, engine.max_cpu_loras)
    fleet.adapter_load_s[instance] = engine.adapter_storage_s, engine.adapter_memory_s
    tokens = engine.offload_blocks * engine.block_size_tokens
    fleet.offload[instance] = (tokens, engine.restore_s, engine.restore_s_per_token) if tokens else 0.0


MOST_PLACES = 1 << 22
"""Of the blocks of running requests; beyond them a block is not counted before it is cached."""


def _affinity(cluster: Cluster, policies: NDArray[np.void], slots: int) -> Affinity:
    if not (policies["routing"] == LEAST_DELAY).any():
        return allocate_affinity(len(cluster.instances), 1, 8)
    cached_places = LEAST_PLACES
    if policies["follow_kv_events"].any():
        blocks = sum(spec.engine.kv_blocks for spec in cluster.instances)
        cached_places = 1 << min(max(4 * blocks, LEAST_PLACES), MOST_PLACES).bit_length()
    spare = 1  # for a prompt that no request has (`system_prompts`)
    affinity = allocate_affinity(len(cluster.instances), slots + spare, cached_places=cached_places)
    affinity.counters[BLOCK_TOKENS] = min(cluster.cached_block_sizes(), default=0)
    return affinity


def _lives(cluster: Cluster) -> LifeArrays:
    count = len(cluster.instances)
    instances = np.zeros(count, LIFE)
    instances["state"] = [spec.state for spec in cluster.instances]
    instances["goal_endpoint"] = -1
    delays = cluster.delays
    for name in ("start_s", "local_weights_s", "remote_weights_s"):
        instances[name] = getattr(delays, name)
    instances["reclaim_times"] = 1.0
    life: Any
    for life, spec in zip(instances, cluster.instances, strict=True):
        if spec.start_s is not None:
            life.start_s, life.local_weights_s, life.remote_weights_s = 0.0, spec.start_s, spec.start_s
            life.reclaim_times = spec.start_s / delays.spot_median_s if delays.spot_median_s else 1.0
        if spec.reclaim_s is not None:
            life.reclaim_times = spec.reclaim_s / delays.spot_median_s if delays.spot_median_s else 1.0
        if spec.pull_s is not None:
            life.remote_weights_s = life.local_weights_s + spec.pull_s
    instances["loading_s"] = instances["local_weights_s"]
    instances["usd_per_hour"] = [spec.usd_per_hour for spec in cluster.instances]
    known = cluster.engines()
    fits = [
        [spec.region == region and (model, spec.gpu_type) in known for spec in cluster.instances]
        for model, region in cluster.endpoints
    ]
    return LifeArrays(
        instances=instances,
        spent_s=np.zeros((count, len(State))),
        changes=np.zeros(FIRST_CHANGES, CHANGE),
        reclaims_s=np.zeros(0),
        fits=np.array(fits, np.uint8),
        redeploy_s=np.array([_redeploy_s(cluster, key) for key in cluster.endpoints]),
        groups=_swap_groups(cluster, instances),
    )


def _redeploy_s(cluster: Cluster, key: EndpointKey) -> float:
    """Return the seconds to bring up the model of the endpoint *key* on a spot instance of another, measured or usual."""
    own = [spec for spec in cluster.instances if (spec.model, spec.region) == key]
    local_s = next((spec.redeploy_s for spec in own if spec.redeploy_s is not None), cluster.delays.local_weights_s)
    return redeploy_s(local_s, pull_s=max(spec.pull_s or 0.0 for spec in own))


def _swap_groups(cluster: Cluster, instances: NDArray[np.void]) -> NDArray[np.void]:
    """Return the SWAP_GROUP records, and write the memberships into *instances* (LIFE records)."""
    names = cluster.swap_groups()
    groups = np.zeros(max(len(names), 1), SWAP_GROUP)
    groups["target"] = -1
    instances["swap_group"] = -1
    life: Any
    for at, (life, spec) in enumerate(zip(instances, cluster.instances, strict=True)):
        if (sharing := spec.sharing) is None:
            continue
        life.swap_group = names.index(sharing.group)
        for name in ("sleep_s", "wake_s", "reload_s", "weights_bytes"):
            life[name] = getattr(sharing, name)
        group: Any = groups[life.swap_group]
        group.memory_bytes = sharing.memory_bytes
        if spec.state == State.ASLEEP:
            life.in_memory = sleep_level(instances, at, float(group.memory_bytes)) == IN_MEMORY
    return groups


def _outcomes(requests: Requests) -> NDArray[np.void]:
    count = requests.count
    first: Any = np.zeros(1, OUTCOME)
    for name in ("ttft_s", "e2e_s", "queue_s"):
        first[name] = np.nan
    first["instance"] = first["endpoint"] = -1
    first["state"] = Outcome.WAITING
    # Written as plain words, in one pass over the memory: ten million records are 400 MB.
    outcomes = np.empty(count, OUTCOME)
    outcomes.view(np.uint64).reshape(count, OUTCOME.itemsize // 8)[:] = first.view(np.uint64)
    if requests.asked.strides != (0,):
        outcomes["model_rule"][requests.asked >= 0] = RULES.index(ModelRule.WEIGHTS)
    return outcomes


def _arrivals(requests: Requests) -> Arrivals:
    def column(values: NDArray[np.generic]) -> NDArray[np.generic]:
        # Always writable and contiguous: any other kind of array would compile the loop once more.
        return np.require(values[:1].copy() if values.strides == (0,) else values, requirements=["C", "W"])

    columns = {name: column(getattr(requests, name)) for name in Arrivals._fields}
    if requests.held.any() or requests.judged.any():  # the queue manager sets the priority of each that it releases
        columns["priority"] = np.array(requests.priority)
    return Arrivals(**columns)  # type: ignore[arg-type]


def _policies(cluster: Cluster, lends: bool) -> NDArray[np.void]:
    given = [(key, cluster.policy(key)) for key in cluster.endpoints]
    given += [(key, spot_policy(policy)) for key, policy in given] if lends else []
    policies = np.zeros(len(given), ENDPOINT)
    record: Any
    for record, (key, policy) in zip(policies, given, strict=True):
        record.model, record.region = cluster.models.index(key[0]), cluster.regions.index(key[1])
        write_record(record, policy)
        for name, value in asdict(cluster.reference_profile(key)).items():
            record[name] = value
        record.batch_size = policy.batching.max_batch_size if policy.batching.mode == "dynamic" else 0
        record.batch_wait_s = policy.batching.wait_timeout_s
        record.batch_opened_s = np.inf
        record.scaled_s = -np.inf
        record.expires_s = np.inf
    return policies


def _run_state(cluster: Cluster, sweep_node: int) -> NDArray[np.void]:
    run_state = np.zeros(1, RUN_STATE)
    record = run_state[0]
    record.sweep_node, record.sweep_s = sweep_node, np.inf
    record.at_door = record.may_fall_back = record.asked_fallback = -1
    record.caches, record.share_spot = bool(cluster.cached_block_sizes()), cluster.share_spot
    record.wake_s, record.spot_median_s = cluster.delays.wake_s, cluster.delays.spot_median_s
    record.regions = len(cluster.regions)
    if cluster.reactive is not None:
        record.reactive = 1
        for name in ("out_above", "in_below", "cooldown_s", "min_instances", "max_instances"):
            record[name] = getattr(cluster.reactive, name)
    return run_state
