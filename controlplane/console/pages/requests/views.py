"""Requests from the ledger: the list, and one request with the trace of how it was placed."""

from typing import Any, cast

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import may, signed_in
from controlplane.console.formats import milliseconds
from controlplane.console.lists import list_page, viewer_of
from controlplane.console.pages.requests import placements
from controlplane.fleet.models import SloClass
from controlplane.gateway.explanation import trace_of
from controlplane.gateway.models import LedgerRow
from controlplane.resources.requests import REQUESTS, visible_requests


@require_safe
@signed_in
def requests(request: HttpRequest) -> HttpResponseBase:
    """The list; with `?first=` the page of its first request."""
    if "first" in request.GET:
        filters, rows = REQUESTS.listed(viewer_of(request), request.GET)
        for row in REQUESTS.page_of(cast("QuerySet[LedgerRow]", rows), filters, None).rows[:1]:
            return redirect("console:request", row.pk)
    return list_page(request, REQUESTS)


@require_safe
@signed_in
def request_detail(request: HttpRequest, pk: int) -> HttpResponse:
    """A tenant's people see what they asked and got; where in the fleet, and what else ran there, is the fleet's."""
    row = get_object_or_404(visible_requests(viewer_of(request)), pk=pk)
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
        "trace": placements.steps(trace_of(row)) if may(request, Role.VIEWER) else [],
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
