"""Kills parts with SIGKILL, alone and in pairs, and waits until each works again."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
from celery import Celery

from tests.bench._soak.ray import Ray
from tests.bench._soak.stack import CHILD, Stack

STEPS = (  # each alone, with pairs in between; no part twice in short succession
    ("celery",),
    ("redis",),
    ("web",),
    (CHILD,),
    ("emulator",),
    ("beat",),
    ("traffic",),
    ("redis", "celery"),
    ("web", "emulator"),
    ("beat", CHILD),
    ("redis", "web"),
    ("celery", "emulator"),
)
RELAYED = (  # with relays: nothing of these takes an instance away
    ("relay",),
    ("owner",),
    ("redis",),
    ("celery",),
    ("postgres",),
    ("frozen owner",),
)
OWNER, FROZEN, POSTGRES = "owner", "frozen owner", "postgres"
RAYLET, HEAD = "raylet", "Ray head"
OF_RAY = ((RAYLET,), (HEAD,))
FROZEN_S = 20.0
BACK_WITHIN_S = 120.0
HOLDS = "SELECT token FROM fleet_owner WHERE role = 'shard 1' AND token <> ''"
POOL = 3  # processes of the worker


@dataclass(slots=True)
class Kill:
    """One part, killed at *at* and working again at *back_at* (epoch seconds; None: not in time)."""

    part: str
    at: float
    back_at: float | None = None
    process: str = ""

    def covers(self, begin: float, end: float, after_s: float = 0.0) -> bool:
        """Whether any of *begin* to *end* falls between the kill and *after_s* past the recovery."""
        until = float("inf") if self.back_at is None else self.back_at + after_s
        return begin <= until and end >= self.at - 0.1


async def instances(stack: Stack, session: aiohttp.ClientSession) -> list[tuple[str, str, str, str]]:
    """Return (name, model, region, state) of every instance."""
    async with session.get(f"{stack.url}/api/summary", timeout=aiohttp.ClientTimeout(total=3)) as response:
        table = (await response.json())["instances"]
    return list(zip(*(table[column] for column in ("name", "model", "region", "state")), strict=True))


@dataclass(slots=True)
class Killer:
    """Repeats its steps forever; `kills` is its record."""

    stack: Stack
    session: aiohttp.ClientSession  # of a signed-in operator
    pause_s: float
    steps: tuple[tuple[str, ...], ...] = STEPS
    restart_database: Callable[[], None] | None = None
    ray: Ray | None = None
    kills: list[Kill] = field(default_factory=list)
    calm: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Nothing is killed while another holds it."""
    spares: str = ""
    """A part that is killed no longer."""

    async def run(self, until_s: float, stop: asyncio.Event) -> None:
        """Kill until monotonic time *until_s*; pause *pause_s* after each recovery."""
        number = 0
        while time.monotonic() < until_s and not stop.is_set():
            step = self.steps[number % len(self.steps)]
            number += 1
            if self.spares in step or (self.restart_database is None and POSTGRES in step):
                continue
            async with self.calm:
                await asyncio.gather(*map(self.kill, step))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self.pause_s)

    async def kill(self, part: str) -> None:
        """Kill *part* and wait for its return."""
        if part == POSTGRES:
            return await self._restart_database()
        if part == FROZEN:
            return await self._freeze()
        if part in (RAYLET, HEAD):
            return await self._kill_of_ray(part)
        of = "dispatcher" if part == OWNER else part
        pids = await asyncio.to_thread(self.stack.pids, of)
        victims = [await self._owner()] if part == OWNER else pids[:1]
        done = Kill(part, time.time(), process=", ".join(map(str, victims)))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self.kills.append(done)
        deadline_s = time.monotonic() + BACK_WITHIN_S
        while time.monotonic() < deadline_s and not self.stack.ended:
            await asyncio.sleep(0.5)
            now = await asyncio.to_thread(self.stack.pids, of)
            replaced = len(now) >= max(1, len(pids)) and not set(now) & set(victims)
            if replaced and await self._works(of):
                done.back_at = time.time()
                return

    async def _owner(self) -> int:
        """Return the process id of the owner of the first shard."""
        (row,) = await asyncio.to_thread(self.stack.rows, HOLDS)
        return int(row["token"].split()[2])

    async def _freeze(self) -> None:
        pid = await self._owner()
        done = Kill(FROZEN, time.time(), process=str(pid))
        os.kill(pid, signal.SIGSTOP)
        self.kills.append(done)
        try:
            await asyncio.sleep(FROZEN_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        await self._until_ready(done)

    async def _restart_database(self) -> None:
        assert self.restart_database is not None
        done = Kill(POSTGRES, time.time())
        self.kills.append(done)
        await asyncio.to_thread(self.restart_database)
        await self._until_ready(done)

    async def _kill_of_ray(self, part: str) -> None:
        assert self.ray is not None
        done = Kill(part, time.time())
        self.kills.append(done)
        with contextlib.suppress(TimeoutError):
            await (self.ray.kill_machine() if part == RAYLET else self.ray.kill_head())
            done.back_at = time.time()

    async def _until_ready(self, done: Kill) -> None:
        deadline_s = time.monotonic() + BACK_WITHIN_S
        while time.monotonic() < deadline_s:
            if await self._works("web"):
                done.back_at = time.time()
                return
            await asyncio.sleep(0.5)

    async def _works(self, part: str) -> bool:
        checks: dict[str, Callable[[], Awaitable[bool]]] = {
            "web": self._web_works,
            "relay": self._web_works,
            "dispatcher": self._web_works,
            "redis": self._redis_works,
            "celery": self._celery_works,
            "emulator": self._fleet_works,
        }
        check = checks.get(part)
        try:
            return check is None or await check()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
            return False

    async def _ready(self) -> tuple[int, dict[str, str]]:
        async with self.session.get(f"{self.stack.url}/readyz", timeout=aiohttp.ClientTimeout(total=3)) as response:
            return response.status, (await response.json())["checks"]

    async def _web_works(self) -> bool:
        return (await self._ready())[0] == 200

    async def _redis_works(self) -> bool:
        return (await self._ready())[1]["redis"] == "ok"

    async def _celery_works(self) -> bool:
        return await asyncio.to_thread(self._ping)

    def _ping(self) -> bool:
        with Celery(broker=self.stack.redis_url) as app:
            try:
                return bool(app.control.ping(timeout=3.0))
            except Exception:  # anything that an absent broker raises
                return False

    async def _fleet_works(self) -> bool:
        """Whether every endpoint has a ready instance again, and none is failed."""
        wanted, ready = set(), set()
        for _, model, region, state in await instances(self.stack, self.session):
            wanted.add((model, region))
            if state == "ready":
                ready.add((model, region))
            elif state == "failed":
                return False
        return bool(wanted) and ready == wanted
