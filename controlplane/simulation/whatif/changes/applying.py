"""A list of changes: parsed from JSON, applied to a scenario, and described in words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from controlplane.simulation.whatif.changes.supply import BoundsChange, FailureChange, GpuChange, PriceChange
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
MOST: Final = 100
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
    if len(given) > MOST:
        raise ChangeError(where, f"has {len(given)} changes; {MOST} are the most")
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


def diff_in_words(before: Values, after: Values) -> list[str]:
    """Return the differences of two scenarios, one line per key: `planner.epsilon: 0.8 to 0.9`."""
    return list(_differences(before, after, ""))


def _differences(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*before, *(each for each in after if each not in before)]:
            step = f"{path}.{name}" if path else str(name)
            if name not in after:
                yield f"{step}: {_short(before[name])} goes"
            elif name not in before:
                yield f"{step}: {_short(after[name])} is new"
            else:
                yield from _differences(before[name], after[name], step)
    elif isinstance(before, list) and isinstance(after, list):
        for number in range(max(len(before), len(after))):
            step = f"{path}[{number}]"
            if number >= len(after):
                yield f"{step}: {_short(before[number])} goes"
            elif number >= len(before):
                yield f"{step}: {_short(after[number])} is new"
            else:
                yield from _differences(before[number], after[number], step)
    elif before != after:
        yield f"{path}: {_short(before)} to {_short(after)}"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(each)}" for name, each in value.items()) or "nothing"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(_short, value)) or "nothing"
    return "none" if value is None else str(value)
