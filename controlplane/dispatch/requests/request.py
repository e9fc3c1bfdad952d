"""A request as the decision side has it: what was asked, where it waits or runs, and what the arrays know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct, field

from controlplane.dispatch.port import Submit
from scheduling.queueing.waits.waiting_time import Wait

if TYPE_CHECKING:
    from controlplane.dispatch.live_fleet.topology import Endpoint, Replica


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was said of a request when it began to wait."""

    endpoint: Endpoint
    position: int  # in its queue; 1: the next to be given out
    wait: Wait | None = None  # None while nothing is known of the pace there
    uncorrected_s: float | None = None  # mean by the profile alone, once lengths are known
    says_throughput: bool = False  # the queue was long enough for its wait to say how fast the endpoint is
    batch: float = 1.0
    of_own_s: float = 0.0  # mean by the queue that it stands in, and
    of_pool_s: float | None = None  # by all instances of its endpoint; None where these are one
    serving: int = 0  # instances of its endpoint, by then


class Request(Struct, eq=False):
    asked: Submit
    predicted_tokens: int  # output that may come
    endpoint: Endpoint  # where it waits or runs
    slot: int = -1  # in the waiting set, while waiting
    group: int = -1  # number of the request group that it joined last
    queue_key_s: float = 0.0  # there, on the clock of `Submit.arrived_at`
    replica: Replica | None = None
    attempts: int = 0
    evictions: int = 0  # of those, that ended by one
    evicting_s: float | None = None  # since when its instance is asked to give it up
    kept_tokens: int = 0  # output of earlier instances: now part of what `asked` calls its prompt
    placed_s: float = 0.0
    output_tokens: int = 0  # that came so far
    expected_tokens: int = 0  # prompt and output, as the fleet arrays reserved them
    counted_tokens: int = 0  # of those, what the arrays know to be done
    expected_prompt: int = 0  # of those, the prompt
    queued_tokens: int = 0  # of the prompt, what the arrays count as not prefilled
    ahead: int = -1  # in the look-ahead maps, while an instance has it
    ahead_tokens: int = 0  # output tokens that the maps know of
    estimate: Estimate | None = None  # of its wait, when it came
    own_region: str = ""  # of its caller, until the gateway has heard of it
    failed_at: list[Replica] = field(default_factory=list)  # where it was tried in vain
    unproved: list[tuple[Replica, str]] = field(default_factory=list)
    """Of those, which count as failing, and why, once another instance could serve it."""

    @property
    def has_begun(self) -> bool:
        """Whether an instance had it that gave it up, or is asked what is to be gone on with: it is not refused."""
        return self.evictions > 0 or self.kept_tokens > 0
