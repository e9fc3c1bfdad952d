"""Celery's broker, asked without patience: sending one task, and which workers answer."""

import logging
from typing import Any

import redis
from celery import Celery
from django.conf import settings
from kombu.exceptions import OperationalError

from workers.celery import app as celery_app

logger = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 0.3
DELIVERY_OPTIONS = {"socket_connect_timeout": 0.5, "max_retries": 1, "interval_start": 0, "interval_max": 0}
"""Of a message that only makes work begin sooner: fail in well under a second, since the row is already safe."""
INSPECTION_OPTIONS = {"socket_connect_timeout": 1.0, "socket_timeout": 3.0, "max_retries": 0, "retry_on_timeout": False}
MOST_UNREAD = 10
"""Messages in the queue of a node whose worker is away; more would only pile up, and the rows are the promise."""


def send_task(task: str, *args: object, expires_s: float | None = None, queue: str = "") -> bool:
    """Have a Celery worker run *task* now, any or the one that listens on *queue*.

    False, in under a second, if the broker does not answer.
    """
    route: dict[str, Any] = {"queue": queue} if queue else {}
    try:
        if queue and _unread(queue) >= MOST_UNREAD:
            return True
        with celery_app.connection_for_write(transport_options=DELIVERY_OPTIONS) as connection:
            celery_app.send_task(task, args=args, connection=connection, retry=False, expires=expires_s, **route)
    except (OperationalError, redis.RedisError, OSError) as error:
        logger.warning(
            "%s %s is delivered later: broker: %s", task.rpartition(".")[2], repr(args)[:100] if args else "", error
        )
        return False
    return True


def _unread(queue: str) -> int:
    """Messages in *queue* that no worker has taken yet."""
    with impatient_redis() as client:
        return int(client.llen(queue))


def impatient_redis() -> "redis.Redis":
    """A client for one short call, that fails in well under a second."""
    return redis.Redis.from_url(
        settings.REDIS_URL, socket_connect_timeout=REDIS_TIMEOUT_S, socket_timeout=REDIS_TIMEOUT_S
    )


def answering_workers(broker_url: str, timeout_s: float) -> dict[str, list[str]]:
    """Queues of each worker that answers within *timeout_s*, by worker. Raises what kombu raises without a broker.

    Needs no Django: the supervisor asks too.
    """
    app = Celery(broker=broker_url, set_as_current=False)
    # A new connection each time: one that was held may be to a Redis that is gone.
    with app.connection_for_write(transport_options=INSPECTION_OPTIONS) as connection:
        answers = app.control.inspect(timeout=timeout_s, connection=connection).active_queues() or {}
    return {worker: sorted(queue["name"] for queue in queues) for worker, queues in sorted(answers.items())}
