"""Guard: a small process that ends what a killed supervisor (`kill -9`, out of memory) leaves behind.

The supervisor sends it, through a pipe, the process groups that it started. When the pipe closes and groups are still on
the list, the supervisor was killed: the guard asks them to end, waits, then kills. On a clean stop the list is empty.
It runs as a separate script (`python -I guard.py`), so it needs the standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "PH_STACK"  # children inherit this variable, so that what they start in other sessions is found too
GRACE_S = 4.0


class Guard:
    """The supervisor's end of the pipe. *mark* is the value of `MARK` in the children's environment."""

    def __init__(self, mark: str) -> None:
        # A separate session: a signal to the terminal's processes must not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        self._send(f"+{group}")

    def remove(self, group: int) -> None:
        self._send(f"-{group}")

    def release(self) -> None:
        """All children are gone: let the guard go too."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(GRACE_S * 2)

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()


def marked(mark: str) -> Iterator[int]:
    """Ids of the processes whose environment holds *mark*; none where there is no `/proc`."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def kill_marked(mark: str) -> None:
    for process_id in marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process_id, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Send signal *number* (0 = only look) to *group*; False if no process of it is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # the number was reused for another user's group
        return False
    return True


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    if not groups:
        return
    for group in groups:
        signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(signal_group(group, 0) for group in groups):
        time.sleep(0.05)
    for group in groups:
        signal_group(group, signal.SIGKILL)
    kill_marked(sys.argv[1])


if __name__ == "__main__":
    main()
