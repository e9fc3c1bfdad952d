"""Versions of the length model that answer in a gateway: the one in use, and those whose kind models name.

Each has its predictor, on the event loop or in a process of its own, and what it was put right by. A version that cannot be
taken up leaves what there was.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from typing import Any, Final, NamedTuple

from django.conf import settings

from controlplane.lengths import notes
from controlplane.lengths.services import BUNDLED, Assigned, InUse
from forecasting.lengths import MODELS, ON_ENCODER, LengthQuery
from forecasting.lengths.service.calibration import DriftAlarm, PerPair
from forecasting.lengths.service.embedding_cache import Lesson, Limits
from forecasting.lengths.service.online import Online
from forecasting.lengths.service.predictor import Answer, InLine, Quick, SubprocessPredictor, Why, fast_enough
from forecasting.lengths.service.subprocess_server import load

logger = logging.getLogger(__name__)

AGAIN_S: Final = 60.0
"""After a version could not be taken up, until it is tried again."""
NO_CACHE: Final = Limits()
IN_LINE_AGAIN_S: Final = 120.0
"""A model that was too slow to answer in line is measured again after this: the machine may have had much else to do."""


class Budgets(NamedTuple):
    """How long a request of one model waits for its predicted length at most, in seconds."""

    usual_s: float
    encoder_s: float
    """Where a length model on an encoder is asked."""

    def of(self, kind: str) -> float:
        return self.encoder_s if kind in ON_ENCODER else self.usual_s


def quick(kind: str) -> bool:
    """Whether models of *kind* may answer on the event loop, and be loaded in a gateway at all."""
    return hasattr(MODELS.get(kind), "predict_one")


def own_process(version: InUse, limits: Limits = NO_CACHE) -> SubprocessPredictor:
    """A process of its own for *version*, started; *limits* are those of its embedding cache."""
    arguments = (version.kind, version.file)
    predictor = SubprocessPredictor(arguments=arguments, threads=settings.LENGTH_TORCH_THREADS)
    predictor.limits = limits
    predictor.start()
    return predictor


class Answerer:
    """A version that answers requests."""

    def __init__(self, version: InUse, predictor: InLine | SubprocessPredictor) -> None:
        self.version = version
        self.predictor = predictor
        self.online = Online(notes.reader())
        self.alarms: PerPair[tuple[str, str], DriftAlarm] = PerPair(DriftAlarm)
        self.in_line_again_s = math.inf
        self._restarts = 0  # of predictors that were there before this one

    @property
    def too_slow(self) -> bool:
        return isinstance(self.predictor, InLine) and self.predictor.too_slow

    @property
    def restarts(self) -> int:
        return self._restarts + self.predictor.restarts

    async def ask(self, query: LengthQuery, budget_s: float) -> Answer | Why:
        return await self.predictor.ask(query, budget_s)

    def teach(self, lesson: Lesson) -> None:
        """A request that it was asked about is done."""
        if isinstance(self.predictor, SubprocessPredictor):
            self.predictor.teach(lesson)

    async def replace(self, predictor: InLine | SubprocessPredictor) -> None:
        """Answer by *predictor* from now on; times are counted on."""
        before, self.predictor = self.predictor, predictor
        predictor.timing = before.timing
        self._restarts += before.restarts
        await before.stop()

    def report(self) -> dict[str, Any]:
        """For the published summary."""
        return {
            "version": self.version.name,
            "kind": self.version.kind,
            "own_process": isinstance(self.predictor, SubprocessPredictor),
            "restarts": self.restarts,
            **self.predictor.timing.report(),
        }


class Answering:
    """Who answers for which model. Not for several threads."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.active: Answerer | None = None
        self.named: dict[InUse, Answerer] = {}
        """Versions whose kind models name, other than the one in use."""
        self._of_model: dict[str, InUse] = {}
        self._not_before_s: dict[InUse, float] = {}

    def of(self, model: str) -> Answerer | None:
        """Who answers for *model*; the version in use, where what it names cannot be taken up."""
        version = self._of_model.get(model)
        return self.active if version is None else self.named.get(version, self.active)

    def all(self) -> list[Answerer]:
        return [*([self.active] if self.active else []), *self.named.values()]

    def reports(self) -> list[dict[str, Any]]:
        """Of each that answers, with the models that name its kind."""
        named = defaultdict(list)
        for model, version in sorted(self._of_model.items()):
            named[version].append(model)
        return [{**one.report(), "models": named[one.version]} for one in self.all()]

    def keep_to(self, limits: Limits) -> None:
        """Let embedding caches have *limits* from now on."""
        self.limits = limits
        for answerer in self.all():
            if isinstance(answerer.predictor, SubprocessPredictor):
                answerer.predictor.limits = limits

    async def take(self, assigned: Assigned) -> None:
        """Let those answer that are *assigned* now."""
        active = self.active
        if active is None or assigned.active != active.version:
            await self._take_active(assigned.active)
        wanted = {version for version in assigned.of_model.values() if version != assigned.active}
        for version in wanted - self.named.keys():
            predictor = await self._made(version)
            if predictor is not None:
                self.named[version] = Answerer(version, predictor)
        self._of_model = dict(assigned.of_model)
        for version in self.named.keys() - wanted:
            await self.named.pop(version).predictor.stop()
        for answerer in self.all():
            await self._move(answerer)

    async def stop(self) -> None:
        for answerer in self.all():
            await answerer.predictor.stop()

    async def _take_active(self, version: InUse) -> None:
        predictor = await self._made(version)
        if predictor is None:
            if self.active is None and version != BUNDLED:
                await self._take_active(BUNDLED)
            return
        before, self.active = self.active, Answerer(version, predictor)
        if before is not None:
            await before.predictor.stop()

    async def _made(self, version: InUse) -> InLine | SubprocessPredictor | None:
        """A predictor for *version*; None where there can be none now."""
        if time.monotonic() < self._not_before_s.get(version, 0.0):
            return None
        try:
            predictor = await self._in_line(version) or own_process(version, self.limits)
        except Exception as error:
            logger.warning("lengths: %s could not be taken up: %s: %s", version.name, type(error).__name__, error)
            self._not_before_s[version] = time.monotonic() + AGAIN_S
            return None
        self._not_before_s.pop(version, None)
        where = "in line" if isinstance(predictor, InLine) else "in a subprocess"
        logger.info("lengths: %s answers %s", version.name, where)
        return predictor

    async def _in_line(self, version: InUse) -> InLine | None:
        """*version* on the event loop, if it is fast enough for that. Raises what `load` raises."""
        if not quick(version.kind):
            return None
        model: Quick = await asyncio.to_thread(load, version.kind, version.file)
        if settings.LENGTH_INLINE_US <= 0:
            return None
        fast = await asyncio.to_thread(fast_enough, model, settings.LENGTH_INLINE_US / 1e6)
        return InLine(model) if fast else None

    async def _move(self, answerer: Answerer) -> None:
        """Move *answerer* into a process if it proved too slow, and back in line when the machine has become fast enough."""
        now_s = time.monotonic()
        name = answerer.version.name
        if answerer.too_slow:
            answerer.in_line_again_s = now_s + IN_LINE_AGAIN_S
            await answerer.replace(own_process(answerer.version, self.limits))
            logger.info("lengths: %s answers in a subprocess", name)
        elif isinstance(answerer.predictor, SubprocessPredictor) and quick(answerer.version.kind):
            if answerer.in_line_again_s == math.inf and settings.LENGTH_INLINE_US > 0:
                answerer.in_line_again_s = now_s + IN_LINE_AGAIN_S
            if now_s < answerer.in_line_again_s:
                return
            answerer.in_line_again_s = now_s + IN_LINE_AGAIN_S
            in_line = await self._in_line(answerer.version)
            if in_line is not None:
                answerer.in_line_again_s = math.inf
                await answerer.replace(in_line)
                logger.info("lengths: %s answers in line again", name)
