"""The compiled loop: takes the next event, applies it, and decides with the live dispatcher's own kernels.

Simultaneous events are processed in this order: control ticks (by the caller, between two calls of `run`), arrivals, ends of
iterations, changes of instances' states, arrivals from other regions, batch timeouts, arrivals at instances, sweeps; each by
number. Before every decision the fleet arrays count exactly the tokens emitted by then.
"""

import math
from typing import Final

import numpy as np

from scheduling.compiled import compiled, compiled_inline, compiled_internal, index
from scheduling.queueing.held import HELD
from scheduling.queueing.waiting_set import FREE_COUNT, free_slot
from scheduling.simulation.cluster.choices import (
    choose_endpoint,
    column,
    is_taken,
    may_fall_back,
    spot_with_room,
    trigger,
)
from scheduling.simulation.cluster.dispatcher import deliver, finish, pump, queue, queue_again, refuse
from scheduling.simulation.cluster.event_queue import set_time
from scheduling.simulation.cluster.state_changes import (
    ARRIVE,
    BEGIN,
    DRAINING,
    GIVE,
    NOTHING,
    QUEUE,
    RECLAIMING,
    RESUME,
    SCALE_IN,
    SCALE_OUT,
    SETTLE,
    TIMER_EXPIRED,
    TO_CALLER,
    WITHDRAW,
    act,
)
from scheduling.simulation.cluster.sweep import (
    TO_FALL_BACK,
    arm,
    end_sweep,
    expect_end,
    give_up,
    sweep,
    wait_anywhere,
)
from scheduling.simulation.cluster.totals import observe_endpoint, sum_up, update_growth_totals, update_totals
from scheduling.simulation.cluster.world import WAITING, World, base_of, spot_of
from scheduling.simulation.engine.batch import begin, end, give
from scheduling.simulation.engine.progress import resume
from scheduling.simulation.engine.state import IDLE, LEAVING, NONE

# Reasons for pausing the loop.
RUNS: Final = -1
ALL_DONE: Final = 0
UNTIL: Final = 1
FULL: Final = 2  # the waiting set, a log or the delays drawn ahead have to grow
SCALE: Final = 3  # the reactive trigger wants an instance that has another model: called_endpoint
DRAINED: Final = 4  # called_instance is drained and moves to another endpoint
STEP: Final = 6  # requests of application runs have ended: ended_in_runs
DOOR: Final = 5  # request at_door waits: it is estimated for how long, and its promise judged
FALL_BACK: Final = 7  # fallbacks of models may serve may_fall_back, or requests that wait at the endpoint of a sweep

TIME: Final = -3
CONTROL: Final = -2
ARRIVAL: Final = -1
"""Sources of events that are not nodes. Of simultaneous events, a node's precedes those of sources with higher numbers."""


@compiled_inline
def _must_pause(world: World) -> int:
    """Return DOOR, STEP, ALL_DONE, FULL if the next event may need more room than there is, or RUNS."""
    run_state = world.run_state[0]
    if run_state.at_door >= 0:
        return DOOR
    if run_state.ended_in_runs > run_state.seen_in_runs:
        return STEP
    if run_state.ended == world.arrivals.arrival_s.size:
        return ALL_DONE
    if world.waiting.counters[FREE_COUNT] <= world.engines.counters[LEAVING]:
        return FULL
    if world.decisions.size > 0 and world.decisions.size - run_state.decisions <= world.waiting.key.size:
        return FULL  # one event may dispatch all waiting requests
    if run_state.changes == world.lives.changes.size or run_state.reclaims == world.lives.reclaims_s.size:
        return FULL
    return RUNS


@compiled_inline
def _step(world: World, until_s: float) -> int:
    """Apply the next event before *until_s*; return why the loop pauses, or RUNS."""
    run_state, arrivals, events = world.run_state[0], world.arrivals, world.events
    reason = _must_pause(world)
    if reason != RUNS:
        return reason
    request = index(run_state.arrived)
    arrival_s = arrivals.arrival_s[request] if request < arrivals.arrival_s.size else math.inf
    node, event_s = index(events.node[1]), events.time_s[1]
    now_s = min(arrival_s, event_s)
    if now_s >= until_s:
        run_state.now_s = until_s
        return UNTIL
    run_state.now_s = now_s
    if arrival_s <= event_s:
        run_state.arrived = request + 1
        return _arrive(world, request, now_s)
    run_state.events += 1
    instances, links = world.fleet.endpoint.size, world.link.shape[1]
    if node < instances:
        return _end_iteration(world, node, now_s)
    if node < 2 * instances:
        _apply(world, TIMER_EXPIRED, node - instances, node)
        return RUNS
    if node < 2 * instances + links:
        return _reach_region(world, node - 2 * instances, node, now_s)
    if node == run_state.sweep_node:
        return _sweep(world, now_s, until_s, node)
    endpoint = node - 2 * instances - links
    if endpoint < world.policies.size:
        pump(world, endpoint, now_s, node)  # a batch has waited long enough
    else:
        deliver(world, endpoint - world.policies.size, now_s)
    return RUNS


@compiled_inline
def _arrive(world: World, request: int, now_s: float) -> int:
    """Let *request* arrive; those of runs come when the caller says."""
    if column(world.arrivals.run, request) >= 0:
        return RUNS
    return _come(world, request, now_s)


@compiled_internal
def _come(world: World, request: int, now_s: float) -> int:
    """Queue *request* at an endpoint, send it to another region, or leave it to the queue manager."""
    endpoint = spot_with_room(world, request)
    if endpoint < 0:
        if column(world.arrivals.held, request) & HELD != 0:
            return RUNS
        endpoint = choose_endpoint(world, request, now_s, ARRIVAL)
        asked = world.run_state[0].asked_fallback == request
        if not asked and not is_taken(world, endpoint) and may_fall_back(world, request):
            world.run_state[0].may_fall_back = request
            return FALL_BACK
    if endpoint < 0:
        refuse(world, request)
        return RUNS
    origin, region = column(world.arrivals.region, request), int(world.policies[endpoint].region)
    if region != origin % int(world.run_state[0].regions):
        world.run_state[0].forwarded += 1
    latency_s = world.latency_s[origin, region]
    if latency_s > 0.0:
        world.outcomes[request].endpoint = endpoint
        _set_out(world, request, origin * world.latency_s.shape[0] + region, now_s + latency_s)
        return RUNS
    _join(world, request, endpoint, now_s, ARRIVAL)
    return _scale(world, endpoint, now_s, ARRIVAL)


@compiled_internal
def _set_out(world: World, request: int, link: int, reaches_s: float) -> None:
    """Send *request* to another region, which it reaches at *reaches_s*."""
    world.travelling[request] = NONE
    if world.link[0, link] == NONE:
        world.link[0, link] = request
        set_time(world.events, 2 * world.fleet.endpoint.size + link, reaches_s)
    else:
        world.travelling[world.link[1, link]] = request
    world.link[1, link] = request


@compiled_internal
def _reach_region(world: World, link: int, source: int, now_s: float) -> int:
    """Deliver the first request on *link* to its region."""
    request = int(world.link[0, link])
    following = int(world.travelling[request])
    world.link[0, link] = following
    regions = world.latency_s.shape[0]
    event_s = np.inf
    if following != NONE:
        event_s = world.arrivals.arrival_s[following] + world.latency_s[link // regions, link % regions]
    set_time(world.events, source, event_s)
    endpoint = int(world.outcomes[request].endpoint)
    _join(world, request, endpoint, now_s, source)
    return _scale(world, endpoint, now_s, source)


@compiled_internal
def _join(world: World, request: int, endpoint: int, now_s: float, source: int) -> None:
    """Queue *request* at *endpoint*, and dispatch there."""
    bounded = world.outcomes[request].attempts == 0 and column(world.arrivals.held, request) & HELD == 0
    queue(world, request, endpoint, bounded)
    if world.run_state[0].sweep_node >= 0:
        expect_end(world, request, endpoint)
        arm(world, now_s)
    pump(world, endpoint, now_s, source)
    if column(world.arrivals.held, request) & HELD == 0:
        _come_to_door(world, request)


@compiled_inline
def _come_to_door(world: World, request: int) -> None:
    """Let the caller estimate the wait of *request*, which was queued, where it does and an instance had no room."""
    if world.run_state[0].estimates != 0 and world.outcomes[request].state == WAITING:
        world.run_state[0].at_door = request


@compiled_inline
def _scale(world: World, endpoint: int, now_s: float, source: int) -> int:
    """Apply the reactive trigger's move for *endpoint*, which a request has just reached."""
    run_state = world.run_state[0]
    if run_state.reactive == 0 or base_of(world, endpoint) != endpoint:
        return RUNS
    wanted = trigger(world, endpoint, now_s, source)
    if wanted == 0:
        return RUNS
    if wanted < 0:  # removes the least loaded instance
        observe_endpoint(world.fleet, world.endpoints, world.engines, endpoint, now_s, source)
    elif spot_of(world, endpoint) >= 0:  # evicts what runs on a donated instance
        observe_endpoint(world.fleet, world.endpoints, world.engines, spot_of(world, endpoint), now_s, source)
    changed = _apply(world, SCALE_OUT if wanted > 0 else SCALE_IN, endpoint, source)
    if changed == TO_CALLER:
        run_state.called_endpoint = endpoint
        return SCALE
    if changed >= 0:
        run_state.scale_outs += wanted > 0
        run_state.scale_ins += wanted < 0
        world.policies[endpoint].scaled_s = now_s
    return RUNS


@compiled_inline
def _end_iteration(world: World, instance: int, now_s: float) -> int:
    """End iterations of *instance*: release finished sequences, give their room to others, start the next iterations."""
    engines, done = world.engines, 0
    if engines.instances[instance].phase != IDLE:
        done = end(world.fleet, engines, instance, now_s, world.outcomes)
        update_totals(world.fleet, engines, instance)
    for at in range(done):
        evicted = finish(world, instance, index(engines.done[at]), now_s)
        pump(world, index(world.fleet.endpoint[instance]), now_s, instance)
        if evicted != NONE:
            endpoint = queue_again(world, evicted, now_s, instance)
            if world.run_state[0].sweep_node >= 0:
                arm(world, now_s)
            if endpoint >= 0:
                pump(world, endpoint, now_s, instance)
                _come_to_door(world, evicted)
    set_time(world.events, instance, begin(engines, instance, now_s, world.outcomes))
    update_growth_totals(world.fleet, engines, instance)
    life = world.lives.instances[instance]
    if world.fleet.running[instance] > 0 or life.state not in (DRAINING, RECLAIMING):
        return RUNS
    if life.state == RECLAIMING:
        if now_s >= life.goal_s:
            _apply(world, TIMER_EXPIRED, instance, instance)
        return RUNS
    if _apply(world, SETTLE, instance, instance) == TO_CALLER:
        world.run_state[0].called_instance = instance
        return DRAINED
    return RUNS


@compiled_internal
def _apply(world: World, what: int, subject: int, source: int) -> int:
    """Do *what* to *subject* (`state_changes.act`), and dispatch to an instance that accepts work by it."""
    changed = act(world, what, subject, NONE, NONE, math.inf)
    if changed >= 0 and world.fleet.accepting[changed] != 0:
        pump(world, int(world.fleet.endpoint[changed]), float(world.run_state[0].now_s), source)
    return int(changed)


@compiled_internal
def _sweep(world: World, now_s: float, until_s: float, source: int) -> int:
    """Sweep the waiting requests; an endpoint that a request moves to is pumped before the sweep continues.

    FALL_BACK if the caller has to look at those of an endpoint first; the sweep, whose time stays, then continues.
    """
    endpoint = sweep(world, now_s, source)
    while endpoint >= 0:
        pump(world, endpoint, now_s, source)
        endpoint = sweep(world, now_s, source)
    if endpoint == TO_FALL_BACK:
        return FALL_BACK
    end_sweep(world, now_s, until_s)
    return RUNS


@compiled_internal
def _control(world: World, endpoint: int, request: int, source: int) -> int:
    """Queue *request* at *endpoint*, again at one of its choice, or pump *endpoint*; return the endpoint, -1 for none."""
    now_s = float(world.run_state[0].now_s)
    if request >= 0:
        if endpoint < 0:
            endpoint = choose_endpoint(world, request, now_s, source)
        if endpoint >= 0:
            _join(world, request, endpoint, now_s, source)
    elif endpoint >= 0:
        pump(world, endpoint, now_s, source)
    return endpoint


@compiled
def enter(
    world: World, time_s: float, endpoint: int, request: int, source: int, what: int, subject: int, after: int
) -> int:
    """Handle every call from Python, by *source* and *what*: a single kernel, so that its parts are compiled once.

    TIME: `run`. BEGIN, GIVE, RESUME and QUEUE put a fork together. ARRIVE: *subject* is a request that comes
    now; RUNS, SCALE or FALL_BACK. Any other action is done to *subject*; without one, *endpoint* and
    *request* are those of `control`. Both update the fleet arrays first.
    """
    engines = world.engines
    if what == BEGIN:
        set_time(world.events, subject, begin(engines, subject, time_s, world.outcomes))
        return subject
    if what == GIVE:
        event_s = give(world.fleet, engines, after, subject, time_s, True)
        if event_s >= 0.0:
            set_time(world.events, after, event_s)
        return after
    if what == RESUME:
        resume(engines, after, subject)
        return subject
    if what == QUEUE:
        queue(world, subject, after, False)
        expect_end(world, subject, after)
        return subject
    if what == WITHDRAW:
        if after == 1:
            give_up(world, subject)
        else:
            free_slot(world.waiting, subject)
        return subject
    for each in range(world.policies.size):
        sum_up(world.fleet, world.endpoints, engines, each)
    now_s = float(world.run_state[0].now_s)
    if source == TIME:
        if world.run_state[0].sweep_node >= 0 and wait_anywhere(world):
            arm(world, now_s)
        reason = RUNS
        while reason == RUNS:
            reason = _step(world, time_s)
        return reason
    for each in range(world.policies.size):
        observe_endpoint(world.fleet, world.endpoints, engines, each, now_s, source)
    if what == ARRIVE:
        world.arrivals.arrival_s[subject] = now_s
        return _come(world, subject, now_s)
    if what != NOTHING:
        return act(world, what, subject, after, endpoint, time_s)
    return _control(world, endpoint, request, source)


def change(
    world: World, what: int, subject: int, after: int = NONE, endpoint: int = NONE, lasts_s: float = math.inf
) -> int:
    """Call `state_changes.act` with up-to-date fleet arrays. One more change and one more reclaim must fit."""
    return enter(world, lasts_s, endpoint, NONE, CONTROL, what, subject, after)
