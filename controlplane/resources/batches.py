"""Batches, their progress and their deadlines."""

from datetime import datetime

from django.db.models import QuerySet
from pydantic import BaseModel, Field

from controlplane.accounts.models import User
from controlplane.batches import services
from controlplane.batches.models import Batch, BatchStatus
from controlplane.resources.requests import tenant_control
from controlplane.resources.resource import Column, Filter, Operation, Resource, Viewer, in_range, of_choice


def visible_batches(viewer: Viewer) -> QuerySet[Batch]:
    return Batch.objects.filter(tenant__in=viewer.tenants()).select_related("tenant")


class SpeedUpIn(BaseModel):
    within_s: float | None = Field(gt=0, description="Seconds until its last line is to be done; null undoes it.")


def speed_up(batch: Batch, user: User, reason: str, within_s: float | None) -> Batch:
    if within_s is None:
        services.undo_speed_up(batch, user, reason)
    else:
        services.speed_up(batch, within_s, user, reason)
    return batch


BATCHES = Resource(
    name="batches",
    noun="batch",
    model=Batch,
    rows=visible_batches,
    operations=(
        Operation(
            "speed-up",
            speed_up,
            "Its lines are released above the marks of use, as fast as an earlier deadline needs.",
            takes=SpeedUpIn,
            admin=False,
        ),
    ),
    columns=(
        Column("public_id", "Batch", draw="id"),
        Column("tenant", "Tenant", "tenant.name", type=str),
        Column("endpoint", "Endpoint"),
        Column("model", "Model", about="Empty where the lines name several."),
        Column("status", "State", type=BatchStatus),
        Column("total", "Lines", draw="count"),
        Column("completed", "Done", label="Lines done"),
        Column("failed", "Errors", draw="count"),
        Column("input_tokens", "Prompt tokens", draw="count"),
        Column("output_tokens", "Output tokens", draw="count"),
        Column("created_at", "Created (UTC)", draw="moment"),
        Column("expires_at", "Deadline (UTC)", draw="moment"),
        Column(
            "urgent_by", "Sped up to (UTC)", draw="moment", about="Deadline that it was brought forward to; null: not."
        ),
        Column("lines_per_s", "Lines per second", type=float | None, about="At the measured pace; null while unknown."),
        Column(
            "expected_end_at", "Expected end (UTC)", label="ETA", type=datetime | None, about="At the measured pace."
        ),
        Column(
            "expected_end_margin_s",
            "Expected end, plus or minus (s)",
            type=float | None,
            about="Half of the 80% interval of the expected end.",
        ),
        Column(
            "slack_s",
            "Slack (s)",
            type=float | None,
            about="Seconds from the end, expected or actual, to the deadline; null while unknown.",
        ),
        Column("risk", "Risk", type=str, about="`late`, `at_risk` or empty."),
    ),
    filters=(
        of_choice("status", BatchStatus, "states", "State"),
        Filter("tenant", "tenant__name", control=tenant_control),
        *in_range("created_at", "Created", 24, 168),
    ),
    page=("public_id", "model", "status", "completed", "failed", "expected_end_at", "expires_at", "slack_s"),
    caption="Least slack first, ended ones below",
    row_template="console/batches/row.html",
    template="console/batches/batches.html",
    actions="console/batches/actions.html",
    empty="Upload a JSONL file and create a batch with the OpenAI SDK:",
    live="batches",
    refresh_s=5,
)
