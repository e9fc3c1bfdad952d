"""What the virtual queues come to as they stand: when each group begins, who is late; and what FCFS would come to."""

import numpy as np
from numpy.typing import NDArray

from scheduling.queueing.reordering.evaluate import Score, evaluate
from scheduling.queueing.reordering.problem import Order
from scheduling.queueing.reordering.scheduler import order_by
from scheduling.queueing.snapshot import Snapshot


def as_served(seen: Snapshot) -> Order:
    """The order in which groups are served: one that is held lets those behind it go first until it may begin."""
    problem, queues = seen.problem, []
    if not np.any(problem.hold_s > 0.0):
        return seen.previous
    for queue, groups in enumerate(seen.previous.queues()):
        time_s, left, order = float(problem.free_s[queue]), list(groups), list[int]()
        while left:
            group = next((each for each in left if problem.hold_s[each] <= time_s), None)
            if group is None:
                group = min(left, key=lambda each: float(problem.hold_s[each]))
                time_s = float(problem.hold_s[group])
            left.remove(group)
            order.append(group)
            time_s += float(problem.service_s[group, problem.queue_type[queue]])
        queues.append(order)
    return Order.of(queues)


def worth(seen: Snapshot) -> Score:
    """Of the queues as they stand. The objective is mean lateness alone."""
    return evaluate(seen.problem, as_served(seen), 0.0)


def attainment(seen: Snapshot, score: Score, lost: NDArray[np.bool_]) -> float:
    """Share of requests in time by *score*, of which groups that are *lost* are none, whenever they are due now
    (`virtual_queues.put_off`); 1 where none waits."""
    requests = seen.problem.requests
    return float(requests[(score.late_s <= 0.0) & ~lost].sum()) / float(requests.sum()) if requests.size else 1.0


def fcfs_attainment(seen: Snapshot, lost: NDArray[np.bool_]) -> float:
    """Share of requests that would be in time if groups were served as they came, by the instance that is free first."""
    return attainment(seen, evaluate(seen.problem, order_by("fcfs", seen.problem), 0.0), lost)
