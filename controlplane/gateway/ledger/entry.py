"""The ledger row of a request: read by name from its `Progress`, and from the `Asked` that heads it."""

import math
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter, itemgetter
from typing import Any, Final

from django.db import models

from controlplane.gateway.models import LedgerRow
from controlplane.gateway.progress import Progress

COLUMNS: Final = (
    *("request_id", "arrived_at", "tenant_id", "api_key_id", "model", "slo_class", "region", "instance", "application"),
    *("run", "unit", "streamed", "outcome", "status_code", "error_code", "prompt_tokens", "output_tokens"),
    *("predicted_output_tokens", "queue_ms", "ttft_ms", "itl_ms", "e2e_ms", "slo_met", "attempts", "trace"),
    *("error_message", "own_region", "predicted_prompt_tokens", "unserved", "queue_position", "estimated_wait_s"),
    *(
        "estimated_wait_p99_s",
        "evictions",
        "asked_class",
        "surface",
        "run_due_s",
        "asked_model",
        "model_rule",
        "adapter",
    ),
    *("cached_tokens", "expected_cached_tokens", "expected_by", "ran", "lost", "prefix_groups"),
)
"""Their order is that of `INSERT` and of journals on disk: append new ones."""

Row = list[Any]
"""A row of the ledger: a value for each of `COLUMNS`."""
REQUEST_ID, ARRIVED_AT, PROMPT_TOKENS, OUTPUT_TOKENS, LOST = map(
    COLUMNS.index, ("request_id", "arrived_at", "prompt_tokens", "output_tokens", "lost")
)


def reader(*columns: str) -> Callable[[Progress], tuple[Any, ...]]:
    """Return what reads *columns* of a request."""
    return attrgetter(*(name if hasattr(Progress, name) else f"asked.{name}" for name in columns))


def picker(*columns: str) -> Callable[[Row], tuple[Any, ...]]:
    """Return what reads *columns* of a row."""
    return itemgetter(*map(COLUMNS.index, columns))


def row_of(progress: Progress) -> Row:
    """Return the row of a request that ended."""
    return fitted(_VALUES_OF(progress))


def fitted(values: Iterable[Any]) -> Row:
    """Return *values* of a row as their columns hold them.

    Tenants and instances may send anything: texts lose NUL and lone surrogates and are cut, whole numbers are limited to
    the range of their column, and a number that is not finite is None.
    """
    return list(map(_clean, values, _LIMITS))


def completed(row: Row) -> Row:
    """Return *row*, of a journal, with the columns that came after it. Raises TypeError for what is no row."""
    if not isinstance(row, list) or len(row) > len(COLUMNS):
        raise TypeError("no row of the ledger")
    return row + [field.get_default() for field in _FIELDS[len(row) :]]


_VALUES_OF: Final = reader(*COLUMNS)
_FIELDS: Final[list[Any]] = [LedgerRow._meta.get_field(name) for name in COLUMNS]
_LARGEST: Final[dict[type, int]] = {
    models.PositiveSmallIntegerField: 2**15 - 1,
    models.PositiveIntegerField: 2**31 - 1,
}


def _limit_of(field: Any) -> int:
    """Return the most characters, or the largest number, of the column of *field*."""
    if isinstance(field, models.CharField):
        return field.max_length or sys.maxsize
    return _LARGEST.get(type(field), sys.maxsize)


_LIMITS: Final = tuple(map(_limit_of, _FIELDS))


def _clean(value: Any, limit: int) -> Any:
    kind = type(value)
    if kind is int:
        return value if 0 <= value <= limit else max(0, min(value, limit))
    if kind is str:
        if len(value) > limit or "\0" in value or not value.isascii():
            return value.encode(errors="replace").decode().replace("\0", "\ufffd")[:limit]
    elif kind is float and not math.isfinite(value):
        return None
    return value
