"""Logs as JSON lines, without tracebacks for unreachable services or refusals. They never contain prompts or answers."""

import json
import logging
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from typing import ClassVar


@cache
def service_errors() -> tuple[type[BaseException], ...]:
    """Return the errors that mean an unreachable service or a killed process. Their tracebacks say nothing useful, and
    everything that uses the service raises them."""
    # Imports take half a second in every command of manage.py; no log line with an error is that urgent.
    import billiard.exceptions
    import django.db
    import kombu.exceptions
    import redis

    return (
        OSError,
        redis.RedisError,
        kombu.exceptions.OperationalError,
        django.db.OperationalError,
        django.db.InterfaceError,
        billiard.exceptions.WorkerLostError,
    )


WORKER_LOGGERS = ("celery.worker", "celery.bootsteps")
"""Celery's own loggers; errors raised by tasks are logged elsewhere."""


class ServiceErrors(logging.Filter):
    """Filter that drops the tracebacks of `service_errors`; the error itself stays in the line."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, service_errors()) or (record.name.startswith(WORKER_LOGGERS) and _follows_one(error)):
            message, text = record.getMessage(), f"{type(error).__name__}: {error}"
            record.msg, record.args = message if str(error) in message else f"{message} ({text})", ()
            record.exc_info = record.exc_text = None
        return True


def _follows_one(error: BaseException | None) -> bool:
    """Return whether *error* was raised while handling a service error.

    An error from Celery itself counts too: a worker that loses Redis with messages unacknowledged ends by an AttributeError
    in kombu (5.7, `restore_unacked`), and is restarted.
    """
    while error is not None and not isinstance(error, service_errors()):
        error = error.__cause__ or error.__context__
    return error is not None


class Refusals(logging.Filter):
    """Filter that drops the tracebacks of refused pages: missing rights are not a fault of the code."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "status_code", None) == HTTPStatus.FORBIDDEN:
            record.exc_info = record.exc_text = None
        return True


class JsonFormatter(logging.Formatter):
    """Formatter with time, level, logger, message and the fields of `extra=`."""

    STANDARD: ClassVar = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in self.STANDARD},
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
