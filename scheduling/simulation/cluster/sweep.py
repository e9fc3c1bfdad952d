"""Sweep the waiting requests, as the gateway does: refuse what waited too long, move what is better off elsewhere.

A sweep runs every `SWEEP_S` while anything waits, by the rules of the live dispatcher (`routing.regions.better_home`,
`Requests.hold_s`). A move takes no time: the dispatcher holds the queues of all regions in its own memory.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled_inline, compiled_internal
from scheduling.queueing.virtual_queues import fit_groups, reassign
from scheduling.queueing.waiting_set import free_slot, peek, push, remove, withdraw
from scheduling.routing.regions import SWEEP_S, better_home
from scheduling.routing.routers import LEAST_DELAY
from scheduling.simulation.cluster.choices import candidates_of, column, is_opportunistic, wait_for_fallback
from scheduling.simulation.cluster.dispatcher import key_of, note_prefix, note_queued, refuse
from scheduling.simulation.cluster.event_queue import set_time
from scheduling.simulation.cluster.totals import observe_memory
from scheduling.simulation.cluster.world import World
from scheduling.simulation.engine.state import NONE

ROUNDING: Final = 1e-9
"""Of a number of sweeps since the first."""
TO_FALL_BACK: Final = -2
"""Answer of `sweep` in place of an endpoint."""


@compiled_inline
def arm(world: World, now_s: float) -> None:
    """Schedule the next sweep, unless one is due already: at a full second, or as a forked fleet did."""
    run_state = world.run_state[0]
    if run_state.sweep_node >= 0 and run_state.sweep_s == math.inf:
        first_s = float(run_state.first_sweep_s)
        rounding = ROUNDING if first_s > 0.0 else 0.0
        run_state.sweep_s = first_s + (math.floor((now_s - first_s) / SWEEP_S + rounding) + 1) * SWEEP_S
        set_time(world.events, int(run_state.sweep_node), float(run_state.sweep_s))


@compiled_inline
def _hold_s(world: World, request: int) -> float:
    hold_s = world.arrivals.hold_s
    return float(hold_s[request if hold_s.size > 1 else 0])


@compiled_inline
def expect_end(world: World, request: int, endpoint: int) -> None:
    """Note when *request*, which now waits for *endpoint*, expires."""
    policy = world.policies[endpoint]
    policy.expires_s = min(policy.expires_s, world.arrivals.arrival_s[request] + _hold_s(world, request))


@compiled_internal
def wait_anywhere(world: World) -> bool:
    """Whether any request waits."""
    count = 0
    for endpoint in range(world.policies.size):
        count += world.waiting.size[endpoint]
    return count > 0


@compiled_internal
def give_up(world: World, slot: int) -> None:
    """Refuse the request that waits in *slot*."""
    refuse(world, int(world.held[slot]))
    free_slot(world.waiting, slot)


@compiled_internal
def _expire(world: World, endpoint: int, now_s: float) -> None:
    """Refuse the requests that waited too long for *endpoint*."""
    arrivals, waiting, policy = world.arrivals, world.waiting, world.policies[endpoint]
    if now_s < policy.expires_s:
        return
    policy.expires_s = math.inf
    at = int(waiting.size[endpoint]) - 1
    while at >= 0:
        slot = int(waiting.heap[endpoint, at])
        request = int(world.held[slot])
        if world.outcomes[request].evictions > 0 or column(world.kept_tokens, request) > 0:  # it had started
            at -= 1
        elif now_s - arrivals.arrival_s[request] > _hold_s(world, request):
            world.run_state[0].expired += 1
            give_up(world, slot)
            at = min(at, int(waiting.size[endpoint]) - 1)  # another may be in its place now
        else:
            expect_end(world, request, endpoint)
            at -= 1


@compiled_inline
def _kind(world: World, request: int) -> int:
    """Return the kind of *request*: what differs between kinds is where they may go."""
    within = int(column(world.arrivals.region, request)) // int(world.run_state[0].regions)
    return 2 * within + is_opportunistic(world, request)


@compiled_internal
def _first_of(world: World, endpoint: int, kept: NDArray[np.uint8]) -> int:
    """Return the slot of the first request that waits for *endpoint* and is of no kind that is *kept*; -1 for none."""
    waiting, first = world.waiting, peek(world.waiting, endpoint)
    if first >= 0 and not kept[_kind(world, int(world.held[first]))]:
        return int(first)
    first = NONE
    if kept.size == 2 and world.policies.size == world.lives.fits.shape[0]:
        return first  # they are all of one kind
    for at in range(waiting.size[endpoint]):
        slot = int(waiting.heap[endpoint, at])
        if not kept[_kind(world, int(world.held[slot]))] and (
            first < 0 or (waiting.key[slot], waiting.sequence[slot]) < (waiting.key[first], waiting.sequence[first])
        ):
            first = slot
    return first


@compiled_internal
def _rehome(world: World, endpoint: int, now_s: float, source: int) -> int:
    """Move the first request of *endpoint* that is better off elsewhere, and return its new endpoint; else -1."""
    if peek(world.waiting, endpoint) < 0:
        return NONE
    fleet, endpoints, waiting, regions = world.fleet, world.endpoints, world.waiting, int(world.run_state[0].regions)
    policy, kept = world.policies[endpoint], world.kept_kinds
    threshold = float(policy.region_threshold)
    for kind in range(kept.size):
        kept[kind] = 0
    slot = _first_of(world, endpoint, kept)
    while slot >= 0:
        request = int(world.held[slot])
        kind = _kind(world, request)
        origin = int(policy.region) + regions * (kind // 2)
        first, last, _ = candidates_of(world, int(policy.model), origin, kind % 2 == 1)
        candidates = world.candidates[first:last]
        for at in range(candidates.size):
            observe_memory(fleet, endpoints, world.engines, int(candidates[at]), now_s, source)
        target = better_home(fleet, endpoints, candidates, waiting.size, endpoint, threshold, now_s)
        if target >= 0 and target != endpoint:
            prompt, output = int(waiting.prompt_tokens[slot]), int(waiting.output_tokens[slot])
            withdraw(waiting, slot)
            remove(waiting, slot)
            push(waiting, target, slot, key_of(world, request, target, prompt, output))
            note_queued(world, slot, target)
            world.outcomes[request].endpoint = target
            world.run_state[0].rehomed += 1
            expect_end(world, request, target)
            if world.policies[target].routing == LEAST_DELAY:
                note_prefix(world, slot, request)
            return int(target)
        if target < 0 and not _any_coming(world, candidates):
            give_up(world, slot)
        else:
            kept[kind] = 1
        slot = _first_of(world, endpoint, kept)
    return NONE


@compiled_inline
def _any_coming(world: World, candidates: NDArray[np.int32]) -> bool:
    coming = False
    for at in range(candidates.size):
        coming = coming or world.policies[candidates[at]].serving > 0
    return coming


@compiled_internal
def _keep_groups(world: World) -> None:
    """Fit request-group sizes to recent requests, and move groups to queues that an instance pulls."""
    groups, any_grouped = world.waiting.groups, False
    for endpoint in range(world.policies.size):
        if groups.limit[endpoint] > 0:
            any_grouped = True
            batches = float(world.policies[endpoint].group_batches)
            groups.limit[endpoint] = fit_groups(world.fleet, world.endpoints, groups, endpoint, batches)
    if any_grouped:
        reassign(world.fleet, world.endpoints, world.waiting)


@compiled_internal
def sweep(world: World, now_s: float, source: int) -> int:
    """Continue the sweep until a request moves; return the endpoint to pump before the next call, -1 at the end.

    TO_FALL_BACK where fallbacks may serve what waits for the current endpoint: the caller decides, and calls again.
    """
    run_state = world.run_state[0]
    if run_state.sweeping == 0 and run_state.swept_fallbacks == 0:
        _keep_groups(world)
    while run_state.sweeping < world.policies.size:
        endpoint = int(run_state.sweeping)
        if run_state.swept_fallbacks == 0 and wait_for_fallback(world, endpoint):
            run_state.swept_fallbacks = 1
            return TO_FALL_BACK
        _expire(world, endpoint, now_s)
        target = _rehome(world, endpoint, now_s, source)
        if target >= 0:
            run_state.swept_fallbacks = 1
            return target
        run_state.sweeping += 1
        run_state.swept_fallbacks = 0
    run_state.sweeping = 0
    return NONE


@compiled_internal
def end_sweep(world: World, now_s: float, until_s: float) -> None:
    """Schedule the next sweep, except if nothing would ever change: the run would never end."""
    run_state = world.run_state[0]
    run_state.sweep_s = math.inf
    set_time(world.events, int(run_state.sweep_node), math.inf)
    if not wait_anywhere(world):
        return
    may_change = until_s < math.inf or world.events.time_s[1] < math.inf
    may_change = may_change or run_state.arrived < world.arrivals.arrival_s.size
    for endpoint in range(world.policies.size):
        may_change = may_change or world.policies[endpoint].expires_s < math.inf
    if may_change:
        arm(world, now_s)
