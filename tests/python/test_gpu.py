"""The Python package on the GPUs of this machine; skipped where there is none."""

import threading

import numpy
import pytest

import heddle as mx
from jobs import Job

pytestmark = pytest.mark.skipif(mx._core.num_gpus() == 0, reason="needs a GPU")


def test_arrays_on_a_gpu_are_those_of_the_cpus():
    x = numpy.random.default_rng(1).standard_normal((50, 7)).astype("float32")
    ours, there = mx.nd.array(x), mx.nd.array(x, ctx=mx.gpu(0))
    assert there.context == mx.gpu(0) and there.as_in_context(mx.cpu()).context == mx.cpu()
    for f in (lambda a: a + a * 2 - 1, lambda a: mx.nd.dot(a.T, a), lambda a: a[3:9], lambda a: a.sum(axis=0),
              lambda a: a.astype("float16"), lambda a: a.reshape((7, 50)), lambda a: mx.nd.concat(a, a, dim=1)):
        expected, found = f(ours), f(there)
        assert found.context == mx.gpu(0)
        assert numpy.array_equal(found.asnumpy(), expected.asnumpy())
    with mx.gpu(0):
        assert mx.nd.zeros((2,)).context == mx.gpu(0)


@pytest.mark.parametrize("store", ["local", "device"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
def test_stores_train_on_a_gpu_as_on_the_cpus(store, optimizer):
    random = numpy.random.default_rng(2)
    keys, shapes = ["a", "b", "c"], [(10, 3), (70_001,), (1,)]
    sides = []
    for ctx in (mx.cpu(), mx.gpu(0)):
        kv = mx.kv.create(store)
        kv.init(keys, [mx.nd.ones(shape, ctx) for shape in shapes])
        kv.set_optimizer(mx.optimizer.create(optimizer, learning_rate=0.1))
        sides.append((kv, ctx, [mx.nd.zeros(shape, ctx) for shape in shapes]))
    for _ in range(4):
        gradients = [random.standard_normal((2, *shape)).astype("float32") for shape in shapes]
        for kv, ctx, outs in sides:
            kv.push(keys, [[mx.nd.array(part, ctx) for part in gradient] for gradient in gradients])
            kv.pull(keys, out=outs)
        for ours, theirs in zip(sides[0][2], sides[1][2]):
            assert numpy.array_equal(ours.asnumpy(), theirs.asnumpy())


def test_an_updater_gets_arrays_on_the_gpu():
    kv = mx.kv.create("device")
    seen = []

    def update(key, gradient, weight):
        seen.append((gradient.context, weight.context))
        weight += gradient * 2

    kv._set_updater(update)
    kv.init(3, mx.nd.ones((4,), mx.gpu(0)))
    kv.push(3, [mx.nd.ones((4,), mx.gpu(0))] * 2)
    out = mx.nd.zeros((4,), mx.gpu(0))
    kv.pull(3, out=out)
    assert out.asnumpy().tolist() == [5] * 4
    assert seen == [(mx.gpu(0), mx.gpu(0))]


def model_on(torch, device):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 800), torch.nn.Tanh(), torch.nn.Linear(800, 3)).to(device)


@pytest.mark.parametrize("store_optimizer", [None, "sgd"])
def test_torch_models_on_a_gpu_train_through_a_store(store_optimizer):
    torch = pytest.importorskip("torch")
    import heddle.torch as ht
    ours, plain = model_on(torch, "cuda"), model_on(torch, "cuda")
    alone = torch.optim.SGD(plain.parameters(), lr=0.2)
    wrapped = ht.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.2), ours.named_parameters(), "device",
                                      store_optimizer=store_optimizer and mx.optimizer.create(store_optimizer))
    generator = torch.Generator("cuda").manual_seed(5)
    for _ in range(20):
        x = torch.randn(64, 6, device="cuda", generator=generator)
        y = torch.randint(0, 3, (64,), device="cuda", generator=generator)
        for model, optimizer in ((ours, wrapped), (plain, alone)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_store_works_while_torch_captures_a_graph():
    torch = pytest.importorskip("torch")
    x = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    stop, steps, failures = threading.Event(), [], []

    def exchange():
        try:
            kv = mx.kv.create("device")
            kv.init("w", mx.nd.zeros((1 << 20,), mx.gpu(0)))
            kv.set_optimizer(mx.optimizer.SGD(learning_rate=1, wd=0))
            while not stop.is_set() or len(steps) < 20:
                kv.push("w", mx.nd.ones((1 << 20,), mx.cpu()).as_in_context(mx.gpu(0)))
                out = mx.nd.zeros((1 << 20,), mx.gpu(0))
                kv.pull("w", out=out)
                steps.append(out.asnumpy()[[0, -1]].tolist())
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=exchange)
    thread.start()
    graphs = []
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2 + 1
        graphs.append((graph, y))
    stop.set()
    thread.join()
    assert not failures and steps == [[-float(i + 1)] * 2 for i in range(len(steps))]
    for graph, y in graphs:
        graph.replay()
        assert y.tolist() == [3] * 1000


@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync"])
def test_workers_of_a_job_sum_arrays_of_their_gpus(tmp_path, store):
    """Small ones, and one of many parts, which is copied, sent, received and copied back slice by slice."""
    ended = Job(tmp_path, f"""
        import numpy
        import heddle as mx
        kv = mx.kv.create({store!r})
        sizes = [3, 100_000, 3_000_000]
        keys = ["a", "b", "c"]
        gpu = mx.gpu(0)
        kv.init(keys, [mx.nd.zeros((size,), gpu) for size in sizes])
        outs = [mx.nd.zeros((size,), gpu) for size in sizes]
        for step in range(5):
            for key, size, out in zip(keys, sizes, outs):
                pushed = mx.nd.arange(size, ctx=gpu) % 100 + kv.rank
                kv.push(key, [pushed, pushed * 2])
                kv.pull(key, out=out)
            for size, out in zip(sizes, outs):
                once = numpy.arange(size) % 100
                assert (out.asnumpy() == 3 * (2 * once + 1)).all(), (step, size)
        print("summed")
        """).finish()
    for name, (status, output, errors) in ended.items():
        assert status == 0 and ("summed" in output) == name.startswith("worker"), (name, errors)


def test_a_store_of_nccl_sums_on_its_gpus():
    try:
        kv = mx.kv.create("nccl")
    except Exception as error:  # noqa: BLE001
        if "NCCL" not in str(error):
            raise
        pytest.skip(str(error))
    gpus = [mx.gpu(i) for i in range(mx._core.num_gpus())]
    kv.init("w", mx.nd.zeros((1000,), gpus[0]))
    for step in range(3):
        kv.push("w", [mx.nd.ones((1000,), gpu) * (step + 1) for gpu in gpus])
        outs = [mx.nd.zeros((1000,), gpu) for gpu in gpus]
        kv.pull("w", out=outs)
        for out in outs:
            assert out.asnumpy().tolist() == [(step + 1) * len(gpus)] * 1000
