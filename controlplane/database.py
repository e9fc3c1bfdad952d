"""What the database cannot do at present: it is read-only, busy or away. And a thread for what must not wait for others."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TypeVar

from channels.db import DatabaseSyncToAsync
from django.db import InterfaceError, InternalError, OperationalError, connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

ERRORS: Final = (OperationalError, InterfaceError, InternalError)
"""Errors of the database's state, among others."""
READ_ONLY: Final = "The database is read-only at present, so nothing was changed."
BUSY: Final = "The database is busy, so nothing was changed. Try again."
AWAY: Final = "The database does not answer, so nothing was changed. Try again."


T = TypeVar("T")


class OwnThread:
    """A thread in which long reads and blocked writes of this process's other jobs delay nothing."""

    def __init__(self, name: str, answer_s: float) -> None:
        self.answer_s = answer_s
        self._thread = ThreadPoolExecutor(1, name)

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        """Return what *work* does in this thread. Raises what it raises, and TimeoutError after *answer_s*."""
        async with asyncio.timeout(self.answer_s):
            return await DatabaseSyncToAsync(work, thread_sensitive=False, executor=self._thread)(*args)

    async def stop(self) -> None:
        with suppress(Exception):
            await self(connections.close_all)
        self._thread.shutdown(wait=False, cancel_futures=True)


def outage(error: BaseException) -> str:
    """Return what the database cannot do, in a sentence, if *error* is of its state; empty for mistakes of ours."""
    text = str(error).lower()
    if "readonly" in text or "read-only" in text:
        return READ_ONLY
    if isinstance(error, InternalError) or "no such" in text or "does not exist" in text or "syntax" in text:
        return ""
    return BUSY if "locked" in text or "lock timeout" in text else AWAY


def probe_write() -> None:
    """Raise the database's error if it takes no writes, by a change of no row."""
    with connection.cursor() as cursor:
        cursor.execute("UPDATE tuning_setting SET name = name WHERE id < 0")


def renew_read_only(connection: BaseDatabaseWrapper, **_: Any) -> None:
    """Have the process's sessions of PostgreSQL replaced when one is read-only, which may outlast the server's being so.

    A receiver of `connection_created`.
    """
    if connection.vendor == "postgresql" and _renewing not in connection.execute_wrappers:
        connection.execute_wrappers.append(_renewing)


def _renewing(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    try:
        return execute(sql, params, many, context)
    except ERRORS as error:
        pool = getattr(context["connection"], "pool", None)
        if pool is not None and outage(error) == READ_ONLY:
            pool.drain()
        raise
