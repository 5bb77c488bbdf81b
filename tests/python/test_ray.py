"""heddle.ray: jobs on a real Ray cluster, which the test starts on this machine."""

import contextlib
import os
import pathlib
import sys
import time

import pytest

ray = pytest.importorskip("ray", reason="needs Ray: tools/setup.sh ray installs it")

import heddle  # noqa: E402
import heddle.ray  # noqa: E402


CPUS = 5  # for 4 processes, but not for 8


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=CPUS, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}})
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # which the actors cannot import
    yield
    ray.shutdown()


def total(scale):
    import heddle as mx
    store = mx.kv.create("dist_sync")
    store.init("w", mx.nd.zeros((3,)))
    store.push("w", mx.nd.full((3,), scale * (store.rank + 1)))
    out = mx.nd.zeros((3,))
    store.pull("w", out=out)
    store.barrier()
    return store.rank, store.num_workers, out.asnumpy().tolist()


def test_workers_results_come_back_by_rank():
    assert heddle.ray.run(total, 3, 1, args=(2,)) == [(rank, 3, [12.0] * 3) for rank in range(3)]


def roles_that_run():
    """Ids of the processes of actors, by the names that Ray gives them."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if b"ray::_Role" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def works_on(file):
    """Writes to a file for as long as its process is there."""
    import threading

    import heddle as mx
    store = mx.kv.create("dist_sync")

    def work():
        while True:
            with open(file, "a") as opened:
                opened.write("x")

    threading.Thread(target=work, daemon=True).start()
    store.barrier()
    if store.rank == 0:
        raise RuntimeError("enough")
    store.barrier()


def test_a_job_leaves_nothing_so_the_next_one_has_the_whole_cluster(tmp_path):
    """Its processes used to go on for a moment behind the call."""
    for _ in range(2):
        assert len(heddle.ray.run(total, 2, 2, kwargs={"scale": 1})) == 2
        assert roles_that_run() == []
    with pytest.raises(heddle.Error, match="enough"):
        heddle.ray.run(works_on, 2, 1, args=(str(tmp_path / "file"),))
    assert roles_that_run() == []
    written = (tmp_path / "file").stat().st_size
    time.sleep(0.1)
    assert (tmp_path / "file").stat().st_size == written > 0


def test_processes_that_stay_are_named(monkeypatch):
    monkeypatch.setattr(heddle.ray, "_END_SECONDS", 0.2)
    group = ray.util.placement_group([{"CPU": 1}])
    here = ray.put((ray.get_runtime_context().get_node_id(), os.getpid()))  # which does not end
    with pytest.warns(RuntimeWarning, match=f"expected the actors to end within 0.2 s, .*worker 0 .process {os.getpid()}."):
        heddle.ray._end(group, [], {here: "worker 0"})


def fails_at(rank, how):
    import os as system

    import heddle as mx
    store = mx.kv.create("dist_sync")
    store.init("w", mx.nd.zeros((3,)))
    if store.rank == rank:
        if how == "dies":
            system._exit(3)
        if how == "raises":
            raise RuntimeError("the data is gone")
        store.pull("unknown", out=mx.nd.zeros((3,)))
    store.barrier()


def test_a_workers_exception_surfaces_with_its_name():
    with pytest.raises(heddle.Error, match=r"worker [01].*") as raised:
        heddle.ray.run(fails_at, 2, 1, args=(1, "raises"))
    assert "worker 1" in str(raised.value)


def test_a_typed_error_keeps_its_type():
    with pytest.raises(heddle.UnknownKey, match="worker 0: .*unknown"):
        heddle.ray.run(fails_at, 1, 1, args=(0, "asks"))


def test_an_actor_that_dies_is_a_network_error():
    with pytest.raises(heddle.NetworkError, match="worker 1"):
        heddle.ray.run(fails_at, 2, 1, args=(1, "dies"))


def test_what_the_cluster_does_not_have_is_named():
    with pytest.raises(heddle.TimeoutError, match="no_such_thing"):
        heddle.ray.run(total, 1, 1, args=(1,), worker_resources={"CPU": 1, "no_such_thing": 1}, start_timeout=0.5)


@pytest.mark.parametrize("workers, servers", [(0, 1), (1, 0), (-1, 1)])
def test_counts_below_one_are_errors(workers, servers):
    with pytest.raises(heddle.InvalidArgument, match="expected at least 1"):
        heddle.ray.run(total, workers, servers, args=(1,))


@pytest.mark.parametrize("fn, counts, expected", [
    (total, ("2",), "num_workers: expected a whole number, got str"), (total, (None,), "num_workers: .* got NoneType"),
    (total, (1, 1.5), "num_servers: .* got float"), (None, (1, 1), "fn: expected a function, got NoneType")])
def test_arguments_of_other_types_are_named(fn, counts, expected):
    """They were errors of Python's, or of a worker that had no function."""
    with pytest.raises(heddle.InvalidType, match=f"heddle.ray.run: {expected}"):
        heddle.ray.run(fn, *counts)
