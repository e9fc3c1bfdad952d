"""System: the parts of the stack, its processes and its periodic jobs; whether Pilothouse itself is well."""

import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_safe

from controlplane import __version__
from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.lists import list_page
from controlplane.console.live.feed import feed
from controlplane.console.live.state import Source
from controlplane.fleet import shards
from controlplane.jobs.parts import part_title
from controlplane.jobs.record import job_title, trouble_of
from controlplane.resources.jobs import JOBS, PARTS, RELAYS, SHARDS
from forecasting import models_extra

# Shape, colour and word of each state.
JOB_MARKS = {
    "failing": ("failed", "Failing"),
    "late": ("saturated", "Late"),
    "never": ("provisioning", "Not run yet"),
    "ok": ("ready", "OK"),
}
PART_MARKS = {
    "down": ("failed", "Down"),
    "warning": ("saturated", "Warning"),
    "starting": ("loading", "Starting"),
    "standby": ("sleeping", "Standing by"),
    "off": ("stopped", "Off"),
    "ok": ("ready", "OK"),
}
RELAY_MARKS = {"serving": ("ready", "Serving"), "draining": ("draining", "Draining")}
RESTS_WITHOUT_EXTRA = (
    "PreServe's forecaster (mlstm), length models on encoders and reading a model's sizes from its config.json rest. "
    f"Run `{models_extra.COMMAND}` for torch and transformers; nothing has to be restarted."
)
RUN_BY = {"celery": "Celery", "gateway": "Gateway"}
WORST_FIRST = list(JOB_MARKS)
PACKAGES = ("django", "channels", "celery", "uvicorn", "aiohttp", "redis", "numpy", "numba")


def job_rows(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *jobs* in words, the worst first: then those that have failed, though they are well again."""
    rows = []
    for job in sorted(jobs, key=lambda job: (WORST_FIRST.index(job["state"]), not job["failures_total"], job["name"])):
        mark, word = JOB_MARKS[job["state"]]
        bad = job["state"] in ("late", "failing")
        rows.append(
            {
                **job,
                "bad": bad,
                "fine": not bad and not job["failures_total"],
                "mark": mark,
                "word": word,
                "title": job_title(job["name"]),
                "run_by": RUN_BY.get(job["kind"], job["kind"]),
                "trouble": trouble_of(job) if bad else job["last_error"],
            }
        )
    return rows


def models_extra_row() -> dict[str, Any]:
    """Return the extra as a part: whether it is installed in this process's environment, and what rests without it."""
    there = models_extra.is_installed()
    return {
        "title": "Models extra",
        "mark": PART_MARKS["ok" if there else "off"][0],
        "word": "Installed" if there else "Not installed",
        "detail": RESTS_WITHOUT_EXTRA if not there else "torch and transformers",
        "since": None,
        "restarts": None,
        "process_id": None,
    }


def package_versions() -> list[tuple[str, str]]:
    return [("Pilothouse", __version__), ("python", platform.python_version())] + [
        (name, version(name)) for name in PACKAGES
    ]


def part_row(part: dict[str, Any]) -> dict[str, Any]:
    mark, word = PART_MARKS[part["state"]]
    return {**part, "mark": mark, "word": word, "title": part_title(part["name"])}


def relay_row(relay: dict[str, Any]) -> dict[str, Any]:
    mark, word = RELAY_MARKS[relay["state"]]
    return {**relay, "mark": mark, "word": word}


def shard_row(row: Any) -> Any:
    """Return the owner *row* with the mark and the word of its state."""
    row.mark, row.word = ("ready", "Owned") if row.owned else ("failed", "No owner")
    if row.owned and row.moves:
        row.mark, row.word = "draining", "Handed over"
    return row


@require_safe
@fleet_role(Role.VIEWER)
def system(request: HttpRequest) -> HttpResponseBase:
    if not may(request, Role.OPERATOR):  # events say of it what a viewer's attention list points to
        return redirect(f"{reverse('console:events')}?q=monitor")
    state = feed.state()
    tables = state.system()
    parts, relays, owners = tables["parts"], state.tables["relays"], shards.owners()
    processes = {each["name"] for each in relays} | {row.name for row in owners if row.owned}
    is_split = len(processes) > 1 or len(owners) > 1 or any(row.contested for row in owners)
    jobs = job_rows(tables["jobs"])
    return list_page(
        request,
        JOBS,
        known=jobs,
        rows=[job for job in jobs if not job["fine"]],
        fine=[job for job in jobs if job["fine"]],
        parts=[part_row(part) for part in parts] + ([models_extra_row()] if parts else []),
        part_columns=PARTS.named(*PARTS.page),
        processes=sorted(processes),
        is_split=is_split,
        relays=[relay_row(relay) for relay in relays],
        relay_columns=RELAYS.named(*RELAYS.page),
        shards=[shard_row(row) for row in owners],
        shard_columns=SHARDS.named(*SHARDS.page),
        shard_actions=SHARDS.actions,
        supervised=any(part["restarts"] is not None and part["process_id"] for part in parts),
        own=state.source != Source.LIVE,
        owner=state.owner,
        gateway_up_s=time.time() - state.started_at if state.started_at else None,
        versions=package_versions(),
    )
