"""Beside heddle.np: devices, and the switch that scripts for it begin with."""

from __future__ import annotations

import os

from . import nd as _nd, np as _np
from .context import cpu, cpu_pinned, current_context as current_device, gpu, num_gpus
from .nd import waitall

__all__ = ["cpu", "cpu_pinned", "current_device", "gpu", "load", "num_gpus", "reset_np", "save", "set_np", "waitall"]


def set_np(shape: bool = True, array: bool = True, dtype: bool = False) -> None:
    """Accepted for scripts that call it: heddle.np works without a switch."""


def reset_np() -> None:
    """The counterpart of set_np."""


def save(file: "str | bytes | os.PathLike", arr) -> None:
    """Saves an array, a list of arrays, or a dict of arrays by name: what `nd.save` does."""
    _nd.save(file, arr)


def load(file: "str | bytes | os.PathLike"):
    """What `nd.load` reads, with arrays of heddle.np."""
    loaded = _nd.load(file)
    if isinstance(loaded, dict):
        return {name: _of_np(one) for name, one in loaded.items()}
    return [_of_np(one) for one in loaded]


def _of_np(array):
    return _np._made(array) if isinstance(array, _nd.NDArray) else array
