"""Request groups and virtual queues in plain Python: lists of lists with linear search."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any


@dataclass
class PlainGroup:
    number: int
    kind: tuple[Any, ...]
    slots: list[int] = field(default_factory=list)
    joined: int = 0


class PlainGroups:
    """Groups of one endpoint: a request joins the last group of its kind that is not full, in order of sequence.

    *takes_s* is the service time of a waiting request, *allowed_s* the time allowed by the class of a kind.
    """

    def __init__(
        self,
        limit: int,
        takes_s: Callable[[int], float] = lambda slot: 0.0,
        allowed_s: Callable[[tuple[Any, ...]], float] = lambda kind: inf,
    ) -> None:
        self.limit, self.takes_s, self.allowed_s = limit, takes_s, allowed_s
        self.groups: list[PlainGroup] = []
        self.open: dict[tuple[Any, ...], PlainGroup] = {}
        self.made = 0

    def join(self, slot: int, kind: tuple[Any, ...], sequence: dict[int, int]) -> None:
        group = self.open.get(kind)
        if group is None or self.is_full(group):
            group = PlainGroup(self.made, kind)
            self.made += 1
            self.groups.append(group)
            self.open[kind] = group
        group.slots.append(slot)
        group.slots.sort(key=sequence.__getitem__)
        group.joined += 1

    def is_full(self, group: PlainGroup) -> bool:
        """Whether the group is at its limit, or takes an eighth of the time allowed."""
        if group.joined >= self.limit:
            return True
        waits_s = sum(self.takes_s(slot) for slot in group.slots)
        return 0 < waits_s >= self.allowed_s(group.kind) / 8

    def leave(self, slot: int) -> None:
        for group in self.groups:
            if slot in group.slots:
                group.slots.remove(slot)
                if not group.slots:
                    self.groups.remove(group)
                    if self.open.get(group.kind) is group:
                        del self.open[group.kind]
                return
        raise KeyError(slot)
