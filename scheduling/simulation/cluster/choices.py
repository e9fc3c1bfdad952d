"""Decisions of the live kernels, computed from bounds: which region, which instance, how many.

The region and the shortest queue are chosen by the bodies of the kernels (`regions.first_choice`, `routers.shortest_queue`).
The kernels read fleet arrays that are up to date at every instance; here they read bounds, and tokens are counted only for
instances that the bounds cannot separate.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled_inline, compiled_internal, index
from scheduling.policy import MEMORY
from scheduling.queueing.held import HELD, OPPORTUNISTIC
from scheduling.routing.regions import asked_work_s, backlog_s, first_choice, first_with_room, fullness
from scheduling.routing.routers import has_room, shortest_queue
from scheduling.scaling.reactive import reactive_move
from scheduling.simulation.cluster.totals import grown_at_most, grown_tokens, observe_memory, report
from scheduling.simulation.cluster.world import World, base_of
from scheduling.simulation.engine.state import NONE

Moment = tuple[World, float, int]
"""The fleet at a time, as a source of events sees it."""
Waiting = tuple[World, int, float, int]
"""The same, with the slot of a waiting request in between."""


@compiled_inline
def column(values: NDArray[np.integer[Any]], request: int) -> int:
    """Return the value of *request* in a column that may have one element for all."""
    return int(values[request if values.size > 1 else 0])


@compiled_inline
def _most_left(seen: Waiting, at: int, fewest: float) -> float:
    """Return an upper bound of what is left; `least_tokens` is the lower bound of the instance, infinity without room.

    The number of ended iterations of a segment is bounded from both sides without a square root.
    """
    world, slot, now_s, source = seen
    fleet, engines, least_tokens = world.fleet, world.engines, world.least_tokens
    prompt_tokens, output_tokens = world.waiting.prompt_tokens[slot], world.waiting.output_tokens[slot]
    instance = index(engines.open[index(at)])
    least_tokens[index(at)] = math.inf
    if not has_room(fleet, instance, prompt_tokens, output_tokens):
        return math.inf
    engine = engines.instances[instance]
    if engines.exceeding[instance] != 0:
        beyond = engine.step_decodes - engine.step_within
        if not has_room(fleet, instance, prompt_tokens, output_tokens + beyond * (engine.steps - engine.counted)):
            # Not if it were at the end of its segment.
            grown = int(grown_tokens(engines, instance, now_s)) + 1
            if not has_room(fleet, instance, prompt_tokens, output_tokens + grown):
                report(fleet, engines, instance, now_s, source)
                if not has_room(fleet, instance, prompt_tokens, output_tokens):
                    return math.inf
    least = most = float(fleet.remaining_tokens[instance])
    if engine.next_s <= now_s:
        passed_s, steps, counted = now_s - engine.started_s, float(engine.steps), float(engine.counted)
        # One more and two fewer than the bounds: an iteration may end now, and sums are rounded.
        least -= engine.step_within * (min(passed_s * engine.most_per_s + 1.0, steps) - counted)
        if least > fewest:
            return math.inf
        most -= engine.step_within * max(min(passed_s * engine.least_per_s - 2.0, steps) - counted, 0.0)
    least_tokens[index(at)] = least
    return most


@compiled_inline
def _may_have(seen: Waiting, at: int, fewest: float) -> bool:
    world, _, _, _ = seen
    return bool(world.least_tokens[index(at)] <= fewest)


@compiled_inline
def _tokens_left(seen: Waiting, at: int) -> int:
    world, _, now_s, source = seen
    instance = index(world.engines.open[index(at)])
    report(world.fleet, world.engines, instance, now_s, source)
    return int(world.fleet.remaining_tokens[instance])


@compiled_inline
def shortest(world: World, endpoint: int, slot: int, now_s: float, source: int) -> int:
    """Return the choice of `routing.join_shortest_queue` for *slot*, at an endpoint that is not up to date."""
    engines, first = world.engines, index(world.endpoints.first[endpoint])
    last = first + index(engines.totals[endpoint].open)
    at = shortest_queue(first, last, _most_left, _may_have, _tokens_left, (world, slot, now_s, source))
    return index(engines.open[index(at)]) if at >= 0 else NONE


@compiled_inline
def _fullness(
    world: World, endpoint: int, more_tokens: int, left_s: float, now_s: float, memory: bool = False
) -> float:
    """Return `regions.pressure` of *endpoint*, whose sums lack *more_tokens*, or use of *memory* alone; *left_s* is its
    backlog.
    """
    total = world.engines.totals[endpoint]
    if memory and total.kv_capacity_tokens > 0:
        return float((total.kv_tokens + more_tokens) / total.kv_capacity_tokens)
    return fullness(
        total.kv_tokens + more_tokens,
        total.kv_capacity_tokens,
        total.running,
        total.sequences,
        int(world.waiting.size[endpoint]),
        int(total.open),
        asked_work_s(world.endpoints, endpoint, now_s),
        left_s,
    )


@compiled_inline
def _pressure(
    world: World, endpoint: int, low: float, high: float, left_s: float, now_s: float, source: int, memory: bool = False
) -> float:
    """Return a number that compares with *low* and *high* as `regions.pressure` of *endpoint* with backlog *left_s* does, or
    its use of *memory* alone.

    The memory growth by sequences beyond their expected tokens is bounded, and mostly the bound suffices.
    """
    least = _fullness(world, endpoint, 0, left_s, now_s, memory)
    if least > high:
        return least
    most = _fullness(world, endpoint, grown_at_most(world.engines, endpoint, now_s), left_s, now_s, memory)
    if most < low or (least >= low and most <= high):
        return least
    observe_memory(world.fleet, world.endpoints, world.engines, endpoint, now_s, source)
    return _fullness(world, endpoint, 0, left_s, now_s, memory)


@compiled_inline
def _is_below(seen: Moment, endpoint: int, threshold: float) -> bool:
    world, now_s, source = seen
    left_s = backlog_s(world.endpoints, endpoint, now_s)
    return _pressure(world, endpoint, threshold, math.inf, left_s, now_s, source) < threshold


@compiled_inline
def _use(seen: Moment, endpoint: int) -> float:
    world, now_s, source = seen
    observe_memory(world.fleet, world.endpoints, world.engines, endpoint, now_s, source)
    return _fullness(world, endpoint, 0, backlog_s(world.endpoints, endpoint, now_s), now_s)


@compiled_inline
def candidates_of(world: World, model: int, origin: int, opportunistic: bool) -> tuple[int, int, int]:
    """Return where in `World.candidates` those of a request begin and end, and how many of them are donated instances'."""
    at, lent = model * world.latency_s.shape[0] + origin, 0
    if opportunistic and world.policies.size > world.lives.fits.shape[0]:
        lent = int(world.candidate_first[at + 1] - world.candidate_first[at])
        at += (world.candidate_first.size - 1) // 2
    return int(world.candidate_first[at]), int(world.candidate_first[at + 1]), lent


@compiled_inline
def is_opportunistic(world: World, request: int) -> bool:
    return column(world.arrivals.held, request) & OPPORTUNISTIC != 0


@compiled_internal
def spot_with_room(world: World, request: int) -> int:
    """Return the nearest donated instances that *request* may go to on arrival, by their endpoint; -1 for none."""
    if not is_opportunistic(world, request):
        return NONE
    model, region = column(world.arrivals.model, request), column(world.arrivals.region, request)
    first, _, lent = candidates_of(world, model, region, True)
    return int(
        first_with_room(world.fleet, world.endpoints, world.candidates[first : first + lent], world.waiting.size)
    )


@compiled_internal
def choose_endpoint(world: World, request: int, now_s: float, source: int) -> int:
    """Return the global router's endpoint for *request*; -1 if nothing serves its model or soon will."""
    model, region = column(world.arrivals.model, request), column(world.arrivals.region, request)
    first, last, _ = candidates_of(world, model, region, is_opportunistic(world, request))
    candidates = world.candidates[first:last]
    if candidates.size == 0:
        return -1
    threshold = float(world.policies[candidates[0]].region_threshold)
    chosen = first_choice(candidates, threshold, _is_below, _use, (world, now_s, source))
    if chosen != NONE:
        return chosen
    for rank in range(candidates.size):
        if world.policies[candidates[rank]].serving > 0:
            return int(candidates[rank])
    return -1


@compiled_internal
def may_fall_back(world: World, request: int) -> bool:
    """Whether the fallback of its model may serve *request*: it has not begun, and the queue manager does not hold it."""
    if world.fallback.size == 0 or world.fallback[column(world.arrivals.model, request)] < 0:
        return False
    begun = world.outcomes[request].evictions > 0 or column(world.kept_tokens, request) > 0
    held = column(world.arrivals.held, request) & HELD != 0
    return world.may_fall_back[request] != 0 and not begun and not held


@compiled_inline
def is_full(world: World, endpoint: int) -> bool:
    """Whether the queue of *endpoint* takes no request that comes."""
    return bool(world.waiting.size[endpoint] >= world.policies[endpoint].queue_bound)


@compiled_inline
def is_taken(world: World, endpoint: int) -> bool:
    """Whether *endpoint* takes a request that comes: an instance accepts work there, and its queue is not full."""
    if endpoint < 0 or world.engines.totals[endpoint].open == 0:
        return False
    return not is_full(world, endpoint)


@compiled_internal
def wait_for_fallback(world: World, endpoint: int) -> bool:
    """Whether a request that waits for *endpoint* may wait too long for its model, or nothing serves that any longer."""
    if world.fallback.size == 0 or base_of(world, endpoint) != endpoint:
        return False
    model, waiting, serves = int(world.policies[endpoint].model), world.waiting, False
    if world.fallback[model] < 0 or waiting.size[endpoint] == 0:
        return False
    first, last, _ = candidates_of(world, model, int(world.policies[endpoint].region), False)
    for at in range(first, last):
        serves = serves or world.engines.totals[world.candidates[at]].open > 0
    serves = serves and world.fallback_wait_s[model] == math.inf
    for at in range(waiting.size[endpoint]):
        slot = int(waiting.heap[endpoint, at])
        request = int(world.held[slot])
        bound = column(world.arrivals.region, request) >= world.run_state[0].regions  # what serves may not serve it
        if (bound or not serves) and may_fall_back(world, request):
            return True
    return False


@compiled_inline
def trigger(world: World, endpoint: int, now_s: float, source: int) -> int:
    """Return the reactive trigger's move for *endpoint*, which a request has just reached."""
    run_state, policy = world.run_state[0], world.policies[endpoint]
    since_s, cooldown_s = now_s - float(policy.scaled_s), float(run_state.cooldown_s)
    if since_s < cooldown_s:
        return 0
    above, below = float(run_state.out_above), float(run_state.in_below)
    # Without the backlog, which is mostly this very request: instances take longer to start than it takes to be served.
    use = _pressure(world, endpoint, below, above, 0.0, now_s, source, policy.scale_by == MEMORY)
    least, most = int(run_state.min_instances), int(run_state.max_instances)
    # Without patience, instances on the way count as ready, and no other condition applies.
    return reactive_move(use, int(policy.serving), 0, 0, since_s, 0.0, above, below, cooldown_s, least, most, 0.0)
