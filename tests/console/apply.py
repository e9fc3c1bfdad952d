"""The twin of `static/console/js/apply.js` in Python: the state after a message of the live connection."""

from typing import Any

from controlplane.console.live.deltas import Table


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
