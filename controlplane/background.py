"""Background tasks, which nothing awaits: one that dies is logged, counted, and shown by `/readyz`, metrics and System."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

dead: Counter[str] = Counter()
"""Tasks of this process that ended by an exception, by name."""


def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run *work* in a task called *name*, a constant. Its exceptions, other than a cancellation, end in `dead`."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_ended)
    return task


def summary() -> str:
    """Return which tasks died, in words; empty if none did."""
    return ", ".join(f"{name} ({count} times)" if count > 1 else name for name, count in sorted(dead.items()))


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        dead[task.get_name()] += 1
        logger.error("%s: a background task died: %s", task.get_name(), type(error).__name__, exc_info=error)
