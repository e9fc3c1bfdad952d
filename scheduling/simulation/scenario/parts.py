"""Base of all tables of a scenario, and their number types."""

from collections.abc import Collection
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from scheduling.bundles import bundle_named

Positive = Annotated[FiniteFloat, Field(gt=0)]
AtLeast0 = Annotated[FiniteFloat, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


BundleName = Annotated[str, AfterValidator(lambda name: bundle_named(name).name)]


class ScenarioTable(BaseModel):
    """A table of the file: unknown keys and numbers written as text are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def one_of(value: str, names: Collection[str]) -> str:
    """Return *value* if it is one of *names*. Raise ValueError otherwise."""
    if value not in names:
        raise ValueError(f"must be one of {', '.join(names)}, not {value!r}")
    return value
