"""Per-tenant limits: concurrent sequences, tokens a minute. Kept in the memory of the process that owns the region.

And those of the process itself: requests that begin at once, and how busy its event loop is.
"""

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass

from controlplane.gateway.errors import too_many


@dataclass(slots=True)
class TenantUse:
    """Current use of a tenant. The bucket holds one minute's tokens and refills evenly."""

    sequences: int = 0
    tokens: float = 0.0
    refilled_s: float = -1.0


class Limits:
    def __init__(self) -> None:
        self._use: dict[int, TenantUse] = {}

    def enter(
        self,
        tenant_id: int,
        now_s: float,
        *,
        max_concurrent: int,
        tokens_per_minute: int,
        tokens: int,
        sequences: int = 1,
    ) -> None:
        """Admit one request of *sequences* (prompts times `n`) and *tokens* (prompt and predicted output).

        A request of more sequences than the whole limit is admitted alone; one larger than a whole minute's tokens on a
        full bucket, which it leaves in debt. Raises ApiError 429; then nothing is counted.
        """
        use = self._use.get(tenant_id)
        if use is None:
            use = self._use[tenant_id] = TenantUse()
        if use.sequences and use.sequences + sequences > max_concurrent:
            raise too_many(
                f"This tenant has {use.sequences} sequences (prompts times n) queued or running; with the {sequences} of"
                f" this request they exceed its limit of {max_concurrent}.",
                code="concurrency_limit_exceeded",
                retry_after_s=1.0,
            )
        if tokens_per_minute:
            self._refill(use, now_s, tokens_per_minute)
            needed = min(tokens, tokens_per_minute)
            if use.tokens < needed:
                wait_s = (needed - use.tokens) * 60.0 / tokens_per_minute
                raise too_many(
                    f"This tenant's limit of {tokens_per_minute} tokens a minute is reached; "
                    f"this request needs about {tokens}. Try again in {wait_s:.1f} s.",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
            use.tokens -= tokens
        use.sequences += sequences

    def leave(self, tenant_id: int, *, tokens_per_minute: int, predicted: int, used: int, sequences: int = 1) -> None:
        """Release the request and correct the predicted tokens to the used ones."""
        use = self._use[tenant_id]
        use.sequences -= sequences
        if tokens_per_minute and use.refilled_s >= 0:
            use.tokens = min(use.tokens + predicted - used, float(tokens_per_minute))

    def sequences(self, tenant_id: int) -> int:
        use = self._use.get(tenant_id)
        return use.sequences if use else 0

    @staticmethod
    def _refill(use: TenantUse, now_s: float, tokens_per_minute: int) -> None:
        if use.refilled_s < 0:
            use.tokens = float(tokens_per_minute)
        else:
            use.tokens = min(float(tokens_per_minute), use.tokens + (now_s - use.refilled_s) * tokens_per_minute / 60.0)
        use.refilled_s = now_s


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
