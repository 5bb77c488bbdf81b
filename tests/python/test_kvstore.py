"""Stores through Python: every call, keys and lists, updaters, stores and optimizers of one's own, errors."""

import gc
import subprocess
import sys
import threading
import traceback
import types
import warnings
import weakref

import numpy
import pytest

import heddle as mx

SHAPE = (2, 3)


@pytest.fixture(params=["local", "device"])
def kv(request):
    return mx.kv.create(request.param)


def ones(value=1.0, ctx=None, shape=SHAPE):
    return mx.nd.ones(shape, ctx) * value


def pulled(kv, key, shape=SHAPE, **arguments):
    out = mx.nd.zeros(shape)
    kv.pull(key, out=out, **arguments)
    values = out.asnumpy()
    assert (values == values.flat[0]).all()
    return values.flat[0]


def test_what_it_says_of_itself(kv):
    assert kv.type in ("local", "device") and kv.rank == 0 and kv.num_workers == 1
    assert isinstance(kv, mx.kv.KVStore) and isinstance(kv, mx.kv.KVStoreBase)
    assert kv.is_capable(mx.kv.KVStoreBase.OPTIMIZER) and kv.is_capable("Compression")
    assert not kv.is_capable("telepathy")
    assert kv.num_dead_nodes == 0
    kv.barrier()
    kv._barrier()
    kv._send_command_to_servers(0, "nobody hears it")


def test_names_of_types():
    assert mx.kv.create().type == "local" and mx.kv.create("LOCAL").type == "local"
    for unknown in ("nonsense", "dist_sinc"):
        with pytest.raises(ValueError, match="device.*local"):
            mx.kv.create(unknown)
    with pytest.raises(TypeError, match="NoneType"):
        mx.kv.create(None)
    assert {"local", "device", "teststore"} <= set(mx.kv.types())


def test_keys_of_both_kinds_and_their_errors():
    for good, other in ((3, "3"), ("3", 3)):
        kv = mx.kv.create("local")
        kv.init(good, ones())
        assert good in kv and kv.keys() == [good]
        with pytest.raises(ValueError, match="kind|string|integer"):
            kv.push(other, ones())
    kv = mx.kv.create("local")
    kv.init(numpy.int64(5), ones())
    assert kv.keys() == [5]
    kv.init(-(2**63), ones())
    for bad in (b"3", 3.0, True, None, numpy.float32(3), object()):
        with pytest.raises(TypeError, match="str or int"):
            kv.init(bad, ones())
    with pytest.raises(mx.InvalidArgument, match="64 bits"):
        kv.init(2**63, ones())
    for call in (kv.init, kv.push, kv.reset, lambda key, value: kv.pull(key, out=value)):
        with pytest.raises(mx.InvalidType, match="str or int, got ndarray"):
            call(numpy.array([1, 2]), ones())
    names = mx.kv.create("local")
    with pytest.raises(mx.InvalidArgument, match=r"UTF-8 can encode, got 'a\\udc80'"):
        names.init("a\udc80", ones())
    assert names.keys() == []
    kv.remove(5)
    assert 5 not in kv


def test_unknown_keys_are_key_errors(kv):
    kv.init("a", ones())
    out = ones(7)
    for call in (lambda: kv.pull("b", out=out), lambda: kv.remove("b"), lambda: kv.reset("b", ones()),
                 lambda: kv.pull(["a", "b"], out=[out, out])):
        with pytest.raises(KeyError, match="unknown key 'b'") as caught:
            call()
        assert isinstance(caught.value, mx.Error) and isinstance(caught.value, ValueError)
        assert not str(caught.value).startswith(("'", '"'))
    assert (out.asnumpy() == 7).all()
    kv.init("b", ones(2))  # the failure left the key free
    assert pulled(kv, "b") == 2


@pytest.mark.parametrize("call", ["init", "push", "pushpull", "reset"])
def test_values_are_checked(kv, call):
    kv.init("a", ones())
    function = getattr(kv, call)
    for bad in (None, 1.0, numpy.ones(SHAPE), "text", [ones(), None], [[ones()]]):
        with pytest.raises(TypeError, match="key 'a': expected an NDArray"):
            function("a", bad)
    rows = ones().tostype("row_sparse")
    with pytest.raises(ValueError, match=f"{call}: key 'b': expected arrays of one kind, got dense and row_sparse"):
        function("b", [ones(), rows])
    if call != "reset":
        with pytest.raises(ValueError, match="key 'c': expected arrays of one kind"):
            function(["b", "c"], [[ones(), ones()], [rows, ones()]])
    if call != "init":
        for bad in (ones(shape=(3, 2)), ones().astype("int32"), []):
            with pytest.raises(ValueError, match="'a'"):
                function("a", bad)
    assert pulled(kv, "a") == 1


def test_lists_have_to_match(kv):
    keys = ["a", "b"]
    kv.init(keys, [ones(), ones()])
    for bad in ([ones()], [ones()] * 3, ones()):
        with pytest.raises(ValueError, match="2"):
            kv.push(keys, bad)
        with pytest.raises(ValueError, match="2"):
            kv.pull(keys, out=bad)
    with pytest.raises(TypeError, match="out"):
        kv.pull("a")
    assert pulled(kv, "a") == 1


def test_nested_lists_of_keys(kv):
    kv.init([["a", "b"], "c"], [[ones(1), ones(2)], ones(3)])
    out = [mx.nd.zeros(SHAPE) for _ in range(3)]
    kv.pull([["a", "b"], "c"], out=[[out[0], out[1]], out[2]])
    assert [one.asnumpy()[0, 0] for one in out] == [1, 2, 3]
    kv.push(["a", "a", "b"], [ones(10), ones(20), ones(30)])  # a repeated key makes one list
    assert pulled(kv, "a") == 30 and pulled(kv, "b") == 30
    kv.push(("a", "b"), ([ones(1), ones(1)], [ones(2), ones(2)]))
    assert pulled(kv, "a") == 2 and pulled(kv, "b") == 4


def test_the_pushed_array_may_be_overwritten_and_is_never_shown(kv):
    kv.init("a", ones())
    value = ones(5)
    for i in range(200):
        value[:] = i
        kv.push("a", value)
        value[:] = -1
        assert pulled(kv, "a") == i


def test_pushpull_without_out_writes_to_value(kv):
    kv.init("a", ones(0))
    values = [ones(1), ones(2, mx.cpu(1))]
    kv.pushpull("a", values)
    assert [one.asnumpy()[0, 0] for one in values] == [3, 3]


def test_pull_casts_and_broadcast_initialises(kv):
    out = [mx.nd.zeros(SHAPE, mx.cpu(1), "float64"), mx.nd.zeros(SHAPE, dtype="int32")]
    kv.broadcast("a", ones(2.5), out=out)
    assert out[0].asnumpy()[0, 0] == 2.5 and out[1].asnumpy()[0, 0] == 2
    with pytest.raises(ValueError, match="in the store already"):
        kv.broadcast("a", ones(), out=out)
    with pytest.raises(ValueError, match="in the store already"):
        kv.init("a", ones())


def test_strict_init():
    kv = mx.kv.create("local", strict_init=True)
    with pytest.raises(KeyError):
        kv.push("a", ones())


@pytest.mark.parametrize("false, true", [(0, 1), (numpy.bool_(False), numpy.bool_(True)), ("", "yes")])
def test_flags_are_what_python_takes_for_true_or_false(tmp_path, false, true):
    """Other than True and False they were refused."""
    kv = mx.kv.create("local", true)
    kv.init("rows", mx.nd.ones((3, 2)).tostype("row_sparse"))
    out = mx.nd.zeros((3, 2), stype="row_sparse")
    kv.pull("rows", out=out, ignore_sparse=true)
    assert out.asnumpy().sum() == 0
    kv.pull("rows", out=out, ignore_sparse=false)
    assert out.asnumpy().sum() == 6
    with pytest.raises(mx.UnknownKey):
        kv.push("other", out)
    mx.kv.create("local", false).push("other", out)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.25))
    for flag, rate in ((false, 0.5), (true, 0.25)):
        kv.save_optimizer_states(tmp_path / "states", flag)
        other = mx.kv.create("local")
        other.init("rows", mx.nd.ones((3, 2)).tostype("row_sparse"))
        optimizer = mx.optimizer.SGD(learning_rate=0.5)
        other.set_optimizer(optimizer)
        other.load_optimizer_states(tmp_path / "states")
        assert optimizer.lr == rate
        updater, given = (mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=lr)) for lr in (0.25, 0.5))
        given.set_states(updater.get_states(flag))
        assert given.optimizer.lr == rate
    with pytest.raises(TypeError):
        kv.pull("rows", out=out, ignore_sparse=numpy.zeros(2))  # is neither


def test_updater_gets_keys_as_they_are_on_the_pushing_thread(kv):
    seen = []

    def update(key, grad, stored):
        seen.append((key, threading.get_ident(), type(grad), type(stored)))
        stored += grad * 2
        assert stored.asnumpy().shape == SHAPE  # it may wait

    kv.init(["a", "b"], [ones(1), ones(2)])
    kv._set_updater(update)
    kv.push(["b", "a"], [[ones(), ones()], ones()])
    here = threading.get_ident()
    assert sorted(seen, key=str) == sorted(
        [("b", here, mx.nd.NDArray, mx.nd.NDArray), ("a", here, mx.nd.NDArray, mx.nd.NDArray)], key=str)
    assert pulled(kv, "a") == 3 and pulled(kv, "b") == 6
    with pytest.raises(TypeError):
        kv._set_updater(None)
    with pytest.raises(ValueError, match="unknown key|updater"):
        kv.push("c", ones())


def test_an_exception_of_the_updater_leaves_push_with_its_traceback(kv):
    class Mine(Exception):
        pass

    def failing_update(key, grad, stored):
        raise Mine(f"on {key}")

    kv.init("a", ones(4))
    kv._set_updater(failing_update)
    for _ in range(2):
        with pytest.raises(Mine, match="on a") as caught:
            kv.push("a", ones())
        assert any(frame.name == "failing_update" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert pulled(kv, "a") == 4


def test_threads_push_through_an_updater(kv):
    kv.init("sum", ones(0))
    kv._set_updater(lambda key, grad, stored: stored.__iadd__(grad))

    def work():
        for _ in range(100):
            kv.push("sum", ones())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pulled(kv, "sum") == 400


def test_a_store_that_its_updater_refers_to_is_collected():
    class Owner:
        pass

    def make():
        owner = Owner()
        kv = mx.kv.create("local")
        kv._set_updater(lambda key, grad, stored: (owner, kv))
        owner.kv = kv
        return weakref.ref(owner)

    gc.collect()
    owner = make()
    gc.collect()
    assert owner() is None


def test_a_failed_input_comes_back_at_the_pull(kv):
    kv.init("a", ones(4))
    bad = ones()

    def fail():
        raise ZeroDivisionError("no gradient")

    mx.engine.push(fail, writes=[bad])
    kv.push("a", bad)
    out = mx.nd.zeros(SHAPE)
    kv.pull("a", out=out)
    with pytest.raises(ZeroDivisionError, match="no gradient"):
        out.asnumpy()
    kv.push("a", ones(5))
    assert pulled(kv, "a") == 5
    kv.reset("a", ones(6))
    assert pulled(kv, "a") == 6


def test_row_sparse_values(kv):
    shape = (5, 2)
    kv.init("rows", mx.nd.sparse.zeros("row_sparse", shape))
    value = mx.nd.sparse.row_sparse_array(([[1.0, 2.0], [3.0, 4.0]], [3, 1]), shape=shape)
    kv.push("rows", [value, value])
    out = [mx.nd.sparse.zeros("row_sparse", shape) for _ in range(2)]
    kv.row_sparse_pull("rows", out=out, row_ids=mx.nd.array([1, 0, 1]))
    assert out[0].indices.asnumpy().tolist() == [0, 1] and out[1].asnumpy()[1].tolist() == [6, 8]
    kv.row_sparse_pull("rows", out=out, row_ids=[mx.nd.array([3]), mx.nd.array([1])])
    assert out[0].indices.asnumpy().tolist() == [3] and out[1].indices.asnumpy().tolist() == [1]
    dense = mx.nd.zeros(shape)
    kv.pull("rows", out=dense)
    assert dense.asnumpy()[3].tolist() == [2, 4]
    kept = mx.nd.sparse.zeros("row_sparse", shape)
    kv.pull("rows", out=kept)  # left alone
    assert kept.indices.size == 0
    kv.pull("rows", out=kept, ignore_sparse=False)
    assert kept.indices.asnumpy().tolist() == [1, 3]
    kv.init("more", mx.nd.sparse.zeros("row_sparse", shape))
    kv.row_sparse_pull(["rows", "more"], out=[out[0], out[1]], row_ids=mx.nd.array([3]))
    assert out[0].asnumpy()[3].tolist() == [2, 4]
    for arguments, error in (({"out": out[0]}, TypeError), ({"row_ids": mx.nd.array([1])}, TypeError),
                             ({"out": dense, "row_ids": mx.nd.array([1])}, ValueError)):
        with pytest.raises(error):
            kv.row_sparse_pull("rows", **arguments)
    kv.row_sparse_pull("rows", out=out[0], row_ids=mx.nd.array([9]))
    with pytest.raises(ValueError, match="9"):
        out[0].asnumpy()


def test_row_ids_that_are_none_are_named(kv):
    kv.init(["a", "b"], [mx.nd.zeros((3, 2)).tostype("row_sparse")] * 2)
    out = mx.nd.zeros((3, 2)).tostype("row_sparse")
    for row_ids in ([0], 3, numpy.array([1])):
        with pytest.raises(mx.InvalidType, match="row_sparse_pull: row_ids: key 'a': expected an NDArray"):
            kv.row_sparse_pull("a", out=out, row_ids=row_ids)
    with pytest.raises(mx.InvalidArgument, match="row_sparse_pull: row_ids: expected a list of 2 values for 2 keys, got 1"):
        kv.row_sparse_pull(["a", "b"], out=[out, out.copy()], row_ids=[mx.nd.array([0])])


def test_row_sparse_gradients_reach_an_updater(kv):
    kinds = []

    def update(key, grad, stored):
        kinds.append((type(grad).__name__, type(stored).__name__))
        stored += grad

    kv.init("dense", mx.nd.zeros((4, 2)))
    kv._set_updater(update)
    kv.push("dense", mx.nd.ones((4, 2)).tostype("row_sparse"))
    assert kinds == [("RowSparseNDArray", "NDArray")]
    assert pulled(kv, "dense", (4, 2)) == 1


def test_gradient_compression():
    kv = mx.kv.create("local")
    for bad in ({"threshold": 0.5}, {"type": "3bit"}, {"type": "2bit", "treshold": 1},
                {"type": "2bit", "threshold": 0}):
        with pytest.raises(ValueError):
            kv.set_gradient_compression(bad)
    for bad in ("2bit", {"type": "2bit", "threshold": None}):
        with pytest.raises(TypeError):
            kv.set_gradient_compression(bad)
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init("w", mx.nd.zeros((4,)))
    out = mx.nd.zeros((4,))
    given = []
    for _ in range(3):
        kv.push("w", mx.nd.array([0.6, -0.7, 0.1, 0.5]))
        kv.pull("w", out=out)
        given.append(out.asnumpy().tolist())
    # 0.1 + 0.1 + 0.1 stays below the threshold; 0.6, 0.7 and 0.8, 0.9 are above it
    assert given == [[0.5, -0.5, 0, 0.5]] * 3


def test_teststore_sums_and_keeps_nothing():
    kv = mx.kv.create("TestStore")
    out = [ones(0), ones(0, mx.cpu(1))]
    kv.broadcast("a", ones(3), out=out)
    assert [one.asnumpy()[0, 0] for one in out] == [3, 3]
    values = [ones(1), ones(2, mx.cpu(1))]
    kv.pushpull("a", values, out=out[0])
    assert out[0].asnumpy()[0, 0] == 3
    kv.pushpull("a", values)
    assert [one.asnumpy()[0, 0] for one in values] == [3, 3]
    assert (kv.rank, kv.num_workers, kv.is_capable("optimizer")) == (0, 1, False)
    with pytest.raises(NotImplementedError, match="set_optimizer"):
        kv.set_optimizer(mx.optimizer.SGD())


def test_teststore_names_what_is_no_array():
    """They were an IndexError and AttributeErrors."""
    kv = mx.kv.create("teststore")
    for call, use in (("pushpull", lambda bad: kv.pushpull("a", bad)),
                      ("pushpull", lambda bad: kv.pushpull("a", ones(), out=bad)),
                      ("broadcast", lambda bad: kv.broadcast("a", ones(), out=bad))):
        with pytest.raises(mx.InvalidArgument, match=f"{call}: key 'a': expected one array at least, got none"):
            use([])
        for bad, kind in ((3, "int"), ([None], "NoneType"), ([ones(), 3], "int")):
            with pytest.raises(mx.InvalidType, match=f"{call}: key 'a': expected an NDArray, a RowSparseNDArray or a list of "
                                                     f"them, got {kind}"):
                use(bad)
    for use in (lambda: kv.pushpull("a", None), lambda: kv.broadcast("a", ones(), None)):
        with pytest.raises(mx.InvalidType, match="or a list of them, got NoneType"):
            use()
    for bad, kind in ((None, "NoneType"), ([ones()], "list")):
        with pytest.raises(mx.InvalidType, match=f"broadcast: key 'a': expected an NDArray or a RowSparseNDArray, got {kind}"):
            kv.broadcast("a", bad, out=ones())


def test_a_store_written_in_python():
    @mx.kv.KVStoreBase.register
    class Doubling(mx.kv.KVStoreBase):
        def pushpull(self, key, value, out=None, priority=0):
            (value * 2).copyto(value if out is None else out)

    try:
        kv = mx.kv.create("doubling")
        assert type(kv) is Doubling and "doubling" in mx.kv.types()
        out = ones(0)
        kv.pushpull("a", ones(3), out=out)
        assert out.asnumpy()[0, 0] == 6
        with pytest.raises(NotImplementedError, match="broadcast"):
            kv.broadcast("a", ones(), out)
        with pytest.warns(UserWarning, match="doubling"):
            mx.kv.KVStoreBase.register(Doubling)
        with pytest.raises(TypeError):
            mx.kv.KVStoreBase.register("Doubling")
    finally:
        del mx.kv.KVStoreBase.kv_registry["doubling"]


def test_a_store_written_in_python_may_be_called_by_ops():
    """On threads of the engine; what it raises comes back where its outputs are read."""
    class Counting(mx.kv.TestStore):
        def __init__(self):
            self.threads = []

        def pushpull(self, key, value, out=None, priority=0):
            if key == 13:
                raise ValueError(f"no key {key}")
            self.threads.append(threading.get_ident())
            super().pushpull(key, value, out, priority)

    kv, called = Counting(), threading.Event()
    mx.engine.push(lambda: (kv.pushpull("first", ones()), called.set()))
    assert called.wait(60) and kv.threads != [threading.get_ident()]  # this thread has waited for no op
    values = [[ones(i), ones(2 * i, mx.cpu(1))] for i in range(20)]
    outs = [ones(0) for _ in values]
    for i, (pair, out) in enumerate(zip(values, outs)):
        mx.engine.push(lambda i=i, pair=pair, out=out: kv.pushpull(i, pair, out=out), reads=pair, writes=[out])
    with pytest.raises(ValueError, match="no key 13"):
        mx.nd.waitall()
    mx.nd.waitall()  # what ops have pushed, too
    assert [out.asnumpy()[0, 0] for i, out in enumerate(outs) if i != 13] == [3 * i for i in range(20) if i != 13]
    assert len(kv.threads) == 20
    with pytest.raises(ValueError, match="no key 13"):
        outs[13].asnumpy()

    # And by an updater, when an op pushes.
    passed_on, local = ones(0), mx.kv.create()
    local.init("w", ones(1))
    local._set_updater(lambda key, grad, stored: kv.pushpull(key, [grad, stored], out=passed_on))
    mx.engine.push(lambda: local.push("w", ones(4)))
    mx.nd.waitall()
    assert passed_on.asnumpy()[0, 0] == 5


def test_a_store_that_was_never_made_is_collected():
    """Its memory was taken for a store's."""
    class Mine(mx.kv.KVStore):
        def __init__(self):
            self.itself = self

    for _ in range(3):
        with pytest.raises(TypeError), warnings.catch_warnings(action="ignore"):
            Mine().keys()
    gc.collect()


@pytest.mark.parametrize("name", ["horovod", "byteps"])
def test_adapters_say_what_is_missing(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(mx.Error, match=f"'{name}.torch' cannot be imported"):
        mx.kv.create(name)


@pytest.mark.parametrize("adapter", ["horovod", "byteps"])
def test_the_adapters_call_their_package(adapter, monkeypatch):
    class Tensor:
        def __init__(self, array):
            self.array = array

    calls = []
    torch = types.ModuleType("torch")
    torch.from_dlpack = lambda array: Tensor(numpy.from_dlpack(array))
    package, module = types.ModuleType(adapter), types.ModuleType(f"{adapter}.torch")
    package.torch = module
    module.init = lambda: calls.append("init")
    module.rank, module.local_rank, module.size, module.Sum = (lambda: 1), (lambda: 0), (lambda: 2), "sum"

    def allreduce_(tensor, op, name):
        calls.append((op, name))
        tensor.array *= 2  # two equal workers

    def byteps_push_pull(tensor, average, name, priority):
        allreduce_(tensor, average, name)
        return priority

    module.allreduce_, module.byteps_push_pull = allreduce_, byteps_push_pull
    module.broadcast_ = lambda tensor, root_rank, name: calls.append(("broadcast", root_rank, name))
    module.synchronize = lambda handle: calls.append(handle)
    for name, one in (("torch", torch), (adapter, package), (f"{adapter}.torch", module)):
        monkeypatch.setitem(sys.modules, name, one)
    kv = mx.kv.create(adapter)
    assert (kv.rank, kv.local_rank, kv.num_workers, kv.is_capable("optimizer")) == (1, 0, 2, False)
    value, out = ones(3), ones(0)
    kv.pushpull("w", value, out=out, priority=-1)
    kv.pushpull("w", value)
    assert out.asnumpy()[0, 0] == 6 and value.asnumpy()[0, 0] == 6
    kv.broadcast("w", value, out)
    with pytest.raises(mx.InvalidArgument, match="as many outputs as values, got 2 for 1"):
        kv.pushpull("w", [value], out=[value, out])
    if adapter == "horovod":
        assert out.asnumpy()[0, 0] == 6
        assert calls == ["init", ("sum", "w"), ("sum", "w"), ("broadcast", 0, "w")]
    else:  # a sum to which rank 1 adds zeros
        assert out.asnumpy()[0, 0] == 0
        assert calls == ["init", (False, "heddle_w"), -1, (False, "heddle_w"), 0, (False, "heddle_w"), 0]


def test_transfers_are_counted():
    kv = mx.kv.create("local")
    kv.init("a", ones())
    kv.push("a", ones())
    kv.pull("a", out=ones())
    assert kv.transfers == {"pushed_bytes": 24, "pulled_bytes": 24}


def test_a_dropped_store_finishes_its_work():
    out = mx.nd.zeros((1000, 100))
    kv = mx.kv.create("local")
    kv.init("a", mx.nd.ones((1000, 100)))
    kv.push("a", mx.nd.ones((1000, 100)) * 3)
    kv.pull("a", out=out)
    del kv
    assert (out.asnumpy() == 3).all()


def test_a_store_may_be_closed_while_others_use_it(kv):
    """By another thread, or by its own updater: it used to be gone in the middle of their calls."""
    kv.init([1, 2], [ones(), ones()])
    ended = []

    def work():
        a = ones()
        try:
            while True:
                kv.push(1, a)
                kv.pull(1, out=a)
                a.wait_to_read()
        except mx.InvalidState as error:
            ended.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()

    def update(key, value, stored):
        stored += value
        if key == 2:
            kv.close()

    kv._set_updater(update)
    kv.push(2, ones())
    for thread in threads:
        thread.join()
    assert ended == ["the store is closed"] * 3


@pytest.mark.parametrize("new", ["updater", "optimizer"])
def test_a_push_ends_with_the_updater_that_it_began_with(new):
    kv = mx.kv.create("local")
    kv.init(["a", "b", "c"], [mx.nd.zeros((1,))] * 3)

    def updater(key, grad, stored):
        stored += grad
        if key == "a" and new == "updater":
            kv._set_updater(lambda key, grad, stored: stored.__iadd__(100 * grad))
        elif key == "a":
            kv.set_optimizer(mx.optimizer.SGD(learning_rate=100))

    def values():
        outs = [mx.nd.zeros((1,)) for _ in range(3)]
        kv.pull(["a", "b", "c"], out=outs)
        return [out.asscalar() for out in outs]
    kv._set_updater(updater)
    kv.push(["a", "b", "c"], [mx.nd.ones((1,))] * 3)
    assert values() == [1, 1, 1]
    kv.push(["a", "b", "c"], [mx.nd.ones((1,))] * 3)
    assert values() == ([101, 101, 101] if new == "updater" else [-99, -99, -99])


def test_updaters_and_optimizers_set_at_once_leave_a_store_that_works():
    for _ in range(100):
        kv = mx.kv.create("local")
        kv.init("a", mx.nd.zeros((1,)))
        setters = [lambda: kv.set_optimizer(mx.optimizer.SGD()),
                   lambda: kv._set_updater(lambda key, grad, stored: None)]
        threads = [threading.Thread(target=setter) for setter in setters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kv.push("a", mx.nd.ones((1,)))


def test_an_updater_may_be_replaced_while_others_push(kv):
    kv.init(1, ones(0))
    over = threading.Event()
    failures = []

    def work():
        try:
            while not over.is_set():
                kv.push(1, ones())
        except BaseException as error:  # noqa: BLE001  shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        kv._set_updater(lambda key, value, stored: stored.__iadd__(value))
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=1))
    over.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_published_names_of_arguments_and_their_defaults(kv):
    a, rows = ones(), mx.nd.sparse.zeros("row_sparse", SHAPE)
    kv.init(key=[3, 4], value=[a, a.tostype("row_sparse")])
    kv.push(key=3, value=ones(2), priority=0)
    kv.pull(key=3, out=a, priority=0, ignore_sparse=True)
    kv.pushpull(key=3, value=a, out=a, priority=0)
    kv.row_sparse_pull(key=4, out=rows, priority=0, row_ids=mx.nd.array([1]))
    kv.broadcast(key=5, value=a, out=a, priority=0)
    assert kv.is_capable(capability="optimizer")
    kv._send_command_to_servers(head=1, body="x")
    kv._set_updater(updater=lambda key, grad, stored: None)
    kv.set_optimizer(optimizer=mx.optimizer.SGD())
    assert a.asnumpy()[0, 0] == 2 and rows.indices.asnumpy().tolist() == [1]
    other = mx.kv.create(name="device")
    other.set_gradient_compression(compression_params={"type": "2bit"})


def test_lists_in_themselves_are_refused(kv):
    keys = []
    keys.append(keys)
    with pytest.raises(ValueError, match="100"):
        kv.push(keys, keys)


def test_a_closed_store_says_so(kv):
    out = ones(0)
    kv.init("a", ones(3))
    kv.pull("a", out=out)
    kv.close()
    kv.close()
    assert (out.asnumpy() == 3).all()
    for call in (lambda: kv.push("a", ones()), lambda: kv.type, kv.barrier, kv.keys, lambda: kv.init("b", ones()),
                 lambda: kv._set_updater(print)):
        with pytest.raises(mx.InvalidState, match="closed"):
            call()


def test_the_base_of_stores_is_where_mxnet_has_it():
    code = "import heddle as mx; assert mx.kvstore.base.KVStoreBase is mx.kv.KVStoreBase"
    subprocess.run([sys.executable, "-c", code], check=True)  # where nothing else has imported it
