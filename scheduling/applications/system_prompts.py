"""A system prompt, and how much of an instance's time may compute prompts early (Hermes section 3.4)."""

from collections import Counter
from collections.abc import Hashable
from typing import Any, Final, NamedTuple

from scheduling.compiled import uncompiled
from scheduling.fleet.profile import Profile
from scheduling.routing.prefix_affinity import covered

BURST_S: Final = 30.0
"""The share of an instance's time is kept over so long."""
TRIAL: Final = 0.02
"""Of the share of time for system prompts that is left where they cost more than they win, to see when that changes."""
FORGETS: Final = 0.9
"""Weight of what became of earlier prompts with each further one."""
AT_FIRST: Final = 4.0
"""Prompts taken to have been used before the first."""


class Prompt(NamedTuple):
    """A system prompt as the index of prefixes knows it."""

    blocks: tuple[int, ...]
    """Hashes of its recorded blocks."""
    block_tokens: int
    model: str = ""
    adapter: int = -1
    """LoRA adapter, -1 for none; its blocks are of no use to another."""

    @property
    def tokens(self) -> int:
        return self.tokens_of(len(self.blocks))

    def tokens_of(self, count: int) -> int:
        """Return the tokens of its first *count* recorded blocks."""
        return int(uncompiled(covered)(count)) * self.block_tokens

    def prefill_s(self, profile: Profile, cached: int = 0) -> float:
        """Return the seconds to compute it where its first *cached* recorded blocks are cached."""
        return float(profile.service_time_s(self.tokens - self.tokens_of(cached), 1))


class PrefillTime:
    """Time of instances for system prompts that are computed early: a share, kept over `BURST_S`, which follows their use.

    A prompt that is used wins its time for one call, and takes none from others, as that call would have computed it. One
    that is pushed out before takes its time from each of n requests that run there. So while fewer than n in n + 1 of
    the last prompts were used, `TRIAL` of the share is left.

    `counts` has the prompts `warmed`, those of them `used`, and those `wasted`.
    """

    def __init__(self) -> None:
        self._left: dict[Hashable, tuple[float, float]] = {}
        """Seconds left and since when, by instance."""
        self._became: dict[Hashable, tuple[float, float]] = {}
        """Of the last prompts at an instance, those used and all that settled, each by its weight."""
        self._unused: dict[tuple[Any, Any], float] = {}
        """When each was begun."""
        self.counts: Counter[str] = Counter(warmed=0, used=0, wasted=0)

    def take(
        self, instance: Hashable, prompt: Hashable, takes_s: float, running: int, share: float, now_s: float
    ) -> bool:
        """Take *takes_s* for *prompt* of the time of *instance*, where *running* requests run; return False, and take
        nothing, if none is left.
        """
        used, settled = self._became.get(instance, (AT_FIRST, AT_FIRST))
        share *= 1.0 if used >= settled * running / (running + 1) else TRIAL
        left_s, since_s = self._left.get(instance, (share * BURST_S, now_s))
        left_s = min(share * BURST_S, left_s + share * (now_s - since_s))
        taken = left_s > 0.0
        self._left[instance] = left_s - takes_s * (taken and running > 0), now_s
        if taken:
            self.waste(instance, prompt)  # of an earlier time
            self.counts["warmed"] += 1
            self._unused[instance, prompt] = now_s
        return taken

    def unused(self) -> list[tuple[Any, Any, float]]:
        """Return the instances and prompts of those that no call has used, and when each was begun, the first one first."""
        return [(*each, began_s) for each, began_s in self._unused.items()]

    def use(self, instance: Hashable, prompt: Hashable) -> None:
        """Record that a call with *prompt* was given to *instance*."""
        self._settle(instance, prompt, used=True)

    def waste(self, instance: Hashable, prompt: Hashable) -> None:
        """Record that *prompt* has left *instance* unused, or was never there."""
        self._settle(instance, prompt, used=False)

    def _settle(self, instance: Hashable, prompt: Hashable, *, used: bool) -> None:
        if self._unused.pop((instance, prompt), None) is None:
            return
        self.counts["used" if used else "wasted"] += 1
        before, settled = self._became.get(instance, (AT_FIRST, AT_FIRST))
        self._became[instance] = FORGETS * before + used, FORGETS * settled + 1.0
