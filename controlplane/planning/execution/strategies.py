"""Scaling strategies of models, named as in the policy library and made from policy rows."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from controlplane.planning.titles import title_of
from controlplane.tunable import Tunable

if TYPE_CHECKING:
    from scheduling.scaling import ByEndpoint, Floor, PlansFor, Strategy


ONLY_SIMULATED = {
    "siloed": "siloed needs separate endpoints for interactive and other work, and a fleet has one for each model in "
    "a region: it can be simulated, not run"
}
"""Strategies unavailable for live scaling, with the reason."""


MARKS: Final = {
    "out_above": "SCALE_OUT_ABOVE",
    "in_below": "SCALE_IN_BELOW",
    "cooldown_s": "SCALE_COOLDOWN_S",
    "patience_s": "SCALE_EASE_S",
}
"""Mark settings by strategy parameter, used where a policy gives no value."""
WITHOUT: Final = {"pilothouse": ("out_above",)}
"""Marks that a strategy does not read from the settings."""


def names() -> list[str]:
    """Return the strategies a model may be scaled by, in display order."""
    from scheduling.scaling import STRATEGIES  # loads Numba, which few pages need

    return [name for name in STRATEGIES if name not in ONLY_SIMULATED]


def make(
    name: str, parameters: Mapping[str, Any], values: Tunable, memory: Mapping[str, float] | None = None
) -> "ByEndpoint":
    """Return the strategy *name* with *parameters*, else the marks of *values*, and the given *memory*.

    Raises ValueError, with a displayable message, if it is unknown or only simulated, or the parameters do not fit.
    """
    from scheduling.scaling import make_strategy

    if name in ONLY_SIMULATED:
        raise ValueError(ONLY_SIMULATED[name])
    made = make_strategy(name, {**marks(name, values), **parameters})
    made.memory.update(memory or {})
    return made


def marks(name: str, values: Tunable) -> dict[str, float]:
    """Return the parameters of strategy *name* that *values* have a mark for."""
    return {
        parameter: getattr(values, setting)
        for parameter, setting in MARKS.items()
        if parameter not in WITHOUT.get(name, ())
    }


def check_marks(setting: str, values_of: Callable[[str], Tunable]) -> None:
    """Raise ValueError if *setting* is a mark that conflicts with the parameters of a model's policy."""
    from controlplane.planning.models import ScalingPolicy

    if setting not in MARKS.values():
        return
    for model, name, parameters in ScalingPolicy.objects.values_list("model__name", "strategy", "parameters"):
        try:
            make(name, parameters, values_of(model))
        except ValueError as error:
            raise ValueError(f"{model} is scaled by {title_of(name)} with its own parameters: {error}") from error


def floored(strategy: "ByEndpoint", values: Tunable) -> "Strategy":
    """Return *strategy* with the floor of *values* beneath it; unchanged where the floor is off."""
    from scheduling.scaling import Floored

    return Floored(strategy, floor(values)) if values.FLOOR else strategy


def floor(values: Tunable) -> "Floor":
    """Return the parameters of the floor in *values*."""
    from scheduling.scaling import Floor

    return Floor(cooldown_s=values.SCALE_COOLDOWN_S)


def follows_plans(name: str) -> bool:
    """Return whether the strategy *name* acts on plans; the others use live load only."""
    from scheduling.scaling import STRATEGIES

    return name in STRATEGIES and STRATEGIES[name]().uses_advice


def plans_for(name: str) -> "PlansFor":
    """Return the forecast level that the strategy *name* plans for; the mean for unknown names."""
    from scheduling.scaling import STRATEGIES, PlansFor

    return STRATEGIES[name]().plans_for if name in STRATEGIES else PlansFor()


def pace(name: str, values: Tunable) -> str:
    """Describe when the strategy *name* with the marks of *values* moves instances to a plan's targets."""
    return f"{title_of(name)} {make(name, {}, values).pace}" if name in names() else ""
