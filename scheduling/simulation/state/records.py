"""What a simulation can begin with: every request that waits or runs, and every instance as it is at that moment.

Plain records, by the numbers of the cluster. Moments in `_s` are on the simulation's clock, which stands at
`FleetState.now_s`. What is not part of it: prefix caches and the router's memory of prefixes (both begin empty), and what
was counted up to the moment (preemptions of requests that ended, state hours).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import numpy as np
from numpy.typing import NDArray

from scheduling.scaling.owner import UNCHANGED, Change
from scheduling.simulation.workload.requests import Requests


class Where(StrEnum):
    """Where an instance has a request."""

    RUNNING = "running"
    """Admitted: it has KV blocks."""
    WAITING = "waiting"
    """In the engine's own queue."""
    SENT = "sent"
    """On its way there."""


@dataclass(slots=True)
class Running:
    """A request that an instance was given."""

    request: int
    """Row of `FleetState.requests`."""
    where: Where
    expected_prompt: int
    expected_tokens: int
    """Prompt and output as the dispatcher reserved them."""
    produced_tokens: int = 0
    """Output tokens so far; those of the work in progress are not among them."""
    computed_tokens: int = 0
    """Of prompt and output, while it does not decode: those whose KV is there."""
    decoding: bool = False
    """Its prefill is over, and it is among those that get a token in each iteration."""
    streaming: bool = False
    """Its first token has come out."""
    again: bool = False
    """It was preempted."""
    leaving: bool = False
    """It is evicted, and leaves at the end of the iteration."""
    joins: int = -1
    """The how-many-th of those that get a token at the end of this step without decoding yet; -1 for others."""
    prefilling: bool = False
    """Its prefill goes on after this step."""
    priority: int = 0
    number: int = 0
    """Order of dispatch, over all instances."""
    due_in: int | None = None
    """Iterations after which the engine looks at it again; None: as its lengths say."""
    ahead: int | None = None
    """Iterations since it entered the look-ahead map of its instance; None where it is in none."""
    reaches_s: float = inf
    """Its instance, while it is on its way."""


@dataclass(slots=True)
class Work:
    """The iterations that an engine is in, with the fields of `engine.state.INSTANCE`."""

    phase: int
    started_s: float
    linear_s: float
    quadratic_s: float
    steps: int
    counted: int
    step_decodes: int
    step_within: int
    next_s: float
    most_per_s: float
    least_per_s: float
    context_tokens: int
    within: int
    free_blocks: int
    ends_s: float
    """When the engine is looked at next."""


@dataclass(slots=True)
class InstanceState:
    """One instance, with what it was given."""

    state: int
    """`cluster.world.State`."""
    endpoint: int
    since_s: float = 0.0
    ends_s: float = inf
    """When the state has lasted its time; infinity: until somebody decides."""
    goal: int = 0
    """What it becomes once it is drained, at which endpoint (-1: its own) and for how long."""
    goal_endpoint: int = -1
    goal_s: float = 0.0
    loading_s: float | None = None
    """How long it loads its weights when it comes to that; None: as the cluster says."""
    in_memory: bool | None = None
    """Whether its weights are in CPU memory while it sleeps; None: as the cluster says."""
    models: list[str] = field(default_factory=list)
    """That were on it, the last one first."""
    round_trips: NDArray[np.float64] | None = None
    """Row of `FleetArrays.round_trips`; None: as the cluster says."""
    loads: tuple[int, int, int] | None = None
    """KV tokens reserved, tokens left and prompt tokens queued, as the fleet arrays have them; None: from `requests`."""
    limits: tuple[int, int] | None = None
    """Requests and KV tokens that the dispatcher counts on; None: as the cluster says."""
    placed_tokens: int = 0
    moved: bool = False
    """Whether it has the engine that its model has on its GPU type, though it may be back at its own endpoint."""
    requests: list[Running] = field(default_factory=list)
    """Those that run in order of admission, then those that wait there in order, then those on their way."""
    work: Work | None = None
    """What it is doing; None: it begins an iteration at `begins_s` with what has reached it by then."""
    begins_s: float = 0.0


@dataclass(slots=True)
class Held:
    """A request that waits for an endpoint."""

    request: int
    endpoint: int
    key: float
    prompt_tokens: int
    output_tokens: int
    """Expected, cut to what the largest instance holds."""


@dataclass(slots=True)
class GroupState:
    """A request group and where it stands."""

    place: int
    """In `GroupArrays.groups`."""
    endpoint: int
    kind: int
    number: int
    joined: int
    prompt_tokens: float
    output_tokens: float
    opened_s: float
    hold_until_s: float
    pinned: bool
    is_open: bool
    """Whether requests of its kind still join it."""
    queue: int
    """Virtual queue, by the number of its instance; -1 for none."""
    rank: int
    """Place in that queue."""
    members: list[int]
    """Places in `FleetState.waiting`, in the order in which they leave."""


@dataclass(slots=True)
class Groups:
    """All request groups, and what decides of the next ones."""

    groups: list[GroupState]
    mean_tokens: list[float]
    """By endpoint."""
    classes: list[tuple[int, int]]
    """(priority, due in ms) of each SLO class that is known, in order."""
    next_number: int
    free_places: list[int]
    """Of places that were in use before, those free now; the last is taken first."""
    looked_s: float = 0.0
    """When the global scheduler looked last."""
    tried: tuple[int, int] = (-1, -1)
    """Groups ever made and groups in use when its solver was called last,"""
    tried_s: float = -inf
    """and when."""
    short_instances: dict[int, int] = field(default_factory=dict)
    mean_output: list[float] | None = None
    """By endpoint; None: half of `mean_tokens`."""
    joined_s: float | None = None
    """When a request joined a group last; None: at `FleetState.now_s`."""


@dataclass(slots=True)
class EndpointState:
    """What an endpoint remembers."""

    cursor: int = -1
    """Instance that was given work last."""
    asked_work_s: float = 0.0
    """Engine seconds that were asked of it, the older ones forgotten (`routing.regions`),"""
    backlog_s: float = 0.0
    """and those for each instance that are not computed yet."""
    scaled_s: float = -inf
    """When the reactive trigger changed it last."""
    changed_s: float = -inf
    """When a strategy or the floor did."""
    last: Change = UNCHANGED
    """What that was."""
    batch_opened_s: float = inf
    batch_due_s: float = inf


@dataclass(slots=True)
class FleetState:
    """The fleet at `now_s`."""

    now_s: float
    requests: Requests
    """That wait or run, in order of arrival; none came after `now_s`."""
    outcomes: NDArray[np.void]
    """`cluster.world.OUTCOME` of each, as far as it came."""
    instances: list[InstanceState]
    """As many as the cluster has."""
    endpoints: list[EndpointState]
    waiting: list[Held] = field(default_factory=list)
    """In order of arrival at their queues: what breaks ties."""
    groups: Groups | None = None
    """None: made anew from what waits."""
    travelling: list[tuple[int, int]] = field(default_factory=list)
    """(request, endpoint) of those on their way to another region, in the order in which they were sent."""
    kept_tokens: NDArray[np.int32] | None = None
    """By request: output that it had when it was evicted; None: nobody was."""
    sweep_s: float = inf
    """When what waits is looked at next."""
    reclaims_s: list[float] = field(default_factory=list)
    """How long the next reclaims from spot take, as far as they are drawn."""
    swap_targets: list[int] = field(default_factory=list)
    """By swap group: who wakes once the one that is awake sleeps, -1 for nobody."""
    asked_tokens: NDArray[np.float64] | None = None
    """endpoints x seconds: tokens asked for in each second just before `now_s`, oldest first; None: none."""

    @property
    def slots(self) -> int:
        """Of the waiting set, that it needs; and one for the next request."""
        places = [one.place for one in self.groups.groups] if self.groups else []
        return 2 + max([len(self.waiting), *places])
