"""Requests from the ledger: the list, and one request with the trace of how it was placed."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.selectors import visible_tenants
from controlplane.console.access.roles import may, signed_in
from controlplane.console.filters import choice, number
from controlplane.console.pages.requests import placements
from controlplane.console.selectors.names import model_names
from controlplane.console.tables import Columns, table
from controlplane.exports import ROW_LIMIT
from controlplane.fleet.models import SloClass
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.gateway.selectors import filter_requests, visible_requests
from controlplane.paging import page_of

SINCE_H = (1, 6, 24, 168)
COLUMNS: Columns = {
    "Request": "request_id",
    "Arrived (UTC)": "arrived_at",
    "Tenant": "tenant.name",
    "API key": "api_key.prefix",
    "Model": "model",
    "SLO class": "slo_class",
    "Region": "region",
    "Streamed": "streamed",
    "Outcome": "outcome",
    "Status": "status_code",
    "Error": "error_code",
    "Error message": "error_message",
    "Prompt (tokens)": "prompt_tokens",
    "Output (tokens)": "output_tokens",
    "Predicted output (tokens)": "predicted_output_tokens",
    "Queue (ms)": "queue_ms",
    "TTFT (ms)": "ttft_ms",
    "ITL (ms)": "itl_ms",
    "E2E (ms)": "e2e_ms",
    "SLO met": "slo_met",
}
# Where in the fleet it ran: for the fleet's people alone, as in `/api/requests`.
FLEET_COLUMNS: Columns = {"Instance": "instance", "Attempts": "attempts"}


def requests_csv(rows: Iterable[LedgerRow], with_fleet: bool) -> HttpResponseBase:
    return table(dict(COLUMNS) | dict(FLEET_COLUMNS if with_fleet else {}), rows).csv("requests")


@require_safe
@signed_in
def requests(request: HttpRequest) -> HttpResponseBase:
    """Newest first, in pages by cursor: rows that arrive meanwhile neither repeat nor skip anything."""
    query = request.GET
    sees_fleet = may(request, Role.VIEWER)
    tenants = list(visible_tenants(request.user))
    filters: dict[str, Any] = {
        "model": query.get("model", "")[:160],
        "outcome": choice(query, "outcome", Outcome.values),
        "tenant": choice(query, "tenant", [tenant.name for tenant in tenants]),
        "instance": query.get("instance", "")[:80] if sees_fleet else "",
        "slo_class": query.get("class", "")[:40],
    }
    begin_of_id = query.get("q", "").strip()[:80]
    hours = number(query, "hours")
    hours = hours if hours in SINCE_H else None
    since = timezone.now() - timedelta(hours=hours) if hours else None
    rows = filter_requests(visible_requests(request.user), **filters, since=since)
    if begin_of_id:
        rows = rows.filter(request_id__startswith=begin_of_id)
    if query.get("format") == "csv":
        limited = rows.order_by("-pk")[:ROW_LIMIT]
        return requests_csv(limited.iterator(chunk_size=1000), sees_fleet)
    cursor = number(query, "before")
    page = page_of(rows, cursor)
    context = {
        "rows": page.rows,
        "next_cursor": page.next_cursor,
        "cursor": cursor,
        "filters": filters | {"request_id": begin_of_id},
        "filtered": any(filters.values()) or begin_of_id or hours,
        "hours": hours,
        "since_hours": SINCE_H,
        "models": model_names(),
        "outcomes": Outcome.choices,
        "classes": list(SloClass.objects.values_list("name", flat=True)),
        "tenants": tenants,
        "row_limit": ROW_LIMIT,
    }
    return render(request, "console/requests/requests.html", context)


@require_safe
@signed_in
def request_detail(request: HttpRequest, pk: int) -> HttpResponse:
    """A tenant's people see what they asked and got; where in the fleet, and what else ran there, is the fleet's."""
    row = get_object_or_404(visible_requests(request.user), pk=pk)
    slo = SloClass.objects.filter(name=row.slo_class).first()
    phases: list[dict[str, Any]] = [
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
        "trace": placements.steps(row.trace) if may(request, Role.VIEWER) else [],
        "not_judged": placements.why_not_judged(row),
        "predicted": placements.predicted(row),
    }
    return render(request, "console/requests/request.html", context)


def _phases(queue_ms: float, ttft_ms: float | None, e2e_ms: float | None) -> tuple[tuple[str, float | None, int], ...]:
    """Name, time and series of each phase. An answer that was not streamed shows no border between prefill and decode."""
    if e2e_ms is None:
        return ()
    if ttft_ms is None:
        return (("Queue", queue_ms, 2), ("Prefill and decode", e2e_ms - queue_ms, 1))
    return (("Queue", queue_ms, 2), ("Prefill", ttft_ms - queue_ms, 1), ("Decode", e2e_ms - ttft_ms, 3))
