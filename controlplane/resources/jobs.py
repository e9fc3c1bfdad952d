"""Periodic jobs and parts of the stack, as the monitor of a web process reports them."""

from typing import Any

from controlplane.accounts.models import Role
from controlplane.jobs import monitor
from controlplane.jobs.parts import PartState
from controlplane.jobs.record import JobState
from controlplane.resources.resource import Column, Resource, Viewer

TITLE = "console/system/title_cell.html"
STATE = "console/system/system_state.html"


def jobs(_viewer: Viewer) -> list[dict[str, Any]]:
    return list(monitor.report()["jobs"])


def parts(_viewer: Viewer) -> list[dict[str, Any]]:
    return list(monitor.report()["parts"])


JOBS = Resource(
    name="jobs",
    noun="job",
    title="Periodic jobs",
    model=None,
    rows=jobs,
    least=Role.OPERATOR,
    columns=(
        Column("name", "Job", type=str, draw=TITLE),
        Column(
            "kind", "Run by", type=str, draw="console/system/run_by_cell.html", about="Runner: `celery` or `gateway`."
        ),
        Column(
            "state",
            "State",
            type=JobState,
            draw=STATE,
            about="`late`: not done for two periods; `never`: has not run yet and is not late.",
        ),
        Column("period_s", "Period (s)", label="Every", type=float, draw="period"),
        Column(
            "last_success_at",
            "Last success (UTC)",
            label="Last done",
            type=float | None,
            draw="age",
            about="Epoch seconds, like all times here.",
        ),
        Column(
            "last_error",
            "Last error",
            label="What was wrong",
            type=str,
            draw="console/system/trouble_cell.html",
            kind="wide",
        ),
        Column("last_error_at", "Last error (UTC)", label="Last failed", type=float | None, draw="age"),
        Column("failures_in_a_row", "Failures in a row", label="Consecutive failures", type=int, draw="count"),
        Column("failures_total", "Failures", label="Failed", type=int, draw="count"),
        Column("last_duration_s", "Last duration (s)", label="Took", type=float | None, draw="seconds_fine"),
        Column("due_at", "Next due (UTC)", type=float | None, draw="age"),
    ),
    page=(
        *("name", "state", "kind", "period_s", "last_success_at", "last_duration_s", "failures_in_a_row"),
        *("failures_total", "last_error_at", "last_error"),
    ),
    caption="worst first",
    template="console/system/system.html",
    live="system",
    whole=500,
)
PARTS = Resource(
    name="parts",
    noun="part",
    title="Parts of the stack",
    model=None,
    rows=parts,
    least=Role.OPERATOR,
    columns=(
        Column("name", "Part", type=str, draw=TITLE),
        Column("state", "State", type=PartState, draw=STATE),
        Column("detail", "Detail", type=str, draw="wide"),
        Column(
            "since",
            "Since (UTC)",
            label="For",
            type=float | None,
            draw="since",
            about="Time of the last state change, epoch seconds.",
        ),
        Column("restarts", "Restarts", type=int | None, draw="count", about="Null where Pilothouse does not start it."),
        Column("process_id", "Process", type=int | None, kind="num id"),
    ),
    page=("name", "state", "since", "restarts", "process_id", "detail"),
)
