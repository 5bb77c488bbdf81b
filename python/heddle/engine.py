"""The engine: runs functions in the order that the variables which they read and write demand.

    >>> x = mx.nd.zeros((2,))
    >>> def fill():
    ...     print('runs once nothing else uses x')
    >>> mx.engine.push(fill, writes=[x])
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Callable, Iterable

from . import _core
from . import base as _base  # noqa: F401  sets the engine up
from .error import InvalidArgument, InvalidState, InvalidType

Var = _core.Var

_bulk = threading.local()


def push(function: Callable[[], object], reads: Iterable = (), writes: Iterable = (), priority: int = 0,
         name: str = "python") -> None:
    """Queues function(), which takes no arguments, and returns at once.

    `reads` and `writes` are arrays and variables, or one: the function runs after the writes of what it reads and
    the reads and writes of what it writes that were pushed before, and before those pushed later. A name
    in both lists means that it modifies it, in `writes` alone that it overwrites it whole. The function
    runs on some thread and must not wait for arrays; what it raises comes back at every wait that depends on
    it. A higher priority runs first. Use few different names.
    """
    _core.push(function, _listed(reads), _listed(writes), priority, name)


def _listed(named):
    """One array is not its rows."""
    return [named] if isinstance(named, (_core.Array, _core.RowSparse, _core.Var)) else named


def new_var(name: str = "") -> "Var":
    """A variable of its own, for `push`."""
    return _core.new_var(name)


def waitall(timeout: "float | None" = None) -> None:
    """Waits for everything pushed so far; TimeoutError after `timeout` seconds. Raises the earliest error that no waitall
    has raised yet."""
    _core.waitall(timeout)


def set_bulk_size(size: int) -> int:
    """Returns the former size. Ops are cheap enough here that none are put together, whatever the size."""
    former = getattr(_bulk, "size", 0)
    try:
        _bulk.size = int(size)
    except (TypeError, ValueError) as error:
        raise InvalidType(f"set_bulk_size: expected a number of ops, got {size!r}") from error
    except OverflowError as error:
        raise InvalidArgument(f"set_bulk_size: expected a number of ops, got {size!r}") from error
    return former


@contextlib.contextmanager
def bulk(size: int):
    """Sets the bulk size for a block."""
    former = set_bulk_size(size)
    try:
        yield
    finally:
        set_bulk_size(former)


_TYPES = {"naiveengine": "serial", "serial": "serial", "threadedengine": "threaded",
          "threadedengineperdevice": "threaded", "threaded": "threaded", "seeded": "seeded"}


def set_type(name: str) -> None:
    """Chooses the engine before its first use: 'threaded', or for debugging 'serial' ('NaiveEngine'), which
    runs each op in the call that pushes it, or 'seeded'."""
    wanted = _TYPES.get(name.lower()) if isinstance(name, str) else None
    if wanted is None:
        raise InvalidArgument(f"expected an engine of {', '.join(_TYPES)}, got {name!r}")
    former = os.environ.get("HEDDLE_ENGINE")
    os.environ["HEDDLE_ENGINE"] = wanted
    if engine_type() != wanted:
        if former is None:
            del os.environ["HEDDLE_ENGINE"]
        else:
            os.environ["HEDDLE_ENGINE"] = former
        raise InvalidState(f"the engine is {engine_type()} already: choose it before its first use")


def engine_type() -> str:
    """The type of the engine: 'threaded', 'serial' or 'seeded'. Starts it."""
    return _core.engine_type()


def dump_state() -> str:
    """Every pending op, a line each: its name, state and variables, and whom it waits for."""
    return _core.dump_state()


def stats() -> "dict[str, int]":
    """Counts of ops: pushed, done, failed, running; pending_bytes; late_completions, which are calls of a completion
    after its first."""
    return _core.engine_stats()
