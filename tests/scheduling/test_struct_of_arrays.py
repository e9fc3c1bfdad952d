"""A struct of arrays is one pointer to a kernel, which reads what Python sees; all integer types share one kernel."""

import copy
import pickle
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numba.core import types

from scheduling.compiled import compiled, compiled_internal, record
from scheduling.struct_of_arrays import struct_of_arrays, table

PAIR = record([("first", np.int32), ("second", np.float64)])


@struct_of_arrays
class Inner(NamedTuple):
    rows: np.ndarray
    records: np.ndarray


@struct_of_arrays
class Outer(NamedTuple):
    """Of everything that a struct may hold."""

    flat: np.ndarray
    square: np.ndarray
    turned: np.ndarray
    inner: Inner
    scale: float
    count: int
    on: bool


def outer(rows: int = 2, columns: int = 3) -> Outer:
    square = np.arange(rows * columns, dtype=np.int64).reshape(rows, columns)
    inner = Inner(np.ones((columns, rows)), np.zeros(rows, PAIR))
    return Outer(np.arange(rows, dtype=np.int32), square, (square * 10).T, inner, 2.5, 7, True)


@compiled
def read(struct, at, other):
    return (
        struct.flat[at],
        struct.square[at, other],
        struct.turned[other, at],
        struct.turned.shape[0],
        struct.square.size,
        struct.inner.rows[other, at],
        struct.inner.records[at].second,
        struct.scale,
        struct.count + 1,
        struct.on,
    )


@compiled_internal
def add(inner, at, more):
    inner.records[at].first += more
    inner.records[at].second += more
    for row in range(inner.rows.shape[0]):
        inner.rows[row, at] += more


@compiled
def add_to_all(struct, more):
    for at in range(struct.flat.size):
        add(struct.inner, at, more)
        struct.flat[at] += more
    return struct.flat[0]


@pytest.mark.parametrize(("at", "other"), [(0, 0), (1, 2), (0, 1)])
def test_a_kernel_reads_what_python_reads(at, other):
    struct = outer()
    assert read(struct, at, other) == read.py_func(struct, at, other)


def test_what_a_kernel_writes_is_there():
    struct = outer()
    assert add_to_all(struct, 3) == 3
    assert struct.flat.tolist() == [3, 4]
    assert struct.inner.rows.tolist() == [[4.0, 4.0]] * 3
    assert struct.inner.records.tolist() == [(3, 3.0)] * 2
    assert struct.square.tolist() == outer().square.tolist()


@given(arrays.arrays(np.int64, st.tuples(st.integers(0, 5), st.integers(0, 5))), st.floats(allow_nan=False))
def test_arrays_of_any_shape_and_numbers_of_any_size(square, scale):
    struct = outer()._replace(square=square, turned=square.T, scale=scale)
    assert total(struct) == (square.sum(), square.T.size, scale)


@compiled
def total(struct):
    whole = 0
    for row in range(struct.square.shape[0]):
        for column in range(struct.square.shape[1]):
            whole += struct.turned[column, row]
    return whole, struct.turned.size, struct.scale


def test_a_copy_and_an_unpickled_object_have_separate_tables():
    struct = outer()
    read(struct, 0, 0)  # makes its table
    for twin in (
        copy.copy(struct),
        copy.deepcopy(struct),
        pickle.loads(pickle.dumps(struct)),
        struct._replace(count=7),
    ):
        assert type(twin) is Outer
        assert "_table" not in vars(twin)
        assert read(twin, 1, 2) == read(struct, 1, 2)


def test_the_table_is_made_once():
    struct = outer()
    assert struct._address == struct._address == struct._table.ctypes.data
    assert list(table(struct.inner)) == [struct.inner.rows.ctypes.data, 3, 2, struct.inner.records.ctypes.data, 2]


def test_arrays_in_another_order_are_of_another_type():
    struct = outer()
    turned = struct._replace(turned=np.ascontiguousarray(struct.turned))
    assert struct._numba_type_ != turned._numba_type_
    assert struct._numba_type_ == outer(5, 4)._numba_type_
    assert read(turned, 1, 2) == read(struct, 1, 2)


def test_what_a_struct_cannot_hold_is_named():
    with pytest.raises(TypeError, match=r"Outer\.scale is unicode_type, which no struct of arrays can hold"):
        read(outer()._replace(scale="2.5"), 0, 0)


@compiled_internal
def half(number, rounded):
    return (number + 1) // 2 if rounded else number // 2


@compiled
def halves(short, long, flags):
    return half(short[0], True) + half(long[0], flags[0]) + half(-1, False) + half(7, bool(flags[0]))


def test_integers_and_truth_values_of_every_kind_share_one_kernel():
    given_ = np.array([5], np.int16), np.array([8], np.int64), np.array([False])
    assert halves(*given_) == 3 + 4 - 1 + 3
    for kinds in [
        (types.int16, types.literal(True)), (types.literal(-1), types.boolean), (types.int64, types.literal(False)),
    ]:  # fmt: skip
        half.dispatcher.get_call_template(kinds, {})  # as a caller's compilation does
    assert [signature.args for signature in half.nopython_signatures] == [(types.int64, types.boolean)]


def test_what_python_cannot_call_says_so():
    with pytest.raises(TypeError, match="half is for compiled callers only"):
        half(1, True)
