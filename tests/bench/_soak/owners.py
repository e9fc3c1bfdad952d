"""Owners of the first shard as the database's rows say, looked at many times a second."""

import asyncio
import time
from dataclasses import dataclass, field

from tests.bench._soak.stack import Stack

LOOKS_S = 0.05
OWNER = "SELECT name, token, epoch FROM fleet_owner WHERE role = 'shard 1'"


@dataclass(slots=True)
class Owners:
    """`changes`: (epoch seconds, epoch, name) of each owner that was seen."""

    changes: list[tuple[float, int, str]] = field(default_factory=list)

    async def run(self, stack: Stack, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for row in await asyncio.to_thread(stack.rows_or_none, OWNER):
                now = (row["epoch"], row["name"])
                if row["token"] and (not self.changes or self.changes[-1][1:] != now):
                    self.changes.append((time.time(), *now))
            await asyncio.sleep(LOOKS_S)

    def faults(self) -> list[str]:
        """Return what would be two owners: an epoch of two, or one that does not grow."""
        found = []
        for (_, before, first), (_, after, second) in zip(self.changes, self.changes[1:], strict=False):
            if after <= before:
                found.append(f"{first} with epoch {before}, then {second} with {after}")
        return found

    def takeover_s(self, at: float, until: float) -> float | None:
        """Return the time from *at* to the next owner, if there is one before *until*."""
        return next((change[0] - at for change in self.changes if at < change[0] < until), None)
