"""Work that waits in the gateway, and what became of requests, from its published summary."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import redis
from django.conf import settings

from controlplane.dispatch.wire import SUMMARY_KEY

logger = logging.getLogger(__name__)
TIMEOUT_S = 1.0


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


def read() -> Mapping[str, Waiting]:
    """Return what waits by model; empty without a recent summary."""
    return {model: Waiting(**row) for model, row in (_section("work") or {}).items()}


def outcomes() -> Mapping[str, tuple[int, int]] | None:
    """Return (answered, failed) requests by instance since its server became ready, or since the gateway started.

    None without a recent summary.
    """
    published = _section("outcomes")
    return None if published is None else {name: (answered, failed) for name, (answered, failed) in published.items()}


def _section(name: str) -> dict[str, Any] | None:
    """Return a section of the summary, which expires by itself; None without one."""
    try:
        with redis.Redis.from_url(
            settings.REDIS_URL, socket_connect_timeout=TIMEOUT_S, socket_timeout=TIMEOUT_S
        ) as client:
            text = client.get(SUMMARY_KEY)
    except (redis.RedisError, OSError) as error:
        logger.warning("planning: the gateway's %s is unknown, Redis does not answer: %s", name, error)
        return None
    section: dict[str, Any] | None = orjson.loads(text or b"{}").get(name)
    return section
