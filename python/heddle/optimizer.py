"""Optimizers: how a store changes a value by the gradients pushed to it.

    >>> kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    >>> opt = mx.optimizer.create('adam', learning_rate=0.01)

The built-in ones run inside the store. One written in Python derives from :class:`Optimizer`, overrides
``create_state`` and ``update``, and runs on the thread that pushes; in a job, on servers whose module registers it
(``heddle server --module``). docs/optimizers.md has all formulas.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import numbers
import os
import threading
import warnings
import weakref
from typing import Any, Callable, Iterable, Iterator, TypeVar

from . import _core
from . import dtype as _dtype
from . import lr_scheduler as _schedulers
from . import nd as _nd
from .error import InvalidArgument, InvalidState, InvalidType, IoError

__all__ = ["Optimizer", "Updater", "create", "get_updater", "register"]


_Class = TypeVar("_Class", bound=type)
_RATES = {"lr": "learning_rate", "wd": "weight_decay"}
_NUMBERS_OF_BASE = ("lr", "wd", "rescale_grad", "begin_num_update", "multi_precision")
_NOT_FOR_SERVERS = ("begin_num_update", "num_update")  # which count by themselves
# Attributes that say by what the rates of a key are multiplied.
_OF_NUMBERS = ("lr_mult", "wd_mult")
_OF_MULTIPLIERS = (*_OF_NUMBERS, "param_dict", "idx2name")


def _nearest(name: str, known: "Iterable[str]", least: float) -> "list[str]":
    """The known name that is most like another, if they are alike by `least` (0 to 1): what may have been meant."""
    import difflib  # here, since importing it takes time that only misspelt names should cost

    return difflib.get_close_matches(name, known, 1, least)


_updated = threading.local()  # device_id: of the weight that this thread updates


@contextlib.contextmanager
def _counted_on(device_id: int):
    """Updates in the block are counted on a device."""
    former = getattr(_updated, "device_id", 0)
    _updated.device_id = device_id
    try:
        yield
    finally:
        _updated.device_id = former


def _is_half(weight) -> bool:
    return weight.dtype in (_nd.numpy.float16, "bfloat16")


def _check_sparse_pair(call: str, grad, weight) -> None:
    if isinstance(weight, _core.RowSparse) and not isinstance(grad, _core.RowSparse):
        raise InvalidType(f"{call}: expected a row_sparse gradient for a row_sparse weight, got a dense one")


def _check_symbol(sym) -> None:
    if sym is not None:
        raise InvalidType(f"sym: expected None, since there are no symbols, got {type(sym).__name__}")


def _check_scheduler(scheduler) -> None:
    if scheduler is not None and not callable(scheduler):
        raise InvalidType(f"lr_scheduler: expected a scheduler, got {scheduler!r}")


def _set_base(scheduler, rate: float) -> None:
    try:
        scheduler.base_lr = rate
    except AttributeError as error:
        raise InvalidType(f"lr_scheduler: expected a scheduler, whose base_lr the learning_rate is, got {scheduler!r}") from error


def _check_schedule_of_servers(call: str, scheduler) -> None:
    if scheduler is not None and not _schedulers._is_native(scheduler):
        raise InvalidState(f"{call}: the scheduler of a store with servers runs in the store: expected one of "
                           f"heddle.lr_scheduler, got {type(scheduler).__name__}")


# Held while a table of any optimizer changes, is checked and told of. One for all, since copies, pickles and forked children
# need none of their own then; again by the same thread, whose signal handlers and finalizers may change tables too.
_changes = threading.RLock()


def _renew_changes() -> None:
    global _changes
    _changes = threading.RLock()


os.register_at_fork(after_in_child=_renew_changes)  # another thread may have held it, and is not there


def _telling(name: str) -> "Callable":
    """A method of dict's that tells the owner of what it has changed."""
    method = getattr(dict, name)

    @functools.wraps(method)
    def change(self, *arguments, **named):
        with _changes:
            former = dict(self)
            try:
                result = method(self, *arguments, **named)
                self._tell(former)
            except BaseException:
                self._take_back(former)
                self._tell_again()
                raise
            return result

    return change


class _Table(dict):
    """A table of an optimizer that says by what rates are multiplied: a change counts from the next push on, as one of
    the attribute. Copies are plain dicts."""

    def __init__(self, owner: "Optimizer", name: str, items) -> None:
        try:
            super().__init__({} if items is None else items)
        except (TypeError, ValueError) as error:
            raise InvalidType(f"{name}: expected a dict, got {items!r}") from error
        self._owner, self._name = weakref.ref(owner), name
        self._check()

    def _check(self) -> None:
        if None in self:
            raise InvalidType(f"{self._name}: expected keys of type str or int, got None")
        if self._name in _OF_NUMBERS and not all(isinstance(one, numbers.Real) for one in self.values()):
            raise InvalidType(f"{self._name}: expected a dict of numbers, got {dict(self)!r}")
        if self._name == "param_dict":
            for one in self.values():
                if not all(isinstance(getattr(one, name, None), numbers.Real) for name in _OF_NUMBERS):
                    raise InvalidType("param_dict: expected objects with numbers as lr_mult and wd_mult, got "
                                      f"{type(one).__name__}")

    def _changed(self, former: dict) -> set:
        """The keys that are, or were, of another value."""
        missing = object()
        return {key for key in {**former, **self} if former.get(key, missing) is not self.get(key, missing)}

    def _tell(self, former: dict) -> None:
        self._check()
        owner = self._owner()
        if owner is not None and vars(owner).get(self._name) is self:
            owner._send_multipliers(self._changed(former))

    def _take_back(self, former: dict) -> None:
        """Only what has changed: other threads may read the rest meanwhile."""
        for key in self._changed(former):
            if key in former:
                dict.__setitem__(self, key, former[key])
            else:
                dict.__delitem__(self, key)

    def _tell_again(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner._send_multipliers()

    def __reduce__(self):
        return dict, (dict(self),)

    __copy__ = dict.copy


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(_Table, _name, _telling(_name))


class Optimizer:
    """The base of all optimizers.

    One of your own overrides

        create_state(index, weight)             what is kept for a key: None, an NDArray or a tuple of them
        update(index, weight, grad, state)      changes weight, and state, in place

    and calls `_update_count(index)`, `_get_lr(index)` and `_get_wd(index)` for the rates.
    """

    opt_registry: dict = {}
    _native: "_core.Optimizer | None" = None  # what a store of the C++ library has of it
    num_update: int

    def __init__(self, rescale_grad: float = 1.0, param_idx2name: "dict | None" = None, wd: float = 0.0,
                 clip_gradient: "float | None" = None, learning_rate: "float | None" = None,
                 lr_scheduler: "_schedulers.LRScheduler | None" = None, sym: None = None, begin_num_update: int = 0,
                 multi_precision: bool = False, param_dict: "dict | None" = None) -> None:
        _check_symbol(sym)
        _check_scheduler(lr_scheduler)
        self.rescale_grad = rescale_grad
        self.wd = wd
        self.clip_gradient = clip_gradient
        self.multi_precision = multi_precision
        self.begin_num_update = begin_num_update
        self._take_counts({}, begin_num_update)
        self.idx2name: dict = param_idx2name or {}
        self.param_dict: dict = param_dict or {}
        self.lr_mult: dict = {}
        self.wd_mult: dict = {}
        self.lr_scheduler = lr_scheduler
        self.lr = 0.01 if learning_rate is None else learning_rate
        if lr_scheduler is not None and learning_rate is not None:
            _set_base(lr_scheduler, learning_rate)

    # What an optimizer of one's own overrides.

    def create_state(self, index, weight):
        """What is kept for a key; here nothing."""
        return None

    def update(self, index, weight, grad, state) -> None:
        """Changes weight and state in place."""
        raise NotImplementedError(f"{type(self).__name__} has no update")

    def create_state_multi_precision(self, index, weight):
        """The same with a float32 copy of a float16 or bfloat16 weight, if multi_precision is set."""
        if self.multi_precision and _is_half(weight):
            master = weight.astype("float32")
            return master, self.create_state(index, master)
        return self.create_state(index, weight)

    def update_multi_precision(self, index, weight, grad, state) -> None:
        """Updates through the float32 copy, if there is one."""
        if self.multi_precision and _is_half(weight):
            master, inner = state
            self.update(index, master, grad.astype("float32"), inner)
            master.copyto(weight)
        else:
            self.update(index, weight, grad, state)

    # Rates.

    @property
    def learning_rate(self) -> float:
        """The rate now."""
        return self.lr if self.lr_scheduler is None else self.lr_scheduler(self.num_update)

    def set_learning_rate(self, lr: float) -> None:
        """Sets the rate; not with a scheduler, which sets it itself."""
        if self.lr_scheduler is not None:
            raise UserWarning("set_learning_rate: the scheduler sets the learning rate")
        self.lr = lr

    def set_lr_mult(self, args_lr_mult: dict) -> None:
        """By what the learning rate of a key, by its index or name, is multiplied."""
        self._set_multipliers("lr_mult", args_lr_mult)

    def set_wd_mult(self, args_wd_mult: dict) -> None:
        """By what the weight decay of a key, by its index or name, is multiplied."""
        self._set_multipliers("wd_mult", args_wd_mult)

    def _set_multipliers(self, attribute: str, table: dict) -> None:
        if not isinstance(table, dict):
            raise InvalidType(f"set_{attribute}: expected a dict of numbers, got {table!r}")
        setattr(self, attribute, table)

    def _set_table(self, name: str, items) -> None:
        """One of _OF_MULTIPLIERS."""
        with _changes:
            former = vars(self).get(name)
            object.__setattr__(self, name, _Table(self, name, items))
            try:
                self._send_multipliers()
            except BaseException:  # of what is no key, or no multiplier
                object.__setattr__(self, name, former)
                self._send_multipliers()
                raise

    def _send_multipliers(self, changed: "set | None" = None) -> None:
        """Those of all keys that have, or have had, one of their own, to the native half; only of those that are, or whose
        name is, among `changed`. With _changes held, or before other threads know the optimizer."""
        if self._native is None:
            return
        names, keys = self.idx2name, self._multiplied_keys()
        sent = set(vars(self).get("_multiplied", ()))
        object.__setattr__(self, "_multiplied", sent)  # also if a later one is no key
        for key in keys | sent:
            if changed is None or key in changed or names.get(key) in changed:
                self._native.set_lr_mult(key, self._native_multiplier("lr_mult", key))
                sent.add(key)
                self._native.set_wd_mult(key, self._native_multiplier("wd_mult", key))
        object.__setattr__(self, "_multiplied", keys)

    def _multiplied_keys(self) -> set:
        """Those that have a multiplier of their own, or by their name."""
        named = {*self.lr_mult, *self.wd_mult}
        return {*self.param_dict, *named, *(index for index, name in list(self.idx2name.items()) if name in named)}

    def _native_multiplier(self, attribute: str, key) -> float:
        return float(self._multiplier(getattr(self, attribute), attribute, key))

    def _update_count(self, index) -> None:
        for one in index if isinstance(index, (list, tuple)) else [index]:
            count = self._index_update_count.get(one, self.begin_num_update) + 1
            self._index_update_count[one] = count
            self.num_update = max(self.num_update, count)

    @contextlib.contextmanager
    def _counting(self, index):
        """Counts an update, unless the block raises."""
        former, num_update = self._index_update_count.get(index), self.num_update
        self._update_count(index)
        try:
            yield
        except BaseException:
            if former is None:
                self._index_update_count.pop(index, None)
            else:
                self._index_update_count[index] = former
            self.num_update = max([num_update, *self._counts().values()])  # other threads may have counted
            raise

    # Counts are kept by device: the replicas of a key whose updaters share the optimizer make one step.

    @property
    def _index_update_count(self) -> dict:
        """Those of the device whose weight this thread updates. They begin at the ones that were loaded."""
        tables, device_id = self._all_index_update_counts, getattr(_updated, "device_id", 0)
        if device_id not in tables:
            tables.setdefault(device_id, dict(self._loaded_counts))
        return tables[device_id]

    def _count_of(self, index) -> "int | None":
        """The highest of all devices."""
        tables = (self._loaded_counts, *self._all_index_update_counts.values())
        return max((counts[index] for counts in tables if index in counts), default=None)

    def _counts(self) -> dict:
        tables = (self._loaded_counts, *self._all_index_update_counts.values())
        return {index: self._count_of(index) for counts in tables for index in list(counts)}  # other threads may count

    def _take_counts(self, counts: dict, num_update: "int | None" = None) -> None:
        """Those of a file in place of all; by default num_update is the highest."""
        self._loaded_counts = counts
        self._all_index_update_counts: "dict[int, dict]" = {}
        self.num_update = max([self.begin_num_update, *counts.values()]) if num_update is None else num_update

    def _forget_count(self, index) -> None:
        for counts in (self._loaded_counts, *self._all_index_update_counts.values()):
            counts.pop(index, None)

    def _multiplier(self, table: dict, attribute: str, index) -> float:
        one = self.param_dict.get(index)
        if one is not None:
            return getattr(one, attribute)
        return table.get(index, table.get(self.idx2name.get(index), 1.0))

    def _get_lr(self, index) -> float:
        return self.learning_rate * self._multiplier(self.lr_mult, "lr_mult", index)

    def _get_wd(self, index) -> float:
        return self.wd * self._multiplier(self.wd_mult, "wd_mult", index)

    def _runs_in_store(self) -> bool:
        """Whether it is one of the C++ library, as that has it."""
        return False

    # Copies have a native half of their own, or none until a store asks for it.

    def __getstate__(self) -> dict:
        state = {name: value for name, value in vars(self).items() if name not in ("_native", "_stores")}
        if "_loaded_counts" in state:  # not of a class of one's own that does not make the base
            state["_loaded_counts"] = dict(self._loaded_counts)
            state["_all_index_update_counts"] = {
                device: dict(counts) for device, counts in list(self._all_index_update_counts.items())}
        return state

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._own_tables()

    def _own_tables(self) -> None:
        """Those of a copy tell it of their changes, not the optimizer that it is a copy of."""
        for name in _OF_MULTIPLIERS:
            object.__setattr__(self, name, _Table(self, name, vars(self).get(name)))

    # For servers: their own object of the class is made without arguments and gets the numbers among the attributes.

    def _for_servers(self) -> "_core.Optimizer":
        _check_schedule_of_servers("set_optimizer", self.lr_scheduler)
        name = type(self).__name__.lower()
        if name in _core.optimizer_names():
            raise InvalidArgument(f"set_optimizer: the servers would run the built-in optimizer {name!r} in place of "
                                  f"{type(self).__module__}.{type(self).__qualname__}: expected a class of another name")
        values = [(_RATES.get(name, name), float(value)) for name, value in vars(self).items()
                  if isinstance(value, numbers.Real) and not name.startswith("_") and name not in _NOT_FOR_SERVERS]
        self._native = _core.make_foreign_optimizer(name, values)
        if self.lr_scheduler is not None:
            self.lr_scheduler = self.lr_scheduler
        with _changes:
            self._send_multipliers()
        return self._native

    @contextlib.contextmanager
    def _following_native(self, native: "_core.Optimizer | None" = None):
        """In the block states are loaded, which may bring parameters, a schedule and multipliers to the native half, or
        the one given: after it they are those of the object too."""
        native = self._native if native is None else native
        if native is None:
            yield
            return
        former = _described(native.schedule()), _multipliers_of(native)
        yield
        self._take_parameters(native)
        schedule, multipliers = native.schedule(), _multipliers_of(native)
        if _described(schedule) != former[0]:
            self.lr_scheduler = None if schedule is None else _schedulers._of_native(schedule)
        if multipliers == former[1]:
            return
        with _changes:
            for attribute, place in (("lr_mult", 0), ("wd_mult", 1)):
                # What an index has by its name follows the name.
                table = {key: both[place] for key, both in multipliers.items()
                         if both[place] != 1 and multipliers.get(self.idx2name.get(key)) != both}
                object.__setattr__(self, attribute, _Table(self, attribute, table))
            object.__setattr__(self, "_multiplied", set(multipliers))
            self._send_multipliers()  # those of param_dict count more

    def _take_parameters(self, native: "_core.Optimizer") -> None:
        names = {known: name for name, known in _RATES.items()}
        for known, value in native.parameters():
            name = names.get(known, known)
            object.__setattr__(self, name, _number_like(getattr(self, name, value), value))

    def __setattr__(self, name: str, value) -> None:
        if name in _OF_MULTIPLIERS:
            self._set_table(name, value)
            return
        if self._native is not None and not name.startswith("_") and name not in _NOT_FOR_SERVERS:
            self._send_to_servers(name, value)
        object.__setattr__(self, name, value)

    def _send_to_servers(self, name: str, value) -> None:
        """An attribute that is about to change. The servers have those that were numbers when they got the optimizer."""
        assert self._native is not None
        known = _RATES.get(name, name)
        if name == "lr_scheduler":
            _check_schedule_of_servers(name, value)
            self._native.set_schedule(None if value is None else value._schedule())
        elif known in dict(self._native.parameters()):
            if not isinstance(value, numbers.Real):
                raise InvalidType(f"{name}: expected a number, which the servers have of it, got {value!r}")
            self._set_native(name, known, float(value))
        elif isinstance(value, numbers.Real) and not hasattr(getattr(type(self), name, None), "__set__"):
            raise InvalidState(f"{name}: the servers have got none by set_optimizer: expected it before, got {value!r} now: "
                               "set it on a copy (copy.copy), for another set_optimizer")

    def _set_native(self, name: str, known: str, value: float) -> None:
        """A parameter, by its name here and in the library."""
        assert self._native is not None
        if known == "learning_rate" and self._native.schedule() is not None:
            raise InvalidState(f"{name}: expected no lr_scheduler, which sets the learning rate, got {value!r}")
        self._native.set(known, value)

    def _has_native_rates(self) -> bool:
        """Whether the native half knows the rates without asking."""
        return self.lr_scheduler is None or _schedulers._is_native(self.lr_scheduler)

    # The registry.

    @staticmethod
    def register(klass: "_Class") -> "_Class":
        """Makes `create` know a class by its name; case does not matter. Returns the class."""
        if not isinstance(klass, type):
            raise InvalidType(f"register: expected a class, got {klass!r}")
        name = klass.__name__.lower()
        if name in Optimizer.opt_registry:
            warnings.warn(f"the optimizer {name!r} is replaced by {klass.__module__}.{klass.__qualname__}")
        Optimizer.opt_registry[name] = klass
        return klass

    @staticmethod
    def create_optimizer(name: str, **kwargs) -> "Optimizer":
        """The same as the module's `create`."""
        if not isinstance(name, str):
            raise InvalidType(f"create: expected the name of an optimizer, got {type(name).__name__}")
        klass = Optimizer.opt_registry.get(name.lower())
        if klass is None:
            known = sorted(Optimizer.opt_registry)
            nearest = _nearest(name.lower(), known, 0)
            raise InvalidArgument(f"unknown optimizer {name!r}: did you mean {nearest[0]!r}? Expected one of "
                                  f"{', '.join(known)}")
        return klass(**kwargs)


register = Optimizer.register
create = Optimizer.create_optimizer

# What a class of one's own overrides: updates run in Python then, or it is asked for the rates of each.
_UPDATES = ("create_state", "update", "create_state_multi_precision", "update_multi_precision")
_ASKED = ("learning_rate", "_get_lr", "_get_wd")
_STRATEGIES = ("linear", "power2", "sqrt", "lars")
_STATES_VERSION = 2  # of files of optimizers written in Python
# What scripts call the parameters, and what the C++ library calls them.
_RENAMED = {**_RATES, "eps": "epsilon", "float_stable_eps": "epsilon"}
_NONE_IF_OFF = ("clip_gradient", "clip_weights", "lower_bound", "upper_bound")  # the library says 0

# Those that are on or off; the library says 1 or 0.
_SWITCHES = ("bias_correction", "centered", "correct_bias", "lazy_update", "momentum_correction", "multi_precision")
_OF_BASE = ("rescale_grad", "wd", "clip_gradient", "multi_precision")  # which scripts may pass to any, as None


class _Native(Optimizer):
    """An optimizer of the C++ library. Its parameters are attributes, which may be set at any time."""

    _name = ""
    _native: "_core.Optimizer"

    # By name alone: the versions of MXNet do not agree which parameter comes first.
    def __init__(self, *, learning_rate: "float | None" = None, lr_scheduler=None, param_idx2name: "dict | None" = None,
                 sym: None = None, begin_num_update: int = 0, param_dict: "dict | None" = None, **parameters) -> None:
        _check_symbol(sym)
        _check_scheduler(lr_scheduler)
        self._check_names(parameters)
        given = []
        for name, value in parameters.items():
            value = self._number(name, value)
            if value is not None:
                given.append((_RENAMED.get(name, name), value))
        rate = self._number("learning_rate", learning_rate)
        if rate is not None:
            given.append(("learning_rate", rate))
        self._check_begin(begin_num_update)
        native = _core.make_optimizer(self._name, given)
        object.__setattr__(self, "_native", native)
        object.__setattr__(self, "_parameters", {name for name, _ in native.parameters()})
        set_ = object.__setattr__
        set_(self, "begin_num_update", begin_num_update)
        self._take_counts({})
        set_(self, "_stores", weakref.WeakSet())
        set_(self, "idx2name", param_idx2name)
        set_(self, "param_dict", param_dict)
        self._own_tables()
        set_(self, "lr_scheduler", None)
        self._send_multipliers()
        if lr_scheduler is not None:
            if learning_rate is not None:
                _set_base(lr_scheduler, learning_rate)
            self.lr_scheduler = lr_scheduler

    def _check_names(self, parameters: dict) -> None:
        own = {name for name, _ in _core.make_optimizer(self._name, []).parameters()}
        for name, value in parameters.items():
            if _RENAMED.get(name, name) in own or (value is None and name in _OF_BASE):
                continue
            aliases = {alias for alias, parameter in _RENAMED.items() if parameter in own}
            known = sorted({*own, *aliases, "begin_num_update", "lr_scheduler", "param_dict", "param_idx2name"})
            raise InvalidArgument(f"optimizer {self._name}: unknown parameter {name!r}: did you mean "
                                  f"{_nearest(name, known, 0)[0]!r}? Expected one of {', '.join(known)}")

    @staticmethod
    def _number(name: str, value) -> "float | None":
        if value is None:
            return None
        if name == "warmup_strategy" and isinstance(value, str):
            if value not in _STRATEGIES:
                raise InvalidArgument(f"warmup_strategy: expected one of {', '.join(_STRATEGIES)}, got {value!r}")
            return float(_STRATEGIES.index(value))
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise InvalidType(f"{name}: expected a number, got {value!r}") from error
        except OverflowError as error:
            raise InvalidArgument(f"{name}: expected a number that a float can hold: {error}") from error

    def _check_begin(self, begin_num_update) -> None:
        if begin_num_update:
            raise InvalidArgument(f"optimizer {self._name}: expected begin_num_update 0, got {begin_num_update!r}: to go on, "
                                  "load the states, which count the updates")

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        known = _RENAMED.get(name, name)
        if known not in self._parameters:
            raise AttributeError(f"{type(self).__name__} has no parameter {name!r}: it has "
                                 f"{', '.join(sorted(self._parameters))}")
        value = self._native.get(known)
        if known in _SWITCHES:
            return bool(value)
        return None if known in _NONE_IF_OFF and value == 0 else value

    def __setattr__(self, name: str, value) -> None:
        known = _RENAMED.get(name, name)
        if known in vars(self).get("_parameters", ()):
            number = self._number(name, value)
            if number is None and known not in _NONE_IF_OFF:
                raise InvalidType(f"{name}: expected a number, got None")
            self._set_native(name, known, 0.0 if number is None else number)
            return
        if name in _OF_MULTIPLIERS:
            self._set_table(name, value)
            return
        if name == "begin_num_update":
            self._check_begin(value)
        elif name == "lr_scheduler":
            _check_scheduler(value)
            native = _schedulers._is_native(value) and not self._overrides(_ASKED)
            if value is not None and not native and any(
                    store._optimizer is self and store._updater is None for store in self._stores):
                raise InvalidState("lr_scheduler: the store that has the optimizer asks none written in Python: expected it "
                                   f"before set_optimizer, or one of heddle.lr_scheduler, got {type(value).__name__}")
            self._native.set_schedule(value._schedule() if native else None)
        elif (type(self).__module__ == __name__ and not name.startswith("_") and name not in vars(self)
              and not hasattr(type(self), name)):
            # An attribute of nobody's that is spelt nearly as a parameter would change nothing.
            nearest = _nearest(name, (self._parameters | _RENAMED.keys()) - {"lr"}, 0.8)
            if nearest:
                raise InvalidArgument(f"optimizer {self._name}: unknown parameter {name!r}: did you mean {nearest[0]!r}?")
        object.__setattr__(self, name, value)

    @property
    def learning_rate(self) -> float:
        """The rate now; with a scheduler in a store, which counts the updates itself, that of the first."""
        if self.lr_scheduler is None:
            return self._native.get("learning_rate")
        return self.lr_scheduler(max(self.num_update, 1))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._set_native("learning_rate", "learning_rate", float(value))

    @classmethod
    def _overrides(cls, names: "Iterable[str]") -> bool:
        """Whether a class of one's own does."""
        return any(getattr(cls, name) is not getattr(_Native, name) for name in names)

    def _runs_in_store(self) -> bool:
        return not self._overrides(_UPDATES)

    def _has_native_rates(self) -> bool:
        return super()._has_native_rates() and not self._overrides(_ASKED)

    def _native_multiplier(self, attribute: str, key) -> float:
        told = self._overrides(["_get_lr" if attribute == "lr_mult" else "_get_wd"])  # with all that multiplies it
        return 1.0 if told else super()._native_multiplier(attribute, key)

    def _take_parameters(self, native: "_core.Optimizer") -> None:
        if native is not self._native:  # which keeps them
            for name, value in native.parameters():
                self._native.set(name, value)

    def _native_of_files(self) -> "_core.Optimizer":
        """One with all that a file says of the optimizer. The native half itself has neither the schedule nor the
        multipliers that are the business of a class of one's own."""
        if not self._overrides(_ASKED):
            return self._native
        native = _core.make_optimizer(self._name, self._native.parameters())
        for key in self._multiplied_keys():
            native.set_lr_mult(key, super()._native_multiplier("lr_mult", key))
            native.set_wd_mult(key, super()._native_multiplier("wd_mult", key))
        scheduler: Any = self.lr_scheduler
        if _schedulers._is_native(scheduler):
            native.set_schedule(scheduler._schedule())
        return native

    def _for_servers(self) -> "_core.Optimizer":
        if self._runs_in_store() and not self._overrides(_ASKED):
            return super()._for_servers()
        raise InvalidType(f"set_optimizer: {type(self).__name__} changes what a built-in optimizer does: expected, for a "
                          "store with servers, a class that derives from Optimizer itself")

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        state["_parameters"] = dict(self._native.parameters())
        return state

    def __setstate__(self, state: dict) -> None:
        values = state["_parameters"]
        object.__setattr__(self, "_native", _core.make_optimizer(self._name, list(values.items())))
        object.__setattr__(self, "_stores", weakref.WeakSet())
        for name, value in {**state, "_parameters": set(values)}.items():
            object.__setattr__(self, name, value)
        self._own_tables()
        if not _core.in_forked_child():  # which refuses them; a pool would lose what cannot even be unpickled there
            self.lr_scheduler = self.lr_scheduler
            self._send_multipliers()

    def _updater(self) -> "_core.Updater":
        return _core.Updater(self._native)

    # What a class of one's own calls of its base.

    def create_state(self, index, weight) -> "_NativeState":
        """What the library keeps for a key."""
        return _NativeState(self)

    def update(self, index, weight, grad, state) -> None:
        """Changes weight and state in place; counts the update."""
        if not isinstance(state, _NativeState) or state.optimizer is not self:
            got = f"one of another {type(state.optimizer).__name__}" if isinstance(state, _NativeState) else type(state).__name__
            raise InvalidType(f"{type(self).__name__}.update: expected a state of this {self._name}'s create_state, got {got}")
        _check_sparse_pair(f"{type(self).__name__}.update", grad, weight)
        with self._counting(index):
            state.updater.update(index, grad, weight, *self._asked_rates(index))

    def _asked_rates(self, index) -> "tuple[float, float | None]":
        """What Python says for an update of a key: the learning rate, and the weight decay where it is of one's own."""
        rate = self._get_lr(index) if self._overrides(["_get_lr"]) else self.learning_rate
        return float(rate), float(self._get_wd(index)) if self._overrides(["_get_wd"]) else None


class _NativeState:
    """What the library keeps of one key for an optimizer that a class of one's own calls."""

    def __init__(self, optimizer: _Native, named: "list | None" = None, about: "dict | None" = None) -> None:
        """Fresh, or what `content` has given."""
        self.optimizer = optimizer
        self.updater = optimizer._updater()
        if named is not None:
            with _file_of_states() as fname:
                _core.save(fname, named, about or {})
                self.updater.load_states(fname, None)

    def content(self) -> "tuple[list, dict]":
        """The arrays, with names, and texts about them. Waits."""
        with _file_of_states() as fname:
            self.updater.save_states(fname, False)
            return _core.load(fname, 0)

    def of(self, optimizer: Optimizer) -> "_NativeState":
        """A copy that another optimizer of the kind goes on with."""
        if not isinstance(optimizer, _Native) or optimizer._name != self.optimizer._name:
            raise InvalidState("Updater.optimizer: expected one that takes the states of "
                               f"{type(self.optimizer).__name__} which the updater has, got {type(optimizer).__name__}")
        return _NativeState(optimizer, *self.content())

    def __reduce__(self):
        return _NativeState, (self.optimizer, *self.content())


def _make_class(name: str, title: str) -> "type[_Native]":
    parameters = ", ".join(f"{parameter} {value:g}" for parameter, value in
                           _core.make_optimizer(name, []).parameters())
    text = (f"The optimizer {name!r}; docs/optimizers.md has its formula.\n\n"
            f"Parameters and defaults: {parameters}. `wd` stands for weight_decay, `eps` for epsilon.")
    klass = type(title, (_Native,), {"_name": name, "__doc__": text, "__module__": __name__})
    Optimizer.opt_registry[name] = klass
    return klass


SGD = _make_class("sgd", "SGD")
ccSGD = _make_class("ccsgd", "ccSGD")  # noqa: N816
NAG = _make_class("nag", "NAG")
Adam = _make_class("adam", "Adam")
AdaGrad = _make_class("adagrad", "AdaGrad")
RMSProp = _make_class("rmsprop", "RMSProp")
AdaDelta = _make_class("adadelta", "AdaDelta")
Ftrl = _make_class("ftrl", "Ftrl")
FTML = _make_class("ftml", "FTML")
Signum = _make_class("signum", "Signum")
Adamax = _make_class("adamax", "Adamax")
Nadam = _make_class("nadam", "Nadam")
LAMB = _make_class("lamb", "LAMB")
LANS = _make_class("lans", "LANS")
LARS = _make_class("lars", "LARS")
GroupAdaGrad = _make_class("groupadagrad", "GroupAdaGrad")
DCASGD = _make_class("dcasgd", "DCASGD")
SGLD = _make_class("sgld", "SGLD")
LBSGD = _make_class("lbsgd", "LBSGD")
AdamW = _make_class("adamw", "AdamW")
AdaBelief = _make_class("adabelief", "AdaBelief")
Test = _make_class("test", "Test")


def _make_other_classes() -> None:
    """For optimizers of the library that have no line above, which is for spellings and type checkers."""
    for name in _core.optimizer_names():
        if name not in Optimizer.opt_registry:
            globals()[name.capitalize()] = _make_class(name, name.capitalize())


_make_other_classes()
__all__ += [klass.__name__ for klass in _Native.__subclasses__()]


class Updater:
    """Applies an optimizer to arrays: updater(index, grad, weight) changes weight in place.

    Keeps the state of each index; in `states` that of an optimizer written in Python, and the library that of a built-in one.
    What `set_optimizer` gives a store for an optimizer written in Python.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InvalidType(f"Updater: expected an Optimizer, got {type(optimizer).__name__}")
        self._optimizer = optimizer
        self.states: dict = {}
        self._weights: dict = {}  # by index, shape and dtype of the weight that a state belongs to
        self._loaded: set = set()  # the indices of states that came from a file and may be on another device
        self._native = _updater_of(optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """What it applies. Another one takes the states over; between built-in ones it has to be of the same class."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InvalidType(f"Updater.optimizer: expected an Optimizer, got {type(optimizer).__name__}")
        if optimizer is self._optimizer:
            return
        native = _updater_of(optimizer)
        if self.states or self._native is not None and self._native.counts():
            if _kind_of_states(self._optimizer) != _kind_of_states(optimizer):
                raise InvalidState(f"Updater.optimizer: expected one that takes the states of {type(self._optimizer).__name__} "
                                   f"which the updater has, got {type(optimizer).__name__}")
            if native is not None:
                _load_bytes(native, self.get_states())
                optimizer._take_counts(dict(native.counts()))
        self.states = {index: _of_optimizer(state, optimizer) for index, state in self.states.items()}
        self._optimizer, self._native = optimizer, native

    # The native half travels as the bytes of its states.

    def __getstate__(self) -> dict:
        return {**vars(self), "_native": None if self._native is None else self.get_states()}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._native = _updater_of(self._optimizer)
        if self._native is not None and not _core.in_forked_child():
            _load_bytes(self._native, state["_native"])

    def _update_stored(self, index, grad, weight) -> None:
        """What a store calls. The sum may turn out to have failed, of which pulls tell: the arrays of the state are as they
        were then, as the stored value is."""
        if self._native is not None:
            self(index, grad, weight)
            return
        # Of a sum that has failed the store's value cannot be read either, of which the state is to be made.
        if self._is_to_be_made(index) and _core.has_failed(grad):
            return
        state = self._state_of(index, weight)
        former, rows = list(_arrays_in(state)), list(_arrays_in(state, _core.RowSparse))
        # Rows that fail with the sum are overwritten by a copy, which cures them too, for which the sum is waited for.
        copies = [one.copy() for one in rows] if rows and _core.has_failed(grad) else []
        if former:
            _core.fail_with(grad, former)
        try:
            self(index, grad, weight)
        finally:
            for one in former:
                _core.cure(grad, one)
            for one, copy in zip(rows, copies):
                copy.copyto(one)
        for one, before in zip(_arrays_in(self.states.get(index)), former):
            if one is not before:
                _core.restore(grad, one, before)
        for one, copy in zip(_arrays_in(self.states.get(index), _core.RowSparse), copies):
            if (one.shape, one.dtype) == (copy.shape, copy.dtype):
                copy.copyto(one)

    def __call__(self, index, grad, weight) -> None:
        if isinstance(index, (list, tuple)):
            if not (isinstance(grad, (list, tuple)) and isinstance(weight, (list, tuple))):
                raise InvalidType("Updater: expected lists of gradients and weights for a list of indices, got "
                                  f"{type(grad).__name__} and {type(weight).__name__}")
            if not len(index) == len(grad) == len(weight):
                raise InvalidArgument(f"Updater: expected as many gradients and weights as indices, got {len(index)} indices, "
                                      f"{len(grad)} gradients and {len(weight)} weights")
            for one, one_grad, one_weight in zip(index, grad, weight):
                self(one, one_grad, one_weight)
            return
        if index is None:
            raise InvalidType("Updater: expected a key of type str or int, got None")
        for one in (grad, weight):
            _nd._require_array("Updater", one)
        if self._native is not None and isinstance(self.optimizer, _Native):
            _check_sparse_pair(f"Updater: {type(self.optimizer).__name__}", grad, weight)
            with _counted_on(weight.context.device_id), self.optimizer._counting(index):
                asked = not self.optimizer._has_native_rates()
                rates = self.optimizer._asked_rates(index) if asked else (None, None)
                self._native.update(index, grad, weight, *rates)
            return
        state = self._state_of(index, weight)
        with _counted_on(weight.context.device_id):
            self.optimizer.update_multi_precision(index, weight, grad, state)

    def _is_to_be_made(self, index) -> bool:
        """Whether `_state_of` makes a state, as also for the classes of named tuples that came from a file."""
        return index not in self.states or index in self._loaded and _has_unclassed(self.states[index])

    def _state_of(self, index, weight):
        if index not in self.states:
            self.states[index] = self.optimizer.create_state_multi_precision(index, weight)
            self._weights[index] = _form_of(weight)
        elif index in self._loaded:
            saved, form = self._weights.setdefault(index, _form_of(weight)), _form_of(weight)
            if saved != form:
                raise InvalidArgument(f"key {index!r}: expected a state of {_text_of(form)}, got one of {_text_of(saved)} "
                                      "by loading")
            state = _moved(self.states[index], weight.context)
            if _has_unclassed(state):
                classes = _classes_in(self.optimizer.create_state_multi_precision(index, weight))
                state = _classed(index, state, classes)
            self._loaded.remove(index)
            self.states[index] = state
        return self.states[index]

    def _forget(self, index) -> None:
        """The state of a key that is gone, or begins anew."""
        self.states.pop(index, None)
        self._weights.pop(index, None)
        self._loaded.discard(index)
        self.optimizer._forget_count(index)
        if self._native is not None:
            self._native.forget(index)

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """The states of all indices, with `dump_optimizer` also the parameters of the optimizer, as bytes: those of a
        file of ``KVStore.save_optimizer_states``."""
        with _file_of_states() as fname:
            self._save(fname, dump_optimizer, list(self.states))
            with open(fname, "rb") as file:
                return file.read()

    def set_states(self, states: bytes) -> None:
        """Takes what `get_states` has given in place of the states that are, and the parameters if they are there."""
        if not isinstance(states, (bytes, bytearray, memoryview)):
            raise InvalidType(f"set_states: expected bytes of get_states, got {type(states).__name__}")
        with _file_of_states() as fname:
            with open(fname, "wb") as file:
                file.write(states)
            self._load(fname)

    # Files: the arrays by number, and what they belong to as JSON; or as the library writes those of its optimizers.

    def _save(self, fname: str, dump_optimizer: bool, keys: list) -> None:
        if dump_optimizer:
            _check_schedule_of_files(self.optimizer.lr_scheduler)
        if self._native is not None and isinstance(self.optimizer, _Native):
            described = self.optimizer._native_of_files()
            saved = self._native
            if dump_optimizer and described is not self.optimizer._native:
                saved = _core.Updater(described)
                _copy_states(self._native, saved)
            saved.save_states(fname, dump_optimizer)
            return
        arrays: list = []
        states, weights = self.states.copy(), self._weights.copy()  # other threads may add to them
        content: dict[str, Any] = {
            "version": _STATES_VERSION, "optimizer": type(self.optimizer).__name__.lower(), "keys": keys,
            "states": [[index, _numbered(state, arrays)] for index, state in states.items()],
            "weights": list(weights.items()),
            "counts": list(self.optimizer._counts().items()),
            "num_update": self.optimizer.num_update,
            "multi_precision": bool(self.optimizer.multi_precision),
        }
        if dump_optimizer:
            content.update(_settings_of(self.optimizer))
        named = [(str(i), array) for i, array in enumerate(arrays)]
        _core.save(fname, named, {"heddle.python_optimizer_states": json.dumps(content, default=_index_as_json)})

    def _load(self, fname: str, keys: "list | None" = None, forms: "list | None" = None) -> None:
        """`keys`: those of a store, which the states have to belong to; `forms`: (key, shape, dtype) of its values."""
        if self._native is not None and isinstance(self.optimizer, _Native):
            described = self.optimizer._native_of_files()
            with self.optimizer._following_native(described):
                if described is self.optimizer._native:
                    self._native.load_states(fname, forms)
                else:
                    loaded = _core.Updater(described)
                    loaded.load_states(fname, forms)
                    _copy_states(loaded, self._native)
            self.optimizer._take_counts(dict(self._native.counts()))
            return
        named, metadata = _core.load(fname, 0)
        text = metadata.get("heddle.python_optimizer_states")
        if text is None:
            raise IoError(f"load_optimizer_states: {fname}: expected states of an optimizer written in Python")
        optimizer = self.optimizer
        name = type(optimizer).__name__.lower()
        with _readable(fname):
            saved = _Content(fname, json.loads(text))
        if saved.name != name:
            raise InvalidArgument(f"load_optimizer_states: {fname}: expected states of {name}, found those of {saved.name}")
        if keys is not None:
            _check_keys(fname, saved.keys, set(keys))
        for key, shape, code in forms or []:
            expected = [list(shape), _dtype._NAMES[code]]
            if saved.weights.get(key, expected) != expected:
                raise InvalidArgument(f"load_optimizer_states: {fname}: key {key!r}: expected a state of "
                                      f"{_text_of(expected)}, got one of {_text_of(saved.weights[key])}")
        settings = _settings_for(fname, optimizer, saved.settings)
        parameters = saved.parameters
        if isinstance(optimizer, _Native):
            with _readable(fname, passed=InvalidArgument):
                _try_settings(optimizer, saved)
        elif parameters:
            raise InvalidArgument(f"load_optimizer_states: {fname}: expected the parameters of {name}, found those of an "
                                  "optimizer of the library")
        if "multi_precision" not in settings:
            _check_precision(fname, optimizer, saved)
        by_name = dict(named)
        with _readable(fname, passed=InvalidArgument):  # states of the library that do not fit
            arrays = [by_name[str(i)] for i in range(len(by_name))]
            states = {index: _restored(form, arrays, optimizer) for index, form in saved.states}
        self.states = states
        self._weights = saved.weights
        self._loaded = set(states)
        optimizer._take_counts(saved.counts, saved.num_update)
        for attribute, value in settings.items():
            setattr(optimizer, attribute, value)
        for attribute, table in saved.tables.items():
            setattr(optimizer, attribute, table)
        former = optimizer.lr_scheduler
        if parameters:
            optimizer.lr_scheduler = None  # which would set the rate itself
            for parameter, value in parameters.items():
                setattr(optimizer, parameter, value)
            optimizer.lr_scheduler = former
        if saved.has_schedule and _schedule_of(former) != _schedule_of(saved.scheduler):
            optimizer.lr_scheduler = saved.scheduler

    # Bytes of one key, for stores whose servers have the optimizer: the length of a text (8 bytes, little-endian), the
    # text, JSON, and the elements of the arrays one after the other.

    def _save_key(self, index) -> "bytes | None":
        if index not in self.states:
            return None
        arrays: list = []
        form = _numbered(self.states[index], arrays)
        pieces = []
        for array in arrays:
            if isinstance(array, _core.RowSparse):
                raise InvalidType(f"save_optimizer_states: key {index!r}: expected dense arrays, got a row_sparse one")
            values = array.asnumpy()  # bfloat16 as float32: the same values
            pieces.append((_dtype._NAMES[array._dtype], values))
        text = json.dumps({
            "state": form, "count": self.optimizer._count_of(index),
            "arrays": [[name, list(values.shape)] for name, values in pieces],
        }).encode()
        return b"".join([len(text).to_bytes(8, "little"), text, *(values.tobytes() for _, values in pieces)])

    def _load_key(self, index, data: bytes) -> None:
        try:
            length = int.from_bytes(data[:8], "little")
            content = json.loads(data[8:8 + length])
            at = 8 + length
            arrays = []
            for name, shape in content["arrays"]:
                stored = _dtype._NUMPY[_dtype._NAMES.index(name)]
                values = _nd.numpy.frombuffer(data, stored, math.prod(shape), at).reshape(shape)
                at += values.nbytes
                arrays.append(_nd.array(values, dtype=name))
            state, count = _restored(content["state"], arrays, self.optimizer), content["count"]
            if at != len(data) or not isinstance(count, (int, type(None))):
                raise ValueError(f"{len(data) - at} bytes too many")
        except _UNREADABLE as error:
            raise IoError(f"load_optimizer_states: key {index!r}: the state cannot be read: {error}") from error
        self.states[index] = state
        self._loaded.add(index)
        counts = self.optimizer._counts()
        if count is not None:
            counts[index] = count
        self.optimizer._take_counts(counts)


def _updater_of(optimizer: Optimizer) -> "_core.Updater | None":
    """For an optimizer that Python does not run."""
    return optimizer._updater() if isinstance(optimizer, _Native) and optimizer._runs_in_store() else None


def _kind_of_states(optimizer: Optimizer) -> "str | None":
    """The name of a built-in optimizer; None for one that Python runs."""
    return optimizer._name if isinstance(optimizer, _Native) and optimizer._runs_in_store() else None


def _load_bytes(native: "_core.Updater", states: bytes) -> None:
    with _file_of_states() as fname:
        with open(fname, "wb") as file:
            file.write(states)
        native.load_states(fname, None)


def _copy_states(source: "_core.Updater", target: "_core.Updater") -> None:
    with _file_of_states() as fname:
        source.save_states(fname, False)
        target.load_states(fname, None)


def _check_schedule_of_files(scheduler) -> None:
    if scheduler is not None and not _schedulers._is_native(scheduler):
        raise InvalidType("save_optimizer_states: dump_optimizer: expected a scheduler of heddle.lr_scheduler, which a file can "
                          f"describe, got {type(scheduler).__name__}")


def _schedule_of(scheduler):
    """What a file says of a scheduler; None if there is none, or it is written in Python."""
    return _described(scheduler._schedule()) if _schedulers._is_native(scheduler) else None


def _settings_of(optimizer: Optimizer) -> dict:
    """What a file says of an optimizer that Python runs."""
    return {
        "parameters": dict(optimizer._native.parameters()) if isinstance(optimizer, _Native) else {},
        "settings": {name: _plain(value) for name, value in vars(optimizer).items()
                     if _is_plain(value)},
        **{name: [[key, float(number)] for key, number in getattr(optimizer, name).items()] for name in _OF_NUMBERS},
        "schedule": _schedule_of(optimizer.lr_scheduler),
    }


def _described(schedule: "_core.Schedule | None"):
    return None if schedule is None else schedule.describe()


def _multipliers_of(native: "_core.Optimizer") -> "dict[Any, tuple[float, float]]":
    """Those of learning rate and weight decay by key, where one of them is not 1."""
    return {key: (rate, decay) for key, rate, decay in native.multipliers() if (rate, decay) != (1, 1)}


def _number_like(before, value: float):
    """A number that has travelled as a float: a bool or an int where it was one before and still can be."""
    kind = type(before)
    return kind(value) if kind in (bool, int) and kind(value) == value else value


def _numbered(state, arrays: list):
    """A state as JSON; its arrays, which are added to `arrays`, by their numbers."""
    if isinstance(state, (_core.Array, _core.RowSparse)):
        arrays.append(state)
        return len(arrays) - 1
    if _is_named(state):
        name, fields = _names_of(state)
        return {"named": name, "fields": list(fields), "of": [_numbered(one, arrays) for one in state]}
    if isinstance(state, tuple):
        return [_numbered(one, arrays) for one in state]
    if isinstance(state, list):
        return {"list": [_numbered(one, arrays) for one in state]}
    if isinstance(state, _NativeState):
        named, about = state.content()
        return {"library": [[name, _numbered(one, arrays)] for name, one in named], "about": about}
    if _is_plain(state):
        return {"value": _plain(state)}
    raise InvalidType("save_optimizer_states: expected states of arrays, numbers, texts, tuples and lists of them, got "
                      f"{type(state).__name__}")


def _plain(value):
    """A number of NumPy's as one of Python's; all else as it is."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _index_as_json(index) -> int:
    if isinstance(index, numbers.Integral):  # one of NumPy's
        return int(index)
    raise InvalidType(f"save_optimizer_states: expected indices that are int or str, got {type(index).__name__}")


def _form_of(weight) -> list:
    return [list(weight.shape), _dtype._NAMES[weight._dtype]]


def _text_of(form: list) -> str:
    return f"shape {tuple(form[0])}, {form[1]}"


# What Python raises for content that is of another form than what `_save` writes.
_UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError)


@contextlib.contextmanager
def _readable(fname: str, passed: "type[BaseException] | tuple" = ()):
    """Errors in the block are IoError: a file is damaged; but for those `passed`: it does not fit."""
    try:
        yield
    except passed as error:
        raise type(error)(f"load_optimizer_states: {fname}: {error}") from error
    except _UNREADABLE as error:
        raise IoError(f"load_optimizer_states: {fname}: the states cannot be read: {error!r}") from error


class _Content:
    """What the file of an optimizer that Python runs says."""

    def __init__(self, fname: str, content: dict) -> None:
        version = content["version"]
        if version != _STATES_VERSION:
            raise IoError(f"load_optimizer_states: {fname}: expected version {_STATES_VERSION} of optimizer states, found "
                          f"version {version!r}")
        self.name = str(content["optimizer"])
        self.keys = set(content["keys"])
        self.states = [(index, form) for index, form in content["states"]]
        self.weights = {index: [[int(extent) for extent in shape], _dtype._NAMES[_dtype._NAMES.index(dtype)]]
                        for index, (shape, dtype) in content["weights"]}
        self.counts = {index: self._count(count) for index, count in content["counts"]}
        self.num_update = self._count(content["num_update"])
        self.multi_precision = content.get("multi_precision")  # None in older files
        self.settings = dict(content.get("settings", {}))
        for name, value in self.settings.items():
            if not _is_plain(value):
                raise TypeError(f"setting {name}: {value!r}")
        self.parameters = {name: float(value) for name, value in content.get("parameters", {}).items()}
        self.tables = {name: {self._key(index): float(number) for index, number in content[name]}
                       for name in _OF_NUMBERS if name in content}
        schedule = content.get("schedule")
        self.has_schedule = "schedule" in content
        self.scheduler = None if schedule is None else _schedulers._described(*schedule)

    @staticmethod
    def _key(index):
        if not isinstance(index, (str, int)):
            raise TypeError(f"a multiplier of {index!r}")
        return index

    @staticmethod
    def _count(value) -> int:
        if int(value) != value or not 0 <= value < 2**62:
            raise ValueError(f"a count of {value!r}")
        return int(value)


def _is_plain(value) -> bool:
    """Whether a file has it as a setting."""
    return value is None or isinstance(value, (str, numbers.Real))


def _settings_for(fname: str, optimizer: Optimizer, settings: dict) -> dict:
    """Those that the optimizer takes. InvalidArgument for one of another kind than its own."""
    taken = {}
    for name, own in vars(optimizer).items():
        if name not in settings or name in (*_OF_MULTIPLIERS, "lr_scheduler", "num_update"):
            continue
        if name == "begin_num_update" and isinstance(optimizer, _Native):
            continue
        value = settings[name]
        if name in _NUMBERS_OF_BASE:
            fits = isinstance(value, numbers.Real)
        elif value is None or own is None:
            fits = name != "clip_gradient" or not isinstance(value, str)
        else:
            fits = any(isinstance(own, kind) and isinstance(value, kind) for kind in (str, numbers.Real))
        if not fits:
            raise InvalidArgument(f"load_optimizer_states: {fname}: expected the attribute {name} to be as it is, {own!r}, or "
                                  f"another of the kind, found {value!r}")
        if _is_plain(own):
            taken[name] = value
    return taken


def _try_settings(optimizer: _Native, saved: "_Content") -> None:
    """What the library refuses of them, such as a parameter that is fixed, it refuses here."""
    tried = _core.make_optimizer(optimizer._name, optimizer._native.parameters())
    for parameter, value in saved.parameters.items():
        tried.set(parameter, value)
    for attribute, table in saved.tables.items():
        for key, number in table.items():
            (tried.set_lr_mult if attribute == "lr_mult" else tried.set_wd_mult)(key, number)


def _check_precision(fname: str, optimizer: Optimizer, saved: "_Content") -> None:
    """With multi_precision the states of weights of half precision have a float32 copy of the weight."""
    own = bool(optimizer.multi_precision)
    if saved.multi_precision in (None, own) or all(dtype not in ("float16", "bfloat16") for _, dtype in saved.weights.values()):
        return
    if type(optimizer).update_multi_precision is Optimizer.update_multi_precision:
        raise InvalidArgument(f"load_optimizer_states: {fname}: expected states with multi_precision {str(own).lower()}, got "
                              f"{str(not own).lower()}")


def _check_keys(fname: str, saved: set, keys: set) -> None:
    """Of states in a file: those of all keys of a store and of no others."""
    for given, expected, what in ((saved, keys, "got some of key {!r}, which it does not have"),
                                  (keys, saved, "got none of key {!r}")):
        for key in sorted(given - expected, key=repr):
            raise InvalidArgument(f"load_optimizer_states: {fname}: expected states of the keys of this store, "
                                  f"{what.format(key)}")


@contextlib.contextmanager
def _file_of_states():
    """The name of a file for the block. Errors about it do not name it."""
    import tempfile  # here, since importing it takes time

    with tempfile.TemporaryDirectory(prefix="heddle-") as folder:
        fname = os.path.join(folder, "states")
        try:
            yield fname
        except (IoError, InvalidArgument) as error:
            raise type(error)(str(error).replace(fname, "states")) from None


def _restored(form, arrays: list, optimizer: Optimizer):
    if isinstance(form, int):
        if form < 0:
            raise IndexError(f"array {form}")
        return arrays[form]
    if isinstance(form, list):
        return tuple(_restored(one, arrays, optimizer) for one in form)
    if "list" in form:
        return [_restored(one, arrays, optimizer) for one in form["list"]]
    if "named" in form:
        parts, fields = [_restored(one, arrays, optimizer) for one in form["of"]], form["fields"]
        if len(parts) != len(fields) or not all(isinstance(one, str) for one in (form["named"], *fields)):
            raise ValueError(f"a named tuple of {len(parts)} parts with the fields {fields!r}")
        return _Unclassed(parts, form["named"], tuple(fields))
    if "library" in form:
        if not isinstance(optimizer, _Native):
            raise InvalidArgument(f"expected states of {type(optimizer).__name__}, found those of an optimizer of the library")
        named = [(str(name), _restored(one, arrays, optimizer)) for name, one in form["library"]]
        if len(dict(named)) < len(named) or not all(isinstance(one, _core.Array) for _, one in named):
            raise ValueError("states of an optimizer of the library that are no arrays, or have one name")
        if not all(isinstance(text, str) for text in form["about"].values()):
            raise ValueError("states of an optimizer of the library without texts about them")
        return _NativeState(optimizer, named, form["about"])
    return form["value"]


def _of_optimizer(state, optimizer: Optimizer):
    """A state that an updater has, for another optimizer."""
    if isinstance(state, _NativeState):
        return state.of(optimizer)
    if isinstance(state, (tuple, list)):
        parts = [_of_optimizer(one, optimizer) for one in state]
        if any(part is not one for part, one in zip(parts, state)):
            return _with_parts(state, parts)
    return state


# Named tuples. A file has the name and the fields of their classes; the classes are known when `create_state` has made a
# state for the weight, which loading does not have.

class _Unclassed(tuple):
    """A named tuple of a file."""

    name: str
    fields: "tuple[str, ...]"

    def __new__(cls, parts: Iterable, name: str = "", fields: "tuple[str, ...]" = ()):  # of a copy they come after it
        made = super().__new__(cls, parts)
        made.name, made.fields = name, fields
        return made


def _is_named(state) -> bool:
    return isinstance(state, _Unclassed) or isinstance(state, tuple) and hasattr(state, "_make")


def _names_of(state) -> "tuple[str, tuple[str, ...]]":
    """The name of the class of a named tuple, and its fields."""
    return (state.name, state.fields) if isinstance(state, _Unclassed) else (type(state).__name__, state._fields)


def _with_parts(state, parts: list):
    """A tuple or list, with others in place of what is in it."""
    if isinstance(state, _Unclassed):
        return _Unclassed(parts, state.name, state.fields)
    return type(state)._make(parts) if _is_named(state) else tuple(parts) if isinstance(state, tuple) else parts


def _has_unclassed(state) -> bool:
    return isinstance(state, _Unclassed) or isinstance(state, (tuple, list)) and any(_has_unclassed(one) for one in state)


def _classes_in(state) -> dict:
    """Those of a state's named tuples, by their names and fields."""
    if not isinstance(state, (tuple, list)):
        return {}
    found = {_names_of(state): type(state)} if _is_named(state) else {}
    for one in state:
        found.update(_classes_in(one))
    return found


def _classed(index, state, classes: dict):
    """A state of a file whose named tuples have their classes again."""
    if not isinstance(state, (tuple, list)):
        return state
    parts = [_classed(index, one, classes) for one in state]
    if not isinstance(state, _Unclassed):
        return _with_parts(state, parts)
    names = _names_of(state)
    if names not in classes:
        known = ", ".join(f"{name}({', '.join(fields)})" for name, fields in classes) or "none"
        raise InvalidArgument(f"key {index!r}: expected a state of the named tuples that create_state makes, {known}, got "
                              f"{names[0]}({', '.join(names[1])}) by loading")
    return classes[names]._make(parts)


def _arrays_in(state, kind: type = _core.Array) -> Iterator:
    """Those of a state, which may be in tuples and lists."""
    if isinstance(state, kind):
        yield state
    elif isinstance(state, (tuple, list)):
        for one in state:
            yield from _arrays_in(one, kind)


def _moved(state, context):
    """A state with its arrays on a device."""
    if isinstance(state, (_nd.NDArray, _nd.sparse.RowSparseNDArray)):
        return state.as_in_context(context)
    if isinstance(state, (tuple, list)):
        return _with_parts(state, [_moved(one, context) for one in state])
    return state


def get_updater(optimizer: Optimizer) -> Updater:
    """A function updater(index, grad, weight) that applies the optimizer."""
    return Updater(optimizer)
