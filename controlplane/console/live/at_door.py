"""Promises at the door as Queues and Models show them: what became of requests whose promise was unreachable."""

from collections.abc import Iterable
from typing import Any, Final

from controlplane.console.live.state import LiveState
from controlplane.fleet.models import SloClass
from scheduling.queueing.promises import ADMIT

DECISIONS: Final = ("late", "degraded", "refused")
Row = dict[str, Any]


def panel(state: LiveState, *, model: str = "", region: str = "") -> Row:
    """Return the context of `console/parts/at_door.html`: counts by class, of all models and regions or of those given.

    No rows where every class simply admits, and no counts while nothing is published.
    """
    classes = list(SloClass.objects.select_related("degrades_to"))
    if all(row.if_unreachable == ADMIT for row in classes):
        return {"at_door": []}
    counted = [row for row in state.tables["at_door"] if model in ("", row["model"]) and region in ("", row["region"])]
    rows = [_row(one, counted, known=state.known) for one in classes]
    return {"at_door": [row for row in rows if row["policy"] or any(row[name] for name in DECISIONS)]}


def _row(of: SloClass, counted: Iterable[Row], *, known: bool) -> Row:
    mine = [row for row in counted if row["slo_class"] == of.name]
    counts = {name: sum(row[name] or 0 for row in mine) if known else None for name in DECISIONS}
    to = f" to {of.degrades_to.title}" if of.degrades_to else ""
    policy = "" if of.if_unreachable == ADMIT else f"{of.get_if_unreachable_display()}"
    return {"title": of.title, "policy": policy.replace(" to another class", to), **counts}
