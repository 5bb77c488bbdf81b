"""Random arrays. One stream of numbers for the process, which `seed` starts afresh."""

from __future__ import annotations

import os
import threading

import numpy

from . import dtype as _dtype
from . import nd as _nd
from .error import InvalidArgument, InvalidType

_lock = threading.Lock()
_generator: "numpy.random.Generator | None" = None


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it, and is not there


def _stream(seed_state: "int | None" = None) -> "numpy.random.Generator":
    """The stream, started on first use: importing numpy.random takes longer than all of heddle. With _lock held."""
    global _generator
    if _generator is None or seed_state is not None:
        _generator = numpy.random.Generator(numpy.random.Philox(seed_state))
    return _generator


def seed(seed_state: int, ctx=None) -> None:
    """Starts the numbers afresh: the same seed, a whole number from 0 on, gives the same numbers on every machine."""
    if not isinstance(seed_state, (int, numpy.integer)):
        raise InvalidType(f"seed: expected a whole number, got {seed_state!r}")
    if seed_state < 0:
        raise InvalidArgument(f"seed: expected a number of at least 0, got {seed_state!r}")
    with _lock:
        _stream(int(seed_state))


def _filled(values: numpy.ndarray, ctx, code: int, out):
    made = _nd.array(values, ctx, _dtype._NAMES[code])
    return made if out is None else made.copyto(out)


def _code_for(call: str, dtype, out, default: str = "float32") -> int:
    """The dtype of the numbers: that of `out`, if there is one."""
    if out is None:
        return _dtype._code_of(default if dtype is None else dtype)
    if not isinstance(out, _nd.NDArray):
        raise InvalidType(f"{call}: expected an NDArray as out, got {type(out).__name__}")
    if dtype is not None and _dtype._code_of(dtype) != out._dtype:
        raise InvalidArgument(f"{call}: expected dtype {_dtype._NAMES[out._dtype]}, that of out, got "
                              f"{_dtype._NAMES[_dtype._code_of(dtype)]}")
    return out._dtype


def _drawn(call: str, draw, first, second, shape, out) -> numpy.ndarray:
    """draw(first, second, shape), of the generator; its errors as ours."""
    extents = out.shape if out is not None else () if shape is None else tuple(_nd._dims(shape))
    try:
        with _lock:
            return draw(_stream(), first, second, extents)
    except TypeError as error:
        raise InvalidType(f"{call}: expected two numbers, got {first!r} and {second!r}: {error}") from error
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"{call}: {first!r} and {second!r}, shape {extents}: {error}") from error


def _below(high: numpy.ndarray, code: int) -> numpy.ndarray:
    """The greatest numbers of a dtype below `high`, which itself need not be one."""
    kind = _dtype._NUMPY[code]  # of bfloat16 float32, of which it is the upper half
    with numpy.errstate(over="ignore"):
        found = high.astype(kind)
    found = numpy.where(found < high, found, numpy.nextafter(found, kind.type(-numpy.inf)))
    if code == _dtype._BFLOAT16:
        bits = found.view("uint32")
        upper = bits & numpy.uint32(0xFFFF0000)  # towards 0, so for negative ones a step further
        found = numpy.where((found < 0) & (upper != bits), upper + numpy.uint32(1 << 16), upper).view(kind)
    return found.astype("float64")


def uniform(low=0.0, high=1.0, shape=(1,), dtype=None, ctx=None, out=None):
    """Numbers that are equally likely in [low, high), of float32 or of the dtype of `out`."""
    code = _code_for("uniform", dtype, out)
    values = _drawn("uniform", numpy.random.Generator.uniform, low, high, shape, out)
    if _dtype._NUMPY[code].kind == "f":  # the cast must not round up to `high`
        most = _below(numpy.asarray(high, "float64"), code)
        values = numpy.where(most < low, values, numpy.minimum(values, most))
    return _filled(values, ctx, code, out)


def normal(loc=0.0, scale=1.0, shape=(1,), dtype=None, ctx=None, out=None):
    """Numbers of the normal distribution with mean `loc` and standard deviation `scale`, of float32 or of the dtype of
    `out`."""
    code = _code_for("normal", dtype, out)
    values = _drawn("normal", numpy.random.Generator.normal, loc, scale, shape, out)
    return _filled(values, ctx, code, out)


def _fits(low, high, kind: numpy.dtype) -> bool:
    low, high = numpy.asarray(low), numpy.asarray(high)
    return not (low.size and high.size) or (
        numpy.iinfo(kind).min <= low.min() and high.max() - 1 <= numpy.iinfo(kind).max)


def randint(low, high, shape=(1,), dtype=None, ctx=None, out=None):
    """Whole numbers that are equally likely in [low, high), of int32 or of the dtype of `out`."""
    code = _code_for("randint", dtype, out, "int32")
    values = _drawn("randint", numpy.random.Generator.integers, low, high, shape, out)
    if _dtype._NUMPY[code].kind in "iu" and not _fits(low, high, _dtype._NUMPY[code]):
        raise InvalidArgument(f"randint: expected a range of {_dtype._NAMES[code]}, got {low!r} to {high!r}")
    return _filled(values, ctx, code, out)
