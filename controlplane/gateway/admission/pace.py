"""A thousand requests that arrive at once must not hold up everything else on the event loop, `/healthz` above all."""

import asyncio
from collections import deque

MOST_PER_TURN = 16


class Pace:
    """Lets at most *most* requests begin in one turn of the event loop; the others begin in the turns that follow.

    A request takes about a millisecond to begin (parse, decide, connect), all of it in one go. Without this, whatever else
    is ready in the same turn waits behind all of them.
    """

    def __init__(self, most: int = MOST_PER_TURN) -> None:
        self.most = most
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def enter(self) -> asyncio.Future[None] | None:
        """None if the request may begin now, else what it has to wait for."""
        if self._begun < self.most and not self._waiting:
            self._count()
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        return turn

    def _count(self) -> None:
        self._begun += 1
        if self._begun == 1:
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self.most:
            turn = self._waiting.popleft()
            if not turn.done():  # whoever waited may have gone
                turn.set_result(None)
                self._count()
