"""The dispatcher, as in the gateway: requests queue at an endpoint and are dispatched to instances with room.

A request waits at the endpoint chosen by the global router, and the head of the queue is dispatched while an instance has
room. When a request ends, its room is released and the head of the queue is tried again.
"""

from typing import Any, Final

import numpy as np

from scheduling.compiled import compiled, compiled_inline, compiled_internal, index
from scheduling.dispatch import dispatch, send
from scheduling.fleet.profile import decode_time_s, service_time_s
from scheduling.lookahead.maps import leave
from scheduling.queueing.fair_shares import OUTPUT_WEIGHT
from scheduling.queueing.groups import BY_RANK
from scheduling.queueing.held import ENDS_ON_RECLAIM
from scheduling.queueing.ordering import (
    BY_RUN,
    FAIR,
    FCFS,
    HERMES,
    PRIORITY,
    QLM,
    SJF,
    SLACK,
    VTC,
    due_in_run,
    engine_priority,
    first_due_s,
    queue_key,
    run_due_s,
    run_key,
)
from scheduling.queueing.virtual_queues import insert_loose, may_balance, pull
from scheduling.queueing.waiting_set import charge, claim, enqueue, free_slot, peek, rerank, settle
from scheduling.routing.adapters import end_use, load_s, tier_of, use_adapter
from scheduling.routing.cached_blocks import drop, hold, holds
from scheduling.routing.filters import allow_all, exclude
from scheduling.routing.models import RULES, ModelRule
from scheduling.routing.predictive import dispatch_ahead
from scheduling.routing.prefix_affinity import BLOCK_TOKENS, forget_known, learn, note
from scheduling.routing.regions import add_prefill, note_cached
from scheduling.routing.requests_ahead import close_ahead, note_end, open_ahead
from scheduling.routing.routers import JOIN_SHORTEST_QUEUE, LEAST_DELAY, LOOK_AHEAD, has_room, prefilled, release
from scheduling.simulation.cluster.choices import choose_endpoint, column, is_full, shortest
from scheduling.simulation.cluster.event_queue import set_time
from scheduling.simulation.cluster.totals import observe_endpoint, observe_memory, update_totals
from scheduling.simulation.cluster.world import (
    BEGAN,
    DONE,
    DUE,
    FAILED,
    MEAN,
    RANK,
    REFUSED,
    RUNNING,
    WORST,
    World,
    base_of,
)
from scheduling.simulation.engine.batch import give
from scheduling.simulation.engine.prefix_cache import cached_blocks, settle_iteration
from scheduling.simulation.engine.sequences import free_sequence, take_sequence
from scheduling.simulation.engine.state import ADAPTERS, GIVEN, NONE

WEIGHTS: Final = RULES.index(ModelRule.WEIGHTS)


@compiled_internal
def _assign(world: World, slot: int, instance: int, now_s: float, source: int) -> None:
    """Hand the just dispatched request in *slot* to *instance*."""
    waiting, engines, arrivals = world.waiting, world.engines, world.arrivals
    endpoint, request = index(waiting.endpoint[slot]), index(world.held[slot])
    outcome = world.outcomes[request]
    sequence = take_sequence(engines)
    this = engines.sequences[sequence]
    back_s = world.latency_s[index(world.policies[endpoint].region), index(column(arrivals.region, request))]
    this.request = request
    this.instance = instance
    kept_tokens = column(world.kept_tokens, request)
    this.prompt_tokens = column(arrivals.prompt_tokens, request) + kept_tokens
    this.output_tokens = column(arrivals.output_tokens, request) - kept_tokens
    this.expected_tokens = waiting.prompt_tokens[slot] + waiting.output_tokens[slot]
    this.expected_prompt = waiting.prompt_tokens[slot]
    expected_output = int(waiting.output_tokens[slot])
    add_prefill(world.fleet, world.endpoints, instance, int(this.expected_prompt), expected_output, now_s)
    this.counted_blocks = 0
    if world.policies[endpoint].routing == LEAST_DELAY:
        learn(world.fleet, world.affinity, endpoint, slot, instance)
        count_blocks(world, endpoint, sequence)
    priority, key = column(arrivals.priority, request), float(waiting.key[slot])
    this.priority = engine_priority(int(world.policies[endpoint].ordering), priority, key)
    this.produced_tokens = this.computed_tokens = 0
    this.decoding = this.streaming = this.evicted = 0
    this.again = 2 if outcome.attempts > 0 and engines.instances[instance].offload_blocks > 0 else 0
    this.published = 0
    this.load_s = _load_adapter(world, instance, column(arrivals.adapter, request))
    this.origin_s = arrivals.arrival_s[request] - back_s
    this.number = engines.counters[GIVEN]
    engines.counters[GIVEN] += 1
    outcome.state = RUNNING
    outcome.instance = instance
    if outcome.attempts == 0:
        outcome.queue_s = now_s - arrivals.arrival_s[request]
    outcome.attempts += 1
    outcome.cached_tokens = 0
    run_state = world.run_state[0]
    if run_state.decisions < world.decisions.size:
        decision = world.decisions[run_state.decisions]
        decision.time_s, decision.request, decision.endpoint = now_s, request, endpoint
        decision.instance, decision.waiting = instance, waiting.size[endpoint]
        run_state.decisions += 1
    free_slot(waiting, slot)
    if world.policies[endpoint].dispatch_round_trip_ms > 0.0:
        _send_off(world, endpoint, sequence, now_s)
        return
    event_s = give(world.fleet, engines, instance, sequence, now_s, instance < source)
    update_totals(world.fleet, engines, instance)
    if event_s >= 0.0:
        set_time(world.events, instance, event_s)


@compiled_inline
def _load_adapter(world: World, instance: int, adapter: int) -> float:
    """Let a request use *adapter* at *instance*; return the seconds until it is on the GPU."""
    if adapter < 0:
        return 0.0
    tier = tier_of(world.fleet, instance, adapter)
    world.engines.counters[ADAPTERS + tier] += 1
    use_adapter(world.fleet, instance, adapter, 1)
    return load_s(world.fleet, instance, tier)


@compiled_inline
def _sent_node(world: World, endpoint: int) -> int:
    return int(2 * world.fleet.endpoint.size + world.link.shape[1] + world.sent.shape[1] + endpoint)


@compiled_internal
def _send_off(world: World, endpoint: int, sequence: int, now_s: float) -> None:
    """Send *sequence*, just dispatched from *endpoint*, to its instance."""
    this = world.engines.sequences[sequence]
    this.reaches_s = now_s + world.policies[endpoint].dispatch_round_trip_ms / 1000.0
    this.next = NONE
    if world.sent[0, endpoint] == NONE:
        world.sent[0, endpoint] = sequence
        set_time(world.events, _sent_node(world, endpoint), this.reaches_s)
    else:
        world.engines.sequences[world.sent[1, endpoint]].next = sequence
    world.sent[1, endpoint] = sequence
    update_totals(world.fleet, world.engines, int(this.instance))


@compiled_internal
def deliver(world: World, endpoint: int, now_s: float) -> None:
    """Deliver the first sequence that *endpoint* sent to its instance."""
    engines = world.engines
    sequence = int(world.sent[0, endpoint])
    this = engines.sequences[sequence]
    following, instance = int(this.next), int(this.instance)
    world.sent[0, endpoint] = following
    event_s = np.inf if following == NONE else engines.sequences[following].reaches_s
    set_time(world.events, _sent_node(world, endpoint), event_s)
    event_s = give(world.fleet, engines, instance, sequence, now_s, True)
    update_totals(world.fleet, engines, instance)
    if event_s >= 0.0:
        set_time(world.events, instance, event_s)


@compiled_inline
def _shortest(world: World, endpoint: int, slot: int, now_s: float, source: int) -> int:
    """Return `choices.shortest` when no instance that may hold requests ahead has room."""
    opened = False
    if world.waiting.adapter[slot] >= 0:
        observe_memory(world.fleet, world.endpoints, world.engines, endpoint, now_s, source)
    while True:
        filtered = exclude(world.fleet, world.endpoints, world.waiting, endpoint, slot)
        instance = shortest(world, endpoint, slot, now_s, source)
        if instance >= 0 or opened or world.policies[endpoint].dispatch_round_trip_ms == 0.0:
            break
        opened = open_ahead(world.fleet, world.endpoints, endpoint)
        if not opened:
            break
    if opened:
        close_ahead(world.fleet, world.endpoints, endpoint)
    if filtered:
        allow_all(world.fleet, world.endpoints, endpoint)
    return instance


@compiled_internal
def _dispatch_ahead(world: World, endpoint: int, now_s: float, source: int) -> tuple[int, int]:
    """Call `dispatch` for a router that looks ahead, with all tokens counted and the maps moved by them."""
    observe_endpoint(world.fleet, world.endpoints, world.engines, endpoint, now_s, source)
    slot, known = peek(world.waiting, endpoint), False
    if slot >= 0 and world.policies[endpoint].routing == LEAST_DELAY and _reads_caches(world, endpoint):
        known = True
        _know(world, endpoint, index(world.held[slot]))
    slot, instance = dispatch_ahead(
        world.fleet,
        world.endpoints,
        world.waiting,
        world.engines.ahead,
        world.affinity,
        endpoint,
        int(world.policies[endpoint].routing),
        world.no_rows,
    )
    if known:
        forget_known(world.endpoints, world.affinity, endpoint)
    return slot, instance


@compiled
def count_blocks(world: World, endpoint: int, sequence: int) -> None:
    """Count the blocks of the prompt of *sequence* at its instance, if the router of *endpoint* knows what that has."""
    if not _reads_caches(world, endpoint):
        return
    this, cache = world.engines.sequences[sequence], world.engines.cache
    first, last = cache.first[this.request], cache.first[this.request + 1]
    hold(world.affinity.blocks, int(this.instance), cache.hashes, first, last)
    this.counted_blocks = last - first


@compiled_inline
def _reads_caches(world: World, endpoint: int) -> bool:
    """Whether the router of *endpoint* knows what the instances have cached, and prompts have blocks."""
    return bool(world.policies[endpoint].follow_kv_events != 0 and world.engines.cache.first.size > 1)


@compiled_internal
def _know(world: World, endpoint: int, request: int) -> None:
    """Write how much of the prompt of *request* the instances of *endpoint* have: what is cached there, and what runs there.

    Live, KV events say the former.
    """
    engines, blocks = world.engines, world.affinity.blocks
    first, last = engines.cache.first[request], engines.cache.first[request + 1]
    for at in range(world.endpoints.first[endpoint], world.endpoints.first[endpoint + 1]):
        instance = index(world.endpoints.members[at])
        if engines.instances[instance].prefix_caching == 0:
            continue
        settle_iteration(engines, instance)
        have = first
        while True:
            have += cached_blocks(engines, instance, have, last - have)
            if have == last or not holds(blocks, instance, engines.cache.hashes[have]):
                break
            have += 1
        world.affinity.known[instance] = (have - first) * engines.instances[instance].block_size_tokens


@compiled_internal
def note_prefix(world: World, slot: int, request: int) -> None:
    """Note the prefix of *request*, which waits in *slot*, for the prefix-aware router; that of a fallback's is unknown."""
    cache, first, last = world.engines.cache, 0, 0
    if cache.first.size > 1 and world.outcomes[request].model_rule <= WEIGHTS:
        first, last = cache.first[request], cache.first[request + 1]
    note(world.affinity, slot, cache.hashes, first, last, world.affinity.counters[BLOCK_TOKENS])


@compiled_internal
def _batch_pump(world: World, endpoint: int, now_s: float, source: int) -> None:
    """Dynamic batching: give an idle instance `batch_size` requests at once, or fewer after `batch_wait_s`."""
    fleet, policy, waiting = world.fleet, world.policies[endpoint], world.waiting
    node = 2 * fleet.endpoint.size + world.link.shape[1] + endpoint
    first, last = index(world.endpoints.first[endpoint]), index(world.endpoints.first[endpoint + 1])
    busy = world.busy
    while True:
        idle = False
        for at in range(first, last):
            instance = index(world.endpoints.members[at])
            busy[instance] = fleet.accepting[instance] != 0 and fleet.running[instance] > 0
            idle = idle or (fleet.accepting[instance] != 0 and fleet.running[instance] == 0)
        if not idle or waiting.size[endpoint] == 0:
            policy.batch_opened_s = np.inf
            set_time(world.events, node, np.inf)
            return
        if policy.batch_opened_s == np.inf:
            policy.batch_opened_s = now_s
        due_s = policy.batch_opened_s + policy.batch_wait_s
        if waiting.size[endpoint] < policy.batch_size and now_s < due_s:
            set_time(world.events, node, due_s)
            return
        policy.batch_opened_s = np.inf
        set_time(world.events, node, np.inf)
        # While a batch runs, its instance accepts nothing.
        for at in range(first, last):
            instance = index(world.endpoints.members[at])
            if busy[instance] != 0:
                fleet.accepting[instance] = 0
        if policy.routing in LOOK_AHEAD:
            slot, instance = _dispatch_ahead(world, endpoint, now_s, source)
        else:
            slot, instance = dispatch(fleet, world.endpoints, waiting, endpoint, int(policy.routing), world.no_rows)
        for at in range(first, last):
            other = index(world.endpoints.members[at])
            if busy[other] != 0:
                fleet.accepting[other] = 1
        if slot < 0:
            return
        given = 1
        while True:
            _assign(world, slot, instance, now_s, source)
            slot = peek(waiting, endpoint)
            if slot < 0 or given == policy.batch_size:
                break
            prompt, output = waiting.prompt_tokens[slot], waiting.output_tokens[slot]
            if not has_room(fleet, instance, prompt, output):
                break
            send(fleet, world.endpoints, waiting, slot, instance)
            given += 1


@compiled_internal
def pump(world: World, endpoint: int, now_s: float, source: int) -> None:
    """Dispatch requests of *endpoint*, in order, while an instance has room or may hold one more ahead."""
    if world.policies[endpoint].batch_size > 0:
        _batch_pump(world, endpoint, now_s, source)
        return
    fleet, waiting, routing = world.fleet, world.waiting, int(world.policies[endpoint].routing)
    slot = peek(waiting, endpoint)
    if slot >= 0 and routing != JOIN_SHORTEST_QUEUE:
        observe_memory(fleet, world.endpoints, world.engines, endpoint, now_s, source)
    grouped = waiting.groups.limit[endpoint] > 0
    if slot >= 0 and grouped and routing == JOIN_SHORTEST_QUEUE:
        observe_memory(fleet, world.endpoints, world.engines, endpoint, now_s, source)
    while slot >= 0:
        if grouped:
            slot, instance = pull(fleet, world.endpoints, waiting, endpoint, now_s)
            if slot >= 0:
                send(fleet, world.endpoints, waiting, slot, instance)
                _assign(world, slot, instance, now_s, source)
                slot = peek(waiting, endpoint)
                continue
            if not may_balance(fleet, world.endpoints, waiting, endpoint):
                break
            slot = peek(waiting, endpoint)
        if routing == JOIN_SHORTEST_QUEUE:
            instance = _shortest(world, endpoint, slot, now_s, source)
            if instance >= 0:
                send(fleet, world.endpoints, waiting, slot, instance)
        elif routing in LOOK_AHEAD:
            slot, instance = _dispatch_ahead(world, endpoint, now_s, source)
        else:
            slot, instance = dispatch(fleet, world.endpoints, waiting, endpoint, routing, world.no_rows)
        if instance < 0:
            break
        _assign(world, slot, instance, now_s, source)
        slot = peek(waiting, endpoint)
    if grouped and waiting.size[endpoint] > 0:
        insert_loose(fleet, world.endpoints, waiting, endpoint)


@compiled_inline
def refuse(world: World, request: int) -> None:
    world.outcomes[request].state = REFUSED
    world.run_state[0].refused += 1
    note_end_in_run(world, request)
    world.run_state[0].ended += 1


@compiled_inline
def note_end_in_run(world: World, request: int) -> None:
    """Note for the caller that *request* ended, if it is one of an application run."""
    if column(world.arrivals.run, request) >= 0:
        world.ended_in_runs[world.run_state[0].ended_in_runs] = request
        world.run_state[0].ended_in_runs += 1


@compiled_inline
def _service_s(policy: Any, prompt_tokens: int, output_tokens: int) -> float:
    """Return the time that a request takes alone by the profile of *policy*, an ENDPOINT record."""
    return service_time_s(
        float(policy.prefill_t0_s),
        float(policy.prefill_a_s),
        float(policy.prefill_b_s_per_token),
        float(policy.prefill_c_s_per_token2),
        float(policy.decode_a_s),
        float(policy.decode_b_s_per_sequence),
        float(policy.decode_c_s_per_token),
        prompt_tokens,
        output_tokens,
    )


@compiled_inline
def _allowed_s(world: World, request: int) -> float:
    """Return the seconds from arrival after which the first deadline of *request* is due."""
    arrivals = world.arrivals
    ttft_s = arrivals.deadline_s[request if arrivals.deadline_s.size > 1 else 0]
    return float(min(ttft_s, arrivals.end_s[request if arrivals.end_s.size > 1 else 0]))


@compiled_inline
def key_of(world: World, request: int, endpoint: int, prompt_tokens: int, output_tokens: int) -> float:
    """Return the queue key of *request* at *endpoint*."""
    policy, arrivals = world.policies[endpoint], world.arrivals
    arrival_s, priority = float(arrivals.arrival_s[request]), column(arrivals.priority, request)
    ttft_s = due_s = float(arrivals.deadline_s[request if arrivals.deadline_s.size > 1 else 0])
    end_s = float(arrivals.end_s[request if arrivals.end_s.size > 1 else 0])
    ordering, stretch = int(policy.ordering), float(policy.ordering_stretch)
    if ordering in FAIR:
        return claim(world.waiting, endpoint, column(arrivals.tenant, request))
    if ordering in BY_RUN and column(arrivals.run, request) >= 0:
        standing = world.standings
        return run_key(
            ordering,
            standing[request, BEGAN],
            standing[request, DUE],
            priority,
            standing[request, RANK],
            standing[request, MEAN],
            standing[request, WORST],
            stretch,
        )
    service_s = 0.0
    if ordering not in (FCFS, PRIORITY):  # which do not use it
        if end_s < np.inf:
            a_s, b_s, c_s = (
                float(policy.decode_a_s),
                float(policy.decode_b_s_per_sequence),
                float(policy.decode_c_s_per_token),
            )
            due_s = first_due_s(due_s, end_s, decode_time_s(a_s, b_s, c_s, prompt_tokens, output_tokens))
        if ordering == SLACK:
            output_tokens = 1
        elif ordering == SJF:
            output_tokens = column(arrivals.output_tokens, request) - column(world.kept_tokens, request)
        service_s = _service_s(policy, prompt_tokens, output_tokens)
        if ordering in BY_RUN:
            due_s = run_due_s(ttft_s, end_s, service_s)
    key = queue_key(ordering, arrival_s, arrival_s + due_s, priority, service_s, stretch)
    if ordering == QLM and world.waiting.groups.within[endpoint] == BY_RANK and column(arrivals.run, request) >= 0:
        return due_in_run(key, arrival_s, world.standings[request, DUE], world.standings[request, WORST])
    return key


@compiled_inline
def note_queued(world: World, slot: int, endpoint: int) -> None:
    """Charge the tenant of *slot*, which has just begun to wait for *endpoint*, where tenants have shares; or give it its
    rank where request groups leave by that.
    """
    waiting, policy = world.waiting, world.policies[endpoint]
    ordering = int(policy.ordering)
    if ordering not in FAIR and (ordering != QLM or waiting.groups.within[endpoint] != BY_RANK):
        return
    service_s = _service_s(policy, int(waiting.prompt_tokens[slot]), int(waiting.output_tokens[slot]))
    if ordering in FAIR:
        charge(waiting, slot, service_s)
        return
    request, began_s = index(world.held[slot]), waiting.arrival_s[slot]
    if column(world.arrivals.run, request) >= 0:
        began_s, service_s = world.standings[request, BEGAN], world.standings[request, RANK]
    rerank(waiting, slot, queue_key(HERMES, began_s, np.inf, 0, service_s, float(policy.ordering_stretch)))


@compiled_internal
def queue(world: World, request: int, endpoint: int, bounded: bool) -> None:
    """Queue *request* at *endpoint*; if *bounded*, refuse it when the queue is full."""
    policy, arrivals, waiting = world.policies[endpoint], world.arrivals, world.waiting
    outcome = world.outcomes[request]
    outcome.state, outcome.endpoint = 0, endpoint
    if bounded and is_full(world, endpoint):
        refuse(world, request)
        return
    kept_tokens = column(world.kept_tokens, request)
    prompt = column(arrivals.prompt_tokens, request) + kept_tokens
    output = column(arrivals.predicted_tokens, request)
    if kept_tokens > 0:
        output = max(1, output - kept_tokens)
    room = int(policy.largest_kv_tokens)
    if prompt + output > room:
        prompt = min(prompt, room - 1)
        output = room - prompt
    arrival_s, priority = float(arrivals.arrival_s[request]), column(arrivals.priority, request)
    deadline_s = arrival_s + _allowed_s(world, request)
    key = key_of(world, request, endpoint, prompt, output)
    tenant, run = column(arrivals.tenant, request), column(arrivals.run, request)
    adapter = column(arrivals.adapter, request)
    slot = enqueue(waiting, endpoint, key, arrival_s, deadline_s, priority, prompt, output, tenant, -1, run, adapter)
    world.held[slot] = request
    note_queued(world, slot, endpoint)
    if policy.routing == LEAST_DELAY:
        note_prefix(world, slot, request)


@compiled_inline
def finish(world: World, instance: int, sequence: int, now_s: float) -> int:
    """Remove *sequence*, finished or evicted, from *instance* and give its room to others.

    Returns the request that waits again, NONE for none.
    """
    engines = world.engines
    this = engines.sequences[sequence]
    request, done_tokens, again = index(this.request), int(this.prompt_tokens + this.output_tokens), NONE
    _settle(world, sequence)
    run_state, endpoint = world.run_state[0], int(world.fleet.endpoint[instance])
    lent = base_of(world, endpoint) != endpoint
    if this.evicted != 0:
        done_tokens = _keep(world, instance, sequence)
        if lent and column(world.arrivals.held, request) & ENDS_ON_RECLAIM != 0:
            world.outcomes[request].state = FAILED
            note_end_in_run(world, request)
            run_state.failed += 1
            run_state.ended += 1
            run_state.spot_ended += 1
        else:
            again = request
            world.outcomes[request].evictions += 1
            run_state.evictions += 1
            run_state.spot_evicted += lent
    else:
        run_state.spot_served += lent
        outcome = world.outcomes[request]
        outcome.e2e_s = now_s - this.origin_s
        outcome.state = DONE
        if world.run_state[0].caches != 0:
            note_cached(world.fleet, instance, int(outcome.cached_tokens), int(this.prompt_tokens))
        note_end_in_run(world, request)
        world.run_state[0].ended += 1
        if world.policies[index(world.fleet.endpoint[instance])].dispatch_round_trip_ms > 0.0:
            note_end(world.fleet, instance, now_s)
    release(world.fleet, instance, int(this.expected_tokens), done_tokens)
    if this.counted_blocks > 0:
        first = engines.cache.first[request]
        drop(world.affinity.blocks, instance, engines.cache.hashes, first, first + this.counted_blocks)
    if column(world.arrivals.adapter, request) >= 0:
        end_use(world.fleet, instance, column(world.arrivals.adapter, request))
    update_totals(world.fleet, engines, instance)
    if engines.ahead.clock.size > 0:
        leave(engines.ahead, sequence)
    free_sequence(engines, sequence)
    return again


@compiled_internal
def _settle(world: World, sequence: int) -> None:
    """Charge the tenant of *sequence*, which ends or is evicted, for its output in place of what was expected of it."""
    this, shares = world.engines.sequences[sequence], world.waiting.shares
    endpoint = index(world.outcomes[this.request].endpoint)
    if shares.ordering[endpoint] == VTC:
        came = this.output_tokens if this.evicted == 0 else this.produced_tokens if this.streaming != 0 else 0
        tenant = column(world.arrivals.tenant, index(this.request))
        more = OUTPUT_WEIGHT * float(came - (this.expected_tokens - this.expected_prompt)) / shares.weight[tenant]
        settle(world.waiting, endpoint, tenant, more, -np.inf)


@compiled_internal
def _keep(world: World, instance: int, sequence: int) -> int:
    """Record the output of the evicted *sequence*: the tokens that the dispatcher knows of."""
    this = world.engines.sequences[sequence]
    if this.streaming == 0:
        prefilled(world.fleet, instance, int(this.expected_prompt))
        return 0
    world.kept_tokens[this.request] += this.produced_tokens
    return int(this.prompt_tokens + this.produced_tokens)


@compiled_internal
def queue_again(world: World, request: int, now_s: float, source: int) -> int:
    """Queue the evicted *request* again and return its endpoint; refuse it and return -1 if nothing serves its model."""
    endpoint = choose_endpoint(world, request, now_s, source)
    if endpoint < 0:
        refuse(world, request)
        return NONE
    queue(world, request, endpoint, False)
    return endpoint
