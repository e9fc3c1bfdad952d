"""System prompts that are computed before a call needs them (Hermes section 3.4).

A request for one token computes a prompt at an instance. Which prompts, where and when, is decided by the index of prefixes
(`routing.prefix_affinity`), so it needs a router that considers these: others would send the call anywhere.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from scheduling.applications.prewarming import AGAIN_S, MOST_WAITING, OPEN_S, LikelyCall, Warmable, nearest
from scheduling.compiled import uncompiled
from scheduling.control.fleet import Endpoint, Fleet
from scheduling.fleet.arrays import at_once
from scheduling.fleet.kv_cost import OFFLOADED, regain_s
from scheduling.queueing.waiting_set import in_order
from scheduling.routing.adapters import ON_GPU, tier_of
from scheduling.routing.prefix_affinity import NONE, covered, learn, match, unmatch
from scheduling.routing.routers import LEAST_DELAY, POLICY_CODES

BURST_S: Final = 30.0
"""The share of an instance's time is kept over so long."""
TRIAL: Final = 0.02
"""Part of the share that is left where prompts cost more than they save, to see when that changes."""
FORGETS: Final = 0.9
"""Weight of what became of earlier prompts with each further one."""
AT_FIRST: Final = 4.0
"""Prompts assumed to have been used before the first."""
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
    regions: tuple[str, ...] = ()
    """The only regions in which it may be computed; none: any."""

    @property
    def tokens(self) -> int:
        return self.tokens_of(len(self.blocks))

    def tokens_of(self, count: int) -> int:
        """Return the tokens of its first *count* recorded blocks."""
        return int(uncompiled(covered)(count)) * self.block_tokens


@dataclass(slots=True)
class Warming:
    """A prompt that is being warmed at an instance."""

    prompt: Hashable
    until_s: float


class PromptPrewarming:
    """System prompts by name. Call `record` when a call arrives, `settle` when an instance is given it, and `act` once a
    second; `end` once a prompt is computed. The last row of `Affinity.noted` must be spare.

    Instances spend a share of their time, kept over `BURST_S`, which follows the use of prompts. One that is used saves its
    time for one call, and takes none from others, as that call would have computed it. One that is pushed out before takes
    its time from each of n requests that run there. So while fewer than n in n + 1 of the last prompts were used, `TRIAL` of
    the share is left. `counts` has the prompts `warmed`, `used` and `wasted`.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.counts: Counter[str] = Counter(warmed=0, used=0, wasted=0)
        self._left: dict[int, tuple[float, float]] = {}
        """By instance: seconds left for prompts, and since when."""
        self._settled: dict[int, tuple[float, float]] = {}
        """Of the last prompts at an instance, those used and all that settled, each by its weight."""
        self._unused: dict[tuple[int, Hashable], float] = {}
        """Instances and prompts that no call has used, and when each was begun, the first one first."""
        self.known: OrderedDict[Hashable, Prompt] = OrderedDict()
        self.warming: dict[int, Warming] = {}
        """By instance."""
        self._of_units: OrderedDict[Hashable, tuple[Hashable, int]] = OrderedDict()
        """By unit: the prompt of its last calls, and how many had it."""
        self._failed: dict[tuple[Hashable, int], float] = {}
        """Until when a prompt is not tried again at an instance."""
        self._cold: dict[tuple[int, Hashable], bool] = {}
        """Of this second: whether no instance with room has a prompt, by endpoint."""

    def record(self, name: Hashable, prompt: Prompt, unit: Hashable | None) -> None:
        """Record that a call of *unit*, None if it is of no unit, has the prompt *name*."""
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

    def cold_after(self, unit: Hashable, endpoint: int) -> tuple[Hashable, float] | None:
        """Return the prompt that the next call of *unit* at *endpoint* will probably have, and the seconds to compute it;
        None if it is not known, or an instance with room has it.
        """
        name, times = self._of_units.get(unit, (None, 0))
        prompt, terms = self.known.get(name), self.fleet.endpoints[endpoint]
        if prompt is None or times < SEEN_TWICE or not _by_prefix(terms) or not self._is_cold(endpoint, name, prompt):
            return None
        near = {at: (0, anywhere) for at, (_, anywhere) in self._near(endpoint, prompt).items()}
        return name, min(self._cost_s(terms, prompt, at, near.get(at, (0, 0))) for at in (NONE, *near))

    def begin(self) -> None:
        """Begin a second: a prompt is cold or not, for all of it, as when that is first asked."""
        self._cold.clear()

    def act(self, likely: Iterable[LikelyCall]) -> None:
        """Warm prompts of the first waiting requests and of *likely* calls; record which are overdue or wasted."""
        fleet, of = self.fleet, defaultdict[int, list[Hashable]](list)
        for instance in [at for at, one in self.warming.items() if fleet.now_s >= one.until_s]:
            self.end(instance, failed=True)
        self._record_waste()
        for call in likely:
            of[call.target.endpoint].append(call.target.name)
        for at, endpoint in enumerate(fleet.endpoints if self.known else ()):
            if endpoint.prewarm_share and _by_prefix(endpoint):
                first = in_order(fleet.waiting, at, MOST_WAITING).tolist()
                for name in [*(fleet.system_prompt(fleet.row_at(slot)) for slot in first), *of[at]]:
                    self._warm(at, name)

    def _warm(self, endpoint: int, name: Hashable | None) -> None:
        """Have one instance of *endpoint* compute the prompt *name*, unless one with room has it or computes it.

        The nearest with room that computes no other, at which it did not fail lately and whose GPU has its adapter, if its
        share of that instance's time is left.
        """
        fleet, terms, prompt = self.fleet, self.fleet.endpoints[endpoint], self.known.get(name)
        if prompt is None or prompt.model != terms.model:  # a fallback would be sent the text for another model
            return
        if prompt.regions and terms.region not in prompt.regions:
            return
        instances, able = fleet.instances, self._with_room(endpoint)
        if any(at in self.warming and self.warming[at].prompt == name for at in able):
            return
        if not self._is_cold(endpoint, name, prompt):
            return
        near = self._near(endpoint, prompt)
        may = {
            at: near.get(at, (0, 0))[1]
            for at in able
            if at not in self.warming
            and self._failed.get((name, at), -math.inf) <= fleet.now_s
            and (prompt.adapter < 0 or tier_of(instances, at, prompt.adapter) == ON_GPU)
        }
        if not may:
            return
        instance = nearest(instances, may)
        takes_s = self._cost_s(terms, prompt, instance, near.get(instance, (0, 0)))
        if self._spend(instance, takes_s, terms.prewarm_share):
            self.settle(instance, name, used=False)  # of an earlier time
            self.counts["warmed"] += 1
            self._unused[instance, name] = fleet.now_s
            self.warming[instance] = Warming(name, fleet.now_s + ANSWER_S)
            fleet.warm(instance, Warmable("prefix", name, endpoint))

    def _spend(self, instance: int, takes_s: float, share: float) -> bool:
        """Spend *takes_s* of the *share* of the time of *instance*, of which an idle one loses none; return whether any was
        left.
        """
        now_s, running = self.fleet.now_s, int(self.fleet.instances.running[instance])
        used, settled = self._settled.get(instance, (AT_FIRST, AT_FIRST))
        share *= 1.0 if used >= settled * running / (running + 1) else TRIAL
        left_s, since_s = self._left.get(instance, (share * BURST_S, now_s))
        left_s = min(share * BURST_S, left_s + share * (now_s - since_s))
        self._left[instance] = left_s - takes_s * (left_s > 0.0 and running > 0), now_s
        return left_s > 0.0

    def settle(self, instance: int, prompt: Hashable, *, used: bool) -> None:
        """Record that a call with *prompt* was given to *instance*, or that this has left it unused or was never there."""
        if self._unused.pop((instance, prompt), None) is not None:
            self.counts["used" if used else "wasted"] += 1
            before, settled = self._settled.get(instance, (AT_FIRST, AT_FIRST))
            self._settled[instance] = FORGETS * before + used, FORGETS * settled + 1.0

    def end(self, instance: int, *, failed: bool = False) -> None:
        """Record that *instance* has computed the prompt that it was warming, or has *failed* to."""
        name, instances, affinity = self.warming.pop(instance).prompt, self.fleet.instances, self.fleet.affinity
        if failed:
            if len(self._failed) >= MOST_PROMPTS:
                self._failed.clear()
            self._failed[name, instance] = self.fleet.now_s + AGAIN_S
            self.settle(instance, name, used=False)
        elif (prompt := self.known.get(name)) is not None:
            instances.placed_tokens[instance] += prompt.tokens
            learn(instances, affinity, int(instances.endpoint[instance]), self._written(prompt), instance)

    def _record_waste(self) -> None:
        """Record which prompts have left unused, or were not used for ten minutes."""
        for (instance, name), since_s in list(self._unused.items())[:CHECKED]:
            prompt, endpoint = self.known.get(name), int(self.fleet.instances.endpoint[instance])
            if prompt is not None and endpoint >= 0:
                if instance in self.warming and self.warming[instance].prompt == name:
                    continue
                fresh = self.fleet.now_s - since_s < OPEN_S
                if fresh and self._near(endpoint, prompt).get(instance, (0, 0))[0] == len(prompt.blocks):
                    continue
            self.settle(instance, name, used=False)

    def _is_cold(self, endpoint: int, name: Hashable, prompt: Prompt) -> bool:
        """Whether no instance of *endpoint* with room has *prompt* whole on its GPU, by the index."""
        key = endpoint, name
        if key not in self._cold:
            near = self._near(endpoint, prompt)
            self._cold[key] = all(near.get(at, (0, 0))[0] != len(prompt.blocks) for at in self._with_room(endpoint))
        return self._cold[key]

    def _with_room(self, endpoint: int) -> list[int]:
        fleet, members = self.fleet.instances, self.fleet.members
        of = members.members[members.first[endpoint] : members.first[endpoint + 1]].tolist()
        return [at for at in of if fleet.accepting[at] and fleet.running[at] < uncompiled(at_once)(fleet, at)]

    def _cost_s(self, endpoint: Endpoint, prompt: Prompt, instance: int, near: tuple[int, int]) -> float:
        """Return the seconds to compute or restore *prompt* at *instance*, which has what is *near* of it (`_near`)."""
        of, offload = endpoint.profile, self.fleet.instances.offload[instance].tolist()
        on_gpu, anywhere = (prompt.tokens_of(count) for count in near)
        prefill = of.prefill_t0_s, of.prefill_a_s, of.prefill_b_s_per_token, of.prefill_c_s_per_token2
        offloaded = float(anywhere - on_gpu) if offload[OFFLOADED] else 0.0
        return uncompiled(regain_s)(*prefill, *offload[1:], float(prompt.tokens - on_gpu), offloaded)[0]  # type: ignore[call-arg]

    def _near(self, endpoint: int, prompt: Prompt) -> dict[int, tuple[int, int]]:
        """Return how many leading recorded blocks of *prompt* each instance of *endpoint* has on its GPU, and there or in
        CPU memory; those with any.
        """
        affinity = self.fleet.affinity
        touched = match(self.fleet.instances, affinity, endpoint, self._written(prompt))
        near = {int(at): (int(affinity.on_gpu[at]), int(affinity.matched[at])) for at in affinity.touched[:touched]}
        unmatch(affinity, touched)
        return near

    def _written(self, prompt: Prompt) -> int:
        """Write the blocks of *prompt* to the spare row of the index, and return it."""
        affinity, count = self.fleet.affinity, len(prompt.blocks)
        spare = affinity.noted_count.size - 1
        affinity.noted[spare, :count] = prompt.blocks
        affinity.noted_count[spare], affinity.block_tokens[spare] = count, prompt.block_tokens
        return spare


def _by_prefix(endpoint: Endpoint) -> bool:
    return POLICY_CODES[endpoint.policy.routing] == LEAST_DELAY
