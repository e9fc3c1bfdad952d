"""The actor that keeps one vLLM process on a machine of a Ray cluster.

It is pickled by value (`BY_VALUE`), so that machines need Ray and vLLM but nothing of Pilothouse: what it uses is of the
standard library alone. The process lives as long as its actor: Ray counts its GPUs as taken no longer.
"""

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from workers.vllm import engine_log, processes, serve
from workers.vllm.engine_log import last_lines, rotate_log, shorten, tail
from workers.vllm.processes import KEEP_ENVIRONMENT, MARK, Record, boot_id, end, how_it_ended, runs, started_ticks
from workers.vllm.serve import begin

BY_VALUE = (sys.modules[__name__], engine_log, processes, serve)
GUARD = 'exec 3<&0; (read -r _ <&3; kill -s KILL -- -"$0") </dev/null >/dev/null 2>&1 &'
"""Kills the process group $0 when the other end of its standard input is closed, by whatever ended the actor. Ray itself
kills the children of an actor at most, and here the engine is a grandchild."""
RAYS_OWN = "OMP_NUM_THREADS"
"""Ray sets it to the CPUs of the actor, which has none: vLLM would compute with one thread."""


class Server:
    """One vLLM process: an instance, or the share of an instance on one of its machines."""

    def __init__(self, name: str) -> None:
        state = os.environ.get("PILOTHOUSE_STATE_DIR")
        folder = (Path(state) if state else Path.home() / ".pilothouse") / "instances"
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{name}.log"
        self._record: Record | None = None
        self._processes: list[subprocess.Popen[bytes]] = []  # kept, or Python would take their exit status

    async def free_ports(self, address: str, count: int) -> list[int]:
        """Return ports at *address* that nobody listens on."""
        probes = [socket.create_server((address, 0)) for _ in range(count)]
        ports = [int(probe.getsockname()[1]) for probe in probes]
        for probe in probes:
            probe.close()
        return ports

    async def start(self, url: str, source: str, flags: Sequence[str], variables: Mapping[str, str]) -> int:
        """Start `vllm serve` of *source* and return its process id; of one that runs, its."""
        if self._record is not None and runs(self._record):
            return self._record.process_id
        self._record = self._spawn(url, source, flags, variables)
        return self._record.process_id

    def _spawn(self, url: str, source: str, flags: Sequence[str], variables: Mapping[str, str]) -> Record:
        rotate_log(self._log)
        own = {name: value for name, value in os.environ.items() if name != RAYS_OWN}
        mark = uuid.uuid4().hex
        with self._log.open("ab") as log:
            server = subprocess.Popen(
                [*begin(os.environ.get("VLLM_PYTHON") or sys.executable, source), *flags],
                env={**own, **variables, **KEEP_ENVIRONMENT, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        guard = subprocess.Popen(["/bin/sh", "-c", GUARD, str(server.pid)], stdin=subprocess.PIPE)
        self._processes = [server, guard]
        return Record(server.pid, started_ticks(server.pid), boot_id(), url, (), mark)

    async def state(self) -> tuple[str, int, bool, str]:
        """Return address and process id, whether the process runs, and else how it ended."""
        shorten(self._log)
        if self._record is None:
            return "", 0, False, "not started"
        if runs(self._record):
            return self._record.url, self._record.process_id, True, ""
        self._end_guard()  # what it left in its group goes with it
        return self._record.url, self._record.process_id, False, how_it_ended(self._record)

    async def log(self, count: int) -> tuple[str, list[str], str]:
        """Return the path of its log on this machine, the last *count* lines, and the end as it is written."""
        return str(self._log), last_lines(self._log, count), tail(self._log)

    async def stop(self, grace_s: float) -> None:
        """End the process and all of its processes, by force after *grace_s*."""
        if self._record is not None:
            await end(self._record, grace_s)
            self._end_guard()

    def _end_guard(self) -> None:
        for each in self._processes:
            if each.stdin is not None:
                each.stdin.close()
