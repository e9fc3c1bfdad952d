"""Rows of the what-if form: the columns of each kind of row, and the change that a filled row makes.

Fields are named `<kind>-<column>` and repeat: the n-th values of a kind are its n-th row. A row whose first column is empty
is not there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from django.http import QueryDict

from controlplane.applications.models import Application
from controlplane.applications.selectors import graph_of
from controlplane.simulation.whatif.changes.base import ChangeError, region_title
from controlplane.simulation.whatif.changes.supply import instance_names
from controlplane.simulation.whatif.starts.nodes import nodes_of
from scheduling.applications.suite import SUITE
from scheduling.simulation.scenario.applications import MIXED

Values = dict[str, Any]
Choices = Sequence[tuple[str, str]]
EVERY: Final = ""
MOST_GRAPHS: Final = 50
"""Recorded applications that can be chosen."""


@dataclass(frozen=True, slots=True)
class RowColumn:
    """Column of a row: a select with *choices*, made of the present scenario; else a number or a text."""

    name: str
    label: str
    choices: Callable[[Values], Choices] | None = None
    unit: str = ""
    step: str = ""
    """Of a number; a text has none."""
    usual: str = ""


@dataclass(frozen=True, slots=True)
class RowKind:
    """A kind of row. *adds* are its buttons: a label, and the values of a new row."""

    name: str
    title: str
    columns: Sequence[RowColumn]
    adds: Sequence[tuple[str, Mapping[str, str]]]
    change: Callable[[Mapping[str, str]], Values] = field(compare=False)
    none: str = ""
    """Text where there is no row."""


def _regions(values: Values) -> Choices:
    return [(EVERY, "All regions"), *((name, region_title(name)) for name in values.get("regions", {}))]


def _models(values: Values) -> Choices:
    return [(EVERY, "All models"), *((name, name) for name in values.get("models", {}))]


def _one_model(values: Values) -> Choices:
    return _models(values)[1:]


def _or_none(values: Values) -> Choices:
    return [("", "None"), *_one_model(values)]


def _public_names(values: Values) -> Choices:
    return [(name, name) for name in values.get("weighted_targets", {})]


def _classes(values: Values) -> Choices:
    return [(name, name) for name in values.get("classes", {})]


def _instances(values: Values) -> Choices:
    names = instance_names(values) if values else {}
    return [("", "None"), *((name, name) for own in names.values() for name in own)]


def _nodes(values: Values) -> Choices:
    return [("", "None"), *((name, node.title) for name, node in (nodes_of(values) if values else {}).items())]


def _fixed(*choices: tuple[str, str]) -> Callable[[Values], Choices]:
    return lambda _: choices


def amount(row: Mapping[str, str], name: str) -> float:
    """Return the number in a column. Raise ChangeError naming it."""
    try:
        return float(row[name].replace(",", "."))
    except ValueError:
        what = f"{row[name]!r} is no number" if row[name] else "is missing"
        raise ChangeError(name, what) from None


def _given(row: Mapping[str, str], factor: float, **columns: str) -> Values:
    """Return the filled ones of *columns*, times *factor*, by their names in a change."""
    return {key: amount(row, name) * factor for key, name in columns.items() if row[name]}


def _whole(row: Mapping[str, str], **columns: str) -> Values:
    return {key: int(value) for key, value in _given(row, 1.0, **columns).items()}


def _demand(row: Mapping[str, str]) -> Values:
    change: Values = {"kind": "demand", "edit": row["edit"]}
    change |= {key: [row[name]] for key, name in (("regions", "region"), ("models", "model")) if row[name]}
    if row["edit"] == "shift":
        return change | {"shift_s": 60 * amount(row, "by")}
    if row["edit"] == "lengths":
        return change | {"prompt": amount(row, "by"), "output": amount(row, "by")}
    return change | {"by": amount(row, "by")} | _given(row, 60.0, from_s="from", until_s="until", ramp_s="ramp")


def _bounds(row: Mapping[str, str]) -> Values:
    where = {"region": row["region"]} if row["region"] else {}
    return {"kind": "bounds", "model": row["model"], **where} | _whole(row, min_instances="least", max_instances="most")


def _fallback(row: Mapping[str, str]) -> Values:
    return {"kind": "fallback", "model": row["model"], "to": row["to"]} | _given(row, 1.0, wait_s="wait")


def _weights(row: Mapping[str, str]) -> Values:
    return {"kind": "weights", "name": row["name"], "weights": {row["model"]: amount(row, "weight")}}


def _failure(row: Mapping[str, str]) -> Values:
    change: Values = {"kind": "failure", "what": row["what"]} | _given(row, 60.0, at_s="at", for_s="for")
    if row["what"] == "node":
        if not row["node"]:
            raise ChangeError("node", "is missing: choose which is lost")
        return change | {"node": row["node"]}
    if row["what"] == "instance":
        return change | {"instances": [row["instance"]] if row["instance"] else []}
    return change | {"region": row["region"]} | (_whole(row, count="count") if row["what"] == "spot" else {})


def _slo(row: Mapping[str, str]) -> Values:
    targets = _given(row, 1.0, ttft_ms="ttft", itl_ms="itl", e2e_ms="e2e", deadline_s="deadline")
    return {"kind": "slo", "slo_class": row["class"]} | targets


def _tenant(row: Mapping[str, str]) -> Values:
    client: Values = {"tenant": row["tenant"], "model": row["model"], "slo_class": row["class"]}
    client["requests_per_s"] = amount(row, "rate")
    client |= _given(row, 0.01, daily_swing="swing") | _given(row, 1.0, peak_h="peak")
    if row["region"]:
        client["regions"] = {row["region"]: 1.0}
    for name in ("prompt", "output"):
        median = amount(row, name)
        client[name] = {"median": median, "p95": 3 * median}
    return {"kind": "tenant", "client": client}


def _graph(named: str) -> Values:
    """Return the demand graph that `application:KEY` names, as JSON. Raise ChangeError without a record."""
    key = named.partition(":")[2]
    row = Application.objects.filter(pk=int(key) if key.isdecimal() else 0).first()
    graph = graph_of(row) if row is not None else None
    if graph is None or not graph.records:
        raise ChangeError("suite", "is not known, or has no records yet")
    made: Values = json.loads(graph.to_json())
    return made


def _suites(_: Values) -> Choices:
    """Return the applications of the suite, then those that are recorded."""
    recorded = Application.objects.filter(runs__steps__gt=[]).distinct()[:MOST_GRAPHS]
    return [
        (MIXED, "Mix of the suite"),
        *((name, f"{name}: {each.title}") for name, each in SUITE.items()),
        *((f"application:{each.pk}", f"{each}, as recorded") for each in recorded),
    ]


def _application(row: Mapping[str, str]) -> Values:
    of = {"graph": _graph(row["suite"])} if ":" in row["suite"] else {"suite": row["suite"]}
    application: Values = {**of, "model": row["model"], "slo_class": row["class"]}
    application["runs_per_h"] = amount(row, "rate")
    application |= _given(row, 1.0, cv="cv")
    if row["due"]:
        application["deadline_factor"] = [amount(row, "due")]
    if row["region"]:
        application["regions"] = {row["region"]: 1.0}
    return {"kind": "application", "application": application}


def _key(row: Mapping[str, str]) -> Values:
    text = row["value"]
    value: Any = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    with suppress(ValueError):
        value = float(text) if "." in text or "e" in text.lower() else int(text)
    return {"kind": "key", "path": row["path"], "value": value}


def _minutes(name: str, label: str) -> RowColumn:
    return RowColumn(name, label, unit="min", step="any")


REGION = RowColumn("region", "Region", _regions)
MODEL: Final = RowColumn("model", "Model", _one_model)
EDITS: Final = (("burst", "Burst"), ("factor", "Factor"), ("shift", "Shift"), ("lengths", "Lengths"))
DEMAND: Final = RowKind(
    "demand",
    "Demand",
    (
        RowColumn("edit", "Edit", _fixed(*EDITS)),
        REGION,
        RowColumn("model", "Models", _models),
        RowColumn("by", "By", unit="x, or min", step="any"),
        _minutes("from", "From"),
        _minutes("until", "To"),
        _minutes("ramp", "Ramp"),
    ),
    (
        ("Factor", {"edit": "factor", "by": "1.5"}),
        ("Burst", {"edit": "burst", "by": "2", "from": "10", "until": "30", "ramp": "2"}),
        ("Shift", {"edit": "shift", "by": "30"}),
        ("Lengths", {"edit": "lengths", "by": "1.5"}),
    ),
    _demand,
    "As forecast. Every future has the same demand.",
)  # fmt: skip
TENANT: Final = RowKind(
    "tenant",
    "New tenants",
    (
        RowColumn("tenant", "Tenant"),
        MODEL,
        RowColumn("class", "SLO class", _classes),
        REGION,
        RowColumn("rate", "Rate", unit="requests/s", step="any"),
        RowColumn("prompt", "Prompt", unit="tokens, median", step="1"),
        RowColumn("output", "Output", unit="tokens, median", step="1"),
        RowColumn("swing", "Daily swing", unit="%", step="any"),
        RowColumn("peak", "Peak after", unit="h", step="any"),
    ),
    (("Tenant", {"tenant": "new", "rate": "0.5", "prompt": "300", "output": "150"}),),
    _tenant,
)
APPLICATION: Final = RowKind(
    "application",
    "Applications",
    (
        RowColumn(
            "suite",
            "Application",
            _suites,
        ),
        MODEL,
        RowColumn("class", "SLO class", _classes),
        REGION,
        RowColumn("rate", "Rate", unit="runs/h", step="any"),
        RowColumn("cv", "Burstiness", unit="CV of gaps", step="any"),
        RowColumn("due", "Due after", unit="times alone", step="any"),
    ),
    (("Application", {"suite": MIXED, "rate": "60"}),),
    _application,
    "None. Add runs of several calls, which end when their last step does.",
)
BOUNDS: Final = RowKind(
    "bounds",
    "Bounds",
    (
        MODEL,
        REGION,
        RowColumn("least", "At least", unit="instances", step="1"),
        RowColumn("most", "At most", unit="instances", step="1"),
    ),
    (("Bound", {}),),
    _bounds,
    "As they are.",
)
FALLBACK: Final = RowKind(
    "fallback",
    "Fallback models",
    (
        MODEL,
        RowColumn("to", "Fallback", _or_none),
        RowColumn("wait", "Also after", unit="s of waiting", step="any"),
    ),
    (("Fallback", {}),),
    _fallback,
    "As they are.",
)
WEIGHTS: Final = RowKind(
    "weights",
    "Weighted targets",
    (
        RowColumn("name", "Public name", _public_names),
        MODEL,
        RowColumn("weight", "Weight", step="any"),
    ),
    (("Weight", {"weight": "1"}),),
    _weights,
    "As they are.",
)
LOST: Final = (("region", "Region"), ("node", "Node"), ("instance", "Instance"), ("spot", "Spot reclaim"))
FAILURE: Final = RowKind(
    "failure",
    "Failures",
    (
        RowColumn("what", "What", _fixed(*LOST)),
        REGION,
        RowColumn("node", "Node", _nodes),
        RowColumn("instance", "Instance", _instances),
        RowColumn("count", "How many", unit="of spot", step="1"),
        _minutes("at", "After"),
        _minutes("for", "For"),
    ),
    (("Failure", {"what": "region", "at": "10", "for": "10"}),),
    _failure,
    "None. Remove an instance, a node or a region at a chosen time.",
)
SLO: Final = RowKind(
    "slo",
    "SLO targets",
    (
        RowColumn("class", "SLO class", _classes),
        RowColumn("ttft", "TTFT", unit="ms", step="any"),
        RowColumn("itl", "ITL", unit="ms", step="any"),
        RowColumn("e2e", "E2E", unit="ms", step="any"),
        RowColumn("deadline", "Deadline", unit="s", step="any"),
    ),
    (("SLO target", {}),),
    _slo,
    "As they are.",
)
KEY: Final = RowKind(
    "key",
    "Any other key",
    (RowColumn("path", "Key of the scenario"), RowColumn("value", "Value")),
    (("Key", {"path": "planner.epsilon"}),),
    _key,
)
OF_ALL: Final = (DEMAND, TENANT, APPLICATION)
"""Rows that all futures share."""
OF_FLEET: Final = (BOUNDS, FALLBACK, WEIGHTS, FAILURE, SLO, KEY)


def rows_of(kind: RowKind, data: QueryDict) -> list[dict[str, str]]:
    """Return the filled rows of *kind*."""
    columns = [[value.strip() for value in data.getlist(f"{kind.name}-{column.name}")] for column in kind.columns]
    count = max(map(len, columns), default=0)
    padded = [values + [""] * (count - len(values)) for values in columns]
    named = [dict(zip((column.name for column in kind.columns), row, strict=True)) for row in zip(*padded, strict=True)]
    return [row for row in named if row[kind.columns[0].name]]


def changes_of(kind: RowKind, data: QueryDict) -> list[Values]:
    """Return the changes of the rows of *kind*. Raise ChangeError naming row and column."""
    changes = []
    for number, row in enumerate(rows_of(kind, data), 1):
        try:
            changes.append(kind.change(row))
        except ChangeError as error:
            titles = {column.name: column.label for column in kind.columns}
            raise ChangeError(f"{kind.title} {number}, {titles.get(error.field, error.field)}", error.what) from None
    return changes
