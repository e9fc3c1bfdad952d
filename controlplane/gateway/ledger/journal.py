"""Ledger rows on disk until the database has them, so that a killed process loses none.

Rows are appended to a file of the state folder as requests end, and outlive the process however it ends (a power cut may
still take the last moments: nothing waits for the disk). Each batch sent to the database has separate files, which are
deleted once it is there. A file is locked by its process, so that others leave it alone.
"""

import contextlib
import fcntl
import logging
import os
import secrets
from pathlib import Path

logger = logging.getLogger(__name__)
PATTERN = "ledger-unsaved*.jsonl"
MAX_FILES = 50
"""Most files of batches that the database did not take, each an open descriptor; then the last one grows instead."""


class Journal:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"  # processes of several containers may have one number
        self._number = 0
        self._current = -1  # file descriptor of the file being written, -1 for none
        self._path = folder
        self._kept: list[tuple[Path, int]] = []  # files of rows that the database may not have, locked
        self._complained = False

    def append(self, line: bytes) -> None:
        """Append one row. A disk error is logged once, and does not fail the request."""
        try:
            if self._current < 0:
                self._open()
            os.write(self._current, line + b"\n")
        except OSError as error:
            if not self._complained:
                logger.error("ledger: rows cannot be kept on disk, a crash may lose them: %s", error)
            self._complained = True
        else:
            self._complained = False

    def cut(self) -> None:
        """End the batch of rows appended so far; later ones belong to the next.

        In a long database outage, batches share a file. Duplicates in it are found by their request id.
        """
        if self._current >= 0 and len(self._kept) < MAX_FILES:
            self._kept.append((self._path, self._current))
            self._current = -1

    def forget(self) -> None:
        """Delete the files: the database has every batch."""
        for path, descriptor in self._kept:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)
        self._kept.clear()

    def take_up(self) -> list[bytes]:
        """Return rows left by processes that have ended; their files are deleted with the next batch."""
        lines: list[bytes] = []
        for path in sorted(self.folder.glob(PATTERN)):
            try:
                descriptor = os.open(path, os.O_RDWR)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # of a live process
                os.close(descriptor)
                continue
            lines += [line for line in path.read_bytes().split(b"\n") if line]
            self._kept.append((path, descriptor))
        return lines

    def close(self) -> list[Path]:
        """Close the files; return those that stay for the next start."""
        self.cut()
        left = [path for path, _ in self._kept]
        for _, descriptor in self._kept:
            os.close(descriptor)
        self._kept.clear()
        return left

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        self._path = self.folder / f"ledger-unsaved-{self._name}-{self._number}.jsonl"
        self._current = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        fcntl.flock(self._current, fcntl.LOCK_EX | fcntl.LOCK_NB)
