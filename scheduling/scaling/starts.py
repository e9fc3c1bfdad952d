"""Starts that are no longer needed, as when a burst is over before its instances are ready: they are cancelled.

A strategy may remove what it wants; this rule is beneath all of them and the floor, and cancels starts only. The rest must
serve the present load with room to spare, and keep what a valid plan wants. What is asked for again soon after a
cancellation is left to finish, so that recurring bursts shorter than a start get their instances.
"""

from math import ceil, inf
from typing import Final

from scheduling.scaling.endpoint import EndpointView, Wish, percent

AIM: Final = 0.5
"""Use that the rest may have at most. Well below the use that adds instances: cancelled starts are not asked for again."""
AGAIN_S: Final = 1800.0
"""Time after a cancellation in which starts that were asked for since are kept."""


def needed(view: EndpointView, kept: int = 0) -> int:
    """Return the instances that the load of *view* needs, at least its minimum, *kept*, and one."""
    if view.waiting and (view.short_instances or (not view.ready and not view.requests_at_once)):
        return view.instances
    if view.ready:
        load = inf if view.use == inf else ceil(view.use * view.ready / AIM - 1e-9)
    else:
        load = ceil(view.waiting / (view.requests_at_once or 1))
    return int(min(max(load, view.min_instances, kept, 1), max(view.instances, 1)))


def cancelled(view: EndpointView, now_s: float, memory: dict[str, float], patience_s: float, *, kept: int = 0) -> Wish:
    """Return the negative number of starts at *view* to cancel, and why; 0 for none.

    They must have been spare for *patience_s* without a change. *kept*: instances that a plan wants. *memory* is the
    caller's, between ticks.
    """
    since, least, last = (f"{view.key}|{what}" for what in ("spare_since_s", "spare_starts", "cancelled_s"))
    spare = min(view.coming, view.instances - needed(view, kept))
    again = view.changed_delta > 0 and now_s - memory.get(last, -inf) < AGAIN_S
    if spare < 1 or again:
        memory.pop(since, None)
        memory.pop(least, None)
        return 0, ""
    lasted_s = now_s - memory.setdefault(since, now_s)
    spare = int(min(spare, memory.get(least, spare)))
    memory[least] = spare
    if min(lasted_s, view.since_change_s) < patience_s:
        return 0, ""
    memory.pop(since)
    memory.pop(least)
    memory[last] = now_s
    use = percent(view.use * view.ready / (view.instances - spare)) if view.ready else "0%"
    return -spare, f"Without {spare} of {view.coming} starts, use would be {use}, for {lasted_s:.0f} s"
