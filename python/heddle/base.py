"""Loads the C++ half of the package, and ends its work in order when the interpreter exits."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from .error import Error, InvalidArgument, InvalidType, MXNetError

# The engine that existing launchers and scripts ask for.
_ENGINES = {"naiveengine": "serial", "threadedengine": "threaded", "threadedengineperdevice": "threaded"}
_asked = os.environ.get("MXNET_ENGINE_TYPE")
if _asked and not os.environ.get("HEDDLE_ENGINE"):  # empty is unset
    _name = _asked.lower().removesuffix("async")
    if _name not in _ENGINES:
        _why = f"MXNET_ENGINE_TYPE: expected one of {', '.join(_ENGINES)}, got {_asked!r}"
        # The command, which Python finds in this package, says what is wrong in its own way.
        _program = os.path.basename(sys.argv[0] if sys.argv else "")
        if _program == "-m" and "-m" in sys.orig_argv:  # of a module that Python looks for
            _program = sys.orig_argv[sys.orig_argv.index("-m") + 1].partition(".")[0]
        if _program == "heddle":
            sys.exit(f"heddle: {_why}")
        raise InvalidArgument(_why)
    os.environ["HEDDLE_ENGINE"] = _ENGINES[_name]

from . import _core  # noqa: E402


def _file_name(call: str, fname: "str | bytes | os.PathLike") -> str:
    """The name of a file for the C++ half, which takes UTF-8."""
    try:
        name = os.fsdecode(fname)
    except TypeError as error:
        raise InvalidType(f"{call}: expected the name of a file, got {type(fname).__name__}") from error
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{call}: expected a file name that UTF-8 has, got {name!r}: {error.reason}") from error
    return name


def _end_at_once(error: BaseException) -> NoReturn:
    """Shows what left the interpreter's exit, such as Ctrl-C, and ends the process, as one that failed, or as `sys.exit` of
    a signal's handler says: nobody is to wait for what is pending. With Python functions on other threads the interpreter
    cannot end in order."""
    status = 130 if isinstance(error, KeyboardInterrupt) else 1
    try:
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        elif error.code is None or isinstance(error.code, int):
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a reader of the output may be gone
        os._exit(status)


def _finish() -> None:
    try:
        _core.finish()
    except BaseException as error:
        _end_at_once(error)


atexit.register(_finish)

__all__ = ["Error", "MXNetError"]
