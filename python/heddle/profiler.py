"""Traces of what the engine runs, for Chrome's or Perfetto's viewer.

    >>> mx.profiler.set_config(filename='profile.trace')
    >>> mx.profiler.set_state('run')
    >>> ...
    >>> mx.profiler.set_state('stop')

`heddle trace profile.trace -o profile.json` turns the file into JSON for the viewers.

With profile_process='server' each call is about the servers of a job in place of this process: each writes a file of
its own where it runs, with its place in the name (profile.server-4711.trace), and `heddle trace` joins them all. One
worker makes the calls, once it has a dist store.
"""

from __future__ import annotations

import os

from . import _core
from . import kvstore as _kvstore
from .error import InvalidArgument, InvalidState

_files = {"worker": "profile.trace", "server": "profile.trace"}
_running = False


def _check(call: str, profile_process: str) -> None:
    if profile_process not in _files:
        raise InvalidArgument(f"{call}: expected profile_process 'worker' or 'server', got {profile_process!r}")


def set_config(filename: "str | os.PathLike" = "profile.trace", profile_process: str = "worker", **_) -> None:
    """The file that the next run records to. Other parameters of MXNet's profiler have no meaning here."""
    _check("set_config", profile_process)
    _files[profile_process] = os.fspath(filename)


def set_state(state: str = "stop", profile_process: str = "worker") -> None:
    """'run' starts recording, 'stop' ends it and completes the file."""
    _check("set_state", profile_process)
    if state not in ("run", "stop"):
        raise InvalidArgument(f"set_state: expected 'run' or 'stop', got {state!r}")
    if profile_process == "worker":
        _set_own_state(state)
        return
    stores = [store for store in _kvstore._live_dist_stores() if store.type.startswith("dist")]
    if not stores:
        raise InvalidState("set_state: expected a dist store, whose servers to record, got none")
    stores[-1]._send_command_to_servers(_core.trace_command(), _files["server"] if state == "run" else "")


def _set_own_state(state: str) -> None:
    global _running
    if state == "run":
        if _running:
            raise InvalidState("set_state: the profiler runs already")
        _core.start_trace(_files["worker"])
        _running = True
        return
    if _running:
        try:
            _core.waitall(None)
        finally:  # an error of what ran is no reason to record on
            _running = False
            _core.stop_trace()


def dump(finished: bool = True, profile_process: str = "worker") -> None:
    """Completes the file, ending the recording."""
    set_state("stop", profile_process)
