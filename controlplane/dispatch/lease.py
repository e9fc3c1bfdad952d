"""Lease in Redis, renewed every two seconds: one gateway process owns the regions at a time.

A process without it is on standby: it answers `/v1` with 503 and takes over when the lease expires. Without Redis there can
be no second process, so a gateway that cannot reach Redis acts as the owner; one that was the owner remains it.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from typing import cast

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from controlplane.background import spawn
from controlplane.jobs.record import Job

logger = logging.getLogger(__name__)
KEY = "pilothouse:lease:gateway"
LEASE_S = 6
RENEW_S = 2.0
# Extend or give back only what is still ours.
RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('expire', KEYS[1], ARGV[2]) end return 0"
RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


class Lease:
    def __init__(self, redis_url: str, job: Job) -> None:
        self.owner = f"{socket.gethostname()}:{os.getpid()}"
        self._value = f"{self.owner} {secrets.token_hex(8)}"  # two hosts may share a name
        self.held = True
        self.holder = self.owner
        self.job = job
        self._redis = aioredis.from_url(redis_url, socket_timeout=1.0, socket_connect_timeout=1.0)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        with self.job:
            await self._renew_or_take()
        self._task = spawn(self._run(), "lease")

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.eval(RELEASE, 1, KEY, self._value)
        await self._redis.aclose()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with self.job:
                await self._renew_or_take()

    async def _renew_or_take(self) -> None:
        """Renew the lease, or try to take it. Raises what Redis raises; the owner stays the same then."""
        if self.held and await self._redis.eval(RENEW, 1, KEY, self._value, LEASE_S):
            return
        taken = await self._redis.set(KEY, self._value, nx=True, ex=LEASE_S)
        holder = b"" if taken else cast(bytes | None, await self._redis.get(KEY)) or b""
        self.holder = self.owner if taken else holder.decode().partition(" ")[0]
        if bool(taken) != self.held:
            logger.warning("gateway: %s", "took the lease" if taken else f"standing by; {self.holder} owns the regions")
        self.held = bool(taken)
