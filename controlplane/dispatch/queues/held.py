"""Held work as published: by model with age, slack and the last release."""

import math
import time
from typing import Final

from controlplane.dispatch.holding import HeldRequests
from controlplane.dispatch.wire import Row, Table, columns
from scheduling.queueing.held_work import LOOK_S, Release, Signal
from scheduling.queueing.release_rule import USE

EVERY_S: Final = 1.0


class HeldView:
    """Published held work, read again once a second."""

    def __init__(self, holding: HeldRequests) -> None:
        self.holding = holding
        self._table: Table = {}
        self._read_s = -math.inf

    def __call__(self) -> Table:
        now_s = self.holding.fleet.now_s
        if now_s - self._read_s >= EVERY_S:
            self.holding.read_signals()
            self._table = columns(self._models(now_s))
            self._read_s = now_s
        return self._table

    def _models(self, now_s: float) -> list[Row]:
        work, rows = self.holding.work, []
        last = {one.model: (at_s, one) for at_s, one in self.holding.control.released}
        for model in sorted({endpoint.model for endpoint in self.holding.fleet.endpoints}):
            held, announced = work.all_of(model), work.expected(model)
            if not held and not announced:
                continue
            oldest_s = max((now_s - one.arrived_s for one in held), default=0.0)
            start_s = min((one.start_by_s for one in held), default=math.inf)
            first = next(iter(work.first(model, 1)), None)
            next_s = work.wait_s(first, 1, now_s)[0] if first is not None else None
            if any(self._pulls(one, now_s) for one in self.holding.control.signals if one.model == model):
                next_s = LOOK_S if first is not None and work.rule(model).by == USE else next_s
            rows.append(
                {
                    "model": model,
                    "count": len(held),
                    "announced": announced,
                    "opportunistic": sum(one.opportunistic for one in held),
                    "oldest_s": round(oldest_s, 1),
                    "due_s": _finite(
                        min((one.due_s for one in held if not one.opportunistic), default=math.inf) - now_s
                    ),
                    "last": _release(now_s, *last[model]) if model in last else None,
                    "slack_s": None if math.isinf(start_s) else round(start_s - now_s, 1),
                    "next_s": None if next_s is None else round(next_s, 1),
                    "reason": self.holding.reason(model) if held else "",
                }
            )
        return rows

    def _pulls(self, signal: Signal, now_s: float) -> bool:
        """Return whether an endpoint has room for held work now."""
        work = self.holding.work
        return signal.use < work.rule(signal.model).one_below and not work.quiet_s(signal.model, signal.region, now_s)


def _release(now_s: float, at_s: float, one: Release) -> Row:
    at = round(time.time() - (now_s - at_s), 3)
    return {"at": at, "region": one.region, "why": one.why, "use_ratio": _finite(one.use)}


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else round(value, 4)
