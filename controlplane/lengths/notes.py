"""A gateway's notes on predicted lengths, written in batches: measures by the minute, and samples.

A gateway collects them in memory (`Notes`) and writes each batch every few seconds, in one transaction.
"""

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from django.db import connection, transaction

from controlplane.accounts.models import Tenant
from controlplane.lengths.models import LengthMinute, LengthSample, Measures, sums_of
from forecasting.lengths import Estimate, Trees, bundled
from forecasting.lengths.query import MEDIAN

logger = logging.getLogger(__name__)

HELD_SERIES = 50_000
"""Rows of measures that a gateway holds while the database cannot be written; further ones are dropped."""

KEY = ("minute", "model", "tenant", "predictor")
_TABLE = LengthMinute._meta.db_table
_UPSERT = (
    f"INSERT INTO {_TABLE} ({', '.join((*KEY, *Measures.NAMES))}) "  # noqa: S608 - our own names
    f"VALUES ({', '.join(['%s'] * (len(KEY) + len(Measures.NAMES)))}) "
    f"ON CONFLICT ({', '.join(KEY)}) DO UPDATE SET "
    + ", ".join(f"{name} = {_TABLE}.{name} + excluded.{name}" for name in Measures.NAMES)
)


@dataclass(slots=True)
class Notes:
    """One batch. Lengths are tokens of one sequence."""

    minutes: dict[tuple[float, str, str, str], Measures] = field(default_factory=dict)
    """By (epoch seconds of the minute, model, tenant, predictor)."""
    samples: list[LengthSample] = field(default_factory=list)
    """Unsaved, with all of their text: writing keeps it only if the tenant's row allows."""
    given_up: int = 0

    def measure(
        self,
        at: float,
        model: str,
        tenant: str,
        predictor: str,
        predicted: Estimate,
        real: float,
        late: bool = False,
    ) -> None:
        """Count one request of *real* tokens that *predictor* predicted as *predicted*.

        *late*: the answer of a shadow came after the time that a request waits.
        """
        tokens, length = round(predicted.tokens), max(1, round(real))
        key = (at // 60 * 60, model, tenant, predictor)
        sums = self.minutes.get(key)
        if sums is None:
            if len(self.minutes) >= HELD_SERIES:
                self.given_up += 1
                return
            sums = self.minutes[key] = Measures()
        error = abs(tokens - length)
        sums.requests += 1
        sums.predicted_tokens += tokens
        sums.output_tokens += length
        sums.absolute_error_tokens += error
        sums.within_25 += error <= 25
        sums.within_50 += error <= 50
        sums.within_100 += error <= 100
        sums.below_median += real <= predicted.quantiles[MEDIAN]
        sums.below_upper += real <= math.ceil(predicted.quantiles[-1])
        sums.late += late

    def add(self, notes: "Notes") -> None:
        """Take back *notes* that could not be written: add measures up, drop samples."""
        for key, sums in notes.minutes.items():
            known = self.minutes.get(key)
            if known is None and len(self.minutes) >= HELD_SERIES:
                self.given_up += sums.requests
            else:
                self.minutes[key] = sums if known is None else known + sums
        self.given_up += notes.given_up

    def __bool__(self) -> bool:
        return bool(self.minutes or self.samples)


def write(notes: Notes) -> None:
    """Write everything in *notes* in one transaction."""
    rows: list[tuple[Any, ...]] = [
        (connection.ops.adapt_datetimefield_value(datetime.fromtimestamp(minute, UTC)), *rest, *map(int, sums_of(sums)))
        for (minute, *rest), sums in notes.minutes.items()
    ]
    samples = _kept(notes.samples)
    with transaction.atomic():
        if rows:
            with connection.cursor() as cursor:
                cursor.executemany(_UPSERT, rows)
        LengthSample.objects.bulk_create(samples)


def _kept(samples: Sequence[LengthSample]) -> list[LengthSample]:
    """Return *samples* as they are stored: with features, and with text only if the tenant keeps prompts."""
    tenants = Tenant.objects.in_bulk({sample.tenant_id for sample in samples})
    rows = [sample for sample in samples if sample.tenant_id in tenants]
    try:
        for row in rows:
            row.tenant = tenants[row.tenant_id]
            row.features = reader().features(row.query)
            row.text = storable(row.text) if row.tenant.keep_prompts else ""
    except Exception as error:  # measures are worth more than samples; and its text may hold a prompt's
        logger.warning("lengths: %d samples could not be kept: %s", len(samples), type(error).__name__)
        return []
    return rows


@functools.cache
def reader() -> Trees:
    """Return the trees by whose text score features are kept: the bundled ones, from which every version derives."""
    return bundled()


def storable(text: str) -> str:
    """Return *text* as a database accepts it: without NUL (PostgreSQL has none) and lone surrogates."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode()
