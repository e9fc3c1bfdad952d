"""Live load for strategies: the gateway's published endpoint figures, joined with rows."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson
import redis
from django.conf import settings

from controlplane.dispatch.wire import STRATEGIST_KEY, VIEWS_KEY
from controlplane.fleet import places
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance
from controlplane.fleet.spot.selectors import redeployable
from controlplane.planning.execution import contested
from controlplane.tuning.selectors import tuned

if TYPE_CHECKING:
    from scheduling.scaling import EndpointView

logger = logging.getLogger(__name__)
FRESH_S = 5.0
"""Maximum age of published figures, in seconds."""
SETTLED_S = 60.0
"""Gateway uptime before its figures are used: the window over which it measures rates."""
TIMEOUT_S = 1.0
UNKNOWN = {"use": math.inf, "peak_kv_sum": math.nan, "peak_kv_most": math.nan}
"""Replacements for null by name: JSON has neither infinity nor NaN."""


@dataclass(frozen=True, slots=True)
class Load:
    """Latest gateway figures: endpoints by (model, region), running requests and tokens left by instance."""

    endpoints: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    running: Mapping[str, int] = field(default_factory=dict)
    left_tokens: Mapping[str, int] = field(default_factory=dict)


def read() -> Load | None:
    """Return the load published in the last seconds; None without any, or if Redis does not answer.

    Also None just after the gateway started, when low load does not mean low demand.
    """
    published = _published()
    if published is None or published["up_s"] < SETTLED_S:
        return None
    endpoints = {(row["model"], row["region"]): row for row in published["endpoints"]}
    return Load(endpoints, published["running"], published["left_tokens"])


@dataclass(frozen=True, slots=True)
class Waiting:
    """Work of one model that waits, in all regions: held by the queue manager or announced to it, and queued."""

    requests: int
    """Held or queued; announced batch lines are not counted."""
    tokens: float
    """Prompt and expected output of held and announced work, without opportunistic work."""
    tokens_per_s: float
    """The least constant rate that serves these by their deadlines."""
    queued_tokens: float = 0.0
    """Of released and interactive work that waits for an instance."""

    def due(self, share: float) -> list[tuple[float, float]]:
        """Return *share* of the held work as (deadline after now in s, tokens) that needs the same rate."""
        return [(self.tokens / self.tokens_per_s, share * self.tokens)] if self.tokens_per_s else []


def waiting() -> Mapping[str, Waiting]:
    """Return what waits by model; empty without a recent summary."""
    published = _published()
    return {model: Waiting(*row) for model, row in published.get("waiting", {}).items()} if published else {}


def running() -> Mapping[str, int]:
    """Return unfinished requests by instance; empty without a recent summary."""
    published = _published()
    return published["running"] if published else {}


def outcomes() -> Mapping[str, tuple[int, int]] | None:
    """Return (answered, failed) requests by instance since its server became ready, or since the gateway started.

    None without a recent summary.
    """
    published = _published()
    return (
        {name: (answered, failed) for name, (answered, failed) in published["outcomes"].items()} if published else None
    )


def _published() -> dict[str, Any] | None:
    """Return the gateway's recent summary."""
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


def send_heartbeat(models: Iterable[str], for_s: float) -> None:
    """Publish a heartbeat for the strategies of *models*, valid for *for_s* seconds."""
    try:
        with _redis() as client:
            client.set(STRATEGIST_KEY, orjson.dumps(sorted(models)), px=max(1, int(1000 * for_s)))
    except (redis.RedisError, OSError) as error:
        logger.warning("planning: cannot publish that strategies are alive: %s", error)


def views(model: str, load: Load, now: datetime) -> list["EndpointView"]:
    """Return the endpoints of *model* in the gateway's summary, by region: counts and bounds from rows, load from *load*."""
    from controlplane.fleet.lifecycle.stages import stage_of
    from scheduling.scaling.owner import UNCHANGED
    from scheduling.scaling.view import Load as EndpointLoad
    from scheduling.scaling.view import count_of_one, endpoint_view

    rows = Deployment.objects.filter(model__name=model, active=True, region__active=True).select_related(
        "region", "model"
    )
    allowed = places.bounds(rows)
    bounds: dict[str, tuple[int, int]] = {}
    for row in rows:
        least, most = bounds.get(row.region.name, (0, 0))
        bounds[row.region.name] = least + allowed[row.pk][0], most + allowed[row.pk][1]
    states: dict[str, list[tuple[float, str]]] = {region: [] for region in bounds}
    instances = Instance.objects.filter(deployment__model__name=model, deployment__active=True)
    instances = instances.exclude(state=InstanceState.SLEEPING, swap_group__isnull=False)  # scaling cannot wake them
    instances = instances.exclude(pk__in=Instance.objects.cancelled().values("pk"))
    for region, state, changed_at in instances.order_by("state_changed_at").values_list(
        "deployment__region__name", "state", "state_changed_at"
    ):
        states.get(region, []).append((changed_at.timestamp(), state))
    others: Counter[str] = Counter()
    if tuned(model).SPOT_REDEPLOY and Instance.objects.filter(state=InstanceState.DONATED).exists():
        for row in rows:
            others[row.region.name] += redeployable(row).count()
    changes = contested.last_changes(model, now=now)
    now_s, endpoint_views = now.timestamp(), []
    for region in sorted(bounds):
        seen = load.endpoints.get((model, region))
        if seen is None:
            continue
        # Ready in its row but not yet in the gateway's earlier summary: the newest instances.
        ready = [state for _, state in states[region]].count(InstanceState.READY)
        unseen = max(0, ready - seen["ready"])
        stages = []
        for since_s, state in reversed(states[region]):
            unseen -= state == InstanceState.READY
            stages.append(stage_of(state, now_s - since_s, takes_work=unseen < 0))
        last = changes.get(region, UNCHANGED)
        figures: dict[str, Any] = {
            name: UNKNOWN.get(name) if seen[name] is None else seen[name] for name in EndpointLoad._fields
        }
        endpoint_views.append(
            endpoint_view(
                model,
                region,
                count_of_one(stages, [since_s for since_s, _ in reversed(states[region])]),
                bounds[region],
                EndpointLoad(**figures),
                now_s,
                now_s - last.age_s if last.by else -math.inf,
                spot_other=others[region],
                short_instances=seen["short_instances"],
                last=last,
            )
        )
    return endpoint_views


def _redis() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL, socket_connect_timeout=TIMEOUT_S, socket_timeout=TIMEOUT_S)
