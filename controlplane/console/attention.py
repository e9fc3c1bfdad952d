"""What needs an operator's eye now, worst first: the list of the overview and the badges of the navigation."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from controlplane.console.deltas import Table
from controlplane.console.formats import count, milliseconds, percent, percent_fine

SHOWN = 5
SLO_WARNING, SLO_CRITICAL = 0.99, 0.90
ERRORS_WARNING, ERRORS_CRITICAL = 0.001, 0.01
QUEUE_WARNING = 0.8  # of the endpoint's bound

# Bounds of waiting requests, by (model, region).
Bounds = dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to look at; *rank* orders items of one severity, lowest first."""

    severity: str  # critical, warning
    rank: float
    title: str
    detail: str
    href: str

    def as_dict(self) -> dict[str, str]:
        return {"severity": self.severity, "title": self.title, "detail": self.detail, "href": self.href}


def rows(table: Table) -> list[dict[str, Any]]:
    """The rows of a columnar table as dictionaries."""
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def find(tables: dict[str, Table], bounds: Bounds) -> dict[str, Any]:
    """`{"items": the worst SHOWN, "total": all of them, "instances": how many instances are down}`."""
    found = [
        *_instances(rows(tables["instances"])),
        *_endpoints(rows(tables["endpoints"]), bounds),
        *_service(rows(tables["tiles"])),
        *_lengths(rows(tables["lengths"])),
    ]
    found.sort(key=lambda item: (item.severity != "critical", item.rank, item.title))
    down = sum(status in ("failed", "unreachable") for status in tables["instances"]["status"])
    return {"items": [item.as_dict() for item in found[:SHOWN]], "total": len(found), "instances": down}


def _instances(table: list[dict[str, Any]]) -> list[Item]:
    found = []
    for row in table:
        href = reverse("console:instance", args=[row["name"]])
        where = f"{row['model']} in {row['region']}"
        match row["status"]:
            case "failed":
                found.append(Item("critical", 1, f"{row['name']} failed", where, href))
            case "unreachable":
                found.append(Item("critical", 2, f"{row['name']} does not answer", where, href))
            case "saturated":
                kv, waiting = row["kv_ratio"] or 0, row["waiting"] or 0
                detail = f"KV cache {percent(kv)}, {count(waiting)} waiting inside it; {where}"
                found.append(Item("warning", 3 - kv, f"{row['name']} is saturated", detail, href))
    return found


def _endpoints(table: list[dict[str, Any]], bounds: Bounds) -> list[Item]:
    found = []
    for row in table:
        waiting = row["waiting"] or 0
        name = f"{row['model']} in {row['region']}"
        href = f"{reverse('console:instances')}?{urlencode({'model': row['model'], 'region': row['region']})}"
        if waiting and not row["instances_ready"]:
            found.append(
                Item("critical", 0, f"No instance of {name} is ready", f"{count(waiting)} requests wait for one", href)
            )
            continue
        bound = bounds.get((row["model"], row["region"]), 0)
        if bound and waiting >= QUEUE_WARNING * bound:
            full = waiting >= bound
            found.append(
                Item(
                    "critical" if full else "warning",
                    0.5,
                    f"The queue of {name} is {'full' if full else 'nearly full'}",
                    f"{count(waiting)} of {count(bound)} waiting"
                    + (f"; the oldest for {milliseconds(row['oldest_wait_s'] * 1000)}" if row["oldest_wait_s"] else ""),
                    href,
                )
            )
    return found


def _service(table: list[dict[str, Any]]) -> list[Item]:
    """Service levels and errors by model (the fleet's own line says nothing about where to look)."""
    found = []
    for row in table:
        if not row["scope"]:
            continue
        href = f"{reverse('console:overview')}?{urlencode({'model': row['scope']})}"
        met = row["slo_met_ratio"]
        if met is not None and met < SLO_WARNING:
            severity = "critical" if met < SLO_CRITICAL else "warning"
            detail = f"{percent_fine(met)} of the last 5 min met their targets"
            if row["ttft_p95_ms"] is not None:
                detail += f"; TTFT p95 is {milliseconds(row['ttft_p95_ms'])}"
            found.append(Item(severity, 1 + met, f"{row['scope']} is below its SLO", detail, href))
        requests, errors = row["requests_per_s"] or 0, row["errors_per_s"] or 0
        if requests and errors / requests > ERRORS_WARNING:
            share = errors / requests
            severity = "critical" if share > ERRORS_CRITICAL else "warning"
            found.append(
                Item(severity, 1, f"{row['scope']} has errors", f"{percent_fine(share)} of requests fail", href)
            )
    return found


def _lengths(table: list[dict[str, Any]]) -> list[Item]:
    """Answers that have become longer or shorter than was learned."""
    found = []
    for row in table:
        for drift in row["drift"] or ():
            model, tenant = drift["model"], drift["tenant"]
            href = f"{reverse('console:lengths')}?{urlencode({'model': model, 'tenant': tenant})}"
            way = {True: "longer than", False: "shorter than"}.get(drift.get("longer"), "other than")
            detail = f"answers are {way} the model learned; calibration corrects the mean meanwhile"
            found.append(Item("warning", 5, f"Lengths of {model} drift for {tenant}", detail, href))
    return found
