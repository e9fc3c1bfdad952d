"""What needs an operator's eye now, worst first: the list of the overview and the badges of the navigation."""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from controlplane.console.formats import count, milliseconds, percent, percent_fine
from controlplane.console.live.deltas import Table
from controlplane.console.live.jobs import job_title, part_title, trouble
from controlplane.fleet.lifecycle.restarts import CRASH_LOOP

SHOWN = 5
SLO_WARNING, SLO_CRITICAL = 0.99, 0.90
ERRORS_WARNING, ERRORS_CRITICAL = 0.001, 0.01
QUEUE_WARNING = 0.8  # of the endpoint's bound

JOBS_NAMED = 3  # beyond these, jobs in trouble are one line


@dataclass(frozen=True, slots=True)
class Known:
    """What the rows add to the live numbers, endpoints by (model, region)."""

    queue_bounds: dict[tuple[str, str], int] = field(default_factory=dict)
    min_instances: dict[tuple[str, str], int] = field(default_factory=dict)
    plans: tuple[str, ...] = ()
    """Models of the plans that wait for an operator, one for each plan."""
    rollouts: tuple[tuple[str, str, str], ...] = ()
    """(model, region, message) of rollouts that failed and left outdated instances."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to look at; *rank* orders items of one severity, lowest first. Without a model it concerns the fleet."""

    severity: str  # critical, warning
    rank: float
    title: str
    detail: str
    href: str
    model: str = ""

    def as_dict(self) -> dict[str, str]:
        names = ("severity", "title", "detail", "href", "model")
        return {name: getattr(self, name) for name in names}


def rows(table: Table) -> list[dict[str, Any]]:
    """The rows of a columnar table as dictionaries."""
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def find(tables: dict[str, Table], known: Known) -> dict[str, Any]:
    """`{"items": the worst SHOWN, "total": all of them, "instances": how many are down, "plans": how many wait,
    "system": how many jobs and parts are in trouble, "models"}`.

    *models* has items and total once more for each model that something is wrong with: its own and the fleet's. Of a model
    that is not among them only the fleet's are to be seen, which are under `""`.
    """
    waiting = _plans(known.plans)
    system = _system(rows(tables.get("parts", {})), rows(tables.get("jobs", {})))
    found = [
        *_instances(rows(tables["instances"])),
        *_endpoints(rows(tables["endpoints"]), known),
        *_service(rows(tables["tiles"])),
        *_lengths(rows(tables["lengths"])),
        *_rollouts(known.rollouts),
        *waiting,
        *system,
    ]
    found.sort(key=_worst_first)
    down = sum(status in ("failed", "unreachable") for status in tables["instances"]["status"])
    models = {}
    for model in {"", *known.plans, *(item.model for item in found)}:
        own = [item for item in found if item.model in ("", model) and item not in waiting]
        models[model] = _list(sorted([*own, *_plans(tuple(p for p in known.plans if p == model))], key=_worst_first))
    badges = {"instances": down, "plans": len(known.plans), "system": len(system)}
    return {**_list(found), **badges, "models": models}


def of_model(attention: dict[str, Any], model: str) -> dict[str, Any]:
    """Items and total of *attention* (of `find`) for one model; for all of them where it is empty."""
    return attention["models"].get(model, attention["models"][""]) if model else attention


def _worst_first(item: Item) -> tuple[bool, float, str]:
    return item.severity != "critical", item.rank, item.title


def _list(found: list[Item]) -> dict[str, Any]:
    return {"items": [item.as_dict() for item in found[:SHOWN]], "total": len(found)}


def _instances(table: list[dict[str, Any]]) -> list[Item]:
    found = []
    for row in table:
        href = reverse("console:instance", args=[row["name"]])
        where = f"{row['model']} in {row['region']}"
        match row["status"]:
            case "failed" if (row.get("failures") or 0) >= CRASH_LOOP:
                title = f"{row['name']} is in a crash loop"
                detail = f"failed {count(row['failures'])} times in a row, the next start waits longer; {where}"
                found.append(Item("critical", 0.8, title, detail, href, row["model"]))
            case "failed":
                found.append(Item("critical", 1, f"{row['name']} failed", where, href, row["model"]))
            case "unreachable":
                found.append(Item("critical", 2, f"{row['name']} does not answer", where, href, row["model"]))
            case "saturated":
                waiting, limit = row["waiting"] or 0, row["max_num_seqs"]
                detail = f"{count(row['running'])} of {count(limit)} sequences, KV cache {percent(row['kv_ratio'])}, "
                detail += f"{count(waiting)} waiting inside it; {where}"
                rank = 3 - (row["use_ratio"] or 0)
                found.append(Item("warning", rank, f"{row['name']} is saturated", detail, href, row["model"]))
    return found


def _endpoints(table: list[dict[str, Any]], known: Known) -> list[Item]:
    found = []
    for row in table:
        waiting = row["waiting"] or 0
        name = f"{row['model']} in {row['region']}"
        href = f"{reverse('console:instances')}?{urlencode({'model': row['model'], 'region': row['region']})}"
        ready, least = row["instances_ready"] or 0, known.min_instances.get((row["model"], row["region"]), 0)
        if ready < least:
            severity = "warning" if ready else "critical"
            detail = f"fewer than its minimum; {count(waiting)} requests wait" if waiting else "fewer than its minimum"
            title = f"{ready} of {least} instances of {name} are ready"
            found.append(Item(severity, 0, title, detail, href, row["model"]))
        elif waiting and not ready:
            found.append(
                Item(
                    "critical",
                    0,
                    f"No instance of {name} is ready",
                    f"{count(waiting)} requests wait for one",
                    href,
                    row["model"],
                )
            )
        if not ready:
            continue
        bound = known.queue_bounds.get((row["model"], row["region"]), 0)
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
                    row["model"],
                )
            )
    return found


def _rollouts(failed: tuple[tuple[str, str, str], ...]) -> list[Item]:
    """Rollouts that failed, until the next one or until the settings are changed back."""
    found = []
    for model, region, message in failed:
        href = f"{reverse('console:instances')}?{urlencode({'model': model, 'region': region})}"
        found.append(Item("warning", 0.4, f"The rollout of {model} in {region} failed", message, href, model))
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
            found.append(Item(severity, 1 + met, f"{row['scope']} is below its SLO", detail, href, row["scope"]))
        requests, errors = row["requests_per_s"] or 0, row["errors_per_s"] or 0
        if requests and errors / requests > ERRORS_WARNING:
            share = errors / requests
            severity = "critical" if share > ERRORS_CRITICAL else "warning"
            detail = f"{percent_fine(share)} of requests fail"
            found.append(Item(severity, 1, f"{row['scope']} has errors", detail, href, row["scope"]))
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
            found.append(Item("warning", 5, f"Lengths of {model} drift for {tenant}", detail, href, model))
    return found


def _plans(models: tuple[str, ...]) -> list[Item]:
    """Advice that somebody has to decide about."""
    if not models:
        return []
    title = "1 plan waits for approval" if len(models) == 1 else f"{len(models)} plans wait for approval"
    names = sorted(set(models))
    model = names[0] if len(names) == 1 else ""
    return [Item("warning", 4, title, f"for {', '.join(names)}", reverse("console:scaling"), model)]


def _system(parts: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> list[Item]:
    """Parts of the stack that are down, and jobs that are late or fail for no such reason."""
    href = reverse("console:system")
    found = [
        Item("critical", 0.2, f"{part_title(part['name'])}: down", part["detail"], href)
        for part in parts
        if part["state"] == "down"
    ]
    bad = [job for job in jobs if job["state"] in ("late", "failing") and not job["quiet"]]
    for job in bad if len(bad) <= JOBS_NAMED else []:
        severity = "critical" if job["kind"] == "gateway" else "warning"
        found.append(Item(severity, 0.3, f"{job_title(job['name'])}: {job['state']}", trouble(job), href))
    if len(bad) > JOBS_NAMED:
        severity = "critical" if any(job["kind"] == "gateway" for job in bad) else "warning"
        names = ", ".join(job_title(job["name"]).lower() for job in bad)
        found.append(Item(severity, 0.3, f"{len(bad)} periodic jobs are late or failing", names, href))
    return found
