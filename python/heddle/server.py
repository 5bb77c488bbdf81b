"""Runs the roles of a distributed job that are no workers.

    python -m heddle.server [--module NAME]

takes the role and all else from the environment, as `heddle launch` and DMLC launchers set it, and returns when
all workers have left. The module, if one is named, is imported first; its function ``controller(head, body)``, if it
has one, then runs what workers send by ``_send_command_to_servers``, and the optimizers that it registers
(``heddle.optimizer.register``) can be set by workers.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from typing import Callable

from . import _core
from . import optimizer as _optimizer
from .error import InvalidArgument, InvalidState

__all__ = ["run", "set_controller"]

_controller: "Callable[[int, str], object] | None" = None


def set_controller(controller: "Callable[[int, str], object]") -> None:
    """What later servers of this process run for the commands of workers: controller(head, body)."""
    global _controller
    _controller = controller


class _Updater:
    """Updates the values of a store by an optimizer written in Python, with the parameters that workers have set.
    What it keeps of a key leaves and enters as bytes."""

    def __init__(self, optimizer: "_optimizer.Optimizer") -> None:
        self._update = _optimizer.get_updater(optimizer)
        self._lock = threading.Lock()  # the rates are those of a key

    def __call__(self, key, parameters: dict, learning_rate: float, weight_decay: float, gradient, weight) -> None:
        optimizer = self._update.optimizer
        with self._lock:
            for name in parameters.keys() - _optimizer._RATES.values():
                value = parameters[name]
                setattr(optimizer, name, _optimizer._number_like(getattr(optimizer, name, value), value))
            optimizer.lr, optimizer.wd = learning_rate, weight_decay
            self._update(key, gradient, weight)

    def save_state(self, key) -> "bytes | None":
        with self._lock:
            return self._update._save_key(key)

    def load_state(self, key, state: bytes) -> None:
        with self._lock:
            self._update._load_key(key, state)

    def forget(self, key) -> None:
        with self._lock:
            self._update._forget(key)


def _make_updater(name: str) -> _Updater:
    """For an optimizer that a worker has set and that is none of heddle's."""
    klass = _optimizer.Optimizer.opt_registry.get(name)
    if klass is None:
        raise InvalidState(f"set_optimizer: the server has no optimizer {name!r}: expected one of heddle's, or one that "
                           "the server's module registers (heddle server --module NAME)")
    return _Updater(klass())


def run(role: "str | None" = None) -> None:
    """Serves as a server or scheduler until the job ends; ends by an error if the job fails."""
    role = _core.dist_role() if role is None else role
    if role not in ("server", "scheduler"):
        raise InvalidArgument(f"server.run: expected the role server or scheduler, got {role!r}")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing here returns to Python to see it
    if role == "server":
        _core.run_server(_controller, _make_updater)
    else:
        _core.run_scheduler()


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m heddle.server", description=__doc__.splitlines()[0])
    parser.add_argument("--module", metavar="NAME",
                        help="imported first; its controller(head, body) runs commands, its optimizers can be set")
    arguments = parser.parse_args()
    _core.expect_state_signal()
    if arguments.module:
        controller = getattr(importlib.import_module(arguments.module), "controller", None)
        if controller is not None and not callable(controller):
            sys.exit(f"heddle.server: expected {arguments.module}.controller to be a function controller(head, body), "
                     f"got {controller!r}")
        if controller is not None:
            set_controller(controller)
    try:
        run()
    except InvalidArgument as error:  # of the settings, as the command has it
        sys.exit(f"heddle: {error}")


if __name__ == "__main__":
    _main()
