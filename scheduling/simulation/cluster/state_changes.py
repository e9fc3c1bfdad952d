"""Compiled state changes of instances: those of the loop itself, and those that `lifecycle` requests.

Each action changes the state of at most one instance. The caller handles whatever needs more than the arrays (another
model's engine on an instance).
"""

import math
from typing import Any, Final

from scheduling.compiled import compiled_inline, compiled_internal
from scheduling.fleet.arrays import assign_endpoint
from scheduling.fleet.sleep_level import IN_MEMORY, count_swap, sleep_level
from scheduling.queueing.groups import NEXT_NUMBER
from scheduling.queueing.swapping.sharing import COMES, LEAVES, STAYS, WAITS, note_phase
from scheduling.queueing.virtual_queues import reassign
from scheduling.routing.adapters import forget_adapters
from scheduling.routing.prefix_affinity import forget
from scheduling.scaling.ranking import Source, addition_rank, drain_rank
from scheduling.simulation.cluster.event_queue import set_time
from scheduling.simulation.cluster.totals import sum_up
from scheduling.simulation.cluster.world import State, World, base_of, spot_of
from scheduling.simulation.engine.eviction import evict
from scheduling.simulation.engine.prefix_cache import empty_cache
from scheduling.simulation.engine.state import NONE

# Actions.
NOTHING: Final = 0
PUT: Final = 1  # an instance, into a state, for some time
START: Final = 2  # an instance, from its resting state
DRAIN: Final = 3  # an instance, and its next state, duration and endpoint
SETTLE: Final = 4  # an instance that is drained
TIMER_EXPIRED: Final = 5  # an instance: its state has timed out
SCALE_OUT: Final = 6  # an endpoint
SCALE_IN: Final = 7  # an endpoint
SWAP: Final = 8  # an instance, which takes the GPUs of its swap group
EVICT: Final = 9  # a sequence, which leaves its instance
BEGIN: Final = 10  # an instance between two iterations: the next ones (`loop.enter`)
GIVE: Final = 11  # a sequence, which has reached its instance (`loop.enter`)
ARRIVE: Final = 13  # a request of an application run (`loop.enter`)
CANCEL: Final = 14  # an endpoint: its start that is farthest from ready
WITHDRAW: Final = 12  # a slot of the waiting set, whose request is refused if `after` is 1 (`loop.enter`)
QUEUE: Final = 15  # a request of a fork, at an endpoint (`loop.enter`)
RESUME: Final = 16  # a sequence of a fork that decodes, at its instance (`loop.enter`)

TO_CALLER: Final = -2
"""Answer to an action besides an instance's number and NONE: the caller must handle it."""

# States as plain numbers.
EMPTY: Final = int(State.EMPTY)
STARTING: Final = int(State.STARTING)
LOADING: Final = int(State.LOADING)
READY: Final = int(State.READY)
DRAINING: Final = int(State.DRAINING)
SPOT: Final = int(State.SPOT)
RECLAIMING: Final = int(State.RECLAIMING)
FALLING_ASLEEP: Final = int(State.FALLING_ASLEEP)
ASLEEP: Final = int(State.ASLEEP)
WAKING: Final = int(State.WAKING)
FAILED: Final = int(State.FAILED)
LOST: Final = int(State.LOST)

_SOURCES: Final = {
    State.DRAINING: Source.TAKEN_BACK,
    State.SPOT: Source.OWN_SPOT,
    State.ASLEEP: Source.ASLEEP,
    State.EMPTY: Source.NEW,
}
SOURCE_OF: Final = tuple(int(_SOURCES.get(state, NONE)) for state in State)
"""Source from which an instance of the endpoint in each state is added; NONE: not possible."""
OTHER_SPOT: Final = int(Source.OTHER_SPOT)
LAST: Final = len(Source)
COMING: Final = 1 << STARTING | 1 << LOADING | 1 << READY | 1 << RECLAIMING | 1 << WAKING
"""Bits of the states of an instance that serves its endpoint or is about to."""
SHARING: Final = COMING | 1 << DRAINING | 1 << FALLING_ASLEEP | 1 << ASLEEP | 1 << EMPTY
"""The same for an instance that shares its GPUs: a swap may bring it up."""
WITHOUT_GPUS: Final = 1 << EMPTY | 1 << ASLEEP | 1 << FAILED | 1 << LOST
"""Bits of the states in which an instance leaves its shared GPUs to others."""
SWAPPABLE: Final = 1 << READY | 1 << DRAINING
"""Bits of the states from which an instance may be put to sleep for another."""


@compiled_inline
def _serves(life: Any, state: int) -> int:
    """Return 1 if an instance in *state* serves its endpoint or will, else 0."""
    return (SHARING if life.swap_group >= 0 else COMING) >> state & 1


@compiled_internal
def _holder(world: World, group: int) -> int:
    """Return the instance that has the GPUs of the swap group, NONE if none has."""
    instances = world.lives.instances
    for instance in range(instances.size):
        if instances[instance].swap_group == group and not WITHOUT_GPUS >> instances[instance].state & 1:
            return instance
    return NONE


@compiled_internal
def _are_taken(world: World, group: int) -> bool:
    """Whether an instance of the swap group has the GPUs, or is about to."""
    return bool(world.lives.groups[group].target >= 0) or _holder(world, group) >= 0


@compiled_internal
def _pass_gpus(world: World, instance: int, before: int, after: int, now_s: float, lasts_s: float) -> None:
    """Update the swap group of *instance*, which changes from *before* to *after*, a state that lasts *lasts_s*."""
    life = world.lives.instances[instance]
    group = world.lives.groups[life.swap_group]
    if after == FALLING_ASLEEP:
        life.in_memory = sleep_level(world.lives.instances, instance, float(group.memory_bytes)) == IN_MEMORY
    elif after != ASLEEP:
        life.in_memory = 0
    if group.target == instance:
        group.target = NONE
    elif group.target >= 0 and before in (READY, DRAINING) and after != DRAINING:
        if after == FALLING_ASLEEP:
            set_time(world.events, world.fleet.endpoint.size + int(group.target), now_s + lasts_s)
        elif WITHOUT_GPUS >> after & 1:
            set_time(world.events, world.fleet.endpoint.size + int(group.target), now_s)
        else:  # it keeps the GPUs after all
            note_phase(world.waiting.groups, int(group.target), STAYS, 0.0)
            group.target = NONE
    if after in (WAKING, LOADING):
        count_swap(world.lives.instances, instance)
        note_phase(world.waiting.groups, instance, COMES, now_s + lasts_s)
    elif after not in (DRAINING, FALLING_ASLEEP):
        note_phase(world.waiting.groups, instance, STAYS, 0.0)


@compiled_inline
def _evict_all(world: World, instance: int) -> None:
    """Evict every request of *instance*, which leaves the spot pool, at the end of its iteration; those on their way too."""
    engines = world.engines
    sequences, engine = engines.sequences, engines.instances[instance]
    on_the_way = int(world.sent[0, world.fleet.endpoint[instance]])
    for first in (int(engine.first_running), int(engine.first_waiting), on_the_way):
        at = first
        while at != NONE:
            if sequences[at].instance == instance and sequences[at].evicted == 0:
                event_s = evict(engines, instance, at)
                if event_s >= 0.0:
                    set_time(world.events, instance, event_s)
            at = int(sequences[at].next)


@compiled_inline
def _place(world: World, instance: int, before: int, after: int) -> int:
    """Note whether *instance* accepts work in the state *after*; return its endpoint, not counting that of donated ones.

    A donated instance, and one whose requests leave it, is at the endpoint of donated instances.
    """
    fleet = world.fleet
    endpoint = int(fleet.endpoint[instance])
    own = base_of(world, endpoint)
    spot = spot_of(world, own) if world.lives.instances[instance].swap_group < 0 else NONE
    fleet.accepting[instance] = int(after == READY or (after == SPOT and spot >= 0))
    lent = after in (SPOT, RECLAIMING) or (after == DRAINING and before == SPOT)
    to = spot if lent and spot >= 0 else own
    if to == endpoint:
        sum_up(fleet, world.endpoints, world.engines, endpoint)
        return own
    assign_endpoint(fleet, world.endpoints, instance, to)
    fleet.ahead_limit[instance] = world.policies[to].requests_ahead_limit
    for each in range(world.policies.size):  # their instances are listed at other positions now
        sum_up(fleet, world.endpoints, world.engines, each)
    return own


@compiled_inline
def _put(world: World, instance: int, after: int, now_s: float, lasts_s: float) -> None:
    """Put *instance* into the state *after*; for *lasts_s*, or until the next decision."""
    fleet, lives, run_state = world.fleet, world.lives, world.run_state[0]
    life = lives.instances[instance]
    before = int(life.state)
    lives.spent_s[instance, before] += now_s - life.since_s
    life.since_s = now_s
    life.state = after
    endpoint = _place(world, instance, before, after)
    if before == SPOT and after in (RECLAIMING, DRAINING):
        _evict_all(world, instance)
    world.policies[endpoint].serving += _serves(life, after) - _serves(life, before)
    if after not in (READY, DRAINING):  # only a serving instance keeps its cache
        forget(fleet, instance)
        forget_adapters(fleet, instance)
        if run_state.caches != 0:
            empty_cache(world.engines, instance)
    set_time(world.events, fleet.endpoint.size + instance, now_s + lasts_s)
    if life.swap_group >= 0:
        _pass_gpus(world, instance, before, after, now_s, lasts_s)
    change = lives.changes[run_state.changes]
    change.time_s, change.instance, change.endpoint = now_s, instance, endpoint
    change.before, change.after = before, after
    run_state.changes += 1
    if world.waiting.groups.counters[NEXT_NUMBER] > 0:
        reassign(fleet, world.endpoints, world.waiting)


@compiled_inline
def _first_to_add(world: World, endpoint: int) -> int:
    """Return the instance to add to *endpoint* by `addition_rank`; TO_CALLER for another model's, NONE for none."""
    lives, members, run_state = world.lives, world.endpoints.members, world.run_state[0]
    chosen, best = NONE, (LAST, math.inf, LAST, math.inf)
    for each in (endpoint, spot_of(world, endpoint)):
        if each < 0:
            continue
        for at in range(world.endpoints.first[each], world.endpoints.first[each + 1]):
            life = lives.instances[members[at]]
            source = SOURCE_OF[life.state]
            if source == NONE or life.swap_group >= 0 or (life.state == DRAINING and life.goal_endpoint >= 0):
                continue
            serves_in_s = 0.0
            if life.state == SPOT:
                serves_in_s = float(life.reclaim_times * run_state.spot_median_s)
            elif life.state == ASLEEP:
                serves_in_s = float(run_state.wake_s)
            rank = addition_rank(source, serves_in_s, float(life.usd_per_hour), False)
            if rank < best:
                chosen, best = int(members[at]), rank
    if run_state.share_spot != 0 and addition_rank(OTHER_SPOT, float(lives.redeploy_s[endpoint]), 0.0, False) < best:
        for instance in range(lives.instances.size):
            life = lives.instances[instance]
            if lives.fits[endpoint, instance] != 0 and life.state == SPOT and life.swap_group < 0:
                return TO_CALLER
    return chosen


@compiled_inline
def _first_to_drain(world: World, endpoint: int) -> int:
    """Return the ready instance of *endpoint* that drains first by `drain_rank`; NONE if none is ready."""
    chosen, best = NONE, (math.inf, math.inf)
    for at in range(world.endpoints.first[endpoint], world.endpoints.first[endpoint + 1]):
        instance = int(world.endpoints.members[at])
        life = world.lives.instances[instance]
        if life.state != READY or life.swap_group >= 0:
            continue
        rank = drain_rank(float(life.usd_per_hour), float(world.fleet.remaining_tokens[instance]))
        if rank < best:
            chosen, best = instance, rank
    return chosen


@compiled_inline
def _first_to_cancel(world: World, endpoint: int) -> int:
    """Return the starting instance of *endpoint* that would be ready last; NONE if none is."""
    chosen, last_s = NONE, -math.inf
    for at in range(world.endpoints.first[endpoint], world.endpoints.first[endpoint + 1]):
        instance = int(world.endpoints.members[at])
        life = world.lives.instances[instance]
        if not (1 << STARTING | 1 << LOADING) >> life.state & 1 or life.swap_group >= 0:
            continue
        leaf = (world.events.time_s.size >> 1) + world.fleet.endpoint.size + instance
        ready_s = world.events.time_s[leaf] + (life.loading_s if life.state == STARTING else 0.0)
        if ready_s >= last_s:
            chosen, last_s = instance, ready_s
    return chosen


@compiled_inline
def _take_gpus(life: Any) -> tuple[int, float]:
    """Return the state of a swap-group instance that gets the GPUs, and how long it lasts."""
    if life.state == EMPTY:
        return LOADING, float(life.local_weights_s)
    return WAKING, float(life.wake_s if life.in_memory != 0 else life.reload_s)


@compiled_internal
def _gives_way(world: World, target: int) -> int:
    """Return the instance that must sleep for *target*, of a swap group; *target* if the GPUs are free, NONE if it cannot.

    Notes the swap; the instance returned is to be drained.
    """
    life = world.lives.instances[target]
    if life.swap_group < 0 or life.state not in (ASLEEP, EMPTY):
        return NONE
    group = world.lives.groups[life.swap_group]
    holder = _holder(world, int(life.swap_group))
    if group.target >= 0 or (holder >= 0 and not SWAPPABLE >> world.lives.instances[holder].state & 1):
        return NONE
    group.swaps += 1
    if holder < 0:
        return target
    group.target = target
    note_phase(world.waiting.groups, holder, LEAVES, 0.0)
    note_phase(world.waiting.groups, target, WAITS, 0.0)
    return holder


@compiled_internal
def act(world: World, what: int, at: int, after: int, endpoint: int, lasts_s: float) -> int:
    """Do *what* to the instance, endpoint or sequence *at*; return the affected instance, NONE, or TO_CALLER.

    PUT and DRAIN take the next state and its duration, DRAIN also the *endpoint* to move to, NONE for the same. SWAP gives
    the GPUs of its swap group to the instance *at*: their holder first finishes its requests and sleeps.
    """
    lives, run_state = world.lives, world.run_state[0]
    now_s = float(run_state.now_s)
    instance = at
    if what == EVICT:
        instance = int(world.engines.sequences[at].instance)
        event_s = evict(world.engines, instance, at)
        if event_s >= 0.0:
            set_time(world.events, instance, event_s)
        return instance
    if what == SCALE_OUT:
        instance = _first_to_add(world, at)
    elif what == CANCEL:
        instance = _first_to_cancel(world, at)
        after, lasts_s = EMPTY, math.inf
    elif what == SCALE_IN:
        instance = _first_to_drain(world, at)
        after, endpoint, lasts_s = SPOT, NONE, math.inf
    elif what == SWAP:
        instance = _gives_way(world, at)
        if instance >= 0 and instance != at:
            what, after, endpoint, lasts_s = DRAIN, FALLING_ASLEEP, NONE, lives.instances[instance].sleep_s
        else:
            what = START
    if instance < 0:
        return instance
    life = lives.instances[instance]
    state = int(life.state)
    if what in (START, SCALE_OUT):
        lasts_s = math.inf
        if life.swap_group >= 0 and state in (EMPTY, ASLEEP):
            if _are_taken(world, int(life.swap_group)):
                return NONE
            after, lasts_s = _take_gpus(life)
        elif state == EMPTY:
            after, lasts_s = STARTING, life.start_s
            life.loading_s = life.remote_weights_s
        elif state == SPOT:
            after, lasts_s = RECLAIMING, life.reclaim_times * lives.reclaims_s[run_state.reclaims]
            run_state.reclaims += 1
            life.goal_s = now_s + lasts_s
        elif state == ASLEEP:
            after, lasts_s = WAKING, run_state.wake_s
        elif state == DRAINING and life.goal_endpoint < 0:
            after = READY
        else:
            return NONE
    elif what == TIMER_EXPIRED and state == RECLAIMING and world.fleet.running[instance] > 0:
        set_time(world.events, world.fleet.endpoint.size + instance, math.inf)  # until its requests have left
        return NONE
    elif what == TIMER_EXPIRED:
        after, lasts_s = READY, math.inf
        if life.swap_group >= 0 and state in (EMPTY, ASLEEP):
            after, lasts_s = _take_gpus(life)
        elif life.swap_group >= 0 and state == FAILED and _are_taken(world, int(life.swap_group)):
            after = EMPTY  # another has its GPUs by now
        elif state in (STARTING, FAILED):
            after, lasts_s = LOADING, life.loading_s
            life.loading_s = life.local_weights_s
        elif state == FALLING_ASLEEP:
            after = ASLEEP
        elif state == LOST:
            after = EMPTY
    elif what in (DRAIN, SCALE_IN):
        life.goal, life.goal_endpoint, life.goal_s = after, endpoint, lasts_s
        if world.fleet.running[instance] > 0:
            if state == DRAINING:
                return instance
            after, lasts_s = DRAINING, math.inf
        elif endpoint >= 0:
            return TO_CALLER
    elif what == SETTLE:
        if life.goal_endpoint >= 0:
            return TO_CALLER
        after, lasts_s = int(life.goal), life.goal_s
    _put(world, instance, int(after), now_s, float(lasts_s))
    return instance
