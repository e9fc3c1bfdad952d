"""System prompts that are computed before a call needs them (Hermes section 3.4), the same under both clocks.

A request for one token computes a prompt at an instance. `PromptPrewarming` says for which prompts, where and when, by the
index of prefixes (`routing.prefix_affinity`): live the gateway sends the request, in a simulation the engine has the blocks.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from scheduling.applications.prewarming import AGAIN_S, OPEN_S, nearest
from scheduling.compiled import uncompiled
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, at_once
from scheduling.fleet.profile import Profile
from scheduling.routing.adapters import ON_GPU, tier_of
from scheduling.routing.prefix_affinity import Affinity, covered, learn, match, unmatch

BURST_S: Final = 30.0
"""The share of an instance's time is kept over so long."""
TRIAL: Final = 0.02
"""Of the share of time for system prompts that is left where they cost more than they win, to see when that changes."""
FORGETS: Final = 0.9
"""Weight of what became of earlier prompts with each further one."""
AT_FIRST: Final = 4.0
"""Prompts taken to have been used before the first."""
ANSWER_S: Final = 90.0
"""A request that warms a prompt is given up after so long."""
SEEN_TWICE: Final = 2
"""Calls of a unit in a row with the same system prompt before it is warmed: one that changes each time is not."""
MOST_PROMPTS: Final = 2_000
MOST_UNITS: Final = 4_000
CHECKED: Final = 256
"""Warm prompts that are looked up in the index at once, the oldest first."""


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


@dataclass(slots=True)
class Warming:
    """A prompt that is being warmed at an instance."""

    prompt: Hashable
    until_s: float


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
        """Take in that a call with *prompt* was given to *instance*."""
        self._settle(instance, prompt, used=True)

    def waste(self, instance: Hashable, prompt: Hashable) -> None:
        """Take in that *prompt* has left *instance* unused, or was never there."""
        self._settle(instance, prompt, used=False)

    def _settle(self, instance: Hashable, prompt: Hashable, *, used: bool) -> None:
        if self._unused.pop((instance, prompt), None) is None:
            return
        self.counts["used" if used else "wasted"] += 1
        before, settled = self._became.get(instance, (AT_FIRST, AT_FIRST))
        self._became[instance] = FORGETS * before + used, FORGETS * settled + 1.0


class PromptPrewarming:
    """System prompts on the arrays of one clock, by name.

    Call `come` when a call comes and `time.use` when an instance is given it; `begin` before a look, `place` for each prompt
    that a waiting or likely call has, and `end` once it is computed. The last row of `Affinity.noted` must be spare.
    """

    def __init__(self) -> None:
        self.time = PrefillTime()
        self.known: OrderedDict[Hashable, Prompt] = OrderedDict()
        self.warming: dict[int, Warming] = {}
        """By instance."""
        self._of_units: OrderedDict[Hashable, tuple[Hashable, int]] = OrderedDict()
        """By unit: the prompt of its last calls, and how many had it."""
        self._failed: dict[tuple[Hashable, int], float] = {}
        """Until when a prompt is not tried again at an instance."""
        self._cold: dict[tuple[int, Hashable], bool] = {}
        """As of this look: whether no instance with room has a prompt, by endpoint."""

    def come(self, name: Hashable, prompt: Prompt, unit: Hashable | None) -> None:
        """Take in that a call of *unit*, None if it is of no unit, has the prompt *name*."""
        self.known[name] = prompt  # its tokens are an estimate that becomes better
        self.known.move_to_end(name)
        if len(self.known) > MOST_PROMPTS:
            self.known.popitem(last=False)
        if unit is not None:
            before, times = self._of_units.get(unit, (name, 0))
            self._of_units[unit] = name, times + 1 if before == name else 1
            self._of_units.move_to_end(unit)
            if len(self._of_units) > MOST_UNITS:
                self._of_units.popitem(last=False)

    @property
    def any_known(self) -> bool:
        """Whether any unit has had a system prompt."""
        return bool(self._of_units)

    def of_unit(self, unit: Hashable) -> Hashable | None:
        """Return the prompt that the next call of *unit* will probably have, None if that is not known."""
        name, times = self._of_units.get(unit, (None, 0))
        return name if times >= SEEN_TWICE and name in self.known else None

    def begin(self) -> None:
        """Begin a look: prompts are cold or not as they are when they are first asked for in it."""
        self._cold.clear()

    def is_cold(
        self, fleet: FleetArrays, endpoints: EndpointArrays, affinity: Affinity, endpoint: int, name: Hashable
    ) -> bool:
        """Whether no instance of *endpoint* with room has the prompt *name* whole, by the index."""
        key = endpoint, name
        if key not in self._cold:
            prompt = self.known.get(name)
            near = _near(fleet, affinity, endpoint, prompt) if prompt is not None else {}
            self._cold[key] = prompt is not None and not any(
                near.get(at) == len(prompt.blocks) for at in _with_room(fleet, endpoints, endpoint)
            )
        return self._cold[key]

    def place(
        self,
        fleet: FleetArrays,
        endpoints: EndpointArrays,
        affinity: Affinity,
        endpoint: int,
        name: Hashable,
        profile: Profile,
        share: float,
        now_s: float,
    ) -> int:
        """Return the instance of *endpoint* that computes the prompt *name* from now on, -1 for none.

        None where an instance with room has it or computes it. Else the nearest with room that computes no other,
        at which it did not fail lately and whose GPU has its adapter, if *share* of that instance's time is left.
        """
        prompt, able = self.known.get(name), _with_room(fleet, endpoints, endpoint)
        if prompt is None or any(at in self.warming and self.warming[at].prompt == name for at in able):
            return -1
        if not self.is_cold(fleet, endpoints, affinity, endpoint, name):
            return -1
        near = _near(fleet, affinity, endpoint, prompt)
        may = {
            at: near.get(at, 0)
            for at in able
            if at not in self.warming
            and self._failed.get((name, at), -math.inf) <= now_s
            and (prompt.adapter < 0 or tier_of(fleet, at, prompt.adapter) == ON_GPU)
        }
        if not may:
            return -1
        instance = nearest(fleet, may)
        takes_s, running = prompt.prefill_s(profile, may[instance]), int(fleet.running[instance])
        if not self.time.take(instance, name, takes_s, running, share, now_s):
            return -1
        self.warming[instance] = Warming(name, now_s + ANSWER_S)
        return instance

    def end(
        self,
        fleet: FleetArrays,
        affinity: Affinity,
        endpoint: int,
        instance: int,
        now_s: float,
        *,
        failed: bool = False,
    ) -> None:
        """Take in that *instance*, of *endpoint*, has computed the prompt that it was warming, or has *failed* to."""
        name = self.warming.pop(instance).prompt
        if failed:
            if len(self._failed) >= MOST_PROMPTS:
                self._failed.clear()
            self._failed[name, instance] = now_s + AGAIN_S
            self.time.waste(instance, name)
        elif (prompt := self.known.get(name)) is not None:
            fleet.placed_tokens[instance] += prompt.tokens
            learn(fleet, affinity, endpoint, _note(affinity, prompt), instance)

    def overdue(self, now_s: float) -> list[int]:
        """Return the instances whose request is to be given up."""
        return [at for at, warming in self.warming.items() if now_s >= warming.until_s]

    def waste(
        self, fleet: FleetArrays, affinity: Affinity, endpoint_of: Mapping[int, int], now_s: float
    ) -> list[tuple[int, Hashable]]:
        """Take in which prompts have left unused, or were not used for ten minutes; return them with their instances.

        *endpoint_of* has the instances that there are. Call at the beginning of a look.
        """
        wasted = []
        for instance, name, since_s in self.time.unused()[:CHECKED]:
            prompt, endpoint = self.known.get(name), endpoint_of.get(instance)
            there = prompt is not None and endpoint is not None
            if there and instance in self.warming and self.warming[instance].prompt == name:
                continue
            if there and now_s - since_s < OPEN_S:
                assert prompt is not None
                assert endpoint is not None
                if _near(fleet, affinity, endpoint, prompt).get(instance) == len(prompt.blocks):
                    continue
            self.time.waste(instance, name)
            wasted.append((instance, name))
        return wasted


def _with_room(fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int) -> list[int]:
    members = endpoints.members[endpoints.first[endpoint] : endpoints.first[endpoint + 1]].tolist()
    return [at for at in members if fleet.accepting[at] and fleet.running[at] < uncompiled(at_once)(fleet, at)]


def _note(affinity: Affinity, prompt: Prompt) -> int:
    """Note the blocks of *prompt* in the spare row, and return it."""
    spare, count = affinity.noted_count.size - 1, len(prompt.blocks)
    affinity.noted[spare, :count] = prompt.blocks
    affinity.noted_count[spare], affinity.block_tokens[spare] = count, prompt.block_tokens
    return spare


def _near(fleet: FleetArrays, affinity: Affinity, endpoint: int, prompt: Prompt) -> dict[int, int]:
    """Return how many leading recorded blocks of *prompt* each instance of *endpoint* has, by the index; those with any."""
    touched = match(fleet, affinity, endpoint, _note(affinity, prompt))
    near = {int(at): int(affinity.matched[at]) for at in affinity.touched[:touched]}
    unmatch(affinity, touched)
    return near
