"""Versions of the length model that run in a gateway: the bundled default, the active one, and the one in shadow.

The default answers on the event loop, and where the active version does not answer in time. An active version of a quick
kind runs on the loop too, another in a subprocess; the shadow always in a subprocess, where it predicts the requests
that the active version answered and has no effect. A version that cannot be started leaves the previous one in place and
is tried again later. One that starts learns first from the stored samples, so that what tenants' requests taught survives.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from channels.db import database_sync_to_async
from django.db import DatabaseError

from controlplane.lengths import notes, selectors
from controlplane.lengths.models import BUNDLED, LengthSample, LengthVersion
from controlplane.lengths.services import Assigned
from forecasting.lengths import MODELS, LengthModel, LengthQuery
from forecasting.lengths.online import Online
from forecasting.lengths.predictor import InLine, Predictor, SubprocessPredictor
from forecasting.lengths.subprocess_server import load

logger = logging.getLogger(__name__)

AGAIN_S: Final = 60.0
"""Delay before a version that could not be started is tried again."""
RECALLED: Final = 1_000
"""Newest samples that a version learns from when it starts: half a second of a core."""
SHADOWED: Final = 32
"""Requests that the shadow predicts between two flushes."""


class RunningVersion:
    """A version, its predictor, and its online corrections."""

    def __init__(self, version: LengthVersion, predictor: Predictor) -> None:
        self.version, self.name = version, str(version)
        self.predictor = predictor
        self.online = Online(notes.reader())

    def recall(self, model: LengthModel | None, samples: Sequence[LengthSample]) -> None:
        """Learn from *samples*, oldest first, by predictions of *model*; without one, only usual lengths."""
        known = [(row.query, row.output_tokens) for row in samples]
        known = [(query, real) for query, real in known if self.online.reader.can_read(query)]
        if model is None or not known:
            for query, real in known:
                self.online.learn_usual(query, real)
            return
        for (query, real), tokens, quantiles in zip(known, *model.predict([query for query, _ in known]), strict=True):
            self.online.learn(query, self.online.correct(query, float(tokens), quantiles.tolist()), real)

    def report(self) -> dict[str, Any]:
        """Return the version's part of the published summary."""
        return {
            "version": self.name,
            "kind": self.version.kind,
            "own_process": self.predictor.own_process,
            "restarts": self.predictor.restarts,
            **self.predictor.timing.report(),
        }


class FinishedRequest(NamedTuple):
    """A request that the active version answered."""

    query: LengthQuery
    real_tokens: float
    cut: bool
    budget_s: float
    at: float  # epoch seconds


class Answering:
    """The running versions. Not for several threads."""

    def __init__(self) -> None:
        self.default: RunningVersion | None = None
        self.active: RunningVersion | None = None
        self.shadow: RunningVersion | None = None
        self._not_before_s: dict[LengthVersion, float] = {}
        self._finished: deque[FinishedRequest] = deque(maxlen=SHADOWED)

    async def run(self, assigned: Assigned) -> None:
        """Run the versions that are *assigned*, and stop the others."""
        if self.default is None:
            self.default = await self._start(BUNDLED)
            self.active = self.active or self.default
        if self.active is None or self.active.version != assigned.active:
            started = self.default if assigned.active == BUNDLED else await self._start(assigned.active)
            if started is not None:
                before, self.active = self.active, started
                logger.info("lengths: %s answers", started.version)
                await self._stop(before)
        if assigned.shadow != (self.shadow and self.shadow.version):
            before, self.shadow = self.shadow, None
            self._finished.clear()
            await self._stop(before)
            if assigned.shadow is not None:
                self.shadow = await self._start(assigned.shadow, separate=True)

    async def stop(self) -> None:
        for running in (self.active, self.shadow):
            if running is not None:
                await running.predictor.stop()

    async def _stop(self, running: RunningVersion | None) -> None:
        if running is not None and running is not self.default:
            await running.predictor.stop()

    async def _start(self, version: LengthVersion, *, separate: bool = False) -> RunningVersion | None:
        """Start *version*, in a subprocess if it is not quick or to run *separate*; None if it cannot be started now."""
        if time.monotonic() < self._not_before_s.get(version, 0.0):
            return None
        try:
            quick = MODELS[version.kind].quick
            model = await asyncio.to_thread(load, version.kind, version.path) if quick else None
            if model is not None and not separate:
                predictor: Predictor = InLine(model)
            else:
                predictor = SubprocessPredictor(arguments=(version.kind, version.path))
                predictor.start()
            running = RunningVersion(version, predictor)
            with contextlib.suppress(DatabaseError):
                samples = await database_sync_to_async(selectors.newest_samples)(RECALLED)
                await asyncio.to_thread(running.recall, model, samples)
            return running
        except Exception as error:
            logger.warning("lengths: %s could not be started: %s: %s", version, type(error).__name__, error)
            self._not_before_s[version] = time.monotonic() + AGAIN_S
            return None

    def asked(self) -> list[RunningVersion]:
        """Return the versions to ask: the active one, then the default one where that has no answer."""
        return [one for one in dict.fromkeys((self.active, self.default)) if one is not None and self.active]

    # The shadow

    def finished(
        self, by: RunningVersion, query: LengthQuery, real_tokens: float, budget_s: float, *, cut: bool
    ) -> None:
        """Queue *query*, which *by* answered, for the shadow; *budget_s* is what a request of its model waits."""
        if self.shadow is not None and by is self.active:
            self._finished.append(FinishedRequest(query, real_tokens, cut, budget_s, time.time()))

    def take_finished(self) -> list[FinishedRequest]:
        """Return the queued requests, and forget them."""
        finished = list(self._finished)
        self._finished.clear()
        return finished
