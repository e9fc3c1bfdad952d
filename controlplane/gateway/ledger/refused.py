"""Ledger rows that the database refuses: quarantined with the reason, so that all others are written.

They are in a file of the state folder, one JSON object a line. `manage.py ledger_refused` lists, fixes and adds them again.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

FILE = "ledger-refused.jsonl"
MOST_REASON = 500
"""Characters kept of the database's message."""


class Refused(Struct):
    """One refused row: its values by column, and the reason."""

    at: float  # epoch seconds
    reason: str
    row: dict[str, Any]


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Open the file for reading and appending, locked against other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def quarantine(folder: Path, rows: Sequence[tuple[dict[str, Any], str]]) -> None:
    """Append *rows*, each with its reason. Raises OSError if the disk does not take them."""
    now = time.time()
    refused = [Refused(now, reason[:MOST_REASON], row) for row, reason in rows]
    with _locked(folder) as descriptor:
        os.write(descriptor, _lines(refused))
        os.fsync(descriptor)


def read(folder: Path) -> list[Refused]:
    """Return all rows in quarantine, oldest first, without invalid lines."""
    with _locked(folder) as descriptor:
        return _read(descriptor)


def replace(folder: Path, done: Sequence[Refused], instead: Sequence[Refused] = ()) -> None:
    """Remove *done* from the file, and append *instead*."""
    taken = [_lines([one]) for one in done]
    with _locked(folder) as descriptor:
        left = [one for one in _read(descriptor) if _lines([one]) not in taken]
        os.ftruncate(descriptor, 0)
        os.write(descriptor, _lines([*left, *instead]))
        os.fsync(descriptor)


def count(folder: Path) -> int:
    """Return the number of rows in quarantine."""
    try:
        return (folder / FILE).read_bytes().count(b"\n")
    except OSError:
        return 0


def _lines(refused: Sequence[Refused]) -> bytes:
    # Python's own JSON: a row may be refused for a number or a text that orjson does not take either.
    return b"".join(json.dumps(asdict(one), default=str).encode() + b"\n" for one in refused)


def _read(descriptor: int) -> list[Refused]:
    refused = []
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        for line in file:
            try:
                refused.append(Refused(**json.loads(line)))
            except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
                continue
    return refused
