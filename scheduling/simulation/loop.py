"""The compiled loop: arrivals, iterations' ends and changes of state, in order of time, through the live decision kernels.

What happens at one moment happens in this order: control ticks (by the caller, before `run` goes on), arrivals, ends of
instances' iterations, changes of instances' states, arrivals from other regions, batches' timeouts; each by number.
The dispatcher's part is that of the gateway: a request is queued at the endpoint that the global router chose, then the
head of the queue is dispatched while an instance has room; when a request ends its room is released, and the head of the
queue is tried again. Before every decision the fleet arrays are brought up to the moment: all tokens that have come out,
and no others, are counted.
"""

import math
from typing import Any, Final

import numpy as np

from scheduling.affinity import BLOCK_TOKENS, learn, note
from scheduling.compiled import compiled, compiled_aside, compiled_part, index
from scheduling.dispatch import dispatch, send
from scheduling.foreseeing import dispatch_ahead
from scheduling.lookahead import leave
from scheduling.ordering import FREE_COUNT, enqueue, free_slot, peek
from scheduling.profile import service_time_s
from scheduling.routing import JOIN_SHORTEST_QUEUE, LEAST_DELAY, PRESERVE, has_room, release
from scheduling.simulation.batch import begin, end, give
from scheduling.simulation.changes import (
    DRAINING,
    NOTHING,
    READY,
    RIPEN,
    SCALE_IN,
    SCALE_OUT,
    SETTLE,
    TO_CALLER,
    act,
)
from scheduling.simulation.choices import choose_endpoint, column, shortest, trigger
from scheduling.simulation.events import set_time
from scheduling.simulation.sequences import free_sequence, take_sequence
from scheduling.simulation.state import GIVEN, IDLE, NONE
from scheduling.simulation.totals import observe_endpoint, observe_memory, sum_up, tell, tell_growth
from scheduling.simulation.world import DONE, REFUSED, RUNNING, World
from scheduling.turns import FCFS, PRIORITY, SJF, engine_priority, turn_key

# Why the loop paused.
ALL_DONE: Final = 0
UNTIL: Final = 1
WAITING_FLAG: Final = 2
FULL: Final = 3  # the waiting set, a log or the delays drawn ahead are to be made larger
SCALE: Final = 4  # the reactive trigger wants an instance that has another model: called_endpoint
DRAINED: Final = 5  # called_instance has no work left and is to move to another endpoint

NOBODY: Final = -3
CONTROL: Final = -2
ARRIVAL: Final = -1
"""Sources of what happens, where it is not a node. At one moment, a node's event is over for sources above its number."""


@compiled_part
def _give(world: World, slot: int, instance: int, now_s: float, source: int) -> None:
    """Hand the request in *slot*, just dispatched, to *instance*."""
    waiting, engines, arrivals = world.waiting, world.engines, world.arrivals
    endpoint, request = index(waiting.endpoint[slot]), index(world.held[slot])
    outcome = world.outcomes[request]
    sequence = take_sequence(engines)
    this = engines.sequences[sequence]
    back_s = world.latency_s[index(world.policies[endpoint].region), index(column(arrivals.region, request))]
    this.request = request
    this.instance = instance
    this.prompt_tokens = column(arrivals.prompt_tokens, request)
    this.output_tokens = column(arrivals.output_tokens, request)
    this.expected_tokens = waiting.prompt_tokens[slot] + waiting.output_tokens[slot]
    this.expected_prompt = waiting.prompt_tokens[slot]
    if world.policies[endpoint].routing == LEAST_DELAY:
        learn(world.fleet, world.affinity, endpoint, slot, instance)
    priority, key = column(arrivals.priority, request), float(waiting.key[slot])
    this.priority = engine_priority(int(world.policies[endpoint].ordering), priority, key)
    this.produced_tokens = this.computed_tokens = 0
    this.decoding = this.streaming = this.again = 0
    this.published = 0
    this.origin_s = arrivals.arrival_s[request] - back_s
    this.number = engines.counters[GIVEN]
    engines.counters[GIVEN] += 1
    outcome.state = RUNNING
    outcome.instance = instance
    if outcome.attempts == 0:
        outcome.queue_s = now_s - arrivals.arrival_s[request]
    outcome.attempts += 1
    outcome.cached_tokens = 0
    books = world.books[0]
    if books.decisions < world.decisions.size:
        decision = world.decisions[books.decisions]
        decision.time_s, decision.request, decision.endpoint = now_s, request, endpoint
        decision.instance, decision.waiting = instance, waiting.size[endpoint]
        books.decisions += 1
    free_slot(waiting, slot)
    event_s = give(world.fleet, engines, instance, sequence, now_s, instance < source)
    tell(world.fleet, engines, instance)
    if event_s >= 0.0:
        set_time(world.events, instance, event_s)


@compiled_aside
def _dispatch_ahead(world: World, endpoint: int, now_s: float, source: int) -> tuple[int, int]:
    """`dispatch` by a router that looks ahead: with all tokens counted, and the maps moved by them."""
    observe_endpoint(world.fleet, world.endpoints, world.engines, endpoint, now_s, source)
    return dispatch_ahead(
        world.fleet,
        world.endpoints,
        world.waiting,
        world.engines.ahead,
        world.affinity,
        endpoint,
        int(world.policies[endpoint].routing),
    )


@compiled_aside
def _note(world: World, slot: int, request: int) -> None:
    """Note the prefix of *request*, which waits in *slot*, for the router that goes by it."""
    cache, first, last = world.engines.cache, 0, 0
    if cache.first.size > 1:
        first, last = cache.first[request], cache.first[request + 1]
    note(world.affinity, slot, cache.hashes, first, last, world.affinity.counters[BLOCK_TOKENS])


@compiled_aside
def _batch_pump(world: World, endpoint: int, now_s: float, source: int) -> None:
    """Dynamic batching: an idle instance is given `batch_size` requests at once, or fewer after `batch_wait_s`."""
    fleet, policy, waiting = world.fleet, world.policies[endpoint], world.waiting
    node = 2 * fleet.endpoint.size + world.way.shape[1] + endpoint
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
        # While a batch runs, its instance takes nothing.
        for at in range(first, last):
            instance = index(world.endpoints.members[at])
            if busy[instance] != 0:
                fleet.accepting[instance] = 0
        if policy.routing >= PRESERVE:
            slot, instance = _dispatch_ahead(world, endpoint, now_s, source)
        else:
            slot, instance = dispatch(fleet, world.endpoints, waiting, endpoint, int(policy.routing))
        for at in range(first, last):
            other = index(world.endpoints.members[at])
            if busy[other] != 0:
                fleet.accepting[other] = 1
        if slot < 0:
            return
        given = 1
        while True:
            _give(world, slot, instance, now_s, source)
            slot = peek(waiting, endpoint)
            if slot < 0 or given == policy.batch_size:
                break
            prompt, output = waiting.prompt_tokens[slot], waiting.output_tokens[slot]
            if not has_room(fleet, instance, prompt, output):
                break
            send(fleet, world.endpoints, waiting, slot, instance)
            given += 1


@compiled_part
def _pump(world: World, endpoint: int, now_s: float, source: int) -> None:
    """Dispatch requests of *endpoint*, in order, while an instance has room."""
    if world.policies[endpoint].batch_size > 0:
        _batch_pump(world, endpoint, now_s, source)
        return
    fleet, waiting, routing = world.fleet, world.waiting, int(world.policies[endpoint].routing)
    slot = peek(waiting, endpoint)
    if slot >= 0 and routing != JOIN_SHORTEST_QUEUE:
        observe_memory(fleet, world.endpoints, world.engines, endpoint, now_s, source)
    while slot >= 0:
        if routing == JOIN_SHORTEST_QUEUE:
            instance = shortest(world, endpoint, slot, now_s, source)
            if instance >= 0:
                send(fleet, world.endpoints, waiting, slot, instance)
        elif routing >= PRESERVE:
            slot, instance = _dispatch_ahead(world, endpoint, now_s, source)
        else:
            slot, instance = dispatch(fleet, world.endpoints, waiting, endpoint, routing)
        if instance < 0:
            return
        _give(world, slot, instance, now_s, source)
        slot = peek(waiting, endpoint)


@compiled_part
def _refuse(world: World, request: int) -> None:
    world.outcomes[request].state = REFUSED
    world.books[0].refused += 1
    world.books[0].ended += 1


@compiled_part
def _service_s(policy: Any, prompt_tokens: int, output_tokens: int) -> float:
    """How long a request takes alone by the profile of *policy*, an ENDPOINT record."""
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


@compiled_part
def _queue(world: World, request: int, endpoint: int) -> None:
    """Let *request* wait at *endpoint*, or refuse it if the queue there is full."""
    policy, arrivals, waiting = world.policies[endpoint], world.arrivals, world.waiting
    outcome = world.outcomes[request]
    outcome.state, outcome.endpoint = 0, endpoint
    if waiting.size[endpoint] >= policy.queue_bound:
        _refuse(world, request)
        return
    prompt, output = column(arrivals.prompt_tokens, request), column(arrivals.predicted_tokens, request)
    room = int(policy.largest_kv_tokens)
    if prompt + output > room:
        prompt = min(prompt, room - 1)
        output = room - prompt
    arrival_s, priority = float(arrivals.arrival_s[request]), column(arrivals.priority, request)
    deadline_s = arrival_s + arrivals.deadline_s[request if arrivals.deadline_s.size > 1 else 0]
    ordering = int(policy.ordering)
    service_s = 0.0
    if ordering not in (FCFS, PRIORITY):  # which do not ask for it
        service_s = _service_s(policy, prompt, column(arrivals.output_tokens, request) if ordering == SJF else output)
    key = turn_key(ordering, arrival_s, deadline_s, priority, service_s, float(policy.stretch))
    slot = enqueue(waiting, endpoint, key, arrival_s, deadline_s, priority, prompt, output, -1, -1, -1, -1)
    world.held[slot] = request
    if policy.routing == LEAST_DELAY:
        _note(world, slot, request)


@compiled_part
def _set_out(world: World, request: int, way: int, reaches_s: float) -> None:
    """*request* is sent to another region, and *reaches_s* it."""
    world.travelling[request] = NONE
    if world.way[0, way] == NONE:
        world.way[0, way] = request
        set_time(world.events, 2 * world.fleet.endpoint.size + way, reaches_s)
    else:
        world.travelling[world.way[1, way]] = request
    world.way[1, way] = request


@compiled_part
def _reach(world: World, way: int, source: int) -> int:
    """The first request on *way*, which reaches its region now."""
    request = int(world.way[0, way])
    following = int(world.travelling[request])
    world.way[0, way] = following
    regions = world.latency_s.shape[0]
    event_s = np.inf
    if following != NONE:
        event_s = world.arrivals.arrival_s[following] + world.latency_s[way // regions, way % regions]
    set_time(world.events, source, event_s)
    return request


@compiled_part
def _finish(world: World, instance: int, sequence: int, now_s: float) -> None:
    """The last token of *sequence* has come out: its room goes to others."""
    engines = world.engines
    this = engines.sequences[sequence]
    outcome = world.outcomes[index(this.request)]
    outcome.e2e_s = now_s - this.origin_s
    outcome.state = DONE
    world.books[0].ended += 1
    release(world.fleet, instance, int(this.expected_tokens), int(this.prompt_tokens + this.output_tokens))
    tell(world.fleet, engines, instance)
    if engines.ahead.clock.size > 0:
        leave(engines.ahead, sequence)
    free_sequence(engines, sequence)


@compiled_part
def _flagged(world: World, endpoint: int, now_s: float) -> bool:
    """Whether the head of the queue of *endpoint* has waited longer than `wait_flag_s`; said once in as long a time."""
    head, policy, longest_s = peek(world.waiting, endpoint), world.policies[endpoint], world.books[0].wait_flag_s
    if head < 0 or now_s - max(world.waiting.arrival_s[head], policy.flagged_s) <= longest_s:
        return False
    policy.flagged_s = now_s
    return True


@compiled_part
def _run(
    world: World, until_s: float, endpoint: int, request: int, source: int, what: int, subject: int, after: int
) -> int:
    # What can happen meets in one place for each thing to do: every one is compiled once, and that takes long enough.
    arrivals, events, books, engines = world.arrivals, world.events, world.books[0], world.engines
    instances, ways = world.fleet.endpoint.size, world.way.shape[1]
    requests, regions = arrivals.arrival_s.size, world.latency_s.shape[0]
    asked = source != NOBODY
    for each in range(world.policies.size):
        sum_up(world.fleet, world.endpoints, engines, each)
    again = False  # an instance became ready: its endpoint is pumped before time goes on
    while True:
        instance = reached = NONE
        now_s = float(books.now_s)
        if again:
            request = NONE
        elif asked:
            for each in range(world.policies.size):
                observe_endpoint(world.fleet, world.endpoints, engines, each, now_s, source)
            if what != NOTHING:
                return act(world, what, subject, after, endpoint, until_s)
        else:
            if books.ended == requests:
                return ALL_DONE
            if world.waiting.counters[FREE_COUNT] == 0:
                return FULL
            if world.decisions.size > 0 and world.decisions.size - books.decisions <= world.waiting.key.size:
                return FULL  # an event may give out all that wait
            if books.changes == world.lives.changes.size or books.reclaims == world.lives.reclaims_s.size:
                return FULL
            arrival = index(books.arrived)
            arrival_s = arrivals.arrival_s[arrival] if arrival < requests else math.inf
            node, event_s = index(events.node[1]), events.time_s[1]
            now_s = min(arrival_s, event_s)
            if now_s >= until_s:
                books.now_s = until_s
                return UNTIL
            books.now_s = now_s
            endpoint = request = NONE
            what = NOTHING
            if arrival_s <= event_s:
                source = ARRIVAL
                books.arrived = arrival + 1
                request = arrival
            else:
                source = node
                books.events += 1
                if node < instances:
                    instance = node
                elif node < 2 * instances:
                    what, subject = RIPEN, node - instances
                elif node < 2 * instances + ways:
                    reached = _reach(world, node - 2 * instances, source)
                    endpoint = int(world.outcomes[reached].endpoint)
                else:
                    endpoint = node - 2 * instances - ways
        if request >= 0:
            endpoint = choose_endpoint(world, request, now_s, source)
            if endpoint < 0:
                if asked:
                    return NONE
                _refuse(world, request)
                continue
            if not asked:
                origin, region = column(arrivals.region, request), int(world.policies[endpoint].region)
                if region != origin:
                    books.forwarded += 1
                latency_s = world.latency_s[origin, region]
                if latency_s > 0.0:
                    world.outcomes[request].endpoint = endpoint
                    _set_out(world, request, origin * regions + region, now_s + latency_s)
                    continue
            reached = request
        if reached >= 0:
            _queue(world, reached, endpoint)
        done = 0
        if instance >= 0 and engines.instances[instance].phase != IDLE:
            done = end(world.fleet, engines, instance, now_s, world.outcomes)
            tell(world.fleet, engines, instance)
        at = 0
        while True:
            if instance >= 0:
                if at == done:
                    break
                _finish(world, instance, index(engines.done[at]), now_s)
                endpoint = index(world.fleet.endpoint[instance])
                at += 1
            if endpoint >= 0:
                _pump(world, endpoint, now_s, source)
            if instance < 0:
                break
        if asked:
            return endpoint
        if instance >= 0:
            set_time(events, instance, begin(engines, instance, now_s, world.outcomes))
            tell_growth(world.fleet, engines, instance)
            if world.lives.instances[instance].state == DRAINING and world.fleet.running[instance] == 0:
                what, subject = SETTLE, instance
        if reached >= 0 and books.reactive != 0:
            wanted = trigger(world, endpoint, now_s, source)
            if wanted != 0:
                what, subject = SCALE_OUT if wanted > 0 else SCALE_IN, endpoint
        if what == SCALE_IN:  # its look for the one with the least to do
            observe_endpoint(world.fleet, world.endpoints, engines, subject, now_s, source)
        again = False
        if what != NOTHING:
            changed = act(world, what, subject, NONE, NONE, math.inf)
            if changed == TO_CALLER:
                books.called_endpoint, books.called_instance = endpoint, instance
                return SCALE if what == SCALE_OUT else DRAINED
            if changed >= 0:
                if what == SCALE_OUT:
                    books.scale_outs += 1
                    world.policies[endpoint].scaled_s = now_s
                elif what == SCALE_IN:
                    books.scale_ins += 1
                    world.policies[endpoint].scaled_s = now_s
                again = world.lives.instances[changed].state == READY
                endpoint = int(world.fleet.endpoint[changed])
                reached = NONE
                what = NOTHING
        if reached >= 0 and books.wait_flag_s < math.inf and _flagged(world, endpoint, now_s):
            books.called_endpoint = endpoint
            return WAITING_FLAG


@compiled
def _enter(
    world: World, until_s: float, endpoint: int, request: int, source: int, what: int, subject: int, after: int
) -> int:
    return _run(world, until_s, endpoint, request, source, what, subject, after)


def run(world: World, until_s: float) -> int:
    """Let time pass until just before *until_s*, until all requests have ended, or until the caller is wanted."""
    return _enter(world, until_s, NONE, NONE, NOBODY, NOTHING, NONE, NONE)


def control(world: World, endpoint: int, request: int, source: int) -> int:
    """Bring the fleet arrays up to now, as *source* sees it. Then queue *request* again, or pump *endpoint*; -1 for neither.

    Returns the endpoint, -1 for none.
    """
    return _enter(world, math.inf, endpoint, request, source, NOTHING, NONE, NONE)


def change(
    world: World, what: int, subject: int, after: int = NONE, endpoint: int = NONE, lasts_s: float = math.inf
) -> int:
    """`changes.act`, with the fleet arrays up to now. There must be room for one more change and one more reclaim."""
    return _enter(world, lasts_s, endpoint, NONE, CONTROL, what, subject, after)
