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
from controlplane.resources.inventory import free_gpus

OPEN_BY_ITSELF, DRAWN = 60, 500
"""Instances up to which all nodes are open, and most rows of instances that are drawn."""
ALL, NONE = ":all", ":none"
"""No node's name begins with a colon, so `:us-east` is that of instances there without one."""
BAD = {"failed", "unreachable"}
GPU_PX, GAP_PX, HEIGHT_PX = 9, 3, 16
Row = dict[str, Any]


def key_of(row: Row) -> str:
    return row["node"] or f":{row['region']}"


def opened(filters: Filters, rows: Sequence[Row]) -> set[str]:
    """Return the nodes whose instances are drawn: those of the address, else all of a small choice."""
    keys = {key_of(row) for row in rows}
    asked = filters["open"]
    if asked == NONE or (not asked and len(rows) > OPEN_BY_ITSELF):
        return set()
    return keys if asked in ("", ALL) else keys & set(asked.split(","))


def tree(rows: Sequence[Row], filters: Filters) -> list[Row]:
    """Return a row for each region and node that has some of *rows*, or might where no filter is set, and those of open
    nodes.
    """
    is_open, drawn = opened(filters, rows), 0
    nodes = {node.name: node for node in selectors.nodes().filter(active=True)}
    of_node: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_node[key_of(row)].append(row)
    in_region: defaultdict[str, dict[str, Node | None]] = defaultdict(dict)
    for node in nodes.values():
        if node.name in of_node or not filters.narrow:
            in_region[node.region.name][node.name] = node
    for key, here in of_node.items():
        in_region[here[0]["region"]].setdefault(key, nodes.get(key))
    windows = {(one.node_id, one.region_id): one for one in Maintenance.objects.under_way()}
    made: list[Row] = []
    for region in Region.objects.all():
        if not (places := in_region.get(region.name)) and (filters.narrow or not region.active):
            continue
        groups = []
        for key, node in sorted(places.items() if places else (), key=lambda each: (each[1] is None, each[0])):
            here = of_node[key]
            unfold = key in is_open and (not drawn or drawn + len(here) <= DRAWN)
            drawn += len(here) if unfold else 0
            toggled = ",".join(sorted(is_open ^ {key})) or NONE
            group = {
                "level": "node", "place": node, "open": unfold, "toggle": toggled, "has": len(here),
                "gpus_total": node.gpu_count if node else 0, **sums(here),
            }  # fmt: skip
            if node is not None:
                group |= gpus_of(node, region) | {"strip": strip(node, here), "window": windows.get((node.pk, None))}
                group["silent"] = is_silent(node)
                group["notes"] = bool(node.cordoned or node.gpus_cordoned or node.ray or group["silent"])
            groups.append((group, here if unfold else []))
        whole = {"level": "region", "place": region, "window": windows.get((None, region.pk))}
        for name in ("gpus_total", "gpus_used", "gpus_free", "gpus_cordoned"):
            whole[name] = sum(group.get(name, 0) for group, _ in groups)
        made.append(whole | sums(row for key in places or () for row in of_node[key]))
        unused = [group["place"] for group, _ in groups if not (group["has"] or group.get("notes"))]
        made += [row for group, here in groups if group["place"] not in unused for row in (group, *here)]
        if unused:
            made.append({"level": "unused", "nodes": unused})
    return made


def is_silent(node: Node) -> bool:
    """Return whether the agent of *node* should have been heard of."""
    return bool(node.host and node.reported_at and node.reported_at < timezone.now() - AGENT_SILENT)


def gpus_of(node: Any, region: Region) -> Row:
    """Count GPUs of *node*; where it or its region is cordoned, those that are free count as cordoned."""
    free, shut = free_gpus(node), bool(node.cordoned or region.cordoned)
    return {
        "gpus_used": node.gpus_used,
        "gpus_free": 0 if shut else free,
        "gpus_cordoned": node.gpu_count - node.gpus_used if shut else node.gpus_cordoned,
    }


def sums(rows: Iterable[Row]) -> Row:
    """Return numbers of *rows* by state, and sums and means of what is known live."""
    rows = list(rows)
    states = Counter(row["status"] for row in rows)
    made: Row = {
        "states": [(states[name], word.lower(), name in BAD) for name, word in STATUSES.items() if states[name]]
    }
    for name in ("running", "waiting", "output_tokens_per_s"):
        known = [row[name] for row in rows if row[name] is not None]
        made[name] = sum(known) if known else None
    for name in ("use_ratio", "kv_ratio"):
        known = [row[name] for row in rows if row[name] is not None]
        made[name] = sum(known) / len(known) if known else None
    return made


def strip(node: Any, rows: Sequence[Row]) -> Row:
    """Return the drawing of the GPUs of *node*: those of each instance side by side, filled by its use; then those of
    instances that are not shown, cordoned ones, and free ones.
    """
    cells: list[Row] = []
    x, seen = 0, set()
    for row in sorted(rows, key=lambda row: (row["gpu_names"] or ["~"], row["name"])):
        if row["state"] == "stopped" or row["swap_group"] in seen:
            continue
        seen.add(row["swap_group"] or row["name"])
        title = f"{row['name']}: {STATUSES.get(row['status'], row['status'])}"
        if row["use_ratio"] is not None:
            title += f", use {row['use_ratio']:.0%}, KV cache {row['kv_ratio'] or 0:.0%}"
        height = round(HEIGHT_PX * min(1.0, row["use_ratio"] or 0), 1)
        for _ in range(row["gpu_count"]):
            cells.append({"x": x, "y": HEIGHT_PX - height, "height": height, "status": row["status"], "title": title})
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
