"""Models that serve requests of others: where those are not served, would have to wait too long, or failed them.

The rule is `scheduling.routing.models`; here it gets requests and waits of a fleet, and acts on it.
"""

from typing import Final

from scheduling.control.fleet import FallbackTerms, Fleet
from scheduling.control.waits import Waits
from scheduling.routing.models import ModelRule, fallback_rule

MAX_ATTEMPTS: Final = 3
"""Instances of one model that may fail a request."""


class Fallbacks:
    """A request that its fallback serves becomes one of that model."""

    def __init__(self, fleet: Fleet, waits: Waits) -> None:
        self.fleet, self.waits = fleet, waits

    def choose(self, asks: FallbackTerms, wait_s: float = 0.0, *, full: bool = False) -> tuple[int, ModelRule] | None:
        """Return the endpoint of the fallback of *asks* and the rule by which that serves it; None while it does not.

        *wait_s*: what it waits for its own model; *full*: whether the queue there is.
        """
        there = self._serving(asks)
        if there < 0:
            return None
        serves = not full and self.fleet.serving(asks.model, asks.origin, asks.opportunistic) >= 0
        there_s = 0.0  # no request waits there yet, or its pace is not known
        if asks.wait_s is not None and wait_s > asks.wait_s and (wait := self.waits.of_next(there)) is not None:
            there_s = wait.mean_s
        rule = fallback_rule(serves=serves, wait_s=wait_s, most_wait_s=asks.wait_s, there_s=there_s)
        return None if rule is None else (there, rule)

    def serve_late(self, row: int) -> bool:
        """Whether the fallback of its model serves the request of *row*, which waits: it is queued there then.

        By the median of its wait, or because it has waited so long, or nothing serves its model any longer.
        """
        asks = self.fleet.fallback_of(row)
        if asks is None:
            return False
        estimate = self.waits.estimated(row) if asks.wait_s is not None else None
        wait = estimate.wait if estimate is not None else None
        expected_s = self.waits.quantile_s(row, wait, 0.5) if wait is not None else 0.0
        waited_s = self.fleet.now_s - float(self.fleet.requests.arrival_s[row])
        chosen = self.choose(asks, max(waited_s, expected_s))
        if chosen is not None:
            self._serve(row, *chosen)
        return chosen is not None

    def serve_failed(self, row: int, failures: int, *, elsewhere: bool) -> bool:
        """Whether the fallback of its model serves the request of *row*: it is queued there then.

        *failures* instances of its model failed it before its first token; *elsewhere*: another accepts work.
        """
        asks = self.fleet.fallback_of(row)
        if asks is None or not failures or (elsewhere and failures < MAX_ATTEMPTS):
            return False
        there = self._serving(asks)
        if there >= 0:
            self._serve(row, there, ModelRule.FAILURE)
        return there >= 0

    def _serving(self, asks: FallbackTerms) -> int:
        """Return the endpoint of the fallback of *asks* that serves now and has room in its queue; -1 without."""
        there = self.fleet.serving(asks.fallback, asks.origin)
        full = there >= 0 and self.fleet.endpoints[there].policy.is_full(int(self.fleet.waiting.size[there]))
        return -1 if full else there

    def _serve(self, row: int, endpoint: int, rule: ModelRule) -> None:
        self.waits.forget(row)
        self.fleet.fall_back(row, endpoint, rule)
        if (slot := self.fleet.slot(row)) >= 0:
            self.waits.begin(row, slot)
