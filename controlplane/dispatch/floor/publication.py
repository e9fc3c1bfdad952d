"""What the floor publishes in Redis for the strategies in the workers, and what it reads there: which of them are alive."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping

import orjson
import redis.asyncio as aioredis
from redis.exceptions import RedisError

from controlplane.dispatch.wire import STRATEGIST_KEY, VIEWS_EXPIRE_S, VIEWS_KEY, as_published
from scheduling.scaling import EndpointView

logger = logging.getLogger(__name__)


class Publication:
    """One exchange with Redis at a time, on the event loop and waited for by nobody."""

    def __init__(self, redis_url: str) -> None:
        self.strategists: frozenset[str] = frozenset()  # models whose strategy is alive
        self._redis = aioredis.from_url(redis_url, socket_timeout=1.0, socket_connect_timeout=1.0)
        self._publishing: asyncio.Task[None] | None = None

    def publish(
        self, views: Iterable[EndpointView], running: Mapping[str, int], left_tokens: Mapping[str, int], up_s: float
    ) -> None:
        """Publish *views*, requests *running* and *left_tokens* by instance, and for how long the gateway is up."""
        if self._publishing is not None and not self._publishing.done():
            return  # Redis is slow: the next time there are newer ones
        message = orjson.dumps(
            {
                "ts": time.time(),
                "up_s": up_s,
                "endpoints": [as_published(view) for view in views],
                "running": running,
                "left_tokens": left_tokens,
            }
        )
        self._publishing = asyncio.create_task(self._exchange(message), name="floor publishes")

    async def stop(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        await self._redis.aclose()

    async def _exchange(self, message: bytes) -> None:
        """Publish the views and read who is alive. Without Redis none is: workers have no broker then."""
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.set(VIEWS_KEY, message, ex=VIEWS_EXPIRE_S)
                pipe.get(STRATEGIST_KEY)
                _, alive = await pipe.execute()
            self.strategists = frozenset(orjson.loads(alive or b"[]"))
        except (RedisError, OSError, ValueError) as error:
            if self.strategists:
                logger.warning("floor: Redis does not answer, so the floor scales alone: %s", error)
            self.strategists = frozenset()
