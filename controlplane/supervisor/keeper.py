"""Keeps parts alive: starts them, waits until they are ready, starts them again when they die, stops them in order."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.supervisor.child import Child
from controlplane.supervisor.guard import MARK, Guard, kill_marked
from controlplane.supervisor.screen import Screen

PROBE_S = 0.1
FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 30.0
SETTLED_S = 60.0  # a part that lived this long starts its back-off anew


class PartError(RuntimeError):
    """A part could not be started, or ended where it should not; one line that names it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the house.

    *probe* returns what to show once the part is ready and None until then; without one a part is ready when started.
    It is started again whenever it dies. More than *fatal_after* deaths without a settled life between them end the
    house; with None it is tried for ever, at most every `LONGEST_BACK_OFF_S`. A part with *told_early* takes long to end
    and nothing needs it meanwhile: it is asked at the very beginning of the stop, and waited for in its turn. The output
    of a *quiet* part is shown only when it fails, by its last line.
    """

    name: str
    argv: Sequence[str]
    probe: Callable[[], Awaitable[str | None]] | None = None
    shows: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    standard_input: bytes = b""
    ready_within_s: float = 60.0
    stop_within_s: float = 1.0
    fatal_after: int | None = None
    told_early: bool = False
    quiet: bool = False
    on_restart: Callable[[], Awaitable[None]] | None = None


class Keeper:
    """Runs parts under one guard. `ended` resolves to one line when the house cannot go on."""

    def __init__(self, screen: Screen, environment: Mapping[str, str]) -> None:
        self.screen = screen
        self.environment = dict(environment)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._mark = secrets.token_hex(8)
        self._guard = Guard(self._mark)
        self._children: dict[str, tuple[Part, Child]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, part: Part) -> None:
        """Start *part*, wait until it is ready, then keep it. Raises PartError, in one line, if it does not come up."""
        began = time.monotonic()
        text = await self._bring_up(part)
        self.screen.started(part.name, text, time.monotonic() - began)
        self._tasks[part.name] = task = asyncio.create_task(self._keep(part))
        task.add_done_callback(self._kept)

    async def run(self, part: Part, on_line: Callable[[str], None] | None = None) -> None:
        """Run *part* to its end; *on_line* gets its output instead of the screen. Raises PartError if it fails."""
        child = await self._spawn(part, on_line)
        if await child.wait() != "exit status 0":
            raise PartError(f"{part.name} failed ({child.epitaph})")
        del self._children[part.name]

    async def stop(self, stages: Sequence[Sequence[str]]) -> list[str]:
        """Stop what no stage names, then stage by stage, then whatever is left. Returns those that had to be killed."""
        for task in self._tasks.values():
            task.cancel()
        killed: list[str] = []
        for part, child in self._children.values():
            if part.told_early:
                child.ask()
        named = {name for stage in stages for name in stage}
        for stage in [[name for name in self._children if name not in named], *stages]:
            running = [self._children[name] for name in stage if name in self._children]
            obeyed = await asyncio.gather(*(child.stop(part.stop_within_s) for part, child in running))
            killed += [part.name for (part, _), well in zip(running, obeyed, strict=True) if not well]
        kill_marked(self._mark)
        self._guard.release()
        return killed

    def kill(self) -> None:
        """Kill everything now: somebody pressed Ctrl-C twice."""
        for _, child in self._children.values():
            child.kill()

    async def _spawn(self, part: Part, on_line: Callable[[str], None] | None = None) -> Child:
        # SPT_NOENV: titles set by setproctitle must leave the environment, and so the mark, readable.
        own = {MARK: self._mark, "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1"}
        try:
            child = await Child.start(
                part.argv,
                environment={**self.environment, **part.environment, **own},
                guard=self._guard,
                on_line=on_line or (lambda line: None if part.quiet else self.screen.line(part.name, line)),
                standard_input=part.standard_input,
            )
        except OSError as error:
            raise PartError(f"{part.name} cannot be started: {part.argv[0]}: {error.strerror}") from error
        self._children[part.name] = part, child
        return child

    async def _bring_up(self, part: Part) -> str:
        """Start *part* and wait until it is ready; returns what to show of it."""
        child = await self._spawn(part)
        deadline = time.monotonic() + part.ready_within_s
        while True:
            if not child.running:
                raise PartError(f"{part.name} ended before it was ready ({child.epitaph})")
            text = part.shows if part.probe is None else await part.probe()
            if text is not None:
                return text
            if time.monotonic() > deadline:
                said = f"; its last line: {child.last_line}" if child.last_line else ""
                raise PartError(f"{part.name} was not ready within {part.ready_within_s:g} s{said}")
            await child.ends_within(PROBE_S)

    async def _keep(self, part: Part) -> None:
        """Wait for *part* to end; start it again with a growing back-off, or end the house."""
        back_off_s, deaths = FIRST_BACK_OFF_S, 0
        came_up = time.monotonic()
        while True:
            _, child = self._children[part.name]
            await child.wait()
            if time.monotonic() - came_up > SETTLED_S:
                back_off_s, deaths = FIRST_BACK_OFF_S, 0
            trouble = f"{part.name} ended ({child.epitaph})"
            while True:
                deaths += 1
                if part.fatal_after is not None and deaths > part.fatal_after:
                    self._end(f"{trouble}, and the house cannot go on without it")
                    return
                self.screen.trouble(f"{trouble}; starting it again in {back_off_s:g} s")
                await asyncio.sleep(back_off_s)
                back_off_s = min(back_off_s * 2, LONGEST_BACK_OFF_S)
                began = time.monotonic()
                try:
                    await self._bring_up(part)
                    break
                except PartError as error:
                    self._children[part.name][1].kill()
                    trouble = str(error)
            came_up = time.monotonic()
            self.screen.note(f"{part.name} is back after {came_up - began:.1f} s")
            if part.on_restart is not None:
                try:
                    await part.on_restart()
                except PartError as error:
                    self.screen.trouble(str(error))

    def _kept(self, task: asyncio.Task[None]) -> None:
        """A mistake of ours while keeping a part must not leave it unkept in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(f"supervisor: {error!r}")

    def _end(self, line: str) -> None:
        if not self.ended.done():
            self.ended.set_result(line)
