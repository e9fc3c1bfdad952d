"""Monitors during the soak: memory of every process, stale jobs, and the console as an operator uses it."""

import asyncio
import contextlib
import json
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import aiohttp

from tests.bench._soak.stack import Stack

SAMPLE_S = 5.0
WARM_S = 60.0  # warm-up of a process, before its memory counts
LEAST_WATCHED_S = 120.0
PAGES = (
    "/", "/fleet/", "/timeline/", "/requests/", "/models/", "/scaling/", "/scaling/calendar/", "/keys/", "/events/",
    "/?charts=ttft,kv", "/api/instances", "/api/requests", "/api/scaling/plans",
    "/api/scaling/policies", "/api/scaling/moves", "/api/events", "/api/summary", "/api/lengths",
    "/api/deployments", "/readyz", "/metrics", "/v1/models",
)  # fmt: skip
MAY_REFUSE = {"/readyz": 503, "/api/summary": 503, "/v1/models": 401}


@dataclass(slots=True)
class Memory:
    """Sampled resident bytes of each process."""

    samples: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))

    async def run(self, stack: Stack, stop: asyncio.Event) -> None:
        while not await _stops_within(stop, SAMPLE_S):
            for part, sizes in (await asyncio.to_thread(stack.by_part)).items():
                for pid, size in sizes.items():
                    self.samples[part, pid].append((time.monotonic(), size))

    def growth_mb_per_hour(self) -> dict[str, float]:
        """Return the memory growth of each part's longest-watched process; parts without a long-lived one are left
        out.

        Median of the last quarter of its samples against that of the first, after a minute to warm up.
        """
        steepest: dict[str, tuple[float, float]] = {}
        for (part, _), samples in self.samples.items():
            warm = [sample for sample in samples if sample[0] >= samples[0][0] + WARM_S]
            quarter = len(warm) // 4
            if not quarter or (watched_s := warm[-1][0] - warm[0][0]) < LEAST_WATCHED_S:
                continue
            early, late = (statistics.median(size for _, size in some) for some in (warm[:quarter], warm[-quarter:]))
            between_h = watched_s * 0.75 / 3600
            if watched_s > steepest.get(part, (0.0, 0.0))[0]:
                steepest[part] = watched_s, (late - early) / 2**20 / between_h
        return {part: growth for part, (_, growth) in steepest.items()}


@dataclass(slots=True)
class Operator:
    """Reads pages and the REST API in rotation and keeps a live connection; records every wrong answer."""

    stack: Stack
    session: aiohttp.ClientSession
    looked: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[float, str]] = field(default_factory=list)  # epoch seconds, event
    messages: int = 0
    stale: list[tuple[float, str]] = field(default_factory=list)  # epoch seconds, a job that was late or failing then
    jobs_known: bool = False
    longest_ms: dict[str, float] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event, every_s: float) -> None:
        listener = asyncio.create_task(self._listen(stop))
        while not stop.is_set():
            for page in PAGES:
                if await _stops_within(stop, every_s):
                    break
                await self._look(page)
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)

    async def _look(self, page: str) -> None:
        self.looked[page] += 1
        began_s = time.monotonic()
        try:
            async with self.session.get(self.stack.url + page) as response:
                text = await response.text()
                if response.status != 200 and response.status != MAY_REFUSE.get(page):
                    self.failed.append((time.time(), f"{page}: {response.status}"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.failed.append((time.time(), f"{page}: {type(error).__name__}"))
            return
        self.longest_ms[page] = max(self.longest_ms.get(page, 0.0), (time.monotonic() - began_s) * 1000)
        if page == "/readyz":
            self._take_jobs(json.loads(text))

    def _take_jobs(self, ready: dict[str, object]) -> None:
        """Count the unhealthy jobs of `/readyz`; older stacks report no jobs."""
        jobs = ready.get("jobs")
        if jobs is None:
            return
        self.jobs_known = True
        named = jobs.items() if isinstance(jobs, dict) else ((job["name"], job) for job in jobs)  # type: ignore[attr-defined]
        for name, job in named:
            state = job.get("state") if isinstance(job, dict) else job
            if state in ("late", "failing"):
                self.stale.append((time.time(), name))

    async def _listen(self, stop: asyncio.Event) -> None:
        """Keep a browser's live connection, reopened whenever it breaks."""
        url = f"{self.stack.url}/ws/live/?topics=overview,instances,events"
        while not stop.is_set():
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self.session.ws_connect(url, origin=self.stack.url) as socket:
                    async for _ in socket:
                        self.messages += 1
            await _stops_within(stop, 1.0)


async def _stops_within(stop: asyncio.Event, wait_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), wait_s)
        return True
    return False
