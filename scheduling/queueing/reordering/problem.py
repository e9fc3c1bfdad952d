"""Problem of the global scheduler: waiting request groups, the virtual queues they may join, and an order of them.

Times are seconds from now. QLM, table 2 and equations 6 to 13; docs/papers/queueing.md explains how they are read.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.struct_of_arrays import struct_of_arrays

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@struct_of_arrays
class Problem(NamedTuple):
    """N request groups, Q virtual queues of T types (queues of a type serve alike: GPU type, TP), M models."""

    requests: Ints
    """(N,): weight of a group."""
    model: Ints
    """(N,): 0 to M - 1."""
    due_s: Floats
    """(N,): time left until the deadline of the first token; negative once past, infinity for none."""
    service_s: Floats
    """(N, T): service time in a queue of that type (W of equation 2 over all its requests); infinity if it cannot serve it.
    """
    own_s: Floats
    """(N, T): part of its service after which its last request has its first token, (1 - B / n) W, at least 0."""
    queue_type: Ints
    """(Q,): 0 to T - 1."""
    free_s: Floats
    """(Q,): when running work leaves room for the first waiting group."""
    loaded: Ints
    """(Q,): model that is loaded then, -1 for none."""
    swap_s: Floats
    """(T, M): time to load the model (S); infinity if it cannot be loaded: only queues that hold it serve it, until a swap.
    """
    drain_s: Floats
    """(T, M): time for the last batch of the model to finish before a swap (P + D of equation 1), 0 if it is evicted."""
    fixed: Ints
    """(N,): queue that must serve the group first (running, or pinned by an operator), -1 for none."""

    def change_s(self) -> Floats:
        """Return (T, M + 1, M): seconds from the end of a group of one model to the start of one of another; first -1, no
        model.

        Third term of equation 10 for one switch: the previous batch drains, then the model is loaded.
        """
        types, models = self.swap_s.shape
        change = np.empty((types, models + 1, models))
        change[:, 0, :] = self.swap_s
        change[:, 1:, :] = self.drain_s[:, :, None] + self.swap_s[:, None, :]
        change[:, np.arange(1, models + 1), np.arange(models)] = 0.0
        return change


@struct_of_arrays
class Order(NamedTuple):
    """The groups of each queue, first to last: queue q has groups[first[q]:first[q + 1]]."""

    first: Ints
    """(Q + 1,)"""
    groups: Ints
    """(groups in the order,)"""

    @classmethod
    def of(cls, queues: Sequence[Sequence[int]]) -> "Order":
        sizes = [len(queue) for queue in queues]
        groups = np.fromiter((group for queue in queues for group in queue), np.int64, sum(sizes))
        return cls(np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]), groups)

    def queues(self) -> list[list[int]]:
        groups = self.groups.tolist()
        return [groups[start:end] for start, end in zip(self.first[:-1].tolist(), self.first[1:].tolist(), strict=True)]


def begin(problem: Problem) -> tuple[list[list[int]], Floats, Ints]:
    """Return the constant part of any order: fixed groups of each queue, when (Q,) and with which model (Q,) each ends."""
    queues: list[list[int]] = [[] for _ in range(problem.queue_type.size)]
    free_s, loaded, change_s = problem.free_s.copy(), problem.loaded.copy(), problem.change_s()
    for group in np.flatnonzero(problem.fixed >= 0).tolist():
        queue, model = int(problem.fixed[group]), int(problem.model[group])
        kind = int(problem.queue_type[queue])
        end_s = free_s[queue] + change_s[kind, loaded[queue] + 1, model] + problem.service_s[group, kind]
        if math.isfinite(end_s):
            queues[queue].append(group)
            free_s[queue], loaded[queue] = end_s, model
    return queues, free_s, loaded


def broken_rules(problem: Problem, order: Order) -> list[str]:
    """Return the violations of equations 6 to 9 by *order*, in words; empty if it is feasible.

    Equation 6: each group that some queue can serve is at one position, each position has one group. Equations 7 and 9: a
    queue serves only what its type serves, and swaps only to what it can load. Fixed groups come first.
    """
    wrong = []
    n, queues = problem.requests.size, problem.queue_type.size
    if order.first.size != queues + 1 or order.first[0] != 0 or np.any(np.diff(order.first) < 0):
        return ["its queues are not those of the problem"]
    if order.first[-1] != order.groups.size or np.any((order.groups < 0) | (order.groups >= n)):
        return ["it names groups that do not exist"]
    times = np.bincount(order.groups, minlength=n)
    wrong += [f"group {group} is in it {times[group]} times" for group in np.flatnonzero(times > 1).tolist()]
    change_s = problem.change_s()
    for queue, groups in enumerate(order.queues()):
        kind, loaded, free = int(problem.queue_type[queue]), int(problem.loaded[queue]), True
        for group in groups:
            model = int(problem.model[group])
            if not math.isfinite(problem.service_s[group, kind] + change_s[kind, loaded + 1, model]):
                wrong.append(f"queue {queue} cannot serve group {group} there")
            if problem.fixed[group] >= 0 and (problem.fixed[group] != queue or not free):
                wrong.append(f"group {group} is fixed to queue {problem.fixed[group]}, first")
            free = free and problem.fixed[group] >= 0
            loaded = model
    can = np.isfinite(problem.service_s[:, problem.queue_type]) & (
        np.isfinite(problem.swap_s[problem.queue_type][:, problem.model].T)
        | (problem.loaded[None, :] == problem.model[:, None])
    )
    # Only a group whose model every queue must swap out first may be left over.
    loadable = np.isfinite(problem.swap_s[problem.queue_type][:, problem.model].T) & can
    wrong += [f"group {group} is not in it" for group in np.flatnonzero((times == 0) & loadable.any(axis=1)).tolist()]
    return wrong


def contiguous(problem: Problem) -> Problem:
    """Return *problem* with arrays of the declared types, writable and in C order; ValueError if shapes differ."""
    kinds: dict[str, Any] = dict.fromkeys(("requests", "model", "queue_type", "loaded", "fixed"), np.int64)
    arrays = {
        name: np.array(value, kinds.get(name, np.float64), order="C")
        for name, value in zip(Problem._fields, problem, strict=True)
    }
    whole = Problem(**arrays)
    n, queues, (types, models) = whole.requests.size, whole.queue_type.size, whole.swap_s.shape
    shapes: dict[str, tuple[int, ...]] = {
        "service_s": (n, types),
        "own_s": (n, types),
        "drain_s": (types, models),
        "swap_s": (types, models),
    }
    shapes |= dict.fromkeys(("queue_type", "free_s", "loaded"), (queues,))
    for name, array in arrays.items():
        if array.shape != shapes.get(name, (n,)):
            raise ValueError(f"{name} has shape {array.shape}, not {shapes.get(name, (n,))}")
    for name, (least, most) in {
        "model": (0, models), "loaded": (-1, models), "queue_type": (0, types), "fixed": (-1, queues)
    }.items():  # fmt: skip
        if np.any((arrays[name] < least) | (arrays[name] >= most)):
            raise ValueError(f"{name} must be from {least} to {most - 1}")
    for name in ("requests", "service_s", "own_s", "free_s", "swap_s", "drain_s"):
        if not np.all(arrays[name] >= 0):  # NaN fails too
            raise ValueError(f"{name} must not be negative")
    if not (
        np.all(np.isfinite(whole.free_s)) and np.all(np.isfinite(whole.drain_s)) and not np.any(np.isnan(whole.due_s))
    ):
        raise ValueError("free_s and drain_s must be finite, due_s a number or infinity")
    whole.own_s[:] = np.minimum(whole.own_s, whole.service_s)
    return whole
