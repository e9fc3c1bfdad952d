"""Which model serves a request: a public name shares its requests among models by weight, and a model has a fallback.

Live, the gateway chooses among weighted targets and the dispatcher falls back; a scenario shares its demand by the same
weights, and the simulator falls back by the same rule.
"""

from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b
from math import inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray


class ModelRule(StrEnum):
    """Why a request is served by another model than it names."""

    WEIGHTS = "weights"
    """It names weighted targets."""
    UNAVAILABLE = "unavailable"
    """No instance of its model accepts work, or its queue is full."""
    WAIT = "wait"
    """Its wait is above the bound of its model."""
    FAILURE = "failure"
    """Its model's instances failed it before its first token."""


RULES: Final = (None, *ModelRule)
"""Rules by number; 0: it is served by the model that it names."""


class Fallback(NamedTuple):
    """The model that serves requests where their own does not, and after which wait for their own."""

    model: str
    wait_s: float | None = None
    """None: however long they wait."""


def targets(weights: NDArray[np.float64], draws: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the index of the target for each row of *draws*, uniform in (0, 1), one for each of *weights*.

    Weighted rendezvous hashing (Thaler and Ravishankar, 1998; weighted by exponential clocks): the least -ln(draw) / weight
    wins. So a target has its share of rows, and a changed weight moves rows only to or from its target.
    """
    with np.errstate(divide="ignore"):
        chosen: NDArray[np.intp] = np.argmin(-np.log(draws) / weights, axis=1)
    return chosen


def target_of(weights: Mapping[str, float], sticky: str) -> str:
    """Return the target of all requests that share *sticky*. Raises ValueError if no weight is above 0."""
    names = sorted(name for name, weight in weights.items() if weight > 0)
    if not names:
        raise ValueError("no target has a weight above 0")
    digests = (blake2b(f"{name}\0{sticky}".encode(errors="surrogatepass"), digest_size=8).digest() for name in names)
    draws = [[(int.from_bytes(digest) + 0.5) / 2.0**64 for digest in digests]]
    return names[int(targets(np.array([weights[name] for name in names]), np.array(draws))[0])]


def fallback_rule(*, serves: bool, wait_s: float, most_wait_s: float | None, there_s: float) -> ModelRule | None:
    """Return why a request goes to the fallback of its model; None while it stays.

    *serves*: whether its model takes requests; *wait_s* its wait there, at most *most_wait_s* (None: however long);
    *there_s* the wait at the fallback, infinity if that does not serve.
    """
    if there_s == inf:
        return None
    if not serves:
        return ModelRule.UNAVAILABLE
    if most_wait_s is not None and wait_s > most_wait_s and there_s < wait_s:
        return ModelRule.WAIT
    return None
