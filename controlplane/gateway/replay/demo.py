"""Targets of the demo's traffic, and the generated past before it: minute rows, marked as generated."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np
from django.conf import settings
from django.db import transaction
from numpy.typing import NDArray

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.fleet.models import Deployment
from controlplane.gateway.models import MinuteRow
from controlplane.gateway.replay.waves import (
    BURST_EVERY_S,
    BURST_FACTOR,
    BURST_S,
    EMBEDDINGS,
    JOB_EVERY_S,
    KINDS,
    Job,
    Stream,
    streams,
)
from scheduling.model_task import Task

MINUTE_S = 60
STEP_S = 10  # within which the rate is constant; a burst is a whole number of steps
STEPS = MINUTE_S // STEP_S


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a request and coefficients of variation, as the demo's instances count them."""

    prompt_tokens: float
    prompt_variation: float
    output_tokens: float
    output_variation: float


LENGTHS = {
    "interactive": {
        2_048: Lengths(255, 1.4, 148, 0.9),
        4_096: Lengths(257, 1.4, 149, 0.9),
        131_072: Lengths(2_020, 1.5, 342, 1.4),
    },
    "non-interactive": {
        2_048: Lengths(1_099, 0.4, 281, 0.65),
        4_096: Lengths(1_283, 0.6, 333, 0.9),
        131_072: Lengths(10_512, 0.7, 2_051, 1.65),
    },
    "opportunistic": {
        2_048: Lengths(893, 0.5, 333, 0.6),
        4_096: Lengths(976, 0.65, 400, 0.8),
        131_072: Lengths(7_824, 0.7, 2_261, 1.3),
    },
}
"""Lengths by SLO class and context. Below what is requested, and not in proportion: instructions have separate lengths.

Means of 4,000 requests each of `waves`, as emulated instances answer them; a test draws them again.
"""

EMBEDDED = Lengths(970, 0.62, 0, 0.0)
"""Lengths of requests for embeddings, all texts of one together."""


def minutes(sources: Sequence[Stream], begin: datetime, count: int, seed: int) -> Iterator[MinuteRow]:
    """Yield unsaved rows of the *count* minutes from *begin* on (a whole minute), for minutes with any request."""
    for number, stream in enumerate(sources):
        yield from _minutes(stream, int(begin.timestamp()), count, np.random.default_rng([seed, number]))


def lengths(slo_class: str, context_tokens: int) -> Lengths:
    """Return the lengths of the nearest context, by ratio."""
    known = LENGTHS[slo_class]
    return known[min(known, key=lambda context: abs(math.log(context / context_tokens)))]


def _minutes(stream: Stream, begin_s: int, count: int, draw: np.random.Generator) -> Iterator[MinuteRow]:
    steps = count * STEPS
    middles = begin_s + STEP_S * (np.arange(steps) + 0.5)
    rates = np.array([stream.rate_per_s(moment, burst=False) for moment in middles.tolist()])
    rates[_bursts(steps, draw)] *= BURST_FACTOR
    requests = draw.poisson(rates * STEP_S).reshape(count, STEPS).sum(axis=1)
    of_minute = np.repeat(np.arange(count), requests)
    of = EMBEDDED if stream.kind.embeds else lengths(stream.slo_class, stream.context_tokens)
    most = stream.context_tokens * stream.kind.texts
    prompts = _tokens(of.prompt_tokens, of.prompt_variation, most, of_minute, count, draw)
    outputs = np.zeros(count)
    if not stream.kind.embeds:
        outputs = _tokens(of.output_tokens, of.output_variation, most // 3, of_minute, count, draw)
    for minute in np.flatnonzero(requests).tolist():
        yield MinuteRow(
            minute=datetime.fromtimestamp(begin_s + MINUTE_S * minute, UTC),
            model=stream.model,
            region=stream.region,
            slo_class=stream.slo_class,
            requests=int(requests[minute]),
            prompt_tokens=int(prompts[minute]),
            output_tokens=int(outputs[minute]),
            generated=True,
        )


def _bursts(steps: int, draw: np.random.Generator) -> NDArray[np.bool_]:
    """Return which of *steps* have a burst: as in `waves`, each comes some time after the last has ended."""
    length = round(BURST_S / STEP_S)
    most = 2 * steps * STEP_S / (BURST_EVERY_S + BURST_S) + 10
    begins = np.cumsum(draw.exponential(BURST_EVERY_S, int(most)) + BURST_S) - BURST_S
    first = (begins // STEP_S).astype(np.int64)
    inside = (first[:, None] + np.arange(length)).ravel()
    bursts = np.zeros(steps, bool)
    bursts[inside[inside < steps]] = True
    return bursts


def _tokens(
    mean: float, variation: float, most: int, of_minute: NDArray[np.int64], count: int, draw: np.random.Generator
) -> NDArray[np.float64]:
    """Return sums by minute of lengths with that *mean*, one per request, log-normal and cut at *most*."""
    sigma = math.sqrt(math.log1p(variation**2))
    each = np.minimum(draw.lognormal(math.log(mean) - sigma**2 / 2, sigma, len(of_minute)), most)
    return np.asarray(np.bincount(of_minute, weights=np.rint(each), minlength=count), np.float64)


KINDS_OF = {Task.GENERATE: KINDS, Task.EMBED: EMBEDDINGS}
"""Kinds of requests by the task of a model."""
SHARES = {
    "acme": {"interactive": 1.0, "non-interactive": 0.4},
    "globex": {"non-interactive": 0.6, "opportunistic": 1.0},
}
"""Senders of the demo's traffic: a share of each SLO class, summing to one."""
JOBS = {"globex": ("bloom-176b", "opportunistic")}
"""Senders of additional jobs, with model and SLO class: more at once than its instances run, so that some wait."""
JOB_FIRST_S = 40.0
RUNS_OF = "acme"
"""Sends runs of applications too."""
RUN_EVERY_S = 40.0
"""Mean gap between two runs in a region."""
PAST_HOURS = 12.0  # 90 days of the demo's traffic, in a second or two
ADDED, REMOVED = "demo.past_generated", "demo.past_removed"
BATCH_ROWS = 5_000


def senders() -> list[Tenant]:
    return list(Tenant.objects.filter(name__in=SHARES, active=True).order_by("name"))


def streams_to(tenant: Tenant, secret: str = "") -> list[Stream]:
    """Return every stream that *tenant* sends to the active deployments that generate or embed, with the API key *secret*.

    A tenant outside the demo sends all of each class that it may use.
    """
    endpoints: dict[str, set[tuple[str, str, int]]] = {task: set() for task in KINDS_OF}
    for row in Deployment.objects.filter(active=True, model__task__in=KINDS_OF).select_related("model", "region"):
        endpoints[row.model.task].add((row.model.name, row.region.name, row.model.context_tokens))
    allowed = {*tenant.slo_classes.values_list("name", flat=True), tenant.default_slo_class.name}
    shares = SHARES.get(tenant.name, dict.fromkeys(KINDS, 1.0))
    keys = {name: secret for name in KINDS if name in allowed and name in shares}
    return [
        replace(stream, share=shares[stream.slo_class])
        for task, kinds in KINDS_OF.items()
        for stream in streams(endpoints[task], keys, settings.DEMO_DAY_S, kinds)
    ]


def jobs_of(tenant: Tenant, sources: Iterable[Stream]) -> list[Job]:
    """Return the jobs that *tenant* sends besides its *sources*, to one region after the other."""
    wanted = JOBS.get(tenant.name)
    own = [stream for stream in sources if (stream.model, stream.slo_class) == wanted]
    return [Job(stream, JOB_FIRST_S + at * JOB_EVERY_S / len(own)) for at, stream in enumerate(own)]


def together(sources: Iterable[Stream]) -> list[Stream]:
    """Merge *sources* over senders: one for each (model, region, class)."""
    merged: dict[tuple[str, str, str], Stream] = {}
    for stream in sources:
        series = (stream.model, stream.region, stream.slo_class)
        share = stream.share + (merged[series].share if series in merged else 0.0)
        merged[series] = replace(stream, share=share)
    return [merged[series] for series in sorted(merged)]


@transaction.atomic
def generate_past(now: datetime, hours: float = PAST_HOURS) -> int:
    """Give a fleet without counted minutes *hours* of them before *now*; return the number of rows.

    Once only: not alongside counted rows, nor again after it was removed.
    """
    if MinuteRow.objects.exists() or Event.objects.filter(kind=ADDED).exists():
        return 0
    sources = together(stream for tenant in senders() for stream in streams_to(tenant))
    count = round(hours * 60)
    if not sources or count < 1:
        return 0
    began_s = time.monotonic()
    end = now.replace(second=0, microsecond=0)
    rows = MinuteRow.objects.bulk_create(
        minutes(sources, end - timedelta(minutes=count), count, seed=0), batch_size=BATCH_ROWS
    )
    after = {
        "rows": len(rows),
        "hours": hours,
        "until": end.isoformat(),
        "took_s": round(time.monotonic() - began_s, 2),
    }
    record(ADDED, actor="seed_demo", after=after, reason="so that forecasts and plans are there at first sight")
    return len(rows)


@transaction.atomic
def remove_past() -> int:
    """Delete the generated minutes and return their number. Counted ones stay."""
    count, _ = MinuteRow.objects.filter(generated=True).delete()
    if count:
        record(REMOVED, actor="seed_demo", before={"rows": count})
    return count
