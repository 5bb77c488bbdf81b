"""Element types, as NumPy names them, and their numbers in the C++ library."""

from __future__ import annotations

from typing import Any

import numpy

from .error import InvalidType

# In the order of heddle::DType. NumPy has no bfloat16; its package ml_dtypes does.
_NAMES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool")
_BFLOAT16 = _NAMES.index("bfloat16")
# What asnumpy() makes of each.
_NUMPY = tuple(numpy.dtype("float32" if name == "bfloat16" else name) for name in _NAMES)
_CODES: dict = {name: code for code, name in enumerate(_NAMES)}
_CODES.update({_NUMPY[code].type: code for code in range(len(_NAMES)) if code != _BFLOAT16})
_CODES.update({_NUMPY[code]: code for code in range(len(_NAMES)) if code != _BFLOAT16})
_CODES.update({float: _NAMES.index("float64"), int: _NAMES.index("int64"), bool: _NAMES.index("bool")})


def _code_of(dtype: Any) -> int:
    if dtype is None:
        return 0
    try:
        return _CODES[dtype]
    except (KeyError, TypeError):
        pass
    name = getattr(dtype, "__name__", None)  # a class, ml_dtypes.bfloat16 among them
    if name not in _CODES:
        try:
            name = numpy.dtype(dtype).name
        except TypeError:
            name = None
    if name not in _CODES:
        raise InvalidType(f"expected a dtype of {', '.join(_NAMES)}, got {dtype!r}")
    return _CODES[name]


def _from_code(code: int):
    """NumPy's class of the element type; the name 'bfloat16' for that one."""
    return "bfloat16" if code == _BFLOAT16 else _NUMPY[code].type
