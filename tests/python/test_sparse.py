"""Row-sparse arrays: making them, arithmetic with dense ones, conversions."""

import pickle

import operator

import numpy
import pytest

import heddle as mx


def random_rows(generator, shape):
    """A row-sparse array and the same values as a NumPy array."""
    count = generator.integers(0, shape[0] + 1)
    ids = generator.permutation(shape[0])[:count]
    rows = generator.integers(-4, 5, (count, *shape[1:])).astype("float32")
    dense = numpy.zeros(shape, "float32")
    dense[ids] = rows
    return mx.nd.sparse.row_sparse_array((rows, ids), shape=shape), dense


def test_random_arithmetic_equals_numpys(seed):
    generator = numpy.random.default_rng(seed)
    for _ in range(50):
        shape = (int(generator.integers(1, 12)), 3)
        a, x = random_rows(generator, shape)
        b, y = random_rows(generator, shape)
        d = generator.integers(-4, 5, shape).astype("float32")
        dense = mx.nd.array(d)
        for array, values in ((a + b, x + y), (a * 2, x * 2), (0.5 * a, x * 0.5), (a - b, x - y), (-a, -x),
                              (dense + a, d + x), (a + dense, d + x), (a.tostype("default"), x),
                              (dense.tostype("row_sparse"), d), (a.copy(), x), (a.astype("float64"), x)):
            numpy.testing.assert_array_equal(array.asnumpy(), values)
        for array, values in ((dense * a, d * x), (a * dense, d * x), (a / 3, x / numpy.float32(3)), (a / 0.5, x * 2)):
            assert array.stype == "row_sparse" and array.indices.asnumpy().tolist() == a.indices.asnumpy().tolist()
            numpy.testing.assert_array_equal(array.asnumpy(), values)
        dense += a
        numpy.testing.assert_array_equal(dense.asnumpy(), d + x)
        a += b
        a *= 3
        numpy.testing.assert_array_equal(a.asnumpy(), (x + y) * 3)
        alias = a
        a /= 7
        assert a is alias
        numpy.testing.assert_array_equal(a.asnumpy(), (x + y) * 3 / numpy.float32(7))
        ids = generator.integers(0, shape[0], 5)
        kept = numpy.zeros(shape, "float32")
        kept[ids] = y[ids]
        numpy.testing.assert_array_equal(mx.nd.sparse.retain(b, ids).asnumpy(), kept)


def test_what_it_says_of_itself():
    a = mx.nd.sparse.row_sparse_array(([[1, 2], [3, 4]], [4, 1]), shape=(6, 2), dtype="float64", ctx=mx.cpu(1))
    assert a.shape == (6, 2) and a.dtype == numpy.float64 and a.stype == "row_sparse" and a.context == mx.cpu(1)
    assert a.indices.asnumpy().tolist() == [1, 4] and a.data.asnumpy().tolist() == [[3, 4], [1, 2]]
    assert mx.nd.sparse.row_sparse_array(([[1]], [4])).shape == (5, 1)
    assert mx.nd.sparse.row_sparse_array((3, 2)).shape == (3, 2)
    assert mx.nd.zeros((3, 2), stype="row_sparse").stype == "row_sparse"
    copy = pickle.loads(pickle.dumps(a))
    numpy.testing.assert_array_equal(copy.asnumpy(), a.asnumpy())
    assert copy.context == mx.cpu(1)


def test_copies_between_kinds():
    a = mx.nd.sparse.row_sparse_array(([[1.0, 2.0]], [1]), shape=(3, 2))
    dense, sparse = mx.nd.ones((3, 2)), mx.nd.sparse.zeros("row_sparse", (3, 2))
    assert a.copyto(dense) is dense and dense.asnumpy().tolist() == [[0, 0], [1, 2], [0, 0]]
    a.copyto(sparse)
    assert sparse.indices.asnumpy().tolist() == [1]
    mx.nd.array([[0, 0], [0, 0], [5, 6]]).copyto(sparse)
    assert sparse.indices.asnumpy().tolist() == [2]
    assert a.copyto(mx.cpu(2)).context == mx.cpu(2)


def test_numpy_takes_all_of_the_values():
    """It made an array of no dimensions of the object."""
    a = mx.nd.sparse.row_sparse_array(([[1, 2]], [1]), shape=(3, 2))
    expected = [[0, 0], [1, 2], [0, 0]]
    assert numpy.asarray(a).tolist() == numpy.array(a, copy=True).tolist() == expected
    assert numpy.asarray(a).dtype == numpy.float32 and numpy.asarray(a, "int64").dtype == numpy.int64
    with pytest.raises(ValueError, match="copied"):
        numpy.array(a, copy=False)


def test_bad_input_is_refused():
    for arguments in ((([[1.0]], [3]), (3, 1)), (([[1.0], [2.0]], [0, 0]), (3, 1)), (([[1.0]], [0, 1]), (3, 1)),
                      (([[1.0]], [-1]), (3, 1))):
        with pytest.raises(ValueError):
            mx.nd.sparse.row_sparse_array(*arguments)
    wholes = mx.nd.sparse.row_sparse_array(([[1.0], [2.0], [3.0]], [0, 1, 2]), shape=(4, 1))
    for bad in (1.5, -0.5, float("nan"), float("inf"), 1e30):
        for ids in ([bad], numpy.array([0, bad]), numpy.array([bad], "float32"), mx.nd.array([bad])):
            rows = numpy.ones((len(ids), 1))
            for call in (lambda: mx.nd.sparse.row_sparse_array((rows, ids), (4, 1)),
                         lambda: mx.nd.sparse.row_sparse_array((rows, ids)),
                         lambda: mx.nd.sparse.retain(wholes, ids).wait_to_read()):
                with pytest.raises(mx.InvalidArgument, match="row id .*: expected a whole number"):
                    call()
    for bad in (-1, 4):
        with pytest.raises(mx.InvalidArgument, match=rf"row id {bad}: expected one in \[0, 4\)"):
            mx.nd.sparse.retain(wholes, [0, bad])
    for ids in ([True], numpy.array([True]), mx.nd.array([1], dtype="bool")):
        for call in (lambda: mx.nd.sparse.row_sparse_array(([[1.0]], ids), (4, 1)),
                     lambda: mx.nd.sparse.retain(wholes, ids)):
            with pytest.raises(mx.InvalidArgument, match="numeric dtype, got bool"):
                call()
    for ids in ([2.0, 0.0], numpy.array([2, 0], "float16"), mx.nd.array([2, 0], dtype="bfloat16"), mx.nd.array([2, 0])):
        made = mx.nd.sparse.row_sparse_array(([[5.0], [6.0]], ids), (4, 1))
        assert made.indices.asnumpy().tolist() == [0, 2] and made.data.asnumpy().tolist() == [[6], [5]]
        assert mx.nd.sparse.retain(wholes, ids).data.asnumpy().tolist() == [[1], [3]]
    with pytest.raises(ValueError, match="csr"):
        mx.nd.sparse.zeros("csr", (2, 2))
    a = mx.nd.sparse.zeros("row_sparse", (2, 2))
    with pytest.raises(ValueError):
        a.tostype("csr")
    with pytest.raises(TypeError):
        a + 1
    with pytest.raises(TypeError):
        mx.nd.sparse.array([1, 2])


def test_products_and_quotients_cost_what_is_there_and_are_checked():
    rows = mx.nd.sparse.row_sparse_array(([[8.0, 4.0]], [1]), shape=(3, 2))
    dense = mx.nd.array([[numpy.inf, 1], [0.5, 2], [numpy.nan, 1]])
    assert (dense * rows).asnumpy().tolist() == [[0, 0], [4, 8], [0, 0]]  # the other rows are not looked at
    assert (rows / 0).asnumpy().tolist() == [[0, 0], [numpy.inf] * 2, [0, 0]]
    whole = rows.astype("int32")
    assert (whole / 3).asnumpy()[1].tolist() == [2, 1]  # towards zero, as dense ones
    with pytest.raises(mx.InvalidArgument, match="0.5"):
        whole / 0.5
    for bad in (mx.nd.ones((3, 3)), mx.nd.ones((3, 2), dtype="float64"), mx.nd.ones((3, 2), mx.cpu(1))):
        for call in (lambda: bad * rows, lambda: rows * bad):
            with pytest.raises(mx.InvalidArgument, match="Multiply: expected"):
                call()
    for call in (lambda: rows / rows, lambda: rows / mx.nd.ones((3, 2)), lambda: 1 / rows, lambda: rows / "2",
                 lambda: rows * rows):
        with pytest.raises(TypeError):
            call()
    none = mx.nd.sparse.zeros("row_sparse", (3, 2))
    assert (none * dense).indices.size == (none / 2).indices.size == 0


def test_all_of_an_array_is_assigned():
    rows = alias = mx.nd.sparse.row_sparse_array(([[1.0, 2.0]], [1]), shape=(3, 2))
    rows[:] = mx.nd.array([[0, 0], [3, 0], [0, 4]])
    assert alias.indices.asnumpy().tolist() == [1, 2] and alias.asnumpy().tolist() == [[0, 0], [3, 0], [0, 4]]
    rows[:] = mx.nd.sparse.row_sparse_array(([[5, 6]], [0]), shape=(3, 2), dtype="float64", ctx=mx.cpu(1))
    assert alias.asnumpy().tolist() == [[5, 6], [0, 0], [0, 0]] and alias.context == mx.cpu() and alias.dtype == numpy.float32
    rows[...] = numpy.eye(3, 2)
    assert alias.indices.asnumpy().tolist() == [0, 1]
    rows[0:3] = 2
    assert alias.asnumpy().tolist() == [[2, 2]] * 3
    rows[:] = 0
    assert alias.indices.size == 0
    huge = mx.nd.sparse.row_sparse_array(([[1.0, 2.0]], [1]), shape=(1 << 45, 2))
    huge[:] = 0  # costs no memory for the rows of the shape
    assert huge.indices.size == 0
    for key in (1, slice(0, 2), slice(None, None, -1), (0, 1), [0]):
        with pytest.raises(mx.InvalidArgument, match=r"expected all of a RowSparseNDArray, \[:\], got"):
            rows[key] = 1
    with pytest.raises(mx.InvalidArgument):
        rows[:] = mx.nd.ones((2, 2))


def test_changes_in_place_are_in_place():
    """`stored -= ...` in an updater used to make another array and leave the stored one as it was."""
    rows = alias = mx.nd.sparse.row_sparse_array(([[1.0, 2.0]], [1]), shape=(3, 2))
    rows -= rows * 0.5
    assert rows is alias and alias.asnumpy()[1].tolist() == [0.5, 1]
    for change in ("rows += dense", "rows -= dense", "rows += 1", "rows -= 1"):
        with pytest.raises(TypeError, match="expected a RowSparseNDArray"):
            exec(change, {"rows": rows, "dense": mx.nd.ones((3, 2))})
    dense = weight = mx.nd.ones((3, 2))
    dense -= rows
    assert dense is weight and weight.asnumpy().tolist() == [[1, 1], [0.5, 0], [1, 1]]
    assert (dense - rows).asnumpy()[1].tolist() == [0, -1] and (rows - dense).asnumpy()[1].tolist() == [0, 1]


def test_rows_have_the_width_of_the_shape():
    rows = numpy.arange(6.0).reshape(3, 2)
    with pytest.raises(mx.InvalidArgument, match=r"expected rows of shape \(2, 3\) for 2 row ids and shape \(4, 3\), got \(3, 2\)"):
        mx.nd.sparse.row_sparse_array((rows, [0, 1]), shape=(4, 3))
    made = mx.nd.sparse.row_sparse_array((rows, [0, 3, 1]), shape=(4, 2))
    assert made.asnumpy().tolist() == [[0, 1], [4, 5], [0, 0], [2, 3]]


def test_differences_of_unsigned_rows_wrap():
    rows = mx.nd.array([[1, 2], [0, 0]], dtype="uint8").tostype("row_sparse")
    assert (rows - rows).asnumpy().tolist() == [[0, 0], [0, 0]]
    dense = mx.nd.zeros((2, 2), dtype="uint8")
    assert (dense - rows).asnumpy().tolist() == [[255, 254], [0, 0]]
    dense -= rows
    assert dense.asnumpy().tolist() == [[255, 254], [0, 0]]


def test_comparisons_are_those_of_the_whole_arrays():
    """They told whether it was the same object."""
    a = mx.nd.sparse.row_sparse_array(([[1, 2]], [1]), shape=(3, 2))
    b = mx.nd.sparse.row_sparse_array(([[1, 3]], [1]), shape=(3, 2))
    values, others = a.asnumpy(), b.asnumpy()
    for compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
        for left, right, expected in ((a, b, compare(values, others)), (a, 1, compare(values, 1)), (1, a, compare(1, values)),
                                      (a, mx.nd.array(others), compare(values, others)),
                                      (mx.nd.array(values), b, compare(values, others))):
            result = compare(left, right)
            assert result.stype == "default"
            numpy.testing.assert_array_equal(result.asnumpy(), expected.astype("float32"))
    with pytest.raises(TypeError, match="nd.array"):
        a == values
    assert (a == "x") is False and (a != None) is True  # noqa: E711
    assert len({a, b, a}) == 2


def test_the_truth_of_an_array_is_that_of_its_one_element():
    with pytest.raises(mx.InvalidArgument, match=r"one element, got shape \(3, 2\)"):
        bool(mx.nd.sparse.zeros("row_sparse", (3, 2)))
    assert not mx.nd.sparse.zeros("row_sparse", (1, 1)) and mx.nd.sparse.row_sparse_array(([[2]], [0]), (1, 1))


def test_sums_with_arrays_of_np_are_arrays_of_np():
    """They were of heddle.nd, and compared and printed so."""
    rows, dense = mx.nd.sparse.row_sparse_array(([[1, 2]], [1]), shape=(2, 2)), mx.np.ones((2, 2))
    for total, expected in ((dense + rows, [2, 3]), (rows + dense, [2, 3]), (dense - rows, [0, -1]), (rows - dense, [0, 1])):
        assert type(total) is mx.np.ndarray and total[1].asnumpy().tolist() == expected
    assert type(rows + mx.nd.ones((2, 2))) is type(mx.nd.ones((2, 2)) + rows) is mx.nd.NDArray


def test_all_of_an_array_is_the_array():
    a = mx.nd.sparse.row_sparse_array(([[1, 2]], [1]), shape=(3, 2))
    assert a[:] is a and a[...] is a and a[0:3] is a
    for call in (lambda: list(a), lambda: 1 in a):
        with pytest.raises(TypeError, match="not iterable"):
            call()
    for part in (1, slice(1), slice(None, None, -1), (0, 1)):
        with pytest.raises(mx.InvalidArgument, match="expected all of a RowSparseNDArray"):
            a[part]

    def add(key, pushed, stored):
        stored[:] += pushed

    kv = mx.kv.create()
    kv.init("r", mx.nd.ones((3, 2)).tostype("row_sparse"))
    kv.set_updater(add)
    kv.push("r", a)
    out = mx.nd.sparse.zeros("row_sparse", (3, 2))
    kv.row_sparse_pull("r", out=out, row_ids=mx.nd.array([0, 1, 2]))
    assert out.asnumpy().tolist() == [[1, 1], [2, 3], [1, 1]]


def test_a_source_has_the_shape_that_is_asked_for():
    dense = mx.nd.ones((2, 2))
    for source in (dense, dense.asnumpy(), (2, 2), dense.tostype("row_sparse")):
        assert mx.nd.sparse.row_sparse_array(source, shape=(2, 2)).shape == (2, 2)
        with pytest.raises(mx.InvalidArgument, match=r"expected a source of shape \(9, 2\), got \(2, 2\)"):
            mx.nd.sparse.row_sparse_array(source, shape=(9, 2))


def test_rows_are_kept_by_the_method_as_by_the_function():
    a = mx.nd.sparse.row_sparse_array(([[1, 2], [3, 4]], [0, 1]), shape=(3, 2))
    for ids in ([1], numpy.array([1]), mx.nd.array([1])):
        assert a.retain(ids).asnumpy().tolist() == mx.nd.sparse.retain(a, ids).asnumpy().tolist() == [[0, 0], [3, 4], [0, 0]]


def test_the_dtype_of_rows_is_that_of_their_numpy_array():
    """As with MXNet; a dense source is float32, as everywhere else."""
    make = mx.nd.sparse.row_sparse_array
    assert make((numpy.ones((1, 2)), [1]), shape=(3, 2)).dtype == numpy.float64
    assert make(([[1, 1]], [1]), shape=(3, 2)).dtype == numpy.float32
    assert make(numpy.ones((3, 2))).dtype == numpy.float32


def test_copies_and_zeros_of_row_sparse_arrays_are_row_sparse():
    """They were dense."""
    rows = mx.nd.sparse.row_sparse_array(([[1, 2]], [1]), shape=(3, 2), dtype="float64")
    for made, values in ((mx.nd.array(rows), [[0, 0], [1, 2], [0, 0]]), (mx.nd.zeros_like(rows), [[0, 0]] * 3)):
        assert (made.stype, made.shape, made.dtype) == ("row_sparse", (3, 2), numpy.float64)
        assert made.asnumpy().tolist() == values
    made = mx.nd.array(rows, mx.cpu(1), "float32")
    assert (made.stype, made.context, made.dtype) == ("row_sparse", mx.cpu(1), numpy.float32)
    assert mx.nd.sparse.row_sparse_array((rows, [0, 2, 4])).asnumpy()[2].tolist() == [1, 2]
    out = mx.nd.ones((3, 2))
    assert mx.nd.zeros_like(rows, out=out) is out and not out.asnumpy().any()
    assert mx.nd.ones_like(rows).stype == "default"
    assert type(mx.np.array(rows)) is mx.np.ndarray and mx.np.array(rows).tolist() == rows.asnumpy().tolist()
    for key, shown in ((slice(None), [[0, 0], [1, 2], [0, 0]]), ([1, 1, 0], [[0, 0], [1, 2], [1, 1]])):
        dense = mx.nd.ones((3, 2))
        dense[key] = rows
        assert dense.asnumpy().tolist() == shown
