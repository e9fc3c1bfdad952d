"""A `NamedTuple` of arrays that kernels take as one pointer: decorate its class with `@struct_of_arrays`.

Numba passes any other NamedTuple by its fields: every call has an argument for every field of every array, nine hundred for
a simulation. Type inference, lowering and LLVM process all of them at every call, which took most of the compile time. Here
each object keeps a table of the addresses and shapes of its arrays, from which kernels read what they use. `struct_type` is
the Numba side.

The table is built once per object, so an array may be written but not resized or moved.
"""

import functools
import sys
from typing import Any, Final, TypeVar

import numpy as np

Struct = TypeVar("Struct")

CLASSES: Final[list[type]] = []
"""Every decorated class, for `struct_type` to register once Numba is imported."""

TABLE: Final = "_address"
"""Attribute that compiled code reads from an object."""


def struct_of_arrays(cls: type[Struct]) -> type[Struct]:
    """Let kernels take objects of the NamedTuple *cls* as one pointer.

    Fields are arrays, numbers, and other decorated NamedTuples. Python may read and replace them; kernels only read them.
    """

    def address(self: Any) -> int:
        return int(self._table.ctypes.data)

    members: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__getstate__": lambda self: None,  # a copy, or another process, builds its own table
        "_table": _cached(table, "_table"),
        TABLE: _cached(address, TABLE),
        "_numba_type_": _cached(_numba_type, "_numba_type_"),
    }
    made = type(cls.__name__, (cls,), members)
    CLASSES.append(made)
    if known := sys.modules.get("scheduling.struct_type"):
        known.register(made)
    return made


def _cached(function: Any, name: str) -> Any:
    cached = functools.cached_property(function)
    cached.__set_name__(None, name)  # type: ignore[arg-type]
    return cached


def _numba_type(struct: Any) -> Any:
    from scheduling.struct_type import type_of  # imported here because it imports Numba

    return type_of(struct)


def table(struct: Any) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the table that `struct_type.StructType` reads: words of eight bytes, `words` of them per field."""
    written: list[int] = []
    for field in struct:
        if isinstance(field, np.ndarray):
            written += [field.ctypes.data, *field.shape]
            if not field.flags.c_contiguous:
                written += field.strides
        elif isinstance(field, tuple):
            written.append(getattr(field, TABLE))
        elif isinstance(field, float):
            written.append(int(np.float64(field).view(np.int64)))
        else:
            written.append(int(field))
    return np.array(written, np.int64)
