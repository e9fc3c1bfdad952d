"""Scaling strategies: how many instances an endpoint should have. Decisions only; other code carries them out.

A strategy gets a view of every endpoint at its ticks and returns moves, each with its reason. The same object runs live
and in simulations (`scheduling.simulation.strategies`). `docs/papers/scaling.md` describes each.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from scheduling.scaling.assigned import Assigned
from scheduling.scaling.each import ByEndpoint, without_timers
from scheduling.scaling.endpoint import Advice, EndpointView, PlansFor, Strategy
from scheduling.scaling.floor import (
    FLOOR,
    Floor,
    FloorAlone,
    Floored,
    floor_moves,
    look_s,
)
from scheduling.scaling.pilothouse import Pilothouse
from scheduling.scaling.preserve import Hybrid, PreServe, Proactive
from scheduling.scaling.reactive import Reactive
from scheduling.scaling.sageserve import LongTermByUse, LongTermByUseAndGap, LongTermImmediate, Siloed, Unified

STRATEGIES: Final[dict[str, Callable[..., ByEndpoint]]] = {
    "siloed": Siloed,
    "reactive": Unified,
    "lt_i": LongTermImmediate,
    "lt_u": LongTermByUse,
    "lt_ua": LongTermByUseAndGap,
    "proactive": Proactive,
    "hybrid": Hybrid,
    "preserve": PreServe,
    "pilothouse": Pilothouse,
}
"""Strategies by the name that policies use; each is called with its parameters as keywords."""
NO_STRATEGY: Final = "floor"
"""Name in a scenario for an endpoint that has no strategy live: the floor alone."""


def make_strategy(name: str, parameters: Mapping[str, Any] | None = None) -> ByEndpoint:
    """Return the strategy *name*. Raise ValueError naming an invalid name or parameter, and the valid ones."""
    makers = {**STRATEGIES, NO_STRATEGY: FloorAlone}
    if name not in makers:
        raise ValueError(f"there is no strategy {name!r}; there is {', '.join(makers)}")
    made = makers[name]()
    known = [each.name for each in fields(made) if each.init and each.name != "memory"]
    given = dict(parameters or {})
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"{name} has no parameter {key!r}; it has {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}: {key} must be a number, not {value!r}")
    return makers[name](**{key: float(value) for key, value in given.items()})


__all__ = [
    "FLOOR",
    "NO_STRATEGY",
    "STRATEGIES",
    "Advice",
    "Assigned",
    "ByEndpoint",
    "EndpointView",
    "Floor",
    "FloorAlone",
    "Floored",
    "Hybrid",
    "LongTermByUse",
    "LongTermByUseAndGap",
    "LongTermImmediate",
    "Pilothouse",
    "PlansFor",
    "PreServe",
    "Proactive",
    "Reactive",
    "Siloed",
    "Strategy",
    "Unified",
    "floor_moves",
    "look_s",
    "make_strategy",
    "without_timers",
]
