"""What is wrong now, which the alert rules watch: by their conditions it opens alerts, and nothing else is an alarm.

`read_known` finds what rows say, and reads what live numbers are compared with; `find` adds what the live tables say.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from django.db.models import Sum
from msgspec import Struct

from controlplane.batches.models import LATE
from controlplane.batches.selectors import running
from controlplane.fleet.lifecycle.gpu_health import ACTOR
from controlplane.fleet.lifecycle.restarts import CRASH_LOOP
from controlplane.fleet.minimums import Minimum, minimums
from controlplane.fleet.models import Deployment, Gpu, Node, Region
from controlplane.fleet.rollouts.selectors import failed
from controlplane.jobs.parts import part_title
from controlplane.jobs.record import job_title, trouble_of
from controlplane.planning.models import PlanStatus, ScalingPlan
from controlplane.planning.selectors import FLAPPING_OVER, flapping

ERRORS_WARNING, ERRORS_CRITICAL = 0.001, 0.01
QUEUE_WARNING: Final = 0.8
"""Of the endpoint's bound."""
AGENT_SILENT: Final = timedelta(minutes=5)
"""After which the agent of a node, which reports every minute, is missed."""
NONE: Final = Minimum(0)
Table = Sequence[Mapping[str, Any]]


class Problem(Struct, frozen=True):
    """One thing that is wrong.

    *rank* orders problems of one severity, lowest first. Without a *model* it concerns the fleet. *since* is None where only
    the alert itself knows it. *href* is written out: a process that serves no page need not load the URL configuration.
    """

    kind: str  # instance, gpu, region, endpoint, queue, slo, errors, rollout, flapping, plan, batch, part, job, budget
    subject: str
    severity: str  # critical, warning
    title: str
    words: str = ""
    href: str = ""
    model: str = ""
    rank: float = 0.0
    since: datetime | None = None
    value: float | None = None
    causes: tuple[tuple[str, float, str], ...] = ()
    """Words, share and page of each: what requests waited for, where it is about requests."""


class Known(Struct, frozen=True):
    """What rows say; endpoints by (model, region)."""

    problems: tuple[Problem, ...] = ()
    queue_bounds: Mapping[tuple[str, str], int] = {}
    minimums: Mapping[tuple[str, str], Minimum] = {}
    titles: Mapping[str, str] = {}
    """Of regions, by name."""
    dark: frozenset[str] = frozenset()
    """Regions that are dark: one problem each, not one of each instance and endpoint there."""

    def where(self, model: str, region: str) -> str:
        return f"{model} in {self.titles.get(region, region)}"


def read_known(now: datetime) -> Known:
    """Read the rows that say what is wrong, and those that live numbers are compared with."""
    titles = dict(Region.objects.values_list("name", "title"))
    active = Deployment.objects.filter(active=True, model__active=True, region__active=True)
    bounds = active.values_list("model__name", "region__name").annotate(Sum("queue_bound")).order_by()
    return Known(
        tuple(_of_rows(now, titles)),
        {(model, region): bound for model, region, bound in bounds},
        minimums(),
        titles,
        frozenset(Region.objects.exclude(dark_since=None).values_list("name", flat=True)),
    )


def _of_rows(now: datetime, titles: Mapping[str, str]) -> Iterator[Problem]:
    """Plans that wait, movers that work against each other, failed GPUs and rollouts, silent agents, and batches that may
    miss their deadline.
    """
    plans = ScalingPlan.objects.filter(status=PlanStatus.ADVICE, valid_until__gt=now).select_related("model")
    for plan in plans.order_by("pk"):
        model, href = plan.model.name, f"/scaling/?plan={plan.pk}#approve-plans-{plan.pk}"
        title = f"A plan for {model} waits for approval"
        words = f"The plan of {plan.strategy} can be approved until {plan.valid_until:%H:%M} UTC"
        yield Problem("plan", model, "warning", title, words, href, model, 4, plan.made_at)
    for each in flapping(now):
        by = ", ".join(f"{who.lower()} +{out} -{back}" for who, (out, back) in sorted(each.by.items()))
        words = f"{each.reversals} reversals in {span(FLAPPING_OVER.total_seconds())}: {by}"
        href = _link("/scaling/", each.model)
        title = f"Scaling of {each.model} in {titles.get(each.region, each.region)} flaps"
        subject, count = f"{each.model} in {each.region}", float(each.reversals)
        yield Problem("flapping", subject, "warning", title, words, href, each.model, 0.6, value=count)
    for gpu in Gpu.objects.filter(cordoned__startswith=ACTOR).select_related("node"):
        href = f"/fleet/nodes/{gpu.node}/"
        yield Problem("gpu", str(gpu), "critical", f"{gpu} failed", f"cordoned by {gpu.cordoned}", href, rank=0.7)
    for place in Region.objects.exclude(dark_since=None):
        title, words = f"{place} is dark", "its instances are silent; other regions serve its requests"
        yield Problem(
            "region",
            place.name,
            "critical",
            title,
            words,
            f"/fleet/?region={place.name}",
            rank=0.1,
            since=place.dark_since,
        )
    silent = Node.objects.filter(active=True, reported_at__lt=now - AGENT_SILENT).exclude(host="")
    for node in silent.order_by("name"):
        title = f"The agent of {node} does not report"
        words = f"{node.host}: starts, stops and pulls wait there"
        href = f"/fleet/nodes/{node}/"
        yield Problem("part", f"node {node}", "critical", title, words, href, rank=0.2, since=node.reported_at)
    for node in Node.objects.exclude(ray={}).order_by("name"):
        if words := node.ray.get("error") or ("Ray has lost its machines" if node.ray.get("lost") else ""):
            title = f"Ray does not answer for {node}" if node.ray.get("error") else f"{node} is lost"
            href = f"/fleet/nodes/{node}/"
            yield Problem("part", f"node {node}", "critical", title, words, href, rank=0.2, since=node.reported_at)
    for status in failed():
        if status.rollout is not None:
            model, region = status.deployment.model.name, status.deployment.region.name
            title = f"The rollout of {model} in {titles.get(region, region)} failed"
            href = _link("/fleet/", model, region)
            subject = f"{model} in {region}"
            yield Problem("rollout", subject, "warning", title, status.rollout.message, href, model, 0.4)
    for batch in running():
        if batch.risk:
            slack, late = span(abs(batch.slack_s or 0.0)), batch.risk == LATE
            title = (
                f"{batch.short_id} will be late by {slack}"
                if late
                else f"{batch.short_id} is at risk: {slack} of slack"
            )
            severity = "critical" if late else "warning"
            yield Problem("batch", batch.short_id, severity, title, batch.model, "/batches/", batch.model, 2)


def find(tables: Mapping[str, Table], known: Known) -> tuple[Problem, ...]:
    """Return what *tables* (of the live state) and *known* say is wrong, worst first."""
    found = [
        *known.problems,
        *_instances(tables.get("instances", ()), known),
        *_endpoints(tables.get("endpoints", ()), known),
        *_errors(tables.get("tiles", ())),
        *_system(tables.get("parts", ()), tables.get("jobs", ())),
    ]
    found.sort(key=lambda each: (each.severity != "critical", each.rank, each.title))
    return tuple(found)


def _instances(table: Table, known: Known) -> Iterator[Problem]:
    for row in table:
        name, where, href = row["name"], known.where(row["model"], row["region"]), f"/fleet/instances/{row['name']}/"
        severity, failures = "critical", row.get("failures") or 0
        match row["status"]:
            case "failed" if failures >= CRASH_LOOP:
                rank, how = 0.8, "is in a crash loop"
                words = f"failed {failures} times in a row, the next start waits longer; {where}"
            case "failed":
                rank, how, words = 1, "failed", where
            case "unreachable" if row["region"] in known.dark:
                continue
            case "unreachable":
                rank, how, words = 2, "does not answer", where
            case "resting":
                severity, rank, how, words = "warning", 1, "takes no requests", f"{row['trouble']}; {where}"
            case _:
                continue
        yield Problem("instance", name, severity, f"{name} {how}", words, href, row["model"], rank)


def _endpoints(table: Table, known: Known) -> Iterator[Problem]:
    """Endpoints with too few ready instances, but for maintenance, or with a full or nearly full queue."""
    for row in table:
        model, region, waiting, ready = row["model"], row["region"], row["waiting"] or 0, row["instances_ready"] or 0
        name, subject, href = known.where(model, region), f"{model} in {region}", _link("/fleet/", model, region)
        least, bound = known.minimums.get((model, region), NONE), known.queue_bounds.get((model, region), 0)
        if region in known.dark:
            continue
        if title := least.short(ready):
            words = "fewer than its minimum" + (f"; {waiting:,} requests wait" if waiting else "") + least.why
            yield Problem("endpoint", subject, "warning" if ready else "critical", title, words, href, model)
        elif waiting and not ready:
            title, words = f"No instance of {name} is ready", f"{waiting:,} requests wait for one{least.why}"
            yield Problem("endpoint", subject, "critical", title, words, href, model)
        if ready and bound and waiting >= QUEUE_WARNING * bound:
            severity, how = ("critical", "full") if waiting >= bound else ("warning", "nearly full")
            words = f"{waiting:,} of {bound:,} waiting"
            if row["oldest_wait_s"]:
                words += f"; the oldest for {span(row['oldest_wait_s'])}"
            yield Problem(
                "queue", f"queue of {subject}", severity, f"The queue of {name} is {how}", words, href, model, 0.5
            )


def _errors(table: Table) -> Iterator[Problem]:
    """Models whose requests fail (the fleet's own line gives no clue where to look)."""
    for row in table:
        model, share = row["scope"], row["failed_ratio"] or 0.0
        if model and share > ERRORS_WARNING:
            severity = "critical" if share > ERRORS_CRITICAL else "warning"
            href = f"/requests/?{urlencode({'model': model, 'outcome': 'failed'})}"
            yield Problem(
                "errors", model, severity, f"{model} has errors", f"{share:.1%} of requests fail", href, model, 1
            )


def _system(parts: Table, jobs: Table) -> Iterator[Problem]:
    """Parts of the stack that are down, and jobs that are late or fail for another reason."""
    for part in parts:
        if part["state"] == "down":
            title = f"{part_title(part['name'])}: down"
            yield Problem("part", f"part {part['name']}", "critical", title, part["detail"], "/system/", rank=0.2)
    for job in jobs:
        if job["state"] in ("late", "failing") and not job["quiet"]:
            severity = "critical" if job["kind"] == "gateway" else "warning"
            title = f"{job_title(job['name'])}: {job['state']}"
            yield Problem("job", f"job {job['name']}", severity, title, trouble_of(job), "/system/", rank=0.3)


def _link(page: str, model: str, region: str = "") -> str:
    """Return the address of a console page with its filters set."""
    return f"{page}?{urlencode({'model': model} | ({'region': region} if region else {}))}"


def span(seconds: float) -> str:
    """Return a time in its largest unit with two digits at least, such as `45 s` or `90 min`."""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s or (seconds >= unit_s and seconds % unit_s == 0):
            return f"{round(seconds / unit_s, 1):g} {unit}"
    return f"{round(seconds, 1):g} s"
