"""Runs the roles of a distributed job that are no workers.

    python -m heddle.server [--module NAME]

takes the role and all else from the environment, as `heddle launch` and DMLC launchers set it, and returns when
all workers have left. The module, if one is named, is imported first; its function ``controller(head, body)`` then
runs what workers send by ``send_command_to_servers``.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from typing import Callable

from . import _core
from .error import InvalidArgument

__all__ = ["run", "set_controller"]

_controller: "Callable[[int, str], object] | None" = None


def set_controller(controller: "Callable[[int, str], object]") -> None:
    """What later servers of this process run for the commands of workers: controller(head, body)."""
    global _controller
    _controller = controller


def run(role: "str | None" = None) -> None:
    """Serves as a server or scheduler until the job ends; ends by an error if the job fails."""
    role = _core.dist_role() if role is None else role
    if role not in ("server", "scheduler"):
        raise InvalidArgument(f"server.run: expected the role server or scheduler, got {role!r}")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing here returns to Python to see it
    if role == "server":
        _core.run_server(_controller)
    else:
        _core.run_scheduler()


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m heddle.server", description=__doc__.splitlines()[0])
    parser.add_argument("--module", metavar="NAME", help="imported first; its controller(head, body) runs commands")
    arguments = parser.parse_args()
    if arguments.module:
        controller = getattr(importlib.import_module(arguments.module), "controller", None)
        if not callable(controller):
            sys.exit(f"heddle.server: expected a function controller(head, body) in {arguments.module}")
        set_controller(controller)
    run()


if __name__ == "__main__":
    _main()
