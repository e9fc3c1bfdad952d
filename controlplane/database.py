"""What the database cannot do at present: it is read-only, busy or away."""

from typing import Final

from django.db import InterfaceError, InternalError, OperationalError, connection

ERRORS: Final = (OperationalError, InterfaceError, InternalError)
"""Errors of the database's state, among others."""
READ_ONLY: Final = "The database is read-only at present, so nothing was changed."
BUSY: Final = "The database is busy, so nothing was changed. Try again."
AWAY: Final = "The database does not answer, so nothing was changed. Try again."


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
