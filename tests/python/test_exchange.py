"""Memory shared with others: DLPack both ways, buffers, and how long it lives."""

import array as arrays
import ctypes
import gc
import sys
import threading
import weakref

import numpy
import pytest

import heddle as mx

DTYPES = ["float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_shares_memory_both_ways(dtype):
    a = mx.nd.ones((2, 3), dtype=dtype)
    shared = numpy.from_dlpack(a)
    assert shared.dtype == dtype and shared.shape == (2, 3)
    shared[0, 0] = 0
    assert a.asnumpy()[0, 0] == 0
    x = numpy.ones((2, 3), dtype)
    b = mx.nd.from_dlpack(x)
    b[1] = 0
    b.wait_to_read()
    assert x.tolist()[1] == [0, 0, 0] and b.dtype == numpy.dtype(dtype)


def test_a_read_by_another_library_waits_for_pending_writes():
    opened = threading.Event()
    a = mx.nd.zeros((4,))
    mx.engine.push(opened.wait, reads=[a], writes=[a])
    a += 5
    threading.Timer(0.05, opened.set).start()
    assert numpy.from_dlpack(a).tolist() == [5, 5, 5, 5]
    assert numpy.asarray(a + 1).tolist() == [6, 6, 6, 6]


def test_the_memory_lives_as_long_as_its_last_user():
    a = mx.nd.ones((1000, 1000))
    shared = numpy.from_dlpack(a)
    del a
    gc.collect()
    for _ in range(5):
        mx.nd.full((1000, 1000), 9).wait_to_read()  # would take the memory over
    assert (shared == 1).all()

    class Owned(numpy.ndarray):
        pass

    x = numpy.ones((1000, 1000), "float32").view(Owned)
    gone = weakref.ref(x)
    b = mx.nd.from_dlpack(x)
    del x
    gc.collect()
    assert gone() is not None
    total = b.sum()
    del b
    assert total.asscalar() == 1e6
    mx.nd.waitall()
    gc.collect()
    assert gone() is None


def test_a_capsule_serves_once_and_frees_itself():
    before = mx._core.memory_stats()["used"]
    a = mx.nd.ones((1000, 100))
    capsule = mx.nd.to_dlpack_for_write(a)
    b = mx.nd.from_dlpack(capsule)
    b += 1
    b.wait_to_read()  # a and b are ordered apart
    assert (a.asnumpy() == 2).all()
    with pytest.raises(TypeError, match="fresh"):
        mx.nd.from_dlpack(capsule)
    unused = mx.nd.to_dlpack_for_read(a)
    del a, b, capsule, unused
    gc.collect()
    mx.nd.waitall()
    assert mx._core.memory_stats()["used"] <= before


def test_what_cannot_be_shared_is_refused():
    refused = [numpy.ones((4, 4))[:, ::2], numpy.ones((2,), "complex64"), numpy.ones((2,), "uint16")]
    for other in refused:
        with pytest.raises((ValueError, BufferError)):
            mx.nd.from_dlpack(other)
    with pytest.raises(TypeError):
        mx.nd.from_dlpack("text")
    with pytest.raises(BufferError):
        mx.nd.ones((2,)).__dlpack__(dl_device=(2, 0))
    assert mx.nd.ones((2,), mx.cpu(3)).__dlpack_device__() == (1, 0)


class OnGpu:
    """A tensor that says it lies on gpu(9), which no machine of ours has: what a library with GPUs hands out."""

    class Tensor(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                    ("dtype", ctypes.c_uint8 * 2), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                    ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
                    ("deleter", ctypes.c_void_p)]

    def __init__(self, versions):
        self.versions, self.asked, self.deleted = versions, [], 0
        self.shape = (ctypes.c_int64 * 1)(4)
        self.memory = (ctypes.c_float * 4)()
        self.deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.delete)
        self.tensor = self.Tensor(ctypes.addressof(self.memory), (2, 9), 1, (2, 32), 1, self.shape, None, 0, None,
                                  ctypes.cast(self.deleter, ctypes.c_void_p))

    def delete(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return (2, 9)

    def __dlpack__(self, stream=None, **more):
        if more and not self.versions:
            raise TypeError("max_version")
        self.asked.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize("versions", [True, False])
def test_memory_of_a_gpu_is_asked_for_on_the_default_stream(versions):
    """And refused, by name, and left to its owner, where there is no such GPU."""
    tensor = OnGpu(versions)
    with pytest.raises(ValueError, match=r"gpu\(9\)"):
        mx.nd.from_dlpack(tensor)
    with pytest.raises(ValueError, match=r"expected gpu\(9\).*got cpu\(0\)"):
        mx.nd.from_dlpack(tensor, mx.cpu())
    capsule = tensor.__dlpack__()
    with pytest.raises(ValueError, match=r"gpu\(9\)"):
        mx.nd.from_dlpack(capsule)
    assert tensor.asked == [1, 1, None] and tensor.deleted == 0
    with pytest.raises(TypeError, match="fresh"):
        mx.nd.from_dlpack(object())


@pytest.mark.skipif(mx._core.num_gpus() == 0, reason="needs a GPU")
def test_torch_shares_the_memory_of_a_gpu_both_ways():
    torch = pytest.importorskip("torch")
    theirs = torch.arange(6, device="cuda", dtype=torch.float32).reshape(2, 3)
    for _ in range(1000):
        theirs += 1
    ours = mx.nd.from_dlpack(theirs)
    assert ours.context == mx.gpu(0) and ours.asnumpy().tolist() == [[1000, 1001, 1002], [1003, 1004, 1005]]
    ours *= 2
    ours.wait_to_read()
    assert theirs.cpu().tolist() == [[2000, 2002, 2004], [2006, 2008, 2010]]
    back = torch.from_dlpack(ours)
    assert back.data_ptr() == theirs.data_ptr()
    del theirs, ours
    gc.collect()
    assert back.cpu().tolist()[1] == [2006, 2008, 2010]


def test_read_only_memory_is_shared_for_reading():
    """Whatever would write it is refused, and changes nothing; what is made of it may be written."""
    x = numpy.arange(6, dtype="float32").reshape(2, 3)
    x.flags.writeable = False
    a = mx.nd.from_dlpack(x)
    assert numpy.from_dlpack(a).ctypes.data == x.ctypes.data and not numpy.from_dlpack(a).flags.writeable
    read = mx.nd.from_dlpack(mx.nd.to_dlpack_for_read(a))
    assert numpy.from_dlpack(read).ctypes.data == x.ctypes.data and not numpy.from_dlpack(read).flags.writeable
    with pytest.raises(BufferError):
        mx.nd.to_dlpack_for_write(a)
    assert (a + 1).asnumpy()[1].tolist() == [4, 5, 6] and a[1].sum().asscalar() == 12
    other, rows = mx.nd.zeros((2, 3)), mx.nd.ones((2, 3)).tostype("row_sparse")
    kv = mx.kv.create("local")
    kv.init(["a", "b"], [other, other])
    kv.push("a", a)
    updater = mx.optimizer.get_updater(mx.optimizer.SGD())

    def assign(array, key):
        array[key] = 1

    writes = [lambda: a.__iadd__(1), lambda: a.__imul__(other), lambda: a.__iadd__(rows), lambda: assign(a, slice(None)),
              lambda: assign(a, (0, 1)), lambda: assign(a[1], slice(None)), lambda: assign(a.reshape(-1), 2),
              lambda: other.copyto(a), lambda: rows.copyto(a), lambda: kv.pull("a", out=a),
              lambda: kv.pull("a", out=[other, a]), lambda: kv.pull(["a", "b"], out=[other, a]),
              lambda: kv.pushpull("a", a), lambda: kv.pushpull("a", other, out=a), lambda: kv.broadcast("c", other, a),
              lambda: mx.engine.push(print, writes=[a]), lambda: updater("w", other, a)]
    for write in writes:
        with pytest.raises(ValueError, match="may be written"):
            write()
    assert "c" not in kv
    mx.nd.waitall()
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    out = a.copy()
    kv.pull("a", out=out)
    out += 1
    assert out.asnumpy().tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(BufferError, match="version 1"):
        a.__dlpack__()


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_other_libraries_share_memory_both_ways(library, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # its arrays lie on a GPU otherwise, where there is one
    other = pytest.importorskip(library, reason="not installed")

    def address(array):
        return array.unsafe_buffer_pointer() if library == "jax.numpy" else array.data_ptr()

    a = mx.nd.array([[1, 2], [3, 4]])
    theirs = other.from_dlpack(a)
    assert address(theirs) == numpy.from_dlpack(a).ctypes.data and theirs.tolist() == [[1, 2], [3, 4]]
    b = mx.nd.from_dlpack(other.ones((3, 2)) * 5)
    kv = mx.kv.create("local")
    kv.init("b", b)
    assert (b * 2).asnumpy().tolist() == [[10, 10]] * 3 and b.dtype == numpy.float32
    made = other.ones((1000, 100))
    shared = mx.nd.from_dlpack(made)
    assert numpy.from_dlpack(shared).ctypes.data == address(made)
    del made, theirs
    gc.collect()
    assert shared.sum().asscalar() == 1e5


def test_buffers_come_in():
    plain = arrays.array("f", [1, 2, 3])
    a = mx.nd.from_buffer(plain)
    a *= 2
    a.wait_to_read()
    assert plain.tolist() == [2, 4, 6]
    raw = bytearray(8)
    b = mx.nd.from_buffer(raw, dtype="int32")
    b[:] = 1
    b.wait_to_read()
    assert raw == bytes([1, 0, 0, 0] * 2)
    with pytest.raises(BufferError):
        raw.append(0)  # still lent
    del b
    mx.nd.waitall()
    gc.collect()
    raw.append(0)
    with pytest.raises(mx.InvalidArgument, match="read only"):
        mx.nd.from_buffer(b"read only", dtype="uint8")
    with pytest.raises(mx.InvalidArgument, match="in pieces"):
        mx.nd.from_numpy(numpy.zeros((4, 6))[:, ::2])
    x = numpy.zeros((2, 2))
    c = mx.nd.from_numpy(x)
    c += 1
    assert c.asnumpy().tolist() == [[1, 1], [1, 1]] and x.tolist() == [[1, 1], [1, 1]]
    assert mx.nd.array(memoryview(plain)).asnumpy().tolist() == [2, 4, 6]


def test_buffers_of_the_other_byte_order_are_refused():
    """Their bytes used to count as they were."""
    other = numpy.arange(3, dtype="float32").astype(numpy.dtype("float32").newbyteorder())
    for call in (lambda: mx.nd.from_buffer(other), lambda: mx.nd.from_numpy(other),
                 lambda: mx.nd.from_buffer(bytearray(12), dtype=other.dtype)):
        with pytest.raises(mx.InvalidType, match="byte order"):
            call()
    assert mx.nd.from_numpy(other, zero_copy=False).asnumpy().tolist() == [0, 1, 2]


def test_memory_of_the_cpus_is_no_array_of_a_gpu():
    x = numpy.ones(2)
    calls = [lambda: mx.nd.from_buffer(x, ctx=mx.gpu(0)), lambda: mx.nd.from_dlpack(x, ctx=mx.gpu(0))]
    for call in calls:
        with pytest.raises(ValueError, match="for memory of the CPUs, got gpu"):
            call()
    with mx.gpu(0), pytest.raises(ValueError, match="for memory of the CPUs, got gpu"):
        mx.nd.from_numpy(x)
    assert mx.nd.from_numpy(x).asnumpy().tolist() == [1, 1]


def test_asnumpy_is_a_copy_of_one_moment():
    a = mx.nd.zeros((300, 300))  # of both sizes that are copied differently
    for array in (a, a[0]):
        values = array.asnumpy()
        a += 1
        a.wait_to_read()
        assert (values == values[0]).all() and values.flags.writeable and values.base is None


def test_a_store_works_on_shared_memory():
    x, out = numpy.ones((3,), "float32"), numpy.zeros((3,), "float32")
    kv = mx.kv.create("local")
    kv.init("a", mx.nd.from_dlpack(x))
    x[:] = 5
    kv.push("a", mx.nd.from_dlpack(x))
    target = mx.nd.from_dlpack(out)
    kv.pull("a", out=target)
    target.wait_to_read()
    assert out.tolist() == [5, 5, 5]


def test_references_are_balanced():
    x = numpy.ones((10,), "float32")
    before = sys.getrefcount(x)
    for _ in range(20):
        mx.nd.from_dlpack(x).wait_to_read()
        mx.nd.from_buffer(x).wait_to_read()
        mx.nd.array(x).wait_to_read()
    mx.nd.waitall()
    gc.collect()
    assert sys.getrefcount(x) == before
