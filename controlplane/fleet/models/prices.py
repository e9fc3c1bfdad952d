"""Prices, each from a moment on. A price that was charged is never overwritten: a change or a correction is a new entry."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import pairwise

from django.core.exceptions import ValidationError
from django.db import models
from django.utils import timezone

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
"""From-date of the first price of an item, which counts for all time before the second."""


class PriceOf(models.TextChoices):
    """What has a price."""

    GPU = "gpu", "GPU, on demand (USD an hour)"
    SPOT = "spot", "GPU, spot (USD an hour)"
    SLO_CLASS = "slo_class", "SLO class (times the cost)"
    BATCH = "batch", "Batch line (times the price of its class)"


class Price(models.Model):
    """The price of one item from a moment on, until that of the next entry."""

    of = models.CharField(max_length=16, choices=PriceOf.choices)
    name = models.CharField(max_length=40, blank=True, help_text="Of the GPU type or SLO class; empty for batch lines.")
    amount = models.FloatField(null=True, help_text="Empty: it has none from then on.")
    from_at = models.DateTimeField("from")
    reason = models.CharField(max_length=255, blank=True)
    created_by = models.CharField(max_length=150, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-from_at", "-id"]
        indexes = [models.Index(fields=["of", "name", "from_at"], name="price_of_item")]

    def __str__(self) -> str:
        amount = "no price" if self.amount is None else f"{self.amount:g}"
        return f"{PriceOf(self.of).label} {self.name}: {amount} from {self.from_at:%F %H:%M} (UTC)"

    def clean(self) -> None:
        if self.amount is None and self.of != PriceOf.SPOT:
            raise ValidationError({"amount": "Only a spot price can be taken away: give an amount."})
        if self.amount is not None and self.amount < 0:
            raise ValidationError({"amount": "A price is not below 0."})
        if self.from_at.year < 1970:
            raise ValidationError({"from_at": "Give a time of the years 1970 to 2199."})


class Prices:
    """Entries in memory."""

    def __init__(self, rows: Iterable[Price]) -> None:
        self._items: dict[tuple[str, str], list[Price]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: (row.from_at, row.pk or 0)):  # of two from one moment, the later entry
            self._items[row.of, row.name].append(row)

    def at(self, of: PriceOf, name: str, moment: datetime) -> float | None:
        """Return the price at *moment*; None for none."""
        entries = self._items.get((of.value, name), [])
        number = bisect_right(entries, moment, key=lambda row: row.from_at)
        return entries[number - 1].amount if number else None

    def pieces(self, begin: datetime, end: datetime) -> list[tuple[datetime, datetime]]:
        """Return [begin, end) cut at each change of a price."""
        changes = {row.from_at for rows in self._items.values() for row in rows if begin < row.from_at < end}
        edges = [begin, *sorted(changes), end]
        return list(pairwise(edges))


def keep_price(of: PriceOf, name: str, amount: float | None, at: datetime | None = None) -> None:
    """Add an entry from *at* (now) on, if *amount* differs from the price then."""
    at = at or timezone.now()
    entries = Price.objects.filter(of=of, name=name)
    last = entries.filter(from_at__lte=at).first()
    if last is None or last.amount != amount:
        Price.objects.create(of=of, name=name, amount=amount, from_at=at if last is not None else BEGINNING)
