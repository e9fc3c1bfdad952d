"""The record of a request: filled during its life, and written to the ledger unchanged at its end."""

import math
import sys
from operator import attrgetter
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
    lost: bool = False  # of a batch line: another execution's answer is kept, and paid

    def values(self) -> list[Any]:
        return list(_VALUES_OF(self))

    def ended(self) -> "RequestRecord":
        """Return a copy that refers to nothing else of a live request, with values that their columns hold.

        Tenants and instances may send anything: texts lose NUL and lone surrogates and are cut, whole numbers are limited to
        the range of their column, and a number that is not finite is None.
        """
        return RequestRecord(*map(_clean, _VALUES_OF(self), _LIMITS))


COLUMNS: Final = RequestRecord.__struct_fields__
_VALUES_OF: Final = attrgetter(*COLUMNS)
_LARGEST: Final[dict[type, int]] = {
    models.PositiveSmallIntegerField: 2**15 - 1,
    models.PositiveIntegerField: 2**31 - 1,
}


def _limit_of(name: str) -> int:
    """Return the most characters, or the largest number, of column *name*."""
    field = LedgerRow._meta.get_field(name)
    if isinstance(field, models.CharField):
        return field.max_length or sys.maxsize
    return _LARGEST.get(type(field), sys.maxsize)


_LIMITS: Final = tuple(map(_limit_of, COLUMNS))


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
