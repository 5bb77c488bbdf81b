"""Traces of what the engine runs, for Chrome's or Perfetto's viewer.

    >>> mx.profiler.set_config(filename='profile.trace')
    >>> mx.profiler.set_state('run')
    >>> ...
    >>> mx.profiler.set_state('stop')

`heddle trace profile.trace` turns the file into JSON for the viewers.
"""

from __future__ import annotations

import os

from . import _core
from .error import InvalidArgument, InvalidState

_config = {"filename": "profile.trace"}
_running = False


def set_config(filename: "str | os.PathLike" = "profile.trace", **_) -> None:
    """The file that the next run records to. Other parameters of MXNet's profiler have no meaning here."""
    _config["filename"] = os.fspath(filename)


def set_state(state: str = "stop", profile_process: str = "worker") -> None:
    """'run' starts recording, 'stop' ends it and completes the file."""
    global _running
    if profile_process != "worker":
        raise InvalidArgument(f"set_state: expected profile_process 'worker', got {profile_process!r}")
    if state == "run":
        if _running:
            raise InvalidState("set_state: the profiler runs already")
        _core.start_trace(_config["filename"])
        _running = True
    elif state == "stop":
        if _running:
            _core.waitall(None)
            _core.stop_trace()
        _running = False
    else:
        raise InvalidArgument(f"set_state: expected 'run' or 'stop', got {state!r}")


def dump(finished: bool = True, profile_process: str = "worker") -> None:
    """Completes the file, ending the recording."""
    set_state("stop", profile_process)
