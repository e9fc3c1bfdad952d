"""Lengths of earlier prompts (SSJF, section 6): the same prompt for the same model, white space ignored.

Prompts are kept as a keyed digest, never as text, and the digest's key dies with the process; lengths as a running mean,
their spread and their count.
"""

import hashlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from forecasting.lengths.online import RecentlyUsed
from forecasting.lengths.query import Estimate, LengthQuery

KEPT_CHARACTERS: Final = 4096
"""Characters from a prompt's end that make its digest."""
WHITE_SPACE: Final = b" \t\n\r\v\f"
"""Left out of digests."""
MODELS: Final = 256
"""Models that have entries at one time."""
LOG_SPREAD: Final = 0.25
"""Mean distance of a length's logarithm from its prompt's usual one, assumed until the prompt was seen often enough."""
STEADY: Final = 20
"""Lengths after which a running mean no longer slows down, so that it follows a lasting change."""
NORMAL: Final = (-1.28155, -0.67449, 0.0, 0.67449, 1.28155)
"""Quantiles of the standard normal distribution, at `QUANTILES`."""
SIGMAS_PER_DISTANCE: Final = 1.25331  # standard deviation of a normal distribution over its mean absolute distance


class Limits(NamedTuple):
    """Limits of a cache of lengths."""

    entries: int = 0
    """Prompts of each served model; 0 is no cache."""
    ttl_s: float = 0.0
    """Time after which a prompt whose length was not confirmed is forgotten."""


@dataclass(slots=True)
class SeenLengths:
    """The lengths of one prompt so far, in tokens of one sequence."""

    changed_s: float
    mean: float = 0.0
    distance: float = LOG_SPREAD
    """Mean of |log length - log mean|."""
    count: int = 0
    """Lengths that the model chose itself."""
    cut: int = 0
    """The longest length that `max_tokens` cut short: the real one is at least this."""

    def estimate(self, max_tokens: int | None) -> Estimate | None:
        """Return the expected length, log-normal around it; None if only known to exceed the allowed one."""
        if self.count:
            tokens = max(self.mean, float(self.cut))
        elif max_tokens is not None and max_tokens <= self.cut:
            tokens = float(max_tokens)
        else:
            return None
        sigma = self.distance * SIGMAS_PER_DISTANCE
        return Estimate(tokens, tuple(max(1.0, tokens * math.exp(sigma * z)) for z in NORMAL), self.count)

    def add(self, tokens: float, now_s: float, *, cut: bool) -> None:
        self.changed_s = now_s
        if cut:
            self.cut = max(self.cut, int(tokens))
            return
        if self.count:
            away = abs(math.log(max(tokens, 1.0) / max(self.mean, 1.0)))
            self.distance += (away - self.distance) / (min(self.count, STEADY) + 2)
        self.count += 1
        self.mean += (tokens - self.mean) / min(self.count, STEADY)
        # A length that ended by itself says more than one that was cut before.
        self.cut = min(self.cut, int(tokens))


class CacheKey(NamedTuple):
    """A prompt as the cache knows it."""

    model: str
    digest: bytes


class LengthCache:
    """Prompts and their lengths, within *limits*. Not for several threads."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self._secret = os.urandom(16)
        self._shelves: RecentlyUsed[str, OrderedDict[bytes, SeenLengths]] = RecentlyUsed(OrderedDict, MODELS)
        """By model; the least recently used entries first."""

    def __len__(self) -> int:
        return sum(len(shelf) for shelf in self._shelves.values())

    def key(self, query: LengthQuery, characters: int = 0) -> CacheKey | None:
        """Return *query* as the cache knows it; None if its prompt came without text.

        *characters* of the whole prompt distinguish two prompts of which the query holds the same part.
        """
        text = query.text[-KEPT_CHARACTERS:]
        dense = text.encode(errors="surrogatepass").translate(None, WHITE_SPACE)
        if not dense:
            return None
        digest = hashlib.blake2b(dense, digest_size=16, key=self._secret)
        size = max(characters, len(query.text))
        if size >= KEPT_CHARACTERS:
            digest.update(b"%d" % size)
        return CacheKey(query.model, digest.digest())

    def seen(self, key: CacheKey) -> SeenLengths | None:
        """Return the lengths of this prompt."""
        shelf = self._shelves.get(key.model)
        seen = shelf.get(key.digest) if shelf else None
        if shelf is None or seen is None:
            return None
        if self.clock() - seen.changed_s > self.limits.ttl_s:
            del shelf[key.digest]
            return None
        shelf.move_to_end(key.digest)
        return seen

    def learn(self, key: CacheKey, tokens: float, *, cut: bool) -> None:
        """Record *tokens* of one sequence for a request of *key*; *cut*: no more were allowed."""
        now_s, shelf = self.clock(), self._shelves[key.model]
        seen = self.seen(key)
        if seen is None:
            seen = shelf[key.digest] = SeenLengths(now_s)
            if len(shelf) > self.limits.entries:
                shelf.popitem(last=False)
        seen.add(tokens, now_s, cut=cut)
