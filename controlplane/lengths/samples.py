"""Samples to learn from: rows of finished requests, and an operator's file with one JSON object a line."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

from django.db.models import QuerySet
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controlplane.lengths.models import LengthSample
from forecasting.lengths import TEXTLESS, LengthQuery, Sample
from forecasting.lengths.datasets import count_tokens
from forecasting.lengths.query import Conversation

MOST_TRAINED: Final = 50_000
MOST_SMALL: Final = 32767


def new_sample(
    query: LengthQuery, at: float, tenant_id: int, predicted_tokens: int, predicted_by: str, output_tokens: int
) -> LengthSample:
    """The row, not saved, of *query*, which ended *at* (epoch seconds); with all of its text and no features."""
    return LengthSample(
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


def query_of(row: LengthSample) -> LengthQuery:
    return LengthQuery(
        text=row.text,
        prompt_tokens=row.prompt_tokens,
        model=row.model,
        tenant=row.tenant.name,
        slo_class=row.slo_class,
        max_tokens=row.max_tokens,
        turns=row.turns,
        conversation=Conversation(*row.conversation) if row.conversation else None,
        tools=row.tools,
        features=bytes(row.features),
    )


def rows_for(kind: str) -> QuerySet[LengthSample]:
    """Samples that a model of *kind* can learn from, the newest first."""
    rows = LengthSample.objects.select_related("tenant").order_by("-pk")
    return rows if kind in TEXTLESS else rows.filter(tenant__keep_prompts=True).exclude(text="")


def stored(kind: str) -> list[Sample]:
    """Samples for *kind*, oldest first, less those that `max_tokens` cut."""
    samples = []
    for row in reversed(rows_for(kind)[:MOST_TRAINED]):
        if not row.tenant.keep_prompts:
            row.text = ""  # it may not be deleted yet
        if row.max_tokens is None or row.output_tokens < row.max_tokens:
            samples.append(Sample(query_of(row), row.output_tokens))
    return samples


class SampleLine(BaseModel):
    """One finished request."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Field(min_length=1)]
    output_tokens: Annotated[int, Field(ge=1)]
    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Left out: counted from the text (`count_tokens`)."""
    model: str = ""
    tenant: str = ""
    slo_class: str = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    def sample(self) -> Sample:
        prompt_tokens = self.prompt_tokens or max(1, count_tokens(self.text))
        query = LengthQuery(self.text, prompt_tokens, self.model, self.tenant, self.slo_class, self.max_tokens)
        return Sample(query, self.output_tokens)


def read_samples(path: Path) -> list[Sample]:
    """Samples in *path*, less those that `max_tokens` cut. Raises ValueError naming the line that cannot be read."""
    samples = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, 1):
                if not text.strip():
                    continue
                try:
                    line = SampleLine.model_validate(json.loads(text))
                except ValidationError as error:
                    first = error.errors()[0]
                    where = ".".join(map(str, first["loc"]))
                    raise ValueError(f"{path}, line {number}: {where}: {first['msg']}") from error
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: no JSON object") from error
                if line.max_tokens is None or line.output_tokens < line.max_tokens:
                    samples.append(line.sample())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return samples
