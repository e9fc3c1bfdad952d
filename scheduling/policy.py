"""The policy of an endpoint, a model in a region: every knob with its default, unit, range and help.

Everything else is derived: scenario tables, the arrays that kernels read, deployment columns with their admin and REST
fields, and per-model settings.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import numpy as np
from msgspec import field

from scheduling.knob import Column, Knob, Policy, knobs, nested
from scheduling.lookahead.rule import LookAheadRule
from scheduling.queueing.release_rule import ReleaseRule

ROUTERS: Final = {
    "round_robin": "Round robin",
    "least_request": "Least request",
    "minimum_use": "Minimum use",
    "join_shortest_queue": "Join shortest queue",
    "preserve": "Least load ahead (PreServe)",
    "least_delay": "Least predicted delay, with prefixes",
}
"""In the order of the codes in `scheduling.routing.routers`."""
ORDERS: Final = {
    "fcfs": "First come, first served",
    "priority": "Priority of the SLO class, then first come",
    "shortest": "Shortest predicted first",
    "deadline": "Earliest deadline first",
    "ssjf": "Priority of the SLO class, then shortest predicted first, with aging",
    "slack": "Least slack first",
    "sjf": "Shortest true output first",
    "qlm": "Request groups in virtual queues (QLM)",
    "application": "First come, first served by application run (Parrot)",
    "srpt": "Least expected remaining work of the application run first",
    "hermes": "Lowest Gittins rank of the application run first (Hermes)",
    "run_deadline": "Earliest deadline of the application run first",
    "run_slack": "Least worst-case slack of the application run first (Hermes)",
    "vtc": "Tenant served least first (virtual token counter)",
    "wfq": "Weighted fair queueing of tenants",
}
"""In the order of the codes in `scheduling.queueing.ordering`."""
LIVE_ORDERS: Final = tuple(name for name in ORDERS if name not in ("shortest", "sjf"))
"""Live orders exclude `shortest`, which may starve a request, and `sjf`, which needs the true output length."""
GROUP_ORDERS: Final = {
    "arrival": "As they came",
    "length": "Shortest predicted first",
    "hermes": "Lowest Gittins rank of the application run first (Hermes)",
}
"""In the order of the codes in `scheduling.queueing.groups`."""
RUN_DEMANDS: Final = {
    "table": "Recorded runs, by unit and how often it ran before",
    "learned": "Recorded runs that look alike, weighed by what they have earned",
    "graph": "Walks of the demand graph (Hermes)",
}
BATCHING: Final = {"continuous": "Continuous", "none": "One request at a time", "dynamic": "Whole batches"}
NO_BOUND: Final = 1 << 62
MEASURED: Final = -1
"""As `scheduling.routing.requests_ahead.MEASURED`."""


class Batching(Policy, frozen=True):
    """How an endpoint forms batches (SSJF section 4)."""

    mode: Annotated[str, Knob(choices=BATCHING, help="How batches are formed.")] = "continuous"
    max_batch_size: Annotated[int, Knob(ge=0, help="Requests in a whole batch.")] = 0
    wait_timeout_s: Annotated[float, Knob(ge=0, unit="s", help="Longest wait for a batch to fill.")] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "dynamic" and self.max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {self.max_batch_size}")


class EndpointPolicy(Policy, frozen=True, kw_only=True):
    """How the requests of an endpoint are ordered, bounded and routed."""

    routing: Annotated[
        str,
        Knob(
            choices=ROUTERS,
            help="How an instance is chosen.",
            column=Column(name="routing_policy", default="join_shortest_queue"),
        ),
    ] = "join_shortest_queue"
    ordering: Annotated[
        str,
        Knob(
            choices=ORDERS,
            help="Which request that waits goes first.",
            column=Column(name="ordering_policy", default="priority", choices=LIVE_ORDERS),
        ),
    ] = "fcfs"
    ordering_stretch: Annotated[
        float,
        Knob(
            ge=0,
            help="Of ssjf: a request is overtaken only by those that come within this many times its own predicted "
            "service time after it; of srpt and hermes, a run by those that begin within this many times its remaining "
            "work or rank. 0 is first come, first served.",
            column=Column(default=100.0, le=1e6),
        ),
    ] = 100.0
    group_batches: Annotated[
        float,
        Knob(
            gt=0,
            setting="GROUP_BATCHES",
            help="Most batches in a request group of the order `qlm` (QLM's delta): fewer let the global scheduler decide "
            "more finely and take it longer.",
        ),
    ] = 4.0
    group_order: Annotated[
        str,
        Knob(
            choices=GROUP_ORDERS,
            setting="GROUP_ORDER",
            help="Order in which requests leave their group: as they came, the shortest predicted first, or by the Gittins "
            "rank of their application run, which also moves its group by the slack of the run.",
        ),
    ] = "arrival"
    run_demand: Annotated[
        str,
        Knob(
            choices=RUN_DEMANDS,
            setting="RUN_DEMAND",
            title="what runs still need",
            help="How the remaining demand of application runs is predicted, for the orders by run: by recorded runs at the "
            "same moment, by the mean of these, or by Hermes' demand graph.",
        ),
    ] = "table"
    eviction_limit: Annotated[
        int,
        Knob(
            ge=0,
            le=100,
            setting="EVICTION_LIMIT",
            title="evictions of a request",
            help="How often the global scheduler may evict one request so that a group that is due sooner is in time; 0 is "
            "never. What it had computed is computed again, unless its server keeps it in CPU memory (vLLM's "
            "`--kv-offloading-size`).",
        ),
    ] = 0
    swap_by_queue: Annotated[
        bool,
        Knob(
            setting="SWAP_BY_QUEUE",
            help="Instances that share GPUs have one virtual queue together, and the model of its first request group is "
            "swapped to; where it is off for a model among them, each has a queue and swaps are made on demand. Of the "
            "order `qlm`.",
        ),
    ] = True
    dispatch_round_trip_ms: Annotated[
        float, Knob(ge=0, unit="ms", help="From a decision until the instance has the request.")
    ] = 0.0
    requests_ahead_limit: Annotated[
        int | None,
        Knob(
            ge=0,
            absent=MEASURED,
            help="Requests at the most that an instance is given beyond what it runs, so that no place stands empty for a "
            "round trip. Empty: as many as end there within a measured round trip. 0: none, the order is strict.",
            title="requests ahead",
            column=Column(le=32_767),
        ),
    ] = None
    room_margin: Annotated[
        float,
        Knob(
            gt=0,
            setting="ROOM_MARGIN",
            title="room above the API process",
            help="An instance is given at most this many times the requests at once with which its API process keeps up, "
            "by the limits in its profile; without these, `max_num_seqs`. More of them only share what the process "
            "writes.",
        ),
    ] = 1.25
    region_threshold: Annotated[
        float,
        Knob(
            ge=0,
            setting="SPILL_ABOVE",
            title="spills above",
            help="Use of a region above which its requests may be given to another (SageServe's threshold); 1 is full.",
        ),
    ] = 0.7
    follow_kv_events: Annotated[
        bool,
        Knob(
            help="Servers publish which blocks their prefix cache stores and removes (vLLM's --kv-events-config), and the "
            "router least_delay goes by that in place of an estimate.",
            title="KV events",
            column=Column(name="kv_events", default=False),
        ),
    ] = False
    queue_bound: Annotated[
        int | None,
        Knob(
            ge=0,
            absent=NO_BOUND,
            help="Requests held for this endpoint before new ones are answered with 429.",
            column=Column(default=2000, le=1_000_000, summed=True),
        ),
    ] = None
    batching: Batching = field(default_factory=Batching)
    look_ahead: LookAheadRule = field(default_factory=LookAheadRule)
    niw: ReleaseRule = field(default_factory=ReleaseRule)
    """Of non-interactive work; the model's first endpoint says it for all."""

    @property
    def exact_prefixes(self) -> bool:
        """Whether the router reads what the instances have cached."""
        return self.follow_kv_events and self.routing == "least_delay"

    @property
    def round_trip_s(self) -> float:
        return self.dispatch_round_trip_ms / 1000

    def is_full(self, waiting: int) -> bool:
        """Whether a queue of *waiting* requests is full."""
        return self.queue_bound is not None and waiting >= self.queue_bound


KNOBS: Final = knobs(EndpointPolicy)
COLUMNS: Final = {each.knob.column.name or name: each for name, each in KNOBS.items() if each.knob.column is not None}
"""Knobs that a live deployment holds, by column."""
LIVE_CHOICES: Final = {
    column: {name: title for name, title in knob.choices.items() if name in (knob.column.choices or knob.choices)}
    for column, each in COLUMNS.items()
    for knob in [each.knob]
    if knob.choices is not None and knob.column is not None
}
"""Names that a live deployment's columns can hold, with titles."""
SETTINGS: Final = {
    each.knob.setting: each
    for struct in (EndpointPolicy, *nested(EndpointPolicy).values())
    for each in knobs(struct).values()
    if each.knob.setting
}
"""Knobs that are per-model settings live, by setting."""
RECORD: Final = [(name, np.float64 if each.type is float else np.int64) for name, each in KNOBS.items()]
"""Array fields of a policy: names as their position among the choices, None as `Knob.absent`."""


def array_value(policy: EndpointPolicy, name: str) -> int | float:
    """Return the array value of the knob *name* of *policy*."""
    value, knob = getattr(policy, name), KNOBS[name].knob
    if knob.choices is not None:
        return list(knob.choices).index(value)
    return knob.absent if value is None else value


def write_record(record: Any, policy: EndpointPolicy) -> None:
    """Write the knobs of *policy* into the fields `RECORD` of *record*."""
    for name in KNOBS:
        record[name] = array_value(policy, name)


def live_policy(setting: Callable[[str], Any], deployments: Sequence[object] = ()) -> EndpointPolicy:
    """Return the policy of an endpoint from its *setting* values and the columns of its *deployments*, oldest first."""

    def of_settings(struct: type[Policy]) -> dict[str, Any]:
        return {name: setting(each.knob.setting) for name, each in knobs(struct).items() if each.knob.setting}

    values = of_settings(EndpointPolicy)
    for name, struct in nested(EndpointPolicy).items():
        values[name] = struct(**of_settings(struct))
    for column, each in COLUMNS.items() if deployments else ():
        held = [getattr(row, column) for row in deployments]
        values[each.name] = sum(held) if each.knob.column and each.knob.column.summed else held[0]
    return EndpointPolicy(**values)
