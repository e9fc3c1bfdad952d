"""Numba type of a struct of arrays, how a kernel gets its pointer, and how it reads its fields.

Uses only Numba's public extension interface. The words of a table never change while a kernel runs, and each load is marked
so: LLVM keeps a loaded word where a store to some array might otherwise have changed it.
"""

import hashlib
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)
from numba.np.arrayobj import make_array, populate_array

from scheduling import struct_of_arrays
from scheduling.struct_of_arrays import TABLE

WORD = ir.IntType(64)
BYTES_OF_WORD = 8


class StructType(types.Type):
    """Objects of the class *name* whose fields have the types *members*."""

    def __init__(self, name: str, members: tuple[tuple[str, types.Type], ...]) -> None:
        self.members = dict(members)
        self.first = {}
        """Index of each field's first word in the table."""
        count = 0
        for field, member in members:
            self.first[field] = count
            count += words(member)
        digest = hashlib.sha256(repr([(field, str(member)) for field, member in members]).encode())
        super().__init__(f"{name}.{digest.hexdigest()[:8]}")  # short: part of each compiled function's name

    def __repr__(self) -> str:
        return str(self.name)


def words(member: types.Type) -> int:
    """Return the number of table words of a field of type *member*: address and shape, and strides unless implied."""
    if isinstance(member, types.Array):
        return 1 + int(member.ndim) * (1 if member.layout == "C" else 2)
    return 1


def type_of(struct: Any) -> StructType:
    """Return the type of *struct*. Raise TypeError for a field that is no array, number or struct of arrays."""
    members = []
    for field, value in zip(struct._fields, struct, strict=True):
        member = typeof_impl(value, None)
        if not isinstance(member, (types.Array, types.Integer, types.Float, types.Boolean, StructType)):
            raise TypeError(f"{type(struct).__name__}.{field} is {member}, which no struct of arrays can hold")
        members.append((field, types.int64 if isinstance(member, types.Integer) else member))
    return StructType(type(struct).__qualname__, tuple(members))


def register(cls: type) -> None:
    """Register the Numba type of *cls*."""
    typeof_impl.register(cls)(lambda struct, _context: struct._numba_type_)


for each in struct_of_arrays.CLASSES:
    register(each)


@register_model(StructType)
class StructModel(models.PrimitiveModel):
    """Data model: a pointer to the table."""

    def __init__(self, manager: Any, kind: StructType) -> None:
        super().__init__(manager, kind, WORD.as_pointer())


@infer_getattr
class StructAttribute(AttributeTemplate):
    """Types of the fields."""

    key = StructType

    def generic_resolve(self, kind: StructType, field: str) -> types.Type | None:  # type: ignore[override]
        return kind.members.get(field)


@lower_getattr_generic(StructType)
def read(context: Any, builder: Any, kind: StructType, pointer: Any, field: str) -> Any:
    """Load *field*."""
    member, first = kind.members[field], kind.first[field]

    def word(at: int) -> Any:
        loaded = builder.load(builder.gep(pointer, [WORD(first + at)], inbounds=True), align=BYTES_OF_WORD)
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    if isinstance(member, StructType):
        return builder.inttoptr(word(0), WORD.as_pointer())
    if isinstance(member, types.Float):
        return builder.bitcast(word(0), ir.DoubleType())
    if isinstance(member, types.Boolean):
        return builder.trunc(word(0), context.get_value_type(member))
    if not isinstance(member, types.Array):
        return word(0)
    array = make_array(member)(context, builder)
    itemsize = int(context.get_abi_sizeof(context.get_data_type(member.dtype)))
    shape = [word(1 + axis) for axis in range(member.ndim)]
    if member.layout == "C":
        strides = [WORD(itemsize)]
        for length in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], length, flags=["nsw"]))
    else:
        strides = [word(1 + member.ndim + axis) for axis in range(member.ndim)]
    data = builder.inttoptr(word(0), context.get_data_type(member.dtype).as_pointer())
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
    return array._getvalue()


@unbox(StructType)
def pointer_of(kind: StructType, struct: Any, c: Any) -> NativeValue:
    """Return the address that the object itself keeps."""
    number = c.pyapi.object_getattr_string(struct, TABLE)
    address = c.pyapi.long_as_voidptr(number)
    c.pyapi.decref(number)
    return NativeValue(c.builder.bitcast(address, WORD.as_pointer()), is_error=c.pyapi.c_api_error())
