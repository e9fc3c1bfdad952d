"""Samples to learn from in an operator's file: one JSON object a line."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forecasting.lengths import LengthQuery, Sample
from forecasting.lengths.training.datasets import count_tokens


class Line(BaseModel):
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
                    line = Line.model_validate(json.loads(text))
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
