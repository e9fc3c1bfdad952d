"""`/api`: what happened. Events, requests, usage, and the live summary."""

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import redis
from django.conf import settings
from django.db.models import QuerySet
from django.http import HttpResponse, HttpResponseBase
from django.utils import timezone
from ninja import Query, Router, Schema
from pydantic import AwareDatetime, Field

from controlplane.accounts.models import Role, Tenant
from controlplane.api import selectors
from controlplane.api.callers import PEOPLE, PEOPLE_AND_KEYS, ApiRequest, Caller
from controlplane.api.errors import ApiError, ErrorBody
from controlplane.api.schemas import EventOut, Page, RequestOut, UsageOut
from controlplane.dispatch.wire import SUMMARY_KEY
from controlplane.events.models import Severity
from controlplane.events.selectors import filter_events, page_of_events, visible_events
from controlplane.exports import csv_response
from controlplane.gateway.models import Outcome

router = Router(auth=PEOPLE_AND_KEYS)

SUMMARY_TIMEOUT_S = 0.5
USAGE_CSV_ROWS = 1_000_000
USAGE_DEFAULT_RANGE = timedelta(hours=1)


class EventQuery(Schema):
    kind: str = ""
    severity: Severity | None = None
    subject_type: str = ""
    subject_id: str = ""
    actor: str = ""
    q: str = ""
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    cursor: int | None = None
    limit: int = Field(50, ge=1, le=500)


class RequestQuery(Schema):
    tenant: str = ""
    model: str = ""
    region: str = ""
    slo_class: str = ""
    instance: str = ""
    outcome: Outcome | None = None
    request_id: str = ""
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    cursor: int | None = None
    limit: int = Field(50, ge=1, le=500)


class UsageQuery(Schema):
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    tenant: str = ""
    model: str = ""
    region: str = ""
    slo_class: str = ""
    format: Literal["json", "csv"] = "json"
    limit: int = Field(5_000, ge=1, le=20_000)


@router.get("/events", response=Page[EventOut], auth=PEOPLE, tags=["Records"])
def list_events(request: ApiRequest, query: Query[EventQuery]) -> dict[str, Any]:
    """Events, newest first. `kind` is a whole kind or a family ending in a dot, such as `instance.`.

    The fleet's people see all; others see what happened to the API keys of their tenants.
    """
    wanted = query.model_dump(exclude={"q", "cursor", "limit"})
    rows = filter_events(
        visible_events(request.auth.person), **wanted | {"severity": query.severity or ""}, text=query.q
    )
    page = page_of_events(rows, query.cursor, query.limit)
    return {"items": page.rows, "next_cursor": page.next_cursor}


@router.get("/requests", response=Page[RequestOut], tags=["Records"])
def list_requests(request: ApiRequest, query: Query[RequestQuery]) -> dict[str, Any]:
    """Requests, newest first. A tenant's people and keys see their own, without where in the fleet these ran."""
    caller: Caller = request.auth
    rows = selectors.requests(_tenants(caller, query.tenant))
    narrowing = {
        "model": query.model,
        "region": query.region,
        "slo_class": query.slo_class,
        "request_id": query.request_id,
        "outcome": query.outcome,
        "arrived_at__gte": query.since,
        "arrived_at__lt": query.until,
        "pk__lt": query.cursor,
    }
    if query.instance:
        caller.require(Role.VIEWER)
        narrowing["instance"] = query.instance
    rows = rows.filter(**{name: value for name, value in narrowing.items() if value not in (None, "")})
    items = list(rows[: query.limit + 1])
    more = len(items) > query.limit
    items = items[: query.limit]
    if not caller.sees_fleet:
        for row in items:
            vars(row).update(instance=None, attempts=None, trace=None)  # none of them is null in the ledger
    return {"items": items, "next_cursor": items[-1].pk if more else None}


@router.get("/usage", response=UsageOut, tags=["Records"])
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
    names = {name: value for name, value in names.items() if value}
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


@router.get("/summary", response={200: dict, 304: None, 503: ErrorBody}, auth=PEOPLE, tags=["Live"])
def get_summary(request: ApiRequest) -> HttpResponse:
    """The newest live summary that the gateway published: fleet, models, endpoints and instances, columnar.

    Answers 304 to an `If-None-Match` of the same summary, and 503 while no gateway publishes one.
    """
    request.auth.require(Role.VIEWER)
    summary = _summary()
    if summary is None:
        raise ApiError(503, "no_summary", "No gateway has published a summary in the last seconds.")
    etag = f'"{hashlib.blake2b(summary, digest_size=12).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if etag in request.headers.get("If-None-Match", ""):
        return HttpResponse(status=304, headers=headers)
    return HttpResponse(summary, content_type="application/json", headers=headers)


def _summary() -> bytes | None:
    """The summary as the gateway wrote it; None if there is none or Redis does not answer."""
    try:
        with redis.Redis.from_url(
            settings.REDIS_URL, socket_connect_timeout=SUMMARY_TIMEOUT_S, socket_timeout=SUMMARY_TIMEOUT_S
        ) as client:
            summary: bytes | None = client.get(SUMMARY_KEY)
            return summary
    except (redis.RedisError, OSError):
        return None


def _tenants(caller: Caller, name: str) -> QuerySet[Tenant] | None:
    """The tenants to show requests of: *name* if given, else all that the caller sees; None is no limit at all."""
    if not name:
        return None if caller.sees_fleet else caller.tenants()
    tenants = caller.tenants().filter(name=name)
    if not tenants.exists():
        raise ApiError(403, "forbidden", "You do not see such a tenant.", "tenant")
    return tenants
