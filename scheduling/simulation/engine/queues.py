"""Waiting queues of an engine, first come first served or by priority, with removal from anywhere.

Both hold ids and queue keys, not the requests themselves. No operation compares more than O(log n) entries.
"""

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from scheduling.simulation.engine.config import QueuePolicy

QueueKey = tuple[int, float, int]
"""(priority, arrival_s, number of the request): lower is earlier; the number makes ties definite."""


class WaitingQueue(Protocol):
    """Interface of an engine's waiting queue."""

    def push(self, request_id: str, key: QueueKey) -> None: ...

    def push_back(self, request_id: str, key: QueueKey) -> None:
        """Requeue a preempted request."""

    def peek(self) -> str:
        """Return the first id. Raise IndexError when empty."""

    def remove(self, request_id: str) -> None:
        """Remove *request_id* from any position. Raise KeyError if it is missing."""

    def __iter__(self) -> Iterator[str]:
        """Return all ids, in queue order."""

    def __len__(self) -> int: ...


class FcfsQueue:
    """In order of `push`; a preempted request goes to the front."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def push(self, request_id: str, key: QueueKey) -> None:
        self._ids[request_id] = None

    def push_back(self, request_id: str, key: QueueKey) -> None:
        self._ids[request_id] = None
        self._ids.move_to_end(request_id, last=False)

    def peek(self) -> str:
        if not self._ids:
            raise IndexError("the queue is empty")
        return next(iter(self._ids))

    def remove(self, request_id: str) -> None:
        del self._ids[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


class PriorityQueue:
    """In order of key; a preempted request returns to the position of its key."""

    def __init__(self) -> None:
        self._order: list[tuple[QueueKey, str]] = []
        self._keys: dict[str, QueueKey] = {}

    def push(self, request_id: str, key: QueueKey) -> None:
        bisect.insort(self._order, (key, request_id))
        self._keys[request_id] = key

    push_back = push

    def peek(self) -> str:
        return self._order[0][1]

    def remove(self, request_id: str) -> None:
        entry = (self._keys.pop(request_id), request_id)
        del self._order[bisect.bisect_left(self._order, entry)]

    def __iter__(self) -> Iterator[str]:
        return (request_id for _, request_id in self._order)

    def __len__(self) -> int:
        return len(self._order)


QUEUES: dict[QueuePolicy, type[FcfsQueue] | type[PriorityQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue}
