"""Backends of units that are no LLM (Hermes section 3.4): a webhook asks their platform to warm and to cool them.

The platform owns containers and models, we own none; what is likely is decided by `scheduling.applications.prewarming`.
A backend is sent `warm` when runs in progress will probably need it, again for executions beyond those that it was sent for
and after its `keep_alive_s`, and `cool` once nothing has needed it for so long. After a restart no `cool` follows an earlier
`warm`: `keep_alive_s` is in every message, so that a receiver can cool by itself.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from channels.db import database_sync_to_async

from controlplane.applications.models import BackendKind, UnitBackend
from controlplane.background import spawn
from controlplane.dispatch.prewarming import LivePrewarming
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.webhooks import call, pause_s
from scheduling.applications.prewarming import LikelyCall

PERIOD_S: Final = 1.0
READ_EVERY: Final = 5
"""Ticks between two readings of the backends."""
WARM, COOL = "warm", "cool"


@dataclass(slots=True)
class Warmth:
    """What is known of one backend. *row* is as it was read last."""

    row: UnitBackend
    warm: bool = False
    """It was sent `warm`, and no `cool` since."""
    executions: int = 0
    """That it was warmed for and that have not begun."""
    warmed_s: float = -math.inf
    """When it was sent `warm` last,"""
    needed_s: float = -math.inf
    """and needed last: a unit was likely, or ran."""
    failures: int = 0
    """Of its webhook, in a row."""
    try_s: float = -math.inf
    """Not called before."""
    call: asyncio.Task[None] | None = None


class UnitWarming:
    """Sends platforms what *prewarming* decides while this process *owns* the queues; it ticks every `PERIOD_S`."""

    def __init__(self, prewarming: LivePrewarming, owns: Callable[[], bool] = lambda: True) -> None:
        self.prewarming, self.owns = prewarming, owns
        self.known: dict[str, Warmth] = {}
        self._ticks = 0
        prewarming.runs.began = self.use

    def stop(self) -> None:
        """Cancel the calls in progress."""
        for one in self.known.values():
            if one.call is not None:
                one.call.cancel()

    async def tick(self) -> None:
        """Send what is due; no answer is awaited. Raises database errors."""
        if self._ticks % READ_EVERY == 0:
            self.apply(await database_sync_to_async(_read)() if self.owns() else [])
        self._ticks += 1
        likely: dict[str, list[LikelyCall]] = {}
        for each in self.prewarming.control.due(*BackendKind.values) if self.known else ():
            likely.setdefault(str(each.target.name), []).append(each)
        now_s, in_use = self.prewarming.fleet.now_s, self.prewarming.runs.backends_in_use
        for name, one in self.known.items():
            calls = likely.get(name, [])
            if calls or name in in_use:
                one.needed_s = now_s
            if one.call is not None or now_s < one.try_s:
                continue
            executions = sum(each.calls for each in calls)
            if one.row.kind == BackendKind.DNN:
                executions = min(executions, 1)
            lapsed = now_s - one.warmed_s >= one.row.keep_alive_s
            if executions > one.executions or (executions and lapsed):
                self._send(one, WARM, executions, *self.prewarming.run_of(calls[0]))
            elif one.warm and now_s - one.needed_s >= one.row.keep_alive_s:
                self._send(one, COOL, 0)

    def apply(self, rows: list[UnitBackend]) -> None:
        """Know the backends of *rows*; one that is sent to another address begins cold."""
        known = {}
        for row in rows:
            one = self.known.get(row.name)
            known[row.name] = one if one is not None and one.row.url == row.url else Warmth(row)
            known[row.name].row = row
        self.known, self.prewarming.fleet.backends = known, known.keys()

    def use(self, backend: str) -> None:
        """Count that a unit began on *backend*, if that was warmed for it."""
        one = self.known.get(backend)
        if one is not None and one.executions:
            one.executions -= 1
            self.prewarming.counts[one.row.kind]["used"] += 1

    def _send(self, one: Warmth, event: str, executions: int, application: str = "", run: str = "") -> None:
        body = {
            "event": event,
            "backend": one.row.name,
            "application": application,
            "run": run,
            "executions": executions,
            "keep_alive_s": one.row.keep_alive_s,
        }
        one.call = spawn(self._call(one, body), "warm-unit")

    async def _call(self, one: Warmth, body: dict[str, Any]) -> None:
        row, event = one.row, body["event"]
        try:
            error = await call(row.url, body, row.secret)
            if error:
                one.failures += 1
                one.try_s = self.prewarming.fleet.now_s + pause_s(one.failures)
                if one.failures == 1:
                    await database_sync_to_async(_record)(row, event, error)
                return
            one.failures, one.warm = 0, event == WARM
            one.warmed_s = self.prewarming.fleet.now_s if event == WARM else -math.inf
            self.prewarming.counts[row.kind]["warmed"] += max(0, body["executions"] - one.executions)
            one.executions = body["executions"]
        finally:
            one.call = None


def _read() -> list[UnitBackend]:
    return list(UnitBackend.objects.filter(active=True))


def _record(row: UnitBackend, event: str, error: str) -> None:
    record(
        "backend.warm_failed",
        row,
        actor="prewarming",
        reason=f"Its webhook {error} (`{event}`). It is tried again with growing pauses; units are served without it.",
        severity=Severity.WARNING,
    )
