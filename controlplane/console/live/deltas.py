"""How pages follow the live state: messages from one state to the next, which `static/console/js/apply.js` applies.

A *state* is `{"ts", "source", "tables", "attention"}`; each table is columnar, `{column: [value of each row]}`, and its
first column is the key of the rows. A *message* is a `snapshot` (the whole state), a `tick` (fleet numbers: table `tiles`
and the attention list) or a `delta` (what changed in the other tables). Nothing here mutates what it is given.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Table = dict[str, list[Any]]
TICK_TABLES = ("tiles",)


def columnar(rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> Table:
    """*rows* as columns of those *names*; what a row does not have is None."""
    rows = list(rows)
    return {name: [row.get(name) for row in rows] for name in names}


def rows_of(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def diff(before: Table, after: Table) -> dict[str, Any]:
    """What leads from *before* to *after*: `{"set": {column: [row numbers, values]}}`, or `{"all": after}` when rows or
    columns came, went or moved; `{}` when nothing changed."""
    if list(before) != list(after) or (after and before[key := next(iter(after))] != after[key]):
        return {"all": after}
    changed: dict[str, list[list[Any]]] = {}
    for column, values in after.items():
        if values == before[column]:
            continue
        rows = [row for row, (old, new) in enumerate(zip(before[column], values, strict=True)) if old != new]
        changed[column] = [rows, [values[row] for row in rows]]
    return {"set": changed} if changed else {}


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    return {"t": "snapshot", **state}


def tick(state: dict[str, Any]) -> dict[str, Any]:
    """The fleet numbers of *state*, whole: they all change each second."""
    tables = {name: state["tables"][name] for name in TICK_TABLES if name in state["tables"]}
    return {
        "t": "tick",
        "ts": state["ts"],
        "source": state["source"],
        "tables": tables,
        "attention": state["attention"],
    }


def delta(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What changed from *before* to *after* in the tables that ticks do not carry."""
    changes = {}
    for name, table in after["tables"].items():
        if name not in TICK_TABLES and (change := diff(before["tables"].get(name, {}), table)):
            changes[name] = change
    return {"t": "delta", "ts": after["ts"], "source": after["source"], "changes": changes}
