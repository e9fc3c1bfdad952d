"""The global scheduler over live queues: `solve` orders a snapshot, and `merge` applies the answer as far as it still
fits.

It is the same under both clocks (QLM section 7). `snapshot.snapshot` reads groups and virtual queues into a `Problem`;
`solve` needs nothing else, so it may run anywhere and take its time; `merge` puts the groups that still wait in the
order of the answer. Groups that arrived meanwhile stay where they are served first, and those that have left are
skipped: a late answer is merged rather than obeyed.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, allocate_endpoints, allocate_fleet, assign_endpoint
from scheduling.queueing.eviction import wanted
from scheduling.queueing.groups import GroupArrays, put_before, unqueue
from scheduling.queueing.reordering import scheduler
from scheduling.queueing.reordering.bound import shortage
from scheduling.queueing.reordering.problem import Order, Problem, broken_rules
from scheduling.queueing.reordering.rules import SEARCH
from scheduling.queueing.reordering.scheduler import Answer, reorder
from scheduling.queueing.running import running_of
from scheduling.queueing.snapshot import Snapshot, snapshot
from scheduling.queueing.virtual_queues import insert, insert_loose
from scheduling.queueing.waiting_set import WaitingArrays, allocate_waiting, enqueue

NONE: Final = -1


def solve(
    seen: Snapshot, budget_s: float = 0.02, *, moves: int | None = None, seed: int = 0, by: str = SEARCH
) -> Answer:
    """Return a better order than the one *seen*, or that one; see `reordering.scheduler.reorder`.

    A group in a queue that no longer serves it is moved even if nothing is gained.
    """
    answer = reorder(seen.problem, seen.previous, budget_s, moves=moves, seed=seed, by=by)
    return answer if answer.changed else answer._replace(changed=bool(broken_rules(seen.problem, seen.previous)))


@compiled
def _put_in_order(
    arrays: GroupArrays,
    queue_ids: NDArray[np.int32],
    first: NDArray[np.int64],
    ordered: NDArray[np.int64],
    places: NDArray[np.int32],
    numbers: NDArray[np.int64],
    pinned: NDArray[np.int32],
    pinned_at: NDArray[np.int32],
    pinned_in: NDArray[np.int32],
) -> None:
    """Empty the queues and refill them with the groups that still wait; pinned groups keep their position from the
    front.

    The last three arguments are scratch, as long as the number of groups in these queues.
    """
    count = 0
    for at in range(queue_ids.size):
        place, group = 0, int(arrays.queues[queue_ids[at]].first)
        while group >= 0:
            following = int(arrays.groups[group].following)
            if arrays.groups[group].pinned != 0:
                pinned[count], pinned_at[count], pinned_in[count] = group, place, queue_ids[at]
                count += 1
            unqueue(arrays, group)
            place, group = place + 1, following
    for at in range(queue_ids.size):
        for position in range(first[at], first[at + 1]):
            group = int(places[ordered[position]])
            this = arrays.groups[group]
            # A new group may have taken the index of one that has left.
            if this.endpoint >= 0 and this.number == numbers[ordered[position]] and this.pinned == 0:
                put_before(arrays, group, int(queue_ids[at]), NONE)
    for at in range(count):
        after = int(arrays.queues[pinned_in[at]].first)
        for _ in range(pinned_at[at]):
            if after >= 0:
                after = int(arrays.groups[after].following)
        put_before(arrays, int(pinned[at]), int(pinned_in[at]), after)


@compiled
def _insert_each(
    fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, groups: NDArray[np.int64]
) -> None:
    for at in range(groups.size):
        if waiting.groups.groups[groups[at]].queue < 0:
            insert(fleet, endpoints, waiting, int(groups[at]))


def moved_groups(before: Order, after: Order) -> int:
    """Return the number of groups in another queue, or behind another group."""
    stands = [
        {
            group: (queue, groups[place - 1] if place else NONE)
            for queue, groups in enumerate(order.queues())
            for place, group in enumerate(groups)
        }
        for order in (before, after)
    ]
    return sum(stands[1].get(group) != where for group, where in stands[0].items())


def merge(fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, seen: Snapshot, answer: Answer) -> int:
    """Order the groups *seen* that still wait by *answer*; return the number of groups moved."""
    if not answer.changed:
        return 0
    arrays, order = waiting.groups, answer.order
    waits = np.flatnonzero(np.isin(arrays.groups["queue"], seen.queues) & (arrays.groups["endpoint"] >= 0))
    scratch = np.zeros((3, waits.size), np.int32)
    _put_in_order(arrays, seen.queues, order.first, order.groups, seen.places, seen.numbers, *scratch)
    _insert_each(fleet, endpoints, waiting, waits)
    return moved_groups(seen.previous, order)


def short_instances(problem: Problem) -> dict[int, int]:
    """Return how many more instances each endpoint needs for its waiting requests to be in time in any order
    (`bound.shortage`).

    Only for endpoints whose queues serve nothing else: a shortage of queues of several models cannot be attributed.
    """
    short: dict[int, int] = {}
    for kind in np.unique(problem.queue_type).tolist():
        served = np.isfinite(problem.service_s[:, kind])
        models = np.unique(problem.model[served])
        if models.size != 1:
            continue
        queues, asked = problem.queue_type == kind, problem.model == models[0]
        alone = Problem(
            requests=problem.requests[asked],
            model=np.zeros(int(asked.sum()), np.int64),
            due_s=problem.due_s[asked],
            service_s=problem.service_s[asked][:, [kind]],
            own_s=problem.own_s[asked][:, [kind]],
            queue_type=np.zeros(int(queues.sum()), np.int64),
            free_s=problem.free_s[queues],
            loaded=np.zeros(int(queues.sum()), np.int64),
            swap_s=np.full((1, 1), np.inf),
            drain_s=np.zeros((1, 1)),
            fixed=problem.fixed[asked],
        )
        missing = int(shortage(alone).instances[0])
        if missing:
            short[int(models[0])] = min(missing, short.get(int(models[0]), missing))
    return short


def warm_up() -> None:
    """Load or compile every kernel that reads or orders live queues; otherwise the first check blocks everything else."""
    scheduler.warm_up()
    fleet, endpoints, waiting = allocate_fleet(1), allocate_endpoints(1, 1), allocate_waiting(1, 4, 1)
    assign_endpoint(fleet, endpoints, 0, 0)
    fleet.accepting[0], fleet.max_num_seqs[0], fleet.kv_capacity_tokens[0] = 1, 1, 100
    waiting.groups.limit[0] = 1
    for _ in range(2):
        enqueue(waiting, 0, 0.0, 0.0, 1.0, 0, 1, 1, -1, -1, -1, -1)
        insert_loose(fleet, endpoints, waiting, 0)
    running = running_of([(0, 0, 0.0, 0.0, 0, 1, 1, 2, 0, True, False)])
    wanted(fleet, endpoints, waiting, running, np.ones(1, np.int64), 0.0)
    seen = snapshot(fleet, endpoints, waiting, 0.0, running=running)
    assert seen is not None, "two requests wait, each in a separate group"
    merge(fleet, endpoints, waiting, seen, solve(seen, moves=1)._replace(changed=True))
