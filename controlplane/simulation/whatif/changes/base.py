"""Base of all changes: a table of values, applied to a scenario's and put into a sentence."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from controlplane.planning.titles import title_of
from scheduling.simulation.workload.edits import Edit

Values = dict[str, Any]
"""A scenario as a file has it: tables by name."""


class ChangeError(ValueError):
    """A change cannot be: *field* names what is wrong with it, such as `changes[1].region`."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field}: {what}" if field else what)
        self.field, self.what = field, what


class Change(BaseModel, ABC):
    """*kind* says which; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str

    def apply(self, values: Values) -> None:
        """Write it into *values*, which are the caller's own. Raises ChangeError naming the field."""

    def edits(self, values: Values, seed: int, horizon_s: float) -> Sequence[Edit]:
        """Edits of the requests themselves."""
        return ()

    @abstractmethod
    def words(self, before: Values) -> str:
        """The change in plain words, against the scenario *before* it."""


def known(field: str, name: str, names: Iterable[str], what: str) -> str:
    """*name* if it is one of *names*. Raises ChangeError."""
    names = list(names)
    if name not in names:
        raise ChangeError(field, f"there is no {what} {name!r}; there is {', '.join(names)}")
    return name


def region_title(name: str) -> str:
    """`us-east` as "US East"."""
    return " ".join(word.upper() if len(word) <= 2 else word.capitalize() for word in name.replace("_", "-").split("-"))


def models_words(models: Sequence[str], values: Values) -> str:
    """*models* of the scenario in words: those named, how many, or all."""
    count = len(values["models"])
    if not models or len(models) == count:
        return "all models" if count > 1 else next(iter(values["models"]))
    return ", ".join(models) if len(models) <= 2 else f"{len(models)} models"


def clock(at_s: float) -> str:
    """A time after the start in words."""
    minutes = round(at_s / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h" if not rest else f"{hours} h {rest} min"


def titled(name: str) -> str:
    return title_of(name) if name else "none"
