"""Lengths of prompts that mean much the same, by an encoder's embedding of them (SSJF, section 6: a semantic cache).

It lives where the encoder does, in the process of a length model, and begins empty with it: embeddings of two encoders have
nothing in common. Two prompts are near by the cosine of their embeddings; a number that differs ("in 50 words", "in 500
words") hardly moves an embedding and does the length, so the numbers of both must be the same. Only prompts of one message
are looked up: what a conversation or a system prompt says before would outweigh what is asked. Text is never kept.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.query import LengthQuery
from forecasting.lengths.service.cache import MODELS, Limits, SeenLengths

OPEN: Final = 4096
"""Requests that are not finished whose embeddings are held, the newest."""


class Lesson(NamedTuple):
    """A request that was asked about is done."""

    number: int
    """That it was asked with."""
    tokens: float
    """Of one sequence."""
    cut: bool
    """No more were allowed."""


class _OpenRequest(NamedTuple):
    model: str
    embedding: NDArray[np.float32]
    numbers: int
    slot: int
    """Where a prompt like it was found; -1: nowhere."""
    seen: SeenLengths | None


@dataclass(slots=True)
class _Shelf:
    """Prompts of one served model."""

    embeddings: NDArray[np.float32]
    """(entries, width), each of length one."""
    seen: list[SeenLengths] = field(default_factory=list)
    used_s: list[float] = field(default_factory=list)


class EmbeddingCache:
    """Not for several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = Limits()
        self.clock = clock
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self._open: OrderedDict[int, _OpenRequest] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(shelf.seen) for shelf in self._shelves.values())

    def set_limits(self, limits: Limits) -> None:
        """Keep to *limits* from now on; with another number of entries it begins empty."""
        if limits.entries != self.limits.entries:
            self._shelves.clear()
            self._open.clear()
        self.limits = limits

    def look_up(self, query: LengthQuery, embedding: NDArray[np.float32], number: int) -> SeenLengths | None:
        """What was seen of the prompt nearest to *query*, if that is near enough; remembers it as *number* until `learn`."""
        if not self.limits.entries or not query.text or query.asked != query.text:
            return None
        size = float(np.linalg.norm(embedding))
        if not 0.0 < size < np.inf:
            return None
        near = embedding / size
        numbers = hash(tuple(re.findall(r"\d+", query.text)))
        slot, seen = self._nearest(query.model, near, numbers)
        self._open[number] = _OpenRequest(query.model, near, numbers, slot, seen)
        if len(self._open) > OPEN:
            self._open.popitem(last=False)
        return seen

    def learn(self, lesson: Lesson) -> None:
        """A request came to its end: what it was like is confirmed, or it is remembered itself."""
        opened = self._open.pop(lesson.number, None)
        if opened is None:
            return
        now_s = self.clock()
        shelf = self._shelf(opened.model, len(opened.embedding))
        if opened.seen is not None and opened.slot < len(shelf.seen) and shelf.seen[opened.slot] is opened.seen:
            slot = opened.slot
        else:
            slot = len(shelf.seen)
            if slot == len(shelf.embeddings):
                slot = int(np.argmin(shelf.used_s))
            else:
                shelf.seen.append(SeenLengths(None, 0, now_s))
                shelf.used_s.append(now_s)
            shelf.seen[slot] = SeenLengths(None, opened.numbers, now_s)
            shelf.embeddings[slot] = opened.embedding
        shelf.used_s[slot] = now_s
        shelf.seen[slot].add(lesson.tokens, now_s, cut=lesson.cut)

    def _nearest(self, model: str, near: NDArray[np.float32], numbers: int) -> tuple[int, SeenLengths | None]:
        shelf = self._shelves.get(model)
        if shelf is None or not shelf.seen or shelf.embeddings.shape[1] != len(near):
            return -1, None
        alike = shelf.embeddings[: len(shelf.seen)] @ near
        now_s = self.clock()
        for slot in np.argsort(-alike)[:8].tolist():
            seen = shelf.seen[slot]
            if alike[slot] < self.limits.similarity:
                break
            if seen.numbers == numbers and now_s - seen.changed_s <= self.limits.ttl_s:
                shelf.used_s[slot] = now_s
                return slot, seen
        return -1, None

    def _shelf(self, model: str, width: int) -> _Shelf:
        shelf = self._shelves.get(model)
        if shelf is None or shelf.embeddings.shape[1] != width:
            shelf = self._shelves[model] = _Shelf(np.zeros((self.limits.entries, width), np.float32))
            if len(self._shelves) > MODELS:
                self._shelves.popitem(last=False)
        self._shelves.move_to_end(model)
        return shelf
