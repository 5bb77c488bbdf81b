"""Traces of what the engine runs, for Chrome's or Perfetto's viewer.

    >>> mx.profiler.set_config(filename='profile.trace')
    >>> mx.profiler.set_state('run')
    >>> ...
    >>> mx.profiler.set_state('stop')

`heddle trace profile.trace -o profile.json` turns the file into JSON for the viewers. `pause` and `resume` leave a part
out; what follows it is in a file of its own, profile-2.trace, which the command joins: `heddle trace profile*.trace`.
A run under the same name removes such files of the one before, but not those of servers.

What ends a file, 'stop', `pause` or `dump`, waits for what has been pushed, as `waitall` does, and raises the error of an op
that no `waitall` has raised yet, once the file is complete and, with `dump(False)`, the next one has begun.

With profile_process='server' each call is about the servers of a job in place of this process: each writes a file of
its own where it runs, with its place in the name (profile.server-4711.trace), and `heddle trace` joins them all. One
worker makes the calls, once it has a dist store.
"""

from __future__ import annotations

import itertools
import os

from . import _core
from . import base as _base
from . import kvstore as _kvstore
from .error import InvalidArgument, InvalidState

_MAGIC = b"HEDDLTRC"  # with which traces begin
_files = {"worker": "profile.trace", "server": "profile.trace"}
_running: "set[str]" = set()  # whom a recording is about
_paused: "set[str]" = set()
_pauses = {"worker": 0, "server": 0}  # of the present run
_names = dict(_files)  # of the present run
_since: "dict[str, int]" = {}  # what was counted at the last dumps(reset=True)


def _check(call: str, profile_process: str) -> None:
    if profile_process not in _files:
        raise InvalidArgument(f"{call}: expected profile_process 'worker' or 'server', got {profile_process!r}")


def set_config(filename: "str | os.PathLike" = "profile.trace", profile_process: str = "worker", **_) -> None:
    """The file that the next run records to. Other parameters of MXNet's profiler have no meaning here."""
    _check("set_config", profile_process)
    _files[profile_process] = _base._file_name("set_config", filename)


def set_state(state: str = "stop", profile_process: str = "worker") -> None:
    """'run' starts recording, if nothing is recorded, and in a pause is `resume`; 'stop' ends it and completes the file."""
    _check("set_state", profile_process)
    if state not in ("run", "stop"):
        raise InvalidArgument(f"set_state: expected 'run' or 'stop', got {state!r}")
    if state == "run" and profile_process in _running | _paused:
        resume(profile_process)
        return
    _record(state == "run", _files[profile_process], profile_process)  # which may refuse: the run goes on then
    if state == "run" and profile_process == "worker":
        _remove_further(_files[profile_process])
    _names[profile_process] = _files[profile_process]
    _pauses[profile_process] = 0
    _paused.discard(profile_process)


def _record(record: bool, file: str, profile_process: str) -> None:
    if profile_process == "worker":
        _record_here(record, file)
        return
    stores = [store for store in _kvstore._live_dist_stores() if store.type.startswith("dist")]
    if not stores:
        raise InvalidState("set_state: expected a dist store, whose servers to record, got none")
    stores[-1]._trace_servers(file if record else "")
    (_running.add if record else _running.discard)("server")


def _record_here(record: bool, file: str) -> None:
    if record:
        _core.start_trace(file)
        _running.add("worker")
        return
    if "worker" in _running:
        try:
            _core.waitall(None)
        finally:  # an error of what ran is no reason to record on
            _running.remove("worker")
            _core.stop_trace()


def pause(profile_process: str = "worker") -> None:
    """Records nothing until `resume`, and completes the file. Nothing happens if nothing is recorded."""
    _check("pause", profile_process)
    if profile_process in _running:
        try:
            _record(False, "", profile_process)
        finally:  # an error of what ran does not keep it from being one
            if profile_process not in _running:
                _paused.add(profile_process)


def resume(profile_process: str = "worker") -> None:
    """Goes on after `pause`, in a further file: profile-2.trace after profile.trace. Nothing happens without a pause."""
    _check("resume", profile_process)
    if profile_process in _paused:
        _record(True, _further(_names[profile_process], _pauses[profile_process] + 2), profile_process)
        _pauses[profile_process] += 1
        _paused.remove(profile_process)


def _further(file: str, number: int) -> str:
    """The name of a further file."""
    name, ending = os.path.splitext(file)
    return f"{name}-{number}{ending}"


def _remove_further(file: str) -> None:
    """Those of a former run of the name, which `heddle trace profile*.trace` would take for parts of the present one."""
    for number in itertools.count(2):
        name = _further(file, number)
        try:
            with open(name, "rb") as opened:
                if opened.read(len(_MAGIC)) != _MAGIC:
                    return
            os.remove(name)
        except OSError:  # it is not there, or not ours
            return


def dump(finished: bool = True, profile_process: str = "worker") -> None:
    """Completes the file. `finished`: ends the recording, which else goes on in a further file, as after `pause` and
    `resume`."""
    if finished:
        set_state("stop", profile_process)
        return
    _check("dump", profile_process)
    if profile_process in _running:  # not in a pause
        try:
            pause(profile_process)
        finally:  # an error of what ran is no reason to record no more
            resume(profile_process)


def dumps(reset: bool = False, format: str = "table", sort_by: str = "total", ascending: bool = False) -> str:
    """A table of what the engine has counted, since the last call with `reset` if there was one: how many ops were pushed,
    are done, have failed, run now. Times are in the file alone. The other parameters of MXNet's have no meaning here."""
    counts = _core.engine_stats()
    lines = [f"{name:<20}{count - _since.get(name, 0):>16}" for name, count in counts.items()]
    if reset:
        _since.update({name: counts[name] for name in ("pushed", "done", "failed", "late_completions")})
    return "\n".join([f"{'Count':<20}{'Value':>16}", *lines, ""])
