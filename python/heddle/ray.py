"""Jobs on a Ray cluster.

    >>> import ray, heddle.ray
    >>> ray.init(address="auto")
    >>> def train(learning_rate):
    ...     import heddle as mx
    ...     store = mx.kv.create("dist_sync")
    ...     ...
    ...     return store.rank
    >>> heddle.ray.run(train, num_workers=4, num_servers=2, args=(0.1,))
    [0, 1, 2, 3]

The scheduler, the servers and the workers are actors in one placement group, each with a process of its own. Workers
call the function and its results come back in the order of ranks. The job's token travels as an argument of Ray's
calls and is in the environment of its processes alone.
"""

from __future__ import annotations

import contextlib
import numbers
import os
import secrets
import socket
import time
import warnings
from typing import Any, Callable, Mapping, Sequence

try:
    import ray as _ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as _error:
    raise ImportError("heddle.ray needs Ray, which is not installed: pip install ray") from _error

from .error import Error, InvalidArgument, InvalidType, NetworkError, TimeoutError

__all__ = ["run"]

_END_SECONDS = 30.0  # for the actors of a job to end


class _Role:
    """One process of a job, as an actor."""

    def address(self) -> "tuple[str, int]":
        """Of this process's machine, and a port that is free there now."""
        host = _ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as probe:
            return host, int(probe.getsockname()[1])

    def process(self) -> "tuple[str, int]":
        """The id of its node, and that of its process there."""
        return _ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, environment: "Mapping[str, str]", fn: "Callable[..., Any] | None", args: "Sequence[Any]",
            kwargs: "Mapping[str, Any]") -> Any:
        """Becomes what the environment says: a worker calls `fn`, another role serves until the job ends."""
        for name in list(os.environ):
            if name.startswith("DMLC_") and name not in environment:
                del os.environ[name]
        os.environ.update(environment)
        if fn is not None:
            return fn(*args, **kwargs)
        from . import server

        server.run(environment["HEDDLE_ROLE"])
        return None


def _name(role: str, rank: int) -> str:
    return role if role == "scheduler" else f"{role} {rank}"


def _environment(role: str, rank: int, job: "Mapping[str, str]") -> "dict[str, str]":
    environment = {**job, "HEDDLE_ROLE": role}
    if role != "scheduler":
        environment["HEDDLE_RANK"] = str(rank)
    return environment


def _as_ours(name: str, error: Exception) -> Error:
    """The typed error that an actor's end stands for."""
    if isinstance(error, _ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, Error):
            return type(cause)(f"{name}: {cause}")
        return Error(f"{name}: {type(cause).__name__}: {cause}")
    return NetworkError(f"{name}: its actor has failed: {str(error).strip().splitlines()[0]}")


def _gather(names: "Mapping[Any, str]", workers: "Sequence[Any]") -> "list[Any]":
    """The workers' results; the first failure, of whatever role, is raised as ours. Servers and the scheduler end
    when all workers have left the job."""
    waiting, left = list(names), set(workers)
    while left:
        done, waiting = _ray.wait(waiting, num_returns=1)
        for reference in done:
            left.discard(reference)
            try:
                _ray.get(reference)
            except _ray.exceptions.RayError as error:
                raise _as_ours(names[reference], error) from error
    return list(_ray.get(list(workers)))


def _left_of(processes: "Sequence[int]", seconds: float) -> "list[int]":
    """Those of this machine that have not ended after so long."""
    deadline = time.monotonic() + seconds
    while True:
        left = []
        for process in processes:
            with contextlib.suppress(OSError):  # it is gone, or the id is another user's now
                os.kill(process, 0)
                left.append(process)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.01)


def _end(group: Any, actors: "Sequence[Any]", processes: "Mapping[Any, str]") -> None:
    """Kills the actors and returns when their processes are gone, for which Ray's own calls do not wait: a task on each
    node looks. `processes`: the names of those by the results of `_Role.process`."""
    for actor in actors:
        _ray.kill(actor)
    remove_placement_group(group)
    by_node: "dict[str, dict[int, str]]" = {}
    for reference, name in processes.items():
        with contextlib.suppress(_ray.exceptions.RayError):  # it had not begun
            node, process = _ray.get(reference, timeout=_END_SECONDS)
            by_node.setdefault(node, {})[process] = name
    looks = [(_ray.remote(_left_of).options(
        num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(list(names), _END_SECONDS), names) for node, names in by_node.items()]
    left = []
    for look, names in looks:
        try:
            still = _ray.get(look, timeout=2 * _END_SECONDS)  # it has to begin first
        except _ray.exceptions.RayError:  # nobody knows
            still = list(names)
        left += [f"{names[process]} (process {process})" for process in still]
    if left:
        warnings.warn(f"heddle.ray.run: expected the actors to end within {_END_SECONDS:g} s, got no end of {', '.join(left)}",
                      RuntimeWarning, stacklevel=3)


def run(fn: "Callable[..., Any]", num_workers: int, num_servers: "int | None" = None, *, args: "Sequence[Any]" = (),
        kwargs: "Mapping[str, Any] | None" = None, worker_resources: "Mapping[str, float] | None" = None,
        server_resources: "Mapping[str, float] | None" = None, strategy: str = "PACK",
        environment: "Mapping[str, str] | None" = None, start_timeout: float = 60.0) -> "list[Any]":
    """Runs ``fn(*args, **kwargs)`` as each worker of a job on the Ray cluster that this program is connected to, and
    returns the results by rank.

    Args:
        fn: what workers run; Ray sends it to them, so it imports what it needs itself.
        num_workers, num_servers: processes of these roles; as many servers as workers unless said.
        worker_resources, server_resources: of Ray's for each process, ``{"CPU": 1}``. The scheduler takes no CPU.
        strategy: of the placement group: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or ``STRICT_SPREAD``.
        environment: more variables for all processes.
        start_timeout: seconds for the cluster to have the resources.

    Raises:
        InvalidArgument: a count below 1, or Ray is not initialised. InvalidType: `fn` is no function, or a count no
            whole number.
        TimeoutError: the cluster did not have the resources in time; names them.
        Error: what the first worker, server or scheduler that failed raised, with its name in front: of its own class
            if it is one of heddle's. NetworkError: an actor died.

    The actors' processes are gone when it returns or raises; a RuntimeWarning names those that are not half a minute
    after they were killed.
    """
    if not callable(fn):
        raise InvalidType(f"heddle.ray.run: fn: expected a function, got {type(fn).__name__}")
    num_servers = num_workers if num_servers is None else num_servers
    for field, count in (("num_workers", num_workers), ("num_servers", num_servers)):
        if not isinstance(count, numbers.Integral):
            raise InvalidType(f"heddle.ray.run: {field}: expected a whole number, got {type(count).__name__}")
        if count < 1:
            raise InvalidArgument(f"heddle.ray.run: {field}: expected at least 1, got {count}")
    if not _ray.is_initialized():
        raise InvalidArgument("heddle.ray.run: expected a program that is connected to Ray: call ray.init() first")
    places = [("scheduler", 0, {"CPU": 0.001})]
    places += [("server", rank, dict(server_resources or {"CPU": 1})) for rank in range(num_servers)]
    places += [("worker", rank, dict(worker_resources or {"CPU": 1})) for rank in range(num_workers)]
    group = placement_group([resources for _, _, resources in places], strategy=strategy)
    actors: "list[Any]" = []
    processes: "dict[Any, str]" = {}
    try:
        if not group.wait(start_timeout):
            raise TimeoutError(f"heddle.ray.run: the cluster did not have the resources of {num_workers} workers and "
                               f"{num_servers} servers within {start_timeout:g} s: "
                               f"{[resources for _, _, resources in places]}")
        for index, (role, rank, resources) in enumerate(places):
            others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
            actors.append(_ray.remote(_Role).options(
                num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), resources=others,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote())
            processes[actors[-1].process.remote()] = _name(role, rank)
        host, port = _ray.get(actors[0].address.remote())
        job = {**(environment or {}), "HEDDLE_ROOT_HOST": host, "HEDDLE_ROOT_PORT": str(port),
               "HEDDLE_JOB_WORKERS": str(num_workers), "HEDDLE_JOB_SERVERS": str(num_servers),
               "HEDDLE_JOB_ID": secrets.token_hex(8), "HEDDLE_TOKEN": secrets.token_hex(32)}
        names = {}
        for actor, (role, rank, _) in zip(actors, places):
            reference = actor.run.remote(_environment(role, rank, job), fn if role == "worker" else None, tuple(args),
                                         dict(kwargs or {}))
            names[reference] = _name(role, rank)
        return _gather(names, list(names)[1 + num_servers:])
    finally:
        _end(group, actors, processes)
