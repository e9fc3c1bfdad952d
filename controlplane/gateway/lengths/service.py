"""The length service on the data path: how many tokens a request will produce, within a budget, from what knows best.

In this order: a prompt that was seen (exact cache), one much like it (lexical cache), the version of the length model that
answers, put right for its (model, tenant) (where it is an encoder, after the embedding cache of its process), and the prior.
Nothing here can fail a request: what raises, is late or makes no sense is counted, and the prior answers. When a request
ends, all learn from it, in microseconds; what takes longer (rows, the shadow's predictions) waits for `flush`, beside
the event loop.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import Counter, defaultdict
from typing import Any, Final

from channels.db import database_sync_to_async

from controlplane.gateway.admission.validation import Call
from controlplane.gateway.lengths.answering import Answerer, Answering, Budgets
from controlplane.gateway.lengths.prediction import FORCED, SOURCES, Prediction, bounded, query_of
from controlplane.gateway.lengths.shadows import Shadows
from controlplane.jobs.record import Job, Jobs
from controlplane.lengths import notes, services
from controlplane.lengths.notes import Drift, Notes, Sampled
from controlplane.lengths.selectors import CACHE, EMBEDDING, LEXICAL, PRIOR
from controlplane.lengths.services import BUNDLED, Assigned
from controlplane.tuning.selectors import Values
from forecasting.lengths import LengthPrior, LengthQuery, OutputQuery
from forecasting.lengths.service.cache import NORMAL, CacheKey, LengthCache, Seen, warm_up
from forecasting.lengths.service.calibration import Calibration, PerPair, log_ratio
from forecasting.lengths.service.embedding_cache import Lesson, Limits
from forecasting.lengths.service.predictor import Answer, InLine, Why
from forecasting.lengths.service.timing import Timing

logger = logging.getLogger(__name__)

FLUSH_S: Final = 5.0
REFRESH_S: Final = 2.0
PRIOR_SPREAD: Final = 0.9
"""Standard deviation of the logarithm of lengths about the prior's mean, until it is known."""


class LengthService:
    def __init__(self, prior: LengthPrior, jobs: Jobs | None = None) -> None:
        self.prior = prior
        self.cache: LengthCache | None = None
        self._cached_by: tuple[float, ...] = ()
        self.answering = Answering()
        self._budgets: dict[str, Budgets] = {}  # by model, as the settings say
        self.tune(Values())
        self.shadows = Shadows()
        self.answered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()  # by `Why`
        self.late = 0
        self.timing = Timing()
        self.notes = Notes()
        self._prior_quantiles: PerPair[tuple[str, str], Calibration] = PerPair(Calibration)
        self._drawn: Counter[str] = Counter()  # requests of each model that could have been samples, this time
        self._places: defaultdict[str, list[int]] = defaultdict(list)  # of each model's samples among the notes
        self._tasks: list[asyncio.Task[None]] = []
        self._jobs = jobs or Jobs()

    # Life

    async def start(self) -> None:
        """Take up the active version; without one, and without a database, the bundled student."""
        versions = self._jobs.add("length-versions", REFRESH_S, "database")
        flushed = self._jobs.add("length-notes", FLUSH_S, "database")
        with versions:
            await self._refresh()
        if self.answering.active is None and self.on:
            await self.answering.take(Assigned(BUNDLED, (), {}))
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
        await self.answering.stop()
        await self.shadows.stop()

    @staticmethod
    async def _every(job: Job, work: Any) -> None:
        while True:
            await asyncio.sleep(job.period_s)
            with job:
                await work()

    def tune(self, values: Values) -> None:
        """Go by the settings *values* from now on. A cache of another size, age or similarity begins empty."""
        self._values, self._tuned = values, values.of()
        self._budgets.clear()
        tuned, self.on = self._tuned, self._tuned.LENGTHS
        cached_by = (tuned.LENGTH_CACHE_ENTRIES, tuned.LENGTH_CACHE_S, tuned.LENGTH_SIMILARITY) if self.on else ()
        if cached_by != self._cached_by:
            self.cache = LengthCache(*cached_by) if cached_by and tuned.LENGTH_CACHE_ENTRIES else None
            self._cached_by = cached_by
        self.answering.keep_to(
            Limits(tuned.LENGTH_EMBEDDING_ENTRIES, tuned.LENGTH_CACHE_S, tuned.LENGTH_EMBEDDING_SIMILARITY)
        )

    def budgets(self, model: str) -> Budgets:
        """How long a request of *model* waits for its predicted length at most."""
        budgets = self._budgets.get(model)
        if budgets is None:
            tuned = self._values.of(model)
            budgets = Budgets(tuned.LENGTH_BUDGET_MS / 1000, tuned.LENGTH_ENCODER_BUDGET_MS / 1000)
            self._budgets[model] = budgets
        return budgets

    def budget_s(self, model: str) -> float:
        """The same, for the version that answers for *model* now."""
        answerer = self.answering.of(model)
        return self.budgets(model).of(answerer.version.kind if answerer else "")

    async def _refresh(self) -> None:
        """Take up what answers and what is in the shadow now. Raises what the database raises; the last versions stay."""
        if not self.on:
            return
        if self.answering.active is None:
            await asyncio.to_thread(warm_up)
        assigned = await database_sync_to_async(services.assigned)()
        await self.answering.take(assigned)
        await self.shadows.take(assigned.shadows)

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
        self.answered[SOURCES.get(prediction.source, "model")] += 1
        elapsed_s = time.perf_counter() - began
        self.late += elapsed_s > self.budget_s(asked.model) or prediction.late
        self.timing.took(elapsed_s)
        return prediction

    async def _ask(self, call: Call, tenant: str, asked: OutputQuery, prompt_tokens: int) -> Prediction:
        query = query_of(call, tenant, asked, prompt_tokens)
        key = None
        if self.cache is not None:
            key = self.cache.key(query, call.prompt_characters)
            for source, look in ((CACHE, self.cache.exact), (LEXICAL, self.cache.nearest)):
                seen: Seen | None = look(key) if key is not None else None
                tokens = seen.tokens(asked.max_tokens) if seen is not None else 0.0
                if seen is not None and tokens:
                    answer = Answer(tokens, seen.quantiles(tokens))
                    return bounded(asked, answer, source, query=query, key=key, seen=seen.count)
        answerer = self.answering.of(asked.model)
        reply: Answer | Why = Why.DOWN
        if answerer is not None:
            reply = await answerer.ask(query, self.budget_s(asked.model))
        why = reply if isinstance(reply, Why) else None
        if why:
            self.failed[why] += 1
            answerer, reply = self._next_best(answerer, query)
        if isinstance(reply, Why) or answerer is None:
            prediction = self._by_prior(asked, tenant, PRIOR, why or Why.DOWN)
            prediction.query, prediction.key = query, key
        elif reply.seen:
            prediction = bounded(asked, reply, EMBEDDING, query=query, key=key, seen=reply.seen)
        else:
            righted = answerer.online.right(query, reply.tokens, reply.quantiles)
            right = Answer(righted.tokens, righted.quantiles)
            name = answerer.version.name
            prediction = bounded(
                asked, right, name, raw=reply, query=query, key=key, righted=righted, by=answerer, why=why or ""
            )
        if isinstance(reply, Answer) and reply.number and answerer is not None:
            prediction.asked = answerer, reply.number
        prediction.late = why is Why.LATE
        return prediction

    def _next_best(self, asked: Answerer | None, query: LengthQuery) -> tuple[Answerer | None, Answer | Why]:
        """What the version in use says at once, where *asked*, another one, had no answer."""
        active = self.answering.active
        if active is None or active is asked or not isinstance(active.predictor, InLine):
            return None, Why.DOWN
        return active, active.predictor.ask_now(query, self.budgets(query.model).of(active.version.kind))

    def _by_prior(self, asked: OutputQuery, tenant: str | None, source: str, why: str) -> Prediction:
        tokens = self.prior.output_tokens(asked)
        each = tokens / asked.sequences
        quantiles = (each,) * len(NORMAL)
        if source == PRIOR:
            around = [each * math.exp(PRIOR_SPREAD * z) for z in NORMAL]
            learnt = self._prior_quantiles[asked.model, tenant or asked.tenant].apply(each, around)
            quantiles = learnt[1]  # of its own mean the prior takes care itself
        return bounded(asked, Answer(each, quantiles), source, why=why)

    def _budgets_ms(self, report: dict[str, Any]) -> list[float]:
        """Of the models that the length model of *report* answers for, ascending, each once."""
        models = list(report["models"])
        active = self.answering.active
        if active is not None and report["version"] == active.version.name:
            named = {model for other in self.answering.reports() for model in other["models"]}
            models += ["", *(self._values.rows.keys() - named)]
        return sorted({self.budgets(model).of(report["kind"]) * 1000 for model in models})

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
        if prediction.asked is not None:
            answerer, number = prediction.asked
            answerer.teach(Lesson(number, real, cut))
        tokens, quantiles = prediction.served.tokens, prediction.served.quantiles
        by = prediction.by
        if by is not None and prediction.raw is not None and prediction.righted is not None:
            by.online.learn(query, prediction.righted, real, cut=cut)
            alarm = by.alarms[pair]
            if not cut and alarm.add(log_ratio(real, prediction.raw.tokens), now):
                logger.info("lengths: answers of %s to %s are %s than they were", *pair, alarm.raised)
                self.notes.drifts.append(Drift(*pair, alarm.raised, by.version.name))
            if by is self.answering.active:
                self.shadows.see(query, real, self.budgets(query.model), cut=cut)
        elif prediction.source == PRIOR:
            around = [tokens * math.exp(PRIOR_SPREAD * z) for z in NORMAL]
            self._prior_quantiles[pair].learn(tokens, around, real, cut=cut)
        self.notes.measure(now, *pair, prediction.source, (tokens, quantiles[len(quantiles) // 2], quantiles[-1]), real)
        if not cut and (place := self._drawn_place(query.model)) is not None:
            sample = Sampled(now, tenant_id, query, round(tokens), prediction.source, max(1, round(real)))
            if place < len(self.notes.samples):
                self.notes.samples[place] = sample
            else:
                self.notes.samples.append(sample)

    def _drawn_place(self, model: str) -> int | None:
        """Where to keep a request of *model* as a sample, if it is drawn: an even share of each model's requests, as many
        as are wanted between two flushes."""
        most = self._tuned.LENGTH_SAMPLES_PER_MIN * FLUSH_S / 60
        most = math.floor(most) + (random.random() < most % 1)
        drawn = self._drawn[model] = self._drawn[model] + 1
        places = self._places[model]
        if len(places) < most:
            places.append(len(self.notes.samples))
            return places[-1]
        return random.choice(places) if places and random.random() < len(places) / drawn else None

    async def flush(self) -> bool:
        """As `_flush`; False if the database could not be written."""
        try:
            await self._flush()
        except Exception as error:
            logger.warning("lengths: notes could not be written and are held: %s", type(error).__name__)
            return False
        return True

    async def _flush(self) -> None:
        """Let the shadows predict, and write what was noted, or hold it. Raises what the database raises."""
        for measured in await self.shadows.measures():
            self.notes.measure(*measured)
        taken, self.notes = self.notes, Notes()
        self._drawn.clear()
        self._places.clear()
        if not taken:
            return
        try:
            await database_sync_to_async(notes.write)(taken)
        except Exception:
            self.notes.take_back(taken)
            raise

    # What is asked of it

    def snapshot(self) -> dict[str, Any]:
        """For the published summary."""
        p50_ms, p99_ms = self.timing.percentiles()
        active, answerers = self.answering.active, self.answering.all()
        return {
            "answered": {
                name: self.answered[name] for name in ("cache", "lexical", "embedding", "model", "prior", FORCED)
            },
            "p50_ms": p50_ms,
            "p99_ms": p99_ms,
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
                for answerer in answerers
                for (model, tenant), alarm in answerer.alarms.items()
                if alarm.raised
            ],
            "version": active.version.name if active else "",
            "shadow": ", ".join(self.shadows.names),
            "models": [
                *({**report, "budgets_ms": self._budgets_ms(report)} for report in self.answering.reports()),
                *self.shadows.reports([self.budgets(model) for model in ("", *self._values.rows)]),
            ],
            "restarts": sum(answerer.restarts for answerer in answerers),
        }
