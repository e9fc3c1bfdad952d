"""Versions in shadow: they predict what the version in use answered, off the data path, and steer nothing."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from controlplane.gateway.lengths.answering import AGAIN_S, Budgets, own_process, quick
from controlplane.lengths import notes
from controlplane.lengths.selectors import SHADOW
from controlplane.lengths.services import InUse
from forecasting.lengths import LengthModel, LengthQuery
from forecasting.lengths.service.online import Online
from forecasting.lengths.service.predictor import Answer, SubprocessPredictor, Why, checked
from forecasting.lengths.service.subprocess_server import load

logger = logging.getLogger(__name__)

SHADOWED: Final = 32
"""Requests that a shadow predicts between two flushes."""
BUDGET_S: Final = 20.0
"""What a shadow's process may take; nobody waits for it."""

Measured = tuple[float, str, str, str, tuple[float, float, float], float, bool]
"""Arguments of `Notes.measure`."""


class Answered(NamedTuple):
    """A request that the version in use answered, and what it came to."""

    query: LengthQuery
    real: float
    cut: bool
    budgets: Budgets
    at: float  # epoch seconds


class Shadow:
    """One version, asked in a thread if it is quick, else in a process of its own."""

    def __init__(self, version: InUse, model: LengthModel | None) -> None:
        self.version = version
        self._model = model
        self._process: SubprocessPredictor | None = None
        self._online = Online(notes.reader())
        self._in_time = 0

    @classmethod
    async def of(cls, version: InUse) -> "Shadow":
        """Raises what `load` raises."""
        if quick(version.kind):
            return cls(version, await asyncio.to_thread(load, version.kind, version.file))
        shadow = cls(version, None)
        shadow._process = own_process(version)
        return shadow

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    def report(self, budgets: Iterable[Budgets]) -> dict[str, Any] | None:
        """For the published summary, with *budgets* of the models that it is asked about; None if it is quick."""
        if self._process is None:
            return None
        return {
            "version": self.version.name,
            "kind": self.version.kind,
            "own_process": True,
            "shadow": True,
            "models": [],
            "budgets_ms": sorted({one.of(self.version.kind) * 1000 for one in budgets}),
            "restarts": self._process.restarts,
            **self._process.timing.report(),
            "in_time": self._in_time,
        }

    async def measures(self, answered: Sequence[Answered]) -> list[Measured]:
        """What it would have said of *answered*."""
        replies = await self._replies([one.query for one in answered])
        measured: list[Measured] = []
        for (query, real, cut, budgets, at), (reply, took_s) in zip(answered, replies, strict=True):
            if isinstance(reply, Why):
                continue
            most = float(query.max_tokens or math.inf)
            righted = self._online.right(query, reply.tokens, reply.quantiles)
            self._online.learn(query, righted, real, cut=cut)
            quantiles = righted.quantiles
            predicted = (min(righted.tokens, most), min(quantiles[len(quantiles) // 2], most), min(quantiles[-1], most))
            late = took_s > budgets.of(self.version.kind)
            self._in_time += not late
            measured.append((at, query.model, query.tenant, f"{SHADOW} {self.version.name}", predicted, real, late))
        return measured

    async def _replies(self, queries: list[LengthQuery]) -> list[tuple[Answer | Why, float]]:
        """What it says of each, and after how many seconds: asked one by one, as requests mostly come.

        Of a quick one the time is not taken: whether it may answer on the event loop is measured when it is promoted.
        """
        if self._process is not None:
            replies: list[tuple[Answer | Why, float]] = []
            for query in queries:
                began = time.perf_counter()
                replies.append((await self._process.ask(query, BUDGET_S), time.perf_counter() - began))
            return replies
        try:
            assert self._model is not None
            tokens, quantiles = await asyncio.to_thread(self._model.predict, queries)
        except Exception as error:
            logger.warning("lengths: the shadow %s failed: %s", self.version.name, type(error).__name__)
            return [(Why.FAILED, 0.0) for _ in queries]
        return [(checked(*each), 0.0) for each in zip(tokens.tolist(), quantiles.tolist(), strict=True)]


class Shadows:
    """One of each kind at most."""

    def __init__(self) -> None:
        self._shadows: dict[InUse, Shadow] = {}
        self._not_before_s: dict[InUse, float] = {}
        self._answered: deque[Answered] = deque(maxlen=SHADOWED)

    @property
    def names(self) -> list[str]:
        return [version.name for version in self._shadows]

    async def take(self, versions: Sequence[InUse]) -> None:
        """Let *versions* predict; one that cannot be loaded is tried again later."""
        for version in self._shadows.keys() - set(versions):
            await self._shadows.pop(version).stop()
        for version in versions:
            if version in self._shadows or time.monotonic() < self._not_before_s.get(version, 0.0):
                continue
            try:
                self._shadows[version] = await Shadow.of(version)
            except Exception as error:
                logger.warning("lengths: the shadow %s could not be loaded: %s", version.name, type(error).__name__)
                self._not_before_s[version] = time.monotonic() + AGAIN_S
                continue
            self._answered.clear()

    def see(self, query: LengthQuery, real: float, budgets: Budgets, *, cut: bool) -> None:
        """The version in use answered *query*, which came to *real* tokens; *budgets* are those of its model."""
        if self._shadows:
            self._answered.append(Answered(query, real, cut, budgets, time.time()))

    def reports(self, budgets: Iterable[Budgets]) -> list[dict[str, Any]]:
        """Of those in a process of their own, as of a version that answers."""
        made = (shadow.report(budgets) for shadow in self._shadows.values())
        return [report for report in made if report is not None]

    async def measures(self) -> list[Measured]:
        """What each would have said of the last requests."""
        answered = list(self._answered)
        self._answered.clear()
        if not answered:
            return []
        return [one for shadow in list(self._shadows.values()) for one in await shadow.measures(answered)]

    async def stop(self) -> None:
        for shadow in self._shadows.values():
            await shadow.stop()
