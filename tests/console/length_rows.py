"""Rows of output lengths for tests of pages and selectors: minutes, samples and versions, deterministic for a
moment.

Answers come in four kinds of distinct lengths; each predictor has its own error, so that measures differ.
"""

import math
import random
from datetime import datetime, timedelta

from controlplane.accounts.models import Tenant
from controlplane.lengths.models import LengthMinute, LengthSample, LengthVersion, VersionState

KINDS = (12.0, 90.0, 260.0, 900.0)  # median lengths in tokens
SHARES = {"cache": 0.24, "trees 2": 0.68, "prior": 0.08}
SPREAD = {"cache": 0.22, "trees 2": 0.42, "shadow trees 3": 0.36, "prior": 1.1}
MODELS = ("llama-3.1-8b", "llama-2-70b")


class Counted:
    """Running sums of one row."""

    def __init__(self) -> None:
        self.requests = self.predicted = self.output = self.error = 0
        self.within = [0, 0, 0]
        self.median = self.upper = 0

    def add(self, predicted: int, real: int, sigma: float) -> None:
        error = abs(predicted - real)
        self.requests += 1
        self.predicted += predicted
        self.output += real
        self.error += error
        for at, bound in enumerate((25, 50, 100)):
            self.within[at] += error <= bound
        self.median += real <= predicted
        self.upper += real <= predicted * math.exp(1.28 * sigma)


def drawn(dice: random.Random, predictor: str) -> tuple[int, int]:
    """Predicted and real tokens of one request."""
    expected = dice.choice(KINDS)
    real = expected * dice.lognormvariate(0, 0.3)
    sigma = SPREAD[predictor]
    centre = 180.0 if predictor == "prior" else real
    return max(1, round(centre * dice.lognormvariate(0, sigma))), max(1, round(real))


def minutes(
    now: datetime, count: int, tenants: tuple[str, ...], models: tuple[str, ...] = MODELS, each: int = 12
) -> None:
    """Create *each* requests a minute of every model and tenant over the last *count* minutes, with a shadow."""
    dice = random.Random(3)
    last = now.replace(second=0, microsecond=0)
    rows = []
    for back in range(count):
        counted: dict[tuple[str, str, str], Counted] = {}
        for model in models:
            for tenant in tenants:
                for _ in range(each):
                    predictor = dice.choices(list(SHARES), list(SHARES.values()))[0]
                    predicted, real = drawn(dice, predictor)
                    key = (model, tenant, predictor)
                    counted.setdefault(key, Counted()).add(predicted, real, SPREAD[predictor])
                    shadow, sigma = "shadow trees 3", SPREAD["shadow trees 3"]
                    key = (model, tenant, shadow)
                    counted.setdefault(key, Counted()).add(
                        max(1, round(real * dice.lognormvariate(0, sigma))), real, sigma
                    )
        rows += [
            LengthMinute(
                minute=last - timedelta(minutes=back),
                model=model,
                tenant=tenant,
                predictor=predictor,
                requests=sums.requests,
                predicted_tokens=sums.predicted,
                output_tokens=sums.output,
                absolute_error_tokens=sums.error,
                within_25=sums.within[0],
                within_50=sums.within[1],
                within_100=sums.within[2],
                below_median=sums.median,
                below_upper=sums.upper,
            )
            for (model, tenant, predictor), sums in counted.items()
        ]
    LengthMinute.objects.bulk_create(rows, batch_size=1_000)


def samples(now: datetime, count: int, tenant: Tenant, models: tuple[str, ...] = MODELS) -> None:
    """Create *count* samples of *tenant* over the last hour."""
    dice = random.Random(7)
    rows = []
    for number in range(count):
        predictor = dice.choices(list(SHARES), list(SHARES.values()))[0]
        predicted, real = drawn(dice, predictor)
        rows.append(
            LengthSample(
                at=now - timedelta(seconds=3_500 * number / count),
                model=models[number % len(models)],
                tenant=tenant,
                slo_class="interactive",
                prompt_tokens=dice.randint(10, 800),
                predicted_tokens=predicted,
                predicted_by=predictor,
                output_tokens=real,
            )
        )
    LengthSample.objects.bulk_create(rows, batch_size=1_000)


def versions(now: datetime) -> list[LengthVersion]:
    """Create a retired, an active, a shadow and a rejected version."""
    rows = (
        (1, VersionState.RETIRED, 71.4, "Trained on its schedule"),
        (2, VersionState.ACTIVE, 58.2, "Trained on its schedule"),
        (3, VersionState.SHADOW, 52.6, "Trained on request"),
        (4, VersionState.REJECTED, 96.0, "Worse than the active one on samples held out"),
    )
    return [
        LengthVersion.objects.create(
            number=number,
            kind="trees",
            state=state,
            trained_at=now - timedelta(hours=30 - number * 6),
            samples=4_000 * number,
            measures={
                "mae": mae,
                "acc_25": round(22 / mae, 3),
                "acc_50": round(34 / mae, 3),
                "acc_100": round(46 / mae, 3),
                "rank_correlation": 0.83,
            },
            note=note,
        )
        for number, state, mae, note in rows
    ]


def furnish(now: datetime, tenants: tuple[str, ...] = ("acme",), count: int = 90, pairs: int = 400) -> None:
    """Create everything, for the existing tenants."""
    minutes(now, count, tenants)
    for name in tenants:
        samples(now, pairs, Tenant.objects.get(name=name))
    versions(now)
