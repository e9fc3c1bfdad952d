"""`/api`: current state of the fleet, periodic jobs and parts of the stack."""

import hashlib
from typing import Any

import orjson
import redis
from django.conf import settings
from django.http import HttpResponse
from ninja import Router

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError, ErrorBody
from controlplane.api.resources import schema_of
from controlplane.api.schemas import Described
from controlplane.dispatch.wire import SUMMARY_KEY
from controlplane.jobs import monitor
from controlplane.resources.jobs import JOBS, PARTS

router = Router(auth=VIEWERS)

REDIS_TIMEOUT_S = 0.5


JobOut, PartOut = schema_of(JOBS, "JobOut"), schema_of(PARTS, "PartOut")


class SystemOut(Described):
    jobs: list[JobOut]  # type: ignore[valid-type]
    parts: list[PartOut]  # type: ignore[valid-type]


@router.get("/system", response=SystemOut, tags=["Records"])
def get_system(request: ApiRequest) -> dict[str, Any]:
    """Return periodic jobs and parts of the stack, as seen by this web process. Requires the role operator."""
    request.auth.require(Role.OPERATOR)
    return monitor.report()


@router.get("/summary", response={200: dict, 304: None, 503: ErrorBody}, tags=["Live"])
def get_summary(request: ApiRequest) -> HttpResponse:
    """Return the gateway's newest live summary: fleet, models, endpoints and instances, columnar.

    304 if `If-None-Match` names the same summary, 503 while no gateway publishes one.
    """
    summary = read_published(SUMMARY_KEY)
    etag = f'"{hashlib.blake2b(summary, digest_size=12).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if etag in request.headers.get("If-None-Match", ""):
        return HttpResponse(status=304, headers=headers)
    return HttpResponse(summary, content_type="application/json", headers=headers)


def read_published(key: str) -> bytes:
    """Return what a gateway last published under *key*. Raises ApiError if there is nothing, or Redis does not answer."""
    try:
        with redis.Redis.from_url(
            settings.REDIS_URL, socket_connect_timeout=REDIS_TIMEOUT_S, socket_timeout=REDIS_TIMEOUT_S
        ) as client:
            published: bytes | None = client.get(key)
    except (redis.RedisError, OSError):
        published = None
    if published is None:
        raise ApiError(503, "no_summary", "No gateway has published a summary in the last seconds.")
    return published


def live_endpoints() -> list[dict[str, Any]]:
    """Return the endpoints of the newest summary; none while no gateway publishes one."""
    try:
        return summary_rows(orjson.loads(read_published(SUMMARY_KEY)), "endpoints")
    except ApiError:
        return []


def summary_rows(summary: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Return the rows of the columnar table at *names* in *summary*; none where it has no such table."""
    table = summary
    for name in names:
        table = table.get(name) or {}
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
