"""The state folder: the secret key, the lock that keeps a second supervisor out, the address of the stack's Redis.

Needs no Django: `manage.py up` makes the key here before settings are loaded, which refuse to load without one.
"""

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controlplane import env

KEY_FILE = "secret_key"
REDIS_URL_FILE = "redis_url"
URL_FILE = "url"
PARTS_FILE = "parts.json"
LOCK_FILE = "up.lock"
RESTART_FILE = "restart"
"""How the last restart ended: empty, or why not."""


def state_dir(base_dir: Path) -> Path:
    """Return the state folder that settings use, created if it is missing."""
    path = (base_dir / env.read().STATE_DIR).resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_private(path: Path, text: str) -> None:
    """Write *text* to *path*, readable by its owner alone, in one step."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)


def read_parts(folder: Path) -> list[dict[str, Any]]:
    """Return the parts' last states as the supervisor of *folder* wrote them; none without it."""
    try:
        return list(json.loads((folder / PARTS_FILE).read_text()))
    except (OSError, ValueError):
        return []


def keep_secret_key(base_dir: Path) -> None:
    """Make a secret key in the state folder, unless the environment gives one or the folder has one."""
    path = state_dir(base_dir) / KEY_FILE
    if not env.read().SECRET_KEY.get_secret_value() and not path.exists():
        write_private(path, secrets.token_urlsafe(50) + "\n")


class FolderHeldError(RuntimeError):
    """Another supervisor runs in this state folder; the text says which and how to stop it."""


def holder(folder: Path) -> int | None:
    """Return the process that holds *folder*; None if there is none."""
    with contextlib.suppress(OSError), open(folder / LOCK_FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read().split(",")[0].removeprefix("process "))
    return None


@contextlib.contextmanager
def hold(folder: Path, url: str) -> Iterator[None]:
    """Hold *folder* for this process. Raises FolderHeldError while another one does; the lock ends with its process."""
    path = folder / LOCK_FILE
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read() or "it starts"
            raise FolderHeldError(
                f"Pilothouse already runs in {folder}: {holder}. Stop it with Ctrl-C there or `kill` its process, or give "
                "this one its own PILOTHOUSE_STATE_DIR."
            ) from None
        file.truncate()
        file.write(f"process {os.getpid()}, {url}, since {time.strftime('%H:%M')}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
