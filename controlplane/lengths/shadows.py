"""Versions in shadow: they predict what the active version answered, off the data path, and steer nothing."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from controlplane.lengths.answering import Budgets, RunningVersion, Starter
from controlplane.lengths.models import LengthVersion
from controlplane.lengths.selectors import SHADOW
from forecasting.lengths import Estimate, LengthQuery
from forecasting.lengths.predictor import InLine, Unanswered

SHADOWED: Final = 32
"""Requests that a shadow predicts between two flushes."""
BUDGET_S: Final = 20.0
"""Timeout of a shadow's process: no request waits for it."""

Measured = tuple[float, str, str, str, tuple[float, float, float], float, bool]
"""Arguments of `Notes.measure`."""


class FinishedRequest(NamedTuple):
    """A request that the active version answered."""

    query: LengthQuery
    real_tokens: float
    cut: bool
    budgets: Budgets
    at: float  # epoch seconds


class Shadows:
    """One of each kind at most."""

    def __init__(self, starter: Starter) -> None:
        self.starter = starter
        self._running: dict[LengthVersion, RunningVersion] = {}
        self._finished: deque[FinishedRequest] = deque(maxlen=SHADOWED)

    @property
    def names(self) -> list[str]:
        return [str(version) for version in self._running]

    async def take(self, versions: Sequence[LengthVersion]) -> None:
        """Let *versions* predict. A quick one runs in a thread: its speed is measured when it is promoted."""
        for version in self._running.keys() - set(versions):
            await self._running.pop(version).predictor.stop()
        for version in versions:
            if version not in self._running and (running := await self.starter.start(version, measured=False)):
                self._running[version] = running
                self._finished.clear()

    def see(self, query: LengthQuery, real_tokens: float, budgets: Budgets, *, cut: bool) -> None:
        """The active version answered *query*, which came to *real_tokens*; *budgets* are those of its model."""
        if self._running:
            self._finished.append(FinishedRequest(query, real_tokens, cut, budgets, time.time()))

    def reports(self, budgets: Iterable[Budgets]) -> list[dict[str, Any]]:
        """Of those in a process of their own, with *budgets* of the models that they are asked about."""
        return [
            {
                **running.report(),
                "shadow": True,
                "models": [],
                "budgets_ms": sorted({one.of(running.version.kind) * 1000 for one in budgets}),
            }
            for running in self._running.values()
            if running.predictor.own_process
        ]

    async def measures(self) -> list[Measured]:
        """The errors that each would have made on the last requests."""
        finished = list(self._finished)
        self._finished.clear()
        return [one for running in list(self._running.values()) for one in await measures_of(running, finished)]

    async def stop(self) -> None:
        for running in self._running.values():
            await running.predictor.stop()


async def measures_of(running: RunningVersion, finished: Sequence[FinishedRequest]) -> list[Measured]:
    """The errors that *running* would have made on *finished*."""
    replies = await _replies(running, [one.query for one in finished])
    measured: list[Measured] = []
    for (query, real_tokens, cut, budgets, at), (reply, took_s) in zip(finished, replies, strict=True):
        if isinstance(reply, Unanswered):
            continue
        most = float(query.max_tokens or math.inf)
        corrected = running.online.correct(query, reply.tokens, reply.quantiles)
        running.online.learn(query, corrected, real_tokens, cut=cut)
        quantiles = corrected.quantiles
        predicted = (min(corrected.tokens, most), min(quantiles[len(quantiles) // 2], most), min(quantiles[-1], most))
        late = took_s > budgets.of(running.version.kind)
        running.predictor.timing.in_time -= late
        measured.append((at, query.model, query.tenant, f"{SHADOW} {running.version}", predicted, real_tokens, late))
    return measured


async def _replies(running: RunningVersion, queries: list[LengthQuery]) -> list[tuple[Estimate | Unanswered, float]]:
    """Its replies, and the seconds that each took: asked one by one, as requests mostly come.

    The time of one in line is not measured.
    """
    predictor = running.predictor
    if isinstance(predictor, InLine):
        return await asyncio.to_thread(lambda: [(predictor.ask_now(query, BUDGET_S), 0.0) for query in queries])
    replies: list[tuple[Estimate | Unanswered, float]] = []
    for query in queries:
        began = time.perf_counter()
        replies.append((await predictor.ask(query, BUDGET_S), time.perf_counter() - began))
    return replies
