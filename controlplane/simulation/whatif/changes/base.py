"""Base of all changes: a table of values, applied to a scenario and described in words."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from controlplane.planning.titles import title_of
from scheduling.simulation.workload.edits import Edit

Values = dict[str, Any]
"""Scenario tables by name, as in a file."""


class ChangeError(ValueError):
    """Invalid change; *field* names the error's location, such as `changes[1].region`."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field}: {what}" if field else what)
        self.field, self.what = field, what


class Change(BaseModel, ABC):
    """A change of one *kind*; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str

    def apply(self, values: Values) -> None:
        """Write the change into *values*, owned by the caller. Raises ChangeError naming the field."""

    def edits(self, values: Values, seed: int, horizon_s: float) -> Sequence[Edit]:
        """Return edits of the requests."""
        return ()

    @abstractmethod
    def words(self, before: Values) -> str:
        """Describe the change against the scenario *before* it."""


def known(field: str, name: str, names: Iterable[str], what: str) -> str:
    """Return *name* if it is one of *names*. Raises ChangeError."""
    names = list(names)
    if name not in names:
        raise ChangeError(field, f"there is no {what} {name!r}; there is {', '.join(names)}")
    return name


def models_words(models: Sequence[str], values: Values) -> str:
    """Describe *models* of the scenario: their names, their number, or all."""
    count = len(values["models"])
    if not models or len(models) == count:
        return "all models" if count > 1 else next(iter(values["models"]))
    return ", ".join(models) if len(models) <= 2 else f"{len(models)} models"


def clock(at_s: float) -> str:
    """Describe a time after the start."""
    minutes = round(at_s / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h" if not rest else f"{hours} h {rest} min"


def titled(name: str) -> str:
    return title_of(name) if name else "none"
