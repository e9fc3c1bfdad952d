"""Rows of the what-if form, derived from the changes: columns of each kind of row, and the change that a filled row makes.

A column is a key of the change, such as `client.prompt.median`. Fields are named `<kind>-<column>` and repeat: the n-th
values of a kind are its n-th row. A row whose first column is empty is not there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from django.http import QueryDict
from pydantic import BaseModel

from controlplane.applications.models import Application
from controlplane.applications.selectors import graph_of
from controlplane.console.formats import NONE
from controlplane.fleet.models.hardware import region_title
from controlplane.planning.titles import title_of
from controlplane.simulation.whatif.changes.applying import parsed
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.changes.demand import ApplicationChange, DemandChange, SloChange, TenantChange
from controlplane.simulation.whatif.changes.policies import (
    PARTS,
    TITLES,
    FallbackChange,
    KeyChange,
    LengthsChange,
    PolicyChange,
    WeightsChange,
)
from controlplane.simulation.whatif.changes.supply import (
    BoundsChange,
    FailureChange,
    GpuChange,
    PriceChange,
    instance_names,
)
from controlplane.simulation.whatif.starts.nodes import nodes_of, with_instances
from scheduling.applications.suite import SUITE
from scheduling.simulation.scenario.applications import MIXED
from scheduling.simulation.scenario.demand import TraceOf

Values = dict[str, Any]
Choices = list[tuple[str, str]]
MAX_GRAPHS: Final = 50
"""Recorded applications that can be chosen."""
UNITS: Final = {"_ms": "ms", "_s": "s", "_h": "h"}
WORDS: Final = {
    "ttft": "TTFT", "itl": "ITL", "e2e": "E2E", "gpu": "GPU", "slo": "SLO", "usd": "USD", "cv": "CV of gaps",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowColumn:
    """Column of a row: a select, where the key is one of names in the scenario; else a number or a text."""

    name: str
    annotation: Any
    is_required: bool

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def unit(self) -> str:
        per_time = "_per_" in self.key
        return "" if per_time else next((unit for end, unit in UNITS.items() if self.key.endswith(end)), "")

    @property
    def label(self) -> str:
        nested = self.name.split(".")[1:] or [self.name]
        plain = "_".join(nested).removesuffix(f"_{self.unit}" if self.unit else "")
        first, *rest = (WORDS.get(word, word) for word in plain.split("_"))
        return " ".join([first[:1].upper() + first[1:], *rest])

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The annotation, or the parts of a union but None."""
        parts = get_args(self.annotation) if get_origin(self.annotation) in (Union, UnionType) else (self.annotation,)
        return tuple(_plain(part) for part in parts if part is not type(None))

    @property
    def is_number(self) -> bool:
        return any(part in (int, float) for part in self.kinds)

    def choices(self, values: Values) -> Choices | None:
        """Return the options of a select, for the scenario *values*; None for no select."""
        if get_origin(self.annotation) is Literal:
            return [(name, title_of(name)) for name in get_args(self.annotation)]
        of = CHOICES.get(self.key)
        if of is None or self.annotation is Any or (dict in self.kinds and self.key != "regions"):
            return None
        none = [] if self.is_required else [("", NONE)]
        return [*none, *of(values)] if values or self.key in ("suite", "value") else none

    def value(self, text: str) -> Any:
        """Return *text* as the annotation has it, as far as it can be read; the change reports the rest."""
        one = _number if {int, float} & _leaves(self.annotation) else str
        if dict in self.kinds:
            pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
            return {name.strip(): one(share.strip() or "1") for name, _, share in pairs}
        if list in self.kinds:
            return [one(each.strip()) for each in text.split(",")]
        return _number(text) if self.annotation is Any else one(text.replace(",", ".") if one is _number else text)


def _number(text: str) -> Any:
    """Return *text* as JSON if it is any, such as a number; else itself."""
    with suppress(ValueError):
        return json.loads(text)
    return text


def _leaves(annotation: Any) -> set[Any]:
    """Return the classes in an annotation."""
    parts = [] if get_origin(annotation) is Literal else get_args(annotation)
    return set().union(*map(_leaves, parts)) if parts else {annotation} if isinstance(annotation, type) else set()


def _plain(annotation: Any) -> Any:
    """Return the class of an annotation, without limits and arguments."""
    while hasattr(annotation, "__origin__"):
        annotation = annotation.__origin__
    return annotation


@dataclass(frozen=True, slots=True)
class RowKind:
    """A kind of row: the keys of *model* that are asked. *adds* are its buttons: a label, and the values of a new row."""

    name: str
    title: str
    model: type[BaseModel]
    asks: str
    adds: Sequence[tuple[str, Mapping[str, str]]]
    none: str = "As they are."
    """Text where there is no row."""

    @property
    def columns(self) -> list[RowColumn]:
        return [RowColumn(name, *_field(self.model, name.split("."))) for name in self.asks.split()]

    def values(self, row: Mapping[str, str]) -> Values:
        """Return the keys of a filled row."""
        made: Values = {}
        for column in self.columns:
            if text := row.get(column.name, "").strip():
                *before, last = column.name.split(".")
                place = made
                for step in before:
                    place = place.setdefault(step, {})
                place[last] = column.value(text)
        return made

    def change(self, row: Mapping[str, str], now: Values) -> Values:
        """Return the valid change of a filled row; *now* has the instances of nodes. Raise ChangeError naming the key."""
        made = self.values(row) | {"kind": self.model.model_fields["kind"].default}
        if made.get("application", {}).get("suite", "").startswith("application:"):
            made["application"]["graph"] = _graph(made["application"].pop("suite"))
        (made,) = with_instances([made], now)
        (change,) = parsed([made], "")
        whole: Values = change.model_dump(mode="json", exclude_unset=True)
        return whole


def _field(model: Any, path: list[str]) -> tuple[Any, bool]:
    """Return the annotation of the key *path* of *model*, and whether it is required."""
    declared = model.model_fields[path[0]]
    if path[1:]:
        nested = get_args(declared.annotation) or (declared.annotation,)
        return _field(nested[0], path[1:])
    return declared.annotation, declared.is_required()


def _named(table: str, title: Callable[[str], str] = str) -> Callable[[Values], Choices]:
    return lambda values: [(name, title(name)) for name in values.get(table, {})]


def _suites(_: Values) -> Choices:
    """Return the applications of the suite, then those that are recorded."""
    recorded = Application.objects.filter(runs__steps__gt=[]).distinct()[:MAX_GRAPHS]
    return [
        (MIXED, "Mix of the suite"),
        *((name, f"{name}: {each.title}") for name, each in SUITE.items()),
        *((f"application:{each.pk}", f"{each}, as recorded") for each in recorded),
    ]


def _graph(named: str) -> Values:
    """Return the demand graph that `application:KEY` names, as JSON. Raise ChangeError without a record."""
    key = named.partition(":")[2]
    row = Application.objects.filter(pk=int(key) if key.isdecimal() else 0).first()
    graph = graph_of(row) if row is not None else None
    if graph is None or not graph.records:
        raise ChangeError("suite", "is not known, or has no records yet")
    made: Values = json.loads(graph.to_json())
    return made


_models, _regions, _classes = _named("models"), _named("regions", region_title), _named("classes")
CHOICES: Final[Mapping[str, Callable[[Values], Choices]]] = {
    "model": _models, "models": _models, "to": _models, "region": _regions, "regions": _regions, "slo_class": _classes,
    "classes": _classes, "gpu": _named("gpus"), "name": _named("weighted_targets"), "suite": _suites,
    "instances": lambda values: [(name, name) for own in instance_names(values).values() for name in own],
    "node": lambda values: [(name, node.title) for name, node in nodes_of(values).items()],
    "value": lambda _: [
        (value, f"{TITLES[part].capitalize()}: {title_of(value)}") for part, values in PARTS.items() for value in values
    ],
}  # fmt: skip
"""Names that a key has one of, by key."""

TENANT: Final = RowKind(
    "tenant", "New tenants", TenantChange,
    "client.tenant client.model client.slo_class client.regions client.requests_per_s client.prompt.median"
    " client.prompt.p95 client.output.median client.output.p95 client.daily_swing client.peak_h",
    [("Tenant", {
        "client.tenant": "new", "client.requests_per_s": "0.5", "client.prompt.median": "300", "client.prompt.p95": "900",
        "client.output.median": "150", "client.output.p95": "450",
    })],
    "",
)  # fmt: skip
APPLICATION: Final = RowKind(
    "application", "Applications", ApplicationChange,
    "application.suite application.model application.slo_class application.regions application.runs_per_h application.cv"
    " application.deadline_factor",
    [("Application", {"application.suite": MIXED, "application.runs_per_h": "60"})],
    "None. Add runs of several calls, which end when their last step does.",
)  # fmt: skip
DEMAND: Final = RowKind(
    "demand", "Demand", DemandChange, "edit regions models by shift_s prompt output from_s until_s ramp_s",
    [
        ("Factor", {"edit": "factor", "by": "1.5"}),
        ("Burst", {"edit": "burst", "by": "2", "from_s": "600", "until_s": "1800", "ramp_s": "120"}),
        ("Shift", {"edit": "shift", "shift_s": "1800"}),
        ("Lengths", {"edit": "lengths", "prompt": "1.5", "output": "1.5"}),
    ],
    "As forecast. Every future has the same demand.",
)  # fmt: skip
FAILURE: Final = RowKind(
    "failure", "Failures", FailureChange, "what region node instances count at_s for_s",
    [("Failure", {"what": "region", "at_s": "600", "for_s": "600"})],
    "None. Remove an instance, a node or a region at a chosen time.",
)  # fmt: skip
OF_ALL: Final = (DEMAND, TENANT, APPLICATION)
"""Rows that all futures share."""
OF_FLEET: Final = (
    RowKind("policy", "Policies", PolicyChange, "part value models", [("Policy", {"part": "routing"})]),
    RowKind("gpus", "GPUs", GpuChange, "region gpu count", [("GPUs", {})]),
    RowKind("price", "Prices", PriceChange, "gpu usd_per_hour spot_usd_per_hour", [("Price", {})]),
    RowKind("bounds", "Bounds", BoundsChange, "model region min_instances max_instances", [("Bound", {})]),
    RowKind("fallback", "Fallback models", FallbackChange, "model to wait_s", [("Fallback", {})]),
    RowKind("weights", "Weighted targets", WeightsChange, "name weights", [("Weight", {})]),
    FAILURE,
    RowKind("slo", "SLO targets", SloChange, "slo_class ttft_ms itl_ms e2e_ms deadline_s", [("SLO target", {})]),
    RowKind("predictions", "Predicted lengths", LengthsChange, "to log_sd bias", [("Predictions", {})]),
    RowKind("key", "Any other key", KeyChange, "path value", [("Key", {"path": "planner.epsilon"})], ""),
)  # fmt: skip
TRACE: Final = RowKind(
    "trace", "What the trace does not name", TraceOf, "model region slo_class tenant speed limit models", [], ""
)  # fmt: skip
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
        try:
            changes.append(kind.change(row, now))
        except ChangeError as error:
            field = error.field.removeprefix("[0]").removeprefix(".")
            labels = {column.name: column.label for column in kind.columns}
            place = filter(None, (f"{kind.title} {number}", labels.get(field, field)))
            raise ChangeError(", ".join(place), error.what) from None
    return changes
