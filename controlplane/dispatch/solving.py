"""The order of the queues solved by a Celery worker: the problem is sent with the task, the answer returns through Redis.

The answer is validated before use: compiled code follows an order without checks, and a group that appears twice, or does
not exist, would corrupt the queues.
"""

import asyncio
import base64
import contextlib
import io
import logging
import math
import secrets
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import redis.asyncio as aioredis
from redis.exceptions import RedisError

from controlplane.background import spawn
from controlplane.dispatch.reordering import PATIENCE_S
from controlplane.jobs.broker import send_task
from scheduling.queueing.reordering.bound import Shortage
from scheduling.queueing.reordering.evaluate import Score
from scheduling.queueing.reordering.problem import Order, Problem, broken_rules
from scheduling.queueing.reordering.scheduler import Answer
from scheduling.queueing.snapshot import Snapshot

logger = logging.getLogger(__name__)

TASK: Final = "workers.tasks.queues.reorder_queues"
KEY: Final = "pilothouse:reordering:"


def pack(**arrays: Any) -> str:
    """Return arrays and numbers as text that Celery and Redis carry; never objects."""
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **{name: np.asarray(value) for name, value in arrays.items()})
    return base64.b64encode(out.getvalue()).decode()


def unpack(text: str | bytes) -> dict[str, Any]:
    """Inverse of `pack`. Raises ValueError for anything else."""
    try:
        with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as arrays:
            return dict(arrays)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, TypeError) as error:
        raise ValueError(f"it cannot be read: {error}") from error


def pack_problem(problem: Problem, previous: Order) -> str:
    return pack(**problem._asdict(), order_first=previous.first, order_groups=previous.groups)


def unpack_problem(text: str) -> tuple[Problem, Order]:
    arrays = unpack(text)
    order = Order(arrays.pop("order_first"), arrays.pop("order_groups"))
    return Problem(**arrays), order


def pack_answer(answer: Answer) -> str:
    arrays: dict[str, Any] = {"first": answer.order.first, "groups": answer.order.groups}
    for name, score in (("before", answer.before), ("after", answer.after)):
        arrays |= {f"{name}_{field}": value for field, value in score._asdict().items()}
    arrays |= {f"shortage_{field}": value for field, value in answer.shortage._asdict().items()}
    return pack(**arrays, changed=answer.changed, moves=answer.moves, reason=answer.reason)


def unpack_answer(text: str | bytes) -> Answer:
    arrays = unpack(text)

    def part(prefix: str, fields: tuple[str, ...]) -> dict[str, Any]:
        values = {field: arrays[f"{prefix}_{field}"] for field in fields}
        return {field: value if value.ndim else value.item() for field, value in values.items()}

    return Answer(
        order=Order(arrays["first"], arrays["groups"]),
        changed=bool(arrays["changed"]),
        before=Score(**part("before", Score._fields)),
        after=Score(**part("after", Score._fields)),
        moves=int(arrays["moves"]),
        shortage=Shortage(**part("shortage", Shortage._fields)),
        reason=str(arrays["reason"]),
    )


def read_answer(text: str | bytes, problem: Problem) -> Answer:
    """Return the answer to *problem* in *text*.

    Raises ValueError or KeyError if it is malformed or cannot be carried out (QLM equations 6 to 9).
    """
    answer = unpack_answer(text)
    order, scores = answer.order, (answer.before, answer.after)
    if any(array.dtype != np.int64 or array.ndim != 1 for array in order):
        raise ValueError("the order does not consist of numbers of groups")
    if wrong := broken_rules(problem, order):
        raise ValueError(f"the order cannot be carried out: {wrong[0]}")
    if any(np.shape(score.late_s) != problem.requests.shape for score in scores):
        raise ValueError("its scores are of other groups")
    if not all(math.isfinite(score.objective) for score in scores):
        raise ValueError("what it is worth is not a number")
    return answer


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
                came = cast(tuple[bytes, bytes] | None, await self._redis.blpop([key], timeout=PATIENCE_S))
                # In a thread: for a thousand groups it takes longer than a token.
                answer = await asyncio.to_thread(read_answer, came[1], seen.problem) if came else None
        except (RedisError, OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("queues: the answer of the global scheduler was lost: %s", error)
        answered(answer)
