"""Rows of the what-if form, derived from the changes: columns of each kind of row, and the change that a filled row makes.

A column is a key of the change. Fields are named `<kind>-<column>` and repeat: the n-th values of a kind are its n-th row. A
row whose first column is empty is not there. Changes without a row are in the form's advanced text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, get_origin

from django.http import QueryDict
from pydantic import BaseModel

from controlplane.console.formats import NONE
from controlplane.fleet.models.hardware import region_title
from controlplane.planning.titles import title_of
from controlplane.simulation.whatif.changes.applying import parsed
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.changes.demand import DemandChange, SloChange
from controlplane.simulation.whatif.changes.policies import PARTS, TITLES, PolicyChange
from controlplane.simulation.whatif.changes.supply import BoundsChange, FailureChange, GpuChange, instance_names
from controlplane.simulation.whatif.starts.nodes import nodes_of, resolved
from scheduling.simulation.scenario.demand import TraceOf

AS_NOW: Final = "1"
"""Factor of demand that changes nothing: a row to be filled in."""
Values = dict[str, Any]
Choices = list[tuple[str, str]]
UNITS: Final = {"_ms": "ms", "_s": "s"}
WORDS: Final = {
    "ttft": "TTFT", "itl": "ITL", "e2e": "E2E", "gpu": "GPU", "slo": "SLO", "edit": "Kind", "by": "Times", "at": "After",
    "for": "Lasts", "what": "Lost", "prompt": "Prompt times", "output": "Output times",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowColumn:
    """Column of a row: a select, where the key is one of names in the scenario; else a number or a text."""

    name: str
    annotation: Any
    is_required: bool

    @property
    def unit(self) -> str:
        return next((unit for end, unit in UNITS.items() if self.name.endswith(end)), "")

    @property
    def label(self) -> str:
        first, *rest = self.name.removesuffix(f"_{self.unit}").split("_")
        return " ".join([WORDS.get(first, first.capitalize()), *(WORDS.get(word, word) for word in rest)])

    @property
    def is_number(self) -> bool:
        return bool({int, float} & _leaves(self.annotation))

    def choices(self, values: Values) -> Choices | None:
        """Return the options of a select, for the scenario *values*; None for no select."""
        if get_origin(self.annotation) is Literal:
            return [(name, title_of(name)) for name in get_args(self.annotation)]
        if (of := CHOICES.get(self.name)) is None:
            return None
        return [*([] if self.is_required else [("", NONE)]), *(of(values) if values else [])]

    def value(self, text: str) -> Any:
        """Return *text* as the annotation has it, as far as it can be read; the change reports the rest."""
        if list in _leaves(self.annotation):
            return [each.strip() for each in text.split(",")]
        if self.is_number:
            with suppress(ValueError):
                return json.loads(text.replace(",", "."))
        return text


def _leaves(annotation: Any) -> set[Any]:
    """Return the classes in an annotation, generic ones included."""
    parts = [] if get_origin(annotation) is Literal else get_args(annotation)
    own = get_origin(annotation) or annotation
    return set().union({own} if isinstance(own, type) else set(), *map(_leaves, parts))


@dataclass(frozen=True, slots=True)
class RowKind:
    """A kind of row: the keys of *model* that are asked. *adds* are its buttons: a label, and the values of a new row."""

    name: str
    title: str
    model: type[BaseModel]
    asks: str
    adds: Sequence[tuple[str, Mapping[str, str]]]

    @property
    def columns(self) -> list[RowColumn]:
        fields = self.model.model_fields
        return [RowColumn(name, fields[name].annotation, fields[name].is_required()) for name in self.asks.split()]

    def values(self, row: Mapping[str, str]) -> Values:
        """Return the keys of a filled row."""
        return {
            column.name: column.value(text) for column in self.columns if (text := row.get(column.name, "").strip())
        }

    def change(self, row: Mapping[str, str], now: Values) -> Values:
        """Return the valid change of a filled row; *now* has the instances of nodes. Raise ChangeError naming the key."""
        (change,) = parsed(resolved([self.values(row) | {"kind": self.name}], now), "")
        whole: Values = change.model_dump(mode="json", exclude_unset=True)
        return whole


def _named(table: str, title: Callable[[str], str] = str) -> Callable[[Values], Choices]:
    return lambda values: [(name, title(name)) for name in values.get(table, {})]


_models, _regions, _classes = _named("models"), _named("regions", region_title), _named("classes")
CHOICES: Final[Mapping[str, Callable[[Values], Choices]]] = {
    "model": _models, "models": _models, "region": _regions, "regions": _regions, "slo_class": _classes,
    "classes": _classes, "gpu": _named("gpus"),
    "instances": lambda values: [(name, name) for own in instance_names(values).values() for name in own],
    "node": lambda values: [(name, node.title) for name, node in nodes_of(values).items()],
    "value": lambda _: [
        (value, f"{TITLES[part].capitalize()}: {title_of(value)}") for part, values in PARTS.items() for value in values
    ],
}  # fmt: skip
"""Names that a key has one of, by key."""

DEMAND: Final = RowKind(
    "demand", "Demand", DemandChange, "edit regions models by shift_s prompt output from_s until_s ramp_s",
    [
        ("Factor", {"edit": "factor", "by": "1.5"}),
        ("Burst", {"edit": "burst", "by": "2", "from_s": "600", "until_s": "1800", "ramp_s": "120"}),
        ("Shift", {"edit": "shift", "shift_s": "1800"}),
        ("Lengths", {"edit": "lengths", "prompt": "1.5", "output": "1.5"}),
    ],
)  # fmt: skip
FAILURE: Final = RowKind(
    "failure", "Failures", FailureChange, "what region node instances count at_s for_s",
    [("Region", {"what": "region", "at_s": "60", "for_s": "300"}), ("Node", {"what": "node", "at_s": "60", "for_s": "300"})],
)  # fmt: skip
SCENARIO: Final = (
    DEMAND,
    FAILURE,
    RowKind("slo", "SLO targets", SloChange, "slo_class ttft_ms itl_ms e2e_ms deadline_s", [("SLO target", {})]),
)
"""Rows of what happens to every future but, if it is asked for, A."""
FLEET: Final = (
    RowKind("policy", "Policies", PolicyChange, "part value models", [("Policy", {"part": "routing"})]),
    RowKind("gpus", "GPUs", GpuChange, "region gpu count", [("GPUs", {})]),
    RowKind("bounds", "Bounds", BoundsChange, "model region min_instances max_instances", [("Bound", {})]),
)
"""Rows of one more future."""
TRACE: Final = RowKind(
    "trace", "What the trace does not name", TraceOf, "model region slo_class tenant speed limit", []
)
"""Keys of a scenario's `[trace]`: one row."""


def rows_of(kind: RowKind, data: QueryDict) -> list[dict[str, str]]:
    """Return the filled rows of *kind*."""
    names = [column.name for column in kind.columns]
    columns = [[value.strip() for value in data.getlist(f"{kind.name}-{name}")] for name in names]
    count = max(map(len, columns), default=0)
    padded = [values + [""] * (count - len(values)) for values in columns]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*padded, strict=True)]
    return [row for row in rows if row[names[0]]]


def changes_of(kind: RowKind, data: QueryDict, now: Values) -> list[Values]:
    """Return the changes of the rows of *kind*, of the scenario *now*. Raise ChangeError naming row and column."""
    changes = []
    for number, row in enumerate(rows_of(kind, data), 1):
        if (row.get("edit"), row.get("by")) == ("factor", AS_NOW):
            continue
        try:
            changes.append(kind.change(row, now))
        except ChangeError as error:
            field = error.field.removeprefix("[0]").removeprefix(".")
            labels = {column.name: column.label for column in kind.columns}
            place = filter(None, (f"{kind.title} {number}", labels.get(field, field)))
            raise ChangeError(", ".join(place), error.what) from None
    return changes
