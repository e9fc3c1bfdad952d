"""Batches, their progress and their deadlines."""

from django.db.models import QuerySet

from controlplane.batches.models import Batch, BatchStatus
from controlplane.resources.filters import Select, every
from controlplane.resources.resource import Column, Filter, Resource, Viewer, in_range


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
        Column("model", "Model", draw="console/batches/model_cell.html", about="Empty where the lines name several."),
        Column("status", "State", type=BatchStatus, draw="console/batches/status_cell.html"),
        Column("total", "Lines", draw="count"),
        Column("completed", "Done", draw="console/batches/progress_cell.html"),
        Column("failed", "Errors", draw="count"),
        Column("input_tokens", "Prompt tokens", draw="count"),
        Column("output_tokens", "Output tokens", draw="count"),
        Column("created_at", "Created (UTC)", draw="moment"),
        Column("expires_at", "Deadline (UTC)", draw="moment"),
        Column(
            "slack_s",
            "Slack (s)",
            draw="console/batches/slack_cell.html",
            type=float | None,
            about=(
                "Seconds between the expected end, at the pace since the start, and the deadline; null while unknown."
            ),
        ),
    ),
    filters=(
        Filter("status", type=BatchStatus, control=Select("status", "State", every("states", BatchStatus.choices))),
        Filter("tenant", "tenant__name"),
        *in_range("created_at", "Created", 24, 168),
    ),
    page=(
        *("public_id", "tenant", "model", "status", "completed", "failed"),
        *("created_at", "expires_at", "slack_s", "output_tokens"),
    ),
    template="console/batches/batches.html",
    actions="console/batches/actions.html",
    empty="Upload a JSONL file and create a batch with the OpenAI SDK:",
    live="overview,events",
    refresh_s=2,
)
