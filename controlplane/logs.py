"""Logs: JSON lines, without tracebacks of services that do not answer or of refusals. Prompts and answers are never here."""

import json
import logging
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from typing import ClassVar


@cache
def service_errors() -> tuple[type[BaseException], ...]:
    """A service did not answer, or a process was killed: where in the code that was noticed says nothing, and when one
    dies everything notices it."""
    # Half a second to import, in every command of manage.py; no log line with an error is that urgent.
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
"""Of Celery itself; what a task raises is logged by others."""


class ServiceErrors(logging.Filter):
    """Leaves the tracebacks of `service_errors` out; what was raised stays, in the line itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, service_errors()) or (record.name.startswith(WORKER_LOGGERS) and _follows_one(error)):
            said, text = record.getMessage(), f"{type(error).__name__}: {error}"
            record.msg, record.args = said if str(error) in said else f"{said} ({text})", ()
            record.exc_info = record.exc_text = None
        return True


def _follows_one(error: BaseException | None) -> bool:
    """Whether *error* came up while a service error was handled.

    From Celery itself that is such an error too: a worker that loses Redis with messages unacknowledged ends by an
    AttributeError in kombu (5.7, `restore_unacked`), and is started again.
    """
    while error is not None and not isinstance(error, service_errors()):
        error = error.__cause__ or error.__context__
    return error is not None


class Refusals(logging.Filter):
    """Leaves the tracebacks of pages that were refused out: who may not is no fault of the code."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "status_code", None) == HTTPStatus.FORBIDDEN:
            record.exc_info = record.exc_text = None
        return True


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, and whatever a call gave in `extra=`."""

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
