"""Reads of the request ledger: as a workload, as a trace, and as measurements of our own instances."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import numpy as np
from django.db.models import QuerySet

from controlplane.fleet.models import Instance
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.gateway.selectors import OWN_REGION
from controlplane.rows import narrowed
from scheduling.fleet.profile_fitting import DecodePoints, Measurements, PrefillPoints, Setting
from scheduling.simulation.workload.columns import NO_REQUESTS, Coded, Workload

LEDGER_COLUMNS = (
    "Request",
    "Arrived (UTC)",
    "Tenant",
    "Model",
    "SLO class",
    "Region",
    "Outcome",
    "Prompt (tokens)",
    "Output (tokens)",
    "Predicted output (tokens)",
)
WORKLOAD_COLUMNS = (
    "arrived_at", "model", "own", "slo_class", "tenant__name", "prompt_tokens", "output_tokens",
    "predicted_prompt_tokens", "predicted_output_tokens", "unserved",
)  # fmt: skip
IDLE_ROWS_ENOUGH = 30
"""With so many requests that met an idle instance, only these show how long a prefill takes."""


def ledger_rows(since: datetime | None = None, until: datetime | None = None, model: str = "") -> QuerySet[LedgerRow]:
    """Rows in order of arrival, from *since* up to *until*, of one *model* or of all."""
    return narrowed(
        LedgerRow.objects.order_by("arrived_at", "pk"), arrived_at__gte=since, arrived_at__lt=until, model=model
    )


def asked_rows(since: datetime | None = None, until: datetime | None = None, model: str = "") -> QuerySet[LedgerRow]:
    """The same, as demand is counted: without retries of what was."""
    return ledger_rows(since, until, model).filter(repeated=False)


def own_rows(rows: QuerySet[LedgerRow]) -> Any:
    """*rows* as tuples of WORKLOAD_COLUMNS, each with the region of its caller."""
    return rows.annotate(own=OWN_REGION).values_list(*WORKLOAD_COLUMNS)


def workload_of(rows: Iterable[tuple[Any, ...]], at: datetime) -> Workload:
    """*rows* of WORKLOAD_COLUMNS, in order of arrival, with *at* as time 0.

    A request that was not served is as long as it was predicted to be.
    """
    columns = list(zip(*rows, strict=True))
    if not columns:
        return NO_REQUESTS
    moments, model, region, slo_class, tenant, *tokens, unserved = columns
    prompts, outputs, predicted_prompts, predicted = (np.array(each, np.int32) for each in tokens)
    lost = np.array(unserved, bool)
    arrival_s = np.fromiter((each.timestamp() for each in moments), np.float64, len(moments)) - at.timestamp()
    return Workload(
        arrival_s=np.maximum(arrival_s, 0.0),
        prompt_tokens=np.maximum(np.where(lost | (prompts == 0), predicted_prompts, prompts), 1),
        output_tokens=np.maximum(np.where(lost, predicted, outputs), 1),
        model=Coded.of(model),
        region=Coded.of(region),
        slo_class=Coded.of(slo_class),
        tenant=Coded.of(tenant),
        predicted_tokens=np.maximum(predicted, 1),
    )


def ledger_trace(rows: QuerySet[LedgerRow]) -> Iterator[tuple[Any, ...]]:
    """LEDGER_COLUMNS of *rows*, times to the microsecond: what the trace format "ledger" reads.

    Each comes from the region of its caller. One that was not served is as long as it was predicted to be.
    """
    for row in rows.select_related("tenant").defer("trace").iterator(chunk_size=5000):
        yield (
            row.request_id,
            row.arrived_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            row.tenant.name,
            row.model,
            row.slo_class,
            row.caller_region,
            row.outcome,
            row.predicted_prompt_tokens if row.unserved else row.prompt_tokens,
            row.predicted_output_tokens if row.unserved else row.output_tokens,
            row.predicted_output_tokens,
        )


class _Points:
    def __init__(self) -> None:
        self.prefill: list[tuple[float, float, int]] = []  # tokens, seconds, running when it was placed
        self.decode: list[tuple[float, float, float]] = []  # batch, own tokens on average, seconds
        self.configurations: list[int] = []


def ledger_measurements(rows: QuerySet[LedgerRow]) -> list[Measurements]:
    """Measurements from the ledger of each (model, GPU type, tensor parallel degree) whose instances are in the inventory.

    Prefill is TTFT less the time in our queue; the decode batch is what ran on the instance when the request was
    placed, from the decision trace, and itself. Rows of one batch size and one eighth of the prompt lengths are one
    configuration, which is held out as a whole. Requests that ended well at the first attempt count, if their first token
    is timed.
    """
    settings = {
        instance.name: Setting(
            instance.deployment.model.name, instance.deployment.gpu_type.name, instance.deployment.tensor_parallel
        )
        for instance in Instance.objects.select_related("deployment__model", "deployment__gpu_type")
    }
    points: defaultdict[Setting, _Points] = defaultdict(_Points)
    rows = rows.filter(outcome=Outcome.DONE, attempts=1, ttft_ms__isnull=False, prompt_tokens__gt=0)
    for row in rows.iterator(chunk_size=5000):
        setting, running = settings.get(row.instance), _running(row)
        if setting is None or running is None or row.ttft_ms is None:
            continue
        first_s = (row.ttft_ms - (row.queue_ms or 0.0)) / 1000
        between_s = (row.itl_ms or 0.0) / 1000
        if first_s <= 0 or between_s <= 0 or row.output_tokens < 2:
            continue
        one = points[setting]
        one.prefill.append((row.prompt_tokens, first_s, running))
        one.decode.append((running + 1, row.prompt_tokens + row.output_tokens / 2, between_s))
        one.configurations.append(1000 * int(8 * np.log2(row.prompt_tokens)) + running)
    return [_measurements(setting, one) for setting, one in sorted(points.items())]


def _running(row: LedgerRow) -> int | None:
    """Requests that ran on its instance when *row* was placed; None if its trace does not say."""
    for placement in reversed(row.trace):
        for seen in placement.get("seen", ()):
            if seen.get("instance") == row.instance:
                return int(seen["running"])
    return None


def _measurements(setting: Setting, points: _Points) -> Measurements:
    tokens, first_s, running = np.array(points.prefill, np.float64).T
    batch, own_tokens, between_s = np.array(points.decode, np.float64).T
    configurations = np.array(points.configurations, np.int64)
    idle = running == 0
    if np.count_nonzero(idle) < IDLE_ROWS_ENOUGH or np.unique(tokens[idle]).size < 2:
        idle = np.ones(running.size, bool)
    none = np.zeros(batch.size)
    return Measurements(
        setting,
        PrefillPoints(tokens[idle], first_s[idle], configurations[idle]),
        # The others' tokens are not in the row: they are taken to be as long as requests are on average.
        DecodePoints(batch, own_tokens + (batch - 1) * float(own_tokens.mean()), between_s, none, none, configurations),
    )
