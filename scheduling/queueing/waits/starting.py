"""What instances that are on their way change of a wait: from when one is ready on it serves too, a whole batch at once."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from scheduling.queueing.waits.waiting_time import Wait

SPREAD: Final = 0.25
"""Standard deviation of the time until an instance is ready, as a share of it: starts are known by their median alone."""
NOT_KNOWN: Final = 1.0
"""The same of an instance that is ready and comes back when it does."""
OVERDUE: Final = 0.1
"""Of the time that a start has taken already, what is left of it at least: one that is overdue is not there yet."""


class Coming(NamedTuple):
    """An instance on its way."""

    in_s: float
    """Until it is ready."""
    tokens_per_s: float
    """Theta."""
    batch_tokens: float
    """Output of the requests that it begins at once (equation 11)."""
    spread: float = SPREAD
    """Standard deviation of *in_s*, as a share of it."""


def left_of_start_s(usual_s: float, passed_s: float) -> float:
    """Seconds until an instance is ready whose start began *passed_s* ago and usually takes *usual_s*."""
    return max(usual_s - passed_s, OVERDUE * passed_s)


def until_produced(tokens: Wait, tokens_per_s: float, coming: Sequence[Coming]) -> Wait:
    """When so many *tokens* (a normal distribution of them) are produced with *tokens_per_s* from now on and with what each
    of *coming* adds. Where nothing serves now it is when the first of those is ready, at least; there must be one."""
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
    """What *wait*, as it is with *tokens_per_s* alone, becomes by *coming*."""
    if not coming:
        return wait
    return until_produced(Wait(wait.mean_s * tokens_per_s, wait.variance_s2 * tokens_per_s**2), tokens_per_s, coming)
