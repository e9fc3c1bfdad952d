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


class PlainRun(NamedTuple):
    """Groups that one model serves before a request, while it has the GPUs."""

    model: int
    groups: list[PlainGroup]
    later: Sequence[PlainGroup] = ()
    """Groups of that model behind the request."""

    @property
    def requests(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def latest_s(self) -> float:
        """Latest start for all of them to be in time one after another."""
        groups = [*self.groups, *self.later]
        served = [sum(each.service_s for each in groups[: at + 1]) for at in range(len(groups))]
        return min((group.due_s - s for group, s in zip(groups, served, strict=True)), default=math.inf)


def runs_before(
    queue: Sequence[PlainGroup], own: int, model: int, gpus: PlainGpus
) -> tuple[list[PlainRun], list[PlainRun], bool]:
    """Return the models before the group at *own* of *queue* (its length: a new last group of *model*).

    The models that have the GPUs until it is served, each with its groups, its own with those up to it; then the models
    entirely behind; and whether the groups of the model that has the GPUs are first.
    """
    before = [group.model for group in queue]
    met = before.index(model) if model in before else len(queue)
    order = list(dict.fromkeys(([gpus.model] if gpus.model >= 0 else []) + before[:met]))
    runs = [PlainRun(each, [group for group in queue if group.model == each and each != model]) for each in order]
    if order != [model]:
        runs.append(PlainRun(model, []))
    theirs = [group for group in queue[: own + 1] if group.model == model]
    runs[-1] = PlainRun(model, theirs, [group for group in queue[own + 1 :] if group.model == model])
    met_too = {run.model for run in runs}
    behind = [each for each in dict.fromkeys(before) if each not in met_too]
    others = [PlainRun(each, [group for group in queue if group.model == each]) for each in behind]
    return runs, others, bool(queue) and queue[0].model == gpus.model
