"""One child process: its output line by line, and its end; what it started in other sessions is found by a mark."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten

from controlplane.background import spawn

MARK = "PH_STACK"  # children inherit this variable, so that what they start in other sessions is found too
LINE_CHARS = 2000
LAST_LINE_CHARS = 160
READ_BYTES = 64 * 1024
PR_SET_PDEATHSIG = 1
# Loaded before the first fork: a child between fork and exec must not wait for a lock of another thread.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent(number: int) -> None:
    """Have the kernel send signal *number* to this process when the thread that started it (the supervisor's main one) is
    gone."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, number)


def kill_marked(mark: str) -> None:
    """Kill every other process whose environment has *mark*; none where there is no `/proc`."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


class Child:
    """A process in a separate session, so that Ctrl-C reaches the supervisor alone and it can end the rest in order.

    *on_line* is called with each line of its output, standard error included. The last one is kept in `last_line`: an exit
    status alone says little about why a child died.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
        on_line: Callable[[str], None],
        stop_signal: int,
    ) -> None:
        self._process, self._output, self._pipe, self._on_line = process, output, pipe, on_line
        self.last_line = ""
        self._stop_signal = stop_signal
        self._asked: set[int] = set()
        self._ended = spawn(self._follow(), "follow child")

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
        standard_input: bytes = b"",
        stop_signal: int = signal.SIGTERM,
        sockets: Sequence[int] = (),
    ) -> "Child":
        """Start *argv* with the file descriptors *sockets*; *standard_input* is given to it at once. *stop_signal* is what
        ends it. Raises OSError if it cannot be started."""
        # A pipe of our own: asyncio's would put off the end of the child until everybody who inherited it has closed it.
        reading, writing = os.pipe()
        output = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb", buffering=0)
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=environment,
                stdin=asyncio.subprocess.PIPE if standard_input else asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                pass_fds=sockets,
                preexec_fn=partial(_end_with_parent, stop_signal),
            )
        except BaseException:
            pipe.close()
            raise
        finally:
            os.close(writing)
        child = cls(process, output, pipe, on_line, stop_signal)
        if process.stdin is not None:
            process.stdin.write(standard_input)
            process.stdin.close()
        return child

    @property
    def running(self) -> bool:
        return not self._ended.done()

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        """Wait for the end; returns how it ended, such as `exit status 1` or `SIGKILL`."""
        await asyncio.shield(self._ended)
        return self.end

    async def ends_within(self, wait_s: float) -> bool:
        done, _ = await asyncio.wait([self._ended], timeout=wait_s)
        return bool(done)

    @property
    def end(self) -> str:
        code = self._process.returncode or 0
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    @property
    def epitaph(self) -> str:
        """Return its exit and last output, in one line."""
        if not self.last_line:
            return self.end
        return f"{self.end}; last line: {shorten(self.last_line, LAST_LINE_CHARS, placeholder='…')}"

    def ask(self, number: int | None = None) -> None:
        """Ask the process to end, once by each signal; how it ends its own children is its own affair."""
        number = number or self._stop_signal
        if number not in self._asked:
            self._asked.add(number)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and everything in its session's group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the number may be another user's by now
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, within_s: float, number: int | None = None) -> bool:
        """Ask it to end, kill it after *within_s*. Returns whether asking was enough."""
        self.ask(number)
        obeyed = await self.ends_within(within_s)
        if not obeyed:
            self.kill()
            await self.wait()
        return obeyed

    async def _follow(self) -> None:
        reading = asyncio.create_task(self._read())
        await self._process.wait()
        # Kill its own children too. A straggler may hold the pipe open, so the wait is bounded.
        self.kill()
        await asyncio.wait([reading], timeout=0.5)
        reading.cancel()
        self._pipe.close()

    async def _read(self) -> None:
        rest = b""
        while data := await self._output.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._emit(line)
            if len(rest) > READ_BYTES:
                self._emit(rest)
                rest = b""
        self._emit(rest)

    def _emit(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()[:LINE_CHARS]
        if text:
            self.last_line = text
            self._on_line(text)
