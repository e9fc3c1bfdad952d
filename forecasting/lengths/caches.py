"""Lengths of earlier prompts (SSJF, section 6): the same prompt, or one of nearly the same words.

Prompts are kept as a keyed digest and a MinHash signature, never as text, and the digest's key dies with the
process; lengths as a running mean, their spread and their count.

*Exact*: the same prompt for the same model, white space ignored. *Lexical*: a prompt that shares nearly all of its
shingles (5 bytes of lower-case text) and all of its numbers ("in 50 words" is not "in 500 words"). The signature is a
one-permutation MinHash (Li, Owen and Zhang, NIPS 2012) with empty bins filled from the next full one (Shrivastava and
Li, ICML 2014), found through bands that each name at most one entry, so a look-up compares at most `BANDS` signatures.
"""

import hashlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forecasting.compiled import compiled
from forecasting.lengths.online import RecentlyUsed
from forecasting.lengths.query import Estimate, LengthQuery

BINS: Final = 64
BANDS: Final = 8
ROWS: Final = BINS // BANDS
SHINGLE_BYTES: Final = 5
LEAST_SHINGLES: Final = 24
"""A shorter prompt has too few shingles to compare: only its exact match is looked up."""
KEPT_CHARACTERS: Final = 4096
"""Characters from a prompt's end that make its digest and signature."""
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
    similarity: float = 1.0
    """Least similarity at which two prompts are taken to have the same length."""


@dataclass(slots=True)
class SeenLengths:
    """The lengths of one prompt so far, in tokens of one sequence."""

    signature: NDArray[np.uint32] | None
    numbers: int
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


@dataclass(slots=True)
class CacheKey:
    """A prompt as the cache knows it; the signature is computed on first use, from text that the caller holds."""

    model: str
    digest: bytes
    text: str = field(repr=False)
    numbers: int = 0
    signed: bool = False
    signature: NDArray[np.uint32] | None = None

    def sign(self) -> NDArray[np.uint32] | None:
        """Return the signature, and release the text; None for a prompt that is too short."""
        if not self.signed:
            self.signed = True
            self.signature, self.numbers = signature(" ".join(self.text.split()))
            self.text = ""
        return self.signature


@dataclass(slots=True)
class _Shelf:
    """Entries of one model, least recently used first."""

    entries: OrderedDict[bytes, SeenLengths] = field(default_factory=OrderedDict)
    bands: list[dict[bytes, bytes]] = field(default_factory=lambda: [{} for _ in range(BANDS)])
    """For each band of signatures, the digest of the entry that had it last."""


class LengthCache:
    """Prompts and their lengths, within *limits*. Not for several threads.

    Similarity is the share of equal bins, an estimate of the Jaccard similarity.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self.least_equal = math.ceil(limits.similarity * BINS)
        self._secret = os.urandom(16)
        self._shelves: RecentlyUsed[str, _Shelf] = RecentlyUsed(_Shelf, MODELS)

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

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
        return CacheKey(query.model, digest.digest(), text)

    def exact(self, key: CacheKey) -> SeenLengths | None:
        """Return the lengths of exactly this prompt."""
        shelf = self._shelves.get(key.model)
        return self._live(shelf, key.digest) if shelf else None

    def nearest(self, key: CacheKey) -> SeenLengths | None:
        """Return the lengths of the most similar prompt, if it is similar enough; the digest is not compared."""
        shelf = self._shelves.get(key.model)
        if shelf is None or not shelf.entries:
            return None
        wanted = key.sign()
        if wanted is None:
            return None
        best, best_equal = None, self.least_equal - 1
        for digest in {band.get(piece) for band, piece in zip(shelf.bands, _pieces(wanted), strict=True)}:
            seen = self._live(shelf, digest, touch=False) if digest is not None else None
            if seen is None or seen.signature is None or seen.numbers != key.numbers:
                continue
            equal = int(np.count_nonzero(seen.signature == wanted))
            if equal > best_equal:
                best, best_equal = seen, equal
        return best

    def learn(self, key: CacheKey, tokens: float, *, cut: bool) -> None:
        """Record *tokens* of one sequence for a request of *key*; *cut*: no more were allowed."""
        now_s = self.clock()
        shelf = self._shelves[key.model]
        seen = self._live(shelf, key.digest)
        if seen is None:
            made = key.sign()
            seen = shelf.entries[key.digest] = SeenLengths(made, key.numbers, now_s)
            if made is not None:
                for band, piece in zip(shelf.bands, _pieces(made), strict=True):
                    band[piece] = key.digest
            if len(shelf.entries) > self.limits.entries:
                self._drop(shelf, next(iter(shelf.entries)))
        seen.add(tokens, now_s, cut=cut)

    def _live(self, shelf: _Shelf, digest: bytes, *, touch: bool = True) -> SeenLengths | None:
        seen = shelf.entries.get(digest)
        if seen is None:
            return None
        if self.clock() - seen.changed_s > self.limits.ttl_s:
            self._drop(shelf, digest)
            return None
        if touch:
            shelf.entries.move_to_end(digest)
        return seen

    @staticmethod
    def _drop(shelf: _Shelf, digest: bytes) -> None:
        seen = shelf.entries.pop(digest)
        if seen.signature is not None:
            for band, piece in zip(shelf.bands, _pieces(seen.signature), strict=True):
                if band.get(piece) == digest:
                    del band[piece]


def signature(text: str) -> tuple[NDArray[np.uint32] | None, int]:
    """Return the `BINS` MinHash figures of a text, and a hash of its numbers.

    Two texts have about as many figures in common as their shingles overlap. None for a text that is too short. Takes
    about 10 microseconds for 2,000 characters.
    """
    raw = np.frombuffer(text.lower().encode(errors="surrogatepass"), np.uint8)
    if raw.size - SHINGLE_BYTES + 1 < LEAST_SHINGLES:
        return None, 0
    bins = np.empty(BINS, np.uint32)
    return bins, int(_sign(raw, bins))


def _pieces(bins: NDArray[np.uint32]) -> list[bytes]:
    raw = bins.tobytes()
    size = ROWS * bins.itemsize
    return [raw[at : at + size] for at in range(0, len(raw), size)]


@compiled
def _sign(raw: Any, bins: Any) -> Any:
    """Fill *bins* from the shingles of *raw*: the top 6 bits of a shingle's hash are its bin, the next 32 its value.

    Return a hash of the runs of digits, with one space behind each that something follows.
    """
    size, ones = raw.size, np.uint64(0xFFFFFFFFFF)
    full = np.uint64(0)
    for where in range(64):
        bins[where] = np.uint32(0xFFFFFFFF)
    shingle, numbers, in_number = np.uint64(0), np.uint64(0), False
    for at in range(size):
        byte = raw[at]
        digit = 48 <= byte <= 57
        if digit or in_number:
            numbers ^= np.uint64(byte) if digit else np.uint64(32)
            numbers *= np.uint64(0x9E3779B97F4A7C15)
            numbers ^= numbers >> np.uint64(32)
            numbers *= np.uint64(0xD6E8FEB86659FD93)
            numbers ^= numbers >> np.uint64(32)
        in_number = digit
        shingle = ((shingle << np.uint64(8)) | np.uint64(byte)) & ones
        if at < 4:
            continue
        value: Any = shingle * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(32)
        value *= np.uint64(0xD6E8FEB86659FD93)
        value ^= value >> np.uint64(32)
        where = value >> np.uint64(58)
        rest = np.uint32((value >> np.uint64(26)) & np.uint64(0xFFFFFFFF))
        full |= np.uint64(1) << where
        bins[where] = min(rest, bins[where])
    last, steps = np.uint32(0), np.uint32(0)
    for place in range(127, -1, -1):  # twice round: what is empty at the end takes from the beginning
        at = place % 64
        if (full >> np.uint64(at)) & np.uint64(1):
            last, steps = bins[at], np.uint32(0)
        else:
            steps = np.uint32(steps + np.uint32(1))
            if place < 64:
                bins[at] = np.uint32(last + steps * np.uint32(0x9E3779B9))
    return numbers


def warm_up() -> None:
    """Compile (or load from disk) what a request would otherwise wait for."""
    signature("a text that is long enough to be signed")
