"""KVStore: values under keys, shared by devices. Gradients are pushed and summed, an updater changes the
stored value, weights are pulled.

    >>> kv = mx.kv.create('device')
    >>> kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
    >>> kv.init('weight', weight)
    >>> kv.push('weight', [gradient0, gradient1])
    >>> kv.pull('weight', out=[weight0, weight1])
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import warnings
import weakref
from typing import Any, Callable, Literal, TypeVar, overload

from .. import _core
from .. import base as _base
from ..error import InvalidArgument, InvalidState, InvalidType

__all__ = ["BytePS", "Horovod", "KVStore", "KVStoreBase", "TestStore", "create", "new_nccl_id", "types"]


_LIBRARY_TYPES = frozenset(_core.kvstore_types())  # once: a child of fork() may import classes of stores, too
_Class = TypeVar("_Class", bound=type)
_Builtin = Literal["local", "device", "dist", "dist_sync", "dist_async", "dist_device_sync", "dist_device_async",
                   "dist_sync_device", "dist_async_device"]


class KVStoreBase:
    """The interface of all stores. A store of your own derives from it and registers by its class:

        >>> @mx.kv.KVStoreBase.register
        ... class MyStore(mx.kv.KVStoreBase):
        ...     ...
        >>> kv = mx.kv.create('mystore')
    """

    OPTIMIZER = "optimizer"
    kv_registry: dict = {}

    def broadcast(self, key, value, out, priority: int = 0) -> None:
        """Copies the value of rank 0 to `out` at all ranks."""
        raise NotImplementedError(f"{type(self).__name__} has no broadcast")

    def pushpull(self, key, value, out=None, priority: int = 0) -> None:
        """Sums the values of all ranks and devices and writes the result to `out`, or to `value`."""
        raise NotImplementedError(f"{type(self).__name__} has no pushpull")

    def set_optimizer(self, optimizer) -> None:
        """Later pushes update the stored values by the optimizer."""
        raise NotImplementedError(f"{type(self).__name__} has no set_optimizer")

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do something: 'optimizer'."""
        raise NotImplementedError("the store does not say what it is capable of")

    def save_optimizer_states(self, fname, dump_optimizer: bool = False) -> None:
        """Writes what the optimizer keeps for the keys to a file."""
        raise NotImplementedError(f"{type(self).__name__} has no save_optimizer_states")

    def load_optimizer_states(self, fname) -> None:
        """Takes the states of a file."""
        raise NotImplementedError(f"{type(self).__name__} has no load_optimizer_states")

    @property
    def type(self) -> str:
        """The name of the store's type."""
        raise NotImplementedError(f"{type(self).__name__} has no type")

    @property
    def rank(self) -> int:
        """The rank of this worker, from 0."""
        raise NotImplementedError(f"{type(self).__name__} has no rank")

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        raise NotImplementedError(f"{type(self).__name__} has no num_workers")

    @staticmethod
    def register(klass: "_Class") -> "_Class":
        """Makes `create` know a class by its name; case does not matter. Returns the class."""
        if not isinstance(klass, type):
            raise InvalidType(f"register: expected a class, got {klass!r}")
        name = klass.__name__.lower()
        if name in KVStoreBase.kv_registry or name in _LIBRARY_TYPES:
            warnings.warn(f"the store {name!r} is replaced by {klass.__module__}.{klass.__qualname__}")
        KVStoreBase.kv_registry[name] = klass
        return klass


class KVStore(_core.KVStore, KVStoreBase):
    """A store of the C++ library: 'local', 'device', 'nccl' or one of the dist types. Made by `create`.

    Per key, calls take effect in program order: a push after all earlier pushes and pulls of the key, a pull
    after all earlier ones, and it returns the newest value. A pushed array may be overwritten right after. The
    store never shows the caller's arrays.

    Keys are str or int, one kind a store. Lists of keys take lists of values, or lists of lists.
    """

    _updater: Any = None
    _optimizer: Any = None

    def set_optimizer(self, optimizer) -> None:
        """Later pushes update the stored values by the optimizer; later changes of its parameters count from
        the next push on. An optimizer written in Python runs on the thread that pushes, or, in a dist store, on
        servers whose module registers its class."""
        from .. import optimizer as _optimizer

        if not isinstance(optimizer, _optimizer.Optimizer):
            raise InvalidType(f"set_optimizer: expected an Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, _optimizer._Native) and optimizer._runs_in_store() and optimizer._has_native_rates():
            self._set_native_optimizer(optimizer._native)
            optimizer._stores.add(self)
            self._updater = None
        elif self.type.startswith("dist"):
            former = optimizer._native
            try:
                self._set_native_optimizer(optimizer._for_servers())
            except BaseException:
                optimizer._native = former  # what the servers do not have must not refuse changes
                raise
            self._updater = None
        else:
            self._set_updater(_optimizer.get_updater(optimizer))
        self._optimizer = optimizer

    def _set_updater(self, updater: Callable) -> None:
        """Later pushes call updater(key, input, stored), on the thread that pushes, in place of replacing the
        stored value. What it raises leaves the push."""
        if not callable(updater):
            raise InvalidType(f"_set_updater: expected a function, got {type(updater).__name__}")
        if self.type.startswith("dist"):
            raise InvalidState(f"_set_updater: stores of type {self.type} update on their servers: expected set_optimizer, which "
                               "names an optimizer for them")
        from .. import optimizer as _optimizer

        # An Updater sees to its states.
        if isinstance(updater, _optimizer.Updater) and type(updater).__call__ is _optimizer.Updater.__call__:
            super()._set_updater(updater._update_stored)
        else:
            super()._set_updater(updater)
        self._updater = updater

    set_updater = _set_updater

    def set_gradient_compression(self, compression_params: dict) -> None:
        """{'type': '2bit', 'threshold': 0.5}, or '1bit': later pushes are sent in that many bits an element;
        what these cannot carry is added to the next push."""
        if not isinstance(compression_params, dict):
            raise InvalidType("set_gradient_compression: expected a dict, got "
                              f"{type(compression_params).__name__}")
        given = dict(compression_params)
        if "type" not in given:
            raise InvalidArgument("set_gradient_compression: expected 'type', one of "
                                  f"{', '.join(_core.compression_types())}")
        kind = given.pop("type")
        threshold = given.pop("threshold", 0.5)
        if given:
            raise InvalidArgument("set_gradient_compression: expected 'type' and 'threshold', got "
                                  f"{', '.join(map(repr, given))} too")
        try:
            number = float(threshold)
        except (TypeError, ValueError) as error:
            raise InvalidType(f"set_gradient_compression: expected a number as threshold, got {threshold!r}"
                              ) from error
        except OverflowError as error:
            raise InvalidArgument(f"set_gradient_compression: expected a threshold that a float can hold: {error}") from error
        self._set_gradient_compression(str(kind), number)

    def save_optimizer_states(self, fname: "str | bytes | os.PathLike", dump_optimizer: bool = False) -> None:
        """Writes what the optimizer keeps for the keys, and with dump_optimizer its parameters, to a file."""
        updater, name = self._updater, _base._file_name("save_optimizer_states", fname)
        if hasattr(updater, "_save"):
            updater._save(name, dump_optimizer, self.keys())
        else:
            self._save_native_states(name, dump_optimizer)

    def load_optimizer_states(self, fname: "str | bytes | os.PathLike") -> None:
        """Takes the states of a file in place of those that are; the optimizer has to be set already."""
        updater, name = self._updater, _base._file_name("load_optimizer_states", fname)
        if hasattr(updater, "_load"):
            updater._load(name, self.keys(), self._forms())
            return
        if self._optimizer is None:
            self._load_native_states(name)
            return
        with self._optimizer._following_native():
            self._load_native_states(name)

    def reset(self, key, value) -> None:
        """Overwrites the value of a key that is there, cures it of an error and forgets its optimizer state."""
        super().reset(key, value)
        self._forget(key)

    def remove(self, key) -> None:
        """Takes a key out of the store."""
        super().remove(key)
        self._forget(key)

    def _forget(self, key) -> None:
        if hasattr(self._updater, "_forget"):
            self._updater._forget(key)

    def _barrier(self) -> None:
        """Returns when all workers have called it."""
        self.barrier()

    def __contains__(self, key) -> bool:
        return self.contains(key)

    def __repr__(self) -> str:
        try:
            return f"<heddle.kvstore.KVStore {self.type!r}>"
        except InvalidState:
            return "<heddle.kvstore.KVStore, closed>"


def _is_array(one) -> bool:
    return isinstance(one, (_core.Array, _core.RowSparse))


def _arrays(call: str, key, value) -> list:
    """Those of a key: one at least."""
    arrays = list(value) if isinstance(value, (list, tuple)) else [value]
    if not arrays:
        raise InvalidArgument(f"{call}: key {key!r}: expected one array at least, got none")
    for one in arrays:
        if not _is_array(one):
            raise InvalidType(f"{call}: key {key!r}: expected an NDArray, a RowSparseNDArray or a list of them, got "
                              f"{type(one).__name__}")
    return arrays


def _copy(key, value, out) -> None:
    """What `broadcast` does where there is one rank."""
    if not _is_array(value):
        raise InvalidType(f"broadcast: key {key!r}: expected an NDArray or a RowSparseNDArray, got {type(value).__name__}")
    for one in _arrays("broadcast", key, out):
        if one is not value:
            value.copyto(one)


class TestStore(KVStoreBase):
    """Keeps nothing and sums what it gets: for tests of training code."""

    def broadcast(self, key, value, out, priority: int = 0) -> None:
        _copy(key, value, out)

    def pushpull(self, key, value, out=None, priority: int = 0) -> None:
        values = _arrays("pushpull", key, value)
        targets = values if out is None else _arrays("pushpull", key, out)
        total = values[0].copy()
        for one in values[1:]:
            total += one.as_in_context(total.context)
        for one in targets:
            total.copyto(one)

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False

    @property
    def type(self) -> str:
        return "teststore"

    @property
    def rank(self) -> int:
        return 0

    @property
    def num_workers(self) -> int:
        return 1


class _Adapter(KVStoreBase):
    """A store that hands all work to another package."""

    _package = ""

    def __init__(self) -> None:
        try:
            self._module = importlib.import_module(self._package)
        except ImportError as error:
            name = type(self).__name__.lower()
            raise InvalidState(f"create({name!r}): the package {self._package!r} cannot be imported: {error}"
                               ) from error
        self._module.init()

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False

    @property
    def type(self) -> str:
        return type(self).__name__.lower()

    @property
    def rank(self) -> int:
        return self._module.rank()

    @property
    def local_rank(self) -> int:
        """The rank among the workers of this machine."""
        return self._module.local_rank()

    @property
    def num_workers(self) -> int:
        return self._module.size()


class Horovod(_Adapter):
    """Sums by Horovod's allreduce, through torch tensors that share the arrays' memory."""

    _package = "horovod.torch"

    def broadcast(self, key, value, out, priority: int = 0) -> None:
        _copy(key, value, out)
        for one in _arrays("broadcast", key, out):
            _through_torch(one, lambda tensor: self._module.broadcast_(tensor, root_rank=0, name=str(key)))

    def pushpull(self, key, value, out=None, priority: int = 0) -> None:
        for one, target in _with_targets(key, value, out):
            if target is not one:
                one.copyto(target)
            _through_torch(target, lambda tensor: self._module.allreduce_(
                tensor, op=self._module.Sum, name=str(key)))


class BytePS(_Adapter):
    """Sums by BytePS's push_pull, through torch tensors that share the arrays' memory."""

    _package = "byteps.torch"

    def broadcast(self, key, value, out, priority: int = 0) -> None:
        _copy(key, value, out)
        for one in _arrays("broadcast", key, out):
            if self.rank != 0:
                one[:] = 0
            self._sum(key, one, priority)

    def pushpull(self, key, value, out=None, priority: int = 0) -> None:
        for one, target in _with_targets(key, value, out):
            if target is not one:
                one.copyto(target)
            self._sum(key, target, priority)

    def _sum(self, key, array, priority: int) -> None:
        def push_pull(tensor):
            handle = self._module.byteps_push_pull(tensor, average=False, name=f"heddle_{key}", priority=priority)
            self._module.synchronize(handle)

        _through_torch(array, push_pull)


def _with_targets(key, value, out) -> list:
    values, targets = _arrays("pushpull", key, value), _arrays("pushpull", key, value if out is None else out)
    if len(values) != len(targets):
        raise InvalidArgument(f"pushpull: expected as many outputs as values, got {len(targets)} for {len(values)}")
    return list(zip(values, targets))


def _through_torch(array, function: Callable) -> None:
    import torch

    function(torch.from_dlpack(array))


KVStoreBase.kv_registry.update(teststore=TestStore, horovod=Horovod, byteps=BytePS)


def types() -> list:
    """The names that `create` knows."""
    return sorted({*_core.kvstore_types(), *KVStoreBase.kv_registry})


def new_nccl_id() -> str:
    """The value of HEDDLE_NCCL_ID for one store 'nccl' of each process that has no scheduler. The process with
    HEDDLE_NCCL_RANK 0 calls it, lives on, and hands it to the others."""
    return _core.new_nccl_id()


_dist_stores: list = []  # weak references; of a job


def _live_dist_stores() -> "list[KVStore]":
    return [store for store in (reference() for reference in _dist_stores) if store is not None]


_exiting: tuple = ()  # the last sys.exit: its status, the frame of the program and where that was, the calling frame


def _serve_unless_worker() -> None:
    """In a process of another role: serves until the job ends, then exits. So one script serves all roles."""
    role = _core.dist_role()
    if role == "worker":
        return
    from .. import server as _server

    _server.run(role)
    sys.exit(0)


def _end_in_order() -> None:
    """At exit stores are closed, while there is an engine, and the worker leaves the job when the process ends with
    status 0: an orderly end before that would tell the others that it has finished. After an uncaught exception, or a
    sys.exit with another status, what the stores still wait for is given up, and the others are told why; so it is
    when Ctrl-C ends that wait."""
    if _dist_stores:
        return
    plain_exit = sys.exit

    # Where nobody catches its SystemExit, the program's frame stays where it is. Frames keep their variables, and so
    # stores, until `leave` has looked.
    def exit(status=None, /):
        global _exiting
        if threading.current_thread() is threading.main_thread():
            program = innermost = sys._getframe(1)
            while program.f_back is not None:
                program = program.f_back
            _exiting = (status, program, program.f_lasti, innermost)
        plain_exit(status)

    def is_uncaught():
        # The interpreter has shown an exception, by whatever sys.excepthook, that left the program's own frame. Consoles
        # set this too, of exceptions that left less, and an interactive interpreter goes on after it.
        trace = getattr(sys, "last_traceback", None)
        return trace is not None and trace.tb_frame.f_back is None and not hasattr(sys, "ps1")

    def in_words(thing):
        # What the program raised may be anything.
        try:
            return str(thing).encode("utf-8", "backslashreplace").decode()
        except Exception as error:
            return f"(its text raised {type(error).__name__})"

    def failure():
        # The status, and why; 0: none.
        if is_uncaught():
            error = sys.last_value
            text = in_words(error)
            return 1, f"its program ended by an uncaught exception: {type(error).__qualname__}" + (text and f": {text}")
        if not _exiting or _exiting[1].f_lasti != _exiting[2] or _exiting[0] is None:
            return 0, ""
        if isinstance(_exiting[0], int):
            return _exiting[0] & 0xFF, f"its process exited with status {_exiting[0] & 0xFF}"
        return 1, f"its process exited with status 1: {in_words(_exiting[0])}"

    process = os.getpid()

    def leave():
        global _exiting
        if os.getpid() != process:  # a child of fork(), whose job this is not
            return
        stores = _live_dist_stores()
        status, why = failure()
        if stores and status:
            sys.stdout.flush()
            sys.stderr.flush()
            _core.fail_worker(why)
            if is_uncaught() and isinstance(sys.last_value, KeyboardInterrupt):  # as Python itself ends then
                import signal  # here: heddle loads little

                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(status)
        _exiting = ()
        try:
            _core.leave_at_process_exit()
            for store in stores:
                store.close()
        except BaseException as error:  # of a signal handler
            _core.fail_worker(f"its exit was interrupted: {type(error).__qualname__}")
            _base._end_at_once(error)

    sys.exit = exit
    atexit.register(leave)


@overload
def create(name: "_Builtin" = "local", strict_init: bool = False) -> KVStore: ...
@overload
def create(name: str, strict_init: bool = False) -> Any: ...
def create(name: str = "local", strict_init: bool = False) -> Any:
    """Makes a store by the name of its type; case does not matter.

    local      sums and updates on the CPU
    device     sums and updates on the devices that hold the values
    nccl       the same on GPUs, by NCCL: of this process, of all workers of a job, or of those with one HEDDLE_NCCL_ID
    teststore  keeps nothing and sums what it gets
    dist_sync, dist_async, dist_device_sync, dist_device_async
               over the servers of a job; in a process whose role is server or scheduler this call serves until the
               job ends and then exits

    and the names of registered classes. With strict_init a push never creates a key.
    """
    if not isinstance(name, str):
        raise InvalidType(f"create: expected the name of a type, got {type(name).__name__}")
    klass = KVStoreBase.kv_registry.get(name.lower())
    if klass is not None:
        return klass()
    if name.lower() not in _core.kvstore_types():
        raise InvalidArgument(f"unknown type of store {name!r}: expected one of {', '.join(types())}")
    if not (name.lower().startswith("dist") or name.lower() == "nccl" and _core.nccl_spans_job()):
        return KVStore(name, strict_init)
    _serve_unless_worker()
    _end_in_order()
    store = KVStore(name, strict_init)
    _dist_stores.append(weakref.ref(store))
    return store


from . import base  # noqa: E402, F401  where MXNet has it
