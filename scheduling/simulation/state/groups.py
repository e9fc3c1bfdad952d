"""Request groups and virtual queues, put together as they were."""

from typing import Any

import numpy as np

from scheduling.queueing.global_scheduler import GlobalScheduler
from scheduling.queueing.groups import FREE_GROUPS, KNOWN_CLASSES, NEXT_NUMBER, NONE, GroupArrays, put_before
from scheduling.simulation.state.records import Groups


def place_groups(arrays: GroupArrays, state: Groups, slots: list[int], now_s: float) -> None:
    """Write the groups of *state*, at *now_s*, into the empty *arrays*; *slots* of the waiting set are those of what waits,
    in order."""
    for group in state.groups:
        this: Any = arrays.groups[group.place]
        for name in ("endpoint", "kind", "number", "joined", "prompt_tokens", "output_tokens", "opened_s"):
            this[name] = getattr(group, name)
        this.hold_until_s, this.pinned = group.hold_until_s, group.pinned
        members = [slots[at] for at in group.members]
        this.first, this.last, this.count = members[0], members[-1], len(members)
        for before, slot, after in zip([NONE, *members], members, [*members[1:], NONE], strict=False):
            arrays.members[slot] = (group.place, after, before)
        if group.is_open:
            arrays.open[group.endpoint, group.kind] = group.place
    for group in sorted(state.groups, key=lambda each: (each.queue, each.rank)):
        if group.queue >= 0:
            put_before(arrays, group.place, group.queue, NONE)
    arrays.mean_tokens[:] = state.mean_tokens
    arrays.mean_output[:] = 0.5 * arrays.mean_tokens if state.mean_output is None else state.mean_output
    arrays.moment_s[0] = now_s if state.joined_s is None else state.joined_s
    for at, (priority, due_ms) in enumerate(state.classes):
        arrays.class_priority[at], arrays.class_due_ms[at] = priority, due_ms
    in_use = {group.place for group in state.groups}
    known = in_use | set(state.free_places)
    never = [place for place in range(arrays.groups.size - 1, -1, -1) if place not in known]
    free = np.array([*never, *state.free_places], np.int32)
    arrays.free[: free.size] = free
    arrays.counters[FREE_GROUPS], arrays.counters[NEXT_NUMBER] = free.size, state.next_number
    arrays.counters[KNOWN_CLASSES] = len(state.classes)


def resume_reordering(scheduler: GlobalScheduler, state: Groups, places: int) -> None:
    """Let *scheduler* know what the one of *state* knew, of queues with so many *places* for groups."""
    made, in_use = state.tried
    scheduler.tried, scheduler.tried_s = (made, places - in_use), state.tried_s
    scheduler.short_instances = dict(state.short_instances)
