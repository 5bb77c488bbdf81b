"""Arrays that are made and printed as NumPy's are, as MXNet's np module has them.

    >>> from heddle import np, npx
    >>> np.ones((2, 3))
    array([[1., 1., 1.],
           [1., 1., 1.]])

They are NDArrays in all else: their operations are queued. Comparisons give bools.
"""

from __future__ import annotations

import re
from typing import Self, cast

import numpy

from . import _core
from . import context as _context
from . import dtype as _dtype
from . import nd as _nd
from .error import InvalidArgument, InvalidType

float16, float32, float64 = numpy.float16, numpy.float32, numpy.float64
int8, uint8, int32, int64 = numpy.int8, numpy.uint8, numpy.int32, numpy.int64
bool_ = numpy.bool_
pi, e, inf, nan = numpy.pi, numpy.e, numpy.inf, numpy.nan


class ndarray(_nd.NDArray):
    """An NDArray that prints as NumPy's arrays do."""

    __slots__ = ()
    _compares_to_bool = True
    _has_scalars = True

    # Whole numbers are divided as NumPy does it, but to float32. Dtypes that do not mix do not do so here either.

    def __truediv__(self, other: object, /) -> Self:
        if not _is_whole(self) or isinstance(other, _core.Array) and other._dtype != self._dtype:
            return super().__truediv__(other)
        divisor = other.astype("float32") if isinstance(other, _nd.NDArray) else other
        return super(ndarray, self.astype("float32")).__truediv__(divisor)

    def __rtruediv__(self, other: object, /) -> Self:
        if isinstance(other, _nd.NDArray):  # one of heddle.nd, which would cut the quotient
            return _core.view_as(type(self), other) / self
        return super(ndarray, self.astype("float32") if _is_whole(self) else self).__rtruediv__(other)

    def __itruediv__(self, other: object, /) -> Self:
        if _is_whole(self):
            raise InvalidType(f"/=: expected an array of floats, which a quotient is, got {_dtype._NAMES[self._dtype]}: "
                              "a = a / b makes another array")
        return super().__itruediv__(other)

    __div__ = __truediv__

    def __repr__(self) -> str:
        text, name = repr(self.asnumpy()), _dtype._NAMES[self._dtype]
        if self.size:  # NumPy 2 names the shape of what it cuts short
            text = re.sub(r",\s*shape=\([\d, ]+\)(?=(,\s*dtype=\w+)?\)$)", "", text)
        if name == "float32":  # the default; a line may end before it
            text = re.sub(r",\s*dtype=float32\)$", ")", text)
        elif name == "bfloat16":
            text = re.sub(r"dtype=float32\)$", "dtype=bfloat16)", text)
        elif "dtype=" not in text and name != "bool":  # one of NumPy's defaults
            text = f"{text[:-1]}, dtype={name})"
        if self.context.device_type != "cpu":
            text = f"{text[:-1]}, ctx={self.context})"
        return text

    def __str__(self) -> str:
        return str(self.asnumpy())

    def flatten(self) -> Self:
        """A copy with one axis."""
        return self._reshape([self.size]).copy()

    def as_nd_ndarray(self) -> "_nd.NDArray":
        """The same values as an NDArray."""
        return _nd.array(self)

    def item(self):
        """The only element, as a number of Python's. Waits."""
        return self.asscalar().item()


def _is_whole(array: "_nd.NDArray") -> bool:
    return _dtype._NUMPY[array._dtype].kind != "f"


def _made(array: "_nd.NDArray") -> ndarray:
    return _core.view_as(ndarray, array)


def array(object, dtype=None, ctx=None) -> ndarray:  # noqa: A002
    """An array with a copy of values; float32 unless `dtype` or an array's own says otherwise."""
    if isinstance(object, _core.RowSparse):
        object = object._to_dense()  # noqa: A001
    if isinstance(object, _core.Array):
        return _made(_nd.array(object, ctx, dtype))
    return cast(ndarray, _nd.array(object, ctx, dtype, _type=ndarray))


def zeros(shape, dtype=None, order="C", ctx=None) -> ndarray:
    """An array of zeros."""
    return cast(ndarray, _nd.full(shape, 0, ctx, dtype, _type=ndarray))


def ones(shape, dtype=None, order="C", ctx=None) -> ndarray:
    """An array of ones."""
    return cast(ndarray, _nd.full(shape, 1, ctx, dtype, _type=ndarray))


def full(shape, fill_value, dtype=None, order="C", ctx=None) -> ndarray:
    """An array of which each element is `fill_value`: of float32, or of bool if that is one, unless `dtype` says otherwise."""
    if dtype is None and isinstance(fill_value, (bool, numpy.bool_)):
        dtype = bool_
    return cast(ndarray, _nd.full(shape, fill_value, ctx, dtype, _type=ndarray))


def empty(shape, dtype=None, order="C", ctx=None) -> ndarray:
    """An array whose values are undefined until it is written."""
    return _core.empty(ndarray, _nd._dims(shape), _dtype._code_of(dtype), _context._code_of(ctx))


def arange(start, stop=None, step=1, dtype=None, ctx=None) -> ndarray:
    """Numbers from `start`, or 0, up to but without `stop`."""
    if stop is None:
        start, stop = 0, start
    if step == 0:
        raise InvalidArgument("arange: expected a step other than 0, got 0")
    return array(_nd._evenly_spaced(start, stop, step), dtype, ctx)


def zeros_like(a, dtype=None) -> ndarray:
    """Zeros in the shape of another array."""
    _nd._require_array("zeros_like", a)
    return zeros(a.shape, a.dtype if dtype is None else dtype, ctx=a.context)


def ones_like(a, dtype=None) -> ndarray:
    """Ones in the shape of another array."""
    _nd._require_array("ones_like", a)
    return ones(a.shape, a.dtype if dtype is None else dtype, ctx=a.context)


abs, sign, square, sqrt, exp, log = _nd.abs, _nd.sign, _nd.square, _nd.sqrt, _nd.exp, _nd.log  # noqa: A001
sum, mean, dot, clip = _nd.sum, _nd.mean, _nd.dot, _nd.clip  # noqa: A001
maximum, minimum = _nd.maximum, _nd.minimum
add, subtract, multiply, divide, mod = _nd.add, _nd.subtract, _nd.multiply, _nd.divide, _nd.modulo
