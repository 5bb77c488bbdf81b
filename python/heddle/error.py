"""The exceptions that heddle raises.

All derive from :class:`Error`; those for which Python has a class of its own derive from that too, so
``except ValueError`` and ``except heddle.Error`` both work. Errors of Python code that heddle calls
(an updater, an op) come back as they are.
"""

import builtins
import contextlib
import sys
import types
from typing import Any


class Error(RuntimeError):
    """The base of all errors of heddle."""

    __str__ = BaseException.__str__  # that of KeyError shows the message in quotes


class InvalidArgument(Error, ValueError):
    """Something was passed that cannot work; nothing was changed."""


class InvalidType(InvalidArgument, TypeError):
    """An argument has a type that is not expected there; nothing was changed."""


class UnknownKey(InvalidArgument, KeyError):
    """The store does not have the key; nothing was changed."""


class InvalidState(Error):
    """The call cannot work now: a wait inside an op, or the engine has stopped."""


class AccessError(Error):
    """An op touched an array that it does not name."""


class TimeoutError(Error, builtins.TimeoutError):
    """A deadline passed."""


class OutOfMemory(Error, MemoryError):
    """The cap of heddle's memory, or the machine's memory, is exhausted."""


class IoError(Error, OSError):
    """A file could not be read, written or understood."""


class NetworkError(Error, ConnectionError):
    """A peer could not be reached, or what it sent makes no sense."""


class CudaError(Error):
    """A call of the CUDA runtime failed, or a GPU reported an error."""


class NcclError(Error):
    """A call of NCCL failed, or NCCL is not there."""


class OpError(Error):
    """An asynchronous op ended without a result."""


MXNetError = Error


# An exception of an op is kept by the variables that the op writes, and so by arrays. A frame keeps arrays: by its local
# variables, its function's closure, and the frame that called it. Python would not see that these keep each other alive.

_SUSPENDED = (lambda: (yield)).__code__
_NO_COLUMNS = b"\xef\x00"  # in a table of positions: instructions of the code's first line


def _bare(traceback: "types.TracebackType | None") -> "types.TracebackType | None":
    """The same lines with frames that keep nothing: those of generators that were never resumed."""
    entries = []
    while traceback is not None:
        entries.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    made = None
    for frame, line in reversed(entries):
        code = _SUSPENDED.replace(co_filename=frame.f_code.co_filename, co_name=frame.f_code.co_name,
                                  co_qualname=frame.f_code.co_qualname, co_firstlineno=line, co_linetable=_NO_COLUMNS)
        # With which `traceback` finds the source of modules that are no files.
        names: "dict[str, Any]" = {name: frame.f_globals.get(name) for name in ("__name__", "__loader__")}
        made = types.TracebackType(made, types.FunctionType(code, names)().gi_frame, 0, line)
    return made


def _let_go_of_frames(error: BaseException) -> "types.TracebackType | None":
    """Gives the exception of an op that has ended, and those that led to it, tracebacks whose frames keep nothing; returns
    its own."""
    outer = sys.exception()  # what the thread was handling when it waited and so ran the op
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        _set(one, "__traceback__", _bare(one.__traceback__))
        if one.__context__ is outer:
            _set(one, "__context__", None)
        todo += [led for led in (one.__cause__, one.__context__) if led is not None and led is not outer]
        todo += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return error.__traceback__


def _set(error: BaseException, name: str, value: Any) -> None:
    """An attribute of all exceptions, also of those that let none be set."""
    vars(BaseException)[name].__set__(error, value)


def _twin(error: BaseException) -> BaseException:
    """A copy without the traceback, made without code of the program's, such as an __init__ with arguments of its own."""
    builtin: Any = type(error)
    while builtin.__module__ != "builtins":
        builtin = builtin.__base__
    arguments = builtin.__reduce__(error)[1]
    made = builtin.__new__(type(error), *arguments)
    builtin.__init__(made, *arguments)
    made.__dict__.update(error.__dict__)
    for owner in type(error).__mro__:
        for name, member in vars(owner).items():
            if isinstance(member, types.MemberDescriptorType) and name != "obj":  # which may be an array
                with contextlib.suppress(AttributeError, TypeError):  # it is not there, or not to be set
                    value = member.__get__(error)
                    if value is not getattr(made, name, None):
                        member.__set__(made, value)
    return made


def _copy_for_wait(error: BaseException, traceback: "types.TracebackType | None") -> BaseException:
    """What one of the waits for a failed op raises: its frames get into the traceback of this copy alone."""
    try:
        made = _twin(error)
        for name in ("__cause__", "__context__", "__suppress_context__"):
            _set(made, name, getattr(error, name))
        if "__notes__" in error.__dict__:
            made.__dict__["__notes__"] = list(error.__notes__)
    except Exception:  # noqa: BLE001  of a class that is not written in Python
        made = error
    _set(made, "__traceback__", traceback)
    return made
