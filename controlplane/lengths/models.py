"""Rows of output lengths: versions of the length model, samples to learn from, and errors by the minute."""

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from operator import add, attrgetter
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from django.conf import settings
from django.db import models
from django.utils import timezone

from controlplane.accounts.models import Tenant
from forecasting.lengths.query import Conversation, LengthQuery

MOST_SMALL: Final = 32767
"""Largest value of a PositiveSmallIntegerField."""


class VersionState(models.TextChoices):
    """States of a version. One is active at a time; a shadow predicts the same requests, is judged, and steers nothing."""

    SHADOW = "shadow", "Shadow"
    ACTIVE = "active", "Active"
    RETIRED = "retired", "Retired"
    REJECTED = "rejected", "Rejected"


class LengthVersion(models.Model):
    """One trained length model: its file, its origin, and its errors on samples held out of its training."""

    number = models.PositiveIntegerField(unique=True)
    kind = models.CharField(max_length=40, help_text="A name in `forecasting.lengths`, such as trees.")
    state = models.CharField(max_length=8, choices=VersionState.choices, default=VersionState.SHADOW, db_index=True)
    file = models.CharField(max_length=255, blank=True, help_text="Below the state folder; empty: the bundled one.")
    trained_at = models.DateTimeField(default=timezone.now)
    samples = models.PositiveIntegerField(default=0, help_text="That it was trained on.")
    measures = models.JSONField(
        default=dict, blank=True, help_text="On held-out samples: mae, acc_25, acc_50, acc_100, rank_correlation."
    )
    note = models.CharField(max_length=255, blank=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["-number"]
        constraints = [
            models.UniqueConstraint(
                fields=["state"], condition=models.Q(state="active"), name="one_active_length_version"
            )
        ]

    def __str__(self) -> str:
        """Return its name in `LengthMinute.predictor`."""
        return f"{self.kind} {self.number}"

    @staticmethod
    def folder() -> Path:
        return Path(settings.STATE_DIR) / "lengths"

    @property
    def path(self) -> str:
        """Path of its file; empty for the bundled one. Raises ValueError for a name outside of `folder`."""
        if not self.file:
            return ""
        path = (Path(settings.STATE_DIR) / self.file).resolve()
        if not path.is_relative_to(self.folder().resolve()):
            raise ValueError(f"The file of version {self.number} is not in {self.folder()}.")
        return str(path)


BUNDLED: Final = LengthVersion(pk=0, number=0, kind="trees")
"""The trees that ship with the package: they have no row, and answer while no version is active."""


class LengthSample(models.Model):
    """One finished request as a sample to learn from. Its text is there only if its tenant keeps prompts."""

    at = models.DateTimeField(default=timezone.now, db_index=True)
    model = models.CharField(max_length=160)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="+")
    slo_class = models.CharField(max_length=40)
    prompt_tokens = models.PositiveIntegerField()
    max_tokens = models.PositiveIntegerField(null=True)
    turns = models.PositiveSmallIntegerField(default=1)
    conversation = models.JSONField(
        null=True, help_text="Sizes of the messages before the last one; none where there are none, or it is not known."
    )
    tools = models.PositiveSmallIntegerField(default=0)
    features = models.BinaryField(
        blank=True, help_text="Of the prompt, by `forecasting.lengths`; no text can be read off."
    )
    text = models.TextField(blank=True)
    predicted_tokens = models.PositiveIntegerField()
    predicted_by = models.CharField(max_length=40, help_text="cache, prior, or a version.")
    output_tokens = models.PositiveIntegerField()

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["model", "-at"], name="length_sample_model")]

    def __str__(self) -> str:
        return f"{self.model}, {self.output_tokens} tokens"

    @classmethod
    def of(
        cls,
        query: LengthQuery,
        at: float,
        tenant_id: int,
        predicted_tokens: int,
        predicted_by: str,
        output_tokens: int,
    ) -> Self:
        """Return the unsaved row of *query*, which ended *at* (epoch seconds); with all of its text and no features."""
        return cls(
            at=datetime.fromtimestamp(at, UTC),
            model=query.model,
            tenant_id=tenant_id,
            slo_class=query.slo_class,
            prompt_tokens=query.prompt_tokens,
            max_tokens=query.max_tokens,
            turns=min(query.turns, MOST_SMALL),
            conversation=query.conversation and list(query.conversation),
            tools=min(query.tools, MOST_SMALL),
            text=query.text,
            predicted_tokens=predicted_tokens,
            predicted_by=predicted_by,
            output_tokens=output_tokens,
        )

    @property
    def query(self) -> LengthQuery:
        return LengthQuery(
            text=self.text,
            prompt_tokens=self.prompt_tokens,
            model=self.model,
            tenant=self.tenant.name,
            slo_class=self.slo_class,
            max_tokens=self.max_tokens,
            turns=self.turns,
            conversation=Conversation(*self.conversation) if self.conversation else None,
            tools=self.tools,
            features=bytes(self.features),
        )


@dataclass(slots=True)
class Measures:
    """Sums over requests, and the errors in tokens and ratios derived from them; those are None without requests."""

    requests: int = 0
    predicted_tokens: int = 0
    output_tokens: int = 0
    absolute_error_tokens: int = 0
    within_25: int = 0
    within_50: int = 0
    within_100: int = 0
    below_median: int = 0
    below_upper: int = 0
    late: int = 0

    NAMES: ClassVar[tuple[str, ...]]
    """Columns of `LengthMinute` that add up."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        return cls(**{name: row[name] or 0 for name in cls.NAMES})

    def __add__(self, other: "Measures") -> "Measures":
        return Measures(*map(add, sums_of(self), sums_of(other)))

    def _each(self, total: int) -> float | None:
        return total / self.requests if self.requests else None

    @property
    def mae(self) -> float | None:
        """Mean absolute error in tokens."""
        return self._each(self.absolute_error_tokens)

    @property
    def bias(self) -> float | None:
        """Mean of predicted minus real length, in tokens: above 0, predictions are too long."""
        return self._each(self.predicted_tokens - self.output_tokens)

    @property
    def mean_output(self) -> float | None:
        return self._each(self.output_tokens)

    @property
    def acc_25(self) -> float | None:
        """Share of requests off by at most 25 tokens (PreServe, 5.2.2)."""
        return self._each(self.within_25)

    @property
    def acc_50(self) -> float | None:
        return self._each(self.within_50)

    @property
    def acc_100(self) -> float | None:
        return self._each(self.within_100)

    @property
    def coverage_median(self) -> float | None:
        """Share of requests at most as long as the predicted median; 0.5 is right."""
        return self._each(self.below_median)

    @property
    def coverage_upper(self) -> float | None:
        """Share of requests at most as long as the predicted 0.9 quantile; 0.9 is right."""
        return self._each(self.below_upper)

    @property
    def late_ratio(self) -> float | None:
        """Share of a shadow's answers that requests would not have waited for."""
        return self._each(self.late)


Measures.NAMES = tuple(field.name for field in fields(Measures))
sums_of = attrgetter(*Measures.NAMES)


class LengthMinute(models.Model):
    """Errors of one predictor in one minute, for requests of (model, tenant)."""

    minute = models.DateTimeField(db_index=True)
    model = models.CharField(max_length=160)
    tenant = models.CharField(max_length=63)
    predictor = models.CharField(max_length=40, help_text="cache, prior, a version, or its shadow.")
    requests = models.PositiveIntegerField(default=0)
    predicted_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    absolute_error_tokens = models.PositiveBigIntegerField(default=0)
    within_25 = models.PositiveIntegerField(default=0)
    within_50 = models.PositiveIntegerField(default=0)
    within_100 = models.PositiveIntegerField(default=0)
    below_median = models.PositiveIntegerField(default=0, help_text="Real length at most the predicted median.")
    below_upper = models.PositiveIntegerField(default=0, help_text="Real length at most the predicted 0.9 quantile.")
    late = models.PositiveIntegerField(
        default=0, help_text="Answers of a shadow that would have come after the time that a request waits."
    )

    class Meta:
        ordering = ["-minute"]
        constraints = [
            models.UniqueConstraint(
                fields=["minute", "model", "tenant", "predictor"],
                name="one_length_row_per_minute_and_series",
            )
        ]

    def __str__(self) -> str:
        return f"{self.minute:%F %H:%M} {self.model} {self.tenant} {self.predictor}"
