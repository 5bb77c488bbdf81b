"""What a type checker sees of the package; test_typing.py runs one over it. Nothing here is run."""

from typing import assert_type

import numpy

import heddle as mx
import heddle.kvstore.base
import heddle.nd.sparse
import heddle.ndarray.sparse
import heddle.ndarray as nd
from heddle.ndarray import NDArray


def dense() -> None:
    a = mx.nd.ones((2, 3), mx.cpu(1), dtype="float16")
    assert_type(a, mx.nd.NDArray)
    assert_type(a * 2 + 1, mx.nd.NDArray)
    assert_type(1 / a, mx.nd.NDArray)
    assert_type(a == a, mx.nd.NDArray)
    assert_type(a[0, 1:].reshape((2, 1)).sqrt(), mx.nd.NDArray)
    assert_type(a.shape, tuple[int, ...])
    assert_type(a.context, mx.Context)
    assert_type(a.asnumpy(), numpy.ndarray)
    assert_type(mx.np.ones((2,)) + 1, mx.np.ndarray)
    assert_type(mx.np.ones(2).reshape(-1)[:1].copy().astype("int32").T, mx.np.ndarray)
    assert_type(mx.np.ones(2).as_in_context(mx.cpu()).mean().squeeze(), mx.np.ndarray)
    a.nothing  # type: ignore[attr-defined]
    a.astype()  # type: ignore[call-arg]
    mx.nd.ones((2,), ctx="cpu")  # type: ignore[arg-type]


def sparse() -> None:
    rows = mx.nd.sparse.zeros("row_sparse", (4, 2))
    assert_type(rows, mx.sparse.RowSparseNDArray)
    assert_type(rows * 2, mx.sparse.RowSparseNDArray)
    assert_type(rows / 2, mx.sparse.RowSparseNDArray)
    assert_type(rows.indices, mx.nd.NDArray)
    assert_type(mx.nd.sparse.retain(rows, [0]), mx.sparse.RowSparseNDArray)
    assert_type(mx.nd.array(rows), mx.sparse.RowSparseNDArray)
    assert_type(mx.nd.zeros_like(rows), mx.sparse.RowSparseNDArray)
    assert_type(mx.nd.zeros_like(mx.nd.array(numpy.ones(2))), mx.nd.NDArray)


def names_of_mxnet() -> None:
    assert_type(nd.ones((2,)), mx.nd.NDArray)
    assert_type(nd.zeros((2,)) * 2, NDArray)
    assert_type(heddle.nd.sparse.zeros("row_sparse", (4, 2)), mx.sparse.RowSparseNDArray)
    assert_type(heddle.ndarray.sparse.retain(nd.sparse.zeros("row_sparse", (4, 2)), [0]), mx.sparse.RowSparseNDArray)
    assert_type(heddle.kvstore.base.TestStore(), mx.kv.TestStore)


def stores() -> None:
    kv = mx.kv.create("device")
    assert_type(kv, mx.kv.KVStore)
    kv.init("w", mx.nd.zeros((2,)))
    kv.push("w", [mx.nd.ones((2,))], priority=-1)
    kv.pushpull("w", mx.nd.ones((2,)), out=mx.nd.zeros((2,)))
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    assert_type(kv.rank, int)
    assert_type(kv.type, str)
    kv.rank = 3  # type: ignore[misc]

    @mx.kv.KVStoreBase.register
    class Mine(mx.kv.TestStore):
        pass

    assert_type(Mine().num_workers, int)


def engine() -> None:
    var = mx.engine.new_var("x")
    mx.engine.push(lambda: None, reads=[mx.nd.ones((2,))], writes=[var], priority=2)
    assert_type(mx.engine.stats(), dict[str, int])
    try:
        var.wait(timeout=1)
    except mx.TimeoutError as error:
        assert_type(error, mx.TimeoutError)
