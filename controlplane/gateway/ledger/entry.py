"""The record of a request: filled during its life, and written to the ledger unchanged at its end."""

import math
from collections.abc import Sequence
from operator import attrgetter
from types import NoneType
from typing import Any, Final

import msgspec
from django.db import models

from controlplane.gateway.models import LedgerRow


class RequestRecord(msgspec.Struct, eq=False):
    """Columns of the ledger by name. Their order is that of `INSERT` and of journals on disk: append new ones."""

    request_id: str = ""
    arrived_at: float = 0.0  # epoch seconds
    tenant_id: int = 0
    api_key_id: int | None = None
    model: str = ""
    slo_class: str = ""
    region: str = ""  # where it waits or runs
    instance: str = ""  # the last one
    application: str = ""
    run: str = ""
    unit: str = ""
    streamed: bool = False
    outcome: str = ""
    status_code: int = 0
    error_code: str = ""
    prompt_tokens: int = 0  # predicted, until the instance reports them
    output_tokens: int = 0
    predicted_output_tokens: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None
    slo_met: bool | None = None
    attempts: int = 0
    trace: str = "[]"  # JSON
    error_message: str = ""  # as answered to its tenant
    own_region: str = ""  # of its caller, where it counts as demand; in the ledger only where different
    predicted_prompt_tokens: int = 0
    unserved: bool = False
    queue_position: int | None = None  # set when it was queued, as the next two; 0: it did not wait
    estimated_wait_s: float | None = None  # None while queued: the pace was unknown
    estimated_wait_p99_s: float | None = None
    evictions: int = 0  # times it was taken from an instance and queued again
    asked_class: str = ""  # SLO class that it was degraded from; empty: it kept its class
    surface: str = ""  # last part of the path that was called
    run_due_s: float | None = None  # deadline of its run, after the run began, as this call says it
    asked_model: str = ""  # name that it asked for, where another model served it
    model_rule: str = ""  # why: `scheduling.routing.models.ModelRule`
    adapter: str = ""  # LoRA adapter that served it
    cached_tokens: int | None = None  # of its prompt, as its instance reports; None: it does not
    expected_cached_tokens: int | None = None  # as the router by delay expected; None by other routers
    expected_by: str = ""  # how it knew: `port.KV_EVENTS` or `port.ESTIMATE`
    ran: str | None = None  # JSON; None: on its last instance, from placement to end

    def values(self) -> list[Any]:
        return list(_VALUES_OF(self))

    def ended(self) -> "RequestRecord":
        """Return a copy that refers to nothing else of a live request."""
        return RequestRecord(*_VALUES_OF(self))

    def bounded(self) -> "RequestRecord":
        """Return a copy with each value replaced by the nearest one that its column takes.

        Instances and tenants may send anything. Raises TypeError or ValueError for a value of another type.
        """
        return RequestRecord(*(bound(value) for bound, value in zip(_BOUNDS, self.values(), strict=True)))


COLUMNS: Final = RequestRecord.__struct_fields__
_VALUES_OF: Final = attrgetter(*COLUMNS)


def fit(entries: Sequence[RequestRecord]) -> bool:
    """Whether every column takes its values of *entries*; checked by column, which is fast."""
    return all(
        bound.fits(column)
        for bound, column in zip(_BOUNDS, zip(*(entry.values() for entry in entries), strict=True), strict=True)
    )


class _Bound:
    """Range of one column; *null*: whether it includes None."""

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
        """Return the nearest value in range. Raises TypeError or ValueError for a value of another kind."""
        raise NotImplementedError

    def holds(self, values: Sequence[Any]) -> bool:
        """Whether all *values*, which are of its kinds and not None, are in range."""
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
    """At most *most* characters that every database holds: no NUL, and no lone surrogate."""

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
    """Return the range of column *name*."""
    field: Any = LedgerRow._meta.get_field(name.removesuffix("_id") if name in {"tenant_id", "api_key_id"} else name)
    if isinstance(field, models.CharField | models.JSONField):  # JSON that we wrote
        return _Text(field.null, field.max_length)
    if isinstance(field, models.BooleanField):
        return _Truth(field.null)
    if isinstance(field, models.FloatField | models.DateTimeField):
        return _Real(field.null)
    return _Whole(field.null, _MOST[type(field)])


_BOUNDS: Final = tuple(map(_bound_of, COLUMNS))
