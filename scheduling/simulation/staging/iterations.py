"""Infers what an engine has computed: when its iteration began, and how much of prompts without a token.

A prompt longer than the rest of an iteration's token budget is computed in chunks, which vLLM does not report. But each
iteration decodes a token for all that have one, gives the rest of its budget to prompts in order, and takes as long as the
profile says. So the iterations are replayed: backwards from the last end that was seen, and forwards from there where
nothing decodes.

It is exact where moments, profile and order are those of the engine, and what ended meanwhile is known. It is an estimate
where tokens came from a prefix cache, where requests were preempted or left, and where the profile is off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from scheduling.simulation.engine.config import EngineConfig

MOST_ITERATIONS = 200
"""That are looked back on."""
ROUNDS, TRIED = 4, 24
"""In which iterations and the moments at which they began are made to agree, for so many chunks at most."""
ALIKE_S = 1e-6


class EnginePrompt(NamedTuple):
    """A request at an engine."""

    tokens: int
    """Of its prompt."""
    reaches_s: float
    """The engine."""
    produced: int = 0
    """Output tokens so far."""
    left_s: float = inf
    """When it ended."""


class Replayed(NamedTuple):
    begins_s: float
    """When the iteration in progress at 0 s began."""
    computed: tuple[int, ...]
    """Tokens of each pending prompt by the iterations that have ended."""


@dataclass(slots=True)
class _InferredPrompt:
    """One whose computed tokens are worked out; the rest is as in `Prompt`."""

    tokens: int
    reaches_s: float
    produced: int
    left_s: float
    computed: int = 0


@lru_cache(maxsize=1024)  # all futures and seeds of a what-if begin with the same
def replay(
    engine: EngineConfig,
    running: tuple[EnginePrompt, ...],
    pending: tuple[EnginePrompt, ...],
    gone: tuple[EnginePrompt, ...],
    ended_s: float,
    guessed: bool = False,
) -> Replayed:
    """Infer the progress of *engine*, whose iteration in progress began at *ended_s* or after it.

    *running* have tokens, *pending* ones have none and are in the order of the engine's own queue; *gone* have ended
    since the first of *pending* came. *ended_s* is the last observed end of an iteration: before 0, or -inf. *guessed*:
    the tokens of some are estimated, so no course can agree with all, and the first is as good as any.
    """
    first_s = min((one.reaches_s for one in pending), default=inf)
    begun, come, left = ([_InferredPrompt(*one) for one in each] for each in (running, pending, gone))
    if first_s < ended_s and len(running) < engine.max_num_seqs:
        _PastIterations(engine, begun, come, left, ended_s).find(1 if guessed else TRIED)
    begins_s = ended_s if running or not pending else _forward(engine, come, ended_s)
    return Replayed(begins_s, tuple(one.computed for one in come))


def _forward(engine: EngineConfig, pending: Sequence[_InferredPrompt], ended_s: float) -> float:
    """Replay the iterations after *ended_s*, in which nothing decodes, that are over at 0 s."""
    begins_s = ended_s
    while True:
        if not any(one.computed for one in pending):  # it was idle until one came
            begins_s = max(begins_s, min(one.reaches_s for one in pending))
        taken, room = [0] * len(pending), engine.max_num_batched_tokens
        begun = 0
        for at, one in sorted(enumerate(pending), key=lambda each: not each[1].computed):
            if one.reaches_s > begins_s + ALIKE_S or begun == engine.max_num_seqs:
                continue
            taken[at] = min(room, one.tokens - one.computed)
            room -= taken[at]
            begun += 1
        ends_s = begins_s + engine.profile.step_time_s(sum(taken), 0, 0)
        gives_a_token = any(one.computed + more >= one.tokens for one, more in zip(pending, taken, strict=True))
        if ends_s >= 0 or gives_a_token or not any(taken):
            return begins_s
        for one, more in zip(pending, taken, strict=True):
            one.computed += more
        begins_s = ends_s


@dataclass(frozen=True, slots=True)
class _Course:
    """Iterations from *begin_s* on, of which the last ends *off_s* late; what they computed of each prompt."""

    begin_s: float
    off_s: float
    early: int
    """Prompts that were through, or were not, when they were not, or were."""
    computed: list[int]

    @property
    def wrong(self) -> float:
        """Return the disagreement with the observations; 0 for none."""
        return self.early + (abs(self.off_s) if abs(self.off_s) > ALIKE_S else 0.0)


class _PastIterations:
    """The iterations that ended at *ended_s* and before it; the first of them is the last that ended."""

    def __init__(
        self,
        engine: EngineConfig,
        running: Sequence[_InferredPrompt],
        pending: Sequence[_InferredPrompt],
        gone: Sequence[_InferredPrompt],
        ended_s: float,
    ) -> None:
        self.engine, self.pending, self.gone, self.ended_s = engine, pending, gone, ended_s
        self.count, self.prompts = self._window(running)
        produced = np.array([one.produced for one in running], np.int64)
        tokens = np.array([one.tokens for one in running], np.int64)
        back = np.arange(1, self.count + 1)[:, None]
        decodes = produced[None, :] > back  # with so many tokens it had its first one before that iteration
        self.decoding = decodes.sum(axis=1)
        self.context = (decodes * (tokens + produced - back)).sum(axis=1)
        self.held = int((tokens + produced).sum())

    def _window(self, running: Sequence[_InferredPrompt]) -> tuple[int, list[_InferredPrompt]]:
        """Return the number of iterations to where the prompts of the window began, and those prompts in order."""
        profile = self.engine.profile
        least_s = profile.step_time_s(0, 1, 1)
        prompts, count = list(self.pending), 0
        while True:
            earliest_s = min(one.reaches_s for one in prompts)
            for one in sorted(self.gone, key=lambda one: -one.reaches_s):
                if one.reaches_s + profile.step_time_s(one.tokens, 0, 0) > earliest_s:  # its prompt was among them
                    earliest_s = min(earliest_s, one.reaches_s)
            now = min(MOST_ITERATIONS, 2 + int((self.ended_s - earliest_s) / least_s))
            if now <= count:
                return count, prompts
            count = now
            before = sorted((one for one in running if one.produced <= count), key=lambda one: -one.produced)
            prompts = [*before, *self.pending]

    def find(self, most: int) -> None:
        """Write what is computed of those that have no token, by one of *most* courses, or of those from idle."""
        profile = self.engine.profile
        steps = zip(self.decoding.tolist(), self.context.tolist(), strict=True)
        begin_s = self.ended_s - sum(profile.step_time_s(0, decoding, context) for decoding, context in steps)
        tried = [] if self.decoding[-1] else self._from_idle()
        chunk_s = profile.step_time_s(self.engine.max_num_batched_tokens, 0, 0) - profile.step_time_s(0, 1, 0)
        tokens = sum(one.tokens for one in (*self.prompts, *self.gone))
        for chunks in range(min(most, 2 + tokens // self.engine.max_num_batched_tokens)):
            if tried and not tried[-1].wrong:
                break
            tried.append(self._settled(begin_s - chunks * max(chunk_s, ALIKE_S)))
        best = min(tried, key=lambda one: one.wrong)
        for one, computed in zip(self.prompts, best.computed, strict=True):
            one.computed = computed

    def _from_idle(self) -> list["_Course"]:
        """Yield courses of an engine that was idle before one of these came, by how many iterations ago that was.

        The last one is the one that agrees, if one does.
        """
        known = [*self.prompts, *self.gone]
        first_s = min(one.reaches_s for one in self.pending)
        starts_s = [
            one.reaches_s
            for one in known
            if one.reaches_s <= first_s and not any(each.reaches_s < one.reaches_s < each.left_s for each in known)
        ]
        tried: list[_Course] = []
        backs: list[int] = (1 + np.flatnonzero(self.decoding == 0)).tolist() if starts_s else []
        for back in backs:
            tried.append(self._course(max(starts_s), back))
            if not tried[-1].wrong:
                break
        return tried

    def _settled(self, begin_s: float) -> "_Course":
        """Return the course whose last iteration ends at `ended_s`, or the nearest one, starting from *begin_s*."""
        best = self._course(begin_s)
        made, before_s = best, inf
        for _ in range(ROUNDS):
            next_s = made.begin_s - made.off_s
            if not made.wrong or made.off_s == 0.0 or abs(next_s - before_s) < ALIKE_S:  # or it goes to and fro
                break
            before_s, made = made.begin_s, self._course(next_s)
            best = min(best, made, key=lambda one: one.wrong)
        return best

    def _course(self, begin_s: float, first: int | None = None) -> "_Course":
        """Return all iterations, or those from *first*, if that one began at *begin_s*."""
        for one in self.prompts:
            one.computed = 0
        for one in self.gone:
            one.computed = one.tokens if one.reaches_s < begin_s - ALIKE_S else 0
        at_s, early, time_s = begin_s, 0, self.engine.profile.step_time_s
        idle_s = time_s(1, 0, 0) / 2
        for back in range(first or self.count, 0, -1):
            decoding, context = int(self.decoding[back - 1]), int(self.context[back - 1])
            there = [one for one in self.gone if at_s < one.left_s - ALIKE_S]
            for one in there:
                decoding += one.computed == one.tokens
                context += one.tokens + one.produced // 2 if one.computed == one.tokens else 0
            open_ = [one for one in (*self.prompts, *there) if one.computed < one.tokens]
            # One that is idle begins at once: the iteration and what came are at the same moment, but for rounding.
            idle = not decoding and not any(one.computed for one in open_)
            until_s, given = at_s + (idle_s if idle else ALIKE_S), 0
            if any(one.computed or one.reaches_s <= until_s for one in open_):
                given, would_end = self._take(open_, back, until_s, decoding)
                early += would_end
            at_s += time_s(given, decoding, context)
            if first and at_s > self.ended_s + ALIKE_S:
                break
        return _Course(begin_s, at_s - self.ended_s, early, [one.computed for one in self.prompts])

    def _take(self, prompts: list[_InferredPrompt], back: int, until_s: float, decoding: int) -> tuple[int, int]:
        """Give the iteration *back* of *prompts* what it has room for: how many tokens, and whether one ends too early."""
        room, begun, given, early = self.engine.max_num_batched_tokens - decoding, decoding, 0, 0
        capacity = self.engine.kv_capacity_tokens - self.held
        prompts.sort(key=lambda one: (not one.computed, one.reaches_s))  # what is begun is continued first
        for one in prompts:
            known = one.left_s == inf
            if known and one.produced > back:
                continue  # it decodes
            if room <= 0:
                break
            left = one.tokens - one.computed
            if known and one.produced == back:  # its first token came at the end of this one
                early += left > room
                taken = min(left, room)
                one.computed, room, given, begun = one.tokens, room - taken, given + taken, begun + 1
                continue
            if not one.computed and one.reaches_s > until_s:
                continue
            too_long = known and not one.produced and one.tokens > capacity
            if not one.computed and (begun >= self.engine.max_num_seqs or too_long):
                break
            taken = min(left, room)
            if known and taken == left:  # its first token would have come
                taken, room, early = left - 1, 0, early + 1
            one.computed += taken
            room, given, begun = room - taken, given + taken, begun + 1
            capacity -= one.tokens
        return given, early
