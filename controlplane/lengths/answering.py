"""Versions of the length model that run in a gateway: the active one, and those whose kind models name.

A version that cannot be started leaves what there was, and is tried again later.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from typing import Any, Final, NamedTuple

from django.conf import settings

from controlplane.lengths import notes
from controlplane.lengths.models import BUNDLED, LengthVersion
from controlplane.lengths.services import Assigned
from forecasting.lengths import MODELS, ON_ENCODER
from forecasting.lengths.caches import Limits
from forecasting.lengths.online import DriftAlarm, Online, RecentlyUsed
from forecasting.lengths.predictor import InLine, Predictor, SubprocessPredictor, fast_enough
from forecasting.lengths.subprocess_server import load

logger = logging.getLogger(__name__)

AGAIN_S: Final = 60.0
"""After a version could not be started, until it is tried again."""
IN_LINE_AGAIN_S: Final = 120.0
"""A model that was too slow to answer in line is measured again after this: the machine may have been busy."""


class Budgets(NamedTuple):
    """How long a request of one model waits for its predicted length at most, in seconds."""

    usual_s: float
    encoder_s: float
    """Where a length model on an encoder is asked."""

    def of(self, kind: str) -> float:
        return self.encoder_s if kind in ON_ENCODER else self.usual_s


def quick(kind: str) -> bool:
    """Whether models of *kind* may answer on the event loop, and be loaded in a gateway at all."""
    return kind in MODELS and MODELS[kind].quick


class RunningVersion:
    """A version, its predictor, and what is learned online of its errors."""

    def __init__(self, version: LengthVersion, predictor: Predictor) -> None:
        self.version = version
        self.predictor = predictor
        self.online = Online(notes.reader())
        self.alarms: RecentlyUsed[tuple[str, str], DriftAlarm] = RecentlyUsed(DriftAlarm)
        self.in_line_again_s = math.inf
        self._restarts = 0  # of predictors that were there before this one

    @property
    def restarts(self) -> int:
        return self._restarts + self.predictor.restarts

    async def replace(self, predictor: Predictor) -> None:
        """Answer by *predictor* from now on; its timing continues that of the one before."""
        before, self.predictor = self.predictor, predictor
        predictor.timing = before.timing
        self._restarts += before.restarts
        await before.stop()

    def report(self) -> dict[str, Any]:
        """For the published summary."""
        return {
            "version": str(self.version),
            "kind": self.version.kind,
            "own_process": self.predictor.own_process,
            "restarts": self.restarts,
            **self.predictor.timing.report(),
        }


class Starter:
    """Starts versions, and notes those that could not be started."""

    def __init__(self) -> None:
        self._not_before_s: dict[LengthVersion, float] = {}

    async def start(
        self, version: LengthVersion, limits: Limits | None = None, *, measured: bool = True
    ) -> RunningVersion | None:
        """*version*, running; None where it cannot be started now.

        In line if it is quick and, where that is to be *measured*, fast enough; else in a process of its own, whose
        embedding cache has *limits*.
        """
        if time.monotonic() < self._not_before_s.get(version, 0.0):
            return None
        try:
            predictor = await self.in_line(version, measured=measured) or self.own_process(version, limits)
        except Exception as error:
            logger.warning("lengths: %s could not be taken up: %s: %s", version, type(error).__name__, error)
            self._not_before_s[version] = time.monotonic() + AGAIN_S
            return None
        self._not_before_s.pop(version, None)
        return RunningVersion(version, predictor)

    @staticmethod
    async def in_line(version: LengthVersion, *, measured: bool = True) -> InLine | None:
        """*version* in this process; None if it is not quick, or not fast enough where that is to be *measured*."""
        if not quick(version.kind):
            return None
        model = await asyncio.to_thread(load, version.kind, version.path)
        if measured:
            most_s = settings.LENGTH_INLINE_US / 1e6
            if most_s <= 0 or not await asyncio.to_thread(fast_enough, model, most_s):
                return None
        return InLine(model)

    @staticmethod
    def own_process(version: LengthVersion, limits: Limits | None = None) -> SubprocessPredictor:
        arguments = (version.kind, version.path)
        predictor = SubprocessPredictor(arguments=arguments, threads=settings.LENGTH_TORCH_THREADS)
        predictor.limits = limits or predictor.limits
        predictor.start()
        return predictor


class Answering:
    """Which running version answers for which model. Not for several threads."""

    def __init__(self, starter: Starter) -> None:
        self.starter = starter
        self.limits = Limits()
        self.active: RunningVersion | None = None
        self.named: dict[LengthVersion, RunningVersion] = {}
        """Versions whose kind models name, other than the active one."""
        self._of_model: dict[str, LengthVersion] = {}

    def of(self, model: str) -> RunningVersion | None:
        """The version that answers for *model*: the active one, where the named one cannot be started."""
        version = self._of_model.get(model)
        return self.active if version is None else self.named.get(version, self.active)

    def all(self) -> list[RunningVersion]:
        return [*([self.active] if self.active else []), *self.named.values()]

    def reports(self) -> list[dict[str, Any]]:
        """Of each that answers, with the models that name its kind."""
        named = defaultdict(list)
        for model, version in sorted(self._of_model.items()):
            named[version].append(model)
        return [{**one.report(), "models": named[one.version]} for one in self.all()]

    def set_limits(self, limits: Limits) -> None:
        """Let embedding caches have *limits* from now on."""
        self.limits = limits
        for running in self.all():
            running.predictor.limits = limits

    async def take(self, assigned: Assigned) -> None:
        """Let the versions answer that are *assigned* now."""
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
        """Move *running* into a process if it proved too slow, and back in line when the machine has become fast enough."""
        now_s = time.monotonic()
        if running.predictor.too_slow:
            running.in_line_again_s = now_s + IN_LINE_AGAIN_S
            await running.replace(self.starter.own_process(running.version, self.limits))
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
