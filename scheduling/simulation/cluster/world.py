"""All arrays of a simulation, as one bundle for @compiled functions. Created by `build`."""

from dataclasses import fields
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled_inline, record
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.profile import Profile
from scheduling.policy import RECORD
from scheduling.queueing.waiting_set import WaitingArrays
from scheduling.routing.prefix_affinity import Affinity
from scheduling.simulation.cluster.event_queue import EventTree
from scheduling.simulation.engine.state import EngineArrays
from scheduling.struct_of_arrays import struct_of_arrays


class State(IntEnum):
    """State of an instance. It accepts work while READY; of opportunistic classes alone, while SPOT."""

    EMPTY = 0
    """No paid machine."""
    STARTING = 1
    """The machine is being started."""
    LOADING = 2
    """Weights are being loaded into the GPU."""
    READY = 3
    DRAINING = 4
    """Finishes its requests, then enters the state decided on."""
    SPOT = 5
    """Donated, with its model loaded."""
    RECLAIMING = 6
    """Being taken back from spot; its requests leave."""
    FALLING_ASLEEP = 7
    ASLEEP = 8
    """Weights in host memory, no KV cache."""
    WAKING = 9
    FAILED = 10
    LOST = 11
    """An empty place whose machine is lost: nothing starts there until it is back."""


UNPAID: Final = (State.EMPTY, State.SPOT, State.LOST)
"""States in which an instance costs nothing."""


class Outcome(IntEnum):
    """Outcome of a request."""

    WAITING = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    """Its instance was lost after the first token, or for the third time."""
    REFUSED = 4
    """No instance served its model or soon would, the queue was full, or it waited too long."""


# Outcomes as plain numbers, for kernels.
WAITING: Final = 0
RUNNING: Final = 1
DONE: Final = 2
FAILED: Final = 3
REFUSED: Final = 4

BEGAN, DUE, RANK, MEAN, WORST = range(5)
"""Columns of `World.standings`."""

MAX_ATTEMPTS: Final = 3
"""Instances that a request is tried on, as in the gateway."""

OUTCOME = record(
    [
        ("ttft_s", np.float64),
        ("e2e_s", np.float64),
        ("queue_s", np.float64),
        ("instance", np.int32),
        ("cached_tokens", np.int32),
        ("endpoint", np.int16),
        ("preemptions", np.int16),
        ("attempts", np.int8),
        ("evictions", np.int8),
        ("state", np.int8),
        ("model_rule", np.int8),
    ]
)
"""Outcome of one request; times in seconds from its arrival at the caller's gateway, nan for never.

`cached_tokens` of its prompt were in the prefix cache when it was first admitted. `model_rule` numbers one of
`routing.models.RULES`.
"""

DECISION = record(
    [
        ("time_s", np.float64),
        ("request", np.int64),
        ("endpoint", np.int32),
        ("instance", np.int32),
        ("waiting", np.int64),
    ]
)
"""One dispatch: the request's instance, and how many requests were left waiting at the endpoint."""

RUN_STATE = record(
    [
        ("now_s", np.float64),
        ("reactive", np.uint8),  # whether the trigger is on; then its parameters
        ("out_above", np.float64),
        ("in_below", np.float64),
        ("cooldown_s", np.float64),
        ("min_instances", np.int64),
        ("max_instances", np.int64),
        ("called_endpoint", np.int64),  # what the caller must handle: an endpoint that scales out,
        ("called_instance", np.int64),  # or an instance that is to move
        ("at_door", np.int64),  # a request that waits since just now, to be judged by the caller; -1 for none
        ("estimates", np.uint8),  # whether the caller estimates the wait of every request that begins to wait
        (
            "may_fall_back",
            np.int64,
        ),  # a request that comes, for which the caller asks the fallback of its model; -1: none
        ("asked_fallback", np.int64),  # the last one for which it did
        ("swept_fallbacks", np.uint8),  # whether it did for what waits at the current endpoint of a sweep
        ("arrived", np.int64),  # requests by outcome
        ("ended", np.int64),
        ("forwarded", np.int64),
        ("requeued", np.int64),
        ("refused", np.int64),
        ("expired", np.int64),  # of those, waited too long
        ("rehomed", np.int64),
        ("failed", np.int64),
        ("evictions", np.int64),
        ("spot_served", np.int64),  # requests that ended on donated instances,
        ("spot_evicted", np.int64),  # that left these and waited again,
        ("spot_ended", np.int64),  # and that ended by a reclaim
        ("events", np.int64),
        ("decisions", np.int64),
        ("changes", np.int64),
        ("scale_outs", np.int64),
        ("scale_ins", np.int64),
        ("reclaims", np.int64),
        ("ended_in_runs", np.int64),  # requests of application runs that ended
        ("seen_in_runs", np.int64),  # of those, seen by the caller
        ("sweep_node", np.int64),  # of the event tree; -1 if waiting requests never move
        ("sweep_s", np.float64),  # time of the next sweep; infinity while no request waits
        ("first_sweep_s", np.float64),  # sweeps are this and whole multiples of their period later
        ("sweeping", np.int64),  # the current endpoint of a sweep
        ("caches", np.uint8),  # whether any engine caches prefixes
        ("share_spot", np.uint8),  # whether a spot instance of another model may be redeployed
        ("wake_s", np.float64),  # delays
        ("spot_median_s", np.float64),
        ("regions", np.int64),  # origins of requests are these, and the same within each residency (`Cluster.origins`)
    ]
)
"""State of the whole run: clock, parameters, counts."""

ENDPOINT = record(
    [
        ("model", np.int64),
        ("region", np.int64),
        *RECORD,
        *((field.name, np.float64) for field in fields(Profile)),  # for orderings that estimate service times
        ("batch_size", np.int64),  # 0: continuous; else an idle instance is given a whole batch (SSJF: dynamic)
        ("batch_wait_s", np.float64),
        ("batch_opened_s", np.float64),  # when a partial batch first found an idle instance; infinity for none
        ("largest_kv_tokens", np.int64),  # of its largest instance; longer predictions are cut to it
        ("serving", np.int64),  # instances that serve it or soon will
        ("scaled_s", np.float64),  # when the reactive trigger last changed it
        ("expires_s", np.float64),  # no waiting request expires before this
    ]
)
"""The policy of an endpoint, and its state."""


LIFE = record(
    [
        ("state", np.int8),
        ("goal", np.int8),  # next state of a draining instance,
        ("goal_endpoint", np.int32),  # its endpoint then, -1 for the same,
        ("goal_s", np.float64),  # and how long that lasts
        ("since_s", np.float64),
        ("loading_s", np.float64),  # next loading time of its weights
        ("start_s", np.float64),  # its delays
        ("local_weights_s", np.float64),
        ("remote_weights_s", np.float64),
        ("reclaim_times", np.float64),  # its reclaim time as a multiple of the drawn one
        ("usd_per_hour", np.float64),
        ("swap_group", np.int32),  # -1: shares no GPUs
        ("sleep_s", np.float64),  # if it shares GPUs: time to fall asleep,
        ("wake_s", np.float64),  # to wake with its weights in CPU memory,
        ("reload_s", np.float64),  # and with them only in storage
        ("weights_bytes", np.float64),
        ("in_memory", np.uint8),  # whether its weights are in CPU memory while it sleeps
        ("swaps", np.float64),  # to it, the older ones counting less
    ]
)
"""State of one instance, and the decisions pending for it."""

SWAP_GROUP = record(
    [
        ("target", np.int32),  # wakes once the awake one sleeps; -1 for none
        ("memory_bytes", np.float64),  # CPU memory for weights of sleeping instances
        ("swaps", np.int64),
    ]
)
"""Instances that share their GPUs, of which at most one is awake."""

CHANGE = record(
    [
        ("time_s", np.float64),
        ("instance", np.int32),
        ("endpoint", np.int32),
        ("before", np.int32),
        ("after", np.int32),
    ]
)
"""One change of an instance's state. (No padding between fields: a copy would leave its bytes undefined.)"""


@struct_of_arrays
class LifeArrays(NamedTuple):
    """States of all instances, modified by `changes`."""

    instances: NDArray[np.void]
    """LIFE records."""
    spent_s: NDArray[np.float64]
    """instances x states: seconds spent in each up to the last change."""
    changes: NDArray[np.void]
    """CHANGE records, of which `run_state.changes` are written."""
    reclaims_s: NDArray[np.float64]
    """Durations of the next reclaims from spot, of which `run_state.reclaims` are used."""
    fits: NDArray[np.uint8]
    """endpoints x instances: whether an instance is in the endpoint's region and could run its model."""
    redeploy_s: NDArray[np.float64]
    """By endpoint: seconds to load its model on the spot instance of another."""
    groups: NDArray[np.void]
    """SWAP_GROUP records; a single unused one if no GPUs are shared."""


@struct_of_arrays
class Arrivals(NamedTuple):
    """Request columns that the engine reads. A column of one element applies to all."""

    arrival_s: NDArray[np.float64]
    model: NDArray[np.int16]
    region: NDArray[np.int16]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    predicted_tokens: NDArray[np.int32]
    priority: NDArray[np.int32]
    deadline_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    hold_s: NDArray[np.float64]
    judged: NDArray[np.int8]
    held: NDArray[np.int8]
    tenant: NDArray[np.int32]
    run: NDArray[np.int32]
    adapter: NDArray[np.int32]


@struct_of_arrays
class World(NamedTuple):
    """All arrays of a simulation.

    Where any request is opportunistic, each endpoint is followed, as many further as there are, by that of its donated
    instances (`base_of`, `spot_of`).
    """

    fleet: FleetArrays
    endpoints: EndpointArrays
    waiting: WaitingArrays
    engines: EngineArrays
    events: EventTree
    """Nodes: instances' work; instances' lives; links between regions (from * origins + to); endpoints' batches; requests in
    transit from endpoints to their instances, where that takes time.
    """
    arrivals: Arrivals
    outcomes: NDArray[np.void]
    """OUTCOME records, by request."""
    policies: NDArray[np.void]
    """ENDPOINT records."""
    candidate_first: NDArray[np.int64]
    """`candidates[candidate_first[at]:candidate_first[at + 1]]`, at = model * origins + origin, in order of preference.

    Further ones, if any request is opportunistic, are those of opportunistic requests: donated instances come first.
    """
    candidates: NDArray[np.int32]
    latency_s: NDArray[np.float64]
    """One way, origins x origins."""
    held: NDArray[np.int64]
    """The request in each slot of the waiting set."""
    kept_tokens: NDArray[np.int32]
    """By request: output before its eviction, which its next instance computes as part of the prompt. One element, 0, before
    the first eviction.
    """
    fallback: NDArray[np.int16]
    """Fallback by model, -1 for none; empty where no model has one."""
    fallback_wait_s: NDArray[np.float64]
    """By model: the longest wait before it serves; infinity: however long."""
    may_fall_back: NDArray[np.uint8]
    """By request: whether the fallback of its model may still serve it; one element where no model has one."""
    standings: NDArray[np.float64]
    """requests x 5: where the run of each stood when it came (`ordering.Standing`); one row without runs."""
    ended_in_runs: NDArray[np.int64]
    """Requests of application runs in the order in which they ended, `run_state.ended_in_runs` of them."""
    lives: LifeArrays
    no_rows: NDArray[np.float64]
    """`candidates.NO_ROWS`: the inputs of decisions are not read."""
    travelling: NDArray[np.int64]
    """For each request in transit to another region, the next one; one element when no link takes time."""
    link: NDArray[np.int64]
    """2 x links: first and last request on each."""
    sent: NDArray[np.int32]
    """2 x endpoints: first and last sequence in transit to an instance of each; the next one is its `next`."""
    decisions: NDArray[np.void]
    """DECISION records; empty if no log is kept."""
    busy: NDArray[np.uint8]
    """Scratch, by instance."""
    least_tokens: NDArray[np.float64]
    """Scratch, by instance."""
    kept_kinds: NDArray[np.uint8]
    """Scratch, by kind of waiting requests (`sweep`)."""
    affinity: Affinity
    """Memory of the prefix-aware router; nearly empty if unused."""
    run_state: NDArray[np.void]
    """One RUN_STATE record."""


@compiled_inline
def base_of(world: World, endpoint: int) -> int:
    """Return the endpoint whose donated instances are at *endpoint*; *endpoint* itself if it has others."""
    own = world.lives.fits.shape[0]
    return int(endpoint - own if endpoint >= own else endpoint)


@compiled_inline
def spot_of(world: World, endpoint: int) -> int:
    """Return the endpoint of the donated instances of *endpoint*, one of the fleet's own; -1 if these serve nothing."""
    own = world.lives.fits.shape[0]
    return int(endpoint + own if world.policies.size > own else -1)
