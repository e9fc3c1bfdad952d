"""Versions of the length model that run in a gateway: the active one, those of kinds that models name, and shadows.

A version that cannot be started leaves the previous one in place and is tried again later. Shadows predict the requests
that the active version answered, off the data path, and steer nothing.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from django.conf import settings

from controlplane.lengths import notes
from controlplane.lengths.models import BUNDLED, LengthVersion
from controlplane.lengths.selectors import SHADOW
from controlplane.lengths.services import Assigned
from forecasting.lengths import MODELS, ON_ENCODER, Estimate, LengthQuery
from forecasting.lengths.caches import Limits
from forecasting.lengths.online import DriftAlarm, Online, RecentlyUsed
from forecasting.lengths.predictor import InLine, Predictor, SubprocessPredictor, Unanswered, fast_enough
from forecasting.lengths.subprocess_server import load

logger = logging.getLogger(__name__)

AGAIN_S: Final = 60.0
"""Delay before a version that could not be started is tried again."""
IN_LINE_AGAIN_S: Final = 120.0
"""Delay before a model that was too slow in line is measured again: the machine may have been busy."""
SHADOWED: Final = 32
"""Requests that a shadow predicts between two flushes."""
SHADOW_BUDGET_S: Final = 20.0
"""Timeout of a shadow's process: no request waits for it."""

Measured = tuple[float, str, str, str, tuple[float, float, float], float, bool]
"""Arguments of `Notes.measure`."""


class Budgets(NamedTuple):
    """Longest wait of a request of one model for its predicted length, in seconds."""

    usual_s: float
    encoder_s: float
    """Of a length model on an encoder."""

    def of(self, kind: str) -> float:
        return self.encoder_s if kind in ON_ENCODER else self.usual_s


def quick(kind: str) -> bool:
    """Return whether models of *kind* may answer on the event loop, and be loaded in a gateway at all."""
    return kind in MODELS and MODELS[kind].quick


class RunningVersion:
    """A version, its predictor, and its online corrections."""

    def __init__(self, version: LengthVersion, predictor: Predictor) -> None:
        self.version = version
        self.predictor = predictor
        self.online = Online(notes.reader())
        self.alarms: RecentlyUsed[tuple[str, str], DriftAlarm] = RecentlyUsed(DriftAlarm)
        self.in_line_again_s = math.inf
        self._earlier_restarts = 0  # of replaced predictors

    @property
    def restarts(self) -> int:
        return self._earlier_restarts + self.predictor.restarts

    async def replace(self, predictor: Predictor) -> None:
        """Answer by *predictor* from now on; it takes over the timing."""
        before, self.predictor = self.predictor, predictor
        predictor.timing = before.timing
        self._earlier_restarts += before.restarts
        await before.stop()

    def report(self) -> dict[str, Any]:
        """Return the version's part of the published summary."""
        return {
            "version": str(self.version),
            "kind": self.version.kind,
            "own_process": self.predictor.own_process,
            "restarts": self.restarts,
            **self.predictor.timing.report(),
        }


class Starter:
    """Starts versions, and remembers those that could not be started."""

    def __init__(self) -> None:
        self._not_before_s: dict[LengthVersion, float] = {}

    async def start(
        self, version: LengthVersion, limits: Limits | None = None, *, measured: bool = True
    ) -> RunningVersion | None:
        """Start *version*; return None if it cannot be started now.

        In line if it is quick and, where *measured*, fast enough; else in a subprocess whose embedding cache has
        *limits*.
        """
        if time.monotonic() < self._not_before_s.get(version, 0.0):
            return None
        try:
            predictor = await self.in_line(version, measured=measured) or self.subprocess(version, limits)
        except Exception as error:
            logger.warning("lengths: %s could not be started: %s: %s", version, type(error).__name__, error)
            self._not_before_s[version] = time.monotonic() + AGAIN_S
            return None
        self._not_before_s.pop(version, None)
        return RunningVersion(version, predictor)

    @staticmethod
    async def in_line(version: LengthVersion, *, measured: bool = True) -> InLine | None:
        """Return a predictor in this process; None if *version* is not quick or, where *measured*, not fast enough."""
        if not quick(version.kind):
            return None
        model = await asyncio.to_thread(load, version.kind, version.path)
        if measured:
            most_s = settings.LENGTH_INLINE_US / 1e6
            if most_s <= 0 or not await asyncio.to_thread(fast_enough, model, most_s):
                return None
        return InLine(model)

    @staticmethod
    def subprocess(version: LengthVersion, limits: Limits | None = None) -> SubprocessPredictor:
        predictor = SubprocessPredictor(arguments=(version.kind, version.path), threads=settings.LENGTH_TORCH_THREADS)
        predictor.limits = limits or predictor.limits
        predictor.start()
        return predictor


class Answering:
    """The running versions, by the models that they answer for. Not for several threads."""

    def __init__(self, starter: Starter) -> None:
        self.starter = starter
        self.limits = Limits()
        self.active: RunningVersion | None = None
        self.named: dict[LengthVersion, RunningVersion] = {}
        """Versions whose kind models name, other than the active one."""
        self._of_model: dict[str, LengthVersion] = {}

    def of(self, model: str) -> RunningVersion | None:
        """Return the version that answers for *model*: the active one if the named one cannot be started."""
        version = self._of_model.get(model)
        return self.active if version is None else self.named.get(version, self.active)

    def all(self) -> list[RunningVersion]:
        return [*([self.active] if self.active else []), *self.named.values()]

    def reports(self) -> list[dict[str, Any]]:
        """Return a report per running version, with the models that name its kind."""
        named = defaultdict(list)
        for model, version in sorted(self._of_model.items()):
            named[version].append(model)
        return [{**one.report(), "models": named[one.version]} for one in self.all()]

    def set_limits(self, limits: Limits) -> None:
        """Set the *limits* of embedding caches from now on."""
        self.limits = limits
        for running in self.all():
            running.predictor.limits = limits

    async def take(self, assigned: Assigned) -> None:
        """Run the versions that are *assigned*, and stop the others."""
        active = self.active
        if active is None or assigned.active != active.version:
            await self._take_active(assigned.active)
        wanted = {version for version in assigned.of_model.values() if version != assigned.active}
        for version in wanted - self.named.keys():
            running = await self._start(version)
            if running is not None:
                self.named[version] = running
        self._of_model = dict(assigned.of_model)
        for version in self.named.keys() - wanted:
            await self.named.pop(version).predictor.stop()
        for running in self.all():
            await self._move(running)

    async def stop(self) -> None:
        for running in self.all():
            await running.predictor.stop()

    async def _take_active(self, version: LengthVersion) -> None:
        running = await self._start(version)
        if running is None:
            if self.active is None and version != BUNDLED:
                await self._take_active(BUNDLED)
            return
        before, self.active = self.active, running
        if before is not None:
            await before.predictor.stop()

    async def _start(self, version: LengthVersion) -> RunningVersion | None:
        running = await self.starter.start(version, self.limits)
        if running is not None:
            where = "in a subprocess" if running.predictor.own_process else "in line"
            logger.info("lengths: %s answers %s", version, where)
        return running

    async def _move(self, running: RunningVersion) -> None:
        """Move *running* into a subprocess if it proved too slow, and back in line once the machine is fast enough."""
        now_s = time.monotonic()
        if running.predictor.too_slow:
            running.in_line_again_s = now_s + IN_LINE_AGAIN_S
            await running.replace(self.starter.subprocess(running.version, self.limits))
            logger.info("lengths: %s answers in a subprocess", running.version)
        elif running.predictor.own_process and quick(running.version.kind):
            if running.in_line_again_s == math.inf and settings.LENGTH_INLINE_US > 0:
                running.in_line_again_s = now_s + IN_LINE_AGAIN_S
            if now_s < running.in_line_again_s:
                return
            running.in_line_again_s = now_s + IN_LINE_AGAIN_S
            in_line = await self.starter.in_line(running.version)
            if in_line is not None:
                running.in_line_again_s = math.inf
                await running.replace(in_line)
                logger.info("lengths: %s answers in line again", running.version)


class FinishedRequest(NamedTuple):
    """A request that the active version answered."""

    query: LengthQuery
    real_tokens: float
    cut: bool
    budgets: Budgets
    at: float  # epoch seconds


class Shadows:
    """Versions in shadow, one of each kind at most."""

    def __init__(self, starter: Starter) -> None:
        self.starter = starter
        self._running: dict[LengthVersion, RunningVersion] = {}
        self._finished: deque[FinishedRequest] = deque(maxlen=SHADOWED)

    @property
    def names(self) -> list[str]:
        return [str(version) for version in self._running]

    async def take(self, versions: Sequence[LengthVersion]) -> None:
        """Run *versions*. A quick one runs in a thread: its speed is measured when it is promoted."""
        for version in self._running.keys() - set(versions):
            await self._running.pop(version).predictor.stop()
        for version in versions:
            if version not in self._running and (running := await self.starter.start(version, measured=False)):
                self._running[version] = running
                self._finished.clear()

    def see(self, query: LengthQuery, real_tokens: float, budgets: Budgets, *, cut: bool) -> None:
        """Queue *query*, which the active version answered, for the shadows; *budgets* are those of its model."""
        if self._running:
            self._finished.append(FinishedRequest(query, real_tokens, cut, budgets, time.time()))

    def reports(self, budgets: Iterable[Budgets]) -> list[dict[str, Any]]:
        """Return a report per shadow in a subprocess, with the *budgets* of the models that it predicts for."""
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
        """Return the errors that each shadow would have made on the last requests."""
        finished = list(self._finished)
        self._finished.clear()
        return [one for running in list(self._running.values()) for one in await _measures_of(running, finished)]

    async def stop(self) -> None:
        for running in self._running.values():
            await running.predictor.stop()


async def _measures_of(running: RunningVersion, finished: Sequence[FinishedRequest]) -> list[Measured]:
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
    """Return replies and the seconds that each took (0 in line), asked one by one, as requests mostly come."""
    predictor = running.predictor
    if isinstance(predictor, InLine):
        return await asyncio.to_thread(lambda: [(predictor.ask_now(query, SHADOW_BUDGET_S), 0.0) for query in queries])
    replies: list[tuple[Estimate | Unanswered, float]] = []
    for query in queries:
        began = time.perf_counter()
        replies.append((await predictor.ask(query, SHADOW_BUDGET_S), time.perf_counter() - began))
    return replies
