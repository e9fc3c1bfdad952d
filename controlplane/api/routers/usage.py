"""`/api/v1/usage`: tenants' usage and its cost."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal, get_args

from django.http import HttpResponseBase
from django.utils import timezone
from ninja import Field, Query, Router, Schema, Status
from pydantic import FiniteFloat

from controlplane.accounts.models import Role, Tenant
from controlplane.api.callers import PEOPLE_AND_KEYS, VIEWERS, ApiRequest, Caller
from controlplane.api.errors import ApiError
from controlplane.api.resources import add_list, schema_of
from controlplane.api.schemas import Described, Strict
from controlplane.fleet.models import Price
from controlplane.fleet.spot import selectors as spot
from controlplane.resources import focus
from controlplane.resources.inventory import PRICES
from controlplane.resources.tables import ROW_LIMIT, csv_response, table
from controlplane.rows import Instant
from controlplane.usage.models import SUMS, Work
from controlplane.usage.prices import set_price
from controlplane.usage.selectors import UsageScope, counted_until, summed, usage, zone_of

router = Router(auth=PEOPLE_AND_KEYS, tags=["Records"])

DEFAULT_DAYS = 7
Group = Literal[
    "day", "hour", "tenant", "key", "model", "slo_class", "work", "application", "batch", "gpu_type", "instance"
]
DEFAULT_GROUPS: list[Group] = ["day", "tenant", "key", "model", "slo_class"]
CSV = "text/csv"
NAMES = ("day", "hour", "time_zone", "tenant", "key", "key_name", "model", "slo_class", "work", "application", "batch",
         "gpu_type", "instance", "idle")  # fmt: skip


class UsageSums(Described):
    requests: int
    """All requests that arrived in the period and have ended, including refused ones."""
    prompt_tokens: int
    output_tokens: int
    kv_token_s: float
    """KV tokens held (prompt plus half of the output) times running seconds."""
    gpu_s: float
    cost_usd: float
    """Shares of the cost of the serving instances, by KV-token-seconds."""
    charged_usd: float
    """Cost times the price factor of the SLO class; of batch lines with their discount, of spot work at the spot price."""


class UsageItem(UsageSums):
    """Usage of one group; fields not grouped by are null."""

    day: date | None
    """Day in `time_zone`."""
    hour: datetime | None
    time_zone: str | None
    """Of the day; null where rows are not grouped by it."""
    tenant: str | None
    key: str | None
    """First characters of the API key."""
    key_name: str | None
    model: str | None
    slo_class: str | None
    work: Work | None
    """Interactive, non-interactive, batch, opportunistic or idle."""
    application: str | None
    batch: str | None
    """Id of a batch."""
    gpu_type: str | None
    instance: str | None
    """Only for fleet users, without `tenant` and `key`; empty: requests that were never placed."""
    idle: bool
    """Time in which instances ran no request. Only for fleet users."""


class DonatedItem(Described):
    """Time that instances of a model spent in the spot pool."""

    model: str
    instance_hours: float
    gpu_hours: float
    cost_usd: float
    """At the on-demand price; part of the cost of opportunistic requests and idle time."""
    offered_usd: float | None
    """At the spot price, used or not; null where it is not known."""
    unpriced_hours: float
    """Instance-hours of GPU types without a spot price."""


class UsageAnswer(Described):
    since: datetime
    until: datetime
    time_zone: str
    """Of the days: that of the one tenant that is reported, else that of all pages."""
    counted_until: datetime | None
    """Requests that ended later are not counted yet."""
    items: list[UsageItem]
    donated: list[DonatedItem] | None
    """What was donated to the spot pool, by model. Only for fleet users, of all tenants, keys and classes; else null."""
    truncated: bool
    """More rows exist than `limit`: use coarser groups, a shorter range or CSV."""


class UsageFilter(Schema):
    since: Instant | None = Field(None, description="By default six days before today.")
    until: Instant | None = None
    group_by: list[Group] = Field(DEFAULT_GROUPS, description="Repeat it for several.")
    tenant: str = ""
    key: str = Field("", description="The first characters of the API key, as lists show them.")
    model: str = ""
    slo_class: str = ""
    format: Literal["json", "csv", "focus"] | None = Field(
        None, description="`Accept: text/csv` asks for CSV too; `focus` is CSV in the columns of FOCUS 1.0, by day."
    )
    limit: int = Field(5_000, ge=1, le=20_000)


@router.get("/v1/usage", response=UsageAnswer)
def sum_usage(request: ApiRequest, query: Query[UsageFilter]) -> dict[str, Any] | HttpResponseBase:
    """Return requests, tokens, GPU-seconds and dollars by day, tenant, key, model and SLO class (`group_by`).

    Tenant users and keys get their own. Fleet users get all, including idle time, so that costs add up to the fleet's; with
    `tenant` that tenant's. Sums are of quarters of an hour: `since` and `until` are truncated to one, `until` is
    exclusive. Rows outlive the request ledger.
    """
    asked = _asked(request.auth, query)
    if query.format == "focus":
        return table(focus.COLUMNS, focus.rows(asked)).csv("focus")
    if query.format == "csv" or (query.format is None and CSV in request.headers.get("Accept", "")):
        more = {"key": "key_name", "day": "time_zone"}
        shown = {*query.group_by, "idle", *(name for group, name in more.items() if group in query.group_by)}
        columns = [name for name in NAMES if name in shown] + list(SUMS)
        rows = ([_cell(name, row[name]) for name in columns] for row in _items(asked, query.group_by, ROW_LIMIT))
        return csv_response("usage", columns, rows)
    items = list(_items(asked, query.group_by, query.limit + 1))
    whole = request.auth.sees_fleet and not (query.tenant or query.key or query.slo_class)
    return {
        "since": asked.since,
        "until": asked.until,
        "time_zone": str(asked.zone),
        "counted_until": counted_until(),
        "items": items[: query.limit],
        "donated": spot.donated_time(asked.since, min(asked.until, timezone.now()), query.model) if whole else None,
        "truncated": len(items) > query.limit,
    }


def _cell(name: str, value: Any) -> Any:
    """Return *value* for a file, dollars so that lines add up to the cent."""
    return f"{value:.6f}" if name.endswith("_usd") else value


def _items(asked: UsageScope, groups: list[Group], limit: int) -> Iterator[dict[str, Any]]:
    by = [group for group in get_args(Group) if group in groups]
    for row in map(summed, usage(asked, by)[:limit].iterator(chunk_size=2_000)):
        day: datetime | None = row.get("day")
        named = {
            "day": day.date() if day else None,
            "hour": row["hour"].astimezone(UTC) if "hour" in row else None,
            "time_zone": str(asked.zone) if day else None,
            "tenant": row.get("tenant_name"),
            "key": row.get("key_prefix"),
            "slo_class": row.get("slo_class") or None,
        }
        yield dict.fromkeys(NAMES) | row | named


def _asked(caller: Caller, query: UsageFilter) -> UsageScope:
    now = timezone.now()
    tenants = None if caller.sees_fleet else caller.tenants()
    seen = Tenant.objects.all() if tenants is None else tenants
    if query.tenant and not seen.filter(name=query.tenant).exists():
        raise ApiError(403, "forbidden", "You do not see such a tenant.", "tenant")
    names = {
        "tenant__name": query.tenant,
        "api_key__prefix": query.key,
        "model": query.model,
        "slo_class": query.slo_class,
    }
    if "instance" in query.group_by and (tenants is not None or query.tenant or query.key):
        words = "Instances serve all tenants: group by instance without tenant and key, as a user of the fleet."
        raise ApiError(422, "invalid", words, "group_by")
    zone = zone_of(tenants, query.tenant)
    today = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
    until = _quarter(query.until or now + timedelta(hours=1))
    since = _quarter(query.since or today - timedelta(days=DEFAULT_DAYS - 1))
    if since >= until:
        words = "The range is empty: the quarter of an hour of since is not before that of until."
        raise ApiError(422, "invalid", words, "since")
    if "instance" in query.group_by:
        names = {"model": query.model, "slo_class": query.slo_class}
    return UsageScope(since, until, tenants, names, zone)


def _quarter(moment: datetime) -> datetime:
    moment = moment.astimezone(UTC)
    return moment.replace(minute=moment.minute // 15 * 15, second=0, microsecond=0)


PriceOut = schema_of(PRICES, "PriceOut")
prices = Router(auth=VIEWERS, tags=["Records"])
add_list(prices, PRICES, PriceOut, "Prices of GPU types, SLO classes and batch lines, each from a moment on.")


class PriceIn(Strict):
    of: Literal["gpu", "spot", "slo_class"]
    name: str
    """Of the GPU type or SLO class."""
    amount: FiniteFloat | None
    """USD an hour of a GPU, or the factor of a class; null takes a spot price away."""
    from_at: Instant | None = None
    """By default now; a past moment is a whole quarter of an hour."""
    reason: str = Field(..., min_length=1, max_length=255)


class RepricedOut(Described):
    id: int
    until: datetime | None
    """When the next entry begins; null: never."""
    hours: int
    """Hours of usage that were repriced."""
    months: list[str]
    """Their months (UTC)."""
    cost_usd: tuple[float, float]
    """Of the repriced rows, before and after."""
    charged_usd: tuple[float, float]


@prices.post("/prices", response={201: RepricedOut})
def add_price(request: ApiRequest, body: PriceIn) -> Status[dict[str, Any]]:
    """Set a price from a moment on, also a past one, until the next entry of the item begins; usage counted since then is
    repriced, and the answer names its months. Needs the role admin.
    """
    user = request.auth.require(Role.ADMIN)
    repriced = set_price(Price(**body.model_dump()), user)
    return Status(201, asdict(repriced) | {"id": repriced.price.pk})
