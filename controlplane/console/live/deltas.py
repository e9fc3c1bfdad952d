"""How pages follow the live state: messages that turn one state into the next, in Python; `static/console/js/apply.js` is
the twin that runs in browsers, and a test holds the two equal.

A *state* is `{"ts", "source", "tables", "attention"}`; each table is columnar, `{column: [value of each row]}`, and its
first column is the key of the rows. A *message* is a `snapshot` (the whole state), a `tick` (fleet numbers: table `tiles`
and the attention list) or a `delta` (what changed in the other tables). Nothing here mutates what it is given.
"""

from typing import Any

Table = dict[str, list[Any]]
TICK_TABLES = ("tiles",)


def diff(before: Table, after: Table) -> dict[str, Any]:
    """What turns *before* into *after*: `{"set": {column: [row numbers, values]}}`, or `{"all": after}` when rows or
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


def patch(table: Table, change: dict[str, Any]) -> Table:
    """*table* with *change* (of `diff`) made."""
    if "all" in change:
        whole: Table = change["all"]
        return whole
    patched = dict(table)
    for column, (rows, values) in change.get("set", {}).items():
        cells = list(patched[column])
        for row, value in zip(rows, values, strict=True):
            cells[row] = value
        patched[column] = cells
    return patched


def apply(state: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """The state after *message*. Messages of other kinds (`hello`, `event`, `resync`) change nothing."""
    match message["t"]:
        case "snapshot":
            return {name: message[name] for name in ("ts", "source", "tables", "attention")}
        case "tick":
            return {
                **state,
                "ts": message["ts"],
                "source": message["source"],
                "attention": message["attention"],
                "tables": {**state["tables"], **message["tables"]},
            }
        case "delta":
            tables = dict(state["tables"])
            for name, change in message["changes"].items():
                tables[name] = patch(tables.get(name, {}), change)
            return {**state, "ts": message["ts"], "source": message["source"], "tables": tables}
        case _:
            return state


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
