"""The strategies by which a model may be scaled, as the policy library names them, made from a policy's row."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from controlplane.planning.titles import title_of
from controlplane.tunable import Tunable

if TYPE_CHECKING:
    from scheduling.scaling import ByEndpoint, PlansFor, Strategy


ONLY_SIMULATED = {
    "siloed": "siloed needs endpoints of their own for interactive and other work, and a fleet has one for each model in "
    "a region: it can be simulated, not run"
}
"""Strategies that no model can be scaled by, and why."""


def names() -> list[str]:
    """The strategies that a model may be scaled by, in the order in which they are listed."""
    from scheduling.scaling import STRATEGIES  # brings Numba, which few pages need

    return [name for name in STRATEGIES if name not in ONLY_SIMULATED]


def make(name: str, parameters: Mapping[str, Any], memory: Mapping[str, float] | None = None) -> "ByEndpoint":
    """The strategy *name* with *parameters*, remembering *memory*.

    Raises ValueError, in words to show, if there is no such strategy, it is only simulated, or the parameters do not fit.
    """
    from scheduling.scaling import make_strategy

    if name in ONLY_SIMULATED:
        raise ValueError(ONLY_SIMULATED[name])
    made = make_strategy(name, parameters)
    made.memory.update(memory or {})
    return made


def floored(strategy: "ByEndpoint", values: Tunable) -> "Strategy":
    """*strategy* with the floor of *values* under it, as simulations have it at its ticks; between them the gateway's looks
    alone. Without a floor where that is off.
    """
    from controlplane.tuning.rules import beneath
    from scheduling.scaling import Floored

    return Floored(strategy, beneath(values)) if values.FLOOR else strategy


def follows_plans(name: str) -> bool:
    """Whether the strategy *name* acts on plans; the others decide from live load alone."""
    from scheduling.scaling import STRATEGIES

    return name in STRATEGIES and STRATEGIES[name]().uses_advice


def plans_for(name: str) -> "PlansFor":
    """What of a forecast the strategy *name* would have plans made for; the mean where there is none of that name."""
    from scheduling.scaling import STRATEGIES, PlansFor

    return STRATEGIES[name]().plans_for if name in STRATEGIES else PlansFor()


def pace(name: str) -> str:
    """When the strategy *name* moves instances to a plan's targets, in words."""
    from scheduling.scaling import STRATEGIES

    return f"{title_of(name)} {STRATEGIES[name]().pace}" if name in STRATEGIES else ""
