"""Linear algebra and trees on one thread: with more, small steps wait for one another far longer than they compute."""

import sys
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, cast


@lru_cache(maxsize=1)
def _libraries(modules: int) -> Any:
    """What is loaded that computes on threads. To find it takes 10 ms, so it is looked for only after new imports."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def one_thread(kind: str | None = None) -> AbstractContextManager[Any]:
    """Limit the libraries that are loaded so far, or only those of *kind* ("blas", "openmp"), to one thread."""
    return cast(AbstractContextManager[Any], _libraries(len(sys.modules)).limit(limits=1, user_api=kind))
