"""Reordering of virtual queues for a gateway with too many groups to do it itself (QLM section 7), or by the programme."""

import msgspec
import redis
from django.conf import settings

from controlplane.dispatch.solving import unpack_problem
from scheduling.queueing.reordering.rules import SEARCH
from scheduling.queueing.reordering.scheduler import reorder
from workers.celery import app

BUDGET_S = 1.0
KEPT_S = 30


@app.task(soft_time_limit=15, time_limit=20)
def reorder_queues(key: str, packed: str, by: str = SEARCH) -> float:
    """Solve the *packed* problem *by* the search or the programme; push the order to *key*; return the share in time."""
    answer = reorder(*unpack_problem(packed), BUDGET_S, by=by)
    with redis.from_url(settings.REDIS_URL, socket_timeout=2.0) as server:
        server.rpush(key, msgspec.json.encode(answer.order.queues()))
        server.expire(key, KEPT_S)
    return answer.after.attainment
