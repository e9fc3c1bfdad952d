"""Plain twin of group placement and waits in the virtual queue of instances that share their GPUs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class PlainGroup(NamedTuple):
    """Times are seconds from now."""

    model: int
    due_s: float
    service_s: float
    count: int
    pinned: bool = False


class PlainGpus(NamedTuple):
    """GPUs shared by models."""

    sleep_s: Mapping[int, float]
    load_s: Mapping[int, float]
    batch: Mapping[int, float]
    """Concurrent requests, by model."""
    drain_s: Callable[[int, float], float]
    """Seconds until that many requests of a model have ended."""
    model: int = -1
    """Model that has the GPUs or is starting; -1 for none."""
    ready_s: float = 0.0
    """Seconds until it serves; above 0 while it starts."""
    running: float = 0.0
    comes: bool = False

    def change_s(self, before: int, running: float, after: int) -> float:
        if before == -1:
            return self.load_s[after]
        return self.drain_s(before, running) + self.sleep_s[before] + self.load_s[after]


def walk(queue: Sequence[PlainGroup], gpus: PlainGpus) -> tuple[list[float], float, int, float]:
    """Return the start of each group of *queue*, and for its end: the time, the model that is up, and its running
    requests.
    """
    begins, time_s, model, running = [], gpus.ready_s, gpus.model, gpus.running
    for group in queue:
        if group.model != model:
            time_s += gpus.change_s(model, running, group.model)
            model, running = group.model, 0.0
        begins.append(time_s)
        time_s += group.service_s
        running = min(gpus.batch[model], running + group.count)
    return begins, time_s, model, running


def until_up(queue: Sequence[PlainGroup], model: int, gpus: PlainGpus) -> float:
    """Return the start of a group of *model* placed behind *queue*."""
    _, time_s, up, running = walk(queue, gpus)
    return time_s if up == model else time_s + gpus.change_s(up, running, model)


def place(queue: Sequence[PlainGroup], new: PlainGroup, gpus: PlainGpus) -> tuple[float, int, int]:
    """Return the start of *new*, the requests behind it, and the group it goes before (the length of *queue*: at
    the end).
    """
    begins, *_ = walk(queue, gpus)
    coming = 0  # groups at the front of the model that is starting, or would start on free GPUs
    comes_up = gpus.model if gpus.model >= 0 else queue[0].model if queue else -1
    while (gpus.comes or gpus.model < 0) and coming < len(queue) and queue[coming].model == comes_up:
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
    if (queue[at - 1].model if at else gpus.model) != new.model:
        at = next((other for other in range(at, len(queue)) if queue[other].model == new.model), len(queue))
    return until_up(queue[:at], new.model, gpus), sum(group.count for group in queue[at:]), at


def others_before(queue: Sequence[PlainGroup], own: int, gpus: PlainGpus, since_s: float) -> tuple[float, int]:
    """Return the seconds for other models and swaps until a request of *own* is served behind *queue*, and the groups of
    other models that are served before.

    The busy holder of the GPUs, which has had them since *since_s*, keeps them for half the rest of its longest stay, and
    while it is *own* that has them the others wait.
    """
    time_s, model, running, count = gpus.ready_s, gpus.model, gpus.running, 0
    for group in [*queue, None]:
        after = own if group is None else group.model
        if after != model:
            stay_s = 10.0 * (gpus.sleep_s[model] + gpus.load_s[after]) if running else -math.inf
            rest_s = max(0.0, since_s + stay_s - time_s)
            if model == own and rest_s:
                continue
            time_s += 0.5 * rest_s + gpus.change_s(model, running, after)
            model, running, since_s = after, 0.0, time_s
        if group is not None:
            running = min(gpus.batch[model], running + group.count)
            time_s, count = (time_s, count) if after == own else (time_s + group.service_s, count + 1)
    return time_s, count
