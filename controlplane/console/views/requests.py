"""Requests from the ledger: the list, and one request with the trace of how it was placed."""

from datetime import timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.selectors import visible_tenants
from controlplane.console import placements, selectors
from controlplane.console.access import signed_in
from controlplane.console.filters import choice, number
from controlplane.exports import ROW_LIMIT, csv_response
from controlplane.fleet.models import SloClass
from controlplane.gateway.models import LedgerRow, Outcome

PAGE_SIZE = 50
SINCE_H = (1, 6, 24, 168)
CSV_HEADER = (
    "Request",
    "Arrived (UTC)",
    "Tenant",
    "API key",
    "Model",
    "SLO class",
    "Region",
    "Instance",
    "Outcome",
    "Status",
    "Error",
    "Prompt (tokens)",
    "Output (tokens)",
    "Predicted output (tokens)",
    "Queue (ms)",
    "TTFT (ms)",
    "ITL (ms)",
    "E2E (ms)",
    "SLO met",
    "Attempts",
)


def csv_row(row: LedgerRow) -> tuple[Any, ...]:
    return (
        row.request_id,
        row.arrived_at,
        row.tenant.name,
        row.api_key.prefix if row.api_key else None,
        row.model,
        row.slo_class,
        row.region,
        row.instance,
        row.outcome,
        row.status_code,
        row.error_code,
        row.prompt_tokens,
        row.output_tokens,
        row.predicted_output_tokens,
        row.queue_ms,
        row.ttft_ms,
        row.itl_ms,
        row.e2e_ms,
        row.slo_met,
        row.attempts,
    )


@require_safe
@signed_in
def requests(request: HttpRequest) -> HttpResponseBase:
    """Newest first, in pages by cursor: rows that arrive meanwhile neither repeat nor skip anything."""
    query = request.GET
    tenants = list(visible_tenants(request.user))
    filters = {
        "model": query.get("model", "")[:160],
        "outcome": choice(query, "outcome", Outcome.values),
        "tenant": choice(query, "tenant", [tenant.name for tenant in tenants]),
        "instance": query.get("instance", "")[:80],
        "slo_class": query.get("class", "")[:40],
        "request_id": query.get("q", "").strip()[:80],
    }
    hours = number(query, "hours")
    hours = hours if hours in SINCE_H else None
    since = timezone.now() - timedelta(hours=hours) if hours else None
    rows = selectors.filter_requests(selectors.visible_requests(request.user), **filters, since=since)
    if query.get("format") == "csv":
        limited = rows.order_by("-pk")[:ROW_LIMIT]
        return csv_response("requests", CSV_HEADER, (csv_row(row) for row in limited.iterator(chunk_size=1000)))
    cursor = number(query, "before")
    if cursor is not None:
        rows = rows.filter(pk__lt=cursor)
    page = list(rows.order_by("-pk")[: PAGE_SIZE + 1])
    context = {
        "rows": page[:PAGE_SIZE],
        "next_cursor": page[PAGE_SIZE - 1].pk if len(page) > PAGE_SIZE else None,
        "cursor": cursor,
        "filters": filters,
        "filtered": any(filters.values()) or hours,
        "hours": hours,
        "since_hours": SINCE_H,
        "models": selectors.model_names(),
        "outcomes": Outcome.choices,
        "classes": list(SloClass.objects.values_list("name", flat=True)),
        "tenants": tenants,
        "row_limit": ROW_LIMIT,
    }
    return render(request, "console/requests.html", context)


@require_safe
@signed_in
def request_detail(request: HttpRequest, pk: int) -> HttpResponse:
    row = get_object_or_404(selectors.visible_requests(request.user), pk=pk)
    slo = SloClass.objects.filter(name=row.slo_class).first()
    phases = [
        {"name": name, "ms": ms, "series": series}
        for name, ms, series in _phases(row.queue_ms or 0.0, row.ttft_ms, row.e2e_ms)
        if ms is not None and ms >= 0
    ]
    whole_ms = sum(phase["ms"] for phase in phases)
    x = 0.0
    for phase in phases:
        phase["x"], phase["width"] = round(x, 2), round(phase["ms"] / whole_ms * 1000, 2) if whole_ms else 0
        x += phase["width"]
    context = {
        "row": row,
        "slo": slo,
        "phases": phases,
        "trace": placements.steps(row.trace),
        "predicted": placements.predicted(row),
    }
    return render(request, "console/request.html", context)


def _phases(queue_ms: float, ttft_ms: float | None, e2e_ms: float | None) -> tuple[tuple[str, float | None, int], ...]:
    """Name, time and series of each phase. An answer that was not streamed shows no border between prefill and decode."""
    if e2e_ms is None:
        return ()
    if ttft_ms is None:
        return (("Queue", queue_ms, 2), ("Prefill and decode", e2e_ms - queue_ms, 1))
    return (("Queue", queue_ms, 2), ("Prefill", ttft_ms - queue_ms, 1), ("Decode", e2e_ms - ttft_ms, 3))
