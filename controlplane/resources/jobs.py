"""Periodic jobs, parts of the stack, relays and owners of shards, as the monitor and the summary report them."""

from typing import Any

from controlplane.accounts.models import Role
from controlplane.fleet import shards
from controlplane.fleet.models import Owner
from controlplane.jobs import monitor
from controlplane.jobs.parts import PartState
from controlplane.jobs.record import JobState
from controlplane.resources.resource import Column, Operation, Resource, Viewer

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
RELAYS = Resource(
    name="relays",
    noun="relay",
    model=None,
    columns=(
        Column("name", "Relay", draw="id"),
        Column("state", "State", draw=STATE),
        Column("active", "Requests", draw="count", tip="Between arrival and the end of the answer"),
        Column("streaming", "Streaming", draw="count", tip="Of these, those that get tokens"),
        Column("busy_ratio", "Busy", draw="percent", tip="Share of its time that its event loop computes"),
        Column("ledger_held", "Ledger rows held", draw="count", tip="Not yet in the database"),
        Column("started_at", "Up for", draw="since"),
        Column("seen_at", "Seen", draw="age"),
    ),
    page=("name", "state", "active", "streaming", "busy_ratio", "ledger_held", "started_at", "seen_at"),
)
"""Rows of the summary: REST has them in `/api/summary`."""
SHARDS = Resource(
    name="shards",
    noun="shard",
    model=Owner,
    operations=(
        Operation(
            "hand-over",
            shards.hand_over,
            "Another process that stands by takes it within seconds; requests for its models wait meanwhile.",
        ),
    ),
    rows=lambda _viewer: shards.owners(),
    least=Role.VIEWER,
    columns=(
        Column("id"),
        Column("role", "Shard"),
        Column("name", "Owner", draw="id"),
        Column("state", "State", draw=STATE, rest=False),
        Column("zone", "Zone of owner", about="Where its owner stands, which may decide for another zone."),
        Column("epoch", "Epoch", kind="num"),
        Column("address", "Address", kind="id wrap"),
        Column("owned", type=bool, about="Whether its owner holds it now."),
        Column(
            "stands_by",
            label="Stands by",
            source="contested",
            type=bool,
            draw="console/system/stands_by_cell.html",
            about="Whether another process would take it.",
        ),
        Column("moves"),
        Column("models", "Models", type=list[str], draw="console/system/models_cell.html", kind="wide"),
    ),
    page=("role", "models", "name", "zone", "state", "stands_by", "epoch", "address"),
    actions="console/system/shard_actions.html",
)
