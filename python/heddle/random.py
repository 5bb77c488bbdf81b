"""Random arrays. One stream of numbers for the process, which `seed` starts afresh."""

from __future__ import annotations

import os
import threading

import numpy

from . import dtype as _dtype
from . import nd as _nd

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
    """Starts the numbers afresh: the same seed gives the same numbers on every machine."""
    with _lock:
        _stream(int(seed_state))


def _filled(values: numpy.ndarray, ctx, dtype, out):
    made = _nd.array(values, ctx, dtype)
    return made if out is None else made.copyto(out)


def _shape(shape, out):
    return out.shape if out is not None else () if shape is None else tuple(_nd._dims(shape))


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
    """Numbers that are equally likely in [low, high)."""
    with _lock:
        values = _stream().uniform(low, high, _shape(shape, out))
    for code in [_dtype._code_of(dtype)] + ([] if out is None else [out._dtype]):
        if _dtype._NUMPY[code].kind == "f":  # the cast must not round up to `high`
            most = _below(numpy.asarray(high, "float64"), code)
            values = numpy.where(most < low, values, numpy.minimum(values, most))
    return _filled(values, ctx, dtype, out)


def normal(loc=0.0, scale=1.0, shape=(1,), dtype=None, ctx=None, out=None):
    """Numbers of the normal distribution with mean `loc` and standard deviation `scale`."""
    with _lock:
        values = _stream().normal(loc, scale, _shape(shape, out))
    return _filled(values, ctx, dtype, out)


def randint(low, high, shape=(1,), dtype="int32", ctx=None, out=None):
    """Whole numbers that are equally likely in [low, high)."""
    with _lock:
        values = _stream().integers(low, high, _shape(shape, out))
    return _filled(values, ctx, dtype, out)
