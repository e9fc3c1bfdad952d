"""Held work as the Queues page shows it: by model, with what released the last of it."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from django.utils import timezone

from controlplane.console.formats import percent
from scheduling.queueing import held_work

Row = Mapping[str, Any]
WHY: Final = {
    held_work.USED: "use was below the mark",
    held_work.TROUGH: "there was room below the mark",
    held_work.PACE: "the deadlines of what is held need this pace",
    held_work.DUE: "it had to start for its deadline",
    held_work.OFF: "nothing is held any longer",
}
"""Reason of a release in words."""


def panel(rows: list[dict[str, Any]], titles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return *rows* of the table `held` for `console/queues/held_table.html`; *titles* are those of regions, by name."""
    return [row | {"last": _last(row["last"], titles)} for row in rows]


def _last(last: Row | None, titles: Mapping[str, str]) -> str:
    """Return when, where and why a request was released last; empty while that is not known."""
    if last is None:
        return ""
    at = timezone.localtime(datetime.fromtimestamp(last["at"], UTC))
    return f"{at:%H:%M:%S}, {titles.get(last['region'], last['region'])}: {reason(last['why'], last['use_ratio'])}"


def reason(why: str, use_ratio: float | None) -> str:
    return WHY.get(why, why) + ("" if use_ratio is None else f", at {percent(use_ratio)} use")
