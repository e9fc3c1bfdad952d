"""Reads of weights by region, and the size, time and price of a pull."""

from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet
from django.utils import timezone

from controlplane.fleet.models import Model, Region, Weights, WeightsState
from controlplane.tuning.selectors import tuned


@dataclass(frozen=True, slots=True)
class Pull:
    """Size, duration and price of a pull, shown before it begins."""

    gigabytes: float
    seconds: float
    usd: float


def estimate(model: Model) -> Pull:
    """Return what it takes to pull the weights of *model* into a region."""
    values, gigabytes = tuned(), model.weights_bytes / 1e9
    return Pull(gigabytes, gigabytes / values.WEIGHTS_GB_PER_S, gigabytes * values.WEIGHTS_USD_PER_GB)


def pull_s(model: Model, region: Region, now: datetime | None = None) -> float:
    """Return the seconds until the weights of *model* are in *region*; 0 where they are, or nothing is known of them."""
    rows = {row.region_id: row for row in model.weights.all()}
    row = rows.get(region.pk)
    if not rows or (row is not None and row.state == WeightsState.PRESENT):
        return 0.0
    if row is not None and row.state == WeightsState.PULLING and row.ready_at is not None:
        return max(0.0, (row.ready_at - (now or timezone.now())).total_seconds())
    return estimate(model).seconds


def remote() -> dict[tuple[str, str], float]:
    """Return the seconds of a pull by (model, region) name where the weights are not; others have them, or are not known."""
    regions = list(Region.objects.filter(active=True))
    models = Model.objects.filter(active=True, weights__isnull=False).distinct().prefetch_related("weights")
    times = {(model.name, region.name): pull_s(model, region) for model in models for region in regions}
    return {place: seconds for place, seconds in times.items() if seconds > 0}


def weights() -> QuerySet[Weights]:
    """Return all rows with what a page shows."""
    return Weights.objects.select_related("model", "region")
