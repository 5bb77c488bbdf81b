"""Arrays: arithmetic against NumPy, indexing, shapes, conversions, printing, files."""

import base64
import copy
import gc
import json
import os
import pickle
import random
import struct
import threading
import warnings

import numpy
import pytest

import heddle as mx

DTYPES = ["float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool"]


def same(array, expected, rtol=0.0):
    given = array.asnumpy()
    assert given.shape == expected.shape
    if rtol:
        numpy.testing.assert_allclose(given, expected, rtol=rtol, atol=rtol)
    else:
        numpy.testing.assert_array_equal(given, expected)


class Program:
    """Random statements on arrays, each run on NumPy arrays too; the values are compared only now and then, so
    that the engine has much to order. Whole numbers and few multiplications keep float64 exact."""

    SHAPES = [(4, 3), (1, 3), (4, 1), (3,), (2, 4, 3)]

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.pairs = []
        for shape in self.SHAPES * 2:
            self.new(numpy.array([self.random.randrange(-4, 5) for _ in range(int(numpy.prod(shape)))],
                                 dtype="float64").reshape(shape))

    def new(self, values):
        self.pairs.append((mx.nd.array(values, dtype="float64"), values.copy()))

    def pick(self):
        return self.random.choice(self.pairs)

    def keep(self, array, values):
        if numpy.abs(values).max(initial=0) < 2**40:
            self.pairs[self.random.randrange(len(self.pairs))] = (array, values)

    def fitting(self, shape):
        """A pair that broadcasts to the shape."""
        while True:
            a, x = self.pick()
            try:
                if numpy.broadcast_shapes(x.shape, shape) == shape:
                    return a, x
            except ValueError:
                pass

    def step(self):
        a, x = self.pick()
        kind = self.random.randrange(12)
        number = self.random.choice([-2, -1, 1, 2, 0.5])
        if kind == 0:
            b, y = self.pick()
            try:
                values = x + y
            except ValueError:
                with pytest.raises(ValueError):
                    a + b
                return
            self.keep(a + b, values)
        elif kind == 1:
            b, y = self.fitting(x.shape)
            self.keep(a - b, x - y)
        elif kind == 2:
            self.keep(a * number + 1, x * number + 1)
        elif kind == 3:
            self.keep(number - a, number - x)
        elif kind == 4:
            b, y = self.fitting(x.shape)
            a += b
            x += y
        elif kind == 5:
            a *= number
            x *= number
            if numpy.abs(x).max(initial=0) > 2**30:
                a[:] = 1
                x[:] = 1
        elif kind == 6:
            b, y = self.fitting(x.shape)
            op = self.random.choice(["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"])
            self.keep(getattr(a, op)(b), getattr(x, op)(y).astype("float64"))
        elif kind == 7:
            axis = self.random.randrange(x.ndim)
            values = x.sum(axis=axis)
            self.keep(a.sum(axis=axis), values if values.ndim else values.reshape(1))
        elif kind == 8:
            self.assign(a, x, number)
        elif kind == 9:
            key = self.key(x.shape)
            part, values = a[key].copy(), numpy.asarray(x[key]).copy()
            if values.ndim and values.size:
                self.keep(part, values)
            elif values.ndim:
                assert part.shape == values.shape
        elif kind == 10:
            self.keep(-a.abs(), -numpy.abs(x))
        else:
            b, y = self.fitting(x.shape)
            self.keep(mx.nd.maximum(a, b), numpy.maximum(x, y))

    def assign(self, a, x, number):
        key = self.key(x.shape)
        shape = numpy.asarray(x[key]).shape
        if self.random.random() < 0.5 or not shape:
            a[key] = number
            x[key] = number
        else:
            values = numpy.full(shape, number)
            a[key] = mx.nd.array(values, dtype="float64")
            x[key] = values

    def key(self, shape):
        key = []
        for extent in shape[:self.random.randrange(1, len(shape) + 1)]:
            if extent and self.random.random() < 0.5:
                key.append(self.random.randrange(-extent, extent))
            else:
                ends = [self.random.choice([None, *range(-extent - 2, extent + 3)]) for _ in range(2)]
                key.append(slice(*ends, self.random.choice([None, 1, 2, -1, -2])))
        return tuple(key) if len(key) > 1 else key[0]

    def compare(self):
        for array, values in self.pairs:
            same(array, values)


def test_random_programs_give_numpys_values(seed):
    for round_ in range(30):
        program = Program(seed + round_)
        for step in range(150):
            program.step()
            if step % 50 == 49:
                program.compare()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_arrays_without_elements_have_parts(shape, seed):
    """A slice backwards of no elements was an error."""
    program = Program(seed)
    for _ in range(50):
        key, a = program.key(shape), mx.nd.zeros(shape)
        assert a[key].shape == numpy.zeros(shape)[key].shape, key
        a[key] = 1
        a[key] = a[key].copy()
    mx.nd.zeros((0, 3))[::-1] = 1
    assert mx.nd.zeros((2, 6))[0, -10::-1].shape == mx.nd.arange(6)[-10::-1].shape == (0,)


def test_one_element_repeats_to_none():
    """In place it was an error, where a + b is none."""
    a, one = mx.nd.zeros((0, 3)), mx.nd.ones((1,))
    assert (a + one).shape == (0, 3)
    a += one
    a[2:] -= mx.nd.ones((1, 3))
    assert a.shape == (0, 3)
    with pytest.raises(mx.InvalidArgument, match=r"expected shape \(0, 3\), got \(2,\)"):
        a *= mx.nd.ones((2,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_of_every_dtype(dtype, seed):
    generator = numpy.random.default_rng(seed)
    x = generator.integers(1, 5, (3, 4)).astype(dtype)
    y = generator.integers(1, 5, (3, 4)).astype(dtype)
    a, b = mx.nd.array(x, dtype=dtype), mx.nd.array(y, dtype=dtype)
    assert a.dtype == numpy.dtype(dtype)
    if dtype != "bool":
        same(a + b, x + y)
        same(a - b, x - y)
        same(a * b, x * y)
        same(a / b, x / y if a.dtype in (numpy.float32, numpy.float64, numpy.float16) else x // y)
        same(-a, -x)
        same(a ** 2, x ** 2)
        same(a % b, x % y)
        same(7 % a, 7 % x)
    same((a < b).astype("bool"), x < y)
    same((a == b).astype("bool"), x == y)
    same(mx.nd.maximum(a, b), numpy.maximum(x, y))


def test_functions_equal_numpys(seed):
    x = numpy.random.default_rng(seed).uniform(0.1, 4, (5, 6)).astype("float32")
    a = mx.nd.array(x)
    for name in ("sqrt", "square", "exp", "log", "abs", "sign"):
        same(getattr(mx.nd, name)(a), getattr(numpy, name)(x), rtol=1e-6)
    same(a.norm(), numpy.linalg.norm(x).reshape(1), rtol=1e-6)
    same(a.mean(), x.mean().reshape(1), rtol=1e-6)
    same(a.sum(axis=-1, keepdims=True), x.sum(axis=-1, keepdims=True), rtol=1e-6)
    same(mx.nd.dot(a, a.T), x @ x.T, rtol=1e-5)
    same(a.transpose(), x.T)
    same(a.clip(1, 2), x.clip(1, 2))
    for limits in ((1, None), (None, 2)):
        same(mx.np.array(a).clip(*limits), x.clip(*limits))
    same(2 ** a, 2 ** x, rtol=1e-6)
    same(mx.nd.concat(a, a, dim=1), numpy.concatenate([x, x], axis=1))


@pytest.mark.parametrize("make", [mx.nd.array, mx.np.array])
@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 1, 2, 5), (4,), (2, 0, 3)])
def test_reductions_go_along_any_axes(make, shape, seed):
    """Each set of axes, against NumPy; all elements of an NDArray give shape (1,)."""
    x = numpy.random.default_rng(seed).normal(size=shape).astype("float32")
    a, ndim = make(x), len(shape)

    def check(got, wanted):
        wanted = numpy.asarray(wanted)
        wanted = wanted.reshape(1) if make is mx.nd.array and not wanted.ndim else wanted
        assert got.shape == wanted.shape and type(got) is type(a)
        same(got, wanted, rtol=1e-5)

    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # means of no elements
        for chosen in range(1, 2**ndim):
            axes = tuple(axis for axis in range(ndim) if chosen >> axis & 1)
            mixed = tuple(axis - ndim if axis % 2 else axis for axis in reversed(axes))
            others = tuple(axis for axis in range(ndim) if axis not in axes)
            for keepdims in (False, True):
                check(a.sum(axis=mixed, keepdims=keepdims), x.sum(axis=axes, keepdims=keepdims))
                check(mx.nd.mean(a, mixed, keepdims), x.mean(axis=axes, keepdims=keepdims))
                check(a.norm(axis=mixed, keepdims=keepdims), numpy.sqrt((x**2).sum(axis=axes, keepdims=keepdims)))
                check(a.norm(1, mixed, keepdims), abs(x).sum(axis=axes, keepdims=keepdims))
                if others:
                    check(a.sum(axis=others, keepdims=keepdims, exclude=True), x.sum(axis=axes, keepdims=keepdims))
        check(a.norm(keepdims=True), numpy.sqrt((x**2).sum(keepdims=True)))
        check(a.mean(), x.mean())
        check(a.sum(axis=()), x.sum() if make is mx.nd.array else x)


def test_results_go_where_out_says():
    a = mx.nd.array([[1.0, 4.0], [9.0, 16.0]])
    for call, wanted in ((lambda out: mx.nd.sqrt(a, out=out), [[1, 2], [3, 4]]),
                         (lambda out: mx.nd.add(a, 1, out=out), [[2, 5], [10, 17]]),
                         (lambda out: mx.nd.maximum(5, a, out=out), [[5, 5], [9, 16]]),
                         (lambda out: mx.nd.clip(a, 2, 8, out=out), [[2, 4], [8, 8]]),
                         (lambda out: mx.nd.dot(a, a, out=out), [[37, 68], [153, 292]]),
                         (lambda out: mx.nd.add_n(a, a, out=out), [[2, 8], [18, 32]]),
                         (lambda out: mx.nd.concat(a[:1], a[:1], dim=0, out=out), [[1, 4], [1, 4]]),
                         (lambda out: mx.nd.zeros_like(a, out=out), [[0, 0], [0, 0]]),
                         (lambda out: mx.nd.ones_like(a, out=out), [[1, 1], [1, 1]]),
                         (lambda out: mx.nd.power(a, 2, out=out), [[1, 16], [81, 256]])):
        for dtype in ("float32", "float64"):
            out = mx.nd.zeros((2, 2), dtype=dtype)
            assert call(out) is out and out.asnumpy().tolist() == wanted
    mx.nd.square(a, out=a)
    assert a.asnumpy().tolist() == [[1, 16], [81, 256]]
    with pytest.raises(mx.InvalidArgument):
        mx.nd.sum(a, out=mx.nd.zeros((2,)))
    with pytest.raises(mx.InvalidType, match="expected an NDArray"):
        mx.nd.sqrt(a, out=numpy.zeros((2, 2)))


def test_modules_have_mxnets_names():
    import heddle.kvstore.base
    import heddle.nd.sparse
    import heddle.ndarray as nd
    import heddle.ndarray.sparse
    from heddle.ndarray import NDArray

    assert NDArray is mx.nd.NDArray and nd.zeros is mx.nd.zeros and nd.random is mx.random and mx.ndarray is nd
    assert set(nd.__all__) == set(mx.nd.__all__) <= set(dir(nd))
    for sparse in (mx.nd.sparse, heddle.nd.sparse, heddle.ndarray.sparse, nd.sparse):
        assert all(getattr(sparse, name) is getattr(mx.sparse, name) for name in mx.sparse.__all__)
    assert heddle.kvstore.base.KVStoreBase is mx.kv.KVStoreBase and heddle.kvstore.base.create is mx.kv.create


def test_an_array_that_nothing_has_made_is_refused():
    """Its memory was read as if it were one."""
    class Mine(mx.nd.NDArray):
        def __init__(self):
            pass

    class Rows(mx.nd.sparse.RowSparseNDArray):
        def __init__(self):
            pass

    kv = mx.kv.create()
    for unmade in (Mine(), Rows(), mx.nd.NDArray.__new__(mx.nd.NDArray), mx.np.ndarray.__new__(mx.np.ndarray)):
        for call in (lambda: unmade.shape, lambda: unmade._dtype, unmade.wait_to_read, unmade.copy, lambda: unmade * 2,
                     lambda: unmade.asnumpy(), lambda: len(unmade), lambda: kv.init("w", unmade), lambda: kv.push("w", unmade),
                     lambda: mx.nd.ones((2,)) + unmade, lambda: mx.engine.push(print, writes=[unmade]),
                     lambda: mx.nd.ones((2,)).copyto(unmade)):
            with pytest.raises(TypeError):
                call()
    with pytest.raises(TypeError, match="Mine: expected an array that one of heddle's functions has made"):
        Mine().shape  # noqa: B018
    with pytest.raises(TypeError):
        mx.nd.NDArray()


def test_reductions_of_mxnet():
    """Values of version 1.9.1."""
    a = mx.nd.array(numpy.arange(24).reshape(2, 3, 4))
    assert a.sum(axis=(0, 2)).asnumpy().tolist() == [60, 92, 124]
    assert a.sum(axis=1, exclude=True).asnumpy().tolist() == [60, 92, 124]
    assert mx.nd.sum(a, axis=(0, 1), exclude=True, keepdims=True).shape == (2, 3, 1)
    same(a.norm(axis=(0, 1)), numpy.array([29.664794921875, 31.71750259399414, 33.82307052612305, 35.97220993041992]), rtol=1e-7)
    assert mx.nd.norm(a, ord=1).asnumpy().tolist() == [276]


def test_reductions_of_bools_and_integers_are_numpys():
    """Sums of bools were one bool, means of integers lost their fraction; heddle.nd's are MXNet's."""
    above = mx.np.array([1, 2, 3, 0]) > 1
    assert int(above.sum()) == 2 and above.sum().dtype == numpy.int64
    assert float(above.mean()) == 0.5 and above.mean().dtype == numpy.float32
    x = numpy.array([[1, 2, 4], [16777217, 0, 2]])
    for dtype in ("int8", "uint8", "int32", "int64", "bool"):
        y = x.astype(dtype)
        a = mx.np.array(y, dtype=dtype)
        for options in ({}, {"axis": 0}, {"axis": -1, "keepdims": True}, {"axis": (0, 1)}, {"axis": ()}):
            same(a.sum(**options), y.sum(**options))
            mean = a.mean(**options)
            assert type(mean) is mx.np.ndarray and mean.dtype == numpy.float32
            same(mean, y.mean(**options, dtype="float64").astype("float32"))
    assert mx.nd.array([1, 2], dtype="int32").mean().asnumpy().tolist() == [1]
    assert mx.nd.array([1, 1], dtype="bool").sum().dtype == numpy.bool_
    assert mx.np.ones((2,), dtype="float16").mean().dtype == numpy.float16


def test_a_norm_rounds_once():
    """The squares of float16 numbers are beyond float16."""
    a = mx.nd.full((2, 2), 300, dtype="float16")
    assert a.norm(axis=0).asnumpy().tolist() == [424.25] * 2 and a.norm(axis=0).dtype == numpy.float16


def test_products_go_along_an_axis_of_each(seed):
    """With shapes of which version 1.9.1 gives the same."""
    values = numpy.random.default_rng(seed)
    letters = "abcdefg"
    for x_shape, y_shape, transposed in (
            ((3,), (3,), (0, 0)), ((3,), (3, 4), (0, 0)), ((2, 3), (3,), (0, 0)), ((2, 3), (3, 4), (0, 0)),
            ((3, 2), (3, 4), (1, 0)), ((2, 3), (4, 3), (0, 1)), ((3, 2), (4, 3), (1, 1)), ((3, 2), (3,), (1, 0)),
            ((2, 3), (3,), (0, 1)), ((2, 3, 4), (4, 5), (0, 0)), ((2, 3, 4), (4, 3, 2), (0, 0)), ((3, 2, 4), (3, 5), (1, 0)),
            ((2, 3, 4), (5, 4), (0, 1)), ((2, 0), (0, 3), (0, 0)), ((0, 2), (0, 3), (1, 0))):
        x, y = values.normal(size=x_shape).astype("float32"), values.normal(size=y_shape).astype("float32")
        left, right = list(letters[:x.ndim]), list(letters[x.ndim:x.ndim + y.ndim])
        right[-1 if transposed[1] else 0] = left[0 if transposed[0] else -1]
        wanted = numpy.einsum(f"{''.join(left)},{''.join(right)}", x, y)
        got = mx.nd.dot(mx.nd.array(x), mx.nd.array(y), transpose_a=transposed[0], transpose_b=bool(transposed[1]))
        # einsum orders the letters that stay by the alphabet, which is the order of the axes.
        same(got, wanted.reshape(wanted.shape or (1,)), rtol=1e-4)
    x, y = values.normal(size=(2, 3)), values.normal(size=(4, 3, 5))
    same(mx.np.dot(mx.np.array(x), mx.np.array(y)), numpy.dot(x, y), rtol=1e-4)
    assert mx.np.ones((3,)).dot(mx.np.ones((3,))).shape == ()
    for a, b in (((2, 3), (2, 3)), ((3,), (2,)), ((), (2,))):
        with pytest.raises(mx.InvalidArgument, match="dot: expected"):
            mx.nd.ones(a).dot(mx.nd.ones(b))
    for bad in (3, None, x):
        with pytest.raises(mx.InvalidType, match="dot: expected an NDArray, got"):
            mx.nd.ones((2, 3)).dot(bad)


def test_axes_are_named_as_in_mxnet(seed):
    x = numpy.random.default_rng(seed).normal(size=(2, 3, 4)).astype("float32")
    a = mx.nd.array(x)
    for moved in (a.transpose(axes=(2, 0, 1)), mx.nd.transpose(a, axes=[2, 0, -2]), mx.nd.transpose(a, (2, 0, 1)),
                  a.transpose(2, 0, 1)):
        same(moved, x.transpose(2, 0, 1))
    for moved in (a.transpose(axes=()), a.transpose(()), a.transpose(None), a.transpose()):
        same(moved, x.T)
    thin = mx.nd.ones((1, 3, 1))
    assert [thin.squeeze(axis).shape for axis in (None, 0, -1, (0, 2), [2])] == [(3,), (3, 1), (1, 3), (3,), (1, 3)]
    assert mx.nd.squeeze(mx.nd.ones((1, 1)), axis=(0, 1)).shape == (1,)
    assert mx.np.ones((1, 1)).squeeze(axis=(0, 1)).shape == ()
    assert mx.nd.expand_dims(a, axis=1).shape == (2, 1, 3, 4) and mx.nd.flatten(a).shape == (2, 12)
    same(mx.nd.broadcast_to(mx.nd.array([[1], [2]]), shape=(2, 2)), numpy.array([[1, 1], [2, 2]], dtype="float32"))
    same(mx.nd.array([[1], [2]]).broadcast_to((0, 3)), numpy.array([[1] * 3, [2] * 3], dtype="float32"))
    assert mx.nd.ones((1, 3)).broadcast_to((0, 3)).shape == (1, 3)  # had no element
    assert mx.nd.ones((3,)).broadcast_to((0, 3)).shape == mx.np.ones((1, 3)).broadcast_to((0, 3)).shape == (0, 3)
    same(mx.nd.add_n(a, a, a), x + x + x)
    assert mx.nd.power(2, mx.nd.array([3])).asscalar() == 8


def test_numbers_of_numpy_and_python_count_as_numbers():
    a = mx.nd.ones((2,))
    for two in (2, 2.0, numpy.float32(2), numpy.int64(2), numpy.array(2.0), True + 1):
        same(a * two, numpy.array([2, 2], dtype="float32"))
        same(two * a, numpy.array([2, 2], dtype="float32"))
    with pytest.raises(TypeError):
        a + "x"
    for mixed in (lambda: a + numpy.ones(2), lambda: numpy.ones(2) + a, lambda: a < numpy.ones(2), lambda: a == numpy.ones(2)):
        with pytest.raises(TypeError, match="nd.array"):
            mixed()
    assert (a == "x") is False
    with pytest.raises(ValueError, match="0.5"):
        mx.nd.ones((2,), dtype="int32") * 0.5


def test_views_share_and_copies_do_not():
    a = mx.nd.array(numpy.arange(12).reshape(3, 4))
    row, rows, flat = a[1], a[1:3], a.reshape(-1)
    picked, column = a[::2], a[:, 1]
    a += 100
    assert row.asnumpy().tolist() == [104, 105, 106, 107]
    assert rows.shape == (2, 4) and flat[11].asscalar() == 111
    assert picked.asnumpy()[1, 0] == 8 and column.asnumpy().tolist() == [1, 5, 9]
    row[:] = 0
    assert a.asnumpy()[1].tolist() == [0, 0, 0, 0]
    assert a[2, 3].shape == () or a[2, 3].shape == (1,)
    assert a[2, 3].asscalar() == 111


def test_a_slice_takes_numbers_or_an_extent_for_each_axis():
    x = numpy.arange(18, dtype="float32").reshape(6, 3)
    a = mx.nd.array(x)
    same(a.slice(1, 3), x[1:3])
    same(a.slice(begin=(0, 1), end=(2, 3)), x[0:2, 1:3])
    same(a.slice((None, -2), (None, None)), x[:, -2:])
    same(a.slice((5, 0), (None, 3), step=(-2, 1)), x[5::-2, 0:3])
    for bad in ((0, 7), ((0, 0), 3), ((0,) * 3, (1,) * 3), ((-7,), (2,))):
        with pytest.raises(mx.InvalidArgument, match="slice: expected"):
            a.slice(*bad)
    with pytest.raises(mx.InvalidType, match="slice: expected numbers"):
        a.slice("x", 2)


def test_what_makes_arrays_has_mxnets_names_of_arguments():
    assert mx.nd.array(source_array=[1, 2], ctx=mx.cpu(1), dtype="int8").context == mx.cpu(1)
    rows = mx.nd.sparse.row_sparse_array(arg1=([[1.0]], [2]), shape=(3, 1))
    assert mx.nd.sparse.array(source_array=rows).indices.asnumpy().tolist() == [2]
    assert mx.nd.full(shape=(2,), val=3).asnumpy().tolist() == [3, 3]
    assert mx.nd.arange(start=1, stop=4, step=2, repeat=2).asnumpy().tolist() == [1, 1, 3, 3]
    assert mx.nd.arange(1, 4, 2, 1, None, mx.cpu(1), "int8").context == mx.cpu(1)
    with pytest.raises(mx.InvalidType, match="infer_range: expected None, False or True, got .*Context"):
        mx.nd.arange(1, 4, 2, 1, mx.cpu(1))
    out = mx.nd.zeros((2,), dtype="int32")
    assert mx.nd.full((2,), 3, out=out) is out and out.asnumpy().tolist() == [3, 3]


def test_a_misspelt_argument_is_no_array_of_another_dtype():
    for make in (mx.nd.zeros, mx.nd.ones):
        with pytest.raises(TypeError, match="dtpye"):
            make((2,), dtpye="int32")


def test_indexing_by_arrays_waits_and_copies():
    x = numpy.arange(12, dtype="float32").reshape(3, 4)
    a = mx.nd.array(x)
    same(a[[2, 0]], x[[2, 0]])
    same(a[mx.nd.array([2, 0])], x[[2, 0]])
    same(a[x > 5], x[x > 5])
    a[[0, 2]] = -1
    x[[0, 2]] = -1
    same(a, x)


def test_an_element_has_one_axis_however_it_is_named():
    """One that an array named, or what converts to an index, had none."""
    class Two:
        def __index__(self):
            return 2

    a, one = mx.nd.arange(6).reshape((2, 3)), numpy.array(1)
    for element in (a[1, 2], a[1, numpy.array(2)], a[one, numpy.array(2)], a[1, Two()], a[one][Two()]):
        assert element.shape == (1,) and element.asscalar() == 5
    assert mx.np.arange(6)[numpy.array(5)].shape == () and mx.nd.array(3)[()].shape == ()


def test_indices_out_of_range_are_index_errors():
    a = mx.nd.zeros((3, 4))
    for key in (3, -4, (0, 4), (0, 0, 0)):
        with pytest.raises(IndexError):
            a[key]
        with pytest.raises(IndexError):
            a[key] = 1
    with pytest.raises(ValueError):
        a[0:2] = mx.nd.zeros((3, 4))
    same(a, numpy.zeros((3, 4)))


def test_an_element_is_assigned_like_a_part():
    for made, shape in ((mx.nd.zeros, (1,)), (mx.np.zeros, ())):
        line, table = made((3,)), made((2, 2))
        assert line[0].shape == table[0, 1].shape == shape
        for value in (mx.nd.array([5.0]), mx.nd.array(5.0), [5.0], 5, numpy.float32(5)):
            line[1], table[0, 1] = value, value
            assert line.asnumpy().tolist() == [0, 5, 0] and table.asnumpy().tolist() == [[0, 5], [0, 0]]
            line[1], table[0, 1] = 0, 0


def test_numbers_have_to_fit_wherever_they_are_assigned():
    """A column is no view, and its number went through a cast: 0.5 and 2**40 became 0."""
    a = mx.nd.zeros((3, 4), dtype="int32")
    for key in (0, (slice(None), 1), slice(None, None, -1)):
        for number in (0.5, 2**40):
            with pytest.raises(ValueError, match="int32"):
                a[key] = number
        with pytest.raises(TypeError, match="complex"):
            a[key] = numpy.complex64(1)
    for key in ([0], numpy.array([True, False, True]), mx.nd.array([0, 2]), (slice(None), [1])):  # these stored 0
        for number in (0.5, numpy.float64(0.5), 2**40):
            with pytest.raises(ValueError, match="int32"):
                a[key] = number
    with pytest.raises(mx.InvalidArgument, match="shape"):
        a[[0, 1]] = mx.nd.ones((3, 4))
    same(a, numpy.zeros((3, 4)))
    a[[0]] = 2.0
    same(a[0], numpy.full(4, 2))


def test_a_power_in_place_changes_the_array():
    a = alias = mx.nd.array([2.0, 3.0])
    a **= 2
    assert a is alias and alias.asnumpy().tolist() == [4, 9]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "bool"])
def test_quotients_of_whole_numbers_are_floats_in_np(dtype):
    """They were rounded towards zero, in silence. `nd` does that, as MXNet's does."""
    x, y = numpy.array([0, 1, 1, 1]).astype(dtype), numpy.array([1, 1, 1, 0]).astype(dtype)
    a, b = mx.np.array(x, dtype=dtype), mx.np.array(y, dtype=dtype)
    expected = {"number": x / 2, "array": x[:3] / y[:3], "of number": 3 / y[:3], "fraction": x / 0.5}
    given = {"number": a / 2, "array": a[:3] / b[:3], "of number": 3 / b[:3], "fraction": a / 0.5}
    for name, quotient in given.items():
        assert type(quotient) is mx.np.ndarray and quotient.dtype == numpy.float32, name
        assert quotient.asnumpy().tolist() == expected[name].tolist(), name
    assert (a / b).asnumpy()[3] == numpy.inf and mx.np.divide(a, 2).dtype == numpy.float32
    with pytest.raises(mx.InvalidType, match=f"got {dtype}: a = a / b"):
        a /= 2
    assert a.asnumpy().tolist() == x.tolist()
    with pytest.raises(mx.InvalidArgument, match="float64"):  # as of other operations
        a / mx.np.ones((4,), dtype="float64")
    if dtype != "bool":
        assert (mx.nd.array(x, dtype=dtype) / 2).asnumpy().tolist() == [0] * 4


def test_an_array_of_nd_over_one_of_np_is_divided_as_np_does():
    """As the other way round; the quotients of integers were cut."""
    a, b = mx.nd.array([1, 3], dtype="int32"), mx.np.array([2, 2], dtype="int32")
    for quotient, expected in ((a / b, [0.5, 1.5]), (b / a, [2, 2 / 3]), (a[0] / b, [0.5, 0.5])):
        assert type(quotient) is mx.np.ndarray and quotient.dtype == numpy.float32
        numpy.testing.assert_allclose(quotient.asnumpy(), expected, rtol=1e-6)
    assert (mx.nd.ones((2,)) / mx.np.ones((2,))).asnumpy().tolist() == [1, 1]
    with pytest.raises(mx.InvalidArgument, match="expected dtype float32, got int32"):
        mx.nd.ones((2,)) / b


def test_quotients_of_floats_keep_their_dtype_in_np():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        a = mx.np.array([1.0, 3.0], dtype=dtype)
        same_memory = a
        assert (a / 2).dtype == (a / a).dtype == (2 / a).dtype == a.dtype
        a /= 2
        assert a is same_memory and a.asnumpy().tolist() == [0.5, 1.5]


def test_remainders_are_mxnets():
    a = mx.nd.array([5.5, -5.5, 5.5, -5.5, 0, 3])
    b = mx.nd.array([3, 3, -3, -3, 0, 0])
    assert (a % b).asnumpy().tolist() == [2.5, 0.5, -0.5, -2.5, 0, 0]
    assert mx.nd.modulo(7, a).asnumpy().tolist() == [1.5, -4, 1.5, -4, 0, 1]
    assert mx.np.mod(mx.np.array([-5.0, 5.0]), 3).asnumpy().tolist() == [1, 2]
    alias = a
    a %= 2
    assert a is alias and alias.asnumpy().tolist() == [1.5, 0.5, 1.5, 0.5, 0, 1]


def test_arrays_that_are_put_together_do_not_mix():
    """The first one's dtype and device were the result's: 1.9 beside integers became 1."""
    whole, real = mx.nd.ones((2, 2), dtype="int32"), mx.nd.full((2, 2), 1.9)
    for call in (mx.nd.concat, mx.nd.add_n):
        with pytest.raises(mx.InvalidArgument, match=f"(?i){call.__name__[:3]}.*: expected dtype int32, got float32"):
            call(whole, whole, real)
        with pytest.raises(mx.InvalidArgument, match=f"(?i){call.__name__[:3]}.*: expected device cpu\\(0\\), got cpu\\(1\\)"):
            call(real, real.as_in_context(mx.cpu(1)))
    same(mx.nd.concat(whole.astype("float32"), real, dim=0), numpy.array([[1, 1], [1, 1], [1.9, 1.9], [1.9, 1.9]], "float32"))


def test_axes_are_checked():
    a = mx.nd.zeros((2, 3))
    for call in (lambda: a.sum(axis=2), lambda: a.mean(axis=-3), lambda: a.expand_dims(5), lambda: a.expand_dims(-4),
                 lambda: mx.nd.concat(a, a, dim=2)):
        with pytest.raises(ValueError, match="axis of at least"):
            call()
    for call in (lambda: a.sum(axis="x"), lambda: a.expand_dims("x"), lambda: a.sum(axis=(0, 1.5)), lambda: a.transpose("xy"),
                 lambda: a.transpose(0, "x"), lambda: a.squeeze(axis="x")):
        with pytest.raises(mx.InvalidType, match="numbers? of (an|the) ax[ie]s"):
            call()
    for call in (lambda: a.sum(axis=(0, -2)), lambda: a.norm(axis=(1, 1)), lambda: a.squeeze(axis=(0, 0)),
                 lambda: a.transpose((0, -2))):
        with pytest.raises(mx.InvalidArgument, match="each axis .*once"):
            call()
    with pytest.raises(mx.InvalidArgument, match="extent 1, got axis 1 of shape"):
        mx.nd.zeros((1, 3)).squeeze(axis=(0, 1))
    with pytest.raises(mx.InvalidType, match="the axes once"):
        a.transpose(1, 0, axes=(1, 0))
    with pytest.raises(mx.InvalidArgument, match="ord 1 or 2"):
        a.norm(ord=3)
    for axis in (None, 1):
        with pytest.raises(mx.InvalidArgument, match="(?i)norm: expected a floating"):
            mx.nd.zeros((2, 3), dtype="int32").norm(axis=axis)
    assert a.expand_dims(-1).shape == (2, 3, 1) and a.expand_dims(2).shape == (2, 3, 1)


def test_what_is_no_array_is_named():
    a = mx.nd.zeros((2, 3))
    for call in (lambda: mx.nd.sqrt(3), lambda: mx.nd.sum([1]), lambda: mx.nd.maximum(1, "x"), lambda: mx.nd.concat(a, [1]),
                 lambda: mx.nd.dot(3, a)):
        with pytest.raises(mx.InvalidType, match="expected an NDArray, got"):
            call()
    for call in (lambda: a.as_in_context("cpu"), lambda: mx.nd.array(a, "cpu")):
        with pytest.raises(TypeError, match="expected a Context"):
            call()
    with pytest.raises(mx.InvalidType, match="reverse"):
        a.reshape((3, 2), reverse=True)
    with pytest.raises(IndexError, match="one ellipsis"):
        a[..., ...]
    with pytest.raises(ValueError, match="shapes that differ"):
        mx.nd.concat(a, mx.nd.zeros((3, 3)), dim=1)
    with pytest.raises(ValueError, match="extents"):
        mx.nd.zeros(2**70)
    with pytest.raises(mx.InvalidType, match="rows of one length"):
        mx.nd.array([[1, 2], [3]])
    # Integers that no dtype has used to be called an object.
    for number, text in ((2**70, str(2**70)), (-2**63 - 1, str(-2**63 - 1)), (10**5000, "an integer of 16610 bits")):
        for source in (number, [number], [[0.5, 1], [2, number]]):
            with pytest.raises(mx.InvalidArgument, match=f"array: expected integers from -2..63 to 2..64 - 1, got {text}$"):
                mx.nd.array(source)
    with pytest.raises(mx.InvalidType, match="expected numbers, got object"):
        mx.nd.array([2**70, None])
    for call in (lambda: a + 10**400, lambda: a > -10**400, lambda: mx.nd.full((2,), 10**400), lambda: a[:].__setitem__(0, 10**400)):
        with pytest.raises(mx.InvalidArgument, match="within the range of float64"):
            call()
    for arange in (mx.nd.arange, mx.np.arange):
        with pytest.raises(mx.InvalidArgument, match="step other than 0"):
            arange(1, 5, 0)
    # What is no number either: None used to be refused without a word of what was expected, a text to be the result.
    for bad in (None, "x"):
        for full in (mx.nd.full, mx.np.full):
            with pytest.raises(mx.InvalidType, match="full: expected a number, got"):
                full((2,), bad)
        for call in (lambda: mx.nd.maximum(a, bad), lambda: mx.nd.minimum(bad, a), lambda: a.clip(bad, 1), lambda: a.clip(0, bad)):
            with pytest.raises(mx.InvalidType, match="expected a number or an NDArray, got"):
                call()
        with pytest.raises(mx.InvalidType, match="expected a fresh DLPack capsule, got"):
            mx.nd.from_dlpack(bad)
    with pytest.raises(mx.InvalidType, match="expected an NDArray, got"):
        mx.nd.add_n(a, 3)
    with pytest.raises(mx.InvalidArgument, match="one array at least"):
        mx.nd.add_n()


def test_shapes():
    a = mx.nd.array(numpy.arange(12))
    assert a.reshape((3, -1)).shape == (3, 4)
    assert a.reshape(2, 6).shape == (2, 6)
    assert a.reshape((3, 4)).reshape((0, 2, 2)).shape == (3, 2, 2)
    assert a.reshape((3, 4)).expand_dims(0).shape == (1, 3, 4)
    assert a.reshape((1, 12)).squeeze().shape == (12,)
    assert mx.nd.ones((1, 1)).squeeze().shape == (1,)  # as all that has one element
    assert mx.np.ones((1, 1)).squeeze().shape == ()
    assert len(a) == 12 and a.ndim == 1 and a.size == 12
    for bad in ((5, -1), (-1, -1), (3, 5)):
        with pytest.raises(ValueError):
            a.reshape(bad)


def test_shapes_in_codes_of_mxnet():
    a = mx.nd.array(numpy.arange(24).reshape(2, 3, 4))
    for codes, shape in (((0, -3), (2, 12)), ((-3, 0), (6, 4)), ((-3, -1), (6, 4)), ((-2,), (2, 3, 4)), ((0, -2), (2, 3, 4)),
                         ((-2, 1, 1), (2, 3, 4, 1, 1)), ((-4, 1, 2, -2), (1, 2, 3, 4)), ((0, -4, -1, 1, -2), (2, 3, 1, 4)),
                         ((0, 0, -4, 2, -1), (2, 3, 2, 2)), ((2, -4, 3, 1, 0), (2, 3, 1, 4)), ((-1, -3), (2, 12)),
                         ((6, -1, -2), (6, 1, 4))):
        assert a.reshape(codes).shape == mx.nd.reshape(a, shape=codes).shape == shape, codes
        same(a.reshape(codes), numpy.arange(24).reshape(shape))
    a.reshape((0, -3))[1] = 0  # a view
    assert a[1].sum().asscalar() == 0
    assert mx.nd.zeros((2, 0, 3)).reshape((0, -3)).shape == (2, 0)
    for bad in ((-3, -3), (-4, 3, 1, -2), (-4, -1, -1, -2), (-4, 2), (-5,), (1, -2), (-1, -1, -2)):
        with pytest.raises(mx.InvalidArgument, match="(?i)reshape: expected"):
            a.reshape(bad)
    with pytest.raises(mx.InvalidArgument, match="at least 0"):
        mx.np.ones((2, 3)).reshape((-2,))


def test_which_functions_share_memory():
    """As MXNet has it; a program may change what it gets."""
    a = mx.nd.zeros((2, 2))
    for copy in (a.flatten(), a.expand_dims(0), a.slice((0, 0), (1, 2)), a.slice(0, 1), mx.nd.reshape(a, (4,)),
                 mx.nd.flatten(a), mx.nd.expand_dims(a, 1), a.transpose(), a.copy()):
        copy += 1
    thin = mx.nd.zeros((2, 1))
    for copy in (thin.squeeze(), mx.nd.squeeze(thin, axis=1)):
        copy += 1
    assert not a.asnumpy().any() and not thin.asnumpy().any()
    for view in (a[1], a[0:1], a.reshape((4,))):
        view += 1
    assert a.asnumpy().tolist() == [[2, 2], [2, 2]]


def test_functions_take_mxnets_names_of_arguments():
    a, b = mx.nd.array([[1, 2], [3, 4]]), mx.nd.array([[5, 6], [7, 8]])
    for name in ("add", "subtract", "multiply", "divide", "modulo", "maximum", "minimum", "dot"):
        function = getattr(mx.nd, name)
        same(function(lhs=a, rhs=b), function(a, b).asnumpy())
    same(mx.nd.power(base=a, exp=2), a.asnumpy() ** 2)
    same(mx.nd.zeros_like(data=a), numpy.zeros((2, 2), "float32"))
    same(mx.nd.ones_like(data=a), numpy.ones((2, 2), "float32"))
    same(numpy.sum(a), numpy.array([10], "float32"))
    out = mx.nd.zeros((2,))
    assert a.sum(axis=0, out=out) is out
    same(out, numpy.array([4, 6], "float32"))


def test_flatten_makes_a_matrix_of_any_shape():
    for shape, flat in (((2, 3, 4), (2, 12)), ((2, 3), (2, 3)), ((5,), (5, 1)), ((0, 3), (0, 3)), ((0, 3, 4), (0, 12)),
                        ((3, 0, 2), (3, 0)), ((0,), (0, 1))):
        assert mx.nd.zeros(shape).flatten().shape == mx.nd.flatten(mx.nd.zeros(shape)).shape == flat
    flat = mx.nd.array(3).flatten()  # without axes it was an IndexError
    assert flat.shape == mx.nd.flatten(mx.nd.array(3)).shape == (1, 1) and flat.asscalar() == 3
    for source in (mx.np.array(3), mx.np.ones((2, 3)), mx.np.ones((0, 3))):  # NumPy's have one axis then
        flat = source.flatten()
        assert type(flat) is mx.np.ndarray and flat.tolist() == source.asnumpy().flatten().tolist()
    none = mx.nd.zeros((0, 3))
    assert none.reshape((-1, 3)).shape == (0, 3) and none.reshape(-1).shape == (0,)
    with pytest.raises(mx.InvalidArgument, match="do not fit"):
        none.reshape((0, -1))  # any extent would


def test_copies_and_casts():
    a = mx.nd.array([1.5, -2.5])
    same(a.astype("int32"), numpy.array([1, -2]))
    assert a.astype("float32", copy=False) is a
    b = a.as_in_context(mx.cpu(3))
    assert b.context == mx.cpu(3) and a.as_in_context(mx.cpu()) is a
    out = mx.nd.zeros((2,), dtype="float64")
    assert a.copyto(out) is out and out.asnumpy().tolist() == [1.5, -2.5]
    assert a.copyto(mx.cpu(1)).context == mx.cpu(1)
    with pytest.raises(TypeError):
        a.copyto(numpy.zeros(2))
    assert float(mx.nd.array([2.5])) == 2.5 and int(mx.nd.array([2.5])) == 2
    assert mx.nd.array(7).shape == () and mx.nd.array(7).asscalar() == 7
    half = mx.nd.array([1.0, 3.14159], dtype="bfloat16")
    assert half.dtype == "bfloat16" and half.asnumpy().dtype == numpy.float32
    assert half.asnumpy().tolist() == [1.0, 3.140625]
    assert mx.nd.array(a).asnumpy().tolist() == [1.5, -2.5]


def test_the_dtype_is_float32_unless_told():
    assert mx.nd.array([1, 2]).dtype == numpy.float32
    assert mx.nd.array(numpy.arange(3)).dtype == numpy.float32
    assert mx.nd.array(mx.nd.ones((2,), dtype="int8")).dtype == numpy.int8
    assert mx.nd.zeros(3).shape == (3,)
    assert mx.nd.full((2,), 7, dtype=int).asnumpy().tolist() == [7, 7]
    assert mx.nd.arange(2, 8, 2).asnumpy().tolist() == [2, 4, 6]
    for bad in ("complex64", "uint16", object, "nothing"):
        with pytest.raises(TypeError, match="float32"):
            mx.nd.zeros((2,), dtype=bad)
    with pytest.raises(TypeError):
        mx.nd.array(["a"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_copied_however_they_lie(dtype):
    """Transposed, with gaps, of the other byte order, and beside the multiples of their size."""
    plain = numpy.arange(12).reshape(3, 4).astype(dtype)
    beside = numpy.frombuffer(b"x" + plain.tobytes(), dtype, 12, 1).reshape(3, 4)
    for values in (plain, plain.T, plain[::2, ::3], plain[::-1], beside, plain[0, 1], plain.astype(plain.dtype.newbyteorder())):
        same(mx.nd.array(values, dtype=dtype), values)


def test_large_unsigned_numbers_keep_their_sign():
    big = numpy.array([2**63 + 2048, 7], dtype="uint64")
    assert mx.nd.array(big, dtype="float64").asnumpy().tolist() == [2**63 + 2048, 7]
    assert mx.nd.array([2**63]).asnumpy()[0] == 2.0**63
    with pytest.raises(ValueError, match="9223372036854777856"):
        mx.nd.array(big, dtype="int64")
    assert mx.nd.array(big[1:], dtype="int64").asnumpy().tolist() == [7]


def test_arrays_without_elements():
    a = mx.nd.zeros((0, 3))
    assert a.asnumpy().shape == (0, 3) and (a + 1).shape == (0, 3)
    assert mx.nd.array([]).shape == (0,)
    assert a.sum().asscalar() == 0


def test_printing():
    a = mx.nd.ones((2, 3), mx.cpu(1))
    assert repr(a) == "<NDArray 2x3 @cpu(1)>"
    assert str(a) == "\n[[1. 1. 1.]\n [1. 1. 1.]]\n<NDArray 2x3 @cpu(1)>"
    assert str(mx.nd.sparse.zeros("row_sparse", (2, 3))) == "<RowSparseNDArray 2x3 @cpu(0)>"
    b = mx.np.ones((2,), dtype="int32", ctx=mx.cpu(1))
    assert repr(b) == "array([1, 1], dtype=int32)" and str(b) == "[1 1]"
    for dtype in ("float16", "float64", "int8", "uint8", "int64"):
        shown = "1., 1." if dtype.startswith("float") else "1, 1"
        assert repr(b.astype(dtype)) == f"array([{shown}], dtype={dtype})"
    assert repr(b.astype("bool")) == "array([ True,  True])"
    assert repr(mx.np.zeros(1001)) == "array([0., 0., 0., ..., 0., 0., 0.])"
    assert repr(mx.np.zeros((2, 600), dtype="float16")) == (
        "array([[0., 0., 0., ..., 0., 0., 0.],\n       [0., 0., 0., ..., 0., 0., 0.]], dtype=float16)")
    assert repr(mx.np.zeros((0, 3))) == "array([], shape=(0, 3))"
    assert repr(mx.np.arange(50)) == repr(numpy.arange(50.0))  # over several lines
    assert "dtype" not in repr(mx.np.arange(17) / 7)
    assert repr(mx.np.zeros((0,))) == "array([])"
    assert repr(mx.np.ones(2, dtype="bfloat16", ctx=mx.cpu(1))) == "array([1., 1.], dtype=bfloat16)"
    assert repr(mx.np.full((1,), True)) == "array([ True])" and mx.np.full((1,), True, "int8").dtype == numpy.int8
    assert (mx.np.ones(2) < 2).asnumpy().dtype == numpy.bool_
    assert type(b + 1) is mx.np.ndarray and type(b[0:1]) is mx.np.ndarray


def test_contexts():
    assert str(mx.gpu(2)) == "gpu(2)" and mx.cpu() == mx.Context("cpu", 0) != mx.cpu(1)
    with mx.cpu(5):
        assert mx.nd.zeros((1,)).context == mx.cpu(5) == mx.current_context()
    assert mx.current_context() == mx.cpu()
    with pytest.raises(ValueError, match="tpu"):
        mx.Context("tpu")
    if mx.num_gpus() == 0:
        with pytest.raises(ValueError):
            mx.nd.zeros((1,), mx.gpu(0))
    for bad in (lambda: mx.nd.zeros((1,), "cpu"), lambda: mx.cpu("0"), lambda: mx.nd.zeros("12"), lambda: mx.nd.zeros((1.5,))):
        with pytest.raises(TypeError, match="expected"):
            bad()
    assert mx.num_gpus() >= 0


def test_contexts_do_not_change():
    """Arrays share them, and so did the default: `x.context.device_id = 7` moved what was made later."""
    for context in (mx.nd.zeros((1,)).context, mx.current_context(), mx.cpu(3)):
        for name, value in (("device_id", 7), ("device_type", "gpu"), ("other", 1)):
            with pytest.raises(AttributeError):
                setattr(context, name, value)
    assert mx.nd.zeros((1,)).context == mx.current_context() == mx.cpu(0)
    for copied in (pickle.loads(pickle.dumps(mx.cpu(3))), copy.deepcopy(mx.cpu(3)), copy.copy(mx.cpu(3))):
        assert copied == mx.cpu(3) and hash(copied) == hash(mx.cpu(3))


def test_a_with_block_is_its_threads_own():
    """The device of one thread used to be that of all."""
    entered, left = threading.Event(), threading.Event()

    def work():
        with mx.cpu(5):
            entered.set()
            left.wait()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    context = mx.nd.zeros((1,)).context
    with mx.cpu(3):
        left.set()
        thread.join()
        assert mx.current_context() == mx.cpu(3)
    assert context == mx.current_context() == mx.cpu()


def test_pickling_keeps_values_dtype_and_device():
    a = mx.nd.array([[1, 2]], mx.cpu(2), "int8")
    b = pickle.loads(pickle.dumps(a))
    assert b.context == mx.cpu(2) and b.dtype == numpy.int8 and b.asnumpy().tolist() == [[1, 2]]


def test_random_numbers_that_cannot_be_are_refused():
    out = mx.nd.zeros((2,))
    for call, error in ((lambda: mx.random.normal(0, -1), "normal: 0 and -1.*scale"),
                        (lambda: mx.random.uniform(0, float("inf")), "uniform: 0 and inf"),
                        (lambda: mx.random.uniform(shape=(-1,)), "negative dimensions"),
                        (lambda: mx.random.normal(shape=(3,), out=out), r"normal: expected shape \(2,\), that of out, got \(3,\)"),
                        (lambda: mx.random.randint(0, 2, (1,), out=out.astype("int32")), "randint: expected shape"),
                        (lambda: mx.random.uniform(dtype="int32"), "uniform: expected a dtype of floats, got int32"),
                        (lambda: mx.random.normal(out=out.astype("bool")), "normal: expected a dtype of floats, got bool"),
                        (lambda: mx.random.randint(0, 2, dtype="float32"), "expected a dtype of integers, got float32"),
                        (lambda: mx.random.randint(0, 2, out=out), "expected a dtype of integers, got float32"),
                        (lambda: mx.random.randint(5, 0), "randint: 5 and 0.*low >= high"),
                        (lambda: mx.random.randint(-5, -1, dtype="uint8"), "range of uint8, got -5 to -1"),
                        (lambda: mx.random.randint(0, 300, out=out.astype("uint8")), "range of uint8, got 0 to 300"),
                        (lambda: mx.random.seed(-1), "at least 0, got -1")):
        with pytest.raises(mx.InvalidArgument, match=error):
            call()
    for call in (lambda: mx.random.uniform(0, 1, out=3), lambda: mx.random.seed("x"), lambda: mx.random.seed(1.5),
                 lambda: mx.random.uniform([0, 10], [1, 20], shape=(2,)), lambda: mx.random.normal(out, 1, (2,)),
                 lambda: mx.random.normal("a"), lambda: mx.random.randint(0.5, 3), lambda: mx.random.randint(0, 3.0),
                 lambda: mx.random.randint(numpy.zeros(2, "int32"), 3, (2,))):
        with pytest.raises(mx.InvalidType, match="expected"):
            call()
    assert mx.random.randint(0, 256, (3,), dtype="uint8").shape == (3,)
    assert mx.random.randint(numpy.int64(7), 8, (2,)).asnumpy().tolist() == [7, 7]
    assert mx.random.randint(0, 1, (0,)).shape == (0,) and mx.random.normal().shape == (1,)
    assert mx.random.normal(numpy.float32(0), 1, 2, out=out) is out


def test_random_numbers_follow_the_seed():
    mx.random.seed(7)
    first = mx.random.uniform(-1, 1, (1000,)).asnumpy()
    more = mx.random.normal(5, 2, shape=(1000,)).asnumpy()
    mx.random.seed(7)
    numpy.testing.assert_array_equal(first, mx.random.uniform(-1, 1, (1000,)).asnumpy())
    assert -1 <= first.min() < -0.9 and 0.9 < first.max() < 1
    assert abs(more.mean() - 5) < 0.5 and abs(more.std() - 2) < 0.5
    out = mx.nd.zeros((3,))
    assert mx.random.normal(out=out) is out and (out.asnumpy() != 0).all()


def test_random_numbers_are_of_outs_dtype():
    """They were of float32, or int32, on the way to it."""
    for draw in (mx.random.uniform, mx.random.normal):
        out = mx.nd.zeros((8,), dtype="float64")
        for options in ({}, {"dtype": "float64"}):
            draw(out=out, **options)
            values = out.asnumpy()
            assert (values != values.astype("float32")).any()
    out = mx.nd.zeros((2,), dtype="int64")
    assert mx.random.randint(2**40, 2**40 + 1, out=out).asnumpy().tolist() == [2**40] * 2
    assert mx.random.randint(0, 9).dtype == numpy.int32
    mx.random.seed(3)
    first = mx.random.uniform().asscalar()
    mx.random.seed(3)
    for draw in (mx.random.uniform, mx.random.normal, mx.random.randint):
        with pytest.raises(mx.InvalidArgument, match=f"{draw.__name__}: expected dtype int64, that of out, got float32"):
            draw(0, 1, dtype="float32", out=out)
    assert mx.random.uniform().asscalar() == first  # nothing was drawn


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_uniform_numbers_stay_below_the_upper_end(dtype):
    """The cast rounded some up to it."""
    for low, high in ((0, 1), (-2, -1), (-1, 0), (0, 0.1), (1000, 1001)):
        mx.random.seed(0)
        values = mx.random.uniform(low, high, (100000,), dtype).asnumpy().astype("float64")
        assert low <= values.min() and values.max() < high
    for options in ({}, {"dtype": dtype}):
        out = mx.nd.zeros((100000,), dtype=dtype)
        mx.random.uniform(1, 2, out=out, **options)
        assert out.asnumpy().max() < 2
    assert mx.random.uniform(2, 2, (1,), dtype).asscalar() == 2


def test_the_greatest_number_of_a_dtype_below_another():
    below = mx.random._below
    ends = numpy.array([1.0, 1 + 2.0**-20, -1.0, -1 - 2.0**-20, 0.1, 2.0**-30])
    for name, digits in (("float16", 11), ("bfloat16", 8), ("float32", 24)):
        code = mx.dtype._code_of(name)
        found = below(ends, code)
        assert (found < ends).all()
        step = numpy.maximum(2.0 ** (numpy.frexp(found)[1] - digits), 2.0**-24 if name == "float16" else 0)
        assert (found % step == 0).all() and (found + step >= ends).all(), name
    assert below(numpy.array(0.0), mx.dtype._code_of("bfloat16")) < 0
    assert below(numpy.array(1e6), mx.dtype._code_of("float16")) == 65504


def test_files_keep_lists_and_names(tmp_path):
    file = tmp_path / "arrays"
    rows = mx.nd.sparse.row_sparse_array(([[1.0, 2.0]], [3]), shape=(5, 2))
    mx.nd.save(file, {"weight": mx.nd.ones((2,)), "rows": rows})
    loaded = mx.nd.load(file)
    assert sorted(loaded) == ["rows", "weight"] and loaded["weight"].asnumpy().tolist() == [1, 1]
    numpy.testing.assert_array_equal(loaded["rows"].asnumpy(), rows.asnumpy())
    mx.nd.save(file, [mx.nd.zeros((1,)), mx.nd.ones((2,), dtype="int64")])
    first, second = mx.nd.load(file)
    assert second.dtype == numpy.int64 and first.shape == (1,)
    mx.nd.save(file, {"0": first})
    assert list(mx.nd.load(file)) == ["0"]
    with pytest.raises(OSError, match="nothing"):
        mx.nd.load(tmp_path / "nothing")
    with pytest.raises(TypeError):
        mx.nd.save(file, {"a": numpy.ones(2)})


def test_names_that_no_file_can_have_are_named(tmp_path):
    """They were errors of Python's, which the call for its part did not explain."""
    one, file = mx.nd.ones((1,)), tmp_path / "arrays"
    with pytest.raises(mx.InvalidArgument, match=r"save: expected names that UTF-8 has, got 'w\\ud800': surrogates not"):
        mx.nd.save(file, {"a": one, "w\ud800": one})
    assert not file.exists()
    for name in (str(tmp_path / "\ud800"), bytes(tmp_path) + b"/\xff"):
        for call, use in (("save", lambda: mx.nd.save(name, one)), ("load", lambda: mx.nd.load(name))):
            with pytest.raises(mx.InvalidArgument, match=f"{call}: expected a file name that UTF-8 has, got"):
                use()
    for call, use in (("save", lambda: mx.nd.save(3, one)), ("load", lambda: mx.nd.load(3))):
        with pytest.raises(mx.InvalidType, match=f"{call}: expected the name of a file, got int"):
            use()
    for use in (lambda: mx.nd.save(f"{file}\0b", one), lambda: mx.nd.load(f"{file}\0b")):
        with pytest.raises(mx.IoError, match="a file name without a zero byte"):
            use()
    mx.nd.save(bytes(file), one)
    assert mx.nd.load(bytes(file))[0].asscalar() == 1


def test_pipes_are_refused(tmp_path):
    """To load one waited for somebody who writes to it."""
    os.mkfifo(tmp_path / "pipe")
    for use in (lambda: mx.nd.save(tmp_path / "pipe", mx.nd.ones((1,))), lambda: mx.nd.load(tmp_path / "pipe")):
        with pytest.raises(mx.IoError, match="pipe: expected a regular file"):
            use()


def mxnet_array(values, code, magic=0xF993FAC9):
    """An array as MXNet writes it, by the layout of its files."""
    shape = struct.pack(f"<i{values.ndim}q", values.ndim, *values.shape)
    return struct.pack("<Ii", magic, 0) + shape + struct.pack("<iii", 1, 0, code) + values.tobytes()


def test_files_of_mxnet(tmp_path):
    file = tmp_path / "model.params"
    x, y = numpy.arange(6, dtype="float32").reshape(2, 3), numpy.arange(3, dtype="int64")
    ids, rows = numpy.array([1, 4], dtype="int64"), numpy.ones((2, 2), dtype="float32")
    sparse = (struct.pack("<Ii", 0xF993FAC9, 1) + struct.pack("<i2q", 2, 2, 2) + struct.pack("<i2q", 2, 6, 2)
              + struct.pack("<iii", 1, 0, 0) + struct.pack("<ii1q", 6, 1, 2) + rows.tobytes() + ids.tobytes())
    names = [b"arg:weight", b"aux:count", b"rows"]
    content = struct.pack("<QQQ", 0x112, 0, 3) + mxnet_array(x, 0) + mxnet_array(y, 6, 0xF993FACA) + sparse
    content += struct.pack("<Q", 3) + b"".join(struct.pack("<Q", len(name)) + name for name in names)
    file.write_bytes(content)
    loaded = mx.nd.load(file)
    same(loaded["arg:weight"], x)
    same(loaded["aux:count"], y)
    assert loaded["aux:count"].dtype == numpy.int64
    assert loaded["rows"].indices.asnumpy().tolist() == [1, 4] and loaded["rows"].shape == (6, 2)
    for length in range(16, len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(mx.IoError, match="model.params"):
            mx.nd.load(file)


def test_arrays_of_mxnet_in_bfloat16(tmp_path):
    """What MXNet 1.9.1 wrote of two arrays, the first one by `astype(numpy.dtype([("bfloat16", numpy.uint16)]))`."""
    (tmp_path / "model.params").write_bytes(base64.b64decode(
        "EgEAAAAAAAAAAAAAAAAAAAIAAAAAAAAAyfqT+QAAAAACAAAAAgAAAAAAAAADAAAAAAAAAAEAAAAAAAAADAAAAIA/AEBgwAAASXHMPcn6k/kAAAAA"
        "AQAAAAEAAAAAAAAAAQAAAAAAAAAAAAAAAACAPwIAAAAAAAAAAQAAAAAAAAB3AQAAAAAAAABm"))
    for ctx in (None, mx.cpu(1)):
        loaded = mx.nd.load(tmp_path / "model.params", ctx)
        assert loaded["w"].dtype == "bfloat16" and loaded["w"].context == (ctx or mx.cpu(0))
        cut = numpy.array([[1, 2, -3.5], [0, 1e30, 0.1]], "float32").view("uint32") & 0xFFFF0000
        same(loaded["w"], cut.view("float32"))
        same(loaded["f"], numpy.ones(1))
    no_elements = numpy.zeros((0, 3), "uint16")
    head, tail = struct.pack("<QQQ", 0x112, 0, 1), struct.pack("<Q", 0)
    (tmp_path / "model.params").write_bytes(head + mxnet_array(no_elements, 12) + tail)
    loaded, = mx.nd.load(tmp_path / "model.params")
    assert (loaded.shape, loaded.dtype) == ((0, 3), "bfloat16")
    rows = numpy.array([[1.0, 2.0]], "float32").view("uint16")[:, 1::2]
    sparse = (struct.pack("<Iii2qi2q", 0xF993FAC9, 1, 2, 1, 2, 2, 6, 2) + struct.pack("<iii", 1, 0, 12)
              + struct.pack("<iiq", 6, 1, 1) + rows.tobytes() + struct.pack("<q", 4))
    (tmp_path / "model.params").write_bytes(head + sparse + tail)
    loaded, = mx.nd.load(tmp_path / "model.params")
    assert loaded.dtype == "bfloat16" and loaded.indices.asnumpy().tolist() == [4]
    same(loaded.data, numpy.array([[1.0, 2.0]], "float32"))


def test_row_sparse_arrays_that_mxnet_saved_before_it_had_computed_them(tmp_path):
    """It wrote that there are no rows, though they are there. The file is of MXNet 1.9.1."""
    (tmp_path / "model.params").write_bytes(base64.b64decode(
        "EgEAAAAAAAAAAAAAAAAAAAEAAAAAAAAAyfqT+QEAAAACAAAAAAAAAAAAAAACAAAAAAAAAAIAAAADAAAAAAAAAAIAAAAAAAAAAQAAAAAAAAAAAAAA"
        "BgAAAAEAAAACAAAAAAAAAAAAgD8AAABAAABAQAAAgEAAAAAAAAAAAAIAAAAAAAAAAAAAAAAAAAA="))
    loaded, = mx.nd.load(tmp_path / "model.params")
    assert loaded.indices.asnumpy().tolist() == [0, 2]
    same(loaded, numpy.array([[1, 2], [0, 0], [3, 4]], "float32"))


def test_csr_arrays_of_mxnet_are_refused(tmp_path):
    content = struct.pack("<QQQ", 0x112, 0, 1) + struct.pack("<Ii", 0xF993FAC9, 2) + bytes(100)
    (tmp_path / "model.params").write_bytes(content)
    with pytest.raises(mx.IoError, match="expected a dense or a row_sparse array, found storage type 2"):
        mx.nd.load(tmp_path / "model.params")


def test_npx_loads_arrays_of_np(tmp_path):
    file = str(tmp_path / "arrays")
    x, rows = mx.np.array([1, 2]), mx.nd.sparse.zeros("row_sparse", (3, 2))
    mx.npx.save(file=file, arr={"x": x, "rows": rows})
    loaded = mx.npx.load(file=file)
    assert type(loaded["x"]) is mx.np.ndarray and loaded["rows"].stype == "row_sparse"
    assert (loaded["x"] == x).dtype == numpy.bool_
    same(loaded["x"], numpy.array([1, 2]))
    mx.npx.save(file, [x, x])
    assert [type(one) for one in mx.npx.load(file)] == [mx.np.ndarray] * 2
    mx.npx.save(file, x)
    assert [type(one) for one in mx.npx.load(file)] == [mx.np.ndarray]
    assert type(mx.nd.load(file)[0]) is mx.nd.NDArray


def test_older_files_of_mxnet(tmp_path):
    """Arrays from before there were storage types, and from before their shapes had 64 bits; lists without names."""
    file = tmp_path / "model.params"
    arrays = [(numpy.arange(6, dtype="float32").reshape(2, 3), 0), (numpy.arange(3, dtype="float64"), 1),
              (numpy.arange(2, dtype="uint8"), 3), (numpy.arange(4, dtype="int32").reshape(2, 1, 2), 4)]

    def without_stype(values, code):
        shape = struct.pack(f"<i{values.ndim}q", values.ndim, *values.shape)
        return struct.pack("<I", 0xF993FAC8) + shape + struct.pack("<iii", 1, 0, code) + values.tobytes()

    def legacy(values, code):
        return struct.pack(f"<I{values.ndim}I", values.ndim, *values.shape) + struct.pack("<iii", 1, 0, code) + values.tobytes()

    for write in (without_stype, legacy, mxnet_array):
        content = struct.pack("<QQQ", 0x112, 0, len(arrays)) + b"".join(write(*one) for one in arrays) + struct.pack("<Q", 0)
        file.write_bytes(content)
        loaded = mx.nd.load(file)
        assert isinstance(loaded, list) and len(loaded) == len(arrays)
        for array, (values, _) in zip(loaded, arrays):
            assert array.dtype == values.dtype
            same(array, values)
        for length in range(16, len(content)):
            file.write_bytes(content[:length])
            with pytest.raises(mx.IoError, match="model.params"):
                mx.nd.load(file)
    named = struct.pack("<QQQ", 0x112, 0, 1) + legacy(*arrays[0]) + struct.pack("<QQ", 1, 4) + b"arg:"
    file.write_bytes(named)
    assert list(mx.nd.load(file)) == ["arg:"]
    # An array without a shape has nothing behind it.
    for nothing in (struct.pack("<Ii", 0xF993FAC8, 0), struct.pack("<I", 0)):
        file.write_bytes(struct.pack("<QQQ", 0x112, 0, 1) + nothing + struct.pack("<Q", 0))
        assert [array.shape for array in mx.nd.load(file)] == [(0,)]
    file.write_bytes(struct.pack("<QQQ", 0x112, 0, 1) + struct.pack("<I", 33) + bytes(200))
    with pytest.raises(mx.IoError, match="expected an array, found 0x21"):
        mx.nd.load(file)


def test_hostile_files_are_io_errors(tmp_path):
    file = tmp_path / "model.params"
    head, no_names = struct.pack("<QQQ", 0x112, 0, 1), struct.pack("<Q", 0)

    def sparse(ids, code):
        return (struct.pack("<Ii", 0xF993FAC9, 1) + struct.pack("<i2q", 2, len(ids), 2) + struct.pack("<i2q", 2, 6, 2)
                + struct.pack("<iii", 1, 0, 0) + struct.pack("<iiq", code, 1, len(ids))
                + numpy.ones((len(ids), 2), "float32").tobytes() + ids.tobytes())

    no_elements = struct.pack("<Iii3q", 0xF993FAC9, 0, 3, 0, 2**62, 2**62) + struct.pack("<iii", 1, 0, 0)
    for content in (no_elements, sparse(numpy.array([1, 1]), 6), sparse(numpy.array([9]), 6),
                    sparse(numpy.array([1.5]), 1)):
        file.write_bytes(head + content + no_names)
        with pytest.raises(mx.IoError, match="model.params"):
            mx.nd.load(file)
    mx._core.save(str(file), [("a", mx.nd.ones((1,)))], {"heddle.kind": "list"})
    assert list(mx.nd.load(file)) == ["a"]  # whatever it says of itself


def test_long_names_of_hostile_files_are_cut_between_letters(tmp_path):
    """Half a letter used to be a UnicodeDecodeError in place of what is wrong."""
    file = tmp_path / "model.safetensors"
    header = json.dumps({"a" + "\u00e9" * 60: {"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    with pytest.raises(mx.IoError, match="array 'a\u00e9{39}\\.\\.\\.'.*found 'F8'"):
        mx.nd.load(file)


def test_errors_come_back_where_values_are_read():
    a = mx.nd.zeros((2,))

    def fail():
        raise KeyError("from the op")

    mx.engine.push(fail, writes=[a], name="failing")
    b = a + 1
    for _ in range(2):  # each time
        with pytest.raises(KeyError, match="from the op"):
            b.asnumpy()
        with pytest.raises(KeyError, match="from the op"):
            a.wait_to_read()
    a[:] = 3  # a whole overwrite cures it
    assert (a + 1).asnumpy().tolist() == [4, 4]


def test_many_threads_on_their_own_arrays(seed):
    failures = []

    def work(number):
        try:
            for i in range(50):
                program = Program(seed + 1000 * number + i)
                for _ in range(10):
                    program.step()
                program.compare()
        except BaseException as error:  # noqa: BLE001  shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_dropped_arrays_give_their_memory_back():
    def used():
        gc.collect()
        mx.nd.waitall()
        return mx._core.memory_stats()["used"]

    before = used()
    for _ in range(50):
        a = mx.nd.zeros((1000, 100))
        b = (a + 1) * 2
        c = [a, b]
        c.append(c)  # in a cycle
    del a, b, c
    assert used() <= before + 1000


def test_indices_of_lists_convert_as_slices_do():
    source = mx.nd.array([300.0, -1.0, float("nan")])
    for key in (slice(None), [0, 1, 2], numpy.array([True, True, True])):
        for value in (source, source.asnumpy()):
            array = mx.nd.zeros((3,), dtype="uint8")
            array[key] = value
            assert array.asnumpy().tolist() == [255, 0, 0], (key, value)


def test_ranges_of_whole_numbers_are_exact():
    for arange in (mx.nd.arange, mx.np.arange):
        assert arange(2 ** 53, 2 ** 53 + 4, dtype="int64").asnumpy().tolist() == list(range(2 ** 53, 2 ** 53 + 4))
        for bounds in ((5,), (0, 1, 0.25), (5, 0, -2.0), (-3, 3), (0.5, 3)):
            numpy.testing.assert_array_equal(arange(*bounds).asnumpy(), numpy.arange(*bounds, dtype="float32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_many_arrays_round_once(dtype):
    numbers = [2048, 1, 1] if dtype == "float16" else [256, 1, 1]
    arrays = [mx.nd.array([number], dtype=dtype) for number in numbers]
    assert mx.nd.add_n(*arrays).asnumpy().tolist() == [sum(numbers)]
    assert mx.nd.add_n(*arrays).dtype == arrays[0].dtype
    with pytest.raises(mx.InvalidArgument, match=f"expected arrays of {dtype}, got one of float32"):
        mx.nd.add_n(arrays[0], mx.nd.ones((1,)))


def test_means_are_quotients():
    for count in (49, 98, 103, 197):
        assert mx.nd.full((count,), 7, dtype="int32").mean().asnumpy().tolist() == [7]
        assert mx.nd.ones((count,), dtype="float64").mean().asnumpy().tolist() == [1]
