"""Backends as processes of this machine, each in a session of its own group, ended with all that it started."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from workers.backends.actuators import HOST, POLL_S, PORT, ActuatorError, BackendSpec, Started, is_left_behind, listens
from workers.vllm.processes import read

MARK: Final = "PILOTHOUSE_BACKEND_OWNER"
"""Environment variable of all processes of a backend, which they inherit; its value is the owner."""
INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
"""Variables that a backend is given: never the secrets of this process."""
STOP_S: Final = 3.0
LAST_CHARACTERS: Final = 300


class Processes:
    """The processes of *owner* (`actuators.owner_of`)."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, spec: BackendSpec) -> Started:
        """Start the command on a free port, and wait until it listens. Raises ActuatorError."""
        arguments = spec.arguments
        if not any(PORT in each for each in arguments):
            raise ActuatorError(f"the command of {spec.name} does not say {PORT}, so it cannot be reached")
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ} | {MARK: self.owner}
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    [each.replace(PORT, str(port)) for each in arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise ActuatorError(f"{spec.name} cannot be started: {error}") from error
            started = Started(str(process.pid), f"{HOST}:{port}")
            self._started[started.handle] = process
            until_s = time.monotonic() + spec.start_limit_s
            while process.poll() is None and time.monotonic() < until_s:
                if listens(started.address):
                    return started
                time.sleep(POLL_S)
            code = process.poll()
            self.stop(started.handle)
            if code is None:
                raise ActuatorError(f"{spec.name} did not listen within {spec.start_limit_s:g} s")
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - LAST_CHARACTERS))
            said = " ".join(errors.read().decode("utf-8", "replace").split())
            raise ActuatorError(f"{spec.name} ended with status {code}{said and f': {said}'}")

    def runs(self, handle: str) -> bool:
        """Whether the process still runs."""
        process = self._started.get(handle)
        return process is not None and process.poll() is None

    def stop(self, handle: str) -> None:
        """End the process and its children: politely, then by force."""
        process = self._started.pop(handle, None)
        if process is None:
            return
        _signal(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        _signal(process.pid, signal.SIGKILL)
        process.wait()

    def sweep(self) -> int:
        """End processes that a dead process of this installation started; return how many."""
        left = 0
        for folder in Path("/proc").glob("[0-9]*"):
            process_id = int(folder.name)
            marks = [each for each in read(process_id, "environ").split(b"\0") if each.startswith(MARK.encode() + b"=")]
            if marks and is_left_behind(marks[0].decode(errors="replace").partition("=")[2], self.owner):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process_id, signal.SIGKILL)
                    left += 1
        return left


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
