"""Work ahead of a request whose endpoint has request groups: what precedes it in its virtual queue, not in its
endpoint.

Estimates so follow the order of the global scheduler, and only the throughput of the instance that pulls from that
queue counts (QLM section 6: W is summed over the groups ahead). In the queue of instances that share their GPUs, the
work ahead is a run of each of several models, with a change of model between two runs.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, allocate_endpoints, allocate_fleet
from scheduling.queueing.groups import NONE, GroupArrays, allocate_groups
from scheduling.queueing.swapping.service import due_at, group_s
from scheduling.queueing.swapping.timeline import change_s, having, member_of
from scheduling.queueing.waiting_set import WaitingArrays, allocate_waiting
from scheduling.queueing.waits.waiting_time import ERROR, EXPECTED_COLUMNS, MEAN, VARIANCE

SAMPLE: Final = 16
"""Members sampled from a group: they are of one class and similar length."""

MOST_RUNS: Final = 32
"""Most runs, each of one model, that are counted separately; the rest count with the last."""
INSTANCE, REQUESTS, LATEST, SERVED = range(4)
TOKENS: Final = 4
"""First columns of a run, before those of expected output (`waiting_time.EXPECTED_COLUMNS`).

LATEST is the last moment at which its model must serve for none of its groups to be late, infinity for none. For the
request's own model it includes groups behind the request, because they bring the model up too. SERVED is the time that
these groups take.
"""
RUN_COLUMNS: Final = TOKENS + EXPECTED_COLUMNS


@compiled_inline
def _add_group(waiting: WaitingArrays, expected: NDArray[np.float64], group: int, run: NDArray[np.float64]) -> None:
    """Add the expected output of all members of *group* to *run*."""
    arrays, this = waiting.groups, waiting.groups.groups[group]
    looked_at = min(int(this.count), SAMPLE)
    share = float(this.count) / looked_at
    other = int(this.first)
    for _ in range(looked_at):
        for column in range(EXPECTED_COLUMNS):
            run[TOKENS + column] += share * expected[other, column]
        other = int(arrays.members[other].following)
    run[REQUESTS] += float(this.count)


@compiled_inline
def _latest(waiting: WaitingArrays, group: int, run: NDArray[np.float64], takes_s: float) -> None:
    """Update in *run* when its model must serve for *group*, taking *takes_s*, to be in time behind the others."""
    run[SERVED] += takes_s
    run[LATEST] = min(run[LATEST], due_at(waiting, group) - run[SERVED])


@compiled_inline
def _run_of(runs: NDArray[np.float64], count: int, instance: int) -> tuple[int, int]:
    """Return (row of *instance*, number of runs): its existing row among the first *count* of *runs*, or a new one."""
    for row in range(count):
        if runs[row, INSTANCE] == instance:
            return row, count
    if count == runs.shape[0]:
        return count - 1, count
    runs[count] = 0.0
    runs[count, INSTANCE], runs[count, LATEST] = instance, math.inf
    return count, count + 1


@compiled_inline
def _runs_behind(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: WaitingArrays,
    expected: NDArray[np.float64],
    queue: int,
    now_s: float,
    runs: NDArray[np.float64],
    count: int,
) -> int:
    """Append the models of *queue* that are not among the first *count* of *runs*; return how many."""
    arrays, total = waiting.groups, count
    group = int(arrays.queues[queue].first)
    while group >= 0:
        this = arrays.groups[group]
        member = member_of(endpoints, arrays, queue, int(this.endpoint))
        if this.hold_until_s <= now_s and member >= 0:
            row = 0
            while row < total and runs[row, INSTANCE] != member:
                row += 1
            if row == total and total < runs.shape[0]:
                runs[total] = 0.0
                runs[total, INSTANCE], runs[total, LATEST] = member, math.inf
                total += 1
            if count <= row < total:
                _latest(waiting, group, runs[row], group_s(fleet, arrays, group, member))
                _add_group(waiting, expected, group, runs[row])
        group = int(this.following)
    return total - count


@compiled
def runs_ahead(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: WaitingArrays,
    expected: NDArray[np.float64],
    slot: int,
    instance: int,
    now_s: float,
    runs: NDArray[np.float64],
) -> tuple[int, int, float, float, bool]:
    """Return the work ahead of *slot* in the shared queue of *instance*, which serves its endpoint.

    A *slot* of -1 is a request behind all others of its model. *runs* (runs x RUN_COLUMNS) receives first the holder of
    the GPUs, then the models that come up before that of *slot*, each with all its waiting groups, since these are put
    first while it has the GPUs (`scaling.swapping`), then *instance* with the requests of its own model before *slot*.
    If *instance* has the GPUs and its groups are first, that is the only row; the first row has no requests if the
    holder's groups are not first. Models with all groups behind *slot* follow: they may take the GPUs.

    The result is (rows ahead, rows behind, seconds until the first row serves, its running requests, whether its groups
    are first).
    """
    arrays, queue, endpoint = waiting.groups, int(waiting.groups.queue_of[instance]), int(fleet.endpoint[instance])
    began, until_s, running = having(fleet, arrays, queue, now_s)
    count = 0 if began == NONE else _run_of(runs, 0, began)[1]
    own, group = NONE if slot < 0 else int(arrays.members[slot].group), int(arrays.queues[queue].first)
    first = seen = False  # whether the holder's groups are first; whether a group was seen
    met = behind = False  # whether a group of the same model was met; whether its own was
    while group >= 0:
        this, following = arrays.groups[group], int(arrays.groups[group].following)
        member = member_of(endpoints, arrays, queue, int(this.endpoint))
        if (this.hold_until_s <= now_s or group == own) and member >= 0:
            first, seen = first if seen else member == began, True
            met = met or this.endpoint == endpoint
            known = began == member
            for row in range(count):
                known = known or runs[row, INSTANCE] == member
            if this.endpoint != endpoint and (known or not met):
                row, count = _run_of(runs, count, member)
                _latest(waiting, group, runs[row], group_s(fleet, arrays, group, member))
                _add_group(waiting, expected, group, runs[row])
        group = following
    if count == 0 or count > 1 or began != instance:
        count = min(count, runs.shape[0] - 1)
        runs[count] = 0.0
        runs[count, INSTANCE], runs[count, LATEST] = instance, math.inf
        count += 1
    last, group = count - 1, int(arrays.queues[queue].first)
    while group >= 0:
        this = arrays.groups[group]
        if this.endpoint == endpoint and (this.hold_until_s <= now_s or group == own):
            _latest(waiting, group, runs[last], group_s(fleet, arrays, group, instance))
            if group != own and not behind:
                _add_group(waiting, expected, group, runs[last])
        behind = behind or group == own
        group = int(this.following)
    other = NONE if slot < 0 else int(arrays.groups[own].first)
    while other != slot:
        runs[last, REQUESTS] += 1.0
        for column in range(EXPECTED_COLUMNS):
            runs[last, TOKENS + column] += expected[other, column]
        other = int(arrays.members[other].following)
    if began == NONE:
        until_s = change_s(fleet, arrays, NONE, 0.0, int(runs[0, INSTANCE]))
    return count, _runs_behind(fleet, endpoints, waiting, expected, queue, now_s, runs, count), until_s, running, first


@compiled
def ahead_in_queue(
    arrays: GroupArrays, expected: NDArray[np.float64], slot: int, now_s: float
) -> tuple[float, float, float, float]:
    """Like `waiting_time.ahead`, for *slot*, whose group is in a virtual queue.

    Counts all earlier groups that are not held at *now_s*, and the earlier members of its own group.
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
    """Compile or load the kernels that run live."""
    arrays = allocate_groups(1, 1, 1)
    arrays.members["group"][0] = arrays.groups["first"][0] = arrays.groups["queue"][0] = arrays.queues["first"][0] = 0
    ahead_in_queue(arrays, np.zeros((1, EXPECTED_COLUMNS)), 0, 0.0)
    fleet, endpoints = allocate_fleet(1), allocate_endpoints(1, 1)
    fleet.endpoint[0] = 0
    waiting = allocate_waiting(1, 1, 1)._replace(groups=arrays)
    runs_ahead(fleet, endpoints, waiting, np.zeros((1, EXPECTED_COLUMNS)), 0, 0, 0.0, np.zeros((1, RUN_COLUMNS)))
    change_s(fleet, arrays, 0, 1.0, 0)
