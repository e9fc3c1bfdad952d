"""Which Celery workers answer, asked over the broker. Needs no Django: the supervisor asks too."""

from celery import Celery

OPTIONS = {"socket_connect_timeout": 1.0, "socket_timeout": 3.0, "max_retries": 0, "retry_on_timeout": False}


def answering_workers(broker_url: str, timeout_s: float) -> dict[str, list[str]]:
    """Queues of each worker that answers within *timeout_s*, by worker. Raises what kombu raises without a broker."""
    app = Celery(broker=broker_url, set_as_current=False)
    # A connection of its own each time: one that was held may be to a Redis that is gone.
    with app.connection_for_write(transport_options=OPTIONS) as connection:
        answers = app.control.inspect(timeout=timeout_s, connection=connection).active_queues() or {}
    return {worker: sorted(queue["name"] for queue in queues) for worker, queues in sorted(answers.items())}
