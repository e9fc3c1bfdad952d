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
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_aside, compiled_part
from scheduling.dispatch import dispatch
from scheduling.fleet import EndpointArrays, FleetArrays
from scheduling.ordering import FREE_COUNT, enqueue, free_slot, peek, pop
from scheduling.regions import choose_region
from scheduling.routing import has_room, place, release
from scheduling.scaling import reactive_trigger
from scheduling.simulation.batch import begin, end, give, observe
from scheduling.simulation.events import set_time
from scheduling.simulation.sequences import free_sequence, take_sequence
from scheduling.simulation.state import GIVEN, IDLE, NONE, SEGMENT, EngineArrays
from scheduling.simulation.world import DONE, REFUSED, RUNNING, World
from scheduling.turns import turn_key

# Why the loop paused.
ALL_DONE: Final = 0
UNTIL: Final = 1
WAITING_FLAG: Final = 2
FULL: Final = 3  # the waiting set or the log of decisions is to be made larger
SCALE: Final = 4  # the reactive trigger wants an instance more or fewer: called_endpoint, called_for
DRAINED: Final = 5  # called_instance accepts no work and has none left
RIPE: Final = 6  # the time of the state of called_instance is over

CONTROL: Final = -2
ARRIVAL: Final = -1
"""Sources of what happens, where it is not a node. At one moment, a node's event is over for sources above its number."""


@compiled_part
def column(values: NDArray[np.integer[Any]], request: int) -> int:
    """The value of *request* in a column that may have one element for all."""
    return int(values[request if values.size > 1 else 0])


@compiled_part
def observe_endpoint(
    fleet: FleetArrays, endpoints: EndpointArrays, engines: EngineArrays, endpoint: int, now_s: float, source: int
) -> None:
    """Count every token that has come out at *endpoint* up to this moment."""
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = int(endpoints.members[at])
        if engines.instances[instance].phase == SEGMENT:
            observe(fleet, engines, instance, now_s, instance < source)


@compiled_part
def _observe_memory(
    fleet: FleetArrays, endpoints: EndpointArrays, engines: EngineArrays, endpoint: int, now_s: float, source: int
) -> None:
    """As `observe_endpoint`, where it matters for memory: at instances with requests beyond what was expected."""
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = int(endpoints.members[at])
        engine = engines.instances[instance]
        if engine.phase == SEGMENT and engine.step_within < engine.step_decodes:
            observe(fleet, engines, instance, now_s, instance < source)


@compiled_part
def _give(world: World, slot: int, instance: int, now_s: float, source: int) -> None:
    """Hand the request in *slot*, just dispatched, to *instance*."""
    waiting, engines, arrivals = world.waiting, world.engines, world.arrivals
    endpoint, request = int(waiting.endpoint[slot]), int(world.held[slot])
    outcome = world.outcomes[request]
    sequence = take_sequence(engines)
    this = engines.sequences[sequence]
    back_s = world.latency_s[int(world.policies[endpoint].region), column(arrivals.region, request)]
    this.request = request
    this.instance = instance
    this.prompt_tokens = column(arrivals.prompt_tokens, request)
    this.output_tokens = column(arrivals.output_tokens, request)
    this.expected_tokens = waiting.prompt_tokens[slot] + waiting.output_tokens[slot]
    this.priority = column(arrivals.priority, request)
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
    event_s = give(engines, instance, sequence, now_s, instance < source)
    if event_s >= 0.0:
        set_time(world.events, instance, event_s)


@compiled_aside
def _batch_pump(world: World, endpoint: int, now_s: float, source: int) -> None:
    """Dynamic batching: an idle instance is given `batch_size` requests at once, or fewer after `batch_wait_s`."""
    fleet, policy, waiting = world.fleet, world.policies[endpoint], world.waiting
    node = 2 * fleet.endpoint.size + world.way.shape[1] + endpoint
    first, last = int(world.endpoints.first[endpoint]), int(world.endpoints.first[endpoint + 1])
    busy = world.busy
    while True:
        idle = False
        for at in range(first, last):
            instance = int(world.endpoints.members[at])
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
            instance = int(world.endpoints.members[at])
            if busy[instance] != 0:
                fleet.accepting[instance] = 0
        slot, instance = dispatch(fleet, world.endpoints, waiting, endpoint, int(policy.routing))
        for at in range(first, last):
            other = int(world.endpoints.members[at])
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
            pop(waiting, endpoint)
            waiting.instance[slot] = instance
            place(fleet, world.endpoints, instance, prompt, output)
            given += 1


@compiled_part
def pump(world: World, endpoint: int, now_s: float, source: int) -> None:
    """Dispatch requests of *endpoint*, in order, while an instance has room."""
    if world.policies[endpoint].batch_size > 0:
        _batch_pump(world, endpoint, now_s, source)
        return
    if world.waiting.size[endpoint] == 0:
        return
    observe_endpoint(world.fleet, world.endpoints, world.engines, endpoint, now_s, source)
    routing = int(world.policies[endpoint].routing)
    while True:
        slot, instance = dispatch(world.fleet, world.endpoints, world.waiting, endpoint, routing)
        if slot < 0:
            return
        _give(world, slot, instance, now_s, source)


@compiled_part
def _choose_endpoint(world: World, request: int, now_s: float, source: int) -> int:
    """The endpoint for *request* by the global router; -1 if nothing serves its model or soon will."""
    model, region = column(world.arrivals.model, request), column(world.arrivals.region, request)
    at = model * world.latency_s.shape[0] + region
    candidates = world.candidates[world.candidate_first[at] : world.candidate_first[at + 1]]
    for index in range(candidates.size):
        _observe_memory(world.fleet, world.endpoints, world.engines, int(candidates[index]), now_s, source)
    chosen = choose_region(
        world.fleet, world.endpoints, candidates, world.waiting.size, float(world.books[0].threshold)
    )
    if chosen >= 0:
        return chosen
    for index in range(candidates.size):
        if world.policies[candidates[index]].serving > 0:
            return int(candidates[index])
    return -1


@compiled_part
def _refuse(world: World, request: int) -> None:
    world.outcomes[request].state = REFUSED
    world.books[0].refused += 1
    world.books[0].ended += 1


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
    key = turn_key(int(policy.ordering), arrival_s, deadline_s, priority, output)
    slot = enqueue(waiting, endpoint, key, arrival_s, deadline_s, priority, prompt, output, -1, -1, -1, -1)
    world.held[slot] = request


@compiled_part
def _arrive(world: World, request: int, now_s: float) -> None:
    """*request* reaches the gateway of its caller's region."""
    endpoint = _choose_endpoint(world, request, now_s, ARRIVAL)
    if endpoint < 0:
        _refuse(world, request)
        return
    origin, region = column(world.arrivals.region, request), int(world.policies[endpoint].region)
    if region != origin:
        world.books[0].forwarded += 1
    latency_s = world.latency_s[origin, region]
    if latency_s == 0.0:
        _queue(world, request, endpoint)
        pump(world, endpoint, now_s, ARRIVAL)
        return
    world.outcomes[request].endpoint = endpoint
    way = origin * world.latency_s.shape[0] + region
    world.travelling[request] = NONE
    if world.way[0, way] == NONE:
        world.way[0, way] = request
        set_time(world.events, 2 * world.fleet.endpoint.size + way, now_s + latency_s)
    else:
        world.travelling[world.way[1, way]] = request
    world.way[1, way] = request


@compiled_aside
def _reach(world: World, way: int, now_s: float, source: int) -> int:
    """The first request on *way* reaches its endpoint, which is returned."""
    request = int(world.way[0, way])
    following = int(world.travelling[request])
    world.way[0, way] = following
    regions = world.latency_s.shape[0]
    event_s = np.inf
    if following != NONE:
        event_s = world.arrivals.arrival_s[following] + world.latency_s[way // regions, way % regions]
    set_time(world.events, source, event_s)
    endpoint = int(world.outcomes[request].endpoint)
    _queue(world, request, endpoint)
    pump(world, endpoint, now_s, source)
    return endpoint


@compiled_part
def _work(world: World, instance: int, now_s: float) -> None:
    """What *instance* had in hand ends; its room goes to others; it begins what comes next."""
    engines, fleet = world.engines, world.fleet
    if engines.instances[instance].phase != IDLE:
        done = end(fleet, engines, instance, now_s, world.outcomes)
        for at in range(done):
            sequence = int(engines.done[at])
            this = engines.sequences[sequence]
            outcome = world.outcomes[this.request]
            outcome.e2e_s = now_s - this.origin_s
            outcome.state = DONE
            world.books[0].ended += 1
            release(fleet, instance, int(this.expected_tokens), int(this.prompt_tokens + this.output_tokens))
            free_sequence(engines, sequence)
            pump(world, int(fleet.endpoint[instance]), now_s, instance)
    set_time(world.events, instance, begin(engines, instance, now_s, world.outcomes))


@compiled_part
def _flagged(world: World, endpoint: int, now_s: float) -> bool:
    """Whether the head of the queue of *endpoint* has waited longer than `wait_flag_s`; said once in as long a time."""
    head, policy, longest_s = peek(world.waiting, endpoint), world.policies[endpoint], world.books[0].wait_flag_s
    if head < 0 or now_s - max(world.waiting.arrival_s[head], policy.flagged_s) <= longest_s:
        return False
    policy.flagged_s = now_s
    return True


@compiled_part
def _trigger(world: World, endpoint: int, now_s: float) -> int:
    """What the reactive trigger wants of *endpoint*, which a request has just reached."""
    books, policy = world.books[0], world.policies[endpoint]
    return reactive_trigger(
        world.fleet,
        world.endpoints,
        endpoint,
        int(world.waiting.size[endpoint]),
        int(policy.serving),
        float(now_s - policy.scaled_s),
        float(books.out_above),
        float(books.in_below),
        float(books.cooldown_s),
        int(books.min_instances),
        int(books.max_instances),
    )


@compiled_part
def _run(world: World, until_s: float) -> int:
    arrivals, events, books = world.arrivals, world.events, world.books[0]
    instances = world.fleet.endpoint.size
    ways = world.way.shape[1]
    requests = arrivals.arrival_s.size
    while True:
        if books.ended == requests:
            return ALL_DONE
        if world.waiting.counters[FREE_COUNT] == 0:
            return FULL
        if world.decisions.size > 0 and world.decisions.size - books.decisions <= world.waiting.key.size:
            return FULL  # an event may give out all that wait
        arrival = int(books.arrived)
        arrival_s = arrivals.arrival_s[arrival] if arrival < requests else math.inf
        node = int(events.heap[0])
        event_s = events.time_s[node]
        now_s = min(arrival_s, event_s)
        if now_s >= until_s:
            books.now_s = until_s
            return UNTIL
        books.now_s = now_s
        reached = -1
        if arrival_s <= event_s:
            books.arrived = arrival + 1
            _arrive(world, arrival, now_s)
            reached = int(world.outcomes[arrival].endpoint)
            if reached >= 0 and world.latency_s[column(arrivals.region, arrival), world.policies[reached].region] > 0.0:
                reached = -1  # not yet
        elif node < instances:
            books.events += 1
            _work(world, node, now_s)
            if world.fleet.running[node] == 0 and world.fleet.accepting[node] == 0:
                books.called_instance = node
                return DRAINED
        elif node < 2 * instances:
            books.events += 1
            set_time(events, node, math.inf)
            books.called_instance = node - instances
            return RIPE
        elif node < 2 * instances + ways:
            books.events += 1
            reached = _reach(world, node - 2 * instances, now_s, node)
        else:
            books.events += 1
            _batch_pump(world, node - 2 * instances - ways, now_s, node)
        if reached >= 0:
            if books.reactive != 0:
                wanted = _trigger(world, reached, now_s)
                if wanted != 0:
                    books.called_endpoint, books.called_for = reached, wanted
                    return SCALE
            if books.wait_flag_s < math.inf and _flagged(world, reached, now_s):
                books.called_endpoint = reached
                return WAITING_FLAG


@compiled
def run(world: World, until_s: float) -> int:
    """Let time pass until just before *until_s*, until all requests have ended, or until the caller is wanted."""
    return _run(world, until_s)


@compiled_part
def _control(world: World, endpoint: int, request: int, source: int) -> int:
    now_s = float(world.books[0].now_s)
    for each in range(world.policies.size):
        observe_endpoint(world.fleet, world.endpoints, world.engines, each, now_s, source)
    if request >= 0:
        endpoint = _choose_endpoint(world, request, now_s, source)
        if endpoint >= 0:
            _queue(world, request, endpoint)
    if endpoint >= 0:
        pump(world, endpoint, now_s, source)
    return endpoint


@compiled
def control(world: World, endpoint: int, request: int, source: int) -> int:
    """Bring the fleet arrays up to now, as *source* sees it. Then queue *request* again, or pump *endpoint*; -1 for neither.

    Returns the endpoint, -1 for none. One way in for all that callers need: it compiles once.
    """
    return _control(world, endpoint, request, source)
