"""Demo for benchmarks that observe it from outside: `manage.py up` in its own folder, on its own ports."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.bench.gateway import free_port

UP_WITHIN_S = 600.0
STOP_WITHIN_S = 30.0
SIGN_IN = re.compile(r"Sign in\s+(http://\S+)")


class Demo(NamedTuple):
    """Running demo: its supervisor's process id, and a sign-in link."""

    supervisor: int
    link: str

    def environment(self) -> dict[str, str]:
        """Process id of its web process, by which `manage.py` finds its database and its Redis."""
        for file in Path("/proc").glob("[0-9]*"):
            try:
                command, pairs = (file / "cmdline").read_bytes(), (file / "environ").read_bytes()
                parent = int((file / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.supervisor and b"uvicorn" in command:
                return dict(pair.split("=", 1) for pair in pairs.decode().split("\0") if "=" in pair)
        raise RuntimeError("the demo has no web process")


@contextmanager
def demo(*flags: str) -> Iterator[Demo]:
    """Start a demo, yield it once it is up, stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="pilothouse-demo-") as folder:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"},  # that of tests
            "PILOTHOUSE_STATE_DIR": folder,
            "PILOTHOUSE_EMULATOR_PORT": str(free_port()),
            "DATABASE_URL": "",
            "REDIS_URL": "",
        }
        command = [sys.executable, "manage.py", "up", "--port", str(free_port()), *flags]
        stack = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            yield Demo(stack.pid, _link(stack))
        finally:
            stack.send_signal(signal.SIGINT)
            stack.wait(STOP_WITHIN_S)


def _link(stack: "subprocess.Popen[str]") -> str:
    """Drain the stack's output for as long as it lives, so that it never blocks on writing."""
    links: list[str] = []
    there = threading.Event()

    def read() -> None:
        assert stack.stdout is not None
        with stack.stdout:
            for line in stack.stdout:
                print(line, end="")
                if match := SIGN_IN.search(line):
                    links.append(match[1])
                    there.set()
        there.set()  # already ended

    threading.Thread(target=read, daemon=True).start()
    if not there.wait(UP_WITHIN_S):
        raise RuntimeError(f"the demo did not come up within {UP_WITHIN_S:.0f} s")
    if not links:
        raise RuntimeError("the demo ended before it was up")
    return links[0]
