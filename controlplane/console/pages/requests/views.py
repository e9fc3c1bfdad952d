"""Requests from the ledger: the list, and one request with the trace of how it was placed."""

from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.selectors import visible_tenants
from controlplane.console.access.roles import may, signed_in
from controlplane.console.formats import milliseconds
from controlplane.console.lists import list_page
from controlplane.console.pages.requests import placements
from controlplane.fleet.models import SloClass
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.gateway.selectors import filter_requests, visible_requests
from controlplane.resources.filters import Filters, Hidden, Search, Select, every, last_hours, model_select, sort_by
from controlplane.resources.names import model_names, region_names
from controlplane.resources.tables import Columns

COLUMNS: Columns = {
    "Request": "request_id",
    "Arrived (UTC)": "arrived_at",
    "Ended (UTC)": "ended_at",
    "Tenant": "tenant.name",
    "API key": "api_key.prefix",
    "Model": "model",
    "SLO class": "slo_class",
    "Region": "region",
    "Own region": "caller_region",
    "Streamed": "streamed",
    "Outcome": "outcome",
    "Status": "status_code",
    "Error": "error_code",
    "Error message": "error_message",
    "Prompt (tokens)": "prompt_tokens",
    "Output (tokens)": "output_tokens",
    "Predicted prompt (tokens)": "predicted_prompt_tokens",
    "Predicted output (tokens)": "predicted_output_tokens",
    "Queue (ms)": "queue_ms",
    "TTFT (ms)": "ttft_ms",
    "ITL (ms)": "itl_ms",
    "E2E (ms)": "e2e_ms",
    "SLO met": "slo_met",
    "Unserved": "unserved",
}
# Where in the fleet it ran: for the fleet's people alone, as in `/api/requests`.
FLEET_COLUMNS: Columns = {"Instance": "instance", "Attempts": "attempts"}

SORTED_BY = ("queue_ms", "ttft_ms", "itl_ms", "e2e_ms")
SLO = [("", "SLO: all"), ("missed", "SLO missed"), ("met", "SLO met")]
DEMAND = {"unserved": "Demand not served", "spilled": "From another region"}
"""Choices in addition to the outcomes: what became of the demand, whatever the outcome was."""


@require_safe
@signed_in
def requests(request: HttpRequest) -> HttpResponseBase:
    sees_fleet = may(request, Role.VIEWER)
    tenants = {tenant.name: str(tenant) for tenant in visible_tenants(request.user)}
    whose = (
        Select("tenant", "Tenant", every("tenants", tenants.items())) if len(tenants) > 1 else Hidden("tenant", tenants)
    )
    filters = Filters(
        request.GET,
        Search("q", "Beginning of the request id", "Request id"),
        model_select(model_names(), free=160),
        Select("outcome", "Outcome", every("outcomes", [*Outcome.choices, *DEMAND.items()])),
        Select("class", "SLO class", every("classes", SloClass.objects.values_list("name", flat=True)), free=40),
        Select("slo", "SLO", SLO),
        # A tenant reads only the regions that its requests ran in, so the list of all is the fleet's.
        Select("region", "Region", every("regions", region_names()), free=40)
        if sees_fleet
        else Hidden("region", length=40),
        whose,
        Select("hours", "Arrived", [("", "Any time"), *last_hours(1, 6, 24, 168)]),
        *([Hidden("instance")] if sees_fleet else []),
        sort_by(SORTED_BY, ""),
    )
    rows = filter_requests(
        visible_requests(request.user),
        model=filters["model"],
        outcome="" if filters["outcome"] in DEMAND else filters["outcome"],
        tenant=filters["tenant"],
        instance=filters["instance"] if sees_fleet else "",
        slo_class=filters["class"],
        region=filters["region"],
        slo_met={"met": True, "missed": False}.get(filters["slo"]),
        unserved=True if filters["outcome"] == "unserved" else None,
        spilled=True if filters["outcome"] == "spilled" else None,
        request_id=filters["q"],
        since=filters.since,
    )
    columns = {**COLUMNS, **FLEET_COLUMNS} if sees_fleet else COLUMNS
    context = {"filters": filters}
    return list_page(request, "console/requests/requests.html", rows, columns, "requests", context, order=filters.order)


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
        "against_slo": against_slo(row, slo),
        "not_judged": placements.why_not_judged(row),
        "predicted": placements.predicted(row),
    }
    return render(request, "console/requests/request.html", context)


def against_slo(row: LedgerRow, slo: SloClass | None) -> str:
    """`TTFT 3.60 s, target 1.00 s`: the targets that *row* missed, or all of them where it met them.

    Targets are those of the class today; the verdict is of then.
    """
    if slo is None or row.slo_met is None:
        return ""
    judged = [
        (name, value, target)
        for name, value, target in (
            ("TTFT", row.ttft_ms, slo.ttft_target_ms),
            ("ITL", row.itl_ms, slo.itl_target_ms),
            ("E2E", row.e2e_ms, slo.e2e_target_ms),
        )
        if value is not None and target is not None
    ]
    missed = [part for part in judged if part[1] > part[2]]
    shown = judged if row.slo_met else missed
    return "; ".join(f"{name} {milliseconds(value)}, target {milliseconds(target)}" for name, value, target in shown)


def _phases(queue_ms: float, ttft_ms: float | None, e2e_ms: float | None) -> tuple[tuple[str, float | None, int], ...]:
    """Name, time and series of each phase. An answer in one piece shows no border between prefill and decode."""
    if e2e_ms is None:
        return ()
    if ttft_ms is None:
        return (("Queue", queue_ms, 2), ("Prefill and decode", e2e_ms - queue_ms, 1))
    return (("Queue", queue_ms, 2), ("Prefill", ttft_ms - queue_ms, 1), ("Decode", e2e_ms - ttft_ms, 3))
