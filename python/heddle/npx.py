"""Beside heddle.np: devices, and the switch that scripts for it begin with."""

from __future__ import annotations

from .context import cpu, cpu_pinned, current_context as current_device, gpu, num_gpus
from .nd import load, save, waitall

__all__ = ["cpu", "cpu_pinned", "current_device", "gpu", "load", "num_gpus", "reset_np", "save", "set_np", "waitall"]


def set_np(shape: bool = True, array: bool = True, dtype: bool = False) -> None:
    """Accepted for scripts that call it: heddle.np works without a switch."""


def reset_np() -> None:
    """The counterpart of set_np."""
