"""Prices from a date on: a new entry, and what it changes of the hours that are counted."""

from dataclasses import dataclass
from datetime import UTC, datetime

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import F, Q, QuerySet, Sum
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.services import record
from controlplane.fleet import services as fleet
from controlplane.fleet.models import GpuType, Price, PriceOf, Prices, SloClass
from controlplane.usage.counting import QUARTER, charge
from controlplane.usage.models import InstanceHour, UsageHour, UsageMark, Work

FIELDS = {
    PriceOf.GPU: (GpuType, "on_demand_usd_per_hour"),
    PriceOf.SPOT: (GpuType, "spot_usd_per_hour"),
    PriceOf.SLO_CLASS: (SloClass, "price_factor"),
}
"""Model and field that show the present price of an item."""


@dataclass(frozen=True, slots=True)
class Repriced:
    """What an entry changes: usage from its date until the next entry's."""

    price: Price
    until: datetime | None
    """None: for all time to come."""
    hours: int
    """Hours of which rows were repriced."""
    months: list[str]
    """Months (UTC) of those."""
    cost_usd: tuple[float, float]
    """Of those rows, before and after."""
    charged_usd: tuple[float, float]


@transaction.atomic
def set_price(price: Price, actor: User | str) -> Repriced:
    """Add the entry *price*, and reprice what is counted from its date on, until the next entry of its item.

    Rows that usage counted before it knew GPU types stay. Raises ValidationError naming the field at fault.
    """
    now = timezone.now()
    price.created_by, price.from_at = str(actor), price.from_at or now
    price.full_clean()
    model, field = FIELDS.get(PriceOf(price.of), (None, ""))
    if model is None:
        raise ValidationError({"of": "That of batch lines is half of their SLO class's."})
    row = model._default_manager.select_for_update().filter(name=price.name).first()
    if row is None:
        raise ValidationError({"name": f"There is no {model._meta.verbose_name} {price.name!r}."})
    if not price.reason:
        raise ValidationError({"reason": "Say why the price changes."})
    if price.from_at > now:
        raise ValidationError({"from_at": "A price is entered when it applies, or later: not for the future."})
    if price.from_at.timestamp() % QUARTER.total_seconds() and price.from_at < now - QUARTER:
        raise ValidationError({"from_at": "A past date is a whole quarter of an hour."})
    price.save()
    later = Price.objects.filter(of=price.of, name=price.name, from_at__gt=price.from_at).last()
    if later is None:  # it is the present price
        model._default_manager.filter(pk=row.pk).update(**{field: price.amount})
        transaction.on_commit(fleet.notify)
    until = later.from_at if later is not None else None
    repriced = _reprice(price, until)
    record(
        "price.set",
        row,
        actor=actor,
        reason=price.reason,
        after={
            "of": price.of,
            "usd_or_factor": price.amount,
            "from": price.from_at.isoformat(),
            "until": until.isoformat() if until else None,
            "months": repriced.months,
            "cost_usd": repriced.cost_usd,
            "charged_usd": repriced.charged_usd,
        },
    )
    return repriced


def _reprice(price: Price, until: datetime | None) -> Repriced:
    """Price the rows of [from, *until*) again; the running quarter of an hour is counted again anyway."""
    mark = UsageMark.objects.first()
    end = min(until or timezone.now(), mark.counted_until if mark is not None else timezone.now())
    item = Q(slo_class=price.name) if price.of == PriceOf.SLO_CLASS else Q(gpu_type=price.name)
    within = item & ~Q(gpu_type="") & Q(hour__gte=price.from_at, hour__lt=end)
    prices = Prices(Price.objects.all())
    rows = UsageHour.objects.filter(within)
    before = _sums(rows)
    for each in (UsageHour, InstanceHour):
        groups = each._default_manager.filter(within).order_by().values_list(*GROUPED).distinct()
        for hour, gpu_type, slo_class, work in list(groups):
            cost, charged = _hourly(prices, hour.astimezone(UTC), gpu_type, slo_class, work)
            group = each._default_manager.filter(hour=hour, gpu_type=gpu_type, slo_class=slo_class, work=work)
            group.update(cost_usd=F("gpu_s") / 3600.0 * cost, charged_usd=F("gpu_s") / 3600.0 * charged)
    after, hours = _sums(rows), sorted(set(rows.order_by().values_list("hour", flat=True).distinct()))
    whole_hours = {hour.astimezone(UTC).replace(minute=0) for hour in hours}
    months = sorted({f"{hour:%Y-%m}" for hour in whole_hours})
    return Repriced(
        price, until, len(whole_hours), months, (before["cost"], after["cost"]), (before["charged"], after["charged"])
    )


GROUPED = ("hour", "gpu_type", "slo_class", "work")


def _hourly(prices: Prices, begin: datetime, gpu_type: str, slo_class: str, work: str) -> tuple[float, float]:
    """Return cost and charge of a GPU-hour, on average over the quarter of an hour from *begin*."""
    cost = charged = 0.0
    for since, until in prices.pieces(begin, begin + QUARTER):
        share = (until - since) / QUARTER
        piece = charge(prices, since, share, gpu_type, slo_class, Work(work))
        cost, charged = cost + piece[0], charged + piece[1]
    return cost, charged


def _sums(rows: QuerySet[UsageHour]) -> dict[str, float]:
    return rows.aggregate(cost=Sum("cost_usd", default=0.0), charged=Sum("charged_usd", default=0.0))
