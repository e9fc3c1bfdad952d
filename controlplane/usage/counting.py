"""Counting usage: hours are rewritten from the ledger whenever it has more of them.

An hour is a pure function of the ledger and of the instances' moves, so counting it again changes nothing, and rows that
come late are in it from the next time on. An hour whose ledger is no longer kept stays as it is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
from django.conf import settings
from django.db import transaction
from django.db.models import Min
from numpy.typing import NDArray

from controlplane.fleet.models import Instance, Price, PriceOf, Prices, SloClass
from controlplane.fleet.models.prices import keep_price
from controlplane.gateway.models import LONG_MS, LedgerRow
from controlplane.usage.models import InstanceHour, UsageHour, UsageMark, Work
from controlplane.usage.paid_time import PaidInstance, counted_before, paid_instances
from controlplane.usage.sharing import Seconds, held_tokens, share

HOUR, QUARTER = timedelta(hours=1), timedelta(minutes=15)
FINAL_AFTER = timedelta(minutes=1)
"""Time after its end from which a counted quarter of an hour has its instances for good."""
LONGEST = timedelta(days=8)  # from arrival to end, of a request that is found again in the hours in which it ran
CHUNK_ROWS, MOST_CHUNKS = 50_000, 1_000
COUNTS = ("requests", "prompt_tokens", "output_tokens")
BATCH_LINE = "batch_req_"
"""Begin of the request ids of batch lines: then the id of the batch, and the number of the line."""
READ = ("tenant_id", "api_key_id", "model", "slo_class", "instance", "arrived_at", "queue_ms", "e2e_ms", "ran",
        "prompt_tokens", "output_tokens", "request_id", "application")  # fmt: skip


class Series(NamedTuple):
    """Names of the columns of `UsageHour` and `InstanceHour`, as far as requests give them."""

    tenant_id: int
    api_key_id: int | None
    application: str
    batch: str
    instance: str
    model: str
    gpu_type: str
    slo_class: str
    work: Work


class CountedHour(NamedTuple):
    """Rows of a quarter of an hour, not saved: usage, and the same by instance."""

    rows: list[UsageHour]
    instances: list[InstanceHour]


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
    keep_price(PriceOf.BATCH, "", settings.BATCH_PRICE_FACTOR, now)
    for _ in range(MOST_CHUNKS):
        mark = UsageMark.objects.first()
        look = look_from(mark, now)
        final = mark.counted_until - FINAL_AFTER if mark is not None else None
        counted = list(count_hours(look.hours, now, final))
        with transaction.atomic():
            if not _moved(mark, look.mark):
                return written
            begins = [hour + number * QUARTER for hour in look.hours for number in range(4)]
            for each in (UsageHour, InstanceHour):
                for at in range(0, len(begins), 400):
                    each.objects.filter(hour__in=begins[at : at + 400]).delete()
            UsageHour.objects.bulk_create([row for one in counted for row in one.rows], batch_size=500)
            InstanceHour.objects.bulk_create([row for one in counted for row in one.instances], batch_size=500)
        written += len(look.hours)
        if look.whole:
            break
    return written


def _moved(before: UsageMark | None, after: UsageMark) -> bool:
    values = {"counted_until": after.counted_until, "ledger_pk": after.ledger_pk, "seen_pk": after.seen_pk}
    if before is None:
        return UsageMark.objects.get_or_create(pk=1, defaults=values)[1]
    same = UsageMark.objects.filter(
        pk=before.pk, counted_until=before.counted_until, ledger_pk=before.ledger_pk, seen_pk=before.seen_pk
    )
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


def count_hours(hours: Sequence[datetime], now: datetime, final: datetime | None = None) -> Iterator[CountedHour]:
    """The rows, not saved, of each quarter of *hours*, which are in order; of the last one until *now*.

    Quarters that were counted after their end (until *final*) have the instances that they had; in the others, an instance
    whose row was deleted meanwhile keeps what was counted of it.
    """
    if not hours:
        return
    fleet = paid_instances(hours[0], now)
    before = counted_before(hours[0], hours[-1] + HOUR)
    living = set(Instance.objects.values_list("name", flat=True))
    kinds = {name: Work(kind) for name, kind in SloClass.objects.values_list("name", "kind")}
    prices = Prices(Price.objects.all())
    for hour in hours:
        for begin in (hour + number * QUARTER for number in range(4)):
            end = min(begin + QUARTER, now)
            if begin >= end:
                break
            counted = before.get(begin, [])
            if counted and final is not None and begin + QUARTER <= final:
                paid = counted
            else:
                paid = fleet + [instance for instance in counted if instance.name not in living]
            yield count_quarter(begin, end, paid, kinds, prices)


def charge(
    prices: Prices, at: datetime, gpu_h: Seconds | float, gpu_type: str, slo_class: str, work: str
) -> tuple[Any, Any]:
    """Return what *gpu_h* GPU-hours of a GPU type cost, and what is charged for them.

    That is the cost times the factor of the SLO class (1 for one that has none), for batch lines times theirs too;
    opportunistic work is charged at the spot price of the GPUs, where they have one. Idle time is not charged.
    """
    cost = gpu_h * (prices.at(PriceOf.GPU, gpu_type, at) or 0.0)
    if work == Work.IDLE:
        return cost, 0.0
    spot_usd = prices.at(PriceOf.SPOT, gpu_type, at) if work == Work.OPPORTUNISTIC else None
    if spot_usd is not None:
        return cost, gpu_h * spot_usd
    factor = prices.at(PriceOf.SLO_CLASS, slo_class, at)
    factor = 1.0 if factor is None else factor
    return cost, cost * factor * ((prices.at(PriceOf.BATCH, "", at) or 0.0) if work == Work.BATCH else 1.0)


def count_quarter(
    begin: datetime, end: datetime, fleet: Iterable[PaidInstance], kinds: dict[str, Work], prices: Prices
) -> CountedHour:
    """Count the quarter of an hour from *begin*, up to *end*.

    The time of each instance is shared as `sharing.share` says; GPU-seconds are those seconds times its GPUs, dollars those
    times their price (`charge`), piece by piece where a price changed.
    """
    fleet = list(fleet)
    ran = ledger_quarter(begin, end, {instance.name: instance.gpu_type for instance in fleet}, kinds)
    gpu_s, usd, charged = (np.zeros(len(ran.series_of)) for _ in range(3))
    begin_s, end_s = begin.timestamp(), end.timestamp()
    idle: list[InstanceHour] = []
    for instance in fleet:
        if not (whole := instance.within(begin_s, end_s)):
            continue
        of = np.array(ran.on.get(instance.name, []), dtype=np.intp)
        rest = InstanceHour(
            hour=begin, instance=instance.name, model=instance.model, gpu_type=instance.gpu_type, work=Work.IDLE,
            gpus=instance.gpus, paid=[(since - begin_s, until - begin_s) for since, until in whole],
        )  # fmt: skip
        for since, until in prices.pieces(begin, end):
            paid = [(a - begin_s, b - begin_s) for a, b in instance.within(since.timestamp(), until.timestamp())]
            shares_s, idle_s = share(ran.begin_s[of], ran.end_s[of], ran.held[of], paid)
            gpu_s[of] += shares_s * instance.gpus
            rest.gpu_s += idle_s * instance.gpus
            rest.cost_usd += charge(prices, since, idle_s * instance.gpus / 3600, instance.gpu_type, "", Work.IDLE)[0]
            for series in set(ran.series_of[of].tolist()):
                its = of[ran.series_of[of] == series]
                hours = shares_s[ran.series_of[of] == series] * instance.gpus / 3600
                _, _, _, _, _, _, gpu_type, slo_class, work = ran.series[series]
                cost, charges = charge(prices, since, hours, gpu_type, slo_class, work)
                usd[its] += cost
                charged[its] += charges
        idle.append(rest)
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
    of_series = [
        {name: int(values[at]) if name in COUNTS else values[at] for name, values in totals.items()}
        for at in range(len(ran.series))
    ]
    used, unused = _grouped(UsageHour, begin, ran.series, of_series), idle_rows(begin, idle)
    return CountedHour(used + unused, _grouped(InstanceHour, begin, ran.series, of_series) + idle)


Row = TypeVar("Row", UsageHour, InstanceHour)


def _grouped(model: type[Row], begin: datetime, series: Sequence[Series], sums: Sequence[dict[str, Any]]) -> list[Row]:
    """Return rows of *model* with the *sums* of *series*, added up over the names that it does not have."""
    names = [name for name in Series._fields if hasattr(model, name)]
    rows: dict[tuple[Any, ...], Row] = {}
    for one, values in zip(series, sums, strict=True):
        key = tuple(getattr(one, name) for name in names)
        row = rows.setdefault(key, model(hour=begin, **dict(zip(names, key, strict=True))))
        for name, value in values.items():
            setattr(row, name, getattr(row, name) + value)
    return list(rows.values())


def idle_rows(begin: datetime, idle: Iterable[InstanceHour]) -> list[UsageHour]:
    """Return what was idle by model and GPU type."""
    rows: dict[tuple[str, str], UsageHour] = {}
    for each in idle:
        if each.gpu_s:
            named = {"model": each.model, "gpu_type": each.gpu_type}
            row = rows.setdefault((each.model, each.gpu_type), UsageHour(hour=begin, work=Work.IDLE, **named))
            row.gpu_s += each.gpu_s
            row.cost_usd += each.cost_usd
    return list(rows.values())


@dataclass(frozen=True, slots=True)
class LedgerQuarter:
    """Requests that arrived or ran within a quarter of an hour, as arrays of shape (n,), with an entry for each time that
    an instance worked for one; times in seconds from its beginning, cut to it.

    *on* has the places of those that ran on an instance, by its name.
    """

    series: list[Series]
    series_of: NDArray[np.intp]
    on: dict[str, list[int]]
    arrives: Seconds  # 1 for the last entry of a request that arrived within it, else 0
    begin_s: Seconds
    end_s: Seconds
    prompt_tokens: Seconds
    output_tokens: Seconds
    held: Seconds


def ledger_quarter(begin: datetime, end: datetime, gpu_types: dict[str, str], kinds: dict[str, Work]) -> LedgerQuarter:
    """The quarter of an hour from *begin*, as far as *end*; *gpu_types* of instances, *kinds* of SLO classes."""
    series: dict[Series, int] = {}
    on: dict[str, list[int]] = {}
    series_of: list[int] = []
    numbers: list[tuple[float, ...]] = []
    begin_s = begin.timestamp()
    for *row, name, application in _ran_within(begin, begin + QUARTER):
        tenant, key, model, slo_class, instance, arrived_at, queue_ms, e2e_ms, ran, prompt_tokens, output_tokens = row
        work, batch = kinds.get(slo_class, Work.INTERACTIVE), ""
        if name.startswith(BATCH_LINE):
            work, batch = Work.BATCH, f"batch_{name.removeprefix(BATCH_LINE).rpartition('_')[0]}"
        arrived_s = arrived_at.timestamp() - begin_s
        ran = ran or [(instance, queue_ms or 0.0, e2e_ms or 0.0)]
        for number, (at, began_ms, ended_ms) in enumerate(ran, 1):
            one = Series(tenant, key, application, batch, at, model, gpu_types.get(at, ""), slo_class, work)
            on.setdefault(at, []).append(len(numbers))
            series_of.append(series.setdefault(one, len(series)))
            spans = arrived_s + began_ms / 1000, arrived_s + ended_ms / 1000
            last = number == len(ran)
            numbers.append((arrived_s, *spans, prompt_tokens, output_tokens, bool(at), last))
    arrived, placed, ended, prompt, output, has_run, last_one = np.array(numbers, dtype=float).reshape(-1, 7).T
    until_s = (end - begin).total_seconds()
    placed, ended = np.clip(placed, 0.0, until_s), np.clip(ended, 0.0, until_s)
    return LedgerQuarter(
        series=list(series),
        series_of=np.array(series_of, dtype=np.intp),
        on=on,
        arrives=last_one * ((arrived >= 0) & (arrived < QUARTER.total_seconds())),
        begin_s=placed,
        end_s=np.maximum(placed, ended),
        prompt_tokens=prompt,
        output_tokens=output,
        held=held_tokens(prompt, output) * has_run,
    )


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
