"""Tables of a scenario that say how requests are dispatched and instances scaled, and what callers are promised."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, FiniteFloat, model_validator

from scheduling.lookahead.rule import MOST_ITERATIONS
from scheduling.queueing.eviction import MOST_EVICTIONS
from scheduling.queueing.groups import GROUP_BATCHES, GROUP_ORDERS
from scheduling.queueing.ordering import ORDERINGS, STRETCH
from scheduling.queueing.reordering.rules import REORDERINGS, SEARCH
from scheduling.routing.routers import POLICY_CODES
from scheduling.scaling import make_strategy
from scheduling.simulation.scenario.parts import AtLeast0, BundleName, Count, Part, Positive, Size, one_of

Routing = Annotated[str, AfterValidator(lambda name: one_of(name, POLICY_CODES))]
Ordering = Annotated[str, AfterValidator(lambda name: one_of(name, ORDERINGS))]
GroupOrder = Annotated[str, AfterValidator(lambda name: one_of(name, GROUP_ORDERS))]
EvictionLimit = Annotated[int, Field(ge=0, le=MOST_EVICTIONS)]
Reordering = Annotated[str, AfterValidator(lambda name: one_of(name, REORDERINGS))]
Parameters = dict[str, FiniteFloat | int]
DemandLevel = Literal["strategy", "mean", "upper_80"]


class SloClassOf(Part):
    kind: Literal["interactive", "non_interactive", "opportunistic"] = "interactive"
    """Plans forecast the interactive classes, keep a share free for the non-interactive ones, and leave out the last."""
    ttft_ms: Positive | None = None
    itl_ms: Positive | None = None
    e2e_ms: Positive | None = None
    percentile: Annotated[float, Field(gt=0, le=100)] = 95.0
    """Share of requests, in percent, that plans keep these promises for."""
    deadline_s: Positive | None = None
    priority: int = 0
    """Lower is earlier."""


class BatchingOf(Part):
    mode: Literal["continuous", "none", "dynamic"] = "continuous"
    max_batch_size: Count = 0
    wait_timeout_s: AtLeast0 = 0.0


class LookAheadOf(Part):
    """As `scheduling.lookahead.rule.LookAheadRule`."""

    iterations: Annotated[int, Field(ge=1, le=MOST_ITERATIONS)] = 100
    memory_above: Positive = 0.8
    beta: AtLeast0 = 1.0
    overload_above: Positive = 0.95
    overload_share: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.1


class EndpointOf(Part):
    """Policies of one model, in one region or in all, where they differ from those of all endpoints. Later ones count."""

    model: str
    region: str | None = None
    routing: Routing | None = None
    ordering: Ordering | None = None
    ordering_stretch: AtLeast0 | None = None
    group_batches: Positive | None = None
    group_order: GroupOrder | None = None
    eviction_limit: EvictionLimit | None = None
    swap_by_queue: bool | None = None
    dispatch_round_trip_ms: AtLeast0 | None = None
    requests_ahead_limit: Count | None = None
    region_threshold: AtLeast0 | None = None
    queue_bound: Size | None = None
    batching: BatchingOf | None = None
    look_ahead: LookAheadOf | None = None
    strategy: str | None = None
    parameters: Parameters = {}
    """Of `strategy`."""
    min_instances: Count | None = None
    max_instances: Count | None = None
    floor_above: Positive | None = None
    floor_cooldown_s: AtLeast0 | None = None
    forecaster: str | None = None
    demand_level: DemandLevel | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.strategy is not None:
            make_strategy(self.strategy, self.parameters)
        elif self.parameters:
            raise ValueError("parameters are those of a strategy: name it")
        return self


class ModelOf(Part):
    context_tokens: Size
    """Prompt and output together."""
    bundle: BundleName | None = None
    """Its policies at once; what `[[endpoints]]` says counts more."""
    marks: dict[str, Parameters] = {}
    """By strategy, parameters that it has for this model where a bundle has it: settings of a live fleet."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for strategy, parameters in self.marks.items():
            make_strategy(strategy, parameters)
        return self


class Policies(Part):
    """Policies of all endpoints."""

    bundle: BundleName | None = None
    """Of each model that has none of its own; keys given here, in `[scaling]`, `[planner]` or `[forecast]` count more."""
    routing: Routing = "join_shortest_queue"
    ordering: Ordering = "fcfs"
    ordering_stretch: AtLeast0 = STRETCH
    group_batches: Positive = GROUP_BATCHES
    """Of the order `qlm`: batches that a request group has at the most (delta),"""
    group_order: GroupOrder = "arrival"
    """in which order requests leave it,"""
    eviction_limit: EvictionLimit = 0
    """how often the global scheduler may evict one request,"""
    swap_by_queue: bool = True
    """whether the virtual queue of instances that share GPUs says which is swapped to,"""
    reordering: Reordering = SEARCH
    """and what the global scheduler goes by, its search or a simple rule in its place."""
    dispatch_round_trip_ms: AtLeast0 = 0.0
    requests_ahead_limit: Count | None = None
    region_threshold: AtLeast0 = 0.7
    queue_bound: Size | None = None
    share_spot: bool = True
    """Whether a machine that one model has let go may be redeployed for another of its GPU type (SageServe's spot)."""
    max_hold_s: AtLeast0 = 600.0
    """How long a request waits for an instance with room, where its class has no deadline."""
    batching: BatchingOf = BatchingOf()
    look_ahead: LookAheadOf = LookAheadOf()
