"""Kernels called from Python over and over: by their entry point, without Numba's look at the type of every array.

Numba finds the compiled code for a call by the types of all that is passed, array by array: 4 to 10 us for the arrays of
the fleet or of the waiting set, many times the work itself. What a live process passes are the same arrays, call after call.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from scheduling.compiled import Kernel

Function = TypeVar("Function", bound=Callable[..., Any])

MOST_LOOKS = 64
"""How often a kernel's arguments are looked at, some milliseconds each time; after that every other call goes through Numba.
Arrays that grow are others each time they have doubled."""


def direct(kernel: Function) -> Function:
    """*kernel*, `compiled`, faster where it is called again with the same tuples of arrays and with arrays of one type.

    A call with others goes through Numba, which raises for what cannot be; then those are the known ones. The last tuples
    are held, so that nothing else can come to be in their place. Every argument has to be given, none by name. Without
    compilation (NUMBA_DISABLE_JIT) every call is one of *kernel* itself.
    """
    if not isinstance(kernel, Kernel):
        return kernel
    named: Kernel = kernel
    known: dict[tuple[type, ...], tuple[Callable[..., Any], tuple[tuple[int, Any], ...]]] = {}
    looks = 0

    def through_numba(kinds: tuple[type, ...], arguments: tuple[Any, ...]) -> Any:
        nonlocal looks
        numba_kernel = named.dispatcher
        answer = numba_kernel(*arguments)
        if looks < MOST_LOOKS and hasattr(numba_kernel, "overloads"):
            looks += 1
            overload = numba_kernel.overloads.get(tuple(map(numba_kernel.typeof_pyval, arguments)))
            if overload is not None:
                arrays = tuple((at, one) for at, one in enumerate(arguments) if isinstance(one, (tuple, np.ndarray)))
                known[kinds] = overload.entry_point, arrays
        return answer

    def call(*arguments: Any) -> Any:
        kinds = tuple(map(type, arguments))
        entry = known.get(kinds)
        if entry is None:
            return through_numba(kinds, arguments)
        entry_point, arrays = entry
        for at, one in arrays:
            given = arguments[at]
            if given is not one and not _alike(given, one):
                return through_numba(kinds, arguments)
        return entry_point(*arguments)

    return cast(Function, call)


def _alike(one: Any, other: Any) -> bool:
    """Whether two arrays have one type; never two tuples, of which each array would have to be looked at."""
    if isinstance(one, tuple):
        return False
    return bool(one.dtype is other.dtype and one.ndim == other.ndim and one.flags.num == other.flags.num)
