"""What waits before a request whose endpoint has request groups: those before it in its virtual queue, not in its endpoint.

So the order of the global scheduler is what estimates of waiting go by, and the instance that pulls from that queue is the
only one whose throughput counts (QLM section 6: W is summed over the groups ahead). In the queue of instances that share
their GPUs what is ahead is of several models: a run of each, with a change of model between two of them.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, allocate_endpoints, allocate_fleet
from scheduling.queueing.groups import NONE, GroupArrays, allocate_groups
from scheduling.queueing.swapping.timeline import change_s, having, member_of
from scheduling.queueing.waiting_time import ERROR, EXPECTED_COLUMNS, MEAN, VARIANCE

SAMPLE: Final = 16
"""Members of a group that stand for all: they are of one class and of like lengths."""

MOST_RUNS: Final = 32
"""Of one model after the other, that are looked at one by one; what is beyond them counts with the last."""
INSTANCE, REQUESTS = range(2)
TOKENS: Final = 2
"""First columns of a run, before those of what is expected (`waiting_time.EXPECTED_COLUMNS`)."""
RUN_COLUMNS: Final = TOKENS + EXPECTED_COLUMNS


@compiled_inline
def _add_group(arrays: GroupArrays, expected: NDArray[np.float64], group: int, run: NDArray[np.float64]) -> None:
    """Add what is expected of all members of *group* to *run*."""
    this = arrays.groups[group]
    looked_at = min(int(this.count), SAMPLE)
    share = float(this.count) / looked_at
    other = int(this.first)
    for _ in range(looked_at):
        for column in range(EXPECTED_COLUMNS):
            run[TOKENS + column] += share * expected[other, column]
        other = int(arrays.members[other].following)
    run[REQUESTS] += float(this.count)


@compiled_inline
def _run_of(runs: NDArray[np.float64], count: int, instance: int) -> int:
    """How many *runs* there are when the last is of *instance*."""
    if count > 0 and (runs[count - 1, INSTANCE] == instance or count == runs.shape[0]):
        runs[count - 1, INSTANCE] = instance
        return count
    runs[count] = 0.0
    runs[count, INSTANCE] = instance
    return count + 1


@compiled
def runs_ahead(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    arrays: GroupArrays,
    expected: NDArray[np.float64],
    slot: int,
    instance: int,
    now_s: float,
    runs: NDArray[np.float64],
) -> tuple[int, float, float]:
    """What stands before *slot* in the queue of *instance*, which serves its endpoint there and shares its GPUs; -1 for a
    request that would come behind the last group of its model, or else last.

    Written into *runs* (runs x RUN_COLUMNS), one model after the other: the first is that of the instance which has the
    GPUs, the last that of *instance*, both perhaps without a request. (runs, seconds until the first serves, what it runs).
    """
    queue = int(arrays.queue_of[instance])
    began, until_s, running = having(fleet, arrays, queue, now_s)
    count = 0 if began == NONE else _run_of(runs, 0, began)
    own, endpoint = NONE if slot < 0 else int(arrays.members[slot].group), int(fleet.endpoint[instance])
    behind, group = NONE, int(arrays.queues[queue].first)
    while slot < 0 and group >= 0:
        behind = group if arrays.groups[group].endpoint == endpoint else behind
        group = int(arrays.groups[group].following)
    group = int(arrays.queues[queue].first)
    while group >= 0 and group != own:
        this = arrays.groups[group]
        member = member_of(endpoints, arrays, queue, int(this.endpoint))
        if this.hold_until_s <= now_s and member >= 0:
            count = _run_of(runs, count, member)
            _add_group(arrays, expected, group, runs[count - 1])
        group = NONE if group == behind else int(this.following)
    count = _run_of(runs, count, instance)
    other = NONE if slot < 0 else int(arrays.groups[own].first)
    while other != slot:
        runs[count - 1, REQUESTS] += 1.0
        for column in range(EXPECTED_COLUMNS):
            runs[count - 1, TOKENS + column] += expected[other, column]
        other = int(arrays.members[other].following)
    if began == NONE:
        until_s = change_s(fleet, arrays, NONE, 0.0, int(runs[0, INSTANCE]))
    return count, until_s, running


@compiled
def ahead_in_queue(
    arrays: GroupArrays, expected: NDArray[np.float64], slot: int, now_s: float
) -> tuple[float, float, float, float]:
    """As `waiting_time.ahead`, for *slot*, whose group stands in a virtual queue.

    All of the groups before its own count that are not held at *now_s*, and of its own group the members before it.
    """
    requests, mean, variance, error = 0.0, 0.0, 0.0, 0.0
    own = int(arrays.members[slot].group)
    group = int(arrays.queues[arrays.groups[own].queue].first)
    while group != own:
        this = arrays.groups[group]
        if this.hold_until_s <= now_s:
            looked_at = min(int(this.count), SAMPLE)
            share = float(this.count) / looked_at
            other = int(this.first)
            for _ in range(looked_at):
                mean += share * expected[other, MEAN]
                variance += share * expected[other, VARIANCE]
                error += share * expected[other, ERROR]
                other = int(arrays.members[other].following)
            requests += float(this.count)
        group = int(this.following)
    other = int(arrays.groups[own].first)
    while other != slot:
        requests += 1.0
        mean += expected[other, MEAN]
        variance += expected[other, VARIANCE]
        error += expected[other, ERROR]
        other = int(arrays.members[other].following)
    return requests, mean, variance, error


def warm_up() -> None:
    """Compile what runs live, or load it."""
    arrays = allocate_groups(1, 1, 1)
    arrays.members["group"][0] = arrays.groups["first"][0] = arrays.groups["queue"][0] = arrays.queues["first"][0] = 0
    ahead_in_queue(arrays, np.zeros((1, EXPECTED_COLUMNS)), 0, 0.0)
    fleet, endpoints = allocate_fleet(1), allocate_endpoints(1, 1)
    fleet.endpoint[0] = 0
    runs_ahead(fleet, endpoints, arrays, np.zeros((1, EXPECTED_COLUMNS)), 0, 0, 0.0, np.zeros((1, RUN_COLUMNS)))
    change_s(fleet, arrays, 0, 1.0, 0)
