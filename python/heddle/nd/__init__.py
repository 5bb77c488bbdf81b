"""NDArray: dense arrays whose operations are queued and run asynchronously.

Operations return at once; ``asnumpy()``, ``asscalar()``, printing and ``wait_to_read()`` wait for what
they need. An error of an operation comes back there. Operations of one thread take effect in the order
in which they were called.
"""

from __future__ import annotations

import operator
import os
from typing import Any, Iterable, Self, Sequence, Union, overload

import numpy

from .. import _core
from .. import base as _base  # sets the engine up
from .. import context as _context
from .. import dtype as _dtype
from ..context import Context, cpu, current_context
from ..error import Error, InvalidArgument, InvalidType, OutOfMemory

__all__ = ["NDArray", "abs", "add", "add_n", "arange", "array", "broadcast_to", "clip", "concat", "divide", "dot",
           "empty", "exp", "expand_dims", "flatten", "from_buffer", "from_dlpack", "from_numpy", "full", "load",
           "log", "maximum", "mean", "minimum", "modulo", "multiply", "norm", "ones", "ones_like", "power",
           "reshape", "save", "sign", "sparse", "sqrt", "square", "squeeze", "subtract", "sum",
           "to_dlpack_for_read", "to_dlpack_for_write", "transpose", "waitall", "zeros", "zeros_like"]


def _dims(shape: "int | Sequence[int]") -> list[int]:
    if isinstance(shape, (int, numpy.integer)):
        dims = [int(shape)]
    else:
        try:
            dims = [operator.index(extent) for extent in shape]
        except TypeError as error:
            raise InvalidType(f"expected a shape such as (2, 3), got {shape!r}") from error
    if any(extent >= 2**63 or extent < -2**63 for extent in dims):
        raise InvalidArgument(f"shape {tuple(dims)}: expected extents below 2^63")
    return dims


_Axes = Union[int, Sequence[int], None]
_NUMBERS: tuple = (int, float, numpy.integer, numpy.floating, numpy.bool_)


class NDArray(_core.Array):
    """A dense array: shape, dtype, context. Made by the functions of this module.

    Several objects may show the same values: slices of the first axis and reshapes are views.
    """

    __slots__ = ("__weakref__",)
    __array_ufunc__ = None  # numbers and arrays of NumPy leave operators to this class
    _compares_to_bool = False
    _has_scalars = False  # one element of an array has shape (1,), not ()

    # What it is.

    @property
    def dtype(self):
        """NumPy's class of the elements' type, such as numpy.float32; 'bfloat16' for that one."""
        return _dtype._from_code(self._dtype)

    @property
    def context(self) -> Context:
        """The device."""
        return _context._from_code(self._device)

    ctx = device = context

    @property
    def stype(self) -> str:
        """The kind of storage: 'default'."""
        return "default"

    @property
    def T(self) -> Self:
        """A copy with the axes in reverse order."""
        return self.transpose()

    @property
    def version(self) -> int:
        """How many writes of the array's memory have completed."""
        return self._var.version

    def __len__(self) -> int:
        if self.ndim == 0:
            raise InvalidType("len: expected an array with at least one axis, got shape ()")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'x'.join(map(str, self.shape))} @{self.context}>"

    def __str__(self) -> str:
        return f"\n{self.asnumpy()}\n{self!r}"

    def __bool__(self) -> bool:
        if self.size != 1:
            raise InvalidArgument(f"bool: expected an array of one element, got shape {self.shape}")
        return bool(self.asscalar())

    def __float__(self) -> float:
        return float(self.asscalar())

    def __int__(self) -> int:
        return int(self.asscalar())

    def __index__(self) -> int:
        value = self.asscalar()
        if not isinstance(value, numpy.integer):
            raise InvalidType(f"expected an integer, got an array of {self.dtype}")
        return int(value)

    def __iter__(self):
        if self.ndim == 0:
            raise InvalidType("iter: expected an array with at least one axis, got shape ()")
        return (self[i] for i in range(len(self)))

    __hash__ = object.__hash__

    def __array__(self, dtype=None, copy=None):
        if copy is False:
            raise ValueError("the values are copied: use numpy.from_dlpack(array) to share memory")
        values = self.asnumpy()
        return values if dtype is None else values.astype(dtype)

    def __reduce__(self):
        return _restore, (type(self), self.asnumpy(), _dtype._NAMES[self._dtype], self.context.device_type,
                          self.context.device_id)

    # Values in and out.

    def asscalar(self):
        """The only element, as a NumPy number. Waits."""
        if self.size != 1:
            raise InvalidArgument(f"asscalar: expected an array of one element, got shape {self.shape}")
        return self.asnumpy().reshape(())[()]

    item = asscalar

    def tolist(self) -> list:
        """The values as nested lists. Waits."""
        return self.asnumpy().tolist()

    def copy(self) -> Self:
        """A fresh array with the same values on the same device."""
        return self._copy(self._device)

    def copyto(self, other: "NDArray | Context"):
        """Copies to an array of the same shape, casting, or to a fresh one on a device. Returns it."""
        if isinstance(other, Context):
            return self._copy(other._code)
        if isinstance(other, _core.RowSparse):
            self._copy_to_sparse(other)
            return other
        if not isinstance(other, _core.Array):
            raise InvalidType(f"copyto: expected an NDArray or a Context, got {type(other).__name__}")
        self._copy_to(other)
        return other

    def as_in_context(self, context: Context) -> Self:
        """The array itself if it is on the device, else a copy there."""
        return self if context == self.context else self._copy(_context._code_of(context))

    as_in_ctx = to_device = as_in_context

    def astype(self, dtype, copy: bool = True) -> Self:
        """A copy as another dtype; the array itself if it has the dtype and copy is false."""
        code = _dtype._code_of(dtype)
        return self if not copy and code == self._dtype else self._astype(code)

    def tostype(self, stype: str):
        """A copy of another kind: 'default', or 'row_sparse' with the rows that are not all zeros."""
        if stype == "default":
            return self.copy()
        if stype == "row_sparse":
            return self._to_row_sparse()
        raise InvalidArgument(f"tostype: expected 'default' or 'row_sparse', got {stype!r}")

    # Shapes.

    def reshape(self, *shape, **named) -> Self:
        """A view with another shape; one extent may be -1, for what is left, and 0 keeps that of the axis in its place.

        Of an NDArray also -2: all axes that are left; -3: two axes as one; -4, a, b: one axis as two, of which one may
        be -1.
        """
        if named:
            if shape or set(named) != {"shape"}:
                raise InvalidType(f"reshape: expected one shape, got {', '.join([*map(repr, shape), *sorted(named)])}")
            shape = (named["shape"],)
        given = _dims(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        dims = given if self._has_scalars or min(given, default=0) >= -1 else _without_codes(self.shape, given)
        kept = self.shape if dims is given else ()  # by the codes these are there already
        for axis, extent in enumerate(dims):
            if extent == 0 and axis < len(kept) and self.size > 0:
                dims[axis] = kept[axis]
        if dims.count(-1) > 1 or any(extent < -1 for extent in dims):
            raise InvalidArgument(f"reshape: expected extents of at least 0 and one -1 at most, got {given}")
        if -1 in dims:
            known = _product(extent for extent in dims if extent != -1)
            if known == 0 or self.size % known:
                raise InvalidArgument(f"reshape: {self.size} elements do not fit shape {tuple(given)}")
            dims[dims.index(-1)] = self.size // known
        return self._reshape(dims)

    def flatten(self) -> Self:
        """A copy as a matrix: the first axis, and all the others as one; without axes 1 x 1."""
        shape = self.shape or (1,)
        return self._reshape([shape[0], _product(shape[1:])]).copy()

    def expand_dims(self, axis: int) -> Self:
        """A copy with an axis of extent 1 more, before `axis`."""
        dims = list(self.shape)
        dims.insert(_axis_of("expand_dims", axis, len(dims) + 1), 1)
        return self._reshape(dims).copy()

    def squeeze(self, axis: "_Axes" = None) -> Self:
        """A copy without the axes of extent 1, or without those named; of one element, shape (1,)."""
        if axis is None:
            gone = [one for one, extent in enumerate(self.shape) if extent == 1]
        else:
            gone = _axes_of("squeeze", axis, self.ndim)
            for one in gone:
                if self.shape[one] != 1:
                    raise InvalidArgument(f"squeeze: expected axes of extent 1, got axis {one} of shape {self.shape}")
        dims = [extent for one, extent in enumerate(self.shape) if one not in gone]
        return self._reshape(dims if dims or self._has_scalars or not self.ndim else [1]).copy()

    def transpose(self, *order, axes: "Sequence[int] | None" = None) -> Self:
        """A copy with the axes in another order, given as numbers or a sequence of them: by default reversed."""
        if order and axes is not None:
            raise InvalidType(f"transpose: expected the axes once, got {order!r} and {axes!r}")
        given = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
        given = axes if axes is not None else given
        if given is None or isinstance(given, (list, tuple)) and not given:
            given = range(self.ndim)[::-1]
        if not isinstance(given, (list, tuple, range)):
            raise InvalidType(f"transpose: expected the numbers of the axes, got {given!r}")
        return self._transpose([_axis_of("transpose", one, self.ndim) for one in given])

    def broadcast_to(self, shape) -> Self:
        """A copy in which axes of extent 1 repeat. 0 keeps the extent of an NDArray's axis."""
        dims = _dims(shape)
        if not self._has_scalars and len(dims) == self.ndim:
            dims = [extent or own for extent, own in zip(dims, self.shape)]
        return self._broadcast_to(dims)

    def slice(self, begin, end, step=None) -> Self:
        """A copy of elements [begin, end) of the first axis; of tuples, an extent each, the part that lies between them.
        None stands for the beginning, or end, of an axis; negative numbers count from its end."""
        axes = [list(one) if isinstance(one, (tuple, list)) else [one] for one in (begin, end)]
        steps = list(step) if isinstance(step, (tuple, list)) else [step] * len(axes[0])
        if not len(axes[0]) == len(axes[1]) == len(steps) <= self.ndim:
            raise InvalidArgument(f"slice: expected as many begins as ends, and {self.ndim} at most, got {begin!r} and "
                                  f"{end!r}")
        for axis, ends in enumerate(zip(*axes)):
            for one in ends:
                if one is not None and not isinstance(one, (int, numpy.integer)):
                    raise InvalidType(f"slice: expected numbers, got {begin!r} and {end!r}")
                if one is not None and not -self.shape[axis] <= one <= self.shape[axis]:
                    raise InvalidArgument(f"slice: expected at most {self.shape[axis]} for axis {axis} of shape "
                                          f"{self.shape}, got {one}")
        return self[tuple(slice(*parts) for parts in zip(*axes, steps))].copy()

    # Reductions and functions beyond those of the base.

    def sum(self, axis: "_Axes" = None, keepdims: bool = False, exclude: bool = False,
            out: "NDArray | None" = None) -> Any:
        """The sum of all elements, shape (1,), or along an axis or several; with `exclude` along all others. With
        `keepdims` these axes stay, with extent 1. In float64, rounded once."""
        return _into(out, self._reduced("sum", _core.Array._sum, axis, keepdims, exclude))

    def mean(self, axis: "_Axes" = None, keepdims: bool = False, exclude: bool = False) -> Self:
        """The mean of all elements, or along axes; its arguments are those of `sum`."""
        return self._reduced("mean", _core.Array._mean, axis, keepdims, exclude)

    def norm(self, ord: int = 2, axis: "_Axes" = None, keepdims: bool = False) -> Self:  # noqa: A002
        """The square root of the sum of the squares, or with `ord` 1 the sum of the magnitudes, of all elements,
        shape (1,), or along axes as for `sum`. In float64, rounded once."""
        if ord not in (1, 2):
            raise InvalidArgument(f"norm: expected ord 1 or 2, got {ord!r}")
        if ord == 1:
            return self.abs()._reduced("norm", _core.Array._sum, axis, keepdims)
        return self._reduced("norm", _norm, axis, keepdims)

    def _reduced(self, call: str, reduce, axis: "_Axes", keepdims: bool, exclude: bool = False) -> Self:
        """reduce(array, axis), which knows one axis, or None for all, along any number of them."""
        kind = _dtype._NUMPY[self._dtype].kind
        if self._has_scalars and call == "sum" and kind == "b":  # as NumPy does, in place of one bool
            return self.astype("int64")._reduced(call, reduce, axis, keepdims, exclude)
        if self._has_scalars and call == "mean" and kind != "f":
            return self.astype("float64")._reduced(call, reduce, axis, keepdims, exclude).astype("float32")
        axes = _axes_of(call, axis, self.ndim)
        if axis is None or not (axes or self._has_scalars):  # () is all, as MXNet has it, or none, as NumPy does
            axes = list(range(self.ndim))
        elif exclude:
            axes = [one for one in range(self.ndim) if one not in axes]
        kept = [one for one in range(self.ndim) if one not in axes]
        if len(kept) == 0:
            result = reduce(self, None)
        elif len(axes) == 1:
            result = reduce(self, axes[0])
        else:
            # All that is kept before all that goes; where it lies so already, by a view.
            extents = [self.shape[one] for one in kept]
            moved = self if kept + axes == list(range(self.ndim)) else self._transpose(kept + axes)
            length = _product(self.shape[one] for one in axes)
            result = reduce(moved._reshape([_product(extents), length]), 1)._reshape(extents)
        if keepdims:
            return result._reshape([1 if one in axes else extent for one, extent in enumerate(self.shape)])
        return result if kept or not self._has_scalars else result._reshape([])

    def dot(self, other: "NDArray", transpose_a: bool = False, transpose_b: bool = False) -> Self:
        """The product along the last axis of this array, or with `transpose_a` its first one, and the first axis of
        the other, or with `transpose_b` its last one: of matrices their product. Two vectors give shape (1,)."""
        if not isinstance(other, _core.Array):
            raise InvalidType(f"dot: expected an NDArray, got {type(other).__name__}")
        if not self.ndim or not other.ndim:
            raise InvalidArgument(f"dot: expected arrays with axes, got shapes {self.shape} and {other.shape}")
        left = 0 if transpose_a else self.ndim - 1
        right = other.ndim - 1 if transpose_b else 0
        if self._has_scalars and not transpose_b and other.ndim > 1:
            right = other.ndim - 2  # as NumPy has it
        extent = self.shape[left]
        if extent != other.shape[right]:
            raise InvalidArgument(f"dot: expected as many elements along axis {left} of shape {self.shape} as along axis "
                                  f"{right} of shape {other.shape}")
        rows = [one for one in range(self.ndim) if one != left]
        columns = [one for one in range(other.ndim) if one != right]
        dims = [self.shape[one] for one in rows] + [other.shape[one] for one in columns]
        a = self if left == self.ndim - 1 else self._transpose([*rows, left])
        b = other if right == 0 else other._transpose([right, *columns])
        product = a._reshape([_product(dims[:len(rows)]), extent])._dot(b._reshape([extent, _product(dims[len(rows):])]))
        return product._reshape(dims if dims or self._has_scalars else [1])

    def clip(self, a_min, a_max) -> Self:
        """Each element, limited to [a_min, a_max]; of a heddle.np array one of them may be None, which is no limit."""
        if self._has_scalars and (a_min is None) != (a_max is None):
            return _of_pair("maximum", self, a_min, "clip") if a_max is None else _of_pair("minimum", self, a_max, "clip")
        return _of_pair("minimum", _of_pair("maximum", self, a_min, "clip"), a_max, "clip")

    __div__ = _core.Array.__truediv__

    def __ipow__(self, other: object, /) -> Self:  # in place: `stored **= 2` in an updater changes what is stored
        (self ** other).copyto(self)
        return self

    def __imod__(self, other: object, /) -> Self:
        (self % other).copyto(self)
        return self

    # Elements and parts.

    def __getitem__(self, key) -> Self:
        """A view for integers and a slice of neighbours that lie in one piece, else a copy. An index of
        arrays, lists or booleans waits for the values."""
        ranges = _ranges(self.shape, key)
        if ranges is None:
            made: Any = array(self.asnumpy()[_numpy_key(key)], ctx=self.context, dtype=self.dtype, _type=type(self))
            return made._reshape([1]) if self.ndim and not made.ndim and not self._has_scalars else made
        view = _view(self, ranges)
        if view is not None:
            return view._reshape([1]) if self.ndim and not view.ndim and not self._has_scalars else view
        return self._copy_part([number for one in ranges for number in one])

    def __setitem__(self, key, value) -> None:
        ranges = _ranges(self.shape, key)
        if ranges is None:
            if isinstance(value, _NUMBERS):
                full((), value, self.context, self.dtype)  # raises if it does not fit; NumPy would cut it
            values = self.asnumpy()
            if isinstance(value, _core.Array):
                value = value._astype(self._dtype).asnumpy()
            elif not isinstance(value, _NUMBERS):
                value = array(value, dtype=self.dtype).asnumpy()
            try:
                values[_numpy_key(key)] = value
            except ValueError as error:
                raise InvalidArgument(f"expected values of the shape of the part, or that repeat to it: {error}") from error
            array(values, ctx=self.context, dtype=self.dtype).copyto(self)
            return
        dims = [count for _, _, count, keep in ranges if keep]
        part = _view(self, ranges)
        if isinstance(value, _NUMBERS):
            if part is not None:
                part._fill(value)
                return
            value = full((), value, self.context, self.dtype)
        if isinstance(value, _core.RowSparse):
            value = value._to_dense()
        elif not isinstance(value, _core.Array):
            value = array(value, ctx=self.context, dtype=self.dtype)
        if value.context != self.context:
            value = value.as_in_context(self.context)
        if value._dtype != self._dtype:
            value = value.astype(self.dtype)
        if list(value.shape) != dims:
            extra = value.ndim - len(dims)
            if extra > 0 and all(extent == 1 for extent in value.shape[:extra]):
                value = value._reshape(list(value.shape[extra:]))
            value = value._broadcast_to(dims)
        if part is not None:
            value._copy_to(part)
        else:
            self._assign_part([number for one in ranges for number in one], value)


def _axis_of(call: str, axis, ndim: int) -> int:
    """The number of an axis from 0; negative ones count from the end."""
    if not isinstance(axis, (int, numpy.integer)):
        raise InvalidType(f"{call}: expected the number of an axis, got {axis!r}")
    if not -ndim <= axis < ndim:
        raise InvalidArgument(f"{call}: expected an axis of at least {-ndim} and below {ndim}, got {axis}")
    return int(axis) + ndim if axis < 0 else int(axis)


def _axes_of(call: str, axis: "_Axes", ndim: int) -> "list[int]":
    """The same of one axis, of several, each once, or of none: sorted."""
    if axis is None:
        return []
    if not isinstance(axis, (list, tuple)):
        return [_axis_of(call, axis, ndim)]
    axes = sorted(_axis_of(call, one, ndim) for one in axis)
    if len(set(axes)) < len(axes):
        raise InvalidArgument(f"{call}: expected each axis once, got {axis!r}")
    return axes


def _without_codes(shape: "tuple[int, ...]", given: "list[int]") -> "list[int]":
    """The extents that a shape with codes of MXNet's asks for. Each of the numbers takes an axis of `shape`, in order, -3
    two, and -2 all that are left; -1 may stay."""
    left = list(shape)
    codes = iter(given)
    dims: list[int] = []

    def take(code: int) -> int:
        if not left:
            raise InvalidArgument(f"reshape: expected an axis for each number, and two for -3, got {given} for shape "
                                  f"{shape}")
        return left.pop(0)

    for code in codes:
        if code == -2:
            dims += left
            left.clear()
        elif code == -3:
            dims.append(take(code) * take(code))
        elif code == -4:
            extent, parts = take(code), [next(codes, -5), next(codes, -5)]
            if parts[0] == -1 and parts[1] > 0:
                parts[0] = extent // parts[1]
            elif parts[1] == -1 and parts[0] > 0:
                parts[1] = extent // parts[0]
            if min(parts) < 0 or parts[0] * parts[1] != extent:
                raise InvalidArgument(f"reshape: expected -4 to be followed by two extents whose product is {extent}, or by "
                                      f"one and -1, got {given}")
            dims += parts
        elif code < -4:
            raise InvalidArgument(f"reshape: expected extents, or codes from -4 to 0, got {given}")
        else:
            own = left.pop(0) if left else 0
            dims.append(own if code == 0 else code)
    return dims


def _product(extents: "Iterable[int]") -> int:
    result = 1
    for extent in extents:
        result *= extent
    return result


def _norm(array: NDArray, axis: "int | None") -> NDArray:
    if axis is None:
        return array._norm()
    if _dtype._NUMPY[array._dtype].kind != "f":
        raise InvalidArgument(f"norm: expected a floating dtype, got {_dtype._NAMES[array._dtype]}")
    return array.astype("float64").square()._sum(axis).sqrt()._astype(array._dtype)


def _restore(kind, values, dtype, device_type, device_id):
    if _core.in_forked_child():
        return _unusable(kind)
    return array(values, ctx=Context(device_type, device_id), dtype=dtype, _type=kind)


def _unusable(kind: Any):
    """An array of a forked child, whose every use is refused. A pool would lose the task, and wait for its result for ever,
    if it were not even unpickled."""
    return kind.__new__(kind)


def _numpy_key(key):
    if isinstance(key, tuple):
        return tuple(_numpy_key(one) for one in key)
    if isinstance(key, _core.Array):
        values = key.asnumpy()
        return values if values.dtype.kind in "bi" else values.astype("int64")
    return key


def _ranges(shape: tuple, key) -> "list[tuple[int, int, int, int]] | None":
    """(begin, step, count, keep) for each axis; None for an index that is not made of integers and slices."""
    keys = list(key) if isinstance(key, tuple) else [key]
    for one in keys:
        if not (one is Ellipsis or isinstance(one, (slice, int, numpy.integer)) and not isinstance(one, bool)):
            return None
    if Ellipsis in keys:
        if keys.count(Ellipsis) > 1:
            raise IndexError(f"expected one ellipsis (...) at most, got {keys.count(Ellipsis)}")
        at = keys.index(Ellipsis)
        keys[at:at + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
    if len(keys) > len(shape):
        raise IndexError(f"expected at most {len(shape)} indices for shape {shape}, got {len(keys)}")
    keys += [slice(None)] * (len(shape) - len(keys))
    ranges = []
    for axis, (one, extent) in enumerate(zip(keys, shape)):
        if isinstance(one, slice):
            begin, end, step = one.indices(extent)
            count = len(range(begin, end, step))
            if not count:  # it may begin before the axis, at -1
                begin, step = 0, 1
            ranges.append((begin, step, count, 1))
        else:
            index = int(one) + extent if one < 0 else int(one)
            if not 0 <= index < extent:
                raise IndexError(f"index {one} is out of range for axis {axis} of shape {shape}")
            ranges.append((index, 1, 1, 0))
    return ranges


def _view(of: NDArray, ranges: list) -> Any:
    """The part as a view, if it lies in one piece: integers, then one slice, then whole axes."""
    axis = 0
    view = of
    while axis < len(ranges) and not ranges[axis][3]:
        begin = ranges[axis][0]
        view = view._slice(begin, begin + 1)
        view = view._reshape(list(view.shape[1:]))
        axis += 1
    if axis == len(ranges):
        return view
    begin, step, count, _ = ranges[axis]
    if step != 1 and count > 1:
        return None
    for later in range(axis + 1, len(ranges)):
        if ranges[later] != (0, 1, of.shape[later], 1):
            return None
    if (begin, count) != (0, of.shape[axis]):
        view = view._slice(begin, begin + count)
    return view if view is not of else of._reshape(list(of.shape))


# Making arrays.

@overload
def array(source_array: "sparse.RowSparseNDArray", ctx: "Context | None" = None,
          dtype=None) -> "sparse.RowSparseNDArray": ...
@overload
def array(source_array, ctx: "Context | None" = None, dtype=None, _type: type = NDArray) -> NDArray: ...
def array(source_array, ctx: "Context | None" = None, dtype=None, _type: type = NDArray) -> Any:
    """An array with a copy of values: of an NDArray, a NumPy array, (nested) lists or a number. That of a row-sparse array is
    row-sparse.

    The dtype is float32 unless `dtype` or an array's own says otherwise.
    """
    source = source_array
    if isinstance(source, _core.RowSparse):
        return sparse.array(source, ctx, dtype)
    if isinstance(source, NDArray):
        code = source._dtype if dtype is None else _dtype._code_of(dtype)
        copied = source._astype(code) if code != source._dtype else source
        return copied._copy(source._device if ctx is None else _context._code_of(ctx))
    code = _dtype._code_of(dtype)
    if isinstance(source, (list, tuple)) and source and isinstance(source[0], _core.Array):
        source = [one.asnumpy() if isinstance(one, _core.Array) else one for one in source]
    try:
        values = numpy.asarray(source)
    except ValueError as error:  # lists of several lengths
        raise InvalidType(f"array: expected rows of one length, got {type(source).__name__}: {error}") from error
    if values.dtype not in _dtype._CODES:
        wide = "float64" if values.dtype.kind in "fc" else "int64"
        if values.dtype == numpy.uint64 and values.size and values.max() >= 2**63:
            if _dtype._NAMES[code].startswith("int") or code == _dtype._NAMES.index("uint8"):
                raise InvalidArgument(f"array: expected numbers below 2**63, got {values.max()}")
            wide = "float64"
        try:
            values = values.astype(wide, casting="same_kind")
        except TypeError:
            raise _not_numbers(values) from None
    flat = values if values.flags.c_contiguous and values.flags.aligned else numpy.array(values, order="C")
    return _core.copy_buffer(_type, flat, list(values.shape), _dtype._code_of(values.dtype), code,
                             _context._code_of(ctx))


def _not_numbers(values: numpy.ndarray) -> InvalidArgument:
    """Why no dtype has the values."""
    items = values.ravel().tolist()
    beyond = [one for one in items if isinstance(one, int) and not -2**63 <= one < 2**64]
    if not beyond or not all(isinstance(one, (int, float)) for one in items):
        return InvalidType(f"array: expected numbers, got {values.dtype}")
    bits = beyond[0].bit_length()
    number = beyond[0] if bits <= 128 else f"an integer of {bits} bits"
    return InvalidArgument(f"array: expected integers from -2**63 to 2**64 - 1, got {number}")


def zeros(shape, ctx: "Context | None" = None, dtype=None, stype: "str | None" = None) -> NDArray:
    """An array of zeros."""
    if stype not in (None, "default"):
        return sparse.zeros(stype, shape, ctx, dtype)
    return full(shape, 0, ctx, dtype)


def ones(shape, ctx: "Context | None" = None, dtype=None) -> NDArray:
    """An array of ones."""
    return full(shape, 1, ctx, dtype)


def full(shape, val, ctx: "Context | None" = None, dtype=None, out: "NDArray | None" = None,
         _type: type = NDArray) -> NDArray:
    """An array of which each element is `val`."""
    return _into(out, _core.full(_type, _dims(shape), val, _dtype._code_of(dtype), _context._code_of(ctx)))


def empty(shape, ctx: "Context | None" = None, dtype=None) -> NDArray:
    """An array whose values are undefined until it is written."""
    return _core.empty(NDArray, _dims(shape), _dtype._code_of(dtype), _context._code_of(ctx))


def arange(start, stop=None, step=1.0, repeat: int = 1, infer_range: "bool | None" = None,
           ctx: "Context | None" = None, dtype=None) -> NDArray:
    """Numbers from `start`, or 0, up to but without `stop`, each `repeat` times. `infer_range` has no effect, as with
    MXNet."""
    if not isinstance(infer_range, (bool, type(None))):  # the context, as it used to come here
        raise InvalidType(f"arange: infer_range: expected None, False or True, got {type(infer_range).__name__}")
    if stop is None:
        start, stop = 0, start
    if step == 0:
        raise InvalidArgument("arange: expected a step other than 0, got 0")
    return array(_evenly_spaced(start, stop, step, repeat), ctx, dtype)


def _evenly_spaced(start, stop, step, repeat: int = 1) -> numpy.ndarray:
    """NumPy's arange, exact for whole numbers that int64 holds."""
    call = f"arange: {start!r}, {stop!r}, {step!r}, repeat {repeat!r}"
    try:
        if all(-2 ** 63 <= number < 2 ** 63 and number == int(number) for number in (start, stop, step)):
            values = numpy.arange(int(start), int(stop), int(step), dtype="int64")
        else:
            values = numpy.arange(start, stop, step, dtype="float64")
        return numpy.repeat(values, repeat)
    except TypeError as error:
        raise InvalidType(f"{call}: expected numbers: {error}") from error
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"{call}: {error}") from error
    except MemoryError as error:
        raise OutOfMemory(f"{call}: {error}") from error


@overload
def zeros_like(data: "sparse.RowSparseNDArray", out: None = None) -> "sparse.RowSparseNDArray": ...
@overload
def zeros_like(data, out: "NDArray | None" = None) -> NDArray: ...
def zeros_like(data, out: "NDArray | None" = None) -> Any:
    """Zeros in the shape, dtype and context of another array, without rows if that is row-sparse."""
    _require_array("zeros_like", data)
    return _into(out, zeros(data.shape, data.context, data.dtype, data.stype))


def ones_like(data: NDArray, out: "NDArray | None" = None) -> NDArray:
    """Ones in the shape, dtype and context of another array."""
    _require_array("ones_like", data)
    return _into(out, full(data.shape, 1, data.context, data.dtype))


_CUDA = 2  # DLPack's number of the device type
_DEFAULT_STREAM = 1  # of CUDA, as DLPack numbers it: what is pending is put before what comes on it


def from_dlpack(other, ctx: "Context | None" = None) -> NDArray:
    """An array over the memory of another library's, without a copy: NumPy, PyTorch, JAX, CuPy.

    Memory of a GPU becomes an array on that gpu(i); what the library has pending on the GPU is waited for. One over read-only memory, as that of JAX's arrays, may not be written: what would write it raises ValueError.
    Only heddle's own calls on it are ordered: call ``wait_to_read()`` before the other library reads what
    heddle has written, ``wait_to_write()`` before it writes.
    """
    if hasattr(other, "__dlpack__"):
        on_gpu = hasattr(other, "__dlpack_device__") and int(other.__dlpack_device__()[0]) == _CUDA
        stream = {"stream": _DEFAULT_STREAM} if on_gpu else {}
        try:
            capsule = other.__dlpack__(max_version=(1, 0), **stream)
        except TypeError:  # from before DLPack had versions
            capsule = other.__dlpack__(**stream)
    else:
        capsule = other
    return _core.from_dlpack(NDArray, capsule, _context._code_of(ctx), ctx is not None)


def from_buffer(other, dtype=None, ctx: "Context | None" = None) -> NDArray:
    """An array over the memory of an object with a writable buffer, without a copy; see from_dlpack."""
    view = memoryview(other)
    given = numpy.asarray(view).dtype if dtype is None else dtype
    code = _dtype._code_of(given)
    if isinstance(given, (numpy.dtype, str)) and code != _dtype._BFLOAT16 and not numpy.dtype(given).isnative:
        raise InvalidType(f"from_buffer: expected elements in the byte order of this machine, got {given!r}: "
                          "nd.array(x) copies them")
    if view.readonly or not view.c_contiguous:
        raise InvalidArgument("from_buffer: expected a buffer that can be written, of elements in one piece in C order, "
                              f"got one {'to be read only' if view.readonly else 'in pieces'}: nd.array(x) copies it")
    size = _dtype._NUMPY[code].itemsize if code != _dtype._BFLOAT16 else 2
    shape = list(view.shape or ()) if dtype is None else [view.nbytes // size]
    return _core.from_buffer(NDArray, other, shape, code, _context._code_of(ctx))


def from_numpy(ndarray: numpy.ndarray, zero_copy: bool = True) -> NDArray:
    """An array over the memory of a NumPy array, or with zero_copy false a copy of it."""
    return from_buffer(ndarray) if zero_copy else array(ndarray, dtype=ndarray.dtype)


def to_dlpack_for_read(data: NDArray):
    """The array's memory as a DLPack capsule, to be read: of read-only memory one of DLPack 1.0, which says so."""
    try:
        return _required("to_dlpack_for_read", data).__dlpack__()
    except BufferError:  # before 1.0 a capsule could not say so
        return data.__dlpack__(max_version=(1, 0))


def to_dlpack_for_write(data: NDArray):
    """The array's memory as a DLPack capsule, to be read and written."""
    return _required("to_dlpack_for_write", data).__dlpack__()


def waitall(timeout: "float | None" = None) -> None:
    """Waits for everything pushed so far. Raises the earliest error that no waitall has raised yet."""
    _core.waitall(timeout)


# Functions. With `out` the result goes there, cast to its dtype, and `out` is returned.

def _required(call: str, data) -> NDArray:
    if not isinstance(data, NDArray):
        raise InvalidType(f"{call}: expected an NDArray, got {type(data).__name__}")
    return data


def _require_array(call: str, data) -> None:
    if not isinstance(data, (_core.Array, _core.RowSparse)):
        raise InvalidType(f"{call}: expected an array, got {type(data).__name__}")


def _into(out: "NDArray | None", result: Any) -> NDArray:
    """The result, or `out` once it has its values."""
    return result if out is None else result.copyto(out)


def _method(name: str, text: str, copies: bool = False):
    def function(data: NDArray, *args, out: "NDArray | None" = None, **kwargs) -> NDArray:
        result = getattr(_required(name, data), name)(*args, **kwargs)
        return _into(out, result.copy() if copies and out is None else result)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return function


abs = _method("abs", "The magnitude of each element.")  # noqa: A001
sign = _method("sign", "1, 0 or -1 for each element.")
square = _method("square", "The square of each element.")
sqrt = _method("sqrt", "The square root of each element.")
exp = _method("exp", "e to the power of each element.")
log = _method("log", "The natural logarithm of each element.")
norm = _method("norm", "The square root of the sum of the squares of all elements, or along axes.")
sum = _method("sum", "The sum of all elements, or along axes.")  # noqa: A001
mean = _method("mean", "The mean of all elements, or along axes.")
clip = _method("clip", "Each element, limited to [a_min, a_max].")
transpose = _method("transpose", "A copy with the axes in another order.")
reshape = _method("reshape", "A copy with another shape; the method of arrays gives a view.", copies=True)
flatten = _method("flatten", "A copy as a matrix.")
expand_dims = _method("expand_dims", "A copy with an axis of extent 1 more.")
squeeze = _method("squeeze", "A copy without axes of extent 1.")
broadcast_to = _method("broadcast_to", "A copy in which axes of extent 1 repeat.")


def dot(lhs: NDArray, rhs: NDArray, *args, out: "NDArray | None" = None, **kwargs) -> NDArray:
    """The product of matrices, vectors, or along one axis of each of two arrays."""
    return _into(out, _required("dot", lhs).dot(rhs, *args, **kwargs))


def _of_operands(call: str, operation, lhs, rhs, out: "NDArray | None") -> NDArray:
    """Of two numbers, without `out`, a number, as MXNet has it."""
    try:
        result = operation(lhs, rhs)
    except TypeError as error:
        if isinstance(error, Error):
            raise
        result = None
    if isinstance(result, (_core.Array, _core.RowSparse)):
        made: Any = result
        return _into(out, made)
    if out is None and isinstance(lhs, _NUMBERS) and isinstance(rhs, _NUMBERS):
        return result
    raise InvalidType(f"{call}: expected arrays, or an array and a number, got {type(lhs).__name__} and {type(rhs).__name__}")


def add(lhs, rhs, out: "NDArray | None" = None) -> NDArray:
    """lhs + rhs."""
    return _of_operands("add", operator.add, lhs, rhs, out)


def subtract(lhs, rhs, out: "NDArray | None" = None) -> NDArray:
    """lhs - rhs."""
    return _of_operands("subtract", operator.sub, lhs, rhs, out)


def multiply(lhs, rhs, out: "NDArray | None" = None) -> NDArray:
    """lhs * rhs."""
    return _of_operands("multiply", operator.mul, lhs, rhs, out)


def divide(lhs, rhs, out: "NDArray | None" = None) -> NDArray:
    """lhs / rhs."""
    return _of_operands("divide", operator.truediv, lhs, rhs, out)


def modulo(lhs, rhs, out: "NDArray | None" = None) -> NDArray:
    """lhs % rhs, which has the sign of rhs; 0 where rhs is 0."""
    return _of_operands("modulo", operator.mod, lhs, rhs, out)


def power(base, exp, out: "NDArray | None" = None) -> NDArray:
    """base to the power of exp."""
    return _of_operands("power", operator.pow, base, exp, out)


def maximum(lhs, rhs, out: "NDArray | None" = None) -> NDArray:
    """The greater of each two elements; NaN if one of them is."""
    if out is None and isinstance(lhs, _NUMBERS) and isinstance(rhs, _NUMBERS):
        return numpy.maximum(lhs, rhs).item()
    return _into(out, _of_pair("maximum", lhs, rhs))


def minimum(lhs, rhs, out: "NDArray | None" = None) -> NDArray:
    """The less of each two elements; NaN if one of them is."""
    if out is None and isinstance(lhs, _NUMBERS) and isinstance(rhs, _NUMBERS):
        return numpy.minimum(lhs, rhs).item()
    return _into(out, _of_pair("minimum", lhs, rhs))


def _of_pair(operation: str, a, b, call: "str | None" = None) -> Any:
    """operation(a, b), of which one is an array; for the errors of `call`, by default the same."""
    call = call or operation
    array, other = (a, b) if isinstance(a, NDArray) else (b, a)
    result = getattr(_required(call, array), f"_{operation}")(other)
    if result is NotImplemented:
        raise InvalidType(f"{call}: expected a number or an NDArray, got {type(other).__name__}")
    return result


def add_n(*args: NDArray, out: "NDArray | None" = None) -> NDArray:
    """The sum of arrays."""
    if not args:
        raise InvalidArgument("add_n: expected one array at least, got none")
    code = _required("add_n", args[0])._dtype
    name = _dtype._NAMES[code]
    if name not in ("float16", "bfloat16"):
        total = args[0].copy()
        for one in args[1:]:
            total += _required("add_n", one)
        return _into(out, total)
    total = args[0].astype("float32")  # rounded once, as pushed lists are
    for one in args[1:]:
        if _required("add_n", one)._dtype != code:
            raise InvalidArgument(f"add_n: expected arrays of {name}, got one of {_dtype._NAMES[one._dtype]}")
        total += one.astype("float32")
    return _into(out, total.astype(name))


def concat(*arrays: NDArray, dim: int = 1, out: "NDArray | None" = None) -> NDArray:
    """The arrays, one after the other along an axis."""
    if not arrays:
        raise InvalidArgument("concat: expected one array at least, got none")
    axis = _axis_of("concat", dim, _required("concat", arrays[0]).ndim)
    dims = list(arrays[0].shape)
    dtype, device = arrays[0]._dtype, arrays[0].context
    for one in arrays:
        if _required("concat", one)._dtype != dtype:
            raise InvalidArgument(f"concat: expected dtype {_dtype._NAMES[dtype]}, got {_dtype._NAMES[one._dtype]}")
        if one.context != device:
            raise InvalidArgument(f"concat: expected device {device}, got {one.context}")
        if list(one.shape[:axis] + one.shape[axis + 1:]) != dims[:axis] + dims[axis + 1:]:
            raise InvalidArgument(f"concat: expected shapes that differ along axis {axis} at most, got "
                                  f"{arrays[0].shape} and {one.shape}")
    extents = [one.shape[axis] for one in arrays]
    dims[axis] = 0
    for extent in extents:
        dims[axis] += extent
    joined = empty(dims, device, arrays[0].dtype)
    begin = 0
    for one, extent in zip(arrays, extents):
        joined[(slice(None),) * axis + (slice(begin, begin + extent),)] = one
        begin += extent
    return _into(out, joined)


# Files.

def save(fname: "str | bytes | os.PathLike", data) -> None:
    """Saves an array, a list of arrays, or a dict of arrays by name, in the safetensors format.

    The file is complete or absent: it is written under another name first.
    """
    if isinstance(data, (_core.Array, _core.RowSparse)):
        data = [data]
    if isinstance(data, dict):
        named = [(str(name), one) for name, one in data.items()]
    elif isinstance(data, (list, tuple)):
        named = [(str(i), one) for i, one in enumerate(data)]
    else:
        raise InvalidType(f"save: expected an array, a list or a dict of arrays, got {type(data).__name__}")
    for key, _ in named:
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"save: expected names that UTF-8 has, got {key!r}: {error.reason}") from error
    _core.save(_base._file_name("save", fname), named, {"heddle.kind": "dict" if isinstance(data, dict) else "list"})


def load(fname: "str | bytes | os.PathLike", ctx: "Context | None" = None):
    """The arrays of a file, as a list or a dict as they were saved.

    Reads safetensors files and those that MXNet's own ``nd.save`` has written.
    """
    from .. import mxnet_files as _mxnet_files

    name = _base._file_name("load", fname)
    if _mxnet_files.is_one(name):
        return _mxnet_files.load(name, ctx)
    named, metadata = _core.load(name, _context._code_of(ctx))
    arrays = dict(named)
    indices = [str(i) for i in range(len(arrays))]
    kind = metadata.get("heddle.kind")
    if kind != "dict" and (arrays or kind == "list") and sorted(arrays) == sorted(indices):
        return [arrays[i] for i in indices]
    return arrays


from .. import random  # noqa: E402  uses the above
from . import sparse  # noqa: E402

_core.register(NDArray, sparse.RowSparseNDArray, numpy.empty, _dtype._NUMPY)
