"""RowSparseNDArray: arrays of which only some rows are there; all others are zero."""

from __future__ import annotations

import operator
from typing import Any, Literal, overload

import numpy

from . import _core
from . import context as _context
from . import dtype as _dtype
from . import nd as _nd
from .context import Context
from .error import InvalidArgument, InvalidType

__all__ = ["RowSparseNDArray", "array", "retain", "row_sparse_array", "zeros"]

_UINT8 = _dtype._NAMES.index("uint8")


def _negative(array):
    return array * (255 if array._dtype == _UINT8 else -1)  # uint8 wraps


class RowSparseNDArray(_core.RowSparse):
    """Rows under their ids (int64, sorted and unique). Made by the functions of this module.

    Operations cost the rows that are there, never the rows of the shape; but comparisons are of all elements.
    """

    __slots__ = ("__weakref__",)
    __array_ufunc__ = None

    @property
    def dtype(self):
        """NumPy's class of the elements' type."""
        return _dtype._from_code(self._dtype)

    @property
    def context(self) -> Context:
        """The device."""
        return _context._from_code(self._device)

    ctx = device = context

    @property
    def stype(self) -> str:
        """The kind of storage: 'row_sparse'."""
        return "row_sparse"

    @property
    def indices(self) -> "_nd.NDArray":
        """The ids of the rows that are there, int64. Waits."""
        return self._to_rows()[0]

    @property
    def data(self) -> "_nd.NDArray":
        """The rows that are there, one after another. Waits."""
        return self._to_rows()[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        """Of the one element; InvalidArgument if there are others, as of a dense array."""
        return bool(self._to_dense())

    # Of the whole arrays, element by element, as dense ones.

    def __eq__(self, other):
        return self._compared(other, operator.eq)

    def __ne__(self, other):
        return self._compared(other, operator.ne)

    def __lt__(self, other):
        return self._compared(other, operator.lt)

    def __le__(self, other):
        return self._compared(other, operator.le)

    def __gt__(self, other):
        return self._compared(other, operator.gt)

    def __ge__(self, other):
        return self._compared(other, operator.ge)

    __hash__ = object.__hash__
    __iter__ = None  # there are no parts

    def _compared(self, other, comparison):
        if not isinstance(other, (_core.Array, _core.RowSparse, numpy.ndarray, *_nd._NUMBERS)):
            return NotImplemented
        return comparison(self._to_dense(), other._to_dense() if isinstance(other, _core.RowSparse) else other)

    def __array__(self, dtype=None, copy=None):
        if copy is False:
            raise ValueError("the values are copied: only some rows are in memory")
        values = self.asnumpy()
        return values if dtype is None else values.astype(dtype)

    def __repr__(self) -> str:
        return f"<RowSparseNDArray {'x'.join(map(str, self.shape))} @{self.context}>"

    def asnumpy(self) -> numpy.ndarray:
        """The whole array, as a dense one has it. Waits."""
        return self._to_dense().asnumpy()

    def tostype(self, stype: str):
        """A copy of another kind: 'default' or 'row_sparse'."""
        if stype == "default":
            return self._to_dense()
        if stype == "row_sparse":
            return self.copy()
        raise InvalidArgument(f"tostype: expected 'default' or 'row_sparse', got {stype!r}")

    todense = _core.RowSparse._to_dense

    def copy(self) -> "RowSparseNDArray":
        """A fresh array with the same rows on the same device."""
        return self._copy(self._device)

    def copyto(self, other):
        """Copies to an array of the same shape, dense or row-sparse, or to a fresh one on a device."""
        if isinstance(other, Context):
            return self._copy(other._code)
        if isinstance(other, _core.RowSparse):
            self._copy_to(other)
        elif isinstance(other, _core.Array):
            self._copy_to_dense(other)
        else:
            raise InvalidType(f"copyto: expected an array or a Context, got {type(other).__name__}")
        return other

    def as_in_context(self, context: Context) -> "RowSparseNDArray":
        """The array itself if it is on the device, else a copy there."""
        return self if context == self.context else self._copy(_context._code_of(context))

    def astype(self, dtype, copy: bool = True) -> "RowSparseNDArray":
        """A copy as another dtype; the array itself if it has the dtype and copy is false."""
        code = _dtype._code_of(dtype)
        return self if not copy and code == self._dtype else self._astype(code)

    def __radd__(self, other):
        if not isinstance(other, _core.Array):
            return NotImplemented
        made = _core.add_dense_row_sparse(other, self)
        return made if type(other) is _nd.NDArray else _core.view_as(type(other), made)

    def __add__(self, other):
        return self.__radd__(other) if isinstance(other, _core.Array) else super().__add__(other)

    def __sub__(self, other):
        return self + _negative(other) if isinstance(other, (_core.Array, _core.RowSparse)) else NotImplemented

    def __rsub__(self, other):
        return other + _negative(self) if isinstance(other, _core.Array) else NotImplemented

    def __isub__(self, other):
        if not isinstance(other, _core.RowSparse):
            raise InvalidType(f"-=: expected a RowSparseNDArray, got {type(other).__name__}")
        self += _negative(other)
        return self

    def __neg__(self):
        return _negative(self)

    def retain(self, indices) -> "RowSparseNDArray":
        """The same as the module's `retain`."""
        return retain(self, indices)

    def _require_all(self, key) -> None:
        if not (key is Ellipsis or isinstance(key, slice) and key.indices(len(self)) == (0, len(self), 1)):
            raise InvalidArgument(f"expected all of a RowSparseNDArray, [:], got [{key!r}]: it has no parts")

    def __getitem__(self, key) -> "RowSparseNDArray":
        """`array[:]`: the array itself."""
        self._require_all(key)
        return self

    def __setitem__(self, key, value) -> None:
        """`array[:] = value`, of an array of any kind or a number."""
        self._require_all(key)
        if value is self:  # what `array[:] += other` assigns
            return
        if isinstance(value, _nd._NUMBERS):
            value = (_nd.full(self.shape, value, self.context, self.dtype) if value != 0 else
                     _core.row_sparse_zeros(list(self.shape), self._dtype, self._device))
        elif not isinstance(value, (_core.Array, _core.RowSparse)):
            value = _nd.array(value, self.context, self.dtype)
        if value.context != self.context:
            value = value.as_in_context(self.context)
        value.copyto(self)

    def __reduce__(self):
        ids, rows = self._to_rows()
        return _restore, (rows, ids, self.shape, self.context.device_type, self.context.device_id)


def _restore(rows, ids, shape, device_type, device_id):
    if _core.in_forked_child():
        return _nd._unusable(RowSparseNDArray)
    return row_sparse_array((rows, ids), shape, Context(device_type, device_id), rows.dtype)


def _require_row_sparse(stype: str) -> None:
    if stype != "row_sparse":
        raise InvalidArgument(f"expected the storage type 'row_sparse', got {stype!r}")


@overload
def zeros(stype: Literal["row_sparse"], shape, ctx: "Context | None" = None, dtype=None) -> RowSparseNDArray: ...
@overload
def zeros(stype: str, shape, ctx: "Context | None" = None, dtype=None) -> Any: ...
def zeros(stype: str, shape, ctx: "Context | None" = None, dtype=None) -> Any:
    """An array without rows; with 'default', a dense one of zeros."""
    if stype == "default":
        return _nd.zeros(shape, ctx, dtype)
    _require_row_sparse(stype)
    return _core.row_sparse_zeros(_nd._dims(shape), _dtype._code_of(dtype), _context._code_of(ctx))


def _row_ids(ids) -> "_nd.NDArray":
    """Row ids given as numbers of any type but bool, as int64. InvalidArgument for one with a fraction."""
    values = ids.asnumpy() if isinstance(ids, _core.Array) else numpy.asarray(ids)
    if values.dtype.kind == "b":
        raise InvalidArgument("expected row ids of a numeric dtype, got bool")
    if values.dtype.kind == "f":
        values = values.astype("float64")
        bad = values[(values != numpy.trunc(values)) | ~(numpy.abs(values) < 2.0**63)]
        if bad.size:
            raise InvalidArgument(f"row id {bad[0]}: expected a whole number")
    return _nd.array(values, dtype="int64")


def _require_shape(given: tuple, shape) -> None:
    """Of a source that has one, the one that is asked for."""
    if shape is not None and tuple(given) != tuple(_nd._dims(shape)):
        raise InvalidArgument(f"row_sparse_array: expected a source of shape {tuple(_nd._dims(shape))}, got {tuple(given)}")


def row_sparse_array(arg1, shape=None, ctx: "Context | None" = None, dtype=None) -> RowSparseNDArray:
    """An array of (rows, row ids), of a dense source, or of a shape alone, without rows.

    The ids are whole numbers of any type but bool and need not be sorted; InvalidArgument for others, and for one that
    comes twice. Without `shape`, the last id says how many rows there could be.
    """
    if isinstance(arg1, RowSparseNDArray):
        _require_shape(arg1.shape, shape)
        made = arg1 if dtype is None else arg1.astype(dtype)
        return made._copy(made._device if ctx is None else _context._code_of(ctx))
    is_shape = isinstance(arg1, tuple) and all(isinstance(extent, (int, numpy.integer)) for extent in arg1)
    if is_shape:
        _require_shape(arg1, shape)
        return zeros("row_sparse", arg1, ctx, dtype)
    if not (isinstance(arg1, tuple) and len(arg1) == 2):
        dense = _nd.array(arg1, ctx, dtype)
        _require_shape(dense.shape, shape)
        return dense.tostype("row_sparse")
    rows, ids = arg1
    if dtype is None:
        dtype = rows.dtype if isinstance(rows, (_nd.NDArray, numpy.ndarray)) else None
    ids = _row_ids(ids)
    rows = _nd.array(rows._to_dense() if isinstance(rows, _core.RowSparse) else rows, dtype=dtype)
    if shape is None:
        last = int(ids.asnumpy().max()) + 1 if ids.size else 0
        shape = (last, *rows.shape[1:])
    shape = _nd._dims(shape)
    if tuple(rows.shape) != (ids.size, *shape[1:]):
        raise InvalidArgument(f"row_sparse_array: expected rows of shape {(ids.size, *shape[1:])} for {ids.size} row ids "
                              f"and shape {tuple(shape)}, got {tuple(rows.shape)}")
    return _core.row_sparse_from_rows(ids, rows, shape, rows._dtype, _context._code_of(ctx))


def array(source_array, ctx: "Context | None" = None, dtype=None) -> RowSparseNDArray:
    """A copy of a row-sparse array, or of SciPy's CSR matrix the rows that have elements."""
    if isinstance(source_array, _core.RowSparse):
        return row_sparse_array(source_array, None, ctx, dtype)
    if hasattr(source_array, "toarray"):
        return _nd.array(source_array.toarray(), ctx, dtype).tostype("row_sparse")
    raise InvalidType(f"sparse.array: expected a sparse array, got {type(source_array).__name__}")


def retain(data: RowSparseNDArray, indices) -> RowSparseNDArray:
    """The rows of `indices` only; those that are not there come as zeros.

    The indices are numbers of any type but bool, neither sorted nor unique. Out of range or with a fraction they are
    InvalidArgument: at once, those of an NDArray where the result is waited for.
    """
    if not isinstance(data, _core.RowSparse):
        raise InvalidType(f"retain: expected a RowSparseNDArray, got {type(data).__name__}")
    if not isinstance(indices, _core.Array):
        indices = _row_ids(indices)
        values = indices.asnumpy()
        bad = values[(values < 0) | (values >= data.shape[0])]
        if bad.size:
            raise InvalidArgument(f"row id {bad[0]}: expected one in [0, {data.shape[0]})")
    return _core.RowSparse.retain(data, indices)
