"""The compiled loop: arrivals, iterations' ends and changes of state, in order of time, through the live decision kernels.

What happens at one moment happens in this order: control ticks (by the caller, before `run` goes on), arrivals, ends of
instances' iterations, changes of instances' states, arrivals from other regions, batches' timeouts, arrivals at instances,
looks at what waits; each by number.
What becomes of a request at its endpoint is in `dispatcher`. Before every decision the fleet arrays are brought up to the
moment: all tokens that have come out, and no others, are counted.
"""

import math
from typing import Final

import numpy as np

from scheduling.compiled import compiled, compiled_inline, index
from scheduling.queueing.waiting_set import FREE_COUNT
from scheduling.simulation.cluster.choices import choose_endpoint, column, trigger
from scheduling.simulation.cluster.dispatcher import finish, land, pump, queue, queue_again, refuse
from scheduling.simulation.cluster.event_queue import set_time
from scheduling.simulation.cluster.state_changes import (
    DRAINING,
    NOTHING,
    READY,
    SCALE_IN,
    SCALE_OUT,
    SETTLE,
    TIMER_EXPIRED,
    TO_CALLER,
    act,
)
from scheduling.simulation.cluster.sweep import arm, end_sweep, expect_end, sweep, wait_anywhere
from scheduling.simulation.cluster.totals import observe_endpoint, sum_up, update_growth_totals, update_totals
from scheduling.simulation.cluster.world import World
from scheduling.simulation.engine.batch import begin, end
from scheduling.simulation.engine.state import IDLE, LEAVING, NONE

# Why the loop paused.
ALL_DONE: Final = 0
UNTIL: Final = 1
FULL: Final = 2  # the waiting set, a log or the delays drawn ahead are to be made larger
SCALE: Final = 3  # the reactive trigger wants an instance that has another model: called_endpoint
DRAINED: Final = 4  # called_instance has no work left and is to move to another endpoint

NOBODY: Final = -3
CONTROL: Final = -2
ARRIVAL: Final = -1
"""Sources of what happens, where it is not a node. At one moment, a node's event is over for sources above its number."""


@compiled_inline
def _set_out(world: World, request: int, link: int, reaches_s: float) -> None:
    """*request* is sent to another region, and *reaches_s* it."""
    world.travelling[request] = NONE
    if world.link[0, link] == NONE:
        world.link[0, link] = request
        set_time(world.events, 2 * world.fleet.endpoint.size + link, reaches_s)
    else:
        world.travelling[world.link[1, link]] = request
    world.link[1, link] = request


@compiled_inline
def _reach(world: World, link: int, source: int) -> int:
    """The first request on *link*, which reaches its region now."""
    request = int(world.link[0, link])
    following = int(world.travelling[request])
    world.link[0, link] = following
    regions = world.latency_s.shape[0]
    event_s = np.inf
    if following != NONE:
        event_s = world.arrivals.arrival_s[following] + world.latency_s[link // regions, link % regions]
    set_time(world.events, source, event_s)
    return request


@compiled_inline
def _run(
    world: World, until_s: float, endpoint: int, request: int, source: int, what: int, subject: int, after: int
) -> int:
    # What can happen meets in one place for each thing to do: every one is compiled once, and that takes long enough.
    arrivals, events, run_state, engines = world.arrivals, world.events, world.run_state[0], world.engines
    instances, links = world.fleet.endpoint.size, world.link.shape[1]
    requests, regions = arrivals.arrival_s.size, world.latency_s.shape[0]
    asked = source != NOBODY
    for each in range(world.policies.size):
        sum_up(world.fleet, world.endpoints, engines, each)
    again = False  # an instance became ready: its endpoint is pumped before time goes on
    sweeping = False  # what waits is looked at: the endpoint that a request moved to is pumped before the sweep goes on
    if not asked and run_state.sweep_node >= 0 and wait_anywhere(world):
        arm(world, float(run_state.now_s))
    while True:
        instance = reached = NONE
        now_s = float(run_state.now_s)
        if again:
            request = NONE
        elif sweeping:
            request = NONE
            endpoint = sweep(world, now_s, source)
            sweeping = endpoint >= 0
            if not sweeping:
                end_sweep(world, now_s, until_s)
                continue
        elif asked:
            for each in range(world.policies.size):
                observe_endpoint(world.fleet, world.endpoints, engines, each, now_s, source)
            if what != NOTHING:
                return act(world, what, subject, after, endpoint, until_s)
        else:
            if run_state.ended == requests:
                return ALL_DONE
            if world.waiting.counters[FREE_COUNT] <= engines.counters[LEAVING]:
                return FULL
            if world.decisions.size > 0 and world.decisions.size - run_state.decisions <= world.waiting.key.size:
                return FULL  # an event may give out all that wait
            if run_state.changes == world.lives.changes.size or run_state.reclaims == world.lives.reclaims_s.size:
                return FULL
            arrival = index(run_state.arrived)
            arrival_s = arrivals.arrival_s[arrival] if arrival < requests else math.inf
            node, event_s = index(events.node[1]), events.time_s[1]
            now_s = min(arrival_s, event_s)
            if now_s >= until_s:
                run_state.now_s = until_s
                return UNTIL
            run_state.now_s = now_s
            endpoint = request = NONE
            what = NOTHING
            if arrival_s <= event_s:
                source = ARRIVAL
                run_state.arrived = arrival + 1
                request = arrival
            else:
                source = node
                run_state.events += 1
                if node < instances:
                    instance = node
                elif node < 2 * instances:
                    what, subject = TIMER_EXPIRED, node - instances
                elif node < 2 * instances + links:
                    reached = _reach(world, node - 2 * instances, source)
                    endpoint = int(world.outcomes[reached].endpoint)
                elif node == run_state.sweep_node:
                    sweeping = True
                    continue
                else:
                    endpoint = node - 2 * instances - links
                    if endpoint >= world.policies.size:
                        land(world, endpoint - world.policies.size, now_s)
                        continue
        if request >= 0:
            endpoint = choose_endpoint(world, request, now_s, source)
            if endpoint < 0:
                if asked:
                    return NONE
                refuse(world, request)
                continue
            if not asked:
                origin, region = column(arrivals.region, request), int(world.policies[endpoint].region)
                if region != origin:
                    run_state.forwarded += 1
                latency_s = world.latency_s[origin, region]
                if latency_s > 0.0:
                    world.outcomes[request].endpoint = endpoint
                    _set_out(world, request, origin * regions + region, now_s + latency_s)
                    continue
            reached = request
        if reached >= 0:
            queue(world, reached, endpoint, column(world.kept_tokens, reached) == 0)
            if run_state.sweep_node >= 0:
                expect_end(world, reached, endpoint)
                arm(world, now_s)
        done = 0
        if instance >= 0 and engines.instances[instance].phase != IDLE:
            done = end(world.fleet, engines, instance, now_s, world.outcomes)
            update_totals(world.fleet, engines, instance)
        at, evicted = 0, NONE
        while True:
            if instance >= 0:
                if evicted != NONE:
                    endpoint, evicted = queue_again(world, evicted, now_s, source), NONE
                    if run_state.sweep_node >= 0:
                        arm(world, now_s)
                elif at == done:
                    break
                else:
                    evicted = finish(world, instance, index(engines.done[at]), now_s)
                    endpoint = index(world.fleet.endpoint[instance])
                    at += 1
            if endpoint >= 0:
                pump(world, endpoint, now_s, source)
            if instance < 0:
                break
        if asked:
            return endpoint
        if instance >= 0:
            set_time(events, instance, begin(engines, instance, now_s, world.outcomes))
            update_growth_totals(world.fleet, engines, instance)
            if world.lives.instances[instance].state == DRAINING and world.fleet.running[instance] == 0:
                what, subject = SETTLE, instance
        if reached >= 0 and run_state.reactive != 0:
            wanted = trigger(world, endpoint, now_s, source)
            if wanted != 0:
                what, subject = SCALE_OUT if wanted > 0 else SCALE_IN, endpoint
        if what == SCALE_IN:  # its look for the one with the least to do
            observe_endpoint(world.fleet, world.endpoints, engines, subject, now_s, source)
        again = False
        if what != NOTHING:
            changed = act(world, what, subject, NONE, NONE, math.inf)
            if changed == TO_CALLER:
                run_state.called_endpoint, run_state.called_instance = endpoint, instance
                return SCALE if what == SCALE_OUT else DRAINED
            if changed >= 0:
                if what == SCALE_OUT:
                    run_state.scale_outs += 1
                    world.policies[endpoint].scaled_s = now_s
                elif what == SCALE_IN:
                    run_state.scale_ins += 1
                    world.policies[endpoint].scaled_s = now_s
                again = world.lives.instances[changed].state == READY
                endpoint = int(world.fleet.endpoint[changed])
                reached = NONE
                what = NOTHING


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
