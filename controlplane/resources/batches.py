"""Batches, their progress and their deadlines."""

from datetime import datetime

from django.db.models import QuerySet

from controlplane.batches.models import Batch, BatchStatus
from controlplane.resources.requests import tenant_control
from controlplane.resources.resource import Column, Filter, Resource, Viewer, in_range, of_choice


def visible_batches(viewer: Viewer) -> QuerySet[Batch]:
    return Batch.objects.filter(tenant__in=viewer.tenants()).select_related("tenant")


BATCHES = Resource(
    name="batches",
    noun="batch",
    model=Batch,
    rows=visible_batches,
    columns=(
        Column("public_id", "Batch", draw="id"),
        Column("tenant", "Tenant", "tenant.name", type=str),
        Column("endpoint", "Endpoint"),
        Column("model", "Model", about="Empty where the lines name several."),
        Column("status", "State", type=BatchStatus),
        Column("total", "Lines", draw="count"),
        Column("completed", "Done", label="Lines done"),
        Column("failed", "Errors", draw="count"),
        Column("lines_left", type=int, about="Lines that are not answered yet."),
        Column("input_tokens", "Prompt tokens", draw="count"),
        Column("output_tokens", "Output tokens", draw="count"),
        Column("created_at", "Created (UTC)", draw="moment"),
        Column("expires_at", "Deadline (UTC)", draw="moment"),
        Column("lines_per_s", "Lines per second", type=float | None, about="At the measured pace; null while unknown."),
        Column(
            "expected_end_at", "Expected end (UTC)", label="ETA", type=datetime | None, about="At the measured pace."
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
