"""Reads of the request ledger: as a workload, a trace, and measurements of our instances."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from django.db.models import QuerySet

from controlplane.fleet.models import Instance, Model, WeightedTarget
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.explanation import trace_of
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.gateway.selectors import OWN_REGION
from controlplane.rows import narrowed
from scheduling.fleet.profile_fitting import DecodePoints, Measurements, PrefillPoints, Setting
from scheduling.routing.models import ModelRule
from scheduling.simulation.workload.columns import NO_REQUESTS, Coded, Workload, calls_of
from scheduling.simulation.workload.prefix_groups import BLOCK_TOKENS, prefixes_of

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
    "Application",
    "Run",
    "Step",
    "Unit",
    "Run due (s)",
    "E2E (ms)",
    "Prefix groups",
)
WORKLOAD_COLUMNS = (
    "arrived_at", "model", "own", "slo_class", "tenant__name", "prompt_tokens", "output_tokens",
    "predicted_prompt_tokens", "predicted_output_tokens", "unserved", "asked_model", "model_rule", "application", "run",
    "unit", "run_due_s", "e2e_ms", "outcome", "prefix_groups",
)  # fmt: skip
IDLE_ROWS_ENOUGH = 30
"""From this number of requests that met an idle instance, only these measure prefill time."""


def ledger_rows(since: datetime | None = None, until: datetime | None = None, model: str = "") -> QuerySet[LedgerRow]:
    """Return rows in order of arrival, from *since* to *until*, of one *model* or all."""
    return narrowed(
        LedgerRow.objects.order_by("arrived_at", "pk"), arrived_at__gte=since, arrived_at__lt=until, model=model
    )


def own_rows(rows: QuerySet[LedgerRow]) -> Any:
    """Return *rows* as tuples of WORKLOAD_COLUMNS, each with the caller's region."""
    return rows.annotate(own=OWN_REGION).values_list(*WORKLOAD_COLUMNS)


def workload_of(
    rows: Iterable[Sequence[Any]], at: datetime, shared: Mapping[str, Mapping[str, str]] | None = None
) -> Workload:
    """Return the workload of *rows* (WORKLOAD_COLUMNS, in order of arrival), with *at* as time 0.

    Unserved requests have their predicted length. Where a fallback served one, it is one of the model that it asked for
    (*shared* as in `as_asked`). Without the prefix groups of all of them, they share no prefixes.
    """
    columns = list(zip(*rows, strict=True))
    if not columns:
        return NO_REQUESTS
    moments, served, region, slo_class, tenant, *tokens, unserved, asked, rules = columns[:12]
    *of_runs, groups = columns[12:]
    shared = fallbacks_of_targets() if shared is None else shared
    known = None not in groups and any(groups)
    first, hashes = prefixes_of(groups) if known else (None, None)
    model, public = zip(*(as_asked(*one, shared) for one in zip(served, asked, rules, strict=True)), strict=True)
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
        asked=Coded.of(public),
        prefix_first=first,
        prefix_hashes=hashes,
        prefix_block_tokens=BLOCK_TOKENS if known else 0,
        calls=calls_of(tenant, *of_runs),
    )


def as_asked(served: str, asked: str, rule: str, shared: Mapping[str, Mapping[str, str]]) -> tuple[str, str]:
    """Return the model of a request that *served* served by *rule*, before fallbacks, and the public name it *asked* for.

    *shared* are `fallbacks_of_targets`: a target's fallback serves under the public name, and the ledger does not say which
    target it was.
    """
    if rule == ModelRule.WEIGHTS:
        return served, asked
    if asked in shared:
        return shared[asked].get(served, served), asked
    return asked or served, ""


def fallbacks_of_targets() -> dict[str, dict[str, str]]:
    """Return by public name the target that each fallback of one stands in for, the heaviest where several have it."""
    fallbacks = dict(Model.objects.filter(fallback__isnull=False).values_list("name", "fallback__name"))
    shared: dict[str, dict[str, str]] = {}
    for name, target in WeightedTarget.objects.order_by("weight").values_list("name", "target"):
        of_name = shared.setdefault(name, {})
        if target in fallbacks:
            of_name[fallbacks[target]] = target
    return shared


def ledger_trace(rows: QuerySet[LedgerRow]) -> Iterator[tuple[Any, ...]]:
    """Yield LEDGER_COLUMNS of *rows*, times to the microsecond, as read by the trace format "ledger".

    Each has the caller's region. Unserved requests have their predicted length. Those without output have a single token of
    it, which comes when their prompts are computed.
    """
    steps = Counter[tuple[int, str, str]]()
    for row in rows.select_related("tenant").defer("trace").iterator(chunk_size=5000):
        in_run = bool(row.application and row.run)
        steps[row.tenant_id, row.application, row.run] += in_run
        least = int(bool(row.surface) and not Kind(row.surface).generates)
        yield (
            row.request_id,
            row.arrived_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            row.tenant.name,
            row.model,
            row.slo_class,
            row.caller_region,
            row.outcome,
            row.predicted_prompt_tokens if row.unserved else row.prompt_tokens,
            max(least, row.predicted_output_tokens if row.unserved else row.output_tokens),
            max(least, row.predicted_output_tokens),
            row.application,
            row.run,
            steps[row.tenant_id, row.application, row.run] if in_run else "",
            row.unit,
            row.run_due_s,
            row.e2e_ms,
            row.prefix_groups,
        )


class _Points:
    def __init__(self) -> None:
        self.prefill: list[tuple[float, float, int]] = []  # tokens, seconds, running at dispatch
        self.decode: list[tuple[float, float, float]] = []  # batch, mean own tokens, seconds
        self.configurations: list[int] = []


def ledger_measurements(rows: QuerySet[LedgerRow]) -> list[Measurements]:
    """Return measurements of each (model, GPU type, tensor parallel degree) whose instances are in the inventory.

    Prefill is TTFT less our queueing time; the decode batch is the request plus what ran on the instance at dispatch,
    from the decision trace. Rows of one batch size and one eighth of the prompt lengths are one configuration, held out
    as a whole. Only requests that succeeded at the first attempt with a timed first token count. A request to a model that
    pools is one prefill of all its inputs, and its first token is its answer.
    """
    instances = list(Instance.objects.select_related("deployment__model", "deployment__gpu_type"))
    settings = {
        instance.name: Setting(
            instance.deployment.model.name, instance.deployment.gpu_type.name, instance.deployment.tensor_parallel
        )
        for instance in instances
    }
    pooling = {instance.name for instance in instances if instance.deployment.model.pools}
    points: defaultdict[Setting, _Points] = defaultdict(_Points)
    rows = rows.filter(outcome=Outcome.DONE, attempts=1, ttft_ms__isnull=False, prompt_tokens__gt=0)
    for row in rows.iterator(chunk_size=5000):
        setting, running = settings.get(row.instance), _running(row)
        if setting is None or running is None or row.ttft_ms is None:
            continue
        first_s = (row.ttft_ms - (row.queue_ms or 0.0)) / 1000
        between_s = (row.itl_ms or 0.0) / 1000
        decodes = row.instance not in pooling
        if first_s <= 0 or (decodes and (between_s <= 0 or row.output_tokens < 2)):
            continue
        if not decodes and not Kind(row.surface or Kind.CHAT).computes:
            continue
        one = points[setting]
        one.prefill.append((row.prompt_tokens, first_s, running))
        if decodes:
            one.decode.append((running + 1, row.prompt_tokens + row.output_tokens / 2, between_s))
        one.configurations.append(1000 * int(8 * np.log2(row.prompt_tokens)) + running)
    return [_measurements(setting, one) for setting, one in sorted(points.items())]


def _running(row: LedgerRow) -> int | None:
    """Return requests running on the instance when *row* was placed; None if its trace does not say."""
    for placement in reversed(trace_of(row)):
        for seen in placement.get("seen", ()):
            if seen.get("instance") == row.instance:
                return int(seen["running"])
    return None


def _measurements(setting: Setting, points: _Points) -> Measurements:
    tokens, first_s, running = np.array(points.prefill, np.float64).T
    configurations = np.array(points.configurations, np.int64)
    idle = running == 0
    if np.count_nonzero(idle) < IDLE_ROWS_ENOUGH or np.unique(tokens[idle]).size < 2:
        idle = np.ones(running.size, bool)
    prefill = PrefillPoints(tokens[idle], first_s[idle], configurations[idle])
    if not points.decode:
        return Measurements(setting, prefill, None)
    batch, own_tokens, between_s = np.array(points.decode, np.float64).T
    none = np.zeros(batch.size)
    return Measurements(
        setting,
        prefill,
        # The others' tokens are not in the row: they are assumed to have the mean length.
        DecodePoints(batch, own_tokens + (batch - 1) * float(own_tokens.mean()), between_s, none, none, configurations),
    )
