"""Outcome of the current virtual queues: when each group starts and which are late; and the outcome of FCFS."""

import numpy as np
from numpy.typing import NDArray

from scheduling.queueing.reordering.evaluate import Score, evaluate
from scheduling.queueing.reordering.scheduler import order_by
from scheduling.queueing.snapshot import Snapshot


def worth(seen: Snapshot) -> Score:
    """Return the score of the current queues. The objective is mean lateness alone."""
    return evaluate(seen.problem, seen.previous, 0.0)


def attainment(seen: Snapshot, score: Score, lost: NDArray[np.bool_]) -> float:
    """Return the share of requests in time by *score*; 1 if none waits.

    Groups that are *lost* count as late, whatever their current due time (`virtual_queues.defer_late`).
    """
    requests = seen.problem.requests
    return float(requests[(score.late_s <= 0.0) & ~lost].sum()) / float(requests.sum()) if requests.size else 1.0


def fcfs_attainment(seen: Snapshot, lost: NDArray[np.bool_]) -> float:
    """Return the share of requests in time if groups were served by arrival, each by the instance that is free first."""
    return attainment(seen, evaluate(seen.problem, order_by("fcfs", seen.problem), 0.0), lost)
