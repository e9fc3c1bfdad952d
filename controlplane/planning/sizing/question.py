"""The question of a capacity plan: growth, promises, GPU types with prices, and the loss of a region."""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

MAX_MONTHS: Final = 60
MAX_FACTOR: Final = 1000.0
ASSUMED_RESERVED, ASSUMED_SPOT = 0.6, 0.4
"""Prices of reserved and of spot GPUs as shares of on demand, where no price is kept: assumptions."""
Target = Annotated[FiniteFloat, Field(gt=0)] | None
Share = Annotated[FiniteFloat, Field(gt=0, le=1)]


class PromiseOf(BaseModel):
    """Promise of one SLO class; what is omitted stays as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_ms: Target = None
    itl_ms: Target = None
    e2e_ms: Target = None
    percentile: Annotated[FiniteFloat, Field(ge=50, le=99.99)] | None = None


class Question(BaseModel):
    """What the least fleet is sought for."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    growth: Literal["percent", "curve", "forecast"] = "percent"
    """Of demand: a percentage each month, a curve, or none beyond the newest forecasts."""
    percent: Annotated[FiniteFloat, Field(ge=-50, le=300)] = 10.0
    """Growth a month, in percent."""
    months: Annotated[int, Field(ge=0, le=MAX_MONTHS)] = 6
    """Months until the demand that is planned for."""
    curve: Annotated[list[Annotated[FiniteFloat, Field(gt=0, le=MAX_FACTOR)]], Field(max_length=MAX_MONTHS)] = []
    """Demand after 1, 2, 3 … months, as a multiple of today's."""
    promises: dict[str, PromiseOf] = {}
    """SLO classes that are planned for, by name; empty: all but the opportunistic ones, as they are."""
    gpus: dict[str, Annotated[FiniteFloat, Field(gt=0, le=1000)] | None] = {}
    """GPU types that may be bought, with the dollars of one an hour; null: the price that is kept. Empty: the fleet's."""
    survives_loss: bool = False
    """Whether promises must be kept without any one region (N-1)."""
    reserved: Share = ASSUMED_RESERVED
    """Price of reserved GPUs as a share of on demand."""
    spot: Share = ASSUMED_SPOT
    """The same of spot GPUs, for types without a spot price."""

    @field_validator("curve", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return curve_of(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_a_curve(self) -> "Question":
        if self.growth == "curve" and not self.curve:
            raise ValueError("curve: give the demand of at least one month, a line each, such as 1, 1.2")
        return self

    @property
    def over_months(self) -> int:
        return {"percent": self.months, "curve": len(self.curve), "forecast": 0}[self.growth]

    def factor(self, months: float) -> float:
        """Return demand after *months* as a multiple of today's."""
        if self.growth == "percent":
            return float((1 + self.percent / 100) ** months)
        points = [1.0, *self.curve] if self.growth == "curve" else [1.0]
        at = min(int(months), len(points) - 1)
        after = points[min(at + 1, len(points) - 1)]
        return points[at] + (months - at) * (after - points[at])

    def months_until(self, factor: float) -> float | None:
        """Return the months after which demand first passes *factor*; None if it does not, within `MAX_MONTHS`."""
        tenths = range(10 * (MAX_MONTHS if self.growth == "percent" else self.over_months) + 1)
        return next((at / 10 for at in tenths if self.factor(at / 10) > factor), None)


def curve_of(text: str) -> list[float]:
    """Return the factors of a curve: one line a month, its last cell. Raise ValueError naming the line."""
    factors = []
    for number, line in enumerate(text.strip().splitlines(), 1):
        try:
            factors.append(float(re.split(r"[,;\t ]+", line.strip())[-1]))
        except ValueError:
            if number > 1:  # the first may be a heading
                raise ValueError(f"line {number} is {line[:40]!r}, not a month and a factor such as 3, 1.5") from None
    return factors


def problems_of(error: Any) -> dict[str, str]:
    """Return what is wrong with a question, by field such as `gpus.b200-180gb`, in sentences; *error* is pydantic's."""
    said: dict[str, str] = {}
    for each in error.errors(include_url=False):
        message = str(each["msg"]).removeprefix("Value error, ")
        place = [str(step) for step in each["loc"]]
        if not place and ": " in message:
            place, message = [message.partition(": ")[0]], message.partition(": ")[2]
        said.setdefault(".".join(place), f"{message[:1].upper()}{message[1:].rstrip('.')}.")
    return said
