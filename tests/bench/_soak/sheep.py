"""A black sheep: one instance with one fault after another, while its siblings serve."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.bench._soak.killer import instances
from tests.bench._soak.mix import MODELS
from tests.bench._soak.stack import Stack

FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "errors", "ratio": 0.7, "for_s": 12.0},
    {"kind": "hang", "for_s": 6.0},  # if longer, streams under way are lost, as expected
    {"kind": "slow_metrics", "factor": 4.0, "for_s": 16.0},
    {"kind": "garbled", "ratio": 0.7, "for_s": 12.0},
)
PAUSE_S = 4.0


@dataclass(slots=True)
class BlackSheep:
    """`faults` is its record: time, instance, fault."""

    stack: Stack
    session: aiohttp.ClientSession
    faults: list[tuple[float, str, str]] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError, ValueError):
                if (name := await self._one()) is not None:
                    fault = FAULTS[number % len(FAULTS)]
                    url = f"http://127.0.0.1:{self.stack.emulator_port}/emulator/instances/{name}/fault"
                    async with self.session.post(url, json=fault) as response:
                        response.raise_for_status()
                    self.faults.append((time.time(), name, fault["kind"]))
                    number += 1
                    await asyncio.sleep(fault["for_s"])
            await asyncio.sleep(PAUSE_S)

    async def _one(self) -> str | None:
        """Return the same instance while it is ready, else the first that has a ready sibling."""
        ready = [row for row in await instances(self.stack, self.session) if row[3] == "ready"]
        siblings = [row[1:3] for row in ready]
        able = [row[0] for row in ready if row[1] in MODELS and siblings.count(row[1:3]) > 1]
        last = self.faults[-1][1] if self.faults else ""
        return last if last in able else next(iter(sorted(able)), None)
