"""One ledger row on its way to the database, bounded by what its columns can hold."""

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from django.db import models

from controlplane.gateway.models import LedgerRow


class Entry(NamedTuple):
    """One ledger row; the order of the fields is the order of the columns in `INSERT`."""

    request_id: str
    arrived_at: float  # epoch seconds
    tenant_id: int
    api_key_id: int | None
    model: str
    slo_class: str
    region: str
    instance: str
    application: str
    run: str
    unit: str
    streamed: bool
    outcome: str
    status_code: int
    error_code: str
    prompt_tokens: int
    output_tokens: int
    predicted_output_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    itl_ms: float | None
    e2e_ms: float | None
    slo_met: bool | None
    attempts: int
    trace: str  # JSON
    error_message: str = ""  # from here on with a value: spill files of earlier versions end sooner
    own_region: str = ""  # where it differs from the region
    predicted_prompt_tokens: int = 0
    unserved: bool = False
    retry: int = 0
    repeated: bool = False
    queue_position: int | None = None
    estimated_wait_s: float | None = None
    estimated_wait_p99_s: float | None = None
    evictions: int = 0

    def bounded(self) -> "Entry":
        """The same with every value such that its column takes it; what does not fit is cut to the nearest that does.

        What instances and tenants say may be of any size. Raises TypeError or ValueError for a value of another kind.
        """
        return Entry(*(bound(value) for bound, value in zip(_BOUNDS, self, strict=True)))


def _whole(most: int) -> Callable[[Any], int]:
    def bound(value: Any) -> int:
        return value if type(value) is int and 0 <= value <= most else max(0, min(int(value), most))

    return bound


def _real(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _text(most: int | None) -> Callable[[Any], str]:
    """At most *most* characters that every database can hold: no NUL, and no half of a surrogate pair."""

    def bound(value: Any) -> str:
        text = "" if value is None else str(value)
        if not text.isascii():
            text = text.encode(errors="replace").decode()
        return text.replace("\0", "\ufffd")[:most]

    return bound


def _or_none(bound: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else bound(value)


_MOST: Final[dict[type, int]] = {
    models.PositiveSmallIntegerField: 2**15 - 1,
    models.PositiveIntegerField: 2**31 - 1,
    models.ForeignKey: 2**63 - 1,
}


def _bound_of(name: str) -> Callable[[Any], Any]:
    """What bounds a value of the column *name*."""
    if name == "trace":
        return str  # JSON that we write
    field: Any = LedgerRow._meta.get_field(name.removesuffix("_id") if name in {"tenant_id", "api_key_id"} else name)
    bound: Callable[[Any], Any]
    if isinstance(field, models.CharField):
        bound = _text(field.max_length)
    elif isinstance(field, models.BooleanField):
        bound = bool
    elif isinstance(field, models.FloatField | models.DateTimeField):
        bound = _real
    else:
        bound = _whole(_MOST[type(field)])
    return _or_none(bound) if field.null else bound


_BOUNDS: Final = tuple(map(_bound_of, Entry._fields))
