"""`/api`: what happened: events, requests, usage."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal, Self

from django.db.models import QuerySet
from django.http import HttpResponseBase
from django.utils import timezone
from ninja import Field, Query, Router, Schema
from ninja.pagination import paginate
from pydantic import AwareDatetime, ValidationInfo, model_validator

from controlplane.accounts.models import Role, Tenant
from controlplane.api.callers import PEOPLE_AND_KEYS, ApiRequest, Caller
from controlplane.api.errors import ApiError
from controlplane.api.schemas import Described, NewestFirst, Page, RowSchema
from controlplane.events.models import Event, Severity
from controlplane.events.selectors import filter_events, visible_events
from controlplane.gateway import selectors
from controlplane.gateway.models import LedgerRow, MinuteRow, Outcome
from controlplane.resources.tables import csv_response

router = Router(auth=PEOPLE_AND_KEYS, tags=["Records"])

USAGE_CSV_ROWS = 1_000_000
USAGE_DEFAULT_RANGE = timedelta(hours=1)


class EventOut(RowSchema):
    class Meta:
        model = Event
        fields = ("id", "at", "kind", "actor", "subject_type", "subject_id", "subject", "reason")

    severity: Severity
    before: dict[str, Any]
    after: dict[str, Any]
    inputs: dict[str, Any]


class RequestOut(RowSchema):
    """One request of the ledger. Never a prompt, never a completion."""

    class Meta:
        model = LedgerRow
        fields = ("id", "request_id", "arrived_at", "tenant", "model", "slo_class", "region", "application", "run",
                  "unit", "streamed", "status_code", "error_code", "error_message", "prompt_tokens", "output_tokens",
                  "predicted_prompt_tokens", "predicted_output_tokens", "queue_ms", "ttft_ms", "itl_ms", "e2e_ms", "slo_met",
                  "unserved", "retry", "repeated", "queue_position",
                  "estimated_wait_s", "estimated_wait_p99_s", "evictions")  # fmt: skip

    outcome: Outcome
    own_region: str
    """Where its caller is, and where it counts as demand."""
    instance: str | None
    """For the fleet's people alone, like `attempts` and `trace`."""
    attempts: int | None
    trace: list[Any] | None

    @staticmethod
    def resolve_own_region(row: LedgerRow) -> str:
        return row.caller_region

    @model_validator(mode="after")
    def hide_fleet(self, info: ValidationInfo) -> Self:
        """None of them is null in the ledger."""
        if not (info.context or {})["request"].auth.sees_fleet:
            self.instance = self.attempts = self.trace = None
        return self


class UsageRow(RowSchema):
    """One minute of arrival for one model, region, region of the callers and SLO class.

    Tokens were served. Those of `unserved` requests, which the fleet refused, or which expired, were cancelled or failed
    before their first token, are as predicted. Those of `repeated` requests, retries of them, were served. Demand is served
    and unserved tokens less the repeated, in the callers' `own_region`.
    """

    class Meta:
        model = MinuteRow
        fields = selectors.USAGE_COLUMNS


class UsageOut(Described):
    items: list[UsageRow]
    truncated: bool
    """There are more rows than `limit`: ask for a shorter range, or for CSV."""


class EventQuery(Schema):
    kind: str = ""
    severity: Severity | None = None
    subject_type: str = ""
    subject_id: str = ""
    actor: str = ""
    q: str = ""
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None


class RequestQuery(Schema):
    tenant: str = ""
    model: str = ""
    region: str = ""
    slo_class: str = ""
    instance: str = ""
    outcome: Outcome | None = None
    slo_met: bool | None = Field(None, description="Of those that were judged.")
    unserved: bool | None = Field(None, description="Demand that got no token.")
    spilled: bool | None = Field(None, description="Of a caller in another region than the one that took it.")
    request_id: str = ""
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None


class UsageQuery(Schema):
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    tenant: str = ""
    model: str = ""
    region: str = ""
    slo_class: str = ""
    format: Literal["json", "csv"] = "json"
    limit: int = Field(5_000, ge=1, le=20_000)


@router.get("/events", response=Page[EventOut])
@paginate(NewestFirst)
def list_events(request: ApiRequest, query: Query[EventQuery]) -> QuerySet[Event]:
    """Events, newest first. `kind` is a whole kind or a family ending in a dot, such as `instance.`.

    The fleet's people see all; others see what happened to the API keys of their tenants.
    """
    filters = query.model_dump(exclude={"q"}) | {"text": query.q}
    caller: Caller = request.auth
    events = Event.objects.all() if caller.sees_fleet else visible_events(caller.person)
    return filter_events(events, **filters)


@router.get("/requests", response=Page[RequestOut])
@paginate(NewestFirst)
def list_requests(request: ApiRequest, query: Query[RequestQuery]) -> QuerySet[LedgerRow]:
    """Requests, newest first. A tenant's people and keys see their own, without where in the fleet these ran."""
    if query.instance:
        request.auth.check(Role.VIEWER)
    rows = selectors.requests_of(_tenants(request.auth, query.tenant))
    return selectors.filter_requests(rows, **query.model_dump(exclude={"tenant"}))


@router.get("/usage", response=UsageOut)
def get_usage(request: ApiRequest, query: Query[UsageQuery]) -> dict[str, Any] | HttpResponseBase:
    """Requests and tokens by minute of arrival, model, region and SLO class; `since` is included, `until` is not.

    Without a range, the last hour. The fleet's people get the fleet's series, or with `tenant` that tenant's; a tenant's
    people and keys get their own, counted from the request ledger, which is kept for `PILOTHOUSE_LEDGER_KEEP_DAYS` days.
    `format=csv` streams the whole range.
    """
    caller: Caller = request.auth
    until = query.until or timezone.now()
    since = query.since or until - USAGE_DEFAULT_RANGE
    if since >= until:
        raise ApiError(422, "invalid", "The range is empty: since is not before until.", "since")
    names = {"model": query.model, "region": query.region, "slo_class": query.slo_class}
    tenants = _tenants(caller, query.tenant)

    def rows(limit: int) -> Iterator[dict[str, Any]]:
        if tenants is None:
            return selectors.fleet_usage(since, until, limit, **names)
        return selectors.tenant_usage(tenants, since, until, limit, **names)

    if query.format == "csv":
        columns = selectors.USAGE_COLUMNS
        cells = ([row[column] for column in columns] for row in rows(USAGE_CSV_ROWS))
        return csv_response("usage", columns, cells, USAGE_CSV_ROWS)
    items = list(rows(query.limit + 1))
    return {"items": items[: query.limit], "truncated": len(items) > query.limit}


def _tenants(caller: Caller, name: str) -> QuerySet[Tenant] | None:
    """The tenants to show requests of: *name* if given, else all that the caller sees; None is no limit at all."""
    if not name:
        return None if caller.sees_fleet else caller.tenants()
    tenants = caller.tenants().filter(name=name)
    if not tenants.exists():
        raise ApiError(403, "forbidden", "You do not see such a tenant.", "tenant")
    return tenants
