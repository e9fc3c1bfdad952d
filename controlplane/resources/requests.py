"""Requests of the ledger: columns of a finished request, and filters of lists."""

from typing import Any

from django.db.models import Q, QuerySet

from controlplane.fleet.models import SloClass
from controlplane.gateway.explanation import trace_of
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.gateway.selectors import MISSED_BY
from controlplane.gateway.selectors import by_cause as missed_by_cause
from controlplane.resources.filters import Control, Hidden, Search, Select, every
from controlplane.resources.names import region_names
from controlplane.resources.resource import LEAVES, Column, Filter, Resource, Viewer, in_range, of_model
from scheduling.queueing.promises import UNREACHABLE
from scheduling.routing.models import ModelRule

DEMAND = {
    "unserved": "Demand not served",
    "spilled": "From another region",
    "degraded": "Degraded to another class",
    "unreachable": "Refused on arrival",
    "fallback": "Served by a fallback model",
}
"""Choices of the page in addition to the outcomes."""


def visible_requests(viewer: Viewer) -> QuerySet[LedgerRow]:
    """Return all requests for fleet users, else those of the viewer's tenants."""
    rows = LedgerRow.objects.select_related("tenant", "api_key")
    return rows if viewer.sees_fleet else rows.filter(tenant__in=viewer.tenants())


def spilled(rows: QuerySet[LedgerRow], given: bool) -> QuerySet[LedgerRow]:
    """Narrow to requests served outside of their caller's region, or to all others."""
    elsewhere = Q(own_region__gt="", region__gt="")
    return rows.filter(elsewhere if given else ~elsewhere)


def degraded(rows: QuerySet[LedgerRow], given: bool) -> QuerySet[LedgerRow]:
    """Those whose SLO class was changed because its promise was unreachable, or all others."""
    return rows.exclude(asked_class="") if given else rows.filter(asked_class="")


def by_outcome(rows: QuerySet[LedgerRow], given: str) -> QuerySet[LedgerRow]:
    match given:
        case "unserved":
            return rows.filter(unserved=True)
        case "spilled":
            return spilled(rows, True)
        case "degraded":
            return degraded(rows, True)
        case "fallback":
            return rows.exclude(model_rule__in=["", ModelRule.WEIGHTS])
        case "unreachable":
            return rows.filter(error_code=UNREACHABLE)
    return rows.filter(outcome=given)


def tenant_control(viewer: Viewer) -> Control:
    tenants = {tenant.name: str(tenant) for tenant in viewer.tenants()}
    if len(tenants) > 1:
        return Select("tenant", "Tenant", every("tenants", tenants.items()))
    return Hidden("tenant", tenants)


def region_control(viewer: Viewer) -> Control:
    """Return a choice of all regions for fleet users."""
    if viewer.sees_fleet:
        return Select("region", "Region", every("regions", region_names()), free=40)
    return Hidden("region", length=40)


def class_control(_viewer: Viewer) -> Control:
    return Select("class", "SLO class", every("classes", SloClass.objects.values_list("name", flat=True)), free=40)


REQUESTS = Resource(
    name="requests",
    noun="request",
    model=LedgerRow,
    rows=visible_requests,
    columns=(
        Column("id"),
        Column("request_id", "Request", draw="console/requests/id_cell.html"),
        Column("arrived_at", "Arrived (UTC)", draw="moment"),
        Column("ended_at", "Ended (UTC)", draw="moment", rest=False, leaves=LEAVES),
        Column("tenant", "Tenant", "tenant.name", leaves=LEAVES),
        Column("api_key", "API key", "api_key.prefix", rest=False),
        Column("model", "Model"),
        Column("asked_model", "Asked model"),
        Column("model_rule", "Rule of another model"),
        Column("adapter", "Adapter"),
        Column("surface", "Surface", about="What was called, by the last part of its path."),
        Column("slo_class", "SLO class", label="Class", leaves=LEAVES),
        Column("asked_class", "Asked class"),
        Column("region", "Region"),
        Column(
            "own_region", "Own region", "caller_region", about="Where its caller is, and where it counts as demand."
        ),
        Column("application"),
        Column("run"),
        Column("unit"),
        Column("streamed", "Streamed"),
        Column("outcome", "Outcome", type=Outcome, draw="console/requests/outcome_cell.html"),
        Column("status_code", "Status"),
        Column("error_code", "Error"),
        Column("error_message", "Error message"),
        Column("prompt_tokens", "Prompt (tokens)", draw="count", tip="Tokens"),
        Column("output_tokens", "Output (tokens)", draw="count", tip="Tokens"),
        Column("predicted_prompt_tokens", "Predicted prompt (tokens)"),
        Column("predicted_output_tokens", "Predicted output (tokens)"),
        Column("cached_tokens", "Cached prompt (tokens)"),
        Column("expected_cached_tokens", "Expected cached prompt (tokens)", fleet=True),
        Column("expected_by", "Expected by", fleet=True),
        Column("queue_ms", "Queue (ms)", draw="milliseconds", sorts=True, leaves=LEAVES),
        Column("ttft_ms", "TTFT (ms)", draw="milliseconds", sorts=True),
        Column("itl_ms", "ITL (ms)", draw="milliseconds", sorts=True, leaves=LEAVES),
        Column("e2e_ms", "E2E (ms)", draw="milliseconds", sorts=True),
        Column("slo_met", "SLO met", label="SLO", draw="console/requests/slo_cell.html"),
        Column("unserved", "Unserved"),
        Column("queue_position"),
        Column("estimated_wait_s"),
        Column("estimated_wait_p99_s"),
        Column("evictions"),
        Column("instance", "Instance", draw="console/fleet/link_cell.html", fleet=True),
        Column("attempts", "Attempts", fleet=True),
        Column("trace", source=trace_of, type=list[Any], fleet=True),
    ),
    filters=(
        Filter("request_id", control=Search("q", "Request id", "Request id")),
        of_model(free=160),
        Filter(
            "outcome",
            by_outcome,
            Outcome,
            Select("outcome", "Outcome", every("outcomes", [*Outcome.choices, *DEMAND.items()])),
        ),
        Filter("slo_class", control=class_control),
        Filter(
            "slo_met",
            type=bool,
            control=Select("slo", "SLO", [("", "SLO: all"), ("missed", "SLO missed"), ("met", "SLO met")]),
            values={"missed": False, "met": True},
            about="Of those that were judged.",
        ),
        Filter(
            "cause",
            missed_by_cause,
            control=Hidden("cause", MISSED_BY),
            about=f"Of those that missed their SLO: {', '.join(MISSED_BY)}.",
        ),
        Filter("region", control=region_control),
        Filter("tenant", "tenant__name", control=tenant_control),
        *in_range("arrived_at", "Arrived", 1, 6, 24, 168),
        Filter("instance", control=Hidden("instance"), fleet=True),
        Filter("unserved", type=bool, about="Demand that got no token."),
        Filter("spilled", spilled, bool, about="Of a caller in another region than the one that took it."),
        Filter("degraded", degraded, bool, about="Served in another SLO class, since its own promise was unreachable."),
        Filter("adapter", control=Hidden("adapter"), about="LoRA adapter that served it."),
        Filter("asked_model", about="Name that was asked for, where another model served it."),
        Filter("error_code", about="Such as `deadline_unreachable`: refused on arrival."),
    ),
    page=(
        *("request_id", "arrived_at", "ended_at", "outcome", "slo_met", "tenant", "model", "slo_class", "instance"),
        *("prompt_tokens", "output_tokens", "queue_ms", "ttft_ms", "itl_ms", "e2e_ms"),
    ),
    caption="Most recently finished first",
    sorted_captions=("Slowest first", "Fastest first"),
    template="console/requests/requests.html",
)
