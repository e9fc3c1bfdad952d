"""Promises of SLO classes: what happens to a request that will probably miss its promise (QLM section 9, option c).

A request is *unreachable* if the 99th percentile of its estimated wait (QLM section 6) ends after the last moment at which
its prefill can begin and every promise of its class is still kept. Its class says what happens then: it is admitted anyway,
degraded to another class, or refused. Without an estimate it is admitted. The rule is used by the live dispatcher and by the
simulator.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Final

from msgspec import Struct

from scheduling.queueing.waits.waiting_time import Wait

ADMIT: Final = "admit"
DEGRADE: Final = "degrade"
REFUSE: Final = "refuse"
IF_UNREACHABLE: Final = {
    ADMIT: "Admit it anyway",
    DEGRADE: "Degrade it to another class",
    REFUSE: "Refuse it at once",
}
UNREACHABLE: Final = "deadline_unreachable"
"""Error code of a request that is refused for it."""


P99: Final = 0.99
"""Probability with which a promise has to be kept, to count as reachable."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Promise to the requests of an SLO class, in seconds; infinity for none."""

    ttft_s: float = math.inf
    itl_s: float = math.inf
    e2e_s: float = math.inf
    deadline_s: float = math.inf

    @property
    def end_s(self) -> float:
        """Return the promise for the last token: end to end, or by the deadline."""
        return min(self.e2e_s, self.deadline_s)

    @property
    def any(self) -> bool:
        return min(self.ttft_s, self.itl_s, self.end_s) < math.inf


class ClassTerms(Struct, frozen=True):
    """Terms on which a request of an SLO class is queued."""

    slo_class: str
    priority: int = 0
    """Lower is earlier."""
    due_s: float | None = None
    """From arrival to the first token; None: not promised."""
    end_s: float | None = None
    """From arrival to the last token."""
    deadline_s: float | None = None
    """Longest hold, after arrival."""
    interactive: bool = True
    opportunistic: bool = False
    ends_on_reclaim: bool = False
    if_unreachable: str = ADMIT
    degrades_to: str = ""
    """Name of the class, where *if_unreachable* is DEGRADE."""


def fallbacks(terms: ClassTerms, known: Mapping[str, ClassTerms]) -> tuple[ClassTerms, ...]:
    """Return the classes to which a request of *terms* may be degraded, in order; *known* are those that it may use.

    No class is in it twice, so that a request never comes back to a class.
    """
    chain = [terms]
    while chain[-1].if_unreachable == DEGRADE:
        following = known.get(chain[-1].degrades_to)
        if following is None or following.slo_class in {each.slo_class for each in chain}:
            break
        chain.append(following)
    return tuple(chain[1:])


class Calibration(Struct):
    """The distribution of waits of one class at one endpoint about their estimates, by the waits that followed.

    Split conformal prediction: a quantile of a wait is its mean and that of the last errors, each in units of `_scale_s` of
    its estimate, whatever makes estimates err. Refused requests teach nothing, so that one in fifty
    unreachable requests counts as reachable, and one in ten until enough waits are known.
    """

    ENOUGH: ClassVar[int] = 50
    """Waits after which it is used; before, waits are normally distributed, as estimated."""
    KEPT: ClassVar[int] = 500
    SHARE: ClassVar[float] = 0.2
    LITTLE_S: ClassVar[float] = 0.05
    TRIED: ClassVar[int] = 10
    TRIED_LATER: ClassVar[int] = 50

    errors: list[float] = []
    """Of the last waits, oldest first."""
    unreachable: int = 0

    def learn(self, wait: Wait, waited_s: float) -> None:
        """Learn from a request that waited for *waited_s* where *wait* was estimated."""
        self.errors.append((waited_s - wait.mean_s) / self._scale_s(wait))
        del self.errors[: -self.KEPT]

    def quantile_s(self, wait: Wait, share: float = P99) -> float:
        """Return what *wait* will not exceed with a probability of *share*."""
        count = len(self.errors)
        if count < self.ENOUGH:
            return wait.quantile_s(NormalDist().inv_cdf(share))
        error = sorted(self.errors)[min(count, math.ceil(share * (count + 1))) - 1]
        return max(0.0, wait.mean_s + error * self._scale_s(wait))

    def _scale_s(self, wait: Wait) -> float:
        """Return the scale of an error: the standard deviation, with a share of the mean, and what is little of any wait."""
        return math.hypot(math.sqrt(wait.variance_s2), self.SHARE * wait.mean_s) + self.LITTLE_S

    def late_s(self, wait: Wait | None, due_s: float, prefill_s: float) -> float:
        """Return by how many seconds a promise will be missed at the 99th percentile of *wait*; 0 if it is missed with a
        probability of at most 1%, or is tried.

        *due_s* is when the first token is due, after the same moment as *wait*; *prefill_s* is the time of its prefill.
        Without an estimate the promise counts as reachable.
        """
        late = 0.0 if wait is None else max(0.0, self.quantile_s(wait) + prefill_s - due_s)
        if late > 0.0:
            self.unreachable += 1
            every = self.TRIED if len(self.errors) < self.ENOUGH else self.TRIED_LATER
            if self.unreachable % every == 0:
                return 0.0
        return late


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about one request."""

    terms: ClassTerms
    """Terms on which it waits, or was refused."""
    refused: bool
    late_s: float
    """By how much it will miss these terms; 0: it can keep them."""
    wait: Wait | None


def decide(
    terms: ClassTerms, chain: tuple[ClassTerms, ...], expected: Callable[[ClassTerms], tuple[Wait | None, float]]
) -> Verdict:
    """Return what happens to a request of *terms* that may be degraded to the classes of *chain*, in order.

    *expected* queues the request on the given terms and returns its estimated wait and `late_s`. A request whose class
    degrades it, but that may use no further class, is admitted.
    """
    wait, late = expected(terms)
    for following in chain:
        if late == 0.0 or terms.if_unreachable != DEGRADE:
            break
        terms = following
        wait, late = expected(terms)
    return Verdict(terms, late > 0.0 and terms.if_unreachable == REFUSE, late, wait)
