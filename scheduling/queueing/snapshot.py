"""Snapshot of the virtual queues as a problem of the global scheduler: waiting groups, service times, room.

It is the same under both clocks (QLM section 7), and all that the solver knows.
"""

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, at_once
from scheduling.queueing.groups import GroupArrays
from scheduling.queueing.reordering.problem import Order, Problem
from scheduling.queueing.running import Running, ends_of, write_starts
from scheduling.queueing.swapping.keeping import kept_queues
from scheduling.queueing.swapping.service import batch_of, drain_s, due_at, request_s
from scheduling.queueing.swapping.timeline import having
from scheduling.queueing.waiting_set import WaitingArrays

NONE: Final = -1


class Snapshot(NamedTuple):
    """The queues at a moment, as a problem with groups and queues renumbered."""

    problem: Problem
    previous: Order
    """Their current order."""
    numbers: NDArray[np.int64]
    """By group: its number in the fleet; ascending, since rules take groups as numbered by arrival."""
    places: NDArray[np.int32]
    """By group: its index in `GroupArrays.groups`."""
    queues: NDArray[np.int32]
    """By queue: its index in `GroupArrays.queues`."""


@compiled
def _list_groups(
    arrays: GroupArrays,
    queue_ids: NDArray[np.int32],
    first: NDArray[np.int64],
    places: NDArray[np.int32],
    pinned: bool,
) -> int:
    """Write the groups of each queue, in order, to *places* and where each queue starts to *first*; return their number.

    Pinned groups are included only if *pinned* is set.
    """
    count = 0
    for at in range(queue_ids.size):
        first[at] = count
        group = int(arrays.queues[queue_ids[at]].first)
        while group >= 0:
            if pinned or arrays.groups[group].pinned == 0:
                places[count] = group
                count += 1
            group = int(arrays.groups[group].following)
    first[queue_ids.size] = count
    return count


@compiled
def _write_groups(
    fleet: FleetArrays,
    waiting: WaitingArrays,
    now_s: float,
    places: NDArray[np.int32],
    serving: NDArray[np.int32],
    batches: NDArray[np.float64],
    requests: NDArray[np.int64],
    model: NDArray[np.int64],
    due_s: NDArray[np.float64],
    service_s: NDArray[np.float64],
    own_s: NDArray[np.float64],
) -> None:
    """Write the demands of each group.

    *serving* (types x endpoints) are the instances that estimates are based on, -1 for none.
    """
    arrays = waiting.groups
    for at in range(places.size):
        this = arrays.groups[places[at]]
        endpoint, count = int(this.endpoint), float(this.count)
        requests[at], model[at] = this.count, endpoint
        due_s[at] = due_at(waiting, int(places[at])) - now_s
        for kind in range(serving.shape[0]):
            instance = int(serving[kind, endpoint])
            service_s[at, kind] = own_s[at, kind] = math.inf
            if instance < 0:
                continue
            each_s = request_s(fleet, instance, this.prompt_tokens / count, this.output_tokens / count)
            service_s[at, kind] = count * each_s
            own_s[at, kind] = max(0.0, count - batches[instance]) * each_s


def snapshot(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: WaitingArrays,
    now_s: float,
    *,
    running: Running | None = None,
    pinned: bool = False,
) -> Snapshot | None:
    """Return a snapshot of the virtual queues; None if none has a group.

    *running* gives when instances have room for the first group; None: at once. Pinned groups stay, and are left out unless
    *pinned* asks for them. The queue of instances that share GPUs serves the models of all of them, each after a swap;
    during a swap it serves the model that starts, once it is up; if it keeps its GPUs (`kept_queues`), only the model that
    has them.
    """
    arrays = waiting.groups
    grouped = np.flatnonzero(arrays.limit > 0)
    members = [
        int(instance)
        for endpoint in grouped.tolist()
        for instance in endpoints.members[endpoints.first[endpoint] : endpoints.first[endpoint + 1]]
        if fleet.accepting[instance] or arrays.swap_s[instance] < math.inf
    ]
    queue_ids = np.unique(arrays.queue_of[members]) if members else np.zeros(0, np.int32)
    if not queue_ids.size:
        return None
    first, listed = np.zeros(queue_ids.size + 1, np.int64), np.zeros(arrays.groups.size, np.int32)
    count = _list_groups(arrays, queue_ids, first, listed, pinned)
    if not count:
        return None
    by_number = np.argsort(arrays.groups["number"][listed[:count]])
    places, standing = listed[:count][by_number], np.empty(count, np.int64)
    standing[by_number] = np.arange(count)
    kinds: dict[tuple[object, ...], int] = {}
    kept = kept_queues(fleet, waiting)
    serving_rows, swap_rows, drain_rows = [], [], []
    queue_type = np.zeros(queue_ids.size, np.int64)
    loaded = np.full(queue_ids.size, NONE, np.int64)
    free_s, starts_s = np.zeros(queue_ids.size), np.zeros(fleet.endpoint.size)
    if running is not None:
        usual_tokens = arrays.mean_tokens[np.maximum(fleet.endpoint, 0)]
        write_starts(fleet, ends_of(fleet, running), usual_tokens, starts_s)
    for at, queue in enumerate(queue_ids.tolist()):
        pulling = [instance for instance in members if arrays.queue_of[instance] == queue]
        serves = tuple(
            (int(fleet.endpoint[each]), fleet.profile[each].tobytes(), at_once(fleet, each),
             int(fleet.kv_capacity_tokens[each]), int(fleet.memory_tokens[each]),
             float(arrays.swap_s[each]), arrays.swap_s[each] < math.inf and bool(fleet.accepting[each]), queue in kept)
            for each in pulling
        )  # fmt: skip
        for each in pulling:
            if fleet.accepting[each]:
                loaded[at] = fleet.endpoint[each]
                free_s[at] = starts_s[each] if starts_s[each] < math.inf else 0.0
        if loaded[at] < 0:
            coming, until_s, _ = having(fleet, arrays, queue, now_s)
            if coming != NONE:
                loaded[at], free_s[at] = fleet.endpoint[coming], until_s
        if serves not in kinds:
            kinds[serves] = len(kinds)
            serving, swap, drain = (
                np.full(arrays.limit.size, NONE, np.int32), np.full(arrays.limit.size, np.inf), np.zeros(arrays.limit.size)
            )  # fmt: skip
            for each in pulling:
                endpoint = int(fleet.endpoint[each])
                serving[endpoint] = each
                if arrays.swap_s[each] < math.inf and queue not in kept:
                    swap[endpoint] = arrays.swap_s[each]
                    batch = batch_of(fleet, arrays, each)
                    drain[endpoint] = drain_s(fleet, arrays, each, batch) + arrays.sleep_s[each]
            serving_rows.append(serving)
            swap_rows.append(swap)
            drain_rows.append(drain)
        queue_type[at] = kinds[serves]
    types = len(kinds)
    # A model of the problem is an endpoint: instances of one region never serve requests that wait in another.
    requests, model = np.zeros(count, np.int64), np.zeros(count, np.int64)
    due_s, service_s, own_s = np.zeros(count), np.zeros((count, types)), np.zeros((count, types))
    # An instance with a waiting group is full, and its sequences become free one by one: so the last of a group starts a
    # whole service after the first. Only after a swap, when it is empty, does a batch start at once.
    batches = np.ones(fleet.endpoint.size)
    for each in members:
        if not fleet.accepting[each]:
            batches[each] = batch_of(fleet, arrays, each)
    _write_groups(
        fleet, waiting, now_s, places, np.array(serving_rows), batches, requests, model, due_s, service_s, own_s
    )
    problem = Problem(
        requests=requests,
        model=model,
        due_s=due_s,
        service_s=service_s,
        own_s=own_s,
        queue_type=queue_type,
        free_s=free_s,
        loaded=loaded,
        swap_s=np.array(swap_rows),
        drain_s=np.array(drain_rows),
        fixed=np.full(count, NONE, np.int64),
    )
    numbers = arrays.groups["number"][places].copy()
    return Snapshot(problem, Order(first, standing), numbers, places, queue_ids.astype(np.int32))
