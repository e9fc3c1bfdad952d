"""Fallbacks of models in a simulation, by the live dispatcher's own rule (`routing.models`)."""

from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import direct
from scheduling.queueing.held import HELD, OPPORTUNISTIC
from scheduling.queueing.waiting_set import in_order
from scheduling.routing.models import RULES, ModelRule, fallback_rule
from scheduling.routing.regions import choose_region
from scheduling.scaling.view import demand_seconds
from scheduling.simulation.cluster.loop import change
from scheduling.simulation.cluster.state_changes import WITHDRAW
from scheduling.simulation.cluster.world import MAX_ATTEMPTS
from scheduling.simulation.waits import SimulatedWaits

CHANGED: Final = ("model", "output_tokens", "predicted_tokens", "asked", "judged")
"""Columns of requests that change where the fallback of its model serves one."""


class Fallbacks:
    """Decides whether an arriving, waiting or failed request is served by its model's fallback.

    A request becomes one of that model (`Requests.model`), and `Requests.asked` has the model that it named.
    """

    def __init__(self, waits: SimulatedWaits) -> None:
        self.waits, self.simulation = waits, waits.simulation
        self._longest = self.simulation.cluster.longest_tokens()
        self._choose_region = direct(choose_region)
        self._failed_before: Counter[int] = Counter()
        """Attempts of a request that failed at its own model."""
        self._demand: list[tuple[int, int, int]] = []
        """Tokens redirected to fallbacks because the requested model had no instance: (second, endpoint, tokens)."""

    def decide(self, request: int) -> None:
        """Decide on *request*, which arrives, and which its own model does not take now."""
        fallback = self._fallback(request, full=True)
        if fallback is not None:
            there, rule = fallback
            self._serve(request, rule)
            asked = self.simulation.requests
            classes, number = self.simulation.cluster.classes, int(asked.slo_class[request])
            if not classes or classes[number].interactive:
                tokens = int(asked.prompt_tokens[request]) + int(asked.predicted_tokens[request])
                self._demand.append((int(self.simulation.now_s), there, tokens))

    def queued(self, request: int) -> bool:
        """Whether the fallback serves *request*, which has just been queued: it is queued there then."""
        slot, world = self.waits.slot(request), self.simulation.world
        if slot < 0 or not self._may(request):
            return False
        wait = self.waits.of(request, slot)
        world.expected_wait_s[request] = wait.mean_s if wait is not None else 0.0
        return self._leave(request, slot)

    def sweep(self, endpoint: int) -> None:
        """Decide on all requests that wait for *endpoint*, in order."""
        self.simulation.control(source=int(self.simulation.world.run_state["sweep_node"][0]))
        for slot in in_order(self.simulation.world.waiting, endpoint).tolist():
            request = int(self.simulation.world.held[slot])
            if self._may(request):
                self._leave(request, slot)

    def failed(self, request: int) -> bool:
        """Whether the fallback serves *request*, whose instance failed before its first token: it is queued there then."""
        world = self.simulation.world
        if not self._may(request):
            return False
        requests, outcome = self.simulation.requests, world.outcomes[request]
        model = int(requests.model[request])
        failed = int(outcome["attempts"]) - int(outcome["evictions"]) - self._failed_before[request]
        takes = bool(((world.fleet.model == model) & (world.fleet.accepting != 0)).any())
        if takes and failed < MAX_ATTEMPTS:
            return False
        there = self._serving(int(world.fallback[model]), int(requests.region[request]))
        if there < 0 or self._is_full(there):
            return False
        self._failed_before[request] += failed
        self._queue(request, there, ModelRule.FAILURE)
        return True

    def attempts(self, request: int) -> int:
        """Return how often instances of the model that serves *request* now had it, without those that gave it up."""
        outcome = self.simulation.world.outcomes[request]
        return int(outcome["attempts"]) - int(outcome["evictions"]) - self._failed_before[request]

    def demand_tokens(self, now_s: float, endpoints: int) -> NDArray[np.float64]:
        """Return the tokens of the last minute that came to each endpoint as a fallback."""
        first, last = demand_seconds(now_s)
        self._demand = [each for each in self._demand if each[0] >= first]
        tokens = np.zeros(endpoints)
        for second, endpoint, count in self._demand:
            tokens[endpoint] += count if second < last else 0
        return tokens

    def counters(self) -> dict[str, int]:
        rules = self.simulation.world.outcomes["model_rule"]
        return {
            f"fell_back_{rule}": int(np.count_nonzero(rules == RULES.index(rule)))
            for rule in ModelRule
            if rule is not ModelRule.WEIGHTS
        }

    def _fallback(self, request: int, wait_s: float = 0.0, *, full: bool = False) -> tuple[int, ModelRule] | None:
        """Return the endpoint of the fallback for *request* and the rule by which that serves it; None while it does not.

        *wait_s*: what it waits for its own model; *full*: its own model does not take it as it comes.
        """
        world, requests, given = self.simulation.world, self.simulation.requests, self.simulation.cluster.fallbacks
        model, region = int(requests.model[request]), int(requests.region[request])
        if int(requests.prompt_tokens[request]) >= self._longest[int(world.fallback[model])]:
            return None
        there = self._serving(int(world.fallback[model]), region)
        if there < 0 or self._is_full(there):
            return None
        held = int(requests.held[request])
        serves = not full and self._serving(model, region, bool(held & OPPORTUNISTIC)) >= 0
        most_s = given[self.simulation.cluster.models[model]].wait_s
        there_s = 0.0  # unless requests wait there, and their pace is known
        if most_s is not None and wait_s > most_s and (wait := self.waits.of_next(there)) is not None:
            there_s = wait.mean_s
        rule = fallback_rule(serves=serves, wait_s=wait_s, most_wait_s=most_s, there_s=there_s)
        return None if rule is None else (there, rule)

    def _leave(self, request: int, slot: int) -> bool:
        """Queue *request*, which waits in *slot*, at the fallback of its model if that serves it; return whether it does."""
        world = self.simulation.world
        waited_s = self.simulation.now_s - float(self.simulation.requests.arrival_s[request])
        fallback = self._fallback(request, max(waited_s, float(world.expected_wait_s[request])))
        if fallback is None:
            return False
        change(world, WITHDRAW, slot, 0)
        self._queue(request, *fallback)
        return True

    def _queue(self, request: int, there: int, rule: ModelRule) -> None:
        self._serve(request, rule)
        self.simulation.requests.judged[request] = 0
        self.simulation.control(there, request)

    def _serve(self, request: int, rule: ModelRule) -> None:
        """Make *request* one of the fallback of its model, by *rule*."""
        world, requests = self.simulation.world, self.simulation.requests
        own = int(requests.model[request])
        model = int(world.fallback[own])
        if requests.asked[request] < 0:
            requests.asked[request] = own
        room = max(1, self._longest[model] - int(requests.prompt_tokens[request]))
        for column in (requests.output_tokens, requests.predicted_tokens):
            column[request] = min(int(column[request]), room)
        requests.model[request] = model
        world.may_fall_back[request] = 0
        world.outcomes["model_rule"][request] = RULES.index(rule)
        self.waits.forget(request)

    def _may(self, request: int) -> bool:
        """`choices.may_fall_back` in Python."""
        world = self.simulation.world
        kept = world.kept_tokens[request] if world.kept_tokens.size > 1 else 0
        begun = world.outcomes["evictions"][request] > 0 or kept > 0
        held = int(self.simulation.requests.held[request]) & HELD
        has = world.fallback[self.simulation.requests.model[request]] >= 0 and world.may_fall_back[request]
        return bool(has and not begun and not held)

    def _serving(self, model: int, region: int, opportunistic: bool = False) -> int:
        """Return the endpoint of *model* that serves a new request now; -1 without one."""
        world = self.simulation.world
        at, places = model * world.latency_s.shape[0] + region, world.candidate_first.size - 1
        if opportunistic and world.policies.size > world.lives.fits.shape[0]:
            at += places // 2
        candidates = world.candidates[world.candidate_first[at] : world.candidate_first[at + 1]]
        if not candidates.size:
            return -1
        threshold = float(world.policies["region_threshold"][candidates[0]])
        now_s = self.simulation.now_s
        return int(self._choose_region(world.fleet, world.endpoints, candidates, world.waiting.size, threshold, now_s))

    def _is_full(self, endpoint: int) -> bool:
        cluster = self.simulation.cluster
        waiting = int(self.simulation.world.waiting.size[endpoint])
        return cluster.policy(cluster.endpoints[endpoint]).is_full(waiting)
