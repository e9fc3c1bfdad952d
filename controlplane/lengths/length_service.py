"""The length service on the data path: predicts the tokens of a request, within a budget, from the best source it has.

In this order: a prompt that was seen (the cache), the active version of the length model, corrected for its tenant, the
bundled one, and the prior. Nothing here can fail a request: what raises, is late or makes no sense is counted, and the
prior answers. When a request ends, all learn from it, in microseconds; what takes longer (rows, the shadow's predictions)
waits for `flush`, off the event loop.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Final

from channels.db import database_sync_to_async
from msgspec import Struct

from controlplane.background import spawn
from controlplane.jobs.record import Job, Jobs
from controlplane.lengths import notes, services
from controlplane.lengths.answering import Answering, RunningVersion
from controlplane.lengths.models import BUNDLED, LengthSample
from controlplane.lengths.notes import Notes
from controlplane.lengths.selectors import CACHE, PRIOR, SHADOW
from controlplane.lengths.services import Assigned
from controlplane.tuning.selectors import Values
from forecasting.lengths import Estimate, LengthPrior, LengthQuery
from forecasting.lengths.caches import NORMAL, CacheKey, LengthCache, Limits
from forecasting.lengths.online import Calibration, Corrected, RecentlyUsed
from forecasting.lengths.predictor import Timing, Unanswered

logger = logging.getLogger(__name__)

PERIOD_S: Final = 2.0
PRIOR_SPREAD: Final = 0.9
"""Standard deviation of the logarithm of lengths around the prior's mean, until it is known."""
FORCED: Final = "forced"
MAX_TOKENS: Final = 2**31 - 1
"""Most tokens that are predicted for a request, whatever it asks for: more fit no column."""
SAMPLES: Final = 2
"""Requests of a model that are kept as samples in each period."""
CACHE_S: Final = 86_400.0
"""Time after which a cached length that was not confirmed is forgotten."""
SHADOW_BUDGET_S: Final = 20.0
"""Timeout of the shadow's process: no request waits for it."""
SOURCES: Final = {CACHE: "cache", PRIOR: "prior", FORCED: FORCED}
"""Names of sources in the published summary; all others are `model`."""


class Prediction(Struct):
    """The prediction for one request; tokens cover all its sequences, those of `served` a single one."""

    tokens: int
    upper_tokens: int
    source: str
    served: Estimate
    query: LengthQuery | None = None
    """None: no length is learned from it."""
    key: CacheKey | None = None
    why: str = ""
    """Why the intended version did not answer."""
    by: RunningVersion | None = None
    """The version that answered; None for the cache or the prior."""
    corrected: Corrected | None = None
    """That version's answer, corrected."""

    def explained(self) -> dict[str, object]:
        """Return the prediction for the ledger's decision trace."""
        traced: dict[str, object] = {"tokens": self.tokens, "upper_tokens": self.upper_tokens, "source": self.source}
        if self.why:
            traced["why"] = self.why
        if self.served.seen:
            traced["seen"] = self.served.seen
        return traced


def clipped(query: LengthQuery, tokens: float, quantiles: tuple[float, ...], seen: int = 0) -> Estimate:
    """Return an estimate within the limits of *query*."""
    least, most = float(max(1, query.min_tokens)), float(query.max_tokens or math.inf)
    tokens, *ends = (min(max(each, least), most) for each in (tokens, *quantiles))
    return Estimate(tokens, tuple(ends), seen)


def bounded(query: LengthQuery, estimate: Estimate, source: str, /, **more: Any) -> Prediction:
    """Return *estimate* within the request's limits, for all its sequences."""
    served = clipped(query, *estimate)
    tokens = min(max(1, round(served.tokens)) * query.sequences, MAX_TOKENS)
    upper = min(max(tokens, math.ceil(served.quantiles[-1]) * query.sequences), MAX_TOKENS)
    return Prediction(tokens, upper, source, served, **more)


class LengthService:
    def __init__(self, prior: LengthPrior, jobs: Jobs | None = None) -> None:
        self.prior = prior
        self.cache: LengthCache | None = None
        self.answering = Answering()
        self.tune(Values())
        self.answered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()  # by `Unanswered`
        self.late = 0
        self.timing = Timing()
        self.notes = Notes()
        self._prior_quantiles: RecentlyUsed[tuple[str, str], Calibration] = RecentlyUsed(Calibration)
        self._drawn: Counter[str] = Counter()  # requests of each model that could have been samples, this time
        self._places: defaultdict[str, list[int]] = defaultdict(list)  # of each model's samples among the notes
        self._tasks: list[asyncio.Task[None]] = []
        self._jobs = jobs or Jobs()

    # Life

    async def start(self) -> None:
        """Start the active version; without one, or without a database, the bundled one."""
        job = self._jobs.add("lengths", PERIOD_S, "database")
        with job:
            await self._refresh()
        if self.answering.active is None and self.on:
            await self.answering.run(Assigned(BUNDLED, None))
        self._tasks = [spawn(self._run(job), "lengths")]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(Exception):
            await self.flush()
        await self.answering.stop()

    async def _run(self, job: Job) -> None:
        """Read which versions answer, and write the notes, in each period."""
        while True:
            await asyncio.sleep(job.period_s)
            with job:
                await self._refresh()
                await self.flush()

    def tune(self, values: Values) -> None:
        """Apply the settings *values*. A cache of another size begins empty."""
        self._values, self._tuned = values, values.of()
        tuned, self.on = self._tuned, self._tuned.LENGTHS
        limits = Limits(tuned.LENGTH_CACHE_ENTRIES, CACHE_S)
        if not self.on or not limits.entries:
            self.cache = None
        elif self.cache is None or self.cache.limits != limits:
            self.cache = LengthCache(limits)

    def budget_s(self, model: str) -> float:
        """Return the longest wait of a request of *model* for its predicted length."""
        return self._values.of(model).LENGTH_BUDGET_MS / 1000

    async def _refresh(self) -> None:
        """Run the active version and the one in shadow. Raises database errors; the last versions stay."""
        if not self.on:
            return
        await self.answering.run(await database_sync_to_async(services.assigned)())

    # A request comes

    async def predict(
        self, query: LengthQuery, read: Callable[[LengthQuery], LengthQuery], characters: int
    ) -> Prediction:
        """Predict the length of the answer to *query*. Never raises, and waits for the budget at most.

        *read* gives the query with its prompt, of which there are *characters* in all; it is called where text is read.
        """
        began, budget_s = time.perf_counter(), self.budget_s(query.model)
        if query.ignore_eos and query.max_tokens:
            prediction = self._by_prior(query, FORCED)
        elif not self.on:
            prediction = self._by_prior(query, PRIOR, why="off")
        else:
            try:
                prediction = await self._ask(read(query), characters, budget_s)
            except Exception as error:
                # Its text may hold the prompt's.
                logger.warning("lengths: a prediction failed: %s", type(error).__name__)
                self.failed[Unanswered.FAILED] += 1
                prediction = self._by_prior(query, PRIOR, why=Unanswered.FAILED)
        self.answered[SOURCES.get(prediction.source, "model")] += 1
        elapsed_s = time.perf_counter() - began
        self.late += elapsed_s > budget_s or prediction.why == Unanswered.LATE
        self.timing.took(elapsed_s)
        return prediction

    async def _ask(self, query: LengthQuery, characters: int, budget_s: float) -> Prediction:
        """Return the cached length, or the corrected answer of the first version that has one, or the prior."""
        key = self.cache.key(query, characters) if self.cache is not None else None
        if self.cache is not None and key is not None:
            seen = self.cache.seen(key)
            estimate = seen.estimate(query.max_tokens) if seen is not None else None
            if estimate is not None:
                return bounded(query, estimate, CACHE, query=query, key=key)
        why = ""
        for running in self.answering.asked():
            reply = await running.predictor.ask(query, budget_s)
            if isinstance(reply, Estimate):
                corrected = running.online.correct(query, reply.tokens, reply.quantiles)
                estimate, source = Estimate(corrected.tokens, corrected.quantiles), running.name
                more = {"why": why, "by": running, "corrected": corrected}
                return bounded(query, estimate, source, query=query, key=key, **more)
            self.failed[reply] += not why
            why = why or reply
        self.failed[Unanswered.DOWN] += not why
        return self._by_prior(query, PRIOR, query=query, key=key, why=why or Unanswered.DOWN)

    def _by_prior(self, query: LengthQuery, source: str, /, **more: Any) -> Prediction:
        each = self.prior.output_tokens(query) / query.sequences
        quantiles = (each,) * len(NORMAL)
        if source == PRIOR:
            around = [each * math.exp(PRIOR_SPREAD * z) for z in NORMAL]
            # Only the quantiles: the prior keeps its own mean right.
            _, quantiles = self._prior_quantiles[query.model, query.tenant].apply(each, around)
        return bounded(query, Estimate(each, quantiles), source, **more)

    # A request ends

    def learn(self, prediction: Prediction | None, tenant_id: int, output_tokens: int) -> None:
        """Learn from a completed request with *output_tokens* over all its sequences. Never raises.

        Forced lengths teach nothing; one that `max_tokens` cut counts as at least that long.
        """
        query = prediction.query if prediction is not None else None
        if prediction is None or query is None or query.ignore_eos or output_tokens < 1:
            return
        try:
            self._learn(prediction, query, tenant_id, output_tokens / query.sequences)
        except Exception as error:
            logger.warning("lengths: nothing was learnt of a request: %s", type(error).__name__)

    def _learn(self, prediction: Prediction, query: LengthQuery, tenant_id: int, real: float) -> None:
        now, pair = time.time(), (query.model, query.tenant)
        cut = query.max_tokens is not None and real >= query.max_tokens
        if self.cache is not None and prediction.key is not None:
            self.cache.learn(prediction.key, real, cut=cut)
        tokens = prediction.served.tokens
        by, corrected = prediction.by, prediction.corrected
        if by is not None and corrected is not None:
            by.online.learn(query, corrected, real, cut=cut)
            self.answering.finished(by, query, real, self.budget_s(query.model), cut=cut)
        elif prediction.source == PRIOR:
            around = [tokens * math.exp(PRIOR_SPREAD * z) for z in NORMAL]
            self._prior_quantiles[pair].learn(tokens, around, real, cut=cut)
        self.notes.measure(now, *pair, prediction.source, prediction.served, real)
        if not cut and (place := self._drawn_place(query.model)) is not None:
            sample = LengthSample.of(query, now, tenant_id, round(tokens), prediction.source, max(1, round(real)))
            if place < len(self.notes.samples):
                self.notes.samples[place] = sample
            else:
                self.notes.samples.append(sample)

    def _drawn_place(self, model: str) -> int | None:
        """Return where to keep a request of *model* as a sample; None if it is not drawn.

        Each model's requests have equal chances, for as many samples as are wanted between two flushes.
        """
        drawn = self._drawn[model] = self._drawn[model] + 1
        places = self._places[model]
        if len(places) < SAMPLES:
            places.append(len(self.notes.samples))
            return places[-1]
        return random.choice(places) if places and random.random() < len(places) / drawn else None

    async def _measure_shadow(self) -> None:
        """Count the errors that the shadow would have made on the last requests, asked one by one as live."""
        running = self.answering.shadow
        for query, real_tokens, cut, budget_s, at in self.answering.take_finished():
            if running is None:
                break
            began = time.perf_counter()
            reply = await running.predictor.ask(query, SHADOW_BUDGET_S)
            late = time.perf_counter() - began > budget_s
            if isinstance(reply, Unanswered):
                continue
            corrected = running.online.correct(query, reply.tokens, reply.quantiles)
            running.online.learn(query, corrected, real_tokens, cut=cut)
            served = clipped(query, corrected.tokens, corrected.quantiles)
            running.predictor.timing.in_time -= late
            self.notes.measure(at, query.model, query.tenant, f"{SHADOW} {running.name}", served, real_tokens, late)

    async def flush(self) -> None:
        """Let the shadow predict, and write the notes, or keep them on failure. Raises database errors."""
        await self._measure_shadow()
        taken, self.notes = self.notes, Notes()
        self._drawn.clear()
        self._places.clear()
        if not taken:
            return
        try:
            await database_sync_to_async(notes.write)(taken)
        except Exception:
            self.notes.add(taken)
            raise

    # Reports

    def snapshot(self) -> dict[str, Any]:
        """Return the service's part of the published summary."""
        p50_ms, p99_ms = self.timing.percentiles()
        active, shadow = self.answering.active, self.answering.shadow
        return {
            "answered": {name: self.answered[name] for name in ("cache", "model", "prior", FORCED)},
            "p50_ms": p50_ms,
            "p99_ms": p99_ms,
            "late": self.late,
            "failed": sum(self.failed.values()),
            "cache_entries": len(self.cache) if self.cache is not None else 0,
            "version": active.name if active else "",
            "shadow": shadow.name if shadow else "",
            "models": [
                {**running.report(), "shadow": running is shadow} for running in (active, shadow) if running is not None
            ],
            "restarts": active.predictor.restarts if active else 0,
        }
