"""A past for the demo: minutes as its traffic would have left them in the ledger, had it run before.

Drawn from the very rates, bursts and lengths of `waves`, so that what comes next goes on where they end. Nobody asked for
these tokens and nothing served them: the rows are marked as generated.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from controlplane.gateway.models import MinuteRow
from controlplane.gateway.replay.waves import BURST_EVERY_S, BURST_FACTOR, BURST_S, Stream

MINUTE_S = 60
STEP_S = 10  # within which the rate is taken as constant; a burst is a whole number of them
STEPS = MINUTE_S // STEP_S


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a request and coefficients of variation, as the demo's instances count them."""

    prompt_tokens: float
    prompt_variation: float
    output_tokens: float
    output_variation: float


LENGTHS = {
    "interactive": {
        2_048: Lengths(255, 1.4, 148, 0.9),
        4_096: Lengths(257, 1.4, 149, 0.9),
        131_072: Lengths(2_020, 1.5, 342, 1.4),
    },
    "non-interactive": {
        2_048: Lengths(1_099, 0.4, 281, 0.65),
        4_096: Lengths(1_283, 0.6, 333, 0.9),
        131_072: Lengths(10_512, 0.7, 2_051, 1.65),
    },
    "opportunistic": {
        2_048: Lengths(893, 0.5, 333, 0.6),
        4_096: Lengths(976, 0.65, 400, 0.8),
        131_072: Lengths(7_824, 0.7, 2_261, 1.3),
    },
}
"""By SLO class and context. Less than what is asked for, and not in proportion: instructions have lengths of their own.

Means of 4,000 requests each of `waves`, as emulated instances answer them; a test draws them again.
"""


def minutes(sources: Sequence[Stream], begin: datetime, count: int, seed: int) -> Iterator[MinuteRow]:
    """Rows, not saved, of the *count* minutes from *begin* on (a whole minute), for those with any request."""
    for number, stream in enumerate(sources):
        yield from _minutes(stream, int(begin.timestamp()), count, np.random.default_rng([seed, number]))


def lengths(slo_class: str, context_tokens: int) -> Lengths:
    """Those of the nearest context, by ratio."""
    known = LENGTHS[slo_class]
    return known[min(known, key=lambda context: abs(math.log(context / context_tokens)))]


def _minutes(stream: Stream, begin_s: int, count: int, draw: np.random.Generator) -> Iterator[MinuteRow]:
    steps = count * STEPS
    middles = begin_s + STEP_S * (np.arange(steps) + 0.5)
    rates = np.array([stream.rate_per_s(moment, burst=False) for moment in middles.tolist()])
    rates[_bursts(steps, draw)] *= BURST_FACTOR
    requests = draw.poisson(rates * STEP_S).reshape(count, STEPS).sum(axis=1)
    of_minute = np.repeat(np.arange(count), requests)
    of = lengths(stream.slo_class, stream.context_tokens)
    most = stream.context_tokens
    prompts = _tokens(of.prompt_tokens, of.prompt_variation, most, of_minute, count, draw)
    outputs = _tokens(of.output_tokens, of.output_variation, most // 3, of_minute, count, draw)
    for minute in np.flatnonzero(requests).tolist():
        yield MinuteRow(
            minute=datetime.fromtimestamp(begin_s + MINUTE_S * minute, UTC),
            model=stream.model,
            region=stream.region,
            slo_class=stream.slo_class,
            requests=int(requests[minute]),
            prompt_tokens=int(prompts[minute]),
            output_tokens=int(outputs[minute]),
            generated=True,
        )


def _bursts(steps: int, draw: np.random.Generator) -> NDArray[np.bool_]:
    """In which of *steps* a burst is: they come as in `waves`, each some time after the last has ended."""
    length = round(BURST_S / STEP_S)
    most = 2 * steps * STEP_S / (BURST_EVERY_S + BURST_S) + 10
    begins = np.cumsum(draw.exponential(BURST_EVERY_S, int(most)) + BURST_S) - BURST_S
    first = (begins // STEP_S).astype(np.int64)
    inside = (first[:, None] + np.arange(length)).ravel()
    bursts = np.zeros(steps, bool)
    bursts[inside[inside < steps]] = True
    return bursts


def _tokens(
    mean: float, variation: float, most: int, of_minute: NDArray[np.int64], count: int, draw: np.random.Generator
) -> NDArray[np.float64]:
    """Sums by minute of lengths with that *mean*, one a request, log-normal and cut at *most*."""
    sigma = math.sqrt(math.log1p(variation**2))
    each = np.minimum(draw.lognormal(math.log(mean) - sigma**2 / 2, sigma, len(of_minute)), most)
    return np.asarray(np.bincount(of_minute, weights=np.rint(each), minlength=count), np.float64)
