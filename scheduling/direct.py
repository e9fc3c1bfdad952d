"""Kernels called from Python over and over: by their entry point, without Numba's look at the type of every array.

Numba finds the compiled code for a call by the types of all that is passed, array by array: 4 to 10 us for the arrays of
the fleet or of the waiting set, many times the work itself. What a live process passes are the same arrays, call after call.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from scheduling.compiled import Kernel

Function = TypeVar("Function", bound=Callable[..., Any])

MOST_LOOKS = 64
"""How often a kernel's arguments are looked at, some milliseconds each time; after that every other call goes through Numba.
Arrays that grow are others each time they have doubled."""
SCALARS = (int, float, bool)
"""What a kernel's parameter is annotated with that is not arrays."""


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
                same.expect(overload.entry_point, arguments)
        return answer

    def otherwise(*arguments: Any) -> Any:
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

    same = _Same(named.py_func, otherwise)
    return cast(Function, same.call)


class _Same:
    """`call` is a call of *function*'s kernel: by the entry point if its arguments are those expected, else *otherwise*.

    Python that is written for the kernel's parameters compares them in 0.3 us, where a loop over them takes 1.5.
    """

    def __init__(self, function: Callable[..., Any], otherwise: Callable[..., Any]) -> None:
        self._scalar = [
            one.annotation in SCALARS for one in inspect.signature(function, eval_str=True).parameters.values()
        ]
        count = len(self._scalar)
        names = [f"given_{at}" for at in range(count)]
        every = ", ".join(names)
        tests = [
            f"type({name}) is known_{at}" if scalar else f"({name} is known_{at} or alike({name}, known_{at}))"
            for at, (name, scalar) in enumerate(zip(names, self._scalar, strict=True))
        ]
        source = (
            f"def call({', '.join(f'{name}=missing' for name in names)}, /):\n"
            f"    if {' and '.join(tests)}:\n"
            f"        return entry_point({every})\n"
            f"    return otherwise(*(one for one in ({every},) if one is not missing))\n"
        )
        missing = object()
        self._names: dict[str, Any] = {f"known_{at}": _Same for at in range(count)} | {
            "entry_point": None, "otherwise": otherwise, "missing": missing, "alike": _alike,
        }  # fmt: skip
        exec(source, self._names)  # noqa: S102 - of names that are made here
        self.call: Callable[..., Any] = self._names["call"]

    def expect(self, entry_point: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Take calls with the tuples and arrays of *arguments* itself, and scalars of their types, to *entry_point*."""
        if len(arguments) == len(self._scalar):
            for at, (one, scalar) in enumerate(zip(arguments, self._scalar, strict=True)):
                self._names[f"known_{at}"] = type(one) if scalar else one
            self._names["entry_point"] = entry_point


def _alike(one: Any, other: Any) -> bool:
    """Whether both are arrays, and of one type; never two tuples, of which each array would have to be looked at."""
    if type(one) is not np.ndarray or type(other) is not np.ndarray:
        return False
    return bool(one.dtype is other.dtype and one.ndim == other.ndim and one.flags.num == other.flags.num)


class Repeated:
    """*kernel*, `compiled`, for one caller with arrays of its own: by its entry point while the first argument, a tuple of
    arrays, is the same. The types of all others stay what they were; none is given by name.

    `direct` looks at arguments only so often in a process, and holds the last. This ends with the simulation that has it.
    """

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel
        self._first: Any = None
        self._entry_point: Callable[..., Any] | None = None

    def __call__(self, first: Any, *others: Any) -> Any:
        if first is self._first and self._entry_point is not None:
            return self._entry_point(first, *others)
        answer = self._kernel(first, *others)
        self._first, self._entry_point = first, only_entry_point(self._kernel)
        return answer


def only_entry_point(kernel: Callable[..., Any]) -> Callable[..., Any] | None:
    """The code of a *kernel* that was compiled for one set of types alone; None where there are several, or none."""
    overloads = getattr(kernel.dispatcher, "overloads", {}) if isinstance(kernel, Kernel) else {}
    return next(iter(overloads.values())).entry_point if len(overloads) == 1 else None
