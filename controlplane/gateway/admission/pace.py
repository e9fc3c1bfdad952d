"""The limits of the process itself: requests that begin at once, and how busy its event loop is."""

import asyncio
import math
import time
from collections import deque

MAX_PER_CYCLE = 16


class Pace:
    """Limits requests that begin in one cycle of the event loop to *most*; the others begin in the following cycles.

    A request takes about a millisecond to begin (parse, decide, connect), without a pause. Without this limit, whatever else
    is ready in the same cycle waits behind all of them.
    """

    def __init__(self, most: int = MAX_PER_CYCLE) -> None:
        self.most = most
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def enter(self) -> asyncio.Future[None] | None:
        """Return None if the request may begin immediately, else the future to wait for."""
        if self._begun < self.most and not self._waiting:
            self._count()
            return None
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(begins)
        return begins

    def _count(self) -> None:
        self._begun += 1
        if self._begun == 1:
            asyncio.get_running_loop().call_soon(self._next_cycle)

    def _next_cycle(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self.most:
            begins = self._waiting.popleft()
            if not begins.done():  # its request may have left
                begins.set_result(None)
                self._count()


LOAD_S = 1.0


class LoopLoad:
    """Share of its time that the event loop's thread computes: a moving average over about `LOAD_S`."""

    def __init__(self) -> None:
        self.share = 0.0
        self._looked_s, self._computed_s = time.monotonic(), math.inf

    def tick(self) -> None:
        """Take in the time since the last look. Call it on the event loop, some ten times a second."""
        now_s, computed_s = time.monotonic(), time.thread_time()
        passed_s, used_s = now_s - self._looked_s, max(0.0, computed_s - self._computed_s)
        self._looked_s, self._computed_s = now_s, computed_s
        if passed_s > 0:
            self.share += (min(1.0, used_s / passed_s) - self.share) * -math.expm1(-passed_s / LOAD_S)
