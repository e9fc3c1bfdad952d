"""Work that arrives after a request and is served before it: what was queued lately stands for what will come.

A queue key is the arrival of its request plus an offset: a time allowed, a stretched service time, a step of priority. A
request with *left_s* between now and its own key is overtaken by those of an offset *o* that arrive within the next
`left_s - o` seconds, while it waits. So its wait is the fixed point of

    W = W0 + sum over recent requests of tokens / (seconds in which they came x Theta) x min(W, left_s - offset)
"""

import math
from typing import ClassVar, Final

import numpy as np
from msgspec import Struct, structs

MOST_SHARE: Final = 0.8
"""Most of the throughput that overtaking work may take for as long as a request waits: no overload lasts for ever."""


class Arrivals(Struct):
    """The last requests queued at an endpoint, and their rate."""

    KEPT: ClassVar[int] = 512
    FORGOTTEN_S: ClassVar[float] = 300.0
    """In which the rate forgets most (1 - 1/e) of what came."""

    offsets_s: list[float] = []
    tokens: list[float] = []
    """By request, oldest first: its queue key less its arrival, and its expected output with its weight."""
    began_s: float = 0.0
    last_s: float = 0.0
    """When the first and the last came."""
    count: float = 0.0
    """Of requests, decayed, at *last_s*."""

    def add(self, at_s: float, offset_s: float, tokens: float) -> None:
        if not self.count:
            self.began_s = self.last_s = at_s
        self.count = 1.0 + self.count * math.exp(-max(0.0, at_s - self.last_s) / self.FORGOTTEN_S)
        self.last_s = max(self.last_s, at_s)
        self.offsets_s.append(offset_s)
        self.tokens.append(tokens)
        del self.offsets_s[: -self.KEPT], self.tokens[: -self.KEPT]

    def since(self, now_s: float) -> "Arrivals":
        """Return these with times after *now_s*."""
        return structs.replace(self, began_s=self.began_s - now_s, last_s=self.last_s - now_s)

    def overtaken_s(self, wait_s: float, left_s: float, now_s: float, tokens_per_s: float) -> float:
        """Return the wait of a request that would wait for *wait_s* if nothing overtook it."""
        if not self.tokens or wait_s <= 0.0:
            return wait_s
        passed = 1.0 - math.exp(-max(now_s - self.began_s, 1.0) / self.FORGOTTEN_S)
        rate = self.count * math.exp(-max(0.0, now_s - self.last_s) / self.FORGOTTEN_S) / (self.FORGOTTEN_S * passed)
        windows_s = np.maximum(left_s - np.array(self.offsets_s), 0.0)
        shares = np.array(self.tokens) * (rate / len(self.tokens) / tokens_per_s)
        order = np.argsort(windows_s)
        windows_s, shares = windows_s[order], shares[order]
        # While the wait exceeds the first k windows, these add a constant, and the others a share of the wait.
        rest = shares.sum() - np.concatenate([[0.0], np.cumsum(shares)])
        constant_s = wait_s + np.concatenate([[0.0], np.cumsum(shares * windows_s)])
        solved_s = constant_s / (1.0 - np.minimum(rest, MOST_SHARE))
        fits = solved_s <= np.concatenate([windows_s, [np.inf]])
        return float(solved_s[np.argmax(fits)])
