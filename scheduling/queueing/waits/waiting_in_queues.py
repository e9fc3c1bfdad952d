"""Work ahead of a request whose endpoint has request groups: what precedes it in its virtual queue, not in its
endpoint.

Estimates so follow the order of the global scheduler, and only the throughput of the instance that pulls from that
queue counts (QLM section 6: W is summed over the groups ahead). In the queue of instances that share their GPUs, groups
of other models and a swap for each change of model are ahead too. A model keeps the GPUs until swaps take at most
`SWAPPING_SHARE` of the time, and its groups are put first as long as it has them (`control.swaps`).
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, allocate_endpoints, allocate_fleet
from scheduling.queueing.groups import NONE, GroupArrays, allocate_groups
from scheduling.queueing.swapping.service import batch_of, group_s
from scheduling.queueing.swapping.sharing import SWAPPING_SHARE
from scheduling.queueing.swapping.timeline import change_s, having, member_of
from scheduling.queueing.waiting_set import WaitingArrays, allocate_waiting
from scheduling.queueing.waits.waiting_time import ERROR, EXPECTED_COLUMNS, MEAN, VARIANCE

SAMPLE: Final = 16
"""Members sampled from a group: they are of one class and similar length."""
CHANGE_SPREAD: Final = 0.5
"""Standard deviation of a change of model, as a share of it: drains that took 2.1 s were expected within 1.3 s."""


@compiled_inline
def _rest_s(arrays: GroupArrays, up: int, running: float, since_s: float, after: int, time_s: float) -> float:
    """Return the rest after *time_s* of the longest stay of *up*, which has the GPUs since *since_s*: none if it is idle."""
    if running <= 0.0:
        return 0.0
    rest_s: float = since_s + (arrays.sleep_s[up] + arrays.swap_s[after]) / SWAPPING_SHARE - time_s
    return max(0.0, rest_s)


@compiled_inline
def _change(
    fleet: FleetArrays, arrays: GroupArrays, up: int, running: float, after: int, rest_s: float
) -> tuple[float, float]:
    """Return mean and variance of the seconds until *after* serves: of what rests of the stay, as *up* may be idle at any
    moment of it, and of the swap.
    """
    swap_s = change_s(fleet, arrays, up, running, after)
    return 0.5 * rest_s + swap_s, rest_s**2 / 12.0 + (CHANGE_SPREAD * swap_s) ** 2


@compiled
def ahead_in_queue(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: WaitingArrays,
    expected: NDArray[np.float64],
    slot: int,
    instance: int,
    now_s: float,
) -> tuple[float, float, float, float, float, float, float]:
    """Return the work ahead of *slot* in the virtual queue from which *instance*, which serves its endpoint, pulls.

    A *slot* of -1 is a request behind all others of its model, or behind the whole queue without any. Counts all earlier
    groups, and the earlier members of its own group. The result is `waiting_time.ahead` of
    its own model; then mean and variance of the seconds for other models and changes, and the requests of those models.
    """
    arrays, queue, endpoint = waiting.groups, int(waiting.groups.queue_of[instance]), int(fleet.endpoint[instance])
    requests, mean, variance, error = 0.0, 0.0, 0.0, 0.0
    others, others_s2 = 0.0, 0.0
    up, others_s, running, since_s = instance, 0.0, 0.0, 0.0
    if arrays.swap_s[instance] < math.inf:
        up, others_s, running = having(fleet, arrays, queue, now_s)
        since_s = arrays.up_s[up] - now_s if up >= 0 and fleet.accepting[up] != 0 else others_s
    own = NONE if slot < 0 else int(arrays.members[slot].group)
    end, group = own, int(arrays.queues[queue].first)
    while own == NONE and group >= 0:
        if arrays.groups[group].endpoint == endpoint:
            end = int(arrays.groups[group].following)
        group = int(arrays.groups[group].following)
    group = int(arrays.queues[queue].first)
    while group != end:
        this = arrays.groups[group]
        member = member_of(endpoints, arrays, queue, int(this.endpoint)) if this.endpoint != endpoint else instance
        changes = member >= 0 and member != up
        rest_s = _rest_s(arrays, up, running, since_s, member, others_s) if changes else 0.0
        if member >= 0 and not (up == instance and rest_s > 0.0):
            if changes:
                time_s, variance_s2 = _change(fleet, arrays, up, running, member, rest_s)
                others_s, others_s2 = others_s + time_s, others_s2 + variance_s2
                up, running, since_s = member, 0.0, others_s
            sampled = min(int(this.count), SAMPLE)
            share = float(this.count) / sampled
            tokens, spread, unsure, other = 0.0, 0.0, 0.0, int(this.first)
            for _ in range(sampled):
                tokens += share * expected[other, MEAN]
                spread += share * expected[other, VARIANCE]
                unsure += share * expected[other, ERROR]
                other = int(arrays.members[other].following)
            if member == instance:
                requests, mean, variance, error = (
                    requests + this.count, mean + tokens, variance + spread, error + unsure,
                )  # fmt: skip
            else:
                takes_s = group_s(fleet, arrays, group, member)
                others += this.count
                others_s += takes_s
                others_s2 += (spread + unsure * unsure) * (takes_s / max(tokens, 1.0)) ** 2
            running = min(batch_of(fleet, arrays, member), running + this.count)
        group = int(this.following)
    if up != instance:
        rest_s = _rest_s(arrays, up, running, since_s, instance, others_s)
        time_s, variance_s2 = _change(fleet, arrays, up, running, instance, rest_s)
        others_s, others_s2 = others_s + time_s, others_s2 + variance_s2
    other = NONE if slot < 0 else int(arrays.groups[own].first)
    while other != slot:
        requests += 1.0
        mean += expected[other, MEAN]
        variance += expected[other, VARIANCE]
        error += expected[other, ERROR]
        other = int(arrays.members[other].following)
    return requests, mean, variance, error, others_s, others_s2, others


def warm_up() -> None:
    """Compile or load the kernels that run live."""
    arrays = allocate_groups(1, 1, 1)
    arrays.members["group"][0] = arrays.groups["first"][0] = arrays.groups["queue"][0] = arrays.queues["first"][0] = 0
    fleet, endpoints = allocate_fleet(1), allocate_endpoints(1, 1)
    fleet.endpoint[0] = 0
    waiting = allocate_waiting(1, 1, 1)._replace(groups=arrays)
    ahead_in_queue(fleet, endpoints, waiting, np.zeros((1, EXPECTED_COLUMNS)), 0, 0, 0.0)
