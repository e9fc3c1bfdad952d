"""Virtual queues as lanes: the groups of each instance as blocks, model by model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from controlplane.console.formats import clock, count
from controlplane.console.live.queues import block
from controlplane.console.live.state import LiveState
from controlplane.planning.titles import title_of

Row = dict[str, Any]
SERIES = 6
FOLD_ABOVE = 24  # lanes
GROUPED = "qlm"


@dataclass(frozen=True, slots=True)
class Lane:
    """One instance, and what waits for it."""

    row: Row
    blocks: list[Row]


@dataclass(frozen=True, slots=True)
class Lanes:
    """All instances of a model in a region."""

    model: str
    order: str
    waiting: int
    lanes: list[Lane] = field(default_factory=list)
    folded: bool = False

    @property
    def grouped(self) -> bool:
        return self.order == GROUPED

    @property
    def order_title(self) -> str:
        return title_of(self.order)

    @property
    def troubled(self) -> bool:
        return any(block["risk"] for lane in self.lanes for block in lane.blocks)


def lanes_of(state: LiveState, region: str, model: str, slo_class: str, colour: str) -> list[Lanes]:
    """The lanes of *region*, those of one model or with groups of one class if they are given."""
    groups = state.of_region("groups", region)
    kinds = sorted({row["slo_class" if colour == "class" else "model"] for row in groups})
    places: dict[str, int] = {}
    for row in groups:
        places[row["instance"]] = max(places.get(row["instance"], 0), row["place"])
    blocks: dict[str, list[Row]] = {}
    for row in groups:
        if slo_class in ("", row["slo_class"]):
            kind = row["slo_class" if colour == "class" else "model"]
            shown = {
                "series": kinds.index(kind) % SERIES + 1,
                "html": block(row),
                "name": name_of(row, places[row["instance"]]),
            }
            blocks.setdefault(row["instance"], []).append(row | shown)
    waiting = {row["model"]: row["waiting"] for row in state.of_region("endpoints", region)}
    rows = [row for row in state.of_region("lanes", region) if model in ("", row["model"])]
    models: dict[str, Lanes] = {}
    for row in rows:
        lanes = models.setdefault(row["model"], Lanes(row["model"], row["order"], waiting.get(row["model"]) or 0))
        lanes.lanes.append(Lane(row, blocks.get(row["instance"], [])))
    if len(rows) <= FOLD_ABOVE:
        return list(models.values())
    folded = [
        Lanes(each.model, each.order, each.waiting, each.lanes, folded=not each.troubled) for each in models.values()
    ]
    return sorted(folded, key=lambda each: each.folded)


def legend(groups: Sequence[Row], colour: str) -> list[tuple[str, int]]:
    """The legend of the colours: name and number of each series."""
    kinds = sorted({row["slo_class" if colour == "class" else "model"] for row in groups})
    return [(kind, at % SERIES + 1) for at, kind in enumerate(kinds)]


def name_of(row: Row, of: int) -> str:
    """A block in full words."""
    requests = f"{count(row['count'])} request{'' if row['count'] == 1 else 's'}"
    words = [f"{requests} of {row['model']}, {row['slo_class']}", f"starts in {clock(row['start_s'])}"]
    if row["slack_s"] is not None:
        words.append(f"slack {clock(row['slack_s'])}" if row["slack_s"] >= 0 else f"late by {clock(-row['slack_s'])}")
    words += {"risk": ["at risk"]}.get(row["risk"], [])
    words += ["pinned"] if row["pinned"] else []
    return ", ".join([*words, f"place {row['place']} of {of}"])
