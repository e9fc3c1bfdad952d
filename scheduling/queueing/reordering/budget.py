"""How long a search may take."""

from collections.abc import Callable
from typing import Final

CHUNK: Final = 4_000
"""Moves between two looks at the clock, some millisecond."""
MOST_CHUNK: Final = 100_000
"""The same where the budget is in moves, and no clock is looked at."""
MOVES_PER_S: Final = 2e6
"""Moves that a budget in seconds is taken for before the clock has said more."""


class Budget:
    """Seconds of a clock; or moves and listings, which give the same answer on every machine.

    *clock* may be each thread's own, so each thread has a budget of its own.
    """

    def __init__(self, seconds: float, moves: int | None, clock: Callable[[], float]) -> None:
        self.seconds, self.moves, self.clock = seconds, moves, clock
        self.began_s, self.tried = clock(), 0

    def spent(self) -> float:
        """Share that is spent, 1 and above for all."""
        if self.moves is not None:
            return self.tried / max(1, self.moves)
        return (self.clock() - self.began_s) / self.seconds if self.seconds > 0 else 1.0

    @property
    def likely_moves(self) -> float:
        """All moves that it is likely to be."""
        return float(self.moves) if self.moves is not None else max(CHUNK, MOVES_PER_S * self.seconds)

    def chunk(self) -> int:
        """Moves to try before the next look at the clock."""
        return CHUNK if self.moves is None else max(1, min(MOST_CHUNK, self.moves - self.tried))

    def left_s(self, until: float) -> float:
        """Seconds until the share *until* is spent."""
        return max(0.0, until - self.spent()) * self.seconds

    def spend(self, until: float, moves: int) -> None:
        """The share until *until* has been spent by other threads, in which *moves* were tried."""
        self.tried += moves
        self.began_s -= self.left_s(until)
