"""The fleet as a tree: regions, their nodes, the instances on these, each level with its sums."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from django.utils import timezone

from controlplane.alerts.problems import AGENT_SILENT
from controlplane.fleet import selectors
from controlplane.fleet.models import Maintenance, Node, Region
from controlplane.resources.filters import Filters
from controlplane.resources.instances import STATUSES

OPEN_BY_ITSELF, DRAWN = 60, 500
"""Instances up to which all nodes are open, and most rows of instances that are drawn."""
ALL, NONE = ":all", ":none"
"""No node's name begins with a colon, so `:us-east` is that of instances there without one."""
BAD = {"failed", "unreachable"}
GPUS = ("gpus_total", "gpus_used", "gpus_free", "gpus_cordoned")
GPU_PX, GAP_PX, HEIGHT_PX = 9, 3, 16
Row = dict[str, Any]


def tree(rows: Sequence[Row], filters: Filters) -> list[Row]:
    """Return a row for each region and node, those of instances of open nodes, and one for the unused nodes of a region.

    Where a filter is set, only places with some of *rows* are there.
    """
    of_node: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_node[row["node"] or f":{row['region']}"].append(row)
    is_open, drawn, made = _open(filters["open"], set(of_node), len(rows)), 0, list[Row]()
    windows = {(one.node_id, one.region_id): one for one in Maintenance.objects.under_way()}
    nodes: defaultdict[str, list[Node]] = defaultdict(list)
    for known in selectors.nodes().filter(active=True):
        if known.name in of_node or not filters.narrow:
            nodes[known.region.name].append(known)
    for region in Region.objects.all():
        places: list[tuple[str, Node | None]] = [(node.name, node) for node in nodes[region.name]]
        if (nowhere := f":{region.name}") in of_node:
            places.append((nowhere, None))
        if not places and (filters.narrow or not region.active):
            continue
        groups, unused, below = list[Row](), list[Node](), list[Row]()
        for key, node in places:
            here = of_node[key]
            group = _group(node, here) | {"window": node and windows.get((node.pk, None))}
            groups.append(group)
            if node is not None and not here and not group["notes"]:
                unused.append(node)
                continue
            unfolds = key in is_open and drawn + len(here) <= DRAWN
            drawn += len(here) if unfolds else 0
            below += [group | {"open": unfolds, "toggle": ",".join(sorted(is_open ^ {key})) or NONE}]
            below += here if unfolds else []
        whole: Row = {name: sum(group.get(name, 0) for group in groups) for name in GPUS}
        whole |= {"level": "region", "place": region, "window": windows.get((None, region.pk))}
        made += [whole | _sums(row for key, _ in places for row in of_node[key]), *below]
        made += [{"level": "unused", "nodes": unused}] if unused else []
    return made


def _open(asked: str, keys: set[str], count: int) -> set[str]:
    """Return the nodes whose instances are drawn: those that are *asked* for, else all of a small fleet."""
    if asked == ALL or (not asked and count <= OPEN_BY_ITSELF):
        return keys
    return keys & set(asked.split(","))


def _group(node: Any, here: Sequence[Row]) -> Row:
    group = {"level": "node", "place": node, "has": len(here), **_sums(here)}
    if node is None:
        return group
    silent = is_silent(node)
    notes = bool(node.cordoned or node.gpus_cordoned or node.ray or silent)
    for name, count in ({"total": node.gpu_count} | selectors.gpus_of(node)).items():
        group[f"gpus_{name}"] = count
    return group | {"strip": _strip(node, here), "silent": silent, "notes": notes}


def is_silent(node: Node) -> bool:
    """Return whether the agent of *node* should have been heard of."""
    return bool(node.host and node.reported_at and node.reported_at < timezone.now() - AGENT_SILENT)


def _sums(rows: Iterable[Row]) -> Row:
    """Return how many of *rows* are in which state, and sums and means of what is known live."""
    rows = list(rows)
    states = Counter(row["status"] for row in rows)
    made: Row = {"states": [(states[one], word.lower(), one in BAD) for one, word in STATUSES.items() if states[one]]}
    for name in ("running", "waiting", "output_tokens_per_s", "use_ratio", "kv_ratio"):
        known = [row[name] for row in rows if row[name] is not None]
        made[name] = sum(known) / (len(known) if name.endswith("ratio") else 1) if known else None
    return made


def _strip(node: Any, rows: Sequence[Row]) -> Row:
    """Return the drawing of the GPUs of *node*: those of each instance side by side, filled by its use; then those of
    instances that are not shown, cordoned ones, and free ones.
    """
    cells, x, seen = list[Row](), 0, set[str]()
    for row in sorted(rows, key=lambda row: (row["gpu_names"] or ["~"], row["name"])):
        if row["state"] == "stopped" or row["swap_group"] in seen:
            continue
        seen.add(row["swap_group"] or row["name"])
        title = f"{row['name']}: {STATUSES.get(row['status'], row['status'])}"
        if (use := row["use_ratio"]) is not None:
            title += f", use {use:.0%}, KV cache {row['kv_ratio'] or 0:.0%}"
        high = round(HEIGHT_PX * min(1.0, use or 0), 1)
        for _ in range(row["gpu_count"]):
            cells.append({"x": x, "y": HEIGHT_PX - high, "height": high, "status": row["status"], "title": title})
            x += GPU_PX
        x += GAP_PX
    others = max(0, node.gpus_used - len(cells))
    left = max(0, node.gpu_count - others - len(cells))
    shut = left if node.cordoned else min(left, node.gpus_cordoned)
    for status, count in (("Others", others), ("Cordoned", shut), ("Free", left - shut)):
        for _ in range(count):
            cells.append({"x": x, "status": status.lower(), "title": status})
            x += GPU_PX
    return {"cells": cells, "width": max(x, 1)}
