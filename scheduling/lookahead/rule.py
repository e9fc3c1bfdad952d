"""How far ahead instances are looked at, and what use of their KV cache is too much then (PreServe 4.3.2 and 4.3.3)."""

from dataclasses import dataclass
from math import inf
from typing import Final

MOST_ITERATIONS: Final = 2048
"""Half of a map's horizon: it is true for as many (`maps.allocate`)."""
ITERATIONS: Final = 0
MEMORY_ABOVE: Final = 1
BETA: Final = 2
OVERLOAD_ABOVE: Final = 3
OVERLOAD_SHARE: Final = 4
"""Columns of a row of `FleetArrays.look_ahead`: the fields of `LookAheadRule`, in their order."""


@dataclass(frozen=True, slots=True)
class LookAheadRule:
    """Parameters of the routers that look ahead, and of what strategies see of the time to come."""

    iterations: int = 100
    """l: of an instance, from now on."""
    memory_above: float = 0.8
    """T_mem: KV use from which on a router counts a risk."""
    beta: float = 1.0
    """What a token beyond it weighs for the router `preserve`."""
    overload_above: float = 0.95
    """An instance with KV use above this,"""
    overload_share: float = 0.1
    """in more than this share of the iterations, is potentially overloaded."""

    def __post_init__(self) -> None:
        if not 1 <= self.iterations <= MOST_ITERATIONS:
            raise ValueError(f"iterations must be from 1 to {MOST_ITERATIONS}, not {self.iterations}")
        for name in ("memory_above", "overload_above"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be a number above 0, not {getattr(self, name)}")
        if not 0 <= self.beta < inf:
            raise ValueError(f"beta must be a number from 0 up, not {self.beta}")
        if not 0 <= self.overload_share <= 1:
            raise ValueError(f"overload_share must be from 0 to 1, not {self.overload_share}")
