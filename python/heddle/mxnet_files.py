"""Files that MXNet's own ``nd.save`` has written, which ``heddle.nd.load`` reads: of dense and row-sparse arrays."""

from __future__ import annotations

import os
import stat
import struct
from typing import NoReturn

import numpy

from . import nd as _nd
from . import sparse as _sparse
from .context import Context, cpu, current_context
from .error import InvalidArgument, IoError

_MXNET_LIST = 0x112
# MXNet's numbers of dtypes.
_MXNET_DTYPES = {0: "float32", 1: "float64", 2: "float16", 3: "uint8", 4: "int32", 5: "int8", 6: "int64",
                 7: "bool", 12: "bfloat16"}
_MXNET_BFLOAT16 = 12


def is_one(name: str) -> bool:
    """Whether a file is one of MXNet's. IoError if it cannot be read."""
    if "\0" in name:  # which the library refuses, as it does when it saves
        return False
    try:
        if stat.S_ISFIFO(os.stat(name).st_mode):  # as it does this, which to open would wait for a writer
            return False
        with open(name, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise IoError(f"load {name}: {error.strerror}") from error
    # A safetensors file with a header of 0x112 bytes has text where this one has zeros.
    return len(head) == 16 and struct.unpack("<QQ", head) == (_MXNET_LIST, 0)


class _Reader:
    """The bytes of a file, front to back; IoError beyond the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        with open(name, "rb") as file:
            self.bytes = file.read()
        self.at = 0

    def fail(self, why: str) -> NoReturn:
        raise IoError(f"load {self.name}: at byte {self.at}: {why}")

    def take(self, count: int) -> bytes:
        if count < 0 or count > len(self.bytes) - self.at:
            self.fail(f"expected {count} more bytes, found {len(self.bytes) - self.at}")
        taken = self.bytes[self.at:self.at + count]
        self.at += count
        return taken

    def numbers(self, layout: str) -> tuple:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))

    def shape(self) -> tuple:
        (ndim,) = self.numbers("i")
        if not 0 <= ndim <= 32:
            self.fail(f"expected at most 32 axes, found {ndim}")
        dims = self.numbers(f"{ndim}q")
        if any(extent < 0 for extent in dims):
            self.fail(f"expected extents of at least 0, found {dims}")
        return dims

    def values(self, dims: tuple, code: int) -> numpy.ndarray:
        if code not in _MXNET_DTYPES:
            self.fail(f"expected a dtype of {', '.join(_MXNET_DTYPES.values())}, found number {code}")
        name = _MXNET_DTYPES[code] if code != _MXNET_BFLOAT16 else "uint16"
        dtype = numpy.dtype(name).newbyteorder("<")
        count = 1
        for extent in dims:
            count *= extent
        data = self.take(count * dtype.itemsize)
        try:
            return numpy.frombuffer(data, dtype).reshape(dims)
        except ValueError as error:  # no elements, and yet extents beyond NumPy's
            self.fail(f"{dims}: {error}")


def _made(values: numpy.ndarray, code: int, ctx: "Context | None") -> "_nd.NDArray":
    if code != _MXNET_BFLOAT16:
        return _nd.array(values, ctx, values.dtype.newbyteorder("="))
    # NumPy, which lacks it, has its bits.
    bits = values.astype("uint16").reshape(-1)
    made = _nd.from_buffer(bits, "bfloat16", cpu()) if bits.size else _nd.empty((0,), cpu(), "bfloat16")
    return _nd.array(made._reshape(list(values.shape)), current_context() if ctx is None else ctx)


def _load_array(reader: _Reader, ctx: "Context | None"):
    storage: tuple = ()
    (magic,) = reader.numbers("I")
    if magic == 0xF993FAC8:  # before storage types
        stype, dims = 0, reader.shape()
    elif magic in (0xF993FAC9, 0xF993FACA):
        (stype,) = reader.numbers("i")
        if stype not in (0, 1):
            reader.fail(f"expected a dense or a row_sparse array, found storage type {stype}")
        storage = reader.shape() if stype == 1 else storage
        dims = reader.shape()
    elif magic <= 32:  # older still: the number itself is ndim
        stype, dims = 0, reader.numbers(f"{magic}I")
    else:
        reader.fail(f"expected an array, found {magic:#x}")
    if not dims and magic != 0xF993FACA:
        return _nd.empty((0,), ctx)
    reader.numbers("ii")  # the device that it was on
    (code,) = reader.numbers("i")
    if stype == 0:
        return _made(reader.values(dims, code), code, ctx)
    index_code, index_dims = reader.numbers("i")[0], reader.shape()
    if storage[:1] == (0,) and len(index_dims) == 1:  # of an array that MXNet had not computed yet; the rows are there
        storage = (*index_dims, *storage[1:])
    values = reader.values(storage, code)
    ids = reader.values(index_dims, index_code)
    if ids.dtype.kind not in "iu" or index_code == _MXNET_BFLOAT16:
        reader.fail(f"expected integers as row ids, found {_MXNET_DTYPES[index_code]}")
    try:
        rows = _made(values, code, ctx)
        return _sparse.row_sparse_array((rows, ids), shape=dims, ctx=ctx, dtype=rows.dtype)
    except InvalidArgument as error:
        reader.fail(str(error))


def load(name: str, ctx: "Context | None"):
    """The arrays of a file, as a dict if they have names, else as a list. IoError for one that is damaged."""
    reader = _Reader(name)
    reader.take(16)
    (count,) = reader.numbers("Q")
    if count > len(reader.bytes):
        reader.fail(f"expected at most as many arrays as bytes, found {count}")
    arrays = [_load_array(reader, ctx) for _ in range(count)]
    (name_count,) = reader.numbers("Q")
    if name_count not in (0, count):
        reader.fail(f"expected 0 or {count} names, found {name_count}")
    names = []
    for _ in range(name_count):
        (length,) = reader.numbers("Q")
        names.append(reader.take(length).decode("utf-8", "surrogateescape"))
    if reader.at != len(reader.bytes):
        reader.fail(f"expected the end, found {len(reader.bytes) - reader.at} more bytes")
    return dict(zip(names, arrays)) if names else arrays
