"""One ledger row on its way to the database, bounded by what its columns can hold."""

import math
from collections.abc import Sequence
from types import NoneType
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


def fit(entries: Sequence[Entry]) -> bool:
    """Whether every value of *entries* is such that its column takes it; looked at by columns, which takes little."""
    return all(bound.fits(column) for bound, column in zip(_BOUNDS, zip(*entries, strict=True), strict=True))


class _Bound:
    """What one column holds; *null* whether None is among it."""

    kinds: frozenset[type]

    def __init__(self, null: bool) -> None:
        self.null = null

    def __call__(self, value: Any) -> Any:
        return None if self.null and value is None else self.cut(value)

    def fits(self, column: Sequence[Any]) -> bool:
        kinds = set(map(type, column))
        if self.null and NoneType in kinds:
            column = [value for value in column if value is not None]
            kinds.remove(NoneType)
        return not kinds or (kinds <= self.kinds and self.holds(column))

    def cut(self, value: Any) -> Any:
        """The nearest to *value* that it holds. Raises TypeError or ValueError for a value of another kind."""
        raise NotImplementedError

    def holds(self, values: Sequence[Any]) -> bool:
        """Whether it holds all *values*, which are of its kinds and none of which is None."""
        return True


class _Truth(_Bound):
    kinds = frozenset({bool})

    def cut(self, value: Any) -> bool:
        return bool(value)


class _Whole(_Bound):
    kinds = frozenset({int})

    def __init__(self, null: bool, most: int) -> None:
        super().__init__(null)
        self.most = most

    def cut(self, value: Any) -> int:
        return max(0, min(int(value), self.most))

    def holds(self, values: Sequence[Any]) -> bool:
        return bool(min(values) >= 0 and max(values) <= self.most)


class _Real(_Bound):
    kinds = frozenset({float})

    def cut(self, value: Any) -> float | None:
        number = float(value)
        return number if math.isfinite(number) else None

    def holds(self, values: Sequence[Any]) -> bool:
        return all(map(math.isfinite, values))


class _Text(_Bound):
    """At most *most* characters that every database holds: no NUL, and no half of a surrogate pair."""

    kinds = frozenset({str})

    def __init__(self, null: bool, most: int | None) -> None:
        super().__init__(null)
        self.most = most

    def cut(self, value: Any) -> str:
        text = "" if value is None else str(value)
        return text.encode(errors="replace").decode().replace("\0", "\ufffd")[: self.most]

    def holds(self, values: Sequence[Any]) -> bool:
        whole = "".join(values)
        if "\0" in whole or (self.most is not None and max(map(len, values)) > self.most):
            return False
        if not whole.isascii():
            try:
                whole.encode()
            except UnicodeEncodeError:
                return False
        return True


_MOST: Final[dict[type, int]] = {
    models.PositiveSmallIntegerField: 2**15 - 1,
    models.PositiveIntegerField: 2**31 - 1,
    models.ForeignKey: 2**63 - 1,
}


def _bound_of(name: str) -> _Bound:
    """What the column *name* holds."""
    field: Any = LedgerRow._meta.get_field(name.removesuffix("_id") if name in {"tenant_id", "api_key_id"} else name)
    if isinstance(field, models.CharField | models.JSONField):  # JSON that we wrote
        return _Text(field.null, field.max_length)
    if isinstance(field, models.BooleanField):
        return _Truth(field.null)
    if isinstance(field, models.FloatField | models.DateTimeField):
        return _Real(field.null)
    return _Whole(field.null, _MOST[type(field)])


_BOUNDS: Final = tuple(map(_bound_of, Entry._fields))
