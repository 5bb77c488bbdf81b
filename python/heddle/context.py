"""Devices: where arrays live and ops run."""

from __future__ import annotations

from contextvars import ContextVar

import numpy

from . import _core
from .error import InvalidArgument, InvalidState, InvalidType

_TYPES = ("cpu", "cpu_pinned", "gpu")
# The devices of the `with` blocks that a thread, or a task of asyncio, is in: (innermost, those around it), or None.
_blocks: "ContextVar[tuple | None]" = ContextVar("heddle.context", default=None)


class Context:
    """A device: its type ('cpu', 'cpu_pinned' or 'gpu') and its number.

    All ``cpu(i)`` are logical devices of one machine: any number from 0 works.
    """

    __slots__ = ("_type", "_id")  # arrays share the object, so it does not change

    def __init__(self, device_type: "str | Context", device_id: int = 0) -> None:
        if isinstance(device_type, Context):
            other = device_type
            device_type, device_id = other.device_type, other.device_id
        if device_type not in _TYPES:
            raise InvalidArgument(f"expected a device type of {', '.join(_TYPES)}, got {device_type!r}")
        if not isinstance(device_id, (int, numpy.integer)):
            raise InvalidType(f"expected a device number, got {device_id!r}")
        if not 0 <= device_id < 2**15:
            raise InvalidArgument(f"expected a device number of at least 0 and below 32768, got {device_id}")
        self._type: str = device_type
        self._id: int = int(device_id)

    @property
    def device_type(self) -> str:
        """'cpu', 'cpu_pinned' or 'gpu'."""
        return self._type

    @property
    def device_id(self) -> int:
        """The number among the devices of the type."""
        return self._id

    @property
    def _code(self) -> int:
        return _TYPES.index(self._type) << 16 | self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Context):
            return NotImplemented
        return (self._type, self._id) == (other._type, other._id)

    def __hash__(self) -> int:
        return hash((self._type, self._id))

    def __repr__(self) -> str:
        return f"{self._type}({self._id})"

    def __enter__(self) -> "Context":
        _blocks.set((self, _blocks.get()))
        return self

    def __exit__(self, *exception: object) -> None:
        block = _blocks.get()
        if block is None:
            raise InvalidState(f"{self}: expected to leave a `with` block that was entered, got none in this thread or task")
        _blocks.set(block[1])


def cpu(device_id: int = 0) -> Context:
    """A CPU device."""
    return Context("cpu", device_id)


def cpu_pinned(device_id: int = 0) -> Context:
    """CPU memory that a GPU can copy from directly."""
    return Context("cpu_pinned", device_id)


def gpu(device_id: int = 0) -> Context:
    """A GPU."""
    return Context("gpu", device_id)


def num_gpus() -> int:
    """How many GPUs there are that this build can use."""
    return _core.num_gpus()


def current_context() -> Context:
    """The device of arrays that are made without one: that of this thread's innermost ``with`` block, or cpu(0)."""
    block = _blocks.get()
    return _CPU0 if block is None else block[0]


_CPU0 = cpu()
_KNOWN = {_CPU0._code: _CPU0}


def _from_code(code: int) -> Context:
    known = _KNOWN.get(code)
    if known is None:
        known = _KNOWN[code] = Context(_TYPES[code >> 16], code & 0xFFFF)
    return known


def _code_of(ctx: "Context | None") -> int:
    if ctx is None:
        ctx = current_context()
    if not isinstance(ctx, Context):
        raise InvalidType(f"expected a Context such as heddle.cpu(), got {type(ctx).__name__}")
    return ctx._code
