"""Effect of starting instances on a wait: once ready, each adds its throughput and starts a whole batch at once."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from scheduling.queueing.waits.waiting_time import Wait

SPREAD: Final = 0.25
"""Standard deviation of the time until an instance is ready, as a share of it: only the median of starts is known."""
NOT_KNOWN: Final = 1.0
"""The same for a ready instance that returns at an unknown time."""
OVERDUE: Final = 0.1
"""Least time left of a start, as a share of the time it has already taken: an overdue one is still not ready."""


class Coming(NamedTuple):
    """A starting instance."""

    in_s: float
    """Time until it is ready."""
    tokens_per_s: float
    """Theta."""
    batch_tokens: float
    """Output of the requests that it starts at once (equation 11)."""
    spread: float = SPREAD
    """Standard deviation of *in_s*, as a share of it."""


def left_of_start_s(usual_s: float, passed_s: float) -> float:
    """Return the seconds until an instance is ready, given a start *passed_s* ago that usually takes *usual_s*."""
    return max(usual_s - passed_s, OVERDUE * passed_s)


def until_produced(tokens: Wait, tokens_per_s: float, coming: Sequence[Coming]) -> Wait:
    """Return when *tokens* (normally distributed) are produced at *tokens_per_s* from now on, plus what each of
    *coming* adds.

    If nothing serves now, it is at the earliest when the first of those is ready; there must be one.
    """
    rate, time_s, left, spread_s = tokens_per_s, 0.0, tokens.mean_s, 0.0
    for one in sorted(coming):
        begun = rate * (one.in_s - time_s)
        if rate > 0.0 and left <= begun:
            break
        left = max(0.0, left - begun - one.batch_tokens)
        time_s, spread_s = one.in_s, one.in_s * one.spread
        rate += one.tokens_per_s
    return Wait(time_s + left / rate, tokens.variance_s2 / rate**2 + spread_s**2)


def sooner(wait: Wait, tokens_per_s: float, coming: Sequence[Coming]) -> Wait:
    """Return *wait*, estimated with *tokens_per_s* alone, with the effect of *coming*."""
    if not coming:
        return wait
    return until_produced(Wait(wait.mean_s * tokens_per_s, wait.variance_s2 * tokens_per_s**2), tokens_per_s, coming)
