"""Keeps parts alive: starts them, waits until they are ready, starts them again when they die, stops them in order."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from controlplane.background import spawn
from controlplane.supervisor.child import MARK, Child, kill_marked
from controlplane.supervisor.screen import Screen

PROBE_S = 0.1
PROBE_LIMIT_S = 10.0
FIRST_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0
MAX_PATIENCE_S = 300.0
LEAVES_S = 1.0  # within which a part that is asked to drain has left its sockets, and given up what it owns
SETTLED_S = 60.0  # a part that lived this long has its back-off reset


class PartError(RuntimeError):
    """A part could not be started, or ended where it should not; one line that names it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the stack.

    *probe* returns what to show once the part is ready and None until then; without one a part is ready when started.
    A probe that raises says "not ready", and why. The part is started again whenever it dies, with a pause that grows
    up to *max_back_off_s* and a patience that doubles up to `MAX_PATIENCE_S` (a machine that is too busy to start it in
    time gets no better by starting it over). It is back when *on_restart* is done; if that fails, it is started once more.
    A part with *stop_early* takes long to end and nothing needs it meanwhile: it is asked at the very beginning of the
    stop, and waited for in its place. The output of a *quiet* part is shown only when it fails, by its last line.
    *sockets* are file descriptors that it inherits.

    *stop_signal* ends it when all of the stack ends. A restart asks by SIGTERM, and gives it *drain_within_s*; one that
    *overlaps* ends what it has begun while the next one starts.
    """

    name: str
    argv: Sequence[str]
    probe: Callable[[], Awaitable[str | None]] | None = None
    shows: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    standard_input: bytes = b""
    ready_within_s: float = 60.0
    stop_within_s: float = 1.0
    max_back_off_s: float = MAX_BACK_OFF_S
    stop_early: bool = False
    quiet: bool = False
    sockets: Sequence[int] = ()
    stop_signal: int = signal.SIGTERM
    drain_within_s: float = 30.0
    overlaps: bool = False
    on_restart: Callable[[], Awaitable[None]] | None = None


@dataclass(slots=True)
class PartStatus:
    """State of one part, for the console."""

    name: str
    state: str = "starting"  # starting, running, restarting
    process_id: int | None = None
    restarts: int = 0
    detail: str = ""


class Keeper:
    """Runs parts, with *mark* in the environment of all they start; *publish* gets every part's status when one changes."""

    def __init__(
        self,
        screen: Screen,
        environment: Mapping[str, str],
        mark: str,
        publish: Callable[[list[dict[str, Any]]], None] = lambda parts: None,
    ) -> None:
        self.screen = screen
        self.environment = dict(environment)
        self.mark = mark
        self._publish = publish
        self._children: dict[str, tuple[Part, Child]] = {}
        self._status: dict[str, PartStatus] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._draining: list[tuple[Part, Child]] = []

    async def start(self, part: Part) -> None:
        """Start *part*, wait until it is ready, then keep it. Raises PartError, in one line, if it does not come up."""
        began = time.monotonic()
        self._set_status(part, "starting", "")
        text = await self._bring_up(part, part.ready_within_s)
        self.screen.started(part.name, text, time.monotonic() - began)
        self._tasks[part.name] = spawn(self._keep(part), "keep part")

    async def restart(self, name: str) -> None:
        """Have part *name* drain, and start it again. Raises PartError if it does not come up; then that is tried again, as
        when it dies."""
        began = time.monotonic()
        self._tasks.pop(name).cancel()
        part, child = self._children[name]
        self._drain(name)
        if not await child.ends_within(LEAVES_S) and not part.overlaps:
            await child.wait()
        self._set_status(part, "starting", "")
        failure, text = None, ""
        try:
            text = await self._bring_up(part, part.ready_within_s)
        except PartError as error:
            failure = error
            if (started := self._children[name][1]) is not child:
                started.kill()
        self._tasks[name] = spawn(self._keep(part), "keep part")
        if failure is not None:
            raise failure
        self.screen.started(name, text, time.monotonic() - began)

    def end(self, name: str) -> None:
        """Have part *name* drain, if it was started, and keep it no longer."""
        if task := self._tasks.pop(name, None):
            task.cancel()
        if name in self._children:
            self._drain(name)
            del self._children[name], self._status[name]

    async def drained(self) -> None:
        """Wait for all that drain."""
        await asyncio.gather(*(child.wait() for _, child in self._draining))

    def _drain(self, name: str) -> None:
        part, child = self._children[name]

        async def drain() -> None:
            if not await child.stop(part.drain_within_s, signal.SIGTERM):
                self.screen.trouble(f"{name} did not end within {part.drain_within_s:g} s and was killed")
            self._draining.remove((part, child))

        self._draining.append((part, child))
        spawn(drain(), "drain part")

    def process_id(self, name: str) -> int:
        return self._children[name][1].process_id

    async def run(self, part: Part, on_line: Callable[[str], None] | None = None) -> None:
        """Run *part* to its end; *on_line* gets its output instead of the screen. Raises PartError if it fails."""
        child = await self._spawn(part, on_line)
        try:
            if await child.wait() != "exit status 0":
                raise PartError(f"{part.name} failed ({child.epitaph})")
        finally:
            if child.running:  # we were cancelled
                child.kill()
        self._children.pop(part.name, None)

    async def stop(self, stages: Sequence[Sequence[str]]) -> list[str]:
        """Stop what no stage names, then stage by stage, then whatever is left. Returns those that had to be killed."""
        for task in self._tasks.values():
            task.cancel()
        killed: list[str] = []
        for part, child in self._children.values():
            if part.stop_early:
                child.ask()
        named = {name for stage in stages for name in stage}
        others = [*self._draining, *(one for name, one in self._children.items() if name not in named)]
        for running in [
            others,
            *([self._children[name] for name in stage if name in self._children] for stage in stages),
        ]:
            obeyed = await asyncio.gather(*(child.stop(part.stop_within_s) for part, child in running))
            killed += [part.name for (part, _), well in zip(running, obeyed, strict=True) if not well]
        kill_marked(self.mark)
        return killed

    def kill(self) -> None:
        """Kill everything at once, after a second Ctrl-C."""
        for _, child in (*self._children.values(), *self._draining):
            child.kill()

    async def _spawn(self, part: Part, on_line: Callable[[str], None] | None = None) -> Child:
        # SPT_NOENV: titles set by setproctitle must leave the environment, and so the mark, readable.
        own = {MARK: self.mark, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}
        try:
            child = await Child.start(
                part.argv,
                environment={**self.environment, **part.environment, **own},
                on_line=on_line or (lambda line: None if part.quiet else self.screen.line(part.name, line)),
                standard_input=part.standard_input,
                stop_signal=part.stop_signal,
                sockets=part.sockets,
            )
        except OSError as error:
            raise PartError(f"{part.name} cannot be started: {part.argv[0]}: {error.strerror}") from error
        self._children[part.name] = part, child
        return child

    async def _bring_up(self, part: Part, patience_s: float) -> str:
        """Start *part* and wait until it is ready, for *patience_s* at most; returns what to show of it."""
        child = await self._spawn(part)
        deadline = time.monotonic() + patience_s
        reason = ""
        while True:
            if not child.running:
                raise PartError(f"{part.name} ended before it was ready ({child.epitaph})")
            text: str | None = part.shows
            if part.probe is not None:
                try:
                    async with asyncio.timeout(PROBE_LIMIT_S):
                        text, reason = await part.probe(), ""
                except Exception as error:  # whatever a probe raises, a later one may succeed
                    text, reason = None, f" ({type(error).__name__}: {error})".replace(": )", ")")
            if text is not None:
                self._set_status(part, "running", text)
                return text
            if time.monotonic() > deadline:
                last_line = f"; its last line: {child.last_line}" if child.last_line else ""
                raise PartError(f"{part.name} was not ready within {patience_s:g} s{reason}{last_line}")
            await child.ends_within(PROBE_S)

    async def _keep(self, part: Part) -> None:
        """Wait for *part* to end and start it again, with a growing back-off, for as long as the stack runs."""
        back_off_s, came_up = FIRST_BACK_OFF_S, time.monotonic()
        while True:
            _, child = self._children[part.name]
            await child.wait()
            if time.monotonic() - came_up > SETTLED_S:
                back_off_s = FIRST_BACK_OFF_S
            trouble = f"{part.name} ended ({child.epitaph})"
            patience_s = part.ready_within_s
            while True:
                self._status[part.name].restarts += 1
                self._set_status(part, "restarting", trouble)
                self.screen.trouble(f"{trouble}; starting it again in {back_off_s:g} s")
                await asyncio.sleep(back_off_s)
                back_off_s = min(back_off_s * 2, part.max_back_off_s)
                began = time.monotonic()
                try:
                    await self._bring_up(part, patience_s)
                    if part.on_restart is not None:
                        await part.on_restart()
                    break
                except Exception as error:  # not a PartError: a mistake of ours, which must not leave the part unkept
                    trouble = str(error) if isinstance(error, PartError) else f"{part.name}: {error!r}"
                    patience_s = min(patience_s * 2, max(MAX_PATIENCE_S, part.ready_within_s))
                    _, child = self._children[part.name]
                    child.kill()
                    await child.wait()
            came_up = time.monotonic()
            self.screen.note(f"{part.name} is back after {came_up - began:.1f} s")

    def _set_status(self, part: Part, state: str, detail: str) -> None:
        """Publish that *part* is in *state* from now on."""
        status = self._status.setdefault(part.name, PartStatus(part.name))
        status.state, status.detail = state, detail
        status.process_id = self.process_id(part.name) if state == "running" else None
        try:
            self._publish([asdict(one) for one in self._status.values()])
        except OSError as error:  # a full disk: the console shows the last state, and the stack continues
            self.screen.trouble(f"supervisor: the parts' status cannot be written: {error}")
