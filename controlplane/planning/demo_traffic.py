"""The demo's traffic: who sends what to which deployments, and a generated past of it in marked minute rows."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np
from django.conf import settings
from django.db import transaction

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.fleet.models import Deployment
from controlplane.gateway.models import MinuteRow
from scheduling.model_task import Task
from workers.traffic.waves import BURST_EVERY_S, BURST_FACTOR, BURST_S, EMBEDDINGS, KINDS, Stream, streams

MINUTE_S: Final = 60
LENGTHS: Final = {
    "interactive": {2_048: (255, 1.4, 148, 0.9), 4_096: (257, 1.4, 149, 0.9), 131_072: (2_020, 1.5, 342, 1.4)},
    "non-interactive": {
        2_048: (1_099, 0.4, 281, 0.65), 4_096: (1_283, 0.6, 333, 0.9), 131_072: (10_512, 0.7, 2_051, 1.65),
    },
    "opportunistic": {2_048: (893, 0.5, 333, 0.6), 4_096: (976, 0.65, 400, 0.8), 131_072: (7_824, 0.7, 2_261, 1.3)},
}  # fmt: skip
"""By SLO class and context: prompt and output tokens of a request, each as mean and coefficient of variation.

Of 4,000 requests each of `waves`, as emulated instances answer them: below what is requested, and not in proportion.
"""
EMBEDDED: Final = (970, 0.62, 0, 0.0)
"""The same of a request for embeddings, all its texts together."""
KINDS_OF: Final = {Task.GENERATE: KINDS, Task.EMBED: EMBEDDINGS}
SHARES: Final = {
    "acme": {"interactive": 1.0, "non-interactive": 0.4},
    "globex": {"non-interactive": 0.6, "opportunistic": 1.0},
}
"""Senders of the demo's traffic: a share of each SLO class, summing to one."""
JOBS: Final = {("globex", "bloom-176b", "opportunistic"): 300}
"""Requests of a job by tenant, model and class: more at once than its instances run, so that some wait."""
RUNS_OF, RUN_CONTEXT_TOKENS = "acme", 4096
"""Sender of runs of applications, to one interactive stream of each region whose model has this context."""
PAST_HOURS: Final = 12.0
"""Generated before the first request: 90 days of the demo's traffic, in a second or two."""
ADDED, REMOVED = "demo.past_generated", "demo.past_removed"


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
    made, with_runs = [], set[str]()
    for task, kinds in KINDS_OF.items():
        for stream in streams(endpoints[task], keys, settings.DEMO_DAY_S, kinds):
            runs = tenant.name == RUNS_OF and stream.slo_class == "interactive" and not stream.kind.embeds
            runs = runs and stream.context_tokens >= RUN_CONTEXT_TOKENS and stream.region not in with_runs
            with_runs |= {stream.region} if runs else set()
            job = JOBS.get((tenant.name, stream.model, stream.slo_class), 0)
            made.append(replace(stream, share=shares[stream.slo_class], job=job, runs=runs))
    return made


def lengths(slo_class: str, context_tokens: int) -> tuple[float, float, float, float]:
    """Return the lengths of the nearest context, by ratio."""
    known = LENGTHS[slo_class]
    return known[min(known, key=lambda context: abs(math.log(context / context_tokens)))]


def minutes(sources: Iterable[Stream], begin: datetime, count: int, seed: int) -> Iterator[MinuteRow]:
    """Yield unsaved rows of the *count* minutes from *begin* on (a whole minute), for minutes with any request."""
    begin_s = begin.timestamp()
    for number, stream in enumerate(sources):
        draw = np.random.default_rng([seed, number])
        rates = np.array([stream.rate_per_s(begin_s + MINUTE_S * (at + 0.5), burst=False) for at in range(count)])
        bursts = draw.random(count) < MINUTE_S / (BURST_EVERY_S + BURST_S)
        rates *= np.where(bursts, 1 + (BURST_FACTOR - 1) * BURST_S / MINUTE_S, 1.0)
        requests = draw.poisson(rates * MINUTE_S)
        prompt, varies, output, output_varies = (
            EMBEDDED if stream.kind.embeds else lengths(stream.slo_class, stream.context_tokens)
        )
        for at in np.flatnonzero(requests).tolist():
            n = int(requests[at])
            yield MinuteRow(
                minute=begin + timedelta(seconds=MINUTE_S * at),
                model=stream.model,
                region=stream.region,
                slo_class=stream.slo_class,
                requests=n,
                prompt_tokens=_sum(n, prompt, varies, draw),
                output_tokens=_sum(n, output, output_varies, draw) if output else 0,
                generated=True,
            )


def _sum(count: int, mean: float, variation: float, draw: np.random.Generator) -> int:
    """Return the sum of *count* lengths with that *mean* and coefficient of *variation*, gamma-distributed."""
    return max(count, round(draw.gamma(count / variation**2, mean * variation**2)))


@transaction.atomic
def generate_past(now: datetime, hours: float = PAST_HOURS) -> int:
    """Give a fleet without counted minutes *hours* of them before *now*; return the number of rows.

    Once only: not alongside counted rows, nor again after it was removed.
    """
    count = round(hours * 60)
    if count < 1 or MinuteRow.objects.exists() or Event.objects.filter(kind=ADDED).exists():
        return 0
    merged: dict[tuple[str, str, str], Stream] = {}  # over senders
    for stream in (stream for tenant in senders() for stream in streams_to(tenant)):
        series = (stream.model, stream.region, stream.slo_class)
        merged[series] = replace(stream, share=stream.share + (merged[series].share if series in merged else 0.0))
    if not merged:
        return 0
    began_s, end = time.monotonic(), now.astimezone(UTC).replace(second=0, microsecond=0)
    made = minutes([merged[series] for series in sorted(merged)], end - timedelta(minutes=count), count, seed=0)
    rows = MinuteRow.objects.bulk_create(made, batch_size=5_000)
    took_s = round(time.monotonic() - began_s, 2)
    after = {"rows": len(rows), "hours": hours, "until": end.isoformat(), "took_s": took_s}
    record(ADDED, actor="seed_demo", after=after, reason="so that forecasts and plans are there at first sight")
    return len(rows)


@transaction.atomic
def remove_past() -> int:
    """Delete the generated minutes and return their number. Counted ones stay."""
    count, _ = MinuteRow.objects.filter(generated=True).delete()
    if count:
        record(REMOVED, actor="seed_demo", before={"rows": count})
    return count
