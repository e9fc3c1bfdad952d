"""Predictors ask a length model from an event loop, within a budget. Failures are `Unanswered`; nothing raises.

`InLine` calls the model on the event loop: right for trees, whose call costs less than a message to another process.
`SubprocessPredictor` runs it in a subprocess, where it may take its time, hang or die: right for an encoder. A thread
would hold the interpreter's lock: a loop with a thousand streams would wait up to the switch interval (5 ms) at each
iteration. docs/papers/lengths.md has the measurements.
"""

import asyncio
import contextlib
import logging
import math
import os
import pickle
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from forecasting.lengths.model import LengthModel
from forecasting.lengths.query import QUANTILES, Estimate, LengthQuery
from forecasting.lengths.subprocess_server import SIZE, frame

KEPT: Final = 4096
"""Newest answers over which percentiles are taken."""


class Timing:
    """Response times of one length model, or of the whole service."""

    def __init__(self) -> None:
        self.asked = self.in_time = 0
        self._ms = np.zeros(KEPT, np.float32)
        self._timed = 0

    def took(self, seconds: float) -> None:
        """Record an answer after *seconds*, waits included, in time or not."""
        self._ms[self._timed % KEPT] = seconds * 1000
        self._timed += 1

    def percentiles(self) -> tuple[float | None, float | None]:
        """Return p50 and p99 in ms; None before the first answer."""
        timed = self._ms[: min(self._timed, KEPT)]
        if not timed.size:
            return None, None
        p50_ms, p99_ms = np.percentile(timed, [50, 99]).tolist()
        return round(p50_ms, 3), round(p99_ms, 3)

    def report(self) -> dict[str, float | None]:
        """Return the figures for the published summary."""
        p50_ms, p99_ms = self.percentiles()
        return {"asked": self.asked, "in_time": self.in_time, "p50_ms": p50_ms, "p99_ms": p99_ms}


logger = logging.getLogger(__name__)

ROOT: Final = Path(__file__).parents[2]
MOST_TOKENS: Final = float(1 << 20)
"""Largest plausible prediction."""
BATCH: Final = 64
WAITING: Final = 1024
"""Most queries that wait for a process; more are turned away at once."""
HANGS_S: Final = 5.0
"""Time after which a process that has not answered a batch is killed, if that is `HANGS_TIMES` its expected time."""
HANGS_TIMES: Final = 10.0
FOLLOWS: Final = 0.2
"""Weight of a new batch in the mean time of a query."""
STARTS_S: Final = 120.0
LEAST_REST_S, MOST_REST_S = 0.5, 60.0
FAILURES: Final = 5
"""Consecutive failures after which a model in line rests."""


class Unanswered(StrEnum):
    """Reasons why a predictor has no estimate."""

    LATE = "late"
    FAILED = "failed"
    SENSELESS = "senseless"
    RESTING = "resting"
    DOWN = "down"


def checked(tokens: Any, quantiles: Any) -> Estimate | Unanswered:
    """Return a model's figures if they can be lengths: finite, from 1 to `MOST_TOKENS`, quantiles ascending."""
    try:
        ends = tuple(float(quantile) for quantile in quantiles)
        middle = float(tokens)
    except (TypeError, ValueError):
        return Unanswered.SENSELESS
    last = 1.0
    for value in ends:
        if not last <= value <= MOST_TOKENS:  # NaN is neither
            return Unanswered.SENSELESS
        last = value
    if len(ends) != len(QUANTILES) or not 1.0 <= middle <= MOST_TOKENS:
        return Unanswered.SENSELESS
    return Estimate(middle, ends)


class Predictor(ABC):
    """Interface to a model that is asked within a budget."""

    own_process = False
    restarts = 0

    def __init__(self) -> None:
        self.timing = Timing()

    @abstractmethod
    async def ask(self, query: LengthQuery, budget_s: float) -> Estimate | Unanswered:
        """Return the model's estimate, or why there is none; within *budget_s* where the model can be interrupted."""

    async def stop(self) -> None:  # noqa: B027 (only a process is stopped)
        """Release what it holds."""


class InLine(Predictor):
    """A quick model, called on the event loop."""

    def __init__(self, model: LengthModel, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.model, self.clock = model, clock
        self._failures = 0
        self._rests_until_s = -math.inf
        self._rest_s = LEAST_REST_S

    async def ask(self, query: LengthQuery, budget_s: float) -> Estimate | Unanswered:
        """Return the model's answer, or why there is none; it is not interrupted at *budget_s*, but counts as late."""
        began = self.clock()
        self.timing.asked += 1
        if began < self._rests_until_s:
            return Unanswered.RESTING
        try:
            answer = checked(*(each[0] for each in self.model.predict([query])))
        except Exception as error:
            logger.debug("length model: %s", type(error).__name__)  # its text may hold the prompt's
            answer = Unanswered.FAILED
        took_s = self.clock() - began
        self.timing.took(took_s)
        if isinstance(answer, Unanswered):
            self._failures += 1
            if self._failures >= FAILURES:
                self._rests_until_s = self.clock() + self._rest_s
                self._rest_s = min(2 * self._rest_s, MOST_REST_S)
                self._failures = FAILURES - 1  # after its rest it has one try
        else:
            self._failures, self._rest_s = 0, LEAST_REST_S
            self.timing.in_time += took_s <= budget_s
        return answer


class _PendingQuery(NamedTuple):
    query: LengthQuery
    future: "asyncio.Future[Estimate | Unanswered]"
    asked_s: float  # of the event loop's clock
    until_s: float  # later it is of no use


class SubprocessPredictor(Predictor):
    """A model in a subprocess. Pending queries go to it in batches of as many as are answered in time.

    A query that would be late is given up at once, so that those behind it are in time. *call* and *arguments* define
    how the process makes its model (`subprocess_server.made`); torch uses *threads* threads there. A process that dies,
    or hangs for `HANGS_S`, is started again after a rest that doubles up to `MOST_REST_S`.
    """

    own_process = True

    def __init__(
        self,
        call: str = "forecasting.lengths.subprocess_server:load",
        arguments: Sequence[str] = ("trees", ""),
        threads: int = 1,
    ) -> None:
        super().__init__()
        self.call, self.arguments, self.threads = call, tuple(arguments), threads
        self.batches = 0
        self.up = asyncio.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self._waiting: deque[_PendingQuery] = deque()
        self._each_s = 0.0  # mean time of a query in a batch; 0: not known yet
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start and keep a process; until the first is up, `ask` answers that it is down."""
        self._task = asyncio.create_task(self._keep(), name="length model")

    async def ask(self, query: LengthQuery, budget_s: float) -> Estimate | Unanswered:
        self.timing.asked += 1
        if not self.up.is_set() or len(self._waiting) >= WAITING:
            return Unanswered.DOWN
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Estimate | Unanswered] = loop.create_future()
        now_s = loop.time()
        self._waiting.append(_PendingQuery(query, future, now_s, now_s + budget_s))
        self._wanted.set()
        timer = loop.call_later(budget_s, self._give_up, future)
        try:
            return await future
        finally:
            timer.cancel()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @staticmethod
    def _give_up(future: "asyncio.Future[Estimate | Unanswered]") -> None:
        if not future.done():
            future.set_result(Unanswered.LATE)

    async def _keep(self) -> None:
        rest_s = LEAST_REST_S
        while True:
            before = self.batches
            try:
                await self._live()
            except (OSError, EOFError, TimeoutError, pickle.UnpicklingError, ValueError) as error:
                logger.warning("length model: its process ended (%s); the next in %.1f s", type(error).__name__, rest_s)
            self.restarts += 1
            if self.batches > before:
                rest_s = LEAST_REST_S
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, MOST_REST_S)

    async def _live(self) -> None:
        """Run one process from its start to its end. Raises the error that ended it."""
        ours, theirs = socket.socketpair()
        with theirs:
            environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
            command = [
                sys.executable,
                "-m",
                "forecasting.lengths.subprocess_server",
                str(theirs.fileno()),
                self.call,
            ]
            self.process = process = subprocess.Popen(  # noqa: ASYNC220 - vfork: under 2 ms
                [*command, *self.arguments],
                pass_fds=(theirs.fileno(),),
                env=environment | {"OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false"},
                stdin=subprocess.DEVNULL,
            )
        writer = None
        reading: asyncio.Task[Any] | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            async with asyncio.timeout(STARTS_S):
                await self._receive(reader)
            self.up.set()
            answered = True
            while True:
                if answered:  # always one read is open, so that the death of an idle process is noticed at once too
                    reading = asyncio.create_task(self._receive(reader))
                assert reading is not None
                wanted: asyncio.Task[Any] = asyncio.create_task(self._wanted.wait())
                try:
                    await asyncio.wait([reading, wanted], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    wanted.cancel()
                if reading.done():
                    reading.result()
                    raise EOFError  # it sent something unasked
                answered = await self._answer(reading, writer)
        finally:
            self.up.clear()
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            for waiting in self._waiting:
                if not waiting.future.done():
                    waiting.future.set_result(Unanswered.DOWN)
            self._waiting.clear()
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            else:
                ours.close()
            process.kill()
            await asyncio.shield(asyncio.to_thread(process.wait))

    async def _answer(self, reading: "asyncio.Task[Any]", writer: asyncio.StreamWriter) -> bool:
        """Have the next batch answered; *reading* is the coming answer. Return False if no query is pending."""
        loop = asyncio.get_running_loop()
        batch = self._next_batch(loop.time())
        if not self._waiting:
            self._wanted.clear()
        if not batch:
            return False
        began_s = loop.time()
        try:
            writer.write(frame([waiting.query for waiting in batch]))
            async with asyncio.timeout(max(HANGS_S, HANGS_TIMES * self._each_s * len(batch))):
                estimates: list[Estimate] = await reading
            self.batches += 1
            now_s = loop.time()
            each_s = (now_s - began_s) / len(batch)
            self._each_s = self._each_s + FOLLOWS * (each_s - self._each_s) if self._each_s else each_s
            for waiting, estimate in zip(batch, estimates, strict=True):
                self.timing.took(now_s - waiting.asked_s)
                if not waiting.future.done():
                    answer = checked(estimate.tokens, estimate.quantiles)
                    self.timing.in_time += isinstance(answer, Estimate)
                    waiting.future.set_result(answer)
            return True
        finally:
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_result(Unanswered.DOWN)

    def _next_batch(self, now_s: float) -> list[_PendingQuery]:
        """Return the oldest pending queries, as many as are answered within the budget of each; give up those that
        cannot be.

        Before the first answer a batch is one query, since its time is unknown.
        """
        batch: list[_PendingQuery] = []
        soonest_s = math.inf
        while self._waiting and len(batch) < (BATCH if self._each_s else 1):
            waiting = self._waiting[0]
            ready_s = now_s + self._each_s * (len(batch) + 1)
            if batch and ready_s > soonest_s:
                break
            self._waiting.popleft()
            if waiting.future.done():
                continue
            if ready_s > waiting.until_s:
                self._give_up(waiting.future)
                self._each_s *= 1.0 - FOLLOWS  # so that a guess that was too long is tried again
            else:
                batch.append(waiting)
                soonest_s = min(soonest_s, waiting.until_s)
        return batch

    @staticmethod
    async def _receive(reader: asyncio.StreamReader) -> Any:
        (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
        return pickle.loads(await reader.readexactly(size))  # noqa: S301 - from our own child alone
