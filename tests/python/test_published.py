"""The published sessions and examples give the published values.

They are retyped for Python 3, with cpu contexts in place of GPUs, and use heddle through the one changed
import. Each checks the values that the page printed. MISPRINTS lists what is wrong on the pages themselves.
"""

import pydoc
import re

import pytest

import heddle as mx
from blocks import check

# page, what it says, what was meant and is run here
MISPRINTS = [
    ("API help of 1.6, pushpull", "kv.push(keys, [mx.nd.ones(shape)]*len(keys), out=b)",
     "kv.pushpull(...): push takes no out"),
    ("tutorial", "'>>>' before the lines of the updater's body", "'...'"),
    ("API help of 1.6, pull", "pull gives 2 into b although an earlier block has left another value under the key",
     "a block begins with the state that it presumes"),
    ("early notes", "update(key, input, stored) pushes x3 in one place, the lists' 11 presume x2",
     "the lists are run with x2, as the tutorial has them"),
    ("early notes", "[gpu(0), ...] typed after a prompt", "the output of the line before it"),
    ("early notes", "pushing lists of CPU arrays crashes", "it does not: the example runs with cpu contexts"),
]


@pytest.fixture
def names(old_printing):
    return {"mx": mx, "shape": (2, 3), "gpus": [mx.cpu(i) for i in range(4)]}


@pytest.mark.parametrize("store", ["local", "device"])
def test_tutorial(names, store):
    names["create"] = lambda _: mx.kv.create(store)
    check("""
    >>> kv = create('local') # create a local kv store.
    >>> shape = (2,3)
    >>> kv.init(3, mx.nd.ones(shape)*2)
    >>> a = mx.nd.zeros(shape)
    >>> kv.pull(3, out = a)
    >>> print(a.asnumpy())
    [[ 2.  2.  2.]
     [ 2.  2.  2.]]
    >>> kv.push(3, mx.nd.ones(shape)*8)
    >>> kv.pull(3, out = a) # pull out the value
    >>> print(a.asnumpy())
    [[ 8.  8.  8.]
     [ 8.  8.  8.]]
    >>> b = [mx.nd.ones(shape, gpu) for gpu in gpus]
    >>> kv.push(3, b)
    >>> kv.pull(3, out = a)
    >>> print(a.asnumpy())
    [[ 4.  4.  4.]
     [ 4.  4.  4.]]
    >>> def update(key, input, stored):
    ...     print("update on key: %d" % key)
    ...     stored += input * 2
    >>> kv._set_updater(update)
    >>> kv.pull(3, out=a)
    >>> print(a.asnumpy())
    [[ 4.  4.  4.]
     [ 4.  4.  4.]]
    >>> kv.push(3, mx.nd.ones(shape))
    update on key: 3
    >>> kv.pull(3, out=a)
    >>> print(a.asnumpy())
    [[ 6.  6.  6.]
     [ 6.  6.  6.]]
    >>> b = [mx.nd.ones(shape, gpu) for gpu in gpus]
    >>> kv.pull(3, out = b)
    >>> print(b[1].asnumpy())
    [[ 6.  6.  6.]
     [ 6.  6.  6.]]
    >>> keys = [5, 7, 9]
    >>> kv.init(keys, [mx.nd.ones(shape)]*len(keys))
    >>> kv.push(keys, [mx.nd.ones(shape)]*len(keys))
    update on key: 5
    update on key: 7
    update on key: 9
    >>> b = [mx.nd.zeros(shape)]*len(keys)
    >>> kv.pull(keys, out = b)
    >>> print(b[1].asnumpy())
    [[ 3.  3.  3.]
     [ 3.  3.  3.]]
    >>> b = [[mx.nd.ones(shape, gpu) for gpu in gpus]] * len(keys)
    >>> kv.push(keys, b)
    update on key: 5
    update on key: 7
    update on key: 9
    >>> kv.pull(keys, out = b)
    >>> print(b[1][1].asnumpy())
    [[ 11.  11.  11.]
     [ 11.  11.  11.]]
    """, names)


def test_early_notes_initialisation(names):
    check("""
    >>> kv = mx.kv.create('local');
    >>> shape = (2, 3)
    >>> kv.init(3, mx.nd.ones(shape) * 2)
    >>> a = mx.nd.zeros(shape)
    >>> a.asnumpy()
    array([[ 0.,  0.,  0.],
           [ 0.,  0.,  0.]], dtype=float32)
    >>> kv.pull(3, out = a)
    >>> a.asnumpy()
    array([[ 2.,  2.,  2.],
           [ 2.,  2.,  2.]], dtype=float32)
    >>> def update(key, input, stored):
    ...     print('Update on key: %d' % key)
    ...     stored += input * 2
    >>> kv._set_updater(update)
    >>> keys = [5, 7, 9]
    >>> kv.init(keys, [mx.nd.ones(shape)] * len(keys))
    >>> kv.push(keys, [mx.nd.ones(shape)] * len(keys))
    Update on key: 5
    Update on key: 7
    Update on key: 9
    >>> b = [[mx.nd.ones(shape, gpu) for gpu in gpus]] * len(keys)
    >>> kv.push(keys, b)
    Update on key: 5
    Update on key: 7
    Update on key: 9
    >>> kv.pull(keys, out = b)
    >>> print(b[1][1].asnumpy())
    [[ 11.  11.  11.]
     [ 11.  11.  11.]]
    """, names)


def test_early_notes_push_without_init_and_updater(names):
    check("""
    >>> kv = mx.kv.create("local")
    >>> kv.push(3, mx.nd.ones((2, 3)))
    >>> a = mx.nd.array([[1,2,3], [2, 3, 4]])
    >>> kv.pull(3, out = a)
    >>> a.asnumpy()
    array([[ 1.,  1.,  1.],
           [ 1.,  1.,  1.]], dtype=float32)
    >>> key = 2
    >>> value = mx.nd.ones(shape) * 3
    >>> kv.push(key, value)
    >>> kv.pull(key, out = a)
    >>> print(a.asnumpy())
    [[ 3.  3.  3.]
     [ 3.  3.  3.]]
    >>> gpus = [mx.cpu(i) for i in range(4)]
    >>> gpus
    [cpu(0), cpu(1), cpu(2), cpu(3)]
    >>> b = [mx.nd.ones(shape, gpu) for gpu in gpus]
    >>> b
    [<NDArray 2x3 @cpu(0)>, <NDArray 2x3 @cpu(1)>, <NDArray 2x3 @cpu(2)>, <NDArray 2x3 @cpu(3)>]
    >>> kv.push(3, b)
    >>> kv.pull(3, out = a)
    >>> print(a.asnumpy())
    [[ 4.  4.  4.]
     [ 4.  4.  4.]]
    >>> kv.pull(3, out = a)
    >>> a.asnumpy()
    array([[ 4.,  4.,  4.],
           [ 4.,  4.,  4.]], dtype=float32)
    >>> def update(key, input, stored):
    ...     print('Update on key: %d' % (key,))
    ...     stored += input * 3
    >>> kv._set_updater(update)
    >>> kv.push(3, mx.nd.ones(shape) * 2)
    Update on key: 3
    >>> kv.pull(3, out = a)
    >>> a.asnumpy()
    array([[ 10.,  10.,  10.],
           [ 10.,  10.,  10.]], dtype=float32)
    >>> kv = mx.kv.create("local")
    >>> kv.type
    'local'
    """, names)


def test_api_help_init(names):
    check("""
    >>> # init a single key-value pair
    >>> shape = (2,3)
    >>> kv = mx.kv.create('local')
    >>> kv.init('3', mx.nd.ones(shape)*2)
    >>> a = mx.nd.zeros(shape)
    >>> kv.pull('3', out=a)
    >>> print(a.asnumpy())
    [[ 2.  2.  2.]
    [ 2.  2.  2.]]
    >>> # init a list of key-value pairs
    >>> keys = ['5', '7', '9']
    >>> kv.init(keys, [mx.nd.ones(shape)]*len(keys))
    >>> # init a row_sparse value
    >>> kv.init('4', mx.nd.ones(shape).tostype('row_sparse'))
    >>> b = mx.nd.sparse.zeros('row_sparse', shape)
    >>> kv.row_sparse_pull('4', row_ids=mx.nd.array([0, 1]), out=b)
    >>> print(b)
    <RowSparseNDArray 2x3 @cpu(0)>
    """, names)
    assert (names["b"].asnumpy() == 1).all()


def test_api_help_pull(names):
    check("""
    >>> kv = mx.kv.create('local')
    >>> kv.init('3', mx.nd.ones(shape)*2)
    >>> kv.init(['5', '7', '9', '6', '8', '10'], [mx.nd.ones(shape)*2]*6)
    >>> # pull a single key-value pair
    >>> a = mx.nd.zeros(shape)
    >>> kv.pull('3', out=a)
    >>> print(a.asnumpy())
    [[ 2.  2.  2.]
    [ 2.  2.  2.]]
    >>> # pull into multiple devices
    >>> b = [mx.nd.ones(shape, gpu) for gpu in gpus]
    >>> kv.pull('3', out=b)
    >>> print(b[1].asnumpy())
    [[ 2.  2.  2.]
    [ 2.  2.  2.]]
    >>> # pull a list of key-value pairs.
    >>> # On single device
    >>> keys = ['5', '7', '9']
    >>> b = [mx.nd.zeros(shape)]*len(keys)
    >>> kv.pull(keys, out=b)
    >>> print(b[1].asnumpy())
    [[ 2.  2.  2.]
    [ 2.  2.  2.]]
    >>> # On multiple devices
    >>> keys = ['6', '8', '10']
    >>> b = [[mx.nd.ones(shape, gpu) for gpu in gpus]] * len(keys)
    >>> kv.pull(keys, out=b)
    >>> print(b[1][1].asnumpy())
    [[ 2.  2.  2.]
    [ 2.  2.  2.]]
    """, names)


def test_api_help_push(names):
    check("""
    >>> kv = mx.kv.create('local')
    >>> a = mx.nd.zeros(shape)
    >>> kv.init(['3', '4', '5', '6', '7', '8', '9'], [mx.nd.zeros(shape)]*7)
    >>> # push a single key-value pair
    >>> kv.push('3', mx.nd.ones(shape)*8)
    >>> kv.pull('3', out=a) # pull out the value
    >>> print(a.asnumpy())
    [[ 8.  8.  8.]
    [ 8.  8.  8.]]
    >>> # aggregate the value and the push
    >>> b = [mx.nd.ones(shape, gpu) for gpu in gpus]
    >>> kv.push('3', b)
    >>> kv.pull('3', out=a)
    >>> print(a.asnumpy())
    [[ 4.  4.  4.]
    [ 4.  4.  4.]]
    >>> # push a list of keys.
    >>> # single device
    >>> keys = ['4', '5', '6']
    >>> kv.push(keys, [mx.nd.ones(shape)]*len(keys))
    >>> b = [mx.nd.zeros(shape)]*len(keys)
    >>> kv.pull(keys, out=b)
    >>> print(b[1].asnumpy())
    [[ 1.  1.  1.]
    [ 1.  1.  1.]]
    >>> # multiple devices:
    >>> keys = ['7', '8', '9']
    >>> b = [[mx.nd.ones(shape, gpu) for gpu in gpus]] * len(keys)
    >>> kv.push(keys, b)
    >>> kv.pull(keys, out=b)
    >>> print(b[1][1].asnumpy())
    [[ 4.  4.  4.]
    [ 4.  4.  4.]]
    >>> # push a row_sparse value
    >>> b = mx.nd.sparse.zeros('row_sparse', shape)
    >>> kv.init('10', mx.nd.sparse.zeros('row_sparse', shape))
    >>> kv.push('10', mx.nd.ones(shape).tostype('row_sparse'))
    >>> # pull out the value
    >>> kv.row_sparse_pull('10', row_ids=mx.nd.array([0, 1]), out=b)
    >>> print(b)
    <RowSparseNDArray 2x3 @cpu(0)>
    """, names)
    assert (names["b"].asnumpy() == 1).all()


def test_api_help_pushpull(names):
    check("""
    >>> kv = mx.kv.create('local')
    >>> a = mx.nd.zeros(shape)
    >>> kv.init(['3', '4', '5', '6', '7', '8', '9'], [mx.nd.zeros(shape)]*7)
    >>> # push a single key-value pair
    >>> kv.pushpull('3', mx.nd.ones(shape)*8, out=a)
    >>> print(a.asnumpy())
    [[ 8.  8.  8.]
    [ 8.  8.  8.]]
    >>> # aggregate the value and the push
    >>> b = [mx.nd.ones(shape, gpu) for gpu in gpus]
    >>> kv.pushpull('3', b, out=a)
    >>> print(a.asnumpy())
    [[ 4.  4.  4.]
    [ 4.  4.  4.]]
    >>> # push a list of keys.
    >>> # single device
    >>> keys = ['4', '5', '6']
    >>> b = [mx.nd.zeros(shape)]*len(keys)
    >>> kv.pushpull(keys, [mx.nd.ones(shape)]*len(keys), out=b)
    >>> print(b[1].asnumpy())
    [[ 1.  1.  1.]
    [ 1.  1.  1.]]
    >>> # multiple devices:
    >>> keys = ['7', '8', '9']
    >>> b = [[mx.nd.ones(shape, gpu) for gpu in gpus]] * len(keys)
    >>> kv.pushpull(keys, b)
    >>> print(b[1][1].asnumpy())
    [[ 4.  4.  4.]
    [ 4.  4.  4.]]
    """, names)


def test_api_help_row_sparse_pull(names):
    check("""
    >>> kv = mx.kv.create('local')
    >>> shape = (3, 3)
    >>> kv.init('3', mx.nd.ones(shape).tostype('row_sparse'))
    >>> a = mx.nd.sparse.zeros('row_sparse', shape)
    >>> row_ids = mx.nd.array([0, 2], dtype='int64')
    >>> kv.row_sparse_pull('3', out=a, row_ids=row_ids)
    >>> print(a.asnumpy())
    [[ 1.  1.  1.]
    [ 0.  0.  0.]
    [ 1.  1.  1.]]
    >>> duplicate_row_ids = mx.nd.array([2, 2], dtype='int64')
    >>> kv.row_sparse_pull('3', out=a, row_ids=duplicate_row_ids)
    >>> print(a.asnumpy())
    [[ 0.  0.  0.]
    [ 0.  0.  0.]
    [ 1.  1.  1.]]
    >>> unsorted_row_ids = mx.nd.array([1, 0], dtype='int64')
    >>> kv.row_sparse_pull('3', out=a, row_ids=unsorted_row_ids)
    >>> print(a.asnumpy())
    [[ 1.  1.  1.]
    [ 1.  1.  1.]
    [ 0.  0.  0.]]
    """, names)


def test_api_help_set_optimizer(names):
    check("""
    >>> kv = mx.kv.create()
    >>> shape = (2, 2)
    >>> weight = mx.nd.zeros(shape)
    >>> kv.init(3, weight)
    >>> # set the optimizer for kvstore as the default SGD optimizer
    >>> kv.set_optimizer(mx.optimizer.SGD())
    >>> grad = mx.nd.ones(shape)
    >>> kv.push(3, grad)
    >>> kv.pull(3, out = weight)
    >>> # weight is updated via gradient descent
    >>> weight.asnumpy()
    array([[-0.01, -0.01],
           [-0.01, -0.01]], dtype=float32)
    """, names)


def test_api_help_compression_parameters():
    kv = mx.kv.create("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init("w", mx.nd.zeros((4,)))
    kv.push("w", mx.nd.array([0.6, -0.7, 0.1, 0.5]))
    out = mx.nd.zeros((4,))
    kv.pull("w", out=out)
    assert out.asnumpy().tolist() == [0.5, -0.5, 0, 0.5]


def test_help_of_the_module_has_what_the_published_help_has():
    """`help(kv)`, which the book's page prints."""
    text = pydoc.render_doc(mx.kv, renderer=pydoc.plaintext)
    assert "class KVStore(" in text and "create(name" in text
    for method in ("init", "load_optimizer_states", "pull", "push", "pushpull", "row_sparse_pull", "save_optimizer_states",
                   "set_gradient_compression", "set_optimizer", "num_workers", "rank", "type"):
        assert re.search(rf"^ +\|  {method}\b", text, re.M), method


def test_session_of_1_6():
    """With np, npx and kv, as the book's page has it."""
    names = {}
    check("""
    >>> from heddle import np, npx, kv
    >>> npx.set_np()
    >>> np.ones((2,3))
    array([[1., 1., 1.],
           [1., 1., 1.]])
    >>> kv = kv.create('local')  # Create a local kv store.
    >>> shape = (2,3)
    >>> kv.init(3, np.ones(shape) * 2)
    >>> a = np.zeros(shape)
    >>> kv.pull(3, out = a)
    >>> print(a)
    [[2. 2. 2.]
     [2. 2. 2.]]
    >>> kv.push(3, np.ones(shape)*8)
    >>> kv.pull(3, out = a)  # Pull out the value
    >>> print(a.asnumpy())
    [[8. 8. 8.]
     [8. 8. 8.]]
    >>> contexts = [npx.cpu(i) for i in range(4)]
    >>> b = [np.ones(shape, ctx=ctx) for ctx in contexts]
    >>> kv.push(3, b)
    >>> kv.pull(3, out = a)
    >>> print(a)
    [[4. 4. 4.]
     [4. 4. 4.]]
    >>> def update(key, input, stored):
    ...     print(f'update on key: {key}')
    ...     stored += input * 2
    >>> kv._set_updater(update)
    >>> kv.pull(3, out=a)
    >>> print(a)
    [[4. 4. 4.]
     [4. 4. 4.]]
    >>> kv.push(3, np.ones(shape))
    update on key: 3
    >>> kv.pull(3, out=a)
    >>> print(a)
    [[6. 6. 6.]
     [6. 6. 6.]]
    >>> b = [np.ones(shape, ctx=ctx) for ctx in contexts]
    >>> kv.pull(3, out = b)
    >>> print(b[1])
    [[6. 6. 6.]
     [6. 6. 6.]]
    >>> keys = [5, 7, 9]
    >>> kv.init(keys, [np.ones(shape)]*len(keys))
    >>> kv.push(keys, [np.ones(shape)]*len(keys))
    update on key: 5
    update on key: 7
    update on key: 9
    >>> b = [np.zeros(shape)]*len(keys)
    >>> kv.pull(keys, out = b)
    >>> print(b[1])
    [[3. 3. 3.]
     [3. 3. 3.]]
    >>> b = [[np.ones(shape, ctx=ctx) for ctx in contexts]] * len(keys)
    >>> kv.push(keys, b)
    update on key: 5
    update on key: 7
    update on key: 9
    >>> kv.pull(keys, out = b)
    >>> print(b[1][1])
    [[11. 11. 11.]
     [11. 11. 11.]]
    """, names)


def test_base_api_register():
    names = {"mx": mx, "__name__": "__main__"}
    check("""
    >>> @mx.kvstore.KVStoreBase.register
    ... class MyKVStore(mx.kvstore.KVStoreBase):
    ...     pass
    >>> kv = mx.kv.create('MyKVStore')
    >>> print(type(kv))
    <class '__main__.MyKVStore'>
    """, names)
    del mx.kv.KVStoreBase.kv_registry["mykvstore"]


def test_base_api_of_2_0():
    """Its calls, on every kind of store that keeps to them."""
    for kv in (mx.kv.create("local"), mx.kv.create("device"), mx.kv.create("teststore")):
        value = mx.nd.ones((2, 3)) * 2
        out = [mx.nd.zeros((2, 3), mx.cpu(i)) for i in range(2)]
        kv.broadcast("3", value, out)
        assert all((one.asnumpy() == 2).all() for one in out)
        kv.pushpull("3", [mx.nd.ones((2, 3), mx.cpu(i)) for i in range(2)], out=out, priority=1)
        assert all((one.asnumpy() == 2).all() for one in out)
        assert kv.rank == 0 and kv.num_workers == 1
        assert kv.is_capable("optimizer") is (kv.type != "teststore")


