"""The order of the queues solved by a Celery worker: the problem is sent with the task, the order returns through Redis.

The order is checked before use: compiled code follows it without checks, and a group that appears twice, or does not exist,
would corrupt the queues.
"""

import asyncio
import base64
import contextlib
import io
import logging
import secrets
from collections.abc import Callable
from typing import Annotated, Any, Final, cast

import msgspec
import numpy as np
import redis.asyncio as aioredis
from redis.exceptions import RedisError

from controlplane.background import spawn
from controlplane.dispatch.reordering import PATIENCE_S
from controlplane.jobs.broker import send_task
from scheduling.queueing.reordering.problem import Order, Problem, broken_rules
from scheduling.queueing.reordering.scheduler import Answer, judged
from scheduling.queueing.snapshot import Snapshot

logger = logging.getLogger(__name__)

TASK: Final = "workers.tasks.queues.reorder_queues"
KEY: Final = "pilothouse:reordering:"
Queues = list[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]]


def pack_problem(problem: Problem, previous: Order) -> str:
    """Return a problem as text that Celery and Redis carry: arrays, never objects."""
    out = io.BytesIO()
    arrays: dict[str, Any] = {**problem._asdict(), "order_first": previous.first, "order_groups": previous.groups}
    np.savez(out, allow_pickle=False, **arrays)
    return base64.b64encode(out.getvalue()).decode()


def unpack_problem(text: str) -> tuple[Problem, Order]:
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as file:
        arrays = dict(file)
    order = Order(arrays.pop("order_first"), arrays.pop("order_groups"))
    return Problem(**arrays), order


def read_order(text: bytes, seen: Snapshot) -> Answer:
    """Return the answer with the order in *text*. Raises ValueError if it cannot be carried out (QLM equations 6 to 9)."""
    order = Order.of(msgspec.json.decode(text, type=Queues))
    if wrong := broken_rules(seen.problem, order):
        raise ValueError(f"the order cannot be carried out: {wrong[0]}")
    return judged(seen.problem, seen.previous, order)


class CelerySolver:
    """Solver that asks workers, with one asyncio task per problem."""

    def __init__(self, redis_url: str) -> None:
        self._redis = aioredis.from_url(redis_url, socket_timeout=PATIENCE_S + 2, socket_connect_timeout=1.0)
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, seen: Snapshot, by: str, answered: Callable[[Answer | None], None]) -> None:
        task = spawn(self._solve(seen, by, answered), "reorder queues")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _solve(self, seen: Snapshot, by: str, answered: Callable[[Answer | None], None]) -> None:
        key, answer = KEY + secrets.token_hex(8), None
        packed = pack_problem(seen.problem, seen.previous)
        try:
            if await asyncio.to_thread(send_task, TASK, key, packed, by, expires_s=PATIENCE_S):
                reply = cast(tuple[bytes, bytes] | None, await self._redis.blpop([key], timeout=PATIENCE_S))
                # In a thread: for a thousand groups it takes longer than a token.
                answer = await asyncio.to_thread(read_order, reply[1], seen) if reply else None
        except (RedisError, OSError, ValueError) as error:
            logger.warning("queues: the answer of the global scheduler was lost: %s", error)
        answered(answer)
