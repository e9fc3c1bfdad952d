"""Live load as strategies see it: what the gateway publishes of every endpoint, joined with its rows."""

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson
import redis
from django.conf import settings
from django.db.models import Max, Sum

from controlplane.dispatch.wire import DEMAND_S, STRATEGIST_KEY, VIEWS_KEY
from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from controlplane.fleet.models import Deployment, Instance
from controlplane.planning.models import ScalingMove

if TYPE_CHECKING:
    from scheduling.scaling import EndpointView

logger = logging.getLogger(__name__)
FRESH_S = 5.0
"""Older views say nothing of now."""
SETTLED_S = float(DEMAND_S)
"""How long a gateway serves before its figures are believed: as long as the window over which it takes rates."""
TIMEOUT_S = 1.0
LOAD = (
    "use",
    "waiting",
    "kv_use",
    "tokens_per_s",
    "overloaded_instances",
    "peak_kv_sum",
    "peak_kv_most",
    "since_ready_s",
)
UNKNOWN = {"use": math.inf, "since_ready_s": math.inf, "peak_kv_sum": math.nan, "peak_kv_most": math.nan}
"""Values of null, by name: JSON has neither infinity nor NaN."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the gateway saw last: endpoints by (model, region), requests that run by instance."""

    endpoints: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    running: Mapping[str, int] = field(default_factory=dict)


def read() -> Load | None:
    """The load that the gateway published in the last seconds; None if none did or Redis does not answer.

    None too just after the gateway started: low load then does not mean low demand.
    """
    published = _published()
    if published is None or published["up_s"] < SETTLED_S:
        return None
    return Load({(row["model"], row["region"]): row for row in published["endpoints"]}, published["running"])


def running() -> Mapping[str, int]:
    """Requests by instance that the gateway has given it and not yet answered whole; empty without a recent summary."""
    published = _published()
    return published["running"] if published else {}


def _published() -> dict[str, Any] | None:
    """What the gateway published in the last seconds."""
    try:
        with _redis() as client:
            text = client.get(VIEWS_KEY)
    except (redis.RedisError, OSError) as error:
        logger.warning("planning: no live load, Redis does not answer: %s", error)
        return None
    if text is None:
        return None
    published = orjson.loads(text)
    return published if time.time() - published["ts"] <= FRESH_S else None


def say_alive(models: Iterable[str], for_s: float) -> None:
    """Publish to the gateway that the strategies of *models* look after them, for the next *for_s* seconds."""
    try:
        with _redis() as client:
            client.set(STRATEGIST_KEY, orjson.dumps(sorted(models)), px=max(1, int(1000 * for_s)))
    except (redis.RedisError, OSError) as error:
        logger.warning("planning: cannot publish that strategies are alive: %s", error)


def views(model: str, load: Load, now: datetime) -> list["EndpointView"]:
    """The endpoints of *model* in the gateway's summary, by region: counts and bounds from rows, load from *load*."""
    from scheduling.scaling import EndpointView

    bounds = {
        region: (least, most)
        for region, least, most in Deployment.objects.filter(model__name=model, active=True, region__active=True)
        .order_by()
        .values_list("region__name")
        .annotate(Sum("min_instances"), Sum("max_instances"))
    }
    states: dict[str, list[str]] = {region: [] for region in bounds}
    rows = Instance.objects.filter(deployment__model__name=model, deployment__active=True)
    for region, state in rows.values_list("deployment__region__name", "state"):
        states.get(region, []).append(state)
    changed = dict(ScalingMove.objects.filter(model=model).order_by().values_list("region").annotate(Max("at")))
    endpoint_views = []
    for region in sorted(bounds):
        seen = load.endpoints.get((model, region))
        if seen is None:
            continue
        count = states[region].count
        present = sum(count(state) for state in PRESENT)
        # One that is ready by its row and not yet by the gateway is on its way: the two are read at different moments.
        ready = min(seen["ready"], present)
        last = changed.get(region)
        figures: dict[str, Any] = {name: UNKNOWN.get(name) if seen[name] is None else seen[name] for name in LOAD}
        endpoint_views.append(
            EndpointView(
                model=model,
                region=region,
                ready=ready,
                coming=present - ready,
                draining=count(InstanceState.DRAINING),
                spot=count(InstanceState.SLEEPING),
                spot_other=0,
                min_instances=bounds[region][0],
                max_instances=bounds[region][1],
                since_change_s=(now - last).total_seconds() if last else math.inf,
                **figures,
            )
        )
    return endpoint_views


def _redis() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL, socket_connect_timeout=TIMEOUT_S, socket_timeout=TIMEOUT_S)
