"""The state of a live fleet at one moment, as its dispatcher knows it; a simulation can be forked from it.

Times are seconds after that moment: those of the past are negative.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct, field, structs

from scheduling.queueing.promises import Calibration
from scheduling.queueing.waits.correction import Correction
from scheduling.queueing.waits.overtaking import Arrivals
from scheduling.queueing.waits.waiting_time import Estimate, Moments

LONG_AGO_S: Final = -1e9
"""Stands for minus infinity, which JSON cannot hold."""


class Condition(StrEnum):
    """Life cycle of an instance, by the names that `simulation.cluster.world.State` has for it."""

    LOADING = "LOADING"
    READY = "READY"
    DRAINING = "DRAINING"
    SPOT = "SPOT"
    RECLAIMING = "RECLAIMING"
    ASLEEP = "ASLEEP"
    EMPTY = "EMPTY"
    FAILED = "FAILED"


class InstanceState(Struct, forbid_unknown_fields=True):
    name: str
    model: str
    region: str
    gpu: str
    """GPU type; in a fork with the tensor-parallel degree (`scenario.fleet.gpus_as_type`)."""
    state: Condition
    since_s: float
    spot: bool = False
    """It is donated, or its requests leave it since it is no longer."""
    ends_s: float | None = None
    """When its start is expected to end; None if nothing times its state."""
    swap_group: str = ""
    leaves: bool = False
    """It gives up its GPUs in a current swap."""
    waits: bool = False
    """It gets them next."""
    up_s: float = 0.0
    """When it last got them."""
    reachable: bool = True
    kv_tokens: int = 0
    adapters: list[str] = []
    """LoRA adapters that it holds, most recently used first."""
    round_trips: list[float] = []
    """Its row of `FleetArrays.round_trips`."""
    given_tokens: list[float] = []
    """Its row of `FleetArrays.given_tokens`."""
    iteration_s: float | None = None
    """End of its last observed iteration."""
    restore_s_per_token: float | None = None
    """By which KV returns from its CPU memory, where it offloads any."""


class Holder(NamedTuple):
    """An instance that has the start of a prompt."""

    instance: int
    """Index in `FleetState.instances`."""
    tokens: int
    age_tokens: int
    """Tokens that it was given since it was given that."""
    by_events: bool = False
    """By its KV events; else by the router's index."""


class PromptState(Struct, forbid_unknown_fields=True):
    """The start of a prompt, as routers know it."""

    recorded: bytes
    """Hashes (64 bits) of its recorded blocks (`routing.prefix_affinity`)."""
    block_tokens: int
    """Tokens in each block of which some are recorded."""
    tokens: bytes = b""
    """Hashes of the full blocks of its tokens, where these are known,"""
    tokens_block: int = 0
    """and the tokens in each."""
    holders: list[Holder] = []


class RequestState(Struct, kw_only=True, forbid_unknown_fields=True):
    request_id: str
    model: str
    region: str
    """Region of the caller."""
    served_in: str
    slo_class: str
    arrival_s: float
    prompt_tokens: int
    predicted_tokens: int
    sequences: int
    attempts: int
    tenant: str = ""
    adapter: str = ""
    """LoRA adapter, "" for none."""
    prompt: int | None = None
    """Index in `FleetState.prompts`, where a router considers prompts."""
    priority: int | None = None
    """With which the queue manager released it; None: that of its class."""
    asked_model: str = ""
    """Name that it asked for, where another model than that serves it, and by which rule (`routing.models`)."""
    model_rule: str = ""
    falls_back: bool = False
    """Whether the fallback of its model may still serve it."""
    true_output: int | None = None
    """Output tokens, if the request has ended since."""


R = TypeVar("R", bound=RequestState)


class WaitState(NamedTuple):
    """What is expected of a waiting request."""

    tokens: tuple[float, ...]
    """Mean and variance of its output, and the error of the mean, with its weight."""
    estimate: Estimate | None
    """Its wait as first estimated, where it still waits at that endpoint."""


class WaitingRequest(RequestState, kw_only=True):
    waits: WaitState | None = None
    key_s: float | None = None
    """Its queue key, a moment but where tenants have shares of its queue; None: as if it came now."""
    rank_s: float = 0.0
    """Its rank inside a request group."""
    put_off_s: float | None = None
    """Seconds after its arrival when it counts as due, where it can no longer be in time (`virtual_queues.defer_late`)."""
    spot: bool = False
    """For a donated instance."""


class HeldRequest(RequestState, kw_only=True):
    """Held by the queue manager for non-interactive work; `served_in` is the region that its caller prefers."""


class RunningRequest(RequestState, kw_only=True):
    expected_prompt: int
    """Prompt tokens as the dispatcher counts them."""
    expected_tokens: int
    """Prompt and output tokens that the dispatcher reserved."""
    instance: int
    """Index in `FleetState.instances`."""
    placed_s: float
    queue_key_s: float = 0.0
    """By which its engine orders it, where that is not by class."""
    streamed: bool
    output_tokens: int
    cached_tokens: int = 0
    """Of its prompt at its instance when it was placed, as its router knew."""
    ahead: int | None = None
    """Iterations since it entered the look-ahead map; None if it is in none."""


class LearnedWaits(Struct):
    """What waits at an endpoint have taught, by SLO class, "" for all, and when its last requests ended."""

    corrections: dict[str, Correction] = {}
    calibrations: dict[str, Calibration] = {}
    finished_s: list[float] = []
    arrivals: Arrivals = field(default_factory=Arrivals)


class EndpointState(Struct, forbid_unknown_fields=True):
    model: str
    region: str
    spot: bool = False
    """Of its donated instances."""
    ordering: str = ""
    cursor: int | None = None
    """Instance that last got work."""
    changed_s: float = LONG_AGO_S
    """When, and by how many instances, the endpoint was last scaled."""
    changed_delta: int = 0
    asked_tokens: list[float] = []
    """Tokens asked for in each of the last seconds, oldest first."""
    asked_work_s: float = 0.0
    """Engine seconds requested, decayed by age (`routing.regions`)."""
    backlog_s: float = 0.0
    """Of those, the part not yet computed."""
    mean_tokens: float = 0.0
    """Where it has request groups, of its requests,"""
    mean_output: float = 0.0
    group_limit: int = 0
    """the most requests of a group,"""
    token_s: tuple[float, float] = (0.0, 0.0)
    """and the time of a prompt token and of an output token, by which requests of similar lengths are found: as of the last
    sweep.
    """
    short: int = 0
    """Instances that the global scheduler misses."""
    waits: LearnedWaits = field(default_factory=LearnedWaits)


GROUP: Final = ("kind", "number", "joined", "prompt_tokens", "output_tokens", "opened_s", "pinned")
"""Fields of a group that are those of its record (`queueing.groups`)."""


class GroupState(Struct, forbid_unknown_fields=True):
    """A request group and its position in a virtual queue."""

    endpoint: int
    """Index in `FleetState.endpoints`."""
    kind: int
    number: int
    joined: int
    prompt_tokens: float
    output_tokens: float
    opened_s: float
    pinned: bool
    is_open: bool
    """Whether requests of its kind still join it."""
    instance: int | None
    """Instance of its virtual queue."""
    members: list[int]
    """Indices into `FleetState.waiting`, in the order of leaving."""


class GroupsState(Struct, forbid_unknown_fields=True):
    """All request groups, and the memory of the global scheduler."""

    groups: list[GroupState]
    """In the order of their virtual queues."""
    classes: list[tuple[int, int]]
    """Priority and due time in ms of each SLO class, in the order that kinds use."""
    next_number: int
    tried: tuple[int, int] = (-1, -1)
    """Groups ever made and groups in use at the last search for a better order."""
    tried_s: float = LONG_AGO_S


class BacklogState(Struct, forbid_unknown_fields=True):
    """Work of a model that the queue manager expects besides the requests that it holds (`queueing.held_work`)."""

    model: str
    expected: list[tuple[float, int]]
    """(deadline, requests) of announced work."""
    checked_s: float
    """When it last computed how many requests must run at once, and how many."""
    needed: float
    mean_service_s: float
    """Of the requests that it held last."""
    mean_tokens: float


class FleetState(Struct, forbid_unknown_fields=True):
    instances: list[InstanceState]
    running: list[RunningRequest]
    """In order of dispatch."""
    waiting: list[WaitingRequest]
    """In order of arrival at their queues."""
    endpoints: list[EndpointState]
    """Those of donated instances last."""
    groups: GroupsState | None = None
    """None if no endpoint orders by groups."""
    swept_s: float = 0.0
    """When waiting requests were last checked for a better region."""
    at: float = 0.0
    """The time of the state, in epoch seconds."""
    lengths: dict[str, list[float]] = {}
    """By model: actual over predicted output of recent requests, from which unknown outputs are drawn."""
    held: list[HeldRequest] = []
    """In order of arrival."""
    backlogs: list[BacklogState] = []
    look_s: float = 0.0
    """When the queue manager looks next."""
    memory: dict[str, float] = {}
    """Memory of the scaling strategies."""
    prompts: list[PromptState] = []
    ended: list[tuple[str, str, Moments]] = []
    """Lengths of ended requests, by model and SLO class, "" for all."""

    @property
    def requests(self) -> list[RequestState]:
        """Return the requests that run, wait or are held."""
        return [*self.running, *self.waiting, *self.held]


def joined(states: Sequence[FleetState]) -> FleetState:
    """Return the states of parts of a fleet, which have no instance or endpoint in common, as that of the whole.

    Only the first part with request groups keeps them: in the whole, what is grouped in others joins groups anew. What is of
    one moment for all is as in the first part.
    """
    whole = structs.replace(states[0])
    for part in states[1:]:
        instances, prompts = len(whole.instances), len(whole.prompts)

        def moved(request: R, by: int = prompts) -> R:
            return structs.replace(request, prompt=None if request.prompt is None else request.prompt + by)

        running = [structs.replace(moved(one), instance=one.instance + instances) for one in part.running]
        endpoints = [
            structs.replace(one, cursor=None if one.cursor is None else one.cursor + instances)
            for one in part.endpoints
        ]
        own = sum(not one.spot for one in whole.endpoints)
        theirs = [[each for each in endpoints if each.spot == spot] for spot in (False, True)]
        groups = whole.groups
        if groups is not None:
            after = [each + len(theirs[0]) * (each >= own) for each in range(len(whole.endpoints))]
            groups = structs.replace(
                groups, groups=[structs.replace(one, endpoint=after[one.endpoint]) for one in groups.groups]
            )
        elif part.groups is not None:
            of_own = [not one.spot for one in part.endpoints]
            places = [
                own + sum(of_own[:at]) if is_own else len(whole.endpoints) + sum(of_own) + at - sum(of_own[:at])
                for at, is_own in enumerate(of_own)
            ]
            groups = structs.replace(
                part.groups,
                groups=[
                    structs.replace(
                        one,
                        endpoint=places[one.endpoint],
                        instance=None if one.instance is None else one.instance + instances,
                        members=[each + len(whole.waiting) for each in one.members],
                    )
                    for one in part.groups.groups
                ],
            )
        whole = structs.replace(
            whole,
            instances=[*whole.instances, *part.instances],
            running=sorted([*whole.running, *running], key=lambda one: one.placed_s),
            waiting=[*whole.waiting, *map(moved, part.waiting)],
            endpoints=[*whole.endpoints[:own], *theirs[0], *whole.endpoints[own:], *theirs[1]],
            groups=groups,
            lengths=whole.lengths | part.lengths,
            held=sorted([*whole.held, *map(moved, part.held)], key=lambda one: one.arrival_s),
            backlogs=[*whole.backlogs, *part.backlogs],
            memory=whole.memory | part.memory,
            prompts=[
                *whole.prompts,
                *(
                    structs.replace(
                        one, holders=[each._replace(instance=each.instance + instances) for each in one.holders]
                    )
                    for one in part.prompts
                ),
            ],
            ended=[*whole.ended, *part.ended],
        )
    return whole
