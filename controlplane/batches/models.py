"""Files that tenants upload, and batches of requests that are read from them (OpenAI's Files and Batch API)."""

import secrets
import time
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from django.core.files.storage import Storage, storages
from django.db import models
from django.utils import timezone

from controlplane.batches import progress
from controlplane.batches.progress import Pace


def file_storage() -> Storage:
    """The storage of files, by the setting `STORAGES`."""
    return storages["files"]


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


class Purpose(models.TextChoices):
    BATCH = "batch", "Batch input"
    BATCH_OUTPUT = "batch_output", "Batch output"


class StoredFile(models.Model):
    """A file of a tenant: the input of a batch, its output, or its errors."""

    id = models.CharField(primary_key=True, max_length=40, default=new_file_id, editable=False)
    tenant = models.ForeignKey("accounts.Tenant", on_delete=models.CASCADE, related_name="files")
    content = models.FileField(storage=file_storage, upload_to="", max_length=200)
    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=16, choices=Purpose.choices)
    size_bytes = models.BigIntegerField()
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at", "-id"]
        verbose_name = "file"
        indexes = [models.Index(fields=["tenant", "-created_at"], name="files_of_tenant")]

    def __str__(self) -> str:
        return f"{self.filename} ({self.id})"

    def to_dict(self) -> dict[str, Any]:
        """The file as OpenAI's API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": int(self.created_at.timestamp()),
            "expires_at": int(self.expires_at.timestamp()) if self.expires_at else None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class BatchStatus(models.TextChoices):
    """States of a batch, as OpenAI documents them."""

    VALIDATING = "validating", "Validating"
    FAILED = "failed", "Failed"
    IN_PROGRESS = "in_progress", "Running"
    FINALIZING = "finalizing", "Finalizing"
    COMPLETED = "completed", "Completed"
    EXPIRED = "expired", "Expired"
    CANCELLING = "cancelling", "Canceling"
    CANCELLED = "cancelled", "Canceled"


AT_RISK, LATE = "at_risk", "late"
SPARE_SHARE = 0.1
"""Of the time that a batch still takes: with less slack it is at risk."""
MARKS = {
    BatchStatus.FAILED: "failed",
    BatchStatus.EXPIRED: "failed",
    BatchStatus.COMPLETED: "ready",
    BatchStatus.CANCELLED: "stopped",
    BatchStatus.CANCELLING: "draining",
    AT_RISK: "saturated",
    LATE: "unreachable",
}
"""Marks on pages, by state or risk: that of the lifecycle state that has the same."""
ENDED = (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)
MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
"""States whose time OpenAI's API shows, as `<state>_at`."""


class Batch(models.Model):
    """Requests of one file, to be answered within the completion window."""

    public_id = models.CharField("batch", max_length=40, default=new_batch_id, unique=True, editable=False)
    """Its id in the API."""
    tenant = models.ForeignKey("accounts.Tenant", on_delete=models.CASCADE, related_name="batches")
    api_key = models.ForeignKey("accounts.ApiKey", on_delete=models.SET_NULL, null=True, related_name="+")
    # The ids stay after the files are deleted, as with OpenAI.
    input_file = models.ForeignKey(StoredFile, on_delete=models.DO_NOTHING, db_constraint=False, related_name="+")
    output_file = models.ForeignKey(
        StoredFile, on_delete=models.DO_NOTHING, db_constraint=False, null=True, related_name="+"
    )
    error_file = models.ForeignKey(
        StoredFile, on_delete=models.DO_NOTHING, db_constraint=False, null=True, related_name="+"
    )
    endpoint = models.CharField(max_length=40)
    completion_window = models.CharField(max_length=8)
    status = models.CharField(max_length=12, choices=BatchStatus.choices, default=BatchStatus.VALIDATING)
    ends_as = models.CharField(max_length=12, choices=BatchStatus.choices, blank=True)
    """State after `finalizing` or `cancelling`."""
    model = models.CharField(max_length=200, blank=True)
    """Of all lines; empty where they name several."""
    epoch = models.PositiveIntegerField(default=0)
    """How often a process took up its lines; answers of an earlier one are refused."""
    lines_read = models.PositiveIntegerField(default=0)
    total = models.PositiveIntegerField(default=0)
    completed = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    input_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    errors = models.JSONField(default=list)
    """Problems of validation: code, line, message, param."""
    metadata = models.JSONField(null=True)
    output_expires_after_s = models.PositiveIntegerField(null=True)
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField()
    """Deadline of its lines."""
    moments = models.JSONField(default=dict)
    """Epoch seconds at which it entered each state."""
    samples = models.JSONField(default=list)
    """Lines done at moments of its run (`progress.Sample`)."""

    class Meta:
        ordering = ["-created_at", "-id"]
        verbose_name_plural = "batches"
        indexes = [
            models.Index(fields=["tenant", "-created_at"], name="batches_of_tenant"),
            models.Index(fields=["status", "expires_at"], name="batches_by_status"),
        ]

    def __str__(self) -> str:
        return self.public_id

    @property
    def short_id(self) -> str:
        """Beginning of its id, by which pages name it."""
        return self.public_id[:14]

    @property
    def has_key(self) -> bool:
        """Whether the key that made it may still be used. Without it, it has no rights: not those of its whole tenant."""
        return self.api_key is not None and self.api_key.usable and self.tenant.active

    @property
    def ended_lines(self) -> int:
        return self.completed + self.failed

    @property
    def lines_left(self) -> int:
        return self.total - self.ended_lines

    @property
    def resumed_at(self) -> datetime | None:
        """When a new process took its lines up again; None if its first one still runs them."""
        moment = self.moments.get("resumed")
        return None if moment is None else datetime.fromtimestamp(moment, UTC)

    @property
    def can_cancel(self) -> bool:
        return self.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)

    @property
    def mark(self) -> str:
        return MARKS.get(self.risk or self.status, "loading")

    @property
    def share(self) -> float:
        """Share of its lines that are done."""
        return self.ended_lines / self.total if self.total else 0.0

    @cached_property
    def pace(self) -> Pace | None:
        """Measured pace while it runs; None while too few lines are done, and afterwards."""
        if self.status != BatchStatus.IN_PROGRESS:
            return None
        return progress.pace(self.samples, time.time(), self.ended_lines, self.total)

    @property
    def lines_per_s(self) -> float | None:
        return None if self.pace is None else self.pace.lines_per_s

    @property
    def expected_end_at(self) -> datetime | None:
        return None if self.pace is None else timezone.now() + timedelta(seconds=self.pace.left_s)

    @property
    def slack_s(self) -> float | None:
        """Seconds from its end, expected or actual, to the deadline; None while unknown, and if it ended otherwise."""
        if self.status == BatchStatus.COMPLETED:
            return self.expires_at.timestamp() - float(self.moments.get("finalizing") or self.moments["completed"])
        if self.pace is None:
            return None
        return (self.expires_at - timezone.now()).total_seconds() - self.pace.left_s

    @property
    def risk(self) -> str:
        """`LATE` if its deadline is missed at this pace, `AT_RISK` if a pace slower by `SPARE_SHARE` would miss it."""
        if self.pace is None or self.slack_s is None:
            return ""
        return LATE if self.slack_s < 0 else AT_RISK if self.slack_s < SPARE_SHARE * self.pace.left_s else ""

    @property
    def ended_at(self) -> datetime | None:
        moment = self.moments.get(self.status) if self.status in ENDED else None
        return None if moment is None else datetime.fromtimestamp(moment, UTC)

    def to_dict(self) -> dict[str, Any]:
        """The batch as OpenAI's API shows it."""
        return {
            "id": self.public_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(self.created_at.timestamp()),
            "expires_at": int(self.expires_at.timestamp()),
            **{f"{name}_at": self.moments.get(name) for name in MOMENTS},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": self.metadata,
        }


class BatchLine(models.Model):
    """One request of a batch. Its body stays in the input file; its answer is here until the output file is written."""

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="lines")
    number = models.PositiveIntegerField()
    """In the input file, from 1."""
    custom_id = models.CharField(max_length=512)
    model = models.CharField(max_length=200)
    offset = models.BigIntegerField()
    """Bytes before it in the input file."""
    size_bytes = models.PositiveIntegerField()
    answer = models.TextField(null=True)
    """Its line in the output or error file; null until it is answered."""
    succeeded = models.BooleanField(default=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["batch", "number"], name="one_line_per_number")]
        indexes = [
            models.Index(
                fields=["batch", "number"], condition=models.Q(answer__isnull=True), name="lines_without_answer"
            )
        ]

    def __str__(self) -> str:
        return f"line {self.number} of {self.batch}"
