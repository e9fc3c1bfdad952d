"""Celery's broker, asked without patience: sending one task, and which workers answer."""

import logging
from typing import Any
from urllib.parse import urlsplit

import redis
from celery import Celery
from django.conf import settings
from django.core.checks import CheckMessage, Info, Warning
from kombu.exceptions import OperationalError
from redis.backoff import NoBackoff
from redis.retry import Retry

from workers.celery import app as celery_app

logger = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 0.3
CHECK_S = 2.0
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


def redis_problem(url: str) -> str:
    """Return why the Redis at *url* cannot be used; "" if it can."""
    if (error := _ping(url)) is None:
        return ""
    text, parts = str(error).strip() or type(error).__name__, urlsplit(url)
    if "mismatch" in text:
        return f"its certificate is of another host ({text})"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"its certificate is of a CA that is not known: add ?ssl_ca_certs= to REDIS_URL ({text})"
    other = ("redis", "") if parts.scheme == "rediss" else ("rediss", "ssl_cert_reqs=none&ssl_check_hostname=false")
    answer = _ping(parts._replace(scheme=other[0], query=other[1]).geturl())
    if answer is None or isinstance(answer, redis.AuthenticationError):
        return f"it {'speaks' if other[1] else 'does not speak'} TLS: use {other[0]}:// ({text})"
    return text


def _ping(url: str) -> Exception | None:
    """Return the error of a ping; None without one."""
    try:
        with redis.Redis.from_url(
            url, socket_connect_timeout=CHECK_S, socket_timeout=CHECK_S, retry=Retry(NoBackoff(), 0)
        ) as client:
            client.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        return error
    return None


def check_redis(**_: Any) -> list[CheckMessage]:
    """A check of `manage.py check --deploy`: a wrong address is a warning, a server that is down now is a remark."""
    problem = redis_problem(settings.REDIS_URL)
    level = Info if problem and "refused" in problem else Warning
    return [level(f"REDIS_URL: {problem}", id="pilothouse.W001")] if problem else []


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
