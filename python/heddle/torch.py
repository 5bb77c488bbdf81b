"""Data-parallel training of PyTorch models through a heddle store.

    >>> store = heddle.kv.create('dist_sync')
    >>> heddle.torch.broadcast_parameters(model.state_dict(), store)
    >>> optimizer = heddle.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
    ...                                               model.named_parameters(), store)
    >>> loss(model(x), y).backward()    # each gradient leaves while the next ones are computed
    >>> optimizer.step()                # waits for them

heddle orders only its own calls, so this module waits before PyTorch reads or writes memory that is being exchanged.
"""

from __future__ import annotations

import contextlib
import inspect
import numbers
import weakref
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch

from . import kvstore as _kvstore
from . import nd as _nd
from . import optimizer as _optimizer
from .error import Error, InvalidArgument, InvalidState, InvalidType

__all__ = ["DistributedOptimizer", "broadcast_parameters"]


class _Shared:
    """A tensor and the NDArray that stands for it in a store: over the same memory where that is the CPU's and in
    one piece, else over a copy."""

    __slots__ = ("address", "array", "copy", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.copy: "torch.Tensor | None" = None
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            self.copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.array = _nd.from_dlpack(tensor.detach() if self.copy is None else self.copy)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it still is over this tensor's memory."""
        return self.tensor is tensor and self.address == tensor.data_ptr()

    def load(self) -> None:
        """To be called before the store reads."""
        if self.copy is not None:
            self.array.wait_to_write()
            self.copy.copy_(self.tensor.detach())

    def wait(self) -> None:
        """Waits until the store neither reads nor writes; then the tensor has the values and may be changed."""
        self.array.wait_to_read()  # raises what went wrong
        self.array.wait_to_write()
        if self.copy is not None:
            self.tensor.detach().copy_(self.copy)


class _Exchange:
    """A parameter on its way through the steps."""

    __slots__ = ("former_version", "gradient", "guard", "handed", "key", "parameter", "parcel", "passes", "priority",
                 "weight", "weight_version")

    def __init__(self, parameter: torch.Tensor, key: str, priority: int) -> None:
        self.parameter = parameter
        self.key = key
        self.priority = priority
        self.parcel: "_Parcel | None" = None
        self.gradient: "_Shared | None" = None
        self.weight: "_Shared | None" = None
        self.weight_version = 0  # when the store last wrote it
        self.passes = 0  # backward passes since the last step
        self.former_version: "int | None" = None  # of the gradient, if there was one, before backward wrote it
        self.guard: Any = None  # the hook of `refuse`
        # The gradient that the parcel may have since the last step, its version then, and how often backward had written
        # into its memory.
        self.handed: "tuple[torch.Tensor, int, int] | None" = None

    def count_write(self, writes: "dict[int, int]") -> None:
        """Backward has written the gradient; `writes`: how often it has, by memory."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self.former_version is not None:
            memory = _memory_of(gradient)
            writes[memory] = writes.get(memory, 0) + gradient._version - self.former_version

    def hand_over(self, writes: "dict[int, int]") -> None:
        gradient = self.parameter.grad
        assert gradient is not None
        self.handed = gradient, gradient._version, writes.get(_memory_of(gradient), 0) if writes else 0

    def has_changed(self, writes: "dict[int, int]") -> bool:
        """Whether somebody has changed the gradient since it was handed over. Views of one buffer share their version, so
        backward, as it writes the others, changes that too."""
        if self.handed is None:
            return False
        gradient, version, former_writes = self.handed
        if self.parameter.grad is not gradient:
            return True
        if gradient._version == version:  # as a rule
            return False
        return gradient._version != version + writes.get(_memory_of(gradient), 0) - former_writes

    def dense_gradient(self) -> torch.Tensor:
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise InvalidType(f"DistributedOptimizer: expected a dense gradient of {self.key!r}, got {gradient.layout}")
        return gradient

    def shared_gradient(self) -> _Shared:
        gradient = self.dense_gradient()
        if self.gradient is None or not self.gradient.is_of(gradient):
            self.gradient = _Shared(gradient)
        return self.gradient

    def shared_weight(self) -> _Shared:
        if self.weight is None or not self.weight.is_of(self.parameter):
            self.weight = _Shared(self.parameter)
        return self.weight

    def wait_for_weight(self) -> None:
        """Returns when it has the store's values."""
        self.shared_weight().wait()
        self.weight_version = self.parameter._version

    def check_weight(self) -> None:
        """What the store does not know of would be lost by the next pull."""
        if self.weight is None or not self.weight.is_of(self.parameter) or self.weight_version != self.parameter._version:
            raise InvalidState(f"DistributedOptimizer: the weight {self.key!r} was changed by other than step, and the "
                               "store updates its own copy: expected weights that are loaded before the "
                               "DistributedOptimizer is made, or no store_optimizer")

    def settle(self) -> None:
        """Waits for what is under way and starts over, also if that failed, which it raises."""
        self.passes = 0
        self.handed = None
        if self.gradient is not None:
            try:
                self.gradient.array.wait_to_write()
            except BaseException:
                self.gradient = None  # that array stays poisoned
                raise


def _memory_of(gradient: torch.Tensor) -> int:
    """The same for the views of one buffer, not all of which know it (_base)."""
    return gradient.untyped_storage().data_ptr() if gradient.layout == torch.strided else 0


# Bytes of a gradient that travels with others, since its message costs more than its bytes, and of a full parcel.
_SMALL_BYTES = 32 << 10
_PARCEL_BYTES = 256 << 10


class _Parcel:
    """Gradients that travel under one key: a large one alone and from its own memory, or small ones of neighbouring
    layers in a copy."""

    __slots__ = ("_dtype", "_flat", "_views", "key", "members", "missing", "priority", "sent")

    def __init__(self, members: "list[_Exchange]") -> None:
        others = len(members) - 1
        self.key = members[0].key + (f" and {others} more" if others else "")
        self.members = members
        self.priority = max(member.priority for member in members)
        self.missing = len(members)  # gradients that backward has not written since the last step
        self.sent = False  # since the last step
        self._dtype = members[0].parameter.dtype  # the key's, whatever becomes of the model
        self._flat: "_Shared | None" = None
        self._views: "list[torch.Tensor]" = []
        for member in members:
            member.parcel = self

    def load(self) -> _nd.NDArray:
        """The array that the store reads, and may write until `unload`."""
        if len(self.members) == 1:
            shared = self.members[0].shared_gradient()
            shared.load()
            return shared.array
        gradients = [None if member.parameter.grad is None else member.dense_gradient() for member in self.members]
        for member, gradient in zip(self.members, gradients):
            if gradient is not None and gradient.dtype != self._dtype:  # the copy would cast it
                raise InvalidArgument(f"DistributedOptimizer: the gradient of {member.key!r}: expected dtype "
                                      f"{_name_of(self._dtype)}, got {_name_of(gradient.dtype)}")
        if self._flat is None:
            first = self.members[0].parameter
            sizes = [member.parameter.numel() for member in self.members]
            flat = torch.zeros(sum(sizes), dtype=self._dtype, device=first.device)
            self._flat = _Shared(flat)
            self._views = [view.view_as(member.parameter) for view, member in zip(flat.split(sizes), self.members)]
        self._flat.array.wait_to_write()
        for view, gradient in zip(self._views, gradients):
            if gradient is None:
                view.zero_()
        _copy(self._views, gradients)
        self._flat.load()
        return self._flat.array

    def unload(self) -> "list[torch.Tensor]":
        """Waits for the store; returns the gradients, which have its values."""
        if len(self.members) == 1:
            self.members[0].shared_gradient().wait()
        else:
            assert self._flat is not None
            self._flat.wait()
            _copy([member.parameter.grad for member in self.members], self._views)
        return [member.parameter.grad for member in self.members if member.parameter.grad is not None]

    def settle(self) -> None:
        """As _Exchange.settle, of all members."""
        self.missing = len(self.members)
        self.sent = False
        for member in self.members:
            member.settle()
        if self._flat is not None:
            try:
                self._flat.array.wait_to_write()
            except BaseException:
                self._flat = None  # that array stays poisoned
                raise


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy(to: "list[torch.Tensor | None]", values: "list[torch.Tensor | None]") -> None:
    """Of the pairs that are whole."""
    pairs = [(target, value) for target, value in zip(to, values) if target is not None and value is not None]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs)))


def _pack(exchanges: "list[_Exchange]", together: bool) -> "list[_Parcel]":
    """The parcels of these parameters, in the order of the layers."""
    parcels: "list[list[_Exchange]]" = []
    open_parcels: "dict[tuple[torch.dtype, torch.device], tuple[list[_Exchange], int]]" = {}
    for exchange in exchanges:
        parameter = exchange.parameter
        size, kind = parameter.numel() * parameter.element_size(), (parameter.dtype, parameter.device)
        members, filled = open_parcels.get(kind, ([], _PARCEL_BYTES))
        if not together or size > _SMALL_BYTES:
            parcels.append([exchange])
        elif filled + size > _PARCEL_BYTES:
            parcels.append([exchange])
            open_parcels[kind] = parcels[-1], size
        else:
            members.append(exchange)
            open_parcels[kind] = members, filled + size
    return [_Parcel(members) for members in parcels]


class _Users:
    """The DistributedOptimizers of one store."""

    def __init__(self) -> None:
        self.open: "weakref.WeakSet[DistributedOptimizer]" = weakref.WeakSet()
        # The store_optimizer that one of them brought, which the store keeps when they are gone: nobody's then.
        self.brought: "Callable[[], _optimizer.Optimizer | None]" = lambda: None


_users: "weakref.WeakKeyDictionary[_kvstore.KVStore, _Users]" = weakref.WeakKeyDictionary()


def _rule_of(store: Any) -> Any:
    """What a store of heddle's own updates by, an optimizer or a function; None: it sums, as those of others do."""
    if not isinstance(store, _kvstore.KVStore):
        return None
    return store._optimizer if store._updater is None else getattr(store._updater, "optimizer", store._updater)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer of PyTorch: its gradients go through a store before they count.

    A gradient is pushed as soon as backward has it, those of the first layers with the highest priority. By default
    the store sums gradients over all workers, `step` takes their average, and `optimizer` updates the weights here;
    small gradients of neighbouring layers (at most 32 KiB each) travel together, once backward has the last of them.
    With `store_optimizer` the store updates them, on servers if it has some, and `step` pulls the new weights: the
    learning rates and weight decays of `optimizer`'s groups count then, all else is `store_optimizer`'s. Stores that
    update as each push arrives (dist_async) need that. Gradients are applied as backward produces them then, by the rates
    of that moment: they cannot be dropped (`zero_grad` without `step`), and rates are set before backward or after `step`.

    What changes gradients between backward and step goes behind `synchronize`, also what GradScaler does:

        >>> scaler.scale(loss(model(x), y)).backward()
        >>> optimizer.synchronize()
        >>> scaler.unscale_(optimizer)
        >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> scaler.step(optimizer)

    optimizer: one of torch.optim that takes dense gradients, one a step: not LBFGS, nor SparseAdam.
    named_parameters: (name, parameter) pairs, as model.named_parameters() gives them; the names are the store's keys,
        and must be the same at all ranks. The order is that of the layers.
    store: a store or the name of its type. All ranks make the same calls. Those that share a store have the same
        store_optimizer, or none: a store updates all its keys by one.
    store_optimizer: one of heddle.optimizer, without a scheduler: torch.optim.lr_scheduler works on this class. Its
        rescale_grad is divided by the number of workers, once, whoever gets it again.
    backward_passes_per_step: how many backward passes add up to the gradient that is exchanged.
    average: whether the sum over workers is divided by their number.

    With several workers each step exchanges all gradients; one that a rank does not have counts as zeros. A parameter
    may be frozen and thawed (requires_grad) at any time, at all ranks between the same steps.
    """

    # GradScaler then shows `step` what it has found, and calls it in any case: ranks do not miss each other's exchanges.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: torch.optim.Optimizer,
                 named_parameters: "Iterable[tuple[str, torch.Tensor]] | None" = None,
                 store: "_kvstore.KVStoreBase | str" = "device",
                 store_optimizer: "_optimizer.Optimizer | None" = None, backward_passes_per_step: int = 1,
                 average: bool = True) -> None:
        # Not the base's: the groups are those of `optimizer`.
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidType(f"DistributedOptimizer: expected one of torch.optim, got {type(optimizer).__name__}")
        # The class's: schedulers put a function in place of the object's.
        for one in list(inspect.signature(type(optimizer).step).parameters.values())[1:]:
            if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                raise InvalidArgument("DistributedOptimizer: expected an optimizer that takes one gradient a step, got "
                                      f"{type(optimizer).__name__}, whose step() needs a {one.name}")
        if not isinstance(backward_passes_per_step, (int, numbers.Integral)):
            raise InvalidType("DistributedOptimizer: expected an integer as backward_passes_per_step, got "
                              f"{backward_passes_per_step!r}")
        if backward_passes_per_step < 1:
            raise InvalidArgument("DistributedOptimizer: expected a backward_passes_per_step of at least 1, got "
                                  f"{backward_passes_per_step}")
        if not isinstance(store_optimizer, (_optimizer.Optimizer, type(None))):
            raise InvalidType("DistributedOptimizer: expected one of heddle.optimizer as store_optimizer, got "
                              f"{store_optimizer!r}")
        if store_optimizer is not None and store_optimizer.lr_scheduler is not None:
            raise InvalidArgument("DistributedOptimizer: expected a store_optimizer without a scheduler, got one with: "
                                  "schedule the rate of the groups by torch.optim.lr_scheduler")
        self._inner = optimizer
        self._store: Any = _kvstore.create(store) if isinstance(store, str) else _checked("DistributedOptimizer", store)
        if store_optimizer is not None and not isinstance(self._store, _kvstore.KVStore):
            raise InvalidArgument("DistributedOptimizer: expected a store of heddle's own for "
                                  f"store_optimizer, got {type(self._store).__name__}")
        if store_optimizer is None and "async" in self._store.type:
            raise InvalidArgument(f"DistributedOptimizer: a store of type {self._store.type!r} does not sum over "
                                  "workers: expected store_optimizer=..., which it updates the weights by")
        if (store_optimizer is None and isinstance(self._store, _kvstore.KVStore)
                and (self._store._optimizer is not None or self._store._updater is not None)):
            raise InvalidArgument("DistributedOptimizer: the store has an optimizer, which would update by the gradients, "
                                  "not sum them: expected store_optimizer=..., or a store without one")
        if store_optimizer is not None:
            self._check_rule(store_optimizer)
        self._store_optimizer = store_optimizer
        self._passes = backward_passes_per_step
        self._divisor = self._store.num_workers if average else 1
        self._rates: "list[tuple[float, float | None]]" = []
        self._pushed_rates: "list[tuple[float, float | None]]" = []  # those of what was pushed since the last step
        self._multipliers: Any = None  # the table of the store's optimizer that has the rates
        self._frozen: "list[tuple[str, torch.Tensor]]" = []  # not exchanged as yet
        self._exchanges: "dict[torch.Tensor, _Exchange]" = {}
        self._parcels: "list[_Parcel]" = []
        self._synchronized = False  # since the last step
        self._writes: "dict[int, int]" = {}  # of backward since the last step, by memory
        self._ends: "list[weakref.finalize]" = []  # what dropping it leaves to do
        self._is_closed = False
        named = self._names(named_parameters)
        if store_optimizer is not None:
            _average(store_optimizer, self._divisor)
            if _rule_of(self._store) is not store_optimizer:  # else setting it would drop the states of others' keys
                self._store.set_optimizer(store_optimizer)
                _users.setdefault(self._store, _Users()).brought = weakref.ref(store_optimizer)
        self._add(named)
        if isinstance(self._store, _kvstore.KVStore):
            _users.setdefault(self._store, _Users()).open.add(self)

    # What optimizers have.

    @property
    def param_groups(self) -> "list[dict[str, Any]]":
        """The groups of the wrapped optimizer."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer; what a store's optimizer keeps, `save_optimizer_states` of the store
        saves."""
        return self._inner.state

    @property
    def defaults(self) -> "dict[str, Any]":
        """The defaults of the wrapped optimizer's groups."""
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:  # hooks of the base
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r}, {self._store!r})"

    def __reduce__(self) -> Any:  # of copy and pickle
        raise InvalidType("DistributedOptimizer: expected its state_dict() to be copied or saved, got itself: its gradients "
                          "belong to a store")

    def state_dict(self) -> "dict[str, Any]":
        """That of the wrapped optimizer."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: "Mapping[str, Any]") -> None:
        """Sets that of the wrapped optimizer."""
        self._inner.load_state_dict(dict(state_dict))

    def add_param_group(self, param_group: "dict[str, Any]") -> None:
        """Adds a group; its parameters get names by their number."""
        self._check_open("add_param_group")
        self._inner.add_param_group(param_group)
        try:
            self._add(self._names(None))
        except BaseException:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, once their exchanges, if there are any, are over. Raises InvalidState, and changes nothing,
        if a store_optimizer has updated by some of them already: `step` comes first then, also after a backward pass that
        has raised."""
        if self._store_optimizer is not None:
            for parcel in self._parcels:
                if parcel.sent:
                    raise InvalidState(f"zero_grad: the store has updated by the gradient of {parcel.key!r} already, which "
                                       "cannot be taken back: expected step() first, or no store_optimizer")
        self._settle()
        if set_to_none:
            for exchange in self._exchanges.values():
                exchange.gradient = None  # or its memory would live on
        self._inner.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Exchanges what is not under way yet and waits. The gradients have the values of the exchange then and may be
        changed; `step` only updates the weights."""
        self._check_open("synchronize")
        if self._store_optimizer is not None:
            raise InvalidState("synchronize: the store updates the weights by the gradients as backward leaves them: "
                               "expected no store_optimizer")
        with self._settled_if_it_fails(), torch.no_grad():
            self._exchange_gradients()

    def step(self, closure: "Callable[[], Any] | None" = None) -> Any:
        """Exchanges what is not under way yet, waits, and updates the weights, which may be read then. Raises the
        errors of the exchange; the weights are not updated then. What had gone to a store_optimizer stays gone: a further
        `step` takes the weights that it has made."""
        self._check_open("step")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        with self._settled_if_it_fails(), torch.no_grad():
            self._finish()
        self._settle()
        return result

    def close(self) -> None:
        """Waits for what is under way, and takes the keys out of the store, with what its optimizer keeps for them, and the
        hooks off the parameters. So does dropping it, as soon as nobody else has it; neither makes others wait. All ranks
        do it before the same names are used again in that store."""
        self._settle_all()
        self._is_closed = True
        if isinstance(self._store, _kvstore.KVStore):
            _users[self._store].open.discard(self)
        for end in self._ends:
            end()

    # The exchange.

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise InvalidState(f"{call}: the DistributedOptimizer is closed")

    def _check_rule(self, store_optimizer: "_optimizer.Optimizer") -> None:
        """The store may have it, or none, or one that closed DistributedOptimizers have left."""
        users, rule = _users.get(self._store, _Users()), _rule_of(self._store)
        for other in users.open:
            if other._store_optimizer is None:
                raise InvalidArgument("DistributedOptimizer: the store sums the gradients of another DistributedOptimizer, "
                                      "and would update by them: expected no store_optimizer, or a store of its own")
            if other._store_optimizer is not store_optimizer:
                raise InvalidArgument("DistributedOptimizer: the store updates by the store_optimizer of another "
                                      "DistributedOptimizer: expected its store_optimizer, or a store of its own")
        if rule is not None and rule is not store_optimizer and rule is not users.brought():
            raise InvalidArgument("DistributedOptimizer: the store has an optimizer already, which store_optimizer would "
                                  "replace: expected that one, or a store without one")

    def _names(self, named: "Iterable[tuple[str, torch.Tensor]] | None") -> "list[tuple[str, torch.Tensor]]":
        """The parameters that are not known yet, by name."""
        grouped = [parameter for group in self.param_groups for parameter in group["params"]]
        if named is None:
            found = [(f"parameter.{i}", parameter) for i, parameter in enumerate(grouped)]
        else:
            found = _pairs("DistributedOptimizer", named)
            without = len(set(grouped) - {parameter for _, parameter in found})
            if without:
                raise InvalidArgument(f"DistributedOptimizer: expected a name for each parameter of the optimizer, got "
                                      f"none for {without} of {len(grouped)}")
            for name, _ in found:
                if not isinstance(name, str):
                    raise InvalidType(f"DistributedOptimizer: expected names of type str, got {name!r}")
            if len({name for name, _ in found}) != len(found):
                raise InvalidArgument("DistributedOptimizer: expected names that differ, got one twice")
        new = set(grouped) - self._exchanges.keys() - {parameter for _, parameter in self._frozen}
        names: "dict[torch.Tensor, str]" = {}
        for name, parameter in found:
            if parameter in new:
                names.setdefault(parameter, name)  # layers that are tied give theirs several
        return [(name, parameter) for parameter, name in names.items()]

    def _add(self, named: "list[tuple[str, torch.Tensor]]") -> None:
        prefix = "" if self._store_optimizer is not None else "gradient."
        frozen = [one for one in named if not one[1].requires_grad]
        added = [_Exchange(parameter, prefix + name, -(len(self._exchanges) + i)) for i, (name, parameter)
                 in enumerate((name, parameter) for name, parameter in named if parameter.requires_grad)]
        parcels = _pack(added, together=self._store_optimizer is None)
        self._exchanges.update((exchange.parameter, exchange) for exchange in added)
        keys: "list[str]" = []  # in the store
        try:
            if self._store_optimizer is not None:
                self._follow_rates()
                self._start_weights(added, keys)
            elif isinstance(self._store, _kvstore.KVStore):
                self._start_gradients(parcels, keys)
        except BaseException:
            for exchange in added:
                del self._exchanges[exchange.parameter]
            _remove_keys(self._store, keys)
            raise
        self._frozen += frozen
        self._parcels += parcels
        hooks = [hook for exchange in added for hook in _hook(exchange, self)]
        # The store's is weak: one that goes together with this optimizer has no keys to remove.
        end = weakref.finalize(self, _end, hooks, weakref.ref(self._store), keys)
        end.atexit = False
        self._ends.append(end)

    def _add_thawed(self) -> None:
        """Those that were frozen: all ranks train the same ones, so all get here by the same step."""
        thawed = [one for one in self._frozen if one[1].requires_grad]
        if thawed:
            self._rates = []  # the store has none of theirs
            self._add(thawed)
            self._frozen = [one for one in self._frozen if not one[1].requires_grad]

    def _start_gradients(self, parcels: "list[_Parcel]", keys: "list[str]") -> None:
        zeros = []
        for parcel in parcels:
            size = sum(member.parameter.numel() for member in parcel.members)
            first = parcel.members[0].parameter
            shape = first.shape if len(parcel.members) == 1 else (size,)
            zeros.append(_nd.from_dlpack(torch.zeros(shape, dtype=first.dtype)))
        for parcel, array in zip(parcels, zeros):
            self._store.init(parcel.key, array)
            keys.append(parcel.key)

    def _start_weights(self, added: "list[_Exchange]", keys: "list[str]") -> None:
        """The store has rank 0's weights, and so does each rank."""
        for exchange in added:
            exchange.shared_weight().load()
        for exchange in added:
            weight = exchange.shared_weight()
            self._store.init(exchange.key, weight.array)
            keys.append(exchange.key)
            self._store.pull(exchange.key, out=weight.array)
        for exchange in added:
            exchange.wait_for_weight()

    def _follow_rates(self) -> None:
        """Makes the store's optimizer, if it has one, have the rates of the groups."""
        optimizer = self._store_optimizer
        if optimizer is None:
            return
        rates = [(float(group["lr"]), group.get("weight_decay")) for group in self.param_groups]
        for i, (pushed, now) in enumerate(zip(self._pushed_rates, rates)):
            if pushed != now:
                raise InvalidState(f"DistributedOptimizer: the rates of group {i} (learning rate and weight decay) were set "
                                   f"from {pushed} to {now} after the store had updated by gradients of this step: expected "
                                   "rates that are set before backward or after step, or no store_optimizer")
        if rates == self._rates and optimizer.lr_mult is self._multipliers:  # else another one has set its own
            return
        highest = max(rate for rate, _ in rates)
        decays = [decay for _, decay in rates if decay is not None]
        strongest = max(decays, default=0.0)
        lr_mult, wd_mult = {}, {}
        for group, (rate, decay) in zip(self.param_groups, rates):
            for parameter in group["params"]:
                if parameter in self._exchanges:
                    key = self._exchanges[parameter].key
                    lr_mult[key] = rate / highest if highest else 1.0
                    wd_mult[key] = decay / strongest if strongest and decay is not None else 1.0
        optimizer.lr = highest
        optimizer.set_lr_mult(lr_mult)
        if decays:
            optimizer.wd = strongest
            optimizer.set_wd_mult(wd_mult)
        self._rates = rates
        self._multipliers = optimizer.lr_mult

    def _is_taken(self, exchange: _Exchange) -> bool:
        """Whether the gradient belongs to the exchange, or to what follows it, until the next step."""
        return exchange.handed is not None or self._synchronized or (exchange.parcel is not None and exchange.parcel.sent)

    def _refuse_taken(self, exchange: _Exchange) -> None:
        if self._is_taken(exchange):
            calls = "step()" if self._store_optimizer is not None else "step() or zero_grad()"
            raise InvalidState(f"backward: the gradient of {exchange.key!r} is being exchanged: expected {calls} after "
                               f"{self._passes} backward pass{'es' * (self._passes > 1)} (backward_passes_per_step)")

    def _before_gradient(self, exchange: _Exchange) -> None:
        """Backward is about to write the gradient."""
        if exchange.gradient is not None:
            exchange.gradient.array.wait_to_write()
        gradient = exchange.parameter.grad
        exchange.former_version = None if gradient is None else gradient._version

    def _after_gradient(self, exchange: _Exchange) -> None:
        exchange.count_write(self._writes)
        exchange.passes += 1
        if exchange.passes < self._passes:
            return
        exchange.hand_over(self._writes)
        parcel = exchange.parcel
        assert parcel is not None
        parcel.missing -= 1
        if parcel.missing == 0:
            self._send(parcel)

    def _send(self, parcel: _Parcel) -> None:
        if _rule_of(self._store) is not self._store_optimizer:
            raise InvalidState(f"DistributedOptimizer: {parcel.key!r}: the store updates by another optimizer than when the "
                               "DistributedOptimizer was made: expected one that stays, or a store of its own")
        self._follow_rates()
        if self._store_optimizer is not None:
            for member in parcel.members:
                member.check_weight()
        with torch.no_grad():
            array = parcel.load()
        if self._store_optimizer is not None:
            self._store.push(parcel.key, array, priority=parcel.priority)
            self._pushed_rates = self._rates
        else:
            self._store.pushpull(parcel.key, array, out=array, priority=parcel.priority)
        parcel.sent = True

    def _send_rest(self) -> "list[_Parcel]":
        """Sends what is not under way yet; returns all that is."""
        for exchange in self._exchanges.values():
            if exchange.has_changed(self._writes):
                advice = ("gradients to stay as they are, since store_optimizer has them" if self._store_optimizer
                          is not None else "synchronize() before, to change what has been exchanged")
                raise InvalidState(f"DistributedOptimizer: the gradient of {exchange.key!r} was changed after backward had "
                                   f"handed it to the store: expected {advice}")
        self._follow_rates()
        self._add_thawed()
        used = []
        for parcel in self._parcels:
            if not parcel.sent:
                parameters = [member.parameter for member in parcel.members]
                if self._store.num_workers > 1:
                    for parameter in parameters:
                        if parameter.grad is None and parameter.requires_grad:  # a frozen one must not decay
                            parameter.grad = torch.zeros_like(parameter)
                if all(parameter.grad is None for parameter in parameters):
                    continue
                self._send(parcel)
            used.append(parcel)
        return used

    def _exchange_gradients(self) -> None:
        """At most once a step."""
        if self._synchronized:
            return
        gradients = [gradient for parcel in self._send_rest() for gradient in parcel.unload()]
        if self._divisor > 1 and gradients:
            torch._foreach_div_(gradients, self._divisor)
        self._synchronized = True

    def _pull_weights(self) -> None:
        used = [member for parcel in self._send_rest() for member in parcel.members]
        for exchange in used:
            exchange.check_weight()
        for exchange in used:
            self._store.pull(exchange.key, out=exchange.shared_weight().array, priority=exchange.priority)
        for exchange in used:
            exchange.wait_for_weight()

    def _finish(self) -> None:
        if "found_inf" in self.__dict__:  # by GradScaler
            if self._store_optimizer is not None:
                raise InvalidState("step: the gradients have gone to store_optimizer as GradScaler had scaled them: "
                                   "expected no GradScaler, or no store_optimizer")
            if not self._synchronized:
                raise InvalidState("step: GradScaler reads and changes gradients that are being exchanged: expected "
                                   "synchronize() before unscale_() and step() of it")
            self._step_scaled(self.__dict__.get("grad_scale"), self.__dict__["found_inf"])
        elif self._store_optimizer is not None:
            self._pull_weights()
        else:
            self._exchange_gradients()
            self._inner.step()

    def _step_scaled(self, grad_scale: "torch.Tensor | None", found_inf: torch.Tensor) -> None:
        """The step of the wrapped optimizer with what GradScaler has found; grad_scale is None after unscale_()."""
        attributes = self._inner.__dict__
        if getattr(self._inner, "_step_supports_amp_scaling", False):  # a fused one, which heeds them itself
            found = {"grad_scale": grad_scale, "found_inf": found_inf}
            former = {name: attributes[name] for name in found if name in attributes}
            attributes.update(found)
            try:
                self._inner.step()
            finally:
                for name in found:
                    del attributes[name]
                attributes.update(former)
        elif not found_inf.item():
            gradients = [parameter.grad for parameter in self._exchanges if parameter.grad is not None]
            if grad_scale is not None and gradients:
                torch._foreach_mul_(gradients, 1 / grad_scale.item())
            self._inner.step()

    @contextlib.contextmanager
    def _settled_if_it_fails(self) -> "Iterator[None]":
        try:
            yield
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # which GradScaler leaves where step fails
                self.__dict__.pop(name, None)
            if self._store_optimizer is None:
                self._settle_all()  # the first error says it
            else:
                self._tell_once()
            raise

    def _settle(self) -> None:
        self._begin()
        for parcel in self._parcels:
            parcel.settle()

    def _settle_all(self) -> None:
        """Also if some have failed, which it does not raise."""
        self._begin()
        for parcel in self._parcels:
            with contextlib.suppress(Exception):
                parcel.settle()

    def _tell_once(self) -> None:
        """What has gone to the store_optimizer stays gone, or a further `step` would push it again; it goes on without what
        was refused."""
        self._begin()
        for parcel in self._parcels:
            sent = parcel.sent
            with contextlib.suppress(Exception):
                parcel.settle()
            parcel.sent = sent

    def _begin(self) -> None:
        """What was noted since the last step is over."""
        self._synchronized = False
        self._pushed_rates = []
        self._writes.clear()


def _checked(call: str, store: Any) -> Any:
    if not isinstance(store, _kvstore.KVStoreBase):
        raise InvalidType(f"{call}: expected a store, got {store!r}")
    return store


def _pairs(call: str, named: Any) -> "list[tuple[str, torch.Tensor]]":
    try:
        pairs = [(name, value) for name, value in named]
    except (TypeError, ValueError) as error:
        raise InvalidType(f"{call}: expected pairs of names and tensors, got {named!r}") from error
    for name, value in pairs:
        if not isinstance(value, torch.Tensor):
            raise InvalidType(f"{call}: expected tensors, got {type(value).__name__} as {name!r}")
    return pairs


def _average(optimizer: "_optimizer.Optimizer", divisor: int) -> None:
    """Makes a store's optimizer divide the sum over workers, once: several models may have the same one."""
    former = vars(optimizer).get("_averaged")  # the divisor and what rescale_grad was by it; copies have it too
    if former is not None and former[1] == optimizer.rescale_grad:
        if former[0] != divisor:
            raise InvalidArgument(f"DistributedOptimizer: store_optimizer divides by {former[0]} for another one: expected "
                                  f"one of its own, to divide by {divisor}")
        return
    optimizer.rescale_grad = optimizer.rescale_grad / divisor
    optimizer._averaged = divisor, optimizer.rescale_grad


def _hook(exchange: _Exchange, optimizer: DistributedOptimizer) -> "list[Any]":
    """Tells the optimizer, as long as it lives, what backward does with a gradient. The hooks have to go with it: the
    parameter, which may live on, keeps them, and they the exchange."""
    reference = weakref.ref(optimizer)

    def refuse(_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive._refuse_taken(exchange)

    def before(_: torch.Tensor) -> None:
        alive = reference()
        if alive is None:
            return
        if not alive._is_taken(exchange):
            alive._before_gradient(exchange)
            return
        # autograd.grad, which writes no .grad, comes here too, but not to the node that writes it. That node may be another
        # one each time, so it gets the hook now.
        if exchange.guard is not None:
            exchange.guard.remove()
        exchange.guard = torch.autograd.graph.get_gradient_edge(exchange.parameter).node.register_prehook(refuse)

    def after(_: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._after_gradient(exchange)

    return [exchange.parameter.register_hook(before), exchange.parameter.register_post_accumulate_grad_hook(after)]


def _remove_keys(store: Any, keys: "list[str]") -> None:
    for key in keys if store is not None else ():
        with contextlib.suppress(Error):  # of a store that is closed, or has failed
            store.remove(key)


def _end(hooks: "list[Any]", store: "Callable[[], Any]", keys: "list[str]") -> None:
    for hook in hooks:
        hook.remove()
    _remove_keys(store(), keys)


def broadcast_parameters(parameters: "torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]]",
                         store: "_kvstore.KVStoreBase") -> None:
    """Gives all ranks the tensors of rank 0. Returns when they are there; the store keeps nothing of them.

    parameters: a module, its state_dict() or (name, tensor) pairs, of the same names and shapes at all ranks, which
        make the same calls.
    """
    _checked("broadcast_parameters", store)
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.state_dict()
    named = _pairs("broadcast_parameters", parameters.items() if isinstance(parameters, Mapping) else parameters)
    under_way = []
    try:
        for name, tensor in named:
            if tensor.numel() == 0:
                continue
            key, shared = f"broadcast.{name}", _Shared(tensor)
            shared.load()
            store.broadcast(key, shared.array, out=shared.array)
            under_way.append((key, shared))
        for _, shared in under_way:
            shared.wait()
    finally:
        if isinstance(store, _kvstore.KVStore):
            for key, _ in under_way:
                store.remove(key)
