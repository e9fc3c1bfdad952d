"""Reads of the spot pool: who is donated, what it is offered at, and how long reclaims take."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from statistics import median
from typing import Final

from django.db.models import Q, QuerySet

from controlplane.fleet.lifecycle import start_times
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Donation, DonationState, Instance, Launcher
from controlplane.fleet.models.spot import OPEN
from controlplane.fleet.weights import pull_s
from controlplane.tuning.selectors import tuned

RECLAIM_S: Final = 60.0
"""Expected time of a reclaim until one has been measured: SageServe's median (section 7.1)."""
KEPT: Final = timedelta(days=7)
"""Period of the reclaims that times are measured from."""


def spot_usd_per_hour(deployment: Deployment) -> Decimal | None:
    """Return the spot price of one instance an hour; None where its GPU type has none."""
    price = deployment.gpu_type.spot_usd_per_hour
    return None if price is None else price * deployment.tensor_parallel


def donations() -> QuerySet[Donation]:
    """Return all donations with what a page or an answer shows."""
    return Donation.objects.select_related(
        "instance__deployment__model",
        "instance__deployment__region",
        "instance__deployment__gpu_type",
        "taken_for__model",
    )


def open_donations() -> QuerySet[Donation]:
    """Return donations that have not ended, the oldest first."""
    return donations().filter(state__in=OPEN).order_by("pk")


def redeployable(deployment: Deployment) -> QuerySet[Instance]:
    """Return donated instances of other models with the GPUs that *deployment* asks for."""
    rows = Instance.objects.filter(
        state=InstanceState.DONATED,
        deployment__region=deployment.region_id,
        deployment__gpu_type=deployment.gpu_type_id,
        deployment__tensor_parallel=deployment.tensor_parallel,
    )
    rows = rows.exclude(deployment__model=deployment.model_id).exclude(launcher=Launcher.EXTERNAL)
    return rows.select_related("deployment__model", "deployment__region", "deployment__gpu_type", "node").order_by("pk")


def redeploy_s(deployment: Deployment, donated: Instance) -> float:
    """Return the expected time to bring *deployment* up on the GPUs of *donated*, in seconds."""
    from scheduling.scaling.spot import redeploy_s as expected_s

    model = deployment.model
    seen = start_times.read().seen.get((model.name, deployment.gpu_type.name))
    same = bool(model.architecture) and model.architecture == donated.deployment.model.architecture
    values = tuned(model.name)
    return expected_s(
        seen.seconds if seen else values.SPOT_REDEPLOY_S,
        values.SPOT_SAME_ARCHITECTURE_S if same else None,
        pull_s(model, deployment.region),
    )


@dataclass(frozen=True, slots=True)
class ReclaimTimes:
    """Measured reclaims."""

    seconds: tuple[float, ...] = ()

    @property
    def median_s(self) -> float | None:
        return median(self.seconds) if self.seconds else None

    @property
    def most_s(self) -> float | None:
        return max(self.seconds, default=None)

    @property
    def expected_s(self) -> float:
        return self.median_s if self.seconds else RECLAIM_S  # type: ignore[return-value]


def reclaim_times(now: datetime) -> ReclaimTimes:
    """Return the reclaims of the last seven days."""
    rows = Donation.objects.filter(state=DonationState.RECLAIMED, ended_at__gte=now - KEPT)
    return ReclaimTimes(tuple(each for row in rows if (each := row.reclaim_s) is not None))


def within(since: datetime, until: datetime) -> QuerySet[Donation]:
    """Return donations with a part in [since, until)."""
    return Donation.objects.filter(Q(ended_at=None) | Q(ended_at__gt=since), donated_at__lt=until)


def start_of_day(now: datetime) -> datetime:
    """Return the start of the day of *now*, in UTC."""
    return now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


@dataclass(frozen=True, slots=True)
class DonatedTime:
    """Time that instances of one model were donated, its cost and its price as spot."""

    model: str
    instance_hours: float
    gpu_hours: float
    cost_usd: float
    """At the on-demand price."""
    offered_usd: float | None
    """At the spot prices that are known; None where none is."""
    unpriced_hours: float
    """Instance-hours of GPU types without a spot price."""


def donated_time(since: datetime, until: datetime, model: str = "") -> list[DonatedTime]:
    """Return what was donated within [since, until) by model, or of one, in order of name."""
    rows = within(since, until).select_related("instance__deployment__model", "instance__deployment__gpu_type")
    by_model: dict[str, list[Donation]] = {}
    for row in rows:
        by_model.setdefault(row.instance.deployment.model.name, []).append(row)
    return [_donated(name, by_model[name], since, until) for name in sorted(by_model) if model in ("", name)]


def _donated(name: str, rows: Iterable[Donation], since: datetime, until: datetime) -> DonatedTime:
    instance_hours = gpu_hours = cost_usd = unpriced_hours = 0.0
    offered = []
    for row in rows:
        deployment, hours = row.instance.deployment, row.donated_s(since, until) / 3600
        instance_hours += hours
        gpu_hours += hours * deployment.tensor_parallel
        cost_usd += hours * deployment.tensor_parallel * float(deployment.gpu_type.on_demand_usd_per_hour)
        offered.append(row.offered_usd(since, until))
        unpriced_hours += hours if offered[-1] is None else 0.0
    return DonatedTime(name, instance_hours, gpu_hours, cost_usd, _sum(offered), unpriced_hours)


def offered_per_hour(rows: Iterable[Donation]) -> float | None:
    """Return the spot price of *rows* an hour, without those that are asked for; None where no price is known."""
    return _sum(row.usd_per_hour for row in rows if row.reclaim_at is None)


def _sum(dollars: Iterable[float | None]) -> float | None:
    """Return the sum of those that are known; None if there are some, and none is known."""
    dollars = list(dollars)
    known = [each for each in dollars if each is not None]
    return sum(known, 0.0) if known or not dollars else None
