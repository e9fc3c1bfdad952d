"""A thousand requests that arrive at once must not hold up everything else on the event loop, `/healthz` above all."""

import asyncio
from collections import deque

MOST_PER_CYCLE = 16


class Pace:
    """Lets at most *most* requests begin in one cycle of the event loop; the others begin in the cycles that follow.

    A request takes about a millisecond to begin (parse, decide, connect), all of it in one go. Without this, whatever else
    is ready in the same cycle waits behind all of them.
    """

    def __init__(self, most: int = MOST_PER_CYCLE) -> None:
        self.most = most
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def enter(self) -> asyncio.Future[None] | None:
        """None if the request may begin now, else what it has to wait for."""
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
            if not begins.done():  # its request may have gone
                begins.set_result(None)
                self._count()
