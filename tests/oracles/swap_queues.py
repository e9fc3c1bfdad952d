"""Where a group goes in the virtual queue of instances that share their GPUs, said as plainly as can be."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class PlainGroup(NamedTuple):
    """Times are seconds from now."""

    model: int
    due_s: float
    service_s: float
    count: int
    pinned: bool = False


def starts(queue: Sequence[PlainGroup], awake: int, swap_s: Mapping[int, float]) -> tuple[list[float], float, int]:
    """When each group of *queue* begins; when all are served, and which model is up then."""
    begins, time_s, model = [], 0.0, awake
    for group in queue:
        time_s += swap_s[group.model] if group.model != model else 0.0
        begins.append(time_s)
        time_s, model = time_s + group.service_s, group.model
    return begins, time_s, model


def place(
    queue: Sequence[PlainGroup], new: PlainGroup, awake: int, swap_s: Mapping[int, float]
) -> tuple[float, int, int]:
    """When *new* begins, the requests behind it, and the group before which it stands (the length of *queue*: at the end).

    *awake*: the model that has the GPUs, -1 while a swap is in progress.
    """
    begins, _, _ = starts(queue, awake, swap_s)
    coming = 0  # groups at the front of the model that comes up
    while awake < 0 and coming < len(queue) and queue[coming].model == queue[0].model:
        coming += 1

    def may_be_passed(at: int) -> bool:
        group = queue[at]
        if group.pinned:
            return False
        if group.model == new.model:
            return group.due_s > new.due_s
        return at >= coming and begins[at] + new.service_s <= group.due_s

    at = len(queue)
    while at > 0 and may_be_passed(at - 1):
        at -= 1
    if (queue[at - 1].model if at else awake) != new.model:
        at = next((other for other in range(at, len(queue)) if queue[other].model == new.model), len(queue))
    _, time_s, model = starts(queue[:at], awake, swap_s)
    time_s += swap_s[new.model] if model != new.model else 0.0
    return time_s, sum(group.count for group in queue[at:]), at
