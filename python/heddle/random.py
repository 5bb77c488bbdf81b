"""Random arrays. One stream of numbers for the process, which `seed` starts afresh."""

from __future__ import annotations

import os
import threading

import numpy

from . import dtype as _dtype
from . import nd as _nd
from .error import InvalidArgument, InvalidType

_WHOLE = (int, numpy.integer)
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
    """The dtype of the numbers, which is of the kind of the default: that of `out`, if there is one."""
    code = _dtype._code_of(default if dtype is None else dtype)
    if out is not None:
        if not isinstance(out, _nd.NDArray):
            raise InvalidType(f"{call}: expected an NDArray as out, got {type(out).__name__}")
        if dtype is not None and code != out._dtype:
            raise InvalidArgument(f"{call}: expected dtype {_dtype._NAMES[out._dtype]}, that of out, got {_dtype._NAMES[code]}")
        code = out._dtype
    whole = default == "int32"
    if _dtype._NUMPY[code].kind not in ("iu" if whole else "f"):
        raise InvalidArgument(f"{call}: expected a dtype of {'integers' if whole else 'floats'}, got {_dtype._NAMES[code]}")
    return code


def _drawn(call: str, draw, first, second, shape, out, kinds: tuple = _nd._NUMBERS) -> numpy.ndarray:
    """draw(first, second, shape), of the generator; its errors as ours."""
    if not (isinstance(first, kinds) and isinstance(second, kinds)):
        what = "whole numbers" if kinds is _WHOLE else "numbers"
        raise InvalidType(f"{call}: expected two {what}, got {first!r} and {second!r}")
    extents = (1,) if shape is None else tuple(_nd._dims(shape))
    if out is not None:
        if shape is not None and extents != out.shape:
            raise InvalidArgument(f"{call}: expected shape {out.shape}, that of out, got {extents}")
        extents = out.shape
    try:
        with _lock:
            return draw(_stream(), first, second, extents)
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


def uniform(low=0.0, high=1.0, shape=None, dtype=None, ctx=None, out=None):
    """Numbers that are equally likely in [low, high), of float32 or of the dtype of `out`; one, or as many as `shape` or
    `out` has."""
    code = _code_for("uniform", dtype, out)
    values = _drawn("uniform", numpy.random.Generator.uniform, low, high, shape, out)
    if _dtype._NUMPY[code].kind == "f":  # the cast must not round up to `high`
        most = _below(numpy.asarray(high, "float64"), code)
        values = numpy.where(most < low, values, numpy.minimum(values, most))
    return _filled(values, ctx, code, out)


def normal(loc=0.0, scale=1.0, shape=None, dtype=None, ctx=None, out=None):
    """Numbers of the normal distribution with mean `loc` and standard deviation `scale`, of float32 or of the dtype of
    `out`."""
    code = _code_for("normal", dtype, out)
    values = _drawn("normal", numpy.random.Generator.normal, loc, scale, shape, out)
    return _filled(values, ctx, code, out)


def randint(low, high, shape=None, dtype=None, ctx=None, out=None):
    """Whole numbers that are equally likely in [low, high), of int32 or of the dtype of `out`."""
    code = _code_for("randint", dtype, out, "int32")
    values = _drawn("randint", numpy.random.Generator.integers, low, high, shape, out, _WHOLE)
    limits = numpy.iinfo(_dtype._NUMPY[code])
    if not limits.min <= low <= high - 1 <= limits.max:
        raise InvalidArgument(f"randint: expected a range of {_dtype._NAMES[code]}, got {low!r} to {high!r}")
    return _filled(values, ctx, code, out)
