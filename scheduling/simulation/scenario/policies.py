"""Tables of a scenario that say how requests are dispatched and instances scaled, and what callers are promised."""

from typing import Literal, Self

from pydantic import field_validator, model_validator

from scheduling.queueing.ordering import ORDERINGS, STRETCH
from scheduling.routing.routers import POLICY_CODES
from scheduling.simulation.scenario.parts import AtLeast0, Count, Part, Positive, Size, one_of


class SloClassOf(Part):
    ttft_ms: Positive | None = None
    itl_ms: Positive | None = None
    e2e_ms: Positive | None = None
    deadline_s: Positive | None = None
    priority: int = 0
    """Lower is earlier."""


class BatchingOf(Part):
    mode: Literal["continuous", "none", "dynamic"] = "continuous"
    max_batch_size: Count = 0
    wait_timeout_s: AtLeast0 = 0.0


class ReactiveOf(Part):
    out_above: Positive = 0.7
    in_below: AtLeast0 = 0.3
    cooldown_s: AtLeast0 = 15.0
    min_instances: Count = 2
    max_instances: Count = 20

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances ({self.min_instances}) is above max_instances ({self.max_instances})")
        if self.in_below >= self.out_above:
            raise ValueError(f"in_below ({self.in_below}) must be below out_above ({self.out_above})")
        return self


class Policies(Part):
    routing: str = "join_shortest_queue"
    ordering: str = "fcfs"
    ordering_stretch: AtLeast0 = STRETCH
    dispatch_round_trip_ms: AtLeast0 = 0.0
    requests_ahead_limit: Count | None = None
    region_threshold: AtLeast0 = 0.7
    queue_bound: Size | None = None
    batching: BatchingOf = BatchingOf()
    reactive: ReactiveOf | None = None

    @field_validator("routing")
    @classmethod
    def _known_routing(cls, value: str) -> str:
        return one_of(value, POLICY_CODES)

    @field_validator("ordering")
    @classmethod
    def _known_ordering(cls, value: str) -> str:
        return one_of(value, ORDERINGS)
