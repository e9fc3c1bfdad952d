"""Held work as published: by model with ages and slack, the last releases, and what each endpoint signals."""

import math
import time
from typing import Any, Final

from controlplane.dispatch.holding import Holding
from controlplane.dispatch.wire import HELD_COLUMNS, RELEASE_COLUMNS, SIGNAL_COLUMNS
from scheduling.queueing.held_work import LOOK_S, Release, Signal
from scheduling.queueing.release_rule import USE

EVERY_S: Final = 1.0
SHOWN_RELEASES: Final = 12
LAST: Final = ("at", "region", "why", "use_ratio")
"""Columns of a model's last release."""
AGES_H: Final = (("under_1h", 1), ("under_4h", 4), ("under_10h", 10), ("over_10h", math.inf))

Row = dict[str, Any]
Tables = dict[str, dict[str, list[Any]]]


class HeldView:
    """Published held work, read again once a second."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self._tables: Tables = {}
        self._read_s = -math.inf

    def __call__(self) -> Tables:
        """Return the columns of `models`, `releases` and `signals` (`dispatch.wire`)."""
        now_s = self.holding.clock()
        if now_s - self._read_s >= EVERY_S:
            self.holding.read_signals()
            rows = (self._models(now_s), HELD_COLUMNS), (self._together(now_s)[:SHOWN_RELEASES], RELEASE_COLUMNS)
            tables = (*rows, (self._signals(now_s), SIGNAL_COLUMNS))
            self._tables = {
                table: {name: [row[name] for row in listed] for name in names}
                for table, (listed, names) in zip(("models", "releases", "signals"), tables, strict=True)
            }
            self._read_s = now_s
        return self._tables

    def _models(self, now_s: float) -> list[Row]:
        work, rows = self.holding.work, []
        last = {row["model"]: row for row in reversed(self._together(now_s))}
        for model in sorted({endpoint.model for endpoint in self.holding.topology.endpoints}):
            held, announced = work.all_of(model), work.expected(model)
            if not held and not announced:
                continue
            ages_h = [(now_s - one.arrived_s) / 3600 for one in held]
            start_s = min((one.start_by_s for one in held), default=math.inf)
            first = next(iter(work.first(model, 1)), None)
            next_s = work.wait_s(first, 1, now_s)[0] if first is not None else None
            if any(self._gate(one, now_s) in ("one", "two") for one in self.holding.signals if one.model == model):
                next_s = LOOK_S if first is not None and work.rule(model).by == USE else next_s
            rows.append(
                {
                    "model": model,
                    "count": len(held),
                    "announced": announced,
                    "opportunistic": sum(one.opportunistic for one in held),
                    **_by_age(ages_h),
                    "oldest_s": round(3600 * max(ages_h, default=0.0), 1),
                    "due_s": _finite(
                        min((one.due_s for one in held if not one.opportunistic), default=math.inf) - now_s
                    ),
                    "last": {name: last[model][name] for name in LAST} if model in last else None,
                    "slack_s": None if math.isinf(start_s) else round(start_s - now_s, 1),
                    "next_s": None if next_s is None else round(next_s, 1),
                    "reason": self.holding.reason(model) if held else "",
                    "rule": work.rule(model).by,
                }
            )
        return rows

    def _together(self, now_s: float) -> list[Row]:
        """Return the last releases, newest first: those of one look, endpoint and reason in one row."""
        together: dict[tuple[float, str, str, str, int], list[Release]] = {}
        for at_s, one in self.holding.released:
            together.setdefault((at_s, one.model, one.region, one.why, one.priority), []).append(one)
        wall_s = time.time()
        return [
            {
                "at": round(wall_s - (now_s - at_s), 3),
                "model": model,
                "region": region,
                "count": len(releases),
                "why": why,
                "use_ratio": _finite(releases[0].use),
                "priority": priority,
                "held_s": round(max(one.held_s for one in releases), 1),
            }
            for (at_s, model, region, why, priority), releases in reversed(together.items())
        ]

    def _signals(self, now_s: float) -> list[Row]:
        work = self.holding.work
        return [
            {
                "model": one.model,
                "region": one.region,
                "use_ratio": _finite(one.use),
                "other_ratio": _finite(one.other_tokens / one.capacity_tokens) if one.capacity_tokens else None,
                "one_below": work.rule(one.model).one_below,
                "two_below": work.rule(one.model).two_below,
                "quiet_s": round(work.quiet_s(one.model, one.region, now_s), 1),
                "gate": self._gate(one, now_s),
            }
            for one in sorted(self.holding.signals, key=lambda each: (each.model, each.region))
        ]

    def _gate(self, signal: Signal, now_s: float) -> str:
        rule = self.holding.work.rule(signal.model)
        if math.isinf(signal.use):
            return "no_signal"
        if self.holding.work.quiet_s(signal.model, signal.region, now_s):
            return "cooldown"
        return "closed" if signal.use >= rule.one_below else "one" if signal.use >= rule.two_below else "two"


def _by_age(ages_h: list[float]) -> dict[str, int]:
    counts = dict.fromkeys((name for name, _ in AGES_H), 0)
    for age_h in ages_h:
        counts[next(name for name, below_h in AGES_H if age_h < below_h)] += 1
    return counts


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else round(value, 4)
