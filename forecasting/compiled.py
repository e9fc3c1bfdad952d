"""Kernel compilation: `@compiled` is Numba's `njit` with its cache on disk.

Numba validates a cached kernel by the modification time of its own file, so no kernel here calls one of another file.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return *function*, compiled on its first call, which imports Numba, and cached on disk where that is writable."""

    @functools.cache
    def kernel() -> Any:
        import numba

        try:
            return numba.njit(cache=True, nogil=True)(function)
        except RuntimeError:  # no folder for a cache
            return numba.njit(nogil=True)(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return kernel()(*arguments)

    return cast(Function, call)
