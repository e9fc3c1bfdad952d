"""A list of changes: parsed from JSON, applied to a scenario, and described in words."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from controlplane.simulation.whatif.changes.base import Change, ChangeError, Values
from controlplane.simulation.whatif.changes.demand import ApplicationChange, DemandChange, SloChange, TenantChange
from controlplane.simulation.whatif.changes.policies import (
    FallbackChange,
    KeyChange,
    LengthsChange,
    PolicyChange,
    WeightsChange,
)
from controlplane.simulation.whatif.changes.supply import (
    BoundsChange,
    FailureChange,
    FleetChange,
    GpuChange,
    PriceChange,
)
from scheduling.simulation.scenario import Scenario, ScenarioError
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.staging import SOURCE
from scheduling.simulation.workload.edits import Edit

AnyChange = Annotated[
    PolicyChange
    | LengthsChange
    | FallbackChange
    | WeightsChange
    | KeyChange
    | GpuChange
    | FleetChange
    | PriceChange
    | BoundsChange
    | FailureChange
    | DemandChange
    | TenantChange
    | ApplicationChange
    | SloChange,
    Field(discriminator="kind"),
]
CHANGE: Final[TypeAdapter[AnyChange]] = TypeAdapter(AnyChange)
MAX_CHANGES: Final = 100
"""Maximum changes of one future."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A scenario after changes, and the changes to its requests."""

    scenario: Scenario
    values: Values
    changes: tuple[Change, ...] = field(default=())

    def edits(self, seed: int, horizon_s: float) -> list[Edit]:
        return [edit for change in self.changes for edit in change.edits(self.values, seed, horizon_s)]


def parsed(given: Sequence[Mapping[str, Any]], where: str = "changes") -> list[Change]:
    """Parse *given* changes. Raises ChangeError naming the first invalid field, such as `changes[1].region`."""
    if len(given) > MAX_CHANGES:
        raise ChangeError(where, f"has {len(given)} changes; {MAX_CHANGES} are the most")
    made: list[Change] = []
    for number, one in enumerate(given):
        try:
            made.append(CHANGE.validate_python(one))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            steps = [str(step) for step in first["loc"][1:]] or (["kind"] if "union" in first["type"] else [])
            message = str(first["msg"]).removeprefix("Value error, ")
            raise ChangeError(".".join([f"{where}[{number}]", *steps]), message) from None
    return made


def applied(start: Values, changes: Sequence[Change], *, asks: bool, shared: int = 0) -> Changed:
    """Apply *changes* in order to a copy of the scenario *start*. *asks* as in `check_scenario`.

    The first *shared* of them are the edits of all futures. Raises ChangeError naming the change and its field, or the
    scenario key that became invalid.
    """
    values = deepcopy(start)
    for number, change in enumerate(changes):
        try:
            change.apply(values)
        except ChangeError as error:
            where = f"edits[{number}]" if number < shared else f"changes[{number - shared}]"
            raise ChangeError(f"{where}.{error.field}", error.what) from None
    try:
        return Changed(check_scenario(values, SOURCE, asks=asks), values, tuple(changes))
    except ScenarioError as error:
        raise ChangeError("changes", f"{error.key}: {error.what}" if error.key else error.what) from None


def in_words(start: Values, changes: Sequence[Change]) -> list[str]:
    """Describe each of *changes*, against *start* after the ones before it."""
    values, words = deepcopy(start), []
    for change in changes:
        words.append(change.words(values))
        change.apply(values)
    return words
