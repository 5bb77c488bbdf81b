"""Learning rates that change with the number of updates.

A scheduler is called with the number of updates, from 1, and returns the rate. Those of this module run
inside the store; one written in Python, be it a part of one of these classes that a class of one's own overrides, is
asked before each push.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Iterable, Sequence

from . import _core
from .error import InvalidArgument, InvalidType


def _whole(name: str, value: Any) -> int:
    """`value` as a number of updates; a float such as 1e4 is one if it is whole."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, str) or number != value or abs(number) >= 2**63:
        raise InvalidArgument(f"expected {name} to be a whole number of updates, got {value!r}")
    return number


def _real(name: str, value: Any) -> float:
    """`value` as a number for the C++ library."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = None
    except OverflowError as error:
        raise InvalidArgument(f"expected {name} to be a number that a float can hold: {error}") from error
    if number is None or isinstance(value, str):
        raise InvalidType(f"expected {name} to be a number, got {value!r}")
    return number


class LRScheduler:
    """The base of schedulers. One of your own overrides __call__(num_update).

    For num_update < warmup_steps the rate grows from warmup_begin_lr towards base_lr ('linear'), or is
    warmup_begin_lr ('constant').
    """

    def __init__(self, base_lr: float = 0.01, warmup_steps: int = 0, warmup_begin_lr: float = 0.0,
                 warmup_mode: str = "linear") -> None:
        warmup_steps = _whole("warmup_steps", warmup_steps)
        if warmup_steps < 0:
            raise InvalidArgument(f"expected warmup_steps of at least 0, got {warmup_steps}")
        if _real("warmup_begin_lr", warmup_begin_lr) > _real("base_lr", base_lr):
            raise InvalidArgument(f"expected warmup_begin_lr of at most base_lr {base_lr}, got {warmup_begin_lr}")
        if warmup_mode not in ("linear", "constant"):
            raise InvalidArgument(f"expected a warmup_mode of linear, constant, got {warmup_mode!r}")
        self.base_lr = base_lr
        self.warmup_steps = warmup_steps
        self.warmup_begin_lr = warmup_begin_lr
        self.warmup_final_lr = base_lr
        self.warmup_mode = warmup_mode

    def get_warmup_lr(self, num_update: float) -> float:
        """The rate during the warm-up."""
        return self._warmup_lr(num_update, self.warmup_final_lr)

    def _warmup_lr(self, num_update: float, final_lr: float) -> float:
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (final_lr - self.warmup_begin_lr) * num_update / self.warmup_steps

    def __call__(self, num_update: float) -> float:
        raise NotImplementedError("a scheduler overrides __call__(num_update)")


class _Native(LRScheduler):
    """One that the C++ library evaluates. Its warm-up ends at base_lr as it is, whatever it was when it was made."""

    def _schedule(self) -> "_core.Schedule":
        raise NotImplementedError

    def _warmup(self) -> tuple:
        return self.warmup_steps, _real("warmup_begin_lr", self.warmup_begin_lr), self.warmup_mode == "constant"

    def _base(self) -> float:
        return _real("base_lr", self.base_lr)

    def get_warmup_lr(self, num_update: float) -> float:
        """The rate during the warm-up."""
        return self._warmup_lr(num_update, self.base_lr)

    def _progress(self, num_update: float, max_update: int) -> float:
        """From the end of the warm-up, 0, to max_update, 1."""
        return (min(num_update, max_update) - self.warmup_steps) / (max_update - self.warmup_steps)

    def _between(self, num_update: float) -> float:
        """The rate behind the warm-up at a number that is not whole. Here it changes at whole ones only, behind them."""
        return self._schedule()(math.ceil(num_update))

    def __call__(self, num_update: float) -> float:
        is_part = isinstance(num_update, numbers.Real) and math.isfinite(num_update) and num_update != int(num_update)
        number = float(num_update) if is_part else _whole("num_update", num_update)
        if number < 0:
            raise InvalidArgument(f"expected num_update of at least 0, got {num_update}")
        if number < self.warmup_steps and (is_part or type(self).get_warmup_lr is not _Native.get_warmup_lr):
            return self.get_warmup_lr(number)
        return self._between(number) if isinstance(number, float) else self._schedule()(number)


def _is_native(scheduler) -> bool:
    """Whether the C++ library gives the same rates: a class that derives from one of these may override them."""
    kind = type(scheduler)
    return (isinstance(scheduler, _Native) and kind.__call__ is _Native.__call__
            and kind.get_warmup_lr is _Native.get_warmup_lr)


def _of_native(schedule: "_core.Schedule") -> _Native:
    """The scheduler of this module that has this schedule."""
    return _described(*schedule.describe())


def _described(name: str, arguments: dict) -> _Native:
    """What Schedule.describe says of one."""
    kind = next((kind for kind in _Native.__subclasses__() if kind.__name__ == name and kind.__module__ == __name__), None)
    if kind is None:
        raise InvalidArgument(f"expected the name of a scheduler of heddle.lr_scheduler, got {name!r}")
    return kind(**arguments)


class FactorScheduler(_Native):
    """base_lr, multiplied by `factor` each time another `step` updates are done, but not below stop_factor_lr."""

    def __init__(self, step: int, factor: float = 1, stop_factor_lr: float = 1e-8, base_lr: float = 0.01,
                 warmup_steps: int = 0, warmup_begin_lr: float = 0, warmup_mode: str = "linear") -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step, self.factor, self.stop_factor_lr = _whole("step", step), factor, stop_factor_lr
        self._schedule()  # checks the numbers

    def _schedule(self):
        return _core.factor_schedule(self.step, _real("factor", self.factor), _real("stop_factor_lr", self.stop_factor_lr),
                                     self._base(), *self._warmup())


class MultiFactorScheduler(_Native):
    """base_lr, multiplied by `factor` after each of the updates that `step` lists."""

    def __init__(self, step: Sequence[int], factor: float = 1, base_lr: float = 0.01, warmup_steps: int = 0,
                 warmup_begin_lr: float = 0, warmup_mode: str = "linear") -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        if isinstance(step, str) or not isinstance(step, Iterable):
            raise InvalidType(f"expected step to be a list of numbers of updates, got {step!r}")
        self.step, self.factor = [_whole("step", one) for one in step], factor
        self._schedule()

    def _schedule(self):
        return _core.multi_factor_schedule(self.step, _real("factor", self.factor), self._base(), *self._warmup())


class PolyScheduler(_Native):
    """From base_lr to final_lr at max_update, along (1 - progress) to the power of `pwr`."""

    def __init__(self, max_update: int, base_lr: float = 0.01, pwr: float = 2, final_lr: float = 0,
                 warmup_steps: int = 0, warmup_begin_lr: float = 0, warmup_mode: str = "linear") -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.max_update = _whole("max_update", max_update)
        self.power, self.final_lr = pwr, final_lr
        self._schedule()

    def _schedule(self):
        return _core.poly_schedule(self.max_update, _real("pwr", self.power), _real("final_lr", self.final_lr), self._base(),
                                   *self._warmup())

    def _between(self, num_update):
        return self.final_lr + (self.base_lr - self.final_lr) * (1 - self._progress(num_update, self.max_update)) ** self.power


class CosineScheduler(_Native):
    """From base_lr to final_lr at max_update, along half a cosine."""

    def __init__(self, max_update: int, base_lr: float = 0.01, final_lr: float = 0, warmup_steps: int = 0,
                 warmup_begin_lr: float = 0, warmup_mode: str = "linear") -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.max_update = _whole("max_update", max_update)
        self.final_lr = final_lr
        self._schedule()

    def _schedule(self):
        return _core.cosine_schedule(self.max_update, _real("final_lr", self.final_lr), self._base(), *self._warmup())

    def _between(self, num_update):
        angle = math.pi * self._progress(num_update, self.max_update)
        return self.final_lr + (self.base_lr - self.final_lr) * (1 + math.cos(angle)) / 2
