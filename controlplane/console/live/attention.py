"""Problems for operators, worst first: the overview's list and the navigation badges."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from controlplane.console.formats import count, goal, milliseconds, percent, percent_fine, times
from controlplane.console.live.jobs import job_title, part_title, trouble
from controlplane.fleet.attainment import level_of
from controlplane.fleet.lifecycle.restarts import CRASH_LOOP

SHOWN = 5
ERRORS_WARNING, ERRORS_CRITICAL = 0.001, 0.01
QUEUE_WARNING = 0.8  # of the endpoint's bound
JOBS_NAMED = 3  # beyond these, failing jobs share one line


@dataclass(frozen=True, slots=True)
class Known:
    """Database facts compared with live numbers; endpoints by (model, region)."""

    queue_bounds: dict[tuple[str, str], int] = field(default_factory=dict)
    min_instances: dict[tuple[str, str], int] = field(default_factory=dict)
    plans: tuple[str, ...] = ()
    """Model of each plan that waits for an operator."""
    flapping: tuple[tuple[str, str, str], ...] = ()
    """(model, region, movers) of endpoints that are repeatedly scaled out and in."""
    rollouts: tuple[tuple[str, str, str], ...] = ()
    """(model, region, message) of failed rollouts that left outdated instances."""
    held: dict[tuple[str, str], str] = field(default_factory=dict)
    """Holder and reason of a held instance, by endpoint."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Region titles by name."""

    batches: tuple[tuple[str, str, str], ...] = ()
    """(severity, title, model) of running batches that are at risk or late."""
    alerts: int = 0
    """Open alerts, neither acknowledged nor silenced."""

    def where(self, model: str, region: str) -> str:
        return f"{model} in {self.titles.get(region, region)}"


@dataclass(frozen=True, slots=True)
class Item:
    """One problem; *rank* orders items of one severity, lowest first. Without a model it concerns the fleet."""

    severity: str  # critical, warning
    rank: float
    title: str
    detail: str
    href: str
    model: str = ""

    def as_dict(self) -> dict[str, str]:
        names = ("severity", "title", "detail", "href", "model")
        return {name: getattr(self, name) for name in names}


def link(page: str, **query: str) -> str:
    """Return the URL of a console page with its filters set."""
    return f"{reverse(f'console:{page}')}?{urlencode(query)}"


def find(tables: Mapping[str, list[dict[str, Any]]], known: Known) -> dict[str, Any]:
    """Return `{"items": the worst SHOWN, "total": all of them, "instances": how many are down, "below": how many models are
    below their SLO, "plans": how many wait, "system": how many jobs and parts have problems, "models"}`.

    *models* has items and total for each model with problems: its own and the fleet's. Other models have only the fleet's,
    under `""`.
    """
    waiting = list(_plans(known.plans))
    system = list(_system(tables.get("parts", []), tables.get("jobs", [])))
    others = [
        *_instances(tables["instances"], known),
        *_endpoints(tables.get("endpoints", []), known),
        *_service(tables.get("tiles", [])),
        *_rollouts(known),
        *_flapping(known),
        *_batches(known),
        *system,
    ]
    models = {}
    for model in {"", *known.plans, *(item.model for item in [*others, *waiting])}:
        own = [item for item in others if item.model in ("", model)]
        models[model] = _list([*own, *_plans(tuple(name for name in known.plans if name == model))])
    return {
        **_list([*others, *waiting]),
        "instances": sum(row["status"] in ("failed", "unreachable") for row in tables["instances"]),
        "below": sum(bool(row["scope"] and slo_level(row)) for row in tables.get("tiles", [])),
        "plans": len(known.plans),
        "system": len(system),
        "batches": len(known.batches),
        "alerts": known.alerts,
        "queues": sum((row["at_risk"] or 0) + (row["late"] or 0) for row in tables.get("queues", [])),
        "models": models,
    }


def of_model(attention: dict[str, Any], model: str) -> dict[str, Any]:
    """Return items and total of *attention* (from `find`) for one model, or for all if empty."""
    return attention["models"].get(model, attention["models"][""]) if model else attention


def _list(items: list[Item]) -> dict[str, Any]:
    """Return the worst of *items*, and their number."""
    worst = sorted(items, key=lambda item: (item.severity != "critical", item.rank, item.title))
    return {"items": [item.as_dict() for item in worst[:SHOWN]], "total": len(items)}


def _instances(table: list[dict[str, Any]], known: Known) -> Iterator[Item]:
    for row in table:
        name, model, href = row["name"], row["model"], reverse("console:instance", args=[row["name"]])
        where = known.where(model, row["region"])
        match row["status"]:
            case "failed" if (row.get("failures") or 0) >= CRASH_LOOP:
                detail = f"failed {count(row['failures'])} times in a row, the next start waits longer; {where}"
                yield Item("critical", 0.8, f"{name} is in a crash loop", detail, href, model)
            case "failed":
                yield Item("critical", 1, f"{name} failed", where, href, model)
            case "unreachable":
                yield Item("critical", 2, f"{name} does not answer", where, href, model)
            case "resting":
                yield Item("warning", 1, f"{name} takes no requests", f"{row['trouble']}; {where}", href, model)
            case "saturated":
                detail = f"{count(row['running'])} of {count(row['max_num_seqs'])} sequences, "
                detail += (
                    f"KV cache {percent(row['kv_ratio'])}, {count(row['waiting'] or 0)} waiting inside it; {where}"
                )
                yield Item("warning", 3 - (row["use_ratio"] or 0), f"{name} is saturated", detail, href, model)


def _endpoints(table: list[dict[str, Any]], known: Known) -> Iterator[Item]:
    """Endpoints with too few ready instances, or with a full or nearly full queue."""
    for row in table:
        model, region, waiting, ready = row["model"], row["region"], row["waiting"] or 0, row["instances_ready"] or 0
        name, href = known.where(model, region), link("instances", model=model, region=region)
        least, bound = known.min_instances.get((model, region), 0), known.queue_bounds.get((model, region), 0)
        if ready < least:
            detail = f"fewer than its minimum; {count(waiting)} requests wait" if waiting else "fewer than its minimum"
            if by_whom := known.held.get((model, region)):
                detail += f"; held by {by_whom}"
            title = f"{ready} of {least} instances of {name} are ready"
            yield Item("warning" if ready else "critical", 0, title, detail, href, model)
        elif waiting and not ready:
            detail = f"{count(waiting)} requests wait for one"
            yield Item("critical", 0, f"No instance of {name} is ready", detail, href, model)
        if ready and bound and waiting >= QUEUE_WARNING * bound:
            severity, how = ("critical", "full") if waiting >= bound else ("warning", "nearly full")
            detail, oldest_s = f"{count(waiting)} of {count(bound)} waiting", row["oldest_wait_s"]
            if oldest_s:
                detail += f"; the oldest for {milliseconds(oldest_s * 1000)}"
            yield Item(severity, 0.5, f"The queue of {name} is {how}", detail, href, model)


def _rollouts(known: Known) -> Iterator[Item]:
    """Failed rollouts, until the next one or until the settings are reverted."""
    for model, region, message in known.rollouts:
        href = link("instances", model=model, region=region)
        yield Item("warning", 0.4, f"The rollout of {known.where(model, region)} failed", message, href, model)


def _flapping(known: Known) -> Iterator[Item]:
    """Endpoints with movers that work against each other."""
    for model, region, moved in known.flapping:
        href = link("moves", model=model, region=region)
        yield Item("warning", 0.6, f"Scaling of {known.where(model, region)} flaps", moved, href, model)


def _batches(known: Known) -> Iterator[Item]:
    """Batches that are likely to miss their deadline."""
    for severity, title, model in known.batches:
        yield Item(severity, 2, title, model, reverse("console:batches"), model)


def slo_level(row: Mapping[str, Any]) -> str:
    """Return the warning level of a tile's SLO: its worst class against the class's promise."""
    return level_of(row.get("slo_met_ratio"), row.get("slo_objective_ratio"), row.get("slo_burn"))


def _service(table: list[dict[str, Any]]) -> Iterator[Item]:
    """Service levels and errors by model (the fleet's own line gives no clue where to look)."""
    for row in table:
        model, met = row["scope"], row["slo_met_ratio"]
        if not model:
            continue
        href = link("overview", model=model)
        if severity := slo_level(row):
            detail = f"{percent_fine(met)} of the {goal(row['slo_objective_ratio'])} promised to {row['slo_class']}"
            detail += f" over 5 min, burn {times(row['slo_burn'])}"
            if row["ttft_p95_ms"] is not None:
                detail += f"; TTFT p95 {milliseconds(row['ttft_p95_ms'])}"
            yield Item(severity, 1 + met, f"{model} is below its SLO", detail, href, model)
        requests, errors = row["requests_per_s"] or 0, row["errors_per_s"] or 0
        if requests and (share := errors / requests) > ERRORS_WARNING:
            severity = "critical" if share > ERRORS_CRITICAL else "warning"
            yield Item(severity, 1, f"{model} has errors", f"{percent_fine(share)} of requests fail", href, model)


def _plans(models: tuple[str, ...]) -> Iterator[Item]:
    if models:
        title = "1 plan waits for approval" if len(models) == 1 else f"{len(models)} plans wait for approval"
        names = sorted(set(models))
        model = names[0] if len(names) == 1 else ""
        yield Item("warning", 4, title, f"for {', '.join(names)}", reverse("console:scaling"), model)


def _system(parts: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> Iterator[Item]:
    """Parts of the stack that are down, and jobs that are late or fail for another reason."""
    href = reverse("console:system")
    for part in parts:
        if part["state"] == "down":
            yield Item("critical", 0.2, f"{part_title(part['name'])}: down", part["detail"], href)
    bad = [job for job in jobs if job["state"] in ("late", "failing") and not job["quiet"]]
    if len(bad) > JOBS_NAMED:
        severity = "critical" if any(job["kind"] == "gateway" for job in bad) else "warning"
        names = ", ".join(job_title(job["name"]).lower() for job in bad)
        yield Item(severity, 0.3, f"{len(bad)} periodic jobs are late or failing", names, href)
        return
    for job in bad:
        severity = "critical" if job["kind"] == "gateway" else "warning"
        yield Item(severity, 0.3, f"{job_title(job['name'])}: {job['state']}", trouble(job), href)
