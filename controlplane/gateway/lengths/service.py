"""The length service on the data path: how many tokens a request will produce, within a budget, from what knows best.

In this order: a prompt that was seen (exact cache), one much like it (semantic cache), the active version of the length
model, put right for its (model, tenant), and the prior. Nothing here can fail a request: what raises, is late or makes no
sense is counted, and the prior answers. When a request ends, all of them learn from it, in microseconds; what takes longer
(rows, the shadow's predictions) waits for `flush`, beside the event loop.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import Counter, deque
from typing import Any, Final

import numpy as np
from channels.db import database_sync_to_async

from controlplane.gateway.admission.validation import Call
from controlplane.gateway.lengths.prediction import FORCED, SOURCES, Prediction, bounded, query_of
from controlplane.jobs.record import Job, Jobs
from controlplane.lengths import notes, services
from controlplane.lengths.notes import Drift, Notes, Sampled
from controlplane.lengths.selectors import CACHE, PRIOR, SEMANTIC, SHADOW
from controlplane.lengths.services import BUNDLED, InUse
from controlplane.tunable import Tunable
from controlplane.tuning.selectors import without_rows
from forecasting.lengths import LengthModel, LengthPrior, LengthQuery, OutputQuery
from forecasting.lengths.service.cache import NORMAL, CacheKey, LengthCache, Seen, warm_up
from forecasting.lengths.service.calibration import Calibration, DriftAlarm, PerPair, log_ratio
from forecasting.lengths.service.online import Online
from forecasting.lengths.service.predictor import Answer, InLine, SubprocessPredictor, Why, checked, fast_enough
from forecasting.lengths.service.subprocess_server import load

logger = logging.getLogger(__name__)

FLUSH_S: Final = 5.0
REFRESH_S: Final = 2.0
AGAIN_S: Final = 60.0
"""After a version could not be taken up, until it is tried again."""
IN_LINE_AGAIN_S: Final = 120.0
"""A model that was too slow to answer in line is measured again after this: the machine may have had much else to do."""
SHADOWED: Final = 32
"""Requests that a shadow predicts in each `FLUSH_S`."""
TIMES: Final = 4096
"""Answers over which the service's own latency is measured."""
PRIOR_SPREAD: Final = 0.9
"""Standard deviation of the logarithm of lengths about the prior's mean, until it is known."""


class LengthService:
    def __init__(self, prior: LengthPrior, jobs: Jobs | None = None) -> None:
        self.prior = prior
        self.predictor: InLine | SubprocessPredictor | None = None
        self.cache: LengthCache | None = None
        self._cached_by: tuple[float, ...] = ()
        self.tune(without_rows())
        self.active = BUNDLED
        self.shadow: InUse | None = None
        self.answered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()  # by `Why`
        self.late = 0
        self.restarts = 0  # of predictors that were there before this one
        self.notes = Notes()
        self._shadow_model: LengthModel | None = None
        self._shadowed: deque[tuple[LengthQuery, float, bool, float]] = deque(maxlen=SHADOWED)
        self._online = Online(notes.reader())
        self._prior_quantiles: PerPair[tuple[str, str], Calibration] = PerPair(Calibration)
        self._shadow_online = Online(notes.reader())
        self._alarms: PerPair[tuple[str, str], DriftAlarm] = PerPair(DriftAlarm)
        self._times_ms = np.zeros(TIMES, np.float32)
        self._timed = 0
        self._drawn: Counter[str] = Counter()  # requests of each model that could have been samples, this time
        self._not_before_s: dict[InUse, float] = {}
        self._in_line_again_s = math.inf
        self._tasks: list[asyncio.Task[None]] = []
        self._jobs = jobs or Jobs()

    # Life

    async def start(self) -> None:
        """Take up the active version; without one, and without a database, the bundled student."""
        versions = self._jobs.add("length-versions", REFRESH_S, "database")
        flushed = self._jobs.add("length-notes", FLUSH_S, "database")
        with versions:
            await self._refresh()
        if self.predictor is None and self.on:
            await self._take_up(BUNDLED)
        self._tasks = [
            asyncio.create_task(self._every(versions, self._refresh), name="length versions"),
            asyncio.create_task(self._every(flushed, self._flush), name="length notes"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(Exception):
            await self._flush()
        if self.predictor is not None:
            await self.predictor.stop()

    @staticmethod
    async def _every(job: Job, work: Any) -> None:
        while True:
            await asyncio.sleep(job.period_s)
            with job:
                await work()

    def tune(self, tuned: Tunable) -> None:
        """Go by the settings *tuned* from now on. A cache of another size, age or similarity begins empty."""
        self._tuned = tuned
        self.on, self.budget_s = tuned.LENGTHS, tuned.LENGTH_BUDGET_MS / 1000
        if self.predictor is not None:
            self.predictor.budget_s = self.budget_s
        cached_by = (tuned.LENGTH_CACHE_ENTRIES, tuned.LENGTH_CACHE_S, tuned.LENGTH_SIMILARITY) if self.on else ()
        if cached_by != self._cached_by:
            self.cache = LengthCache(*cached_by) if cached_by and tuned.LENGTH_CACHE_ENTRIES else None
            self._cached_by = cached_by

    # Versions

    async def _refresh(self) -> None:
        """Take up what is active and in the shadow now; what cannot be taken up leaves what is there.

        Raises what the database raises; the last versions stay.
        """
        if not self.on:
            return
        if self.predictor is None:
            await asyncio.to_thread(warm_up)
        active, shadow = await database_sync_to_async(services.in_use)()
        slow = isinstance(self.predictor, InLine) and self.predictor.too_slow
        if active != self.active or self.predictor is None or slow:
            await self._take_up(active, in_subprocess=slow)
        elif time.monotonic() >= self._in_line_again_s:
            await self._back_in_line()
        if shadow != self.shadow:
            await self._take_up_shadow(shadow)

    async def _take_up(self, version: InUse, *, in_subprocess: bool = False) -> None:
        if time.monotonic() < self._not_before_s.get(version, 0.0):
            return
        try:
            predictor = await self._predictor(version, in_subprocess)
        except Exception as error:
            logger.warning("lengths: %s could not be taken up: %s: %s", version.name, type(error).__name__, error)
            self._not_before_s = {version: time.monotonic() + AGAIN_S}
            return
        before, self.predictor = self.predictor, predictor
        if version != self.active:
            self._online.clear()
            self._alarms.clear()
        self.active = version
        logger.info(
            "lengths: %s answers %s",
            version.name,
            "in a subprocess" if isinstance(predictor, SubprocessPredictor) else "in line",
        )
        if before is not None:
            self.restarts += before.restarts
            await before.stop()

    async def _predictor(self, version: InUse, in_subprocess: bool) -> InLine | SubprocessPredictor:
        if not in_subprocess and (in_line := await self._in_line(version)):
            return in_line
        if in_subprocess:
            self._in_line_again_s = time.monotonic() + IN_LINE_AGAIN_S
        predictor = SubprocessPredictor(self.budget_s, arguments=(version.kind, version.file))
        predictor.start()
        return predictor

    async def _in_line(self, version: InUse) -> InLine | None:
        """*version* on the event loop, if it is fast enough for that; when to measure again, if it might be one day."""
        self._in_line_again_s = math.inf
        model = await asyncio.to_thread(load, version.kind, version.file)
        if not hasattr(model, "predict_one") or self._tuned.LENGTH_INLINE_US <= 0:
            return None
        if await asyncio.to_thread(fast_enough, model, self._tuned.LENGTH_INLINE_US / 1e6):
            return InLine(model, self.budget_s)
        self._in_line_again_s = time.monotonic() + IN_LINE_AGAIN_S
        return None

    async def _back_in_line(self) -> None:
        """Let the active version answer in line again, if the machine has become fast enough."""
        in_line, before = await self._in_line(self.active), self.predictor
        if in_line is None or before is None:
            return
        self.predictor = in_line
        logger.info("lengths: %s answers in line again", self.active.name)
        self.restarts += before.restarts
        await before.stop()

    async def _take_up_shadow(self, version: InUse | None) -> None:
        if version is not None and time.monotonic() < self._not_before_s.get(version, 0.0):
            return
        model = None
        if version is not None:
            try:
                model = await asyncio.to_thread(load, version.kind, version.file)
            except Exception as error:
                logger.warning("lengths: the shadow %s could not be loaded: %s", version.name, type(error).__name__)
                self._not_before_s = {version: time.monotonic() + AGAIN_S}
                return
        self._shadow_online.clear()
        self._shadowed.clear()
        self._shadow_model, self.shadow = model, version

    # A request comes

    async def predict(self, call: Call, tenant: str, asked: OutputQuery, prompt_tokens: int) -> Prediction:
        """How long the answer to *call* will be. Never raises, and waits for the budget at most."""
        began = time.perf_counter()
        if asked.ignore_eos and asked.max_tokens:
            prediction = self._by_prior(asked, None, FORCED, "")
        elif not self.on:
            prediction = self._by_prior(asked, None, PRIOR, "off")
        else:
            try:
                prediction = await self._ask(call, tenant, asked, prompt_tokens)
            except Exception as error:
                logger.warning(
                    "lengths: a prediction failed: %s", type(error).__name__
                )  # its text may hold the prompt's
                self.failed[Why.FAILED] += 1
                prediction = self._by_prior(asked, None, PRIOR, Why.FAILED)
        self.answered[SOURCES.get(prediction.source, "student")] += 1
        elapsed_s = time.perf_counter() - began
        self.late += elapsed_s > self.budget_s
        self._times_ms[self._timed % TIMES] = elapsed_s * 1000
        self._timed += 1
        return prediction

    async def _ask(self, call: Call, tenant: str, asked: OutputQuery, prompt_tokens: int) -> Prediction:
        query = query_of(call, tenant, asked, prompt_tokens)
        key = None
        if self.cache is not None:
            key = self.cache.key(query, call.prompt_characters)
            for source, look in ((CACHE, self.cache.exact), (SEMANTIC, self.cache.nearest)):
                seen: Seen | None = look(key) if key is not None else None
                tokens = seen.tokens(asked.max_tokens) if seen is not None else 0.0
                if seen is not None and tokens:
                    answer = Answer(tokens, seen.quantiles(tokens))
                    return bounded(asked, answer, source, query=query, key=key, seen=seen.count)
        reply: Answer | Why = Why.DOWN
        if self.predictor is not None:
            reply = await self.predictor.ask(query)
        if isinstance(reply, Why):
            self.failed[reply] += 1
            prediction = self._by_prior(asked, tenant, PRIOR, reply)
            prediction.query, prediction.key = query, key
            return prediction
        righted = self._online.right(query, *reply)
        right = Answer(righted.tokens, righted.quantiles)
        return bounded(asked, right, self.active.name, raw=reply, query=query, key=key, righted=righted)

    def _by_prior(self, asked: OutputQuery, tenant: str | None, source: str, why: str) -> Prediction:
        tokens = self.prior.output_tokens(asked)
        each = tokens / asked.sequences
        quantiles = (each,) * len(NORMAL)
        if source == PRIOR:
            around = [each * math.exp(PRIOR_SPREAD * z) for z in NORMAL]
            learnt = self._prior_quantiles[asked.model, tenant or asked.tenant].apply(each, around)
            quantiles = learnt[1]  # of its own mean the prior takes care itself
        return bounded(asked, Answer(each, quantiles), source, why=why)

    # A request ends

    def learn(self, prediction: Prediction | None, asked: OutputQuery, tenant_id: int, output_tokens: int) -> None:
        """A request that was served to its end came to *output_tokens* over all its sequences. Never raises.

        Forced lengths teach nothing; one that `max_tokens` cut is taken for at least that long.
        """
        if (
            prediction is None
            or prediction.query is None
            or prediction.source == FORCED
            or asked.ignore_eos
            or output_tokens < 1
        ):
            return
        try:
            self._learn(prediction, prediction.query, prediction.key, asked, tenant_id, output_tokens / asked.sequences)
        except Exception as error:
            logger.warning("lengths: nothing was learnt of a request: %s", type(error).__name__)

    def _learn(
        self,
        prediction: Prediction,
        query: LengthQuery,
        key: CacheKey | None,
        asked: OutputQuery,
        tenant_id: int,
        real: float,
    ) -> None:
        now, pair = time.time(), (query.model, query.tenant)
        cut = asked.max_tokens is not None and real >= asked.max_tokens
        if self.cache is not None and key is not None:
            self.cache.learn(key, real, cut=cut)
        tokens, quantiles = prediction.served
        if prediction.raw is not None and prediction.righted is not None:
            self._online.learn(query, prediction.righted, real, cut=cut)
            alarm = self._alarms[pair]
            if not cut and alarm.add(log_ratio(real, prediction.raw.tokens), now):
                logger.info("lengths: answers of %s to %s are %s than they were", *pair, alarm.raised)
                self.notes.drifts.append(Drift(*pair, alarm.raised, self.active.name))
            if self._shadow_model is not None:
                self._shadowed.append((query, real, cut, now))
        elif prediction.source == PRIOR:
            around = [tokens * math.exp(PRIOR_SPREAD * z) for z in NORMAL]
            self._prior_quantiles[pair].learn(tokens, around, real, cut=cut)
        self.notes.measure(now, *pair, prediction.source, (tokens, quantiles[len(quantiles) // 2], quantiles[-1]), real)
        if not cut:
            self._draw(Sampled(now, tenant_id, query, round(tokens), prediction.source, max(1, round(real))))

    def _draw(self, sample: Sampled) -> None:
        """Keep an even share of the requests of each model, as many as are wanted between two flushes."""
        model = sample.query.model
        most = self._tuned.LENGTH_SAMPLES_PER_MIN * FLUSH_S / 60
        most = math.floor(most) + (random.random() < most % 1)
        self._drawn[model] += 1
        mine = [index for index, other in enumerate(self.notes.samples) if other.query.model == model]
        if len(mine) < most:
            self.notes.samples.append(sample)
        elif mine and random.random() < len(mine) / self._drawn[model]:
            self.notes.samples[random.choice(mine)] = sample

    async def flush(self) -> bool:
        """As `_flush`; False if the database could not be written."""
        try:
            await self._flush()
        except Exception as error:
            logger.warning("lengths: notes could not be written and are held: %s", type(error).__name__)
            return False
        return True

    async def _flush(self) -> None:
        """Let the shadow predict, and write what was noted, or hold it. Raises what the database raises."""
        shadowed, model, name = list(self._shadowed), self._shadow_model, self.shadow
        self._shadowed.clear()
        if shadowed and model is not None and name is not None:
            for measured in await asyncio.to_thread(self._predict_beside, model, name, shadowed):
                self.notes.measure(*measured)
        taken, self.notes = self.notes, Notes()
        self._drawn.clear()
        if not taken:
            return
        try:
            await database_sync_to_async(notes.write)(taken)
        except Exception:
            self.notes.take_back(taken)
            raise

    def _predict_beside(
        self, model: LengthModel, version: InUse, shadowed: list[tuple[LengthQuery, float, bool, float]]
    ) -> list[tuple[float, str, str, str, tuple[float, float, float], float]]:
        """Measures of what the shadow would have said of requests that the active version answered."""
        try:
            tokens, quantiles = model.predict([query for query, *_ in shadowed])
        except Exception as error:
            logger.warning("lengths: the shadow %s failed: %s", version.name, type(error).__name__)
            return []
        measured = []
        for (query, real, cut, at), middle, around in zip(shadowed, tokens.tolist(), quantiles.tolist(), strict=True):
            raw = checked(middle, around)
            if isinstance(raw, Why):
                continue
            most = float(query.max_tokens or math.inf)
            righted = self._shadow_online.right(query, *raw)
            self._shadow_online.learn(query, righted, real, cut=cut)
            right, quantile = righted.tokens, righted.quantiles
            predicted = (min(right, most), min(quantile[len(quantile) // 2], most), min(quantile[-1], most))
            measured.append((at, query.model, query.tenant, f"{SHADOW} {version.name}", predicted, real))
        return measured

    # What is asked of it

    def snapshot(self) -> dict[str, Any]:
        """For the published summary."""
        timed = self._times_ms[: min(self._timed, TIMES)]
        p50_ms, p99_ms = np.percentile(timed, [50, 99]).tolist() if timed.size else (None, None)
        return {
            "answered": {name: self.answered[name] for name in ("cache", "semantic", "student", "prior", FORCED)},
            "p50_ms": None if p50_ms is None else round(p50_ms, 3),
            "p99_ms": None if p99_ms is None else round(p99_ms, 3),
            "late": self.late,
            "failed": sum(self.failed.values()),
            "cache_entries": len(self.cache) if self.cache is not None else 0,
            "drift": [
                {
                    "model": model,
                    "tenant": tenant,
                    "what": alarm.raised,
                    "longer": {"longer": True, "shorter": False}.get(alarm.raised),
                    "since": round(alarm.raised_at, 3),
                }
                for (model, tenant), alarm in self._alarms.items()
                if alarm.raised
            ],
            "version": self.active.name if self.on else "",
            "shadow": self.shadow.name if self.shadow else "",
            "apart": isinstance(self.predictor, SubprocessPredictor),
            "restarts": self.restarts + (self.predictor.restarts if self.predictor else 0),
        }
