"""Counting usage: hours are rewritten from the ledger whenever it has more of them.

An hour is a pure function of the ledger and of the instances' moves, so counting it again changes nothing, and rows that
come late are in it from the next time on. An hour whose ledger is no longer kept stays as it is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
from django.conf import settings
from django.db import transaction
from django.db.models import Min
from numpy.typing import NDArray

from controlplane.applications.models import ApplicationRun, RunCost
from controlplane.fleet.models import Instance, SloClass
from controlplane.gateway.models import LONG_MS, LedgerRow
from controlplane.usage.models import UsageHour, UsageMark, Work
from controlplane.usage.paid_time import PaidInstance, paid_instances
from controlplane.usage.sharing import Seconds, held_tokens, share
from scheduling.applications.recording import RECOGNIZED

HOUR = timedelta(hours=1)
HOUR_S = 3600.0
LONGEST = timedelta(days=8)  # from arrival to end, of a request that is found again in the hours in which it ran
CHUNK_ROWS, MOST_CHUNKS = 50_000, 1_000
COUNTS = ("requests", "prompt_tokens", "output_tokens")
Series = tuple[int | None, int | None, str, str, Work]
"""Tenant, API key, model, SLO class and kind of work of a row."""
BATCH_LINE = "batch_req_"
"""Begin of the request ids of batch lines."""
READ = ("tenant_id", "api_key_id", "model", "slo_class", "instance", "arrived_at", "queue_ms", "e2e_ms",
        "prompt_tokens", "output_tokens", "request_id", "application", "run")  # fmt: skip
RunKey = tuple[int, str, str]
"""Tenant, application and run."""


class CountedHour(NamedTuple):
    """Rows of one hour, not saved: usage by series, and dollars by application run."""

    rows: list[UsageHour]
    runs: list[RunCost]


@dataclass(frozen=True, slots=True)
class Look:
    """Hours to count after a look at the ledger, and the mark afterwards."""

    hours: list[datetime]
    mark: UsageMark
    whole: bool  # nothing newer is left


def count_usage(now: datetime) -> int:
    """Count what the ledger has since the last time, and the time of the fleet until *now*; returns the hours written.

    Two processes may count at once: the slower one finds the mark moved, and leaves its hours to the next time.
    """
    written = 0
    for _ in range(MOST_CHUNKS):
        mark = UsageMark.objects.first()
        look = look_from(mark, now)
        counted = list(count_hours(look.hours, now))
        with transaction.atomic():
            if not _moved(mark, look.mark):
                return written
            UsageHour.objects.filter(hour__in=look.hours).delete()
            UsageHour.objects.bulk_create([row for hour in counted for row in hour.rows], batch_size=500)
            RunCost.objects.filter(hour__in=look.hours).delete()
            RunCost.objects.bulk_create([row for hour in counted for row in hour.runs], batch_size=500)
        written += len(look.hours)
        if look.whole:
            break
    return written


def _moved(before: UsageMark | None, after: UsageMark) -> bool:
    if before is None:
        if UsageMark.objects.exists():
            return False
        after.save()
        return True
    same = UsageMark.objects.filter(
        pk=before.pk, counted_until=before.counted_until, ledger_pk=before.ledger_pk, seen_pk=before.seen_pk
    )
    values = {"counted_until": after.counted_until, "ledger_pk": after.ledger_pk, "seen_pk": after.seen_pk}
    return bool(same.update(**values))


def look_from(mark: UsageMark | None, now: datetime) -> Look:
    """Which hours the ledger rows after *mark* touch, or time has since, as far as their ledger is kept."""
    oldest = hour_of(now - timedelta(days=settings.LEDGER_KEEP_DAYS)) + HOUR
    if mark is None:
        mark = UsageMark(counted_until=_beginning(now))
    last, hours = mark.ledger_pk, set(hours_between(max(mark.counted_until, oldest), now))
    news = LedgerRow.objects.filter(pk__gt=mark.ledger_pk).order_by("pk")[:CHUNK_ROWS]
    read = list(news.values_list("pk", "arrived_at", "e2e_ms"))
    for last, arrived_at, e2e_ms in read:  # noqa: B007 - the last one is the newest
        hours.update(hours_between(arrived_at, arrived_at + timedelta(milliseconds=e2e_ms or 0.0)))
    whole = len(read) < CHUNK_ROWS
    after = UsageMark(
        counted_until=now, ledger_pk=mark.seen_pk if whole else last, seen_pk=max(last, mark.seen_pk)
    )  # a whole look leaves what it saw for the first time to be seen once more
    return Look(sorted(hour for hour in hours if oldest <= hour <= now), after, whole)


def _beginning(now: datetime) -> datetime:
    """When there was anything to count first."""
    first = (
        LedgerRow.objects.aggregate(at=Min("arrived_at"))["at"],
        Instance.objects.aggregate(at=Min("created_at"))["at"],
    )
    return min([at for at in first if at is not None], default=now)


def hour_of(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def hours_between(since: datetime, until: datetime) -> Iterator[datetime]:
    """The hours from that of *since* to that of *until*."""
    hour = hour_of(since)
    while hour <= until:
        yield hour
        hour += HOUR


def count_hours(hours: Sequence[datetime], now: datetime) -> Iterator[CountedHour]:
    """The rows, not saved, of each of *hours*, which are in order; of the last one until *now*."""
    if not hours:
        return
    fleet = paid_instances(hours[0], now)
    classes = {
        name: ClassPrice(float(factor), Work(kind))
        for name, factor, kind in SloClass.objects.values_list("name", "price_factor", "kind")
    }
    for hour in hours:
        yield count_hour(hour, min(hour + HOUR, now), fleet, classes)


@dataclass(frozen=True, slots=True)
class ClassPrice:
    """Price factor of an SLO class, and its kind of work; the defaults are those of a class that is no longer there."""

    factor: float = 1.0
    work: Work = Work.INTERACTIVE

    def of(self, work: Work) -> float:
        """Return the factor for *work* in this class."""
        return self.factor * (settings.BATCH_PRICE_FACTOR if work is Work.BATCH else 1.0)


def count_hour(
    begin: datetime, end: datetime, fleet: Iterable[PaidInstance], classes: dict[str, ClassPrice]
) -> CountedHour:
    """Count the hour from *begin*, up to *end*.

    The time of each instance is shared as `sharing.share` says; GPU-seconds are those seconds times its GPUs, dollars those
    times their price. They are charged times the factor of their class; opportunistic work at the spot price of the GPUs,
    where they have one.
    """
    ran = ledger_hour(begin, (end - begin).total_seconds(), classes)
    gpu_s, usd, charged = (np.zeros(len(ran.series_of)) for _ in range(3))
    factors = np.array([classes.get(name, ClassPrice()).of(work) for *_, name, work in ran.series])[ran.series_of]
    spot = np.array([work is Work.OPPORTUNISTIC for *_, work in ran.series], dtype=bool)[ran.series_of]
    idle: dict[str, UsageHour] = {}
    for instance in fleet:
        of = np.array(ran.on.get(instance.name, []), dtype=np.intp)
        paid = instance.within(begin.timestamp(), end.timestamp())
        shares_s, idle_s = share(ran.begin_s[of], ran.end_s[of], ran.held[of], paid)
        gpu_s[of] = shares_s * instance.gpus
        usd[of] = gpu_s[of] * instance.usd_per_gpu_s
        charged[of] = usd[of] * factors[of]
        if instance.spot_usd_per_gpu_s is not None:
            charged[of] = np.where(spot[of], gpu_s[of] * instance.spot_usd_per_gpu_s, charged[of])
        if idle_s:
            row = idle.setdefault(instance.model, UsageHour(hour=begin, model=instance.model, work=Work.IDLE))
            row.gpu_s += idle_s * instance.gpus
            row.cost_usd += idle_s * instance.gpus * instance.usd_per_gpu_s
    sums = {
        "requests": ran.arrives,
        "prompt_tokens": ran.prompt_tokens * ran.arrives,
        "output_tokens": ran.output_tokens * ran.arrives,
        "kv_token_s": ran.held * (ran.end_s - ran.begin_s),
        "gpu_s": gpu_s,
        "cost_usd": usd,
        "charged_usd": charged,
    }
    totals = {name: np.bincount(ran.series_of, values, len(ran.series)).tolist() for name, values in sums.items()}
    rows = [
        UsageHour(
            hour=begin,
            tenant_id=tenant,
            api_key_id=key,
            model=model,
            slo_class=slo_class,
            work=work,
            **{name: int(values[at]) if name in COUNTS else values[at] for name, values in totals.items()},
        )
        for at, (tenant, key, model, slo_class, work) in enumerate(ran.series)
    ]
    runs = [
        RunCost(
            hour=begin,
            tenant_id=tenant,
            application=application,
            run=run,
            cost_usd=usd[of].sum().item(),
            charged_usd=charged[of].sum().item(),
        )
        for (tenant, application, run), of in ran.runs.items()
    ]
    return CountedHour(rows + list(idle.values()), runs)


@dataclass(frozen=True, slots=True)
class LedgerHour:
    """Requests that arrived or ran within an hour, as arrays of shape (n,); times in seconds from its beginning, cut to it.

    *on* has the places of those that ran on an instance, by its name.
    """

    series: list[Series]
    series_of: NDArray[np.intp]
    on: dict[str, list[int]]
    arrives: Seconds  # 1 if it arrived within the hour, else 0
    begin_s: Seconds
    end_s: Seconds
    prompt_tokens: Seconds
    output_tokens: Seconds
    held: Seconds
    runs: dict[RunKey, list[int]]
    """Places of the calls of each application run."""


def ledger_hour(begin: datetime, until_s: float, classes: dict[str, ClassPrice]) -> LedgerHour:
    """The hour from *begin*, as far as *until_s* seconds into it."""
    series: dict[Series, int] = {}
    on: dict[str, list[int]] = {}
    series_of, numbers = [], []
    begin_s = begin.timestamp()
    runs: dict[RunKey, list[int]] = {}
    firsts = first_calls(begin)
    for at, (*row, application, run) in enumerate(_ran_within(begin, begin + HOUR)):
        tenant, key, model, slo_class, instance, arrived_at, queue_ms, e2e_ms, prompt_tokens, output_tokens, name = row
        of = (tenant, application, run) if application and run else firsts.get((tenant, arrived_at))
        if of is not None:
            runs.setdefault(of, []).append(at)
        work = Work.BATCH if name.startswith(BATCH_LINE) else classes.get(slo_class, ClassPrice()).work
        series_of.append(series.setdefault((tenant, key, model, slo_class, work), len(series)))
        on.setdefault(instance, []).append(at)
        arrived_s = arrived_at.timestamp() - begin_s
        ran = bool(instance)
        placed_s, ended_s = arrived_s + (queue_ms or 0.0) / 1000, arrived_s + (e2e_ms or 0.0) / 1000
        numbers.append((arrived_s, placed_s, ended_s, prompt_tokens, output_tokens, ran))
    arrived, placed, ended, prompt, output, has_run = np.array(numbers, dtype=float).reshape(-1, 6).T
    placed, ended = np.clip(placed, 0.0, until_s), np.clip(ended, 0.0, until_s)
    return LedgerHour(
        series=list(series),
        series_of=np.array(series_of, dtype=np.intp),
        on=on,
        arrives=((arrived >= 0) & (arrived < HOUR_S)).astype(float),
        begin_s=placed,
        end_s=np.maximum(placed, ended),
        prompt_tokens=prompt,
        output_tokens=output,
        held=held_tokens(prompt, output) * has_run,
        runs=runs,
    )


def first_calls(begin: datetime) -> dict[tuple[int, datetime], RunKey]:
    """Return recognized runs of an hour or the one before, by tenant and arrival of their first, unmarked, calls."""
    began = ApplicationRun.objects.filter(began_at__gte=begin - HOUR, began_at__lt=begin + HOUR)
    rows = (
        began.filter(run__startswith=RECOGNIZED)
        .order_by()
        .values_list("application__tenant", "application__name", "run", "began_at")
    )
    return {(tenant, began_at): (tenant, application, run) for tenant, application, run, began_at in rows}


def _ran_within(begin: datetime, end: datetime) -> Iterator[tuple[Any, ...]]:
    """Ledger rows that arrived before *end* and ended after *begin*. Those that took long have their own index.

    Lost executions of batch lines are charged to no tenant: their time is idle.
    """
    long_ago = begin - timedelta(milliseconds=LONG_MS)
    lately = LedgerRow.objects.filter(arrived_at__gte=long_ago, arrived_at__lt=end)
    longest = LedgerRow.objects.filter(e2e_ms__gt=LONG_MS, arrived_at__gte=begin - LONGEST, arrived_at__lt=long_ago)
    for rows in (longest, lately):
        for row in rows.filter(lost=False).order_by("arrived_at").values_list(*READ).iterator(chunk_size=5_000):
            arrived_at, e2e_ms = row[5], row[7]
            if arrived_at >= begin or arrived_at + timedelta(milliseconds=e2e_ms or 0.0) > begin:
                yield row
