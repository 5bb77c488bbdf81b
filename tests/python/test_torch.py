"""heddle.torch: training through a store gives what PyTorch alone gives, and nothing is read or written too early."""

import copy
import gc
import io
import json
import pathlib
import pickle
import re
import subprocess
import sys
import threading

import numpy
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: tools/setup.sh torch installs it")

import heddle as mx  # noqa: E402
import heddle.torch as ht  # noqa: E402
from jobs import Job  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def exchanges():
    gc.collect()
    return sum(type(one) is ht._Exchange for one in gc.get_objects())


def make_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
            for _ in range(count)]


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def groups_of(model):
    return [{"params": [model[0].weight, model[0].bias], "lr": 0.3, "weight_decay": 0.01},
            {"params": [model[2].weight, model[2].bias]}]


def train(model, optimizer, scheduler=None, steps=12, passes=1):
    for i in range(steps):
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        for batch in batches(passes):
            loss_of(model, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("store", ["local", "device", "teststore"])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_is_that_of_the_wrapped_optimizer(store, passes):
    """Bit for bit: with one worker the exchange adds nothing. Two groups, a schedule, gradients kept or dropped."""
    ours, plain = make_model(), make_model()
    wrapped = ht.DistributedOptimizer(torch.optim.SGD(groups_of(ours), lr=0.2, momentum=0.9), ours.named_parameters(),
                                      store, backward_passes_per_step=passes)
    alone = torch.optim.SGD(groups_of(plain), lr=0.2, momentum=0.9)
    given = train(ours, wrapped, torch.optim.lr_scheduler.StepLR(wrapped, 4, 0.5), passes=passes)
    expected = train(plain, alone, torch.optim.lr_scheduler.StepLR(alone, 4, 0.5), passes=passes)
    assert torch.equal(given, expected)
    assert json.dumps(wrapped.state_dict()["param_groups"]) == json.dumps(alone.state_dict()["param_groups"])
    state = wrapped.state_dict()
    del wrapped
    gc.collect()
    fresh = ht.DistributedOptimizer(torch.optim.SGD(groups_of(ours), lr=0.2, momentum=0.9), ours.named_parameters(), store)
    fresh.load_state_dict(state)
    assert torch.equal(train(ours, fresh, steps=3), train(plain, alone, steps=3))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_store_updates_by_its_optimizer_and_the_rates_of_the_groups(momentum):
    """SGD's formulas agree, with momentum as long as the rate stays."""
    ours, plain = make_model(), make_model()
    wrapped = ht.DistributedOptimizer(torch.optim.SGD(groups_of(ours), lr=0.2), ours.named_parameters(), "device",
                                      store_optimizer=mx.optimizer.SGD(momentum=momentum))
    alone = torch.optim.SGD(groups_of(plain), lr=0.2, momentum=momentum)
    schedules = [None, None] if momentum else [torch.optim.lr_scheduler.StepLR(one, 4, 0.5) for one in (wrapped, alone)]
    given, expected = train(ours, wrapped, schedules[0]), train(plain, alone, schedules[1])
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def test_a_scheduler_may_be_there_before():
    parameter = torch.nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([parameter], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = ht.DistributedOptimizer(plain)
    for value in (0.5, 0.25):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        scheduler.step()
        assert parameter.tolist() == [value] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_and_strides_go_through(dtype):
    parameter = torch.nn.Parameter(torch.ones(3, 4, dtype=dtype).t())  # not in one piece: goes by a copy
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), store="device",
                                        store_optimizer=mx.optimizer.SGD())
    (parameter * torch.arange(12, dtype=dtype).reshape(4, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(parameter.detach(), 1 - torch.arange(12, dtype=dtype).reshape(4, 3))


def test_large_gradients_are_exchanged_in_place_and_small_ones_together():
    """No copy of a large one: the array that the store sees is over the gradient's memory."""
    seen = {}

    class Watching(mx.kv.TestStore):
        def pushpull(self, key, value, out=None, priority=0):
            seen[key] = numpy.from_dlpack(value).ctypes.data, value.shape, priority
            super().pushpull(key, value, out, priority)

    model = torch.nn.Sequential(torch.nn.Linear(6, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 5))
    first, _, second, _ = model.parameters()
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), Watching())
    model(torch.ones(4, 6)).sum().backward()
    assert seen.pop("gradient.0.bias and 1 more")[1:] == ((2005,), -1)
    assert seen == {"gradient.0.weight": (first.grad.data_ptr(), (2000, 6), 0),
                    "gradient.2.weight": (second.grad.data_ptr(), (5, 2000), -2)}
    optimizer.step()


class Doubling(mx.kv.TestStore):
    """As if there were another worker with the same gradients."""

    def pushpull(self, key, value, out=None, priority=0):
        (value * 2).copyto(out)


@pytest.mark.parametrize("seed", range(5))
def test_what_travels_together_comes_back_to_its_parameters(seed):
    """Shapes, dtypes and strides at random, some without a gradient, over several steps."""
    random = numpy.random.default_rng(seed)
    parameters, expected, used = [], [], []
    for _ in range(20):
        shape = [int(size) for size in random.integers(1, 30, random.integers(0, 4))]
        dtype = [torch.float32, torch.float64][random.integers(2)]
        parameters.append(torch.nn.Parameter(torch.tensor(random.integers(0, 9, shape)).to(dtype).t()
                                             if len(shape) == 2 else torch.tensor(random.integers(0, 9, shape)).to(dtype)))
        expected.append(parameters[-1].detach().clone())
        used.append(random.random() < 0.8)
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), store=Doubling())
    for step in range(3):
        factors = [torch.tensor(random.integers(0, 9, parameter.shape)) for parameter in parameters]
        sum((parameter * factor).sum().double() for parameter, factor, is_used in zip(parameters, factors, used)
            if is_used).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
        for value, factor, is_used, parameter in zip(expected, factors, used, parameters):
            if is_used:
                value -= 2 * factor
            assert torch.equal(parameter.detach(), value)
            assert is_used or parameter.grad is None


class Slow(mx.kv.TestStore):
    """Its exchanges wait until `opened` is set; `sums` are what it has read then."""

    def __init__(self):
        self.opened = threading.Event()
        self.sums = {}

    def pushpull(self, key, value, out=None, priority=0):
        self.sums[key] = mx.nd.zeros(value.shape)
        mx.engine.push(self.opened.wait, reads=[value])
        gate = mx.nd.zeros((1,))
        mx.engine.push(self.opened.wait, writes=[gate])
        mx.engine.push(lambda: None, reads=[gate], writes=[value, gate])  # nothing reads the value before
        value.copyto(self.sums[key])


@pytest.mark.parametrize("overwrite", ["zero_grad", "step"])
def test_gradients_are_not_rewritten_while_a_slow_exchange_reads_them(overwrite):
    store, parameter = Slow(), torch.nn.Parameter(torch.ones(5))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), store=store)
    (parameter * 3).sum().backward()
    opener = threading.Timer(0.2, store.opened.set)  # if nothing waited, what follows would be over by then
    opener.start()
    if overwrite == "zero_grad":
        optimizer.zero_grad(set_to_none=False)
        parameter.grad.fill_(7)
    else:
        optimizer.step()
        parameter.grad.fill_(7)
    assert store.opened.is_set()
    assert store.sums["gradient.parameter.0"].asnumpy().tolist() == [3] * 5
    assert parameter.detach().tolist() == ([1] * 5 if overwrite == "zero_grad" else [-0.5] * 5)
    opener.join()


def test_a_backward_pass_too_many_is_refused_before_it_writes():
    store, parameter = Slow(), torch.nn.Parameter(torch.ones(2))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), [("w", parameter)], store)
    (parameter * 3).sum().backward()
    with pytest.raises(mx.InvalidState, match="gradient.w.*1 backward pass"):
        parameter.sum().backward()
    assert parameter.grad.tolist() == [3, 3]
    store.opened.set()
    optimizer.step()
    parameter.sum().backward()


def make_mixed_model():
    """Parameters that travel alone and together."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 3))


def train_changing(model, optimizer, change, steps=5):
    """change(model, optimizer, step, loss) goes back, changes the gradients, and steps."""
    for i, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        change(model, optimizer, i, loss_of(model, batch))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def synchronize(optimizer):
    if isinstance(optimizer, ht.DistributedOptimizer):
        optimizer.synchronize()
        optimizer.synchronize()  # once is enough


def clip(model, optimizer, step, loss):
    loss.backward()
    synchronize(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


class Scaling:
    """Steps by GradScaler, of infinite gradients in the third one, that clip or do not."""

    def __init__(self, clips):
        self.clips, self.scaler = clips, torch.amp.GradScaler("cpu", init_scale=1024.0)

    def __call__(self, model, optimizer, step, loss):
        self.scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
        synchronize(optimizer)
        if self.clips:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        self.scaler.step(optimizer)
        self.scaler.update()


@pytest.mark.parametrize("change", [lambda: clip, lambda: Scaling(True), lambda: Scaling(False)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_may_be_changed_after_synchronize(kind, fused, change):
    """Bit for bit as PyTorch alone: small gradients used to step unclipped, fused optimizers by scaled gradients and NaN."""
    ours, plain = make_mixed_model(), make_mixed_model()
    inner = kind(ours.parameters(), lr=0.1, fused=fused)
    wrapped = ht.DistributedOptimizer(inner, ours.named_parameters(), "local")
    given = train_changing(ours, wrapped, change())
    assert torch.equal(given, train_changing(plain, kind(plain.parameters(), lr=0.1, fused=fused), change()))
    assert not {"grad_scale", "found_inf"} & (vars(inner).keys() | vars(wrapped).keys())


def test_synchronize_averages_and_step_exchanges_no_more():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("w", parameter)], Four())
    for _ in range(2):
        optimizer.zero_grad()
        (parameter * 6).sum().backward()
        optimizer.synchronize()
        assert parameter.grad.tolist() == [3, 3]
        with pytest.raises(mx.InvalidState, match="gradient.w.*expected step"):
            parameter.sum().backward()
        parameter.grad.fill_(0.5)
        optimizer.step()
    assert parameter.tolist() == [0, 0]


@pytest.mark.parametrize("size", [2, 9000])  # in a parcel with the other, or alone
@pytest.mark.parametrize("change", [lambda one: one.grad.mul_(0.1), lambda one: setattr(one, "grad", one.grad.clone()),
                                    lambda one: torch.nn.utils.clip_grad_norm_([one], 1.0)])
def test_gradients_that_are_changed_without_synchronize_are_refused(change, size):
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(size))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([first, second], lr=0.5), [("a", first), ("b", second)])
    (first.sum() + second.sum()).backward()
    change(second)
    for call in (optimizer.step, optimizer.synchronize):
        with pytest.raises(mx.InvalidState, match=r"'gradient.b' was changed.*synchronize\(\) before"):
            call()
        assert first.tolist() == [1, 1] and second[0].item() == 1
        optimizer.zero_grad()
        (first.sum() + second.sum()).backward()
        change(second)
    optimizer.zero_grad()
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert first.tolist() == [0.5, 0.5] and second[0].item() == 0.5


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_without_synchronize_is_refused(fused):
    parameter, scaler = torch.nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5, fused=fused))
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(mx.InvalidState, match=r"GradScaler.*expected synchronize\(\) before"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    parameter.sum().backward()
    optimizer.step()
    assert parameter.tolist() == [0.5, 0.5]


def test_autograd_grad_works_while_gradients_are_exchanged():
    """It writes no .grad; backward of the same graph, which does, is refused all the same."""
    store, parameter = Slow(), torch.nn.Parameter(torch.ones(2))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), [("w", parameter)], store)
    loss = (parameter ** 3).sum()
    loss.backward(retain_graph=True)

    def check():
        for _ in range(2):
            assert torch.autograd.grad(loss, parameter, retain_graph=True)[0].tolist() == [3, 3]
        for inputs in (None, [parameter]):
            with pytest.raises(mx.InvalidState, match="gradient.w.*1 backward pass"):
                loss.backward(inputs=inputs, retain_graph=True)
        assert parameter.grad.tolist() == [3, 3]

    check()
    store.opened.set()
    optimizer.synchronize()
    check()
    optimizer.step()
    assert parameter.tolist() == [-0.5, -0.5]
    optimizer.zero_grad()
    fresh = (parameter * 2).sum()
    fresh.backward()
    optimizer.step()
    assert parameter.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize("sizes", [(3, 4), (3, 9000), (9000, 9001)])  # in parcels together or alone
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_may_be_views_of_one_buffer(sizes, passes):
    """They have one version, which backward of the others changes; a change by others is refused all the same."""
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    flat = torch.zeros(sum(sizes))
    for parameter, view in zip(parameters, flat.split(sizes)):
        parameter.grad = view
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), backward_passes_per_step=passes)
    for step in range(1, 4):
        for _ in range(passes):
            sum(parameter.sum() for parameter in parameters).backward()
        assert flat.eq(passes).all()
        optimizer.step()
        assert all(parameter.eq(1 - step * passes).all() for parameter in parameters)
        optimizer.zero_grad(set_to_none=False)
    for _ in range(passes):
        sum(parameter.sum() for parameter in parameters).backward()
    flat.mul_(0.5)
    with pytest.raises(mx.InvalidState, match="was changed after backward"):
        optimizer.step()


def test_gradients_may_be_parts_of_one_that_backward_has_split():
    """These have one version too, though they are views of nothing that they name."""
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0), backward_passes_per_step=2)
    for _ in range(2):
        optimizer.zero_grad()
        torch.cat([first, second]).mul(torch.ones(5)).sum().backward()
        first.sum().backward()
        second.sum().backward()
        optimizer.step()
    assert first.tolist() == [-3, -3] and second.tolist() == [-3, -3, -3]


@pytest.mark.parametrize("size", [2, 9000])  # in a parcel with the other, or alone
def test_gradients_of_another_dtype_than_their_key_are_refused(size):
    """Small ones went through the former dtype without a word."""
    parameters = [torch.nn.Parameter(torch.ones(size)) for _ in range(2)]
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), zip("ab", parameters))
    for steps in (1, 0):  # before the change
        for _ in range(steps):
            optimizer.zero_grad()
            sum(one.sum() for one in parameters).backward()
            optimizer.step()
        for one in parameters:
            one.grad = None
            one.data = one.data.double()
        with pytest.raises(mx.InvalidArgument, match="gradient.[ab]'.*expected dtype float32, got float64"):
            sum((one / 3).sum() for one in parameters).backward()
        assert all(one.eq(0).all() for one in parameters)
        for one in parameters:
            one.data = torch.zeros(size)
        optimizer.close()
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), zip("ab", parameters))


def test_gradients_that_the_store_has_updated_by_are_not_dropped():
    """As a guard against NaN, or training in turn, would: the store went on with them without a word."""
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([first, second], lr=0.5), [("a", first), ("b", second)], "local",
                                        store_optimizer=mx.optimizer.SGD(), backward_passes_per_step=2)
    optimizer.zero_grad()
    second.sum().backward()
    optimizer.zero_grad()  # of the first pass nothing has left
    for _ in range(2):
        second.sum().backward()
    for set_to_none in (True, False):
        with pytest.raises(mx.InvalidState, match=r"zero_grad: the store has updated.*of 'b'.*expected step\(\) first, or "
                                                  "no store_optimizer"):
            optimizer.zero_grad(set_to_none)
        assert second.grad.tolist() == [2, 2]
    optimizer.step()
    assert first.tolist() == [1, 1] and second.tolist() == [0, 0]
    optimizer.zero_grad()
    for _ in range(2):
        (first.sum() + second.sum()).backward()
    optimizer.step()
    assert first.tolist() == [0, 0] and second.tolist() == [-1, -1]
    optimizer.zero_grad()
    for _ in range(2):
        second.sum().backward()
    optimizer.close()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("when", ["step", "push"])
def test_rates_that_are_set_after_a_push_are_refused(name, when):
    """They counted one step late; what has left the rest of a step behind counted at once."""
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.5),
                                        [("a", first), ("b", second)], "local", store_optimizer=mx.optimizer.SGD())
    first.sum().backward()
    optimizer.param_groups[1][name] = 0.25
    with pytest.raises(mx.InvalidState, match=r"rates of group 1.*from \(0.5, 0\) to .*0.25.*expected rates.*before "
                                              "backward or after step, or no store_optimizer"):
        optimizer.step() if when == "step" else second.sum().backward()
    optimizer.param_groups[1][name] = {"lr": 0.5, "weight_decay": 0}[name]
    with pytest.raises(mx.InvalidState, match="zero_grad: the store has updated.*expected step"):
        optimizer.zero_grad()
    with pytest.raises(mx.InvalidState, match="is being exchanged"):
        first.sum().backward()
    optimizer.step()
    assert first.tolist() == [0.5, 0.5]  # what had gone, once
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 1.0  # in time
    third = torch.nn.Parameter(torch.ones(2))
    first.sum().backward()
    optimizer.add_param_group({"params": [third], "lr": 2.0})  # nobody's rate so far
    third.sum().backward()
    optimizer.step()
    assert third.tolist() == [-1, -1]
    assert first.tolist() == [-0.5, -0.5]
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert first.tolist() == [-1, -1]


def test_what_has_gone_to_a_store_optimizer_counts_once_when_step_is_refused():
    """A further step used to push it again."""
    parameter, scaler = torch.nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), [("w", parameter)], "local",
                                        store_optimizer=mx.optimizer.SGD())
    parameter.sum().backward()
    mx.nd.waitall()  # the store has it
    parameter.grad.mul_(0.1)
    with pytest.raises(mx.InvalidState, match="'w' was changed"):
        optimizer.step()
    optimizer.step()
    assert parameter.tolist() == [0.5, 0.5]
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(mx.InvalidState, match="GradScaler had scaled"):
        scaler.step(optimizer)
    optimizer.step()
    assert parameter.tolist() == [-3.5, -3.5]
    optimizer.zero_grad()


def test_gradients_that_the_store_updates_by_stay_as_they_are():
    parameter, scaler = torch.nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), [("w", parameter)], "local",
                                        store_optimizer=mx.optimizer.SGD())
    with pytest.raises(mx.InvalidState, match="synchronize: the store updates.*expected no store_optimizer"):
        optimizer.synchronize()
    parameter.sum().backward()
    parameter.grad.mul_(0.1)
    with pytest.raises(mx.InvalidState, match="'w' was changed.*since store_optimizer has them"):
        optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(mx.InvalidState, match="GradScaler had scaled.*no store_optimizer"):
        scaler.step(optimizer)


@pytest.mark.parametrize("change", [lambda one: one.fill_(7), lambda one: setattr(one, "data", torch.full((3, 2), 7.0))])
@pytest.mark.parametrize("strided", [False, True])
def test_weights_that_the_store_does_not_know_of_are_refused(change, strided):
    """The next step used to bring back what had followed from the store's own."""
    parameter = torch.nn.Parameter(torch.ones(2, 3).t() if strided else torch.ones(3, 2))
    store = mx.kv.create("local")
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), [("w", parameter)], store,
                                        store_optimizer=mx.optimizer.SGD())
    for value in (0.5, 0):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        assert parameter.eq(value).all()
    optimizer.zero_grad()
    with torch.no_grad():
        change(parameter)
    with pytest.raises(mx.InvalidState, match="weight 'w' was changed.*loaded before"):
        parameter.sum().backward()
    optimizer.zero_grad()
    out = mx.nd.zeros((3, 2))
    store.pull("w", out=out)
    assert not out.asnumpy().any()


def test_weights_that_are_changed_before_step_are_refused():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), [("w", parameter)],
                                        store_optimizer=mx.optimizer.SGD())
    parameter.sum().backward()
    with torch.no_grad():
        parameter.clamp_(-1, 0)
    for _ in range(2):
        with pytest.raises(mx.InvalidState, match="weight 'w' was changed"):
            optimizer.step()
    assert parameter.tolist() == [0, 0]


def test_what_cannot_work_is_refused():
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mx.InvalidType, match="torch.optim, got SGD"):
        ht.DistributedOptimizer(mx.optimizer.SGD(), model.named_parameters())
    with pytest.raises(mx.InvalidArgument, match="none for 4 of 4"):
        ht.DistributedOptimizer(plain, [])
    with pytest.raises(mx.InvalidArgument, match="got one twice"):
        ht.DistributedOptimizer(plain, [("w", parameter) for parameter in model.parameters()])
    with pytest.raises(mx.InvalidArgument, match="at least 1, got 0"):
        ht.DistributedOptimizer(plain, model.named_parameters(), backward_passes_per_step=0)
    with pytest.raises(mx.InvalidArgument, match="without a scheduler"):
        ht.DistributedOptimizer(plain, model.named_parameters(), store_optimizer=mx.optimizer.SGD(
            lr_scheduler=mx.lr_scheduler.FactorScheduler(10)))

    class Async(mx.kv.TestStore):
        type = "dist_async"

    with pytest.raises(mx.InvalidArgument, match="'dist_async'.*store_optimizer"):
        ht.DistributedOptimizer(plain, model.named_parameters(), Async())
    with pytest.raises(mx.InvalidArgument, match="heddle's own for store_optimizer, got TestStore"):
        ht.DistributedOptimizer(plain, model.named_parameters(), "teststore", store_optimizer=mx.optimizer.SGD())
    for given in ("2", 1.5, None):
        with pytest.raises(mx.InvalidType, match="integer as backward_passes_per_step, got"):
            ht.DistributedOptimizer(plain, model.named_parameters(), backward_passes_per_step=given)
    for given in (None, 3):
        with pytest.raises(mx.InvalidType, match=f"DistributedOptimizer: expected a store, got {given}"):
            ht.DistributedOptimizer(plain, model.named_parameters(), given)
    for given in ("sgd", 3, plain):
        with pytest.raises(mx.InvalidType, match="one of heddle.optimizer as store_optimizer, got"):
            ht.DistributedOptimizer(plain, model.named_parameters(), store_optimizer=given)
    for given in (3, [1], [(1, 2, 3)]):
        with pytest.raises(mx.InvalidType, match="pairs of names and tensors, got"):
            ht.DistributedOptimizer(plain, given)
    with pytest.raises(mx.InvalidType, match="expected tensors, got int as 'a'"):
        ht.DistributedOptimizer(plain, [("a", 3)])
    with pytest.raises(mx.InvalidType, match="names of type str, got 0"):
        ht.DistributedOptimizer(plain, enumerate(model.parameters()))

    store = mx.kv.create("local")
    store.set_optimizer(mx.optimizer.SGD())
    with pytest.raises(mx.InvalidArgument, match="the store has an optimizer.*or a store without one"):
        ht.DistributedOptimizer(plain, model.named_parameters(), store)

    class Search(torch.optim.SGD):
        def step(self, *, closure):
            closure()

    for kind in (torch.optim.LBFGS, Search):
        with pytest.raises(mx.InvalidArgument, match=f"got {kind.__name__}, whose step.. needs a closure"):
            ht.DistributedOptimizer(kind(model.parameters()), model.named_parameters())
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
    with pytest.raises(mx.InvalidType, match="dense gradient of 'gradient.weight'"):
        table(torch.tensor([1])).sum().backward()
    del optimizer


def test_a_failed_exchange_leaves_step_and_the_weights_alone():
    class Failing(mx.kv.TestStore):
        broken = True

        def pushpull(self, key, value, out=None, priority=0):
            def fail():
                raise ConnectionError("cable")
            if self.broken:
                mx.engine.push(fail, reads=[value], writes=[value])

    store, parameter = Failing(), torch.nn.Parameter(torch.ones(2))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), store=store)
    (parameter * 2).sum().backward()
    with pytest.raises(ConnectionError, match="cable"):
        optimizer.step()
    assert parameter.tolist() == [1, 1]
    store.broken = False
    optimizer.zero_grad()
    (parameter * 2).sum().backward()
    optimizer.step()
    assert parameter.tolist() == [0, 0]


def test_a_dropped_optimizer_leaves_the_model_alone():
    model, store = make_model(), Slow()
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), store)
    del optimizer
    loss_of(model, batches(1)[0]).backward()
    assert not store.sums


def test_a_dropped_optimizer_leaves_nothing_at_the_model():
    """The hooks kept all that belonged to its gradients."""
    model = make_model()
    before = exchanges()
    for _ in range(3):
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), "local")
        train(model, optimizer, steps=1)
    assert exchanges() == before + len(list(model.parameters()))
    del optimizer
    assert exchanges() == before
    assert not any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.parametrize("rule", [None, mx.optimizer.SGD(momentum=0.9)])
@pytest.mark.parametrize("closes", [True, False])
def test_a_dropped_or_closed_optimizer_leaves_nothing_in_the_store(rule, closes):
    """The next one of the same names was refused; it goes on with the weights as they are."""
    store, parameter = mx.kv.create("local"), torch.nn.Parameter(torch.ones(2))
    parameters = [("w", parameter), ("b", torch.nn.Parameter(torch.ones(9000)))]
    store.init("other", mx.nd.zeros((1,)))
    for value in (0.5, 0):
        optimizer = ht.DistributedOptimizer(torch.optim.SGD([one for _, one in parameters], lr=0.5), parameters, store,
                                            store_optimizer=rule)
        assert len(store.keys()) == 3
        optimizer.zero_grad()
        sum(one.sum() for _, one in parameters).backward()
        optimizer.step()
        assert parameter.tolist() == [value] * 2
        if closes:
            optimizer.close()
            for call in (optimizer.step, optimizer.synchronize, lambda: optimizer.add_param_group({"params": []})):
                with pytest.raises(mx.InvalidState, match="is closed"):
                    call()
            optimizer.close()
        else:
            del optimizer
        assert store.keys() == ["other"]
        assert not parameter._backward_hooks
        with torch.no_grad():
            parameters[1][1].fill_(1)  # of nobody's now


def test_an_optimizer_may_outlive_its_store():
    store, parameter = mx.kv.create("local"), torch.nn.Parameter(torch.ones(2))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), store=store)
    store.close()
    optimizer.close()


def test_an_optimizer_is_neither_copied_nor_pickled():
    """torch.save wrote what nobody could load."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5))
    for call in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
        with pytest.raises(mx.InvalidType, match=r"expected its state_dict\(\)"):
            call(optimizer)
    copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("rule", [None, mx.optimizer.SGD()])
def test_a_group_that_is_refused_changes_nothing(rule):
    one, more, odd = (torch.nn.Parameter(torch.ones(2, dtype=dtype))
                      for dtype in (torch.float32, torch.float32, torch.complex64))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    store = mx.kv.create("local")
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([one], lr=0.5), [("one", one)], store, store_optimizer=rule)
    keys = store.keys()
    with pytest.raises(mx.InvalidArgument, match="dtypes"):
        optimizer.add_param_group({"params": [more, frozen, odd]})
    assert store.keys() == keys and [group["params"] for group in optimizer.param_groups] == [[one]]
    assert not more._backward_hooks
    optimizer.add_param_group({"params": [more, frozen], "lr": 1.0})
    (one + more).sum().backward()
    optimizer.step()
    assert (one.tolist(), more.tolist()) == ([0.5, 0.5], [0, 0])


def test_groups_can_be_added():
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([first], lr=1.0), store="local",
                                        store_optimizer=mx.optimizer.SGD())
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    (first + second).sum().backward()
    optimizer.step()
    assert (first.tolist(), second.tolist()) == ([0, 0], [0.5, 0.5])


def test_an_added_group_leaves_the_average_over_the_workers_as_it_is():
    """Each group used to divide all gradients by their number once more."""
    class Two(mx.kv.KVStore):
        num_workers = 2

    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    rule = mx.optimizer.SGD()
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([first], lr=1.0), store=Two("local"), store_optimizer=rule)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    assert rule.rescale_grad == 0.5
    (first + second).sum().backward()
    optimizer.step()
    assert (first.tolist(), second.tolist()) == ([0.5, 0.5], [0.75, 0.75])


def test_models_may_share_the_optimizer_of_their_store():
    """The second one divided the gradients of both once more, and left its rates to the first."""
    class Two(mx.kv.KVStore):
        num_workers = 2

    store, rule = Two("local"), mx.optimizer.SGD(rescale_grad=0.5)
    ones = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [ht.DistributedOptimizer(torch.optim.SGD([one], lr=rate), [(name, one)], store, store_optimizer=rule)
                  for one, name, rate in zip(ones, "ab", (1.0, 2.0))]
    assert rule.rescale_grad == 0.25
    for _ in range(2):
        for one, optimizer in zip(ones, optimizers):
            optimizer.zero_grad()
            one.sum().backward()
            optimizer.step()
    assert [one.tolist() for one in ones] == [[0.5, 0.5], [0, 0]]
    rule.rescale_grad = 1.0  # of the caller's own counts as it is
    optimizers[0].zero_grad()
    ones[0].sum().backward()
    optimizers[0].step()
    assert ones[0].tolist() == [-0.5, -0.5]
    shared = mx.optimizer.SGD()
    ht.DistributedOptimizer(torch.optim.SGD([ones[0]], lr=1.0), store="local", store_optimizer=shared)
    for given in (shared, copy.copy(shared)):
        with pytest.raises(mx.InvalidArgument, match="divides by 1 for another one.*divide by 2"):
            ht.DistributedOptimizer(torch.optim.SGD([ones[1]], lr=1.0), store=Two("local"), store_optimizer=given)


def test_models_may_share_what_their_store_keeps():
    """The second one began the states of the first anew."""
    class Own(mx.optimizer.Optimizer):
        def create_state(self, index, weight):
            return mx.nd.zeros(weight.shape)

        def update(self, index, weight, grad, state):
            state[:] = state + grad
            weight[:] = weight - state

    for rule, last in ((mx.optimizer.SGD(momentum=0.5), [-1.5, -1.5]), (Own(), [-2, -2])):
        store, ones = mx.kv.create("local"), [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizers = []
        for name, one in zip("ab", ones):
            optimizers.append(ht.DistributedOptimizer(torch.optim.SGD([one], lr=1.0), [(name, one)], store,
                                                      store_optimizer=rule))
            ones[0].grad = None
            ones[0].sum().backward()
            optimizers[0].step()
        assert ones[0].tolist() == last


SUM = r"another DistributedOptimizer.*expected no store_optimizer, or a store of its own"
RULE = r"another DistributedOptimizer.*expected its store_optimizer, or a store of its own"


def test_an_optimizer_of_a_store_keeps_its_rule():
    """What came later took effect for the earlier one too: sums became updates, and SGD became Adam."""
    def make(one, name, store, rule=None):
        return ht.DistributedOptimizer(torch.optim.SGD([one], lr=0.5), [(name, one)], store, store_optimizer=rule)

    def step(one, optimizer):
        optimizer.zero_grad()
        one.sum().backward()
        optimizer.step()
        return one.tolist()

    for rule, expected in ((None, SUM), (mx.optimizer.SGD(), RULE)):
        for ends in ("close", "drop"):
            store = mx.kv.create("local")
            first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
            optimizer, other = make(first, "a", store, rule), mx.optimizer.Adam(rescale_grad=3.0)
            with pytest.raises(mx.InvalidArgument, match=expected):
                make(second, "b", store, other)
            assert other.rescale_grad == 3 and store._optimizer is rule and len(store.keys()) == 1
            assert step(first, optimizer) == [0.5, 0.5]
            if ends == "close":
                optimizer.close()
            else:
                del optimizer
            again = make(second, "b", store, mx.optimizer.SGD())  # the rule of nobody any more
            assert step(second, again) == [0.5, 0.5]


@pytest.mark.parametrize("rule", [None, mx.optimizer.SGD()])
@pytest.mark.parametrize("change", [lambda store: store.set_optimizer(mx.optimizer.Adam()),
                                    lambda store: store.set_updater(lambda key, given, stored: None)])
@pytest.mark.parametrize("size", [2, 9000])
def test_a_rule_that_the_store_gets_later_is_refused(rule, change, size):
    store, one = mx.kv.create("local"), torch.nn.Parameter(torch.ones(size))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([one], lr=0.5), [("w", one)], store, store_optimizer=rule)
    one.sum().backward()
    optimizer.step()
    change(store)
    optimizer.zero_grad()
    with pytest.raises(mx.InvalidState, match="w': the store updates by another optimizer.*expected .*stays"):
        one.sum().backward()
    optimizer.zero_grad()
    assert one.eq(0.5).all()


def test_an_optimizer_that_the_caller_gave_the_store_is_not_replaced():
    for change in (lambda store: store.set_optimizer(mx.optimizer.Adam()),
                   lambda store: store.set_updater(lambda key, given, stored: None)):
        store, one = mx.kv.create("local"), torch.nn.Parameter(torch.ones(2))
        change(store)
        with pytest.raises(mx.InvalidArgument, match="the store has an optimizer already.*expected that one, or a store"):
            ht.DistributedOptimizer(torch.optim.SGD([one], lr=0.5), [("w", one)], store, store_optimizer=mx.optimizer.SGD())
    rule = mx.optimizer.SGD()
    store.set_optimizer(rule)
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([one], lr=0.5), [("w", one)], store, store_optimizer=rule)
    one.sum().backward()
    optimizer.step()
    assert one.tolist() == [0.5, 0.5]


class Two(Doubling):
    num_workers = 2


class Four(Doubling):
    num_workers = 4


def test_a_parameter_of_two_names_is_exchanged_once():
    """It was divided by the number of workers for each of them."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter), ("q", parameter)], Two())
    (parameter * 3).sum().backward()
    optimizer.step()
    assert parameter.tolist() == [-2] * 4


@pytest.mark.parametrize("size", [2, 9000])  # in a parcel with the other, or alone
def test_parameters_may_be_thawed_and_frozen_again(size):
    """Thawed ones were updated by the gradient of this rank alone, frozen ones decayed."""
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(size), requires_grad=False)
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0, weight_decay=0.5),
                                        [("first", first), ("second", second)], Two(), average=False)

    def step():
        optimizer.zero_grad()
        (first.sum() + second.sum()).backward()
        optimizer.step()
        assert second.eq(second[0]).all()
        return second[0].item()

    assert step() == 1
    second.requires_grad_(True)
    assert step() == 1 - 0.5 - 2
    assert step() == -1.5 + 0.75 - 2
    second.requires_grad_(False)
    assert step() == -2.75 and second.grad is None


def test_a_thawed_parameter_goes_to_the_store_by_its_name_and_rate():
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    third, store = torch.nn.Parameter(torch.ones(2)), mx.kv.create("local")
    optimizer = ht.DistributedOptimizer(
        torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=1.0),
        [("first", first), ("second", second)], store, store_optimizer=mx.optimizer.SGD())
    optimizer.add_param_group({"params": [third]})
    for value in (1, 0.5):
        optimizer.zero_grad()
        (first + second + third).sum().backward()
        optimizer.step()
        assert second.tolist() == [value] * 2
        second.requires_grad_(True)
    assert set(store.keys()) == {"first", "second", "parameter.2"}


def test_broadcast_parameters_takes_modules_dictionaries_and_pairs():
    model, store = make_model(), mx.kv.create("local")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameters in (model, model.state_dict(), model.named_parameters()):
        ht.broadcast_parameters(parameters, store)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert store.keys() == []
    with pytest.raises(mx.InvalidType, match="got int as 'step'"):
        ht.broadcast_parameters({"weight": torch.ones(2), "step": 3}, store)
    for given in (None, "local"):
        with pytest.raises(mx.InvalidType, match="broadcast_parameters: expected a store, got"):
            ht.broadcast_parameters(model, given)
    with pytest.raises(mx.InvalidType, match="pairs of names and tensors, got 3"):
        ht.broadcast_parameters(3, store)
    assert store.keys() == []


def test_broadcast_parameters_leaves_nothing_in_the_store_of_a_job(tmp_path):
    """Twice under the same names: the second values count, at all ranks."""
    ended = Job(tmp_path, """
    import torch, heddle as mx
    kv = mx.kv.create("dist_sync")
    import heddle.torch as ht
    for turn in range(2):
        tensors = {"large": torch.full((300, 7), 10.0 * turn + kv.rank), "small": torch.tensor([turn, kv.rank])}
        ht.broadcast_parameters(tensors, kv)
        assert torch.equal(tensors["large"], torch.full((300, 7), 10.0 * turn)), tensors
        assert tensors["small"].tolist() == [turn, 0]
        assert kv.keys() == []
        kv.barrier()  # the other rank's next turn has keys again
    print("equal")
    """, servers=2).finish()
    for name in ("worker 0", "worker 1"):
        assert ended[name][:2] == (0, "equal"), ended[name]


def test_loaders_with_workers_run_beside_the_engine():
    """DataLoader forks: its workers use no heddle, and the parent goes on."""
    model = make_model()
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), "device")
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()


PREAMBLE = """
    import json, os, torch, heddle as mx
    kv = mx.kv.create(STORE)
    import heddle.torch as ht
    torch.set_num_threads(1)
    torch.manual_seed(kv.rank)  # every rank begins elsewhere
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3), torch.nn.Linear(3, 3))
    ht.broadcast_parameters(model, kv)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3), torch.nn.Linear(3, 3))
    plain.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(5)
    def loss_of(model, x, y):
        return torch.nn.functional.cross_entropy(model(x), y)
"""


@pytest.mark.parametrize("options", ["", "store_optimizer=mx.optimizer.SGD(momentum=0.9)"])
def test_two_workers_train_like_one_on_both_halves(tmp_path, options):
    """Over dist_sync, whoever updates. The last layer is used at rank 0 alone, in half of the steps."""
    ended = Job(tmp_path, PREAMBLE.replace("STORE", '"dist_sync"') + f"""
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
                                        model.named_parameters(), kv, {options})
    alone = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    for i in range(10):
        halves = [(torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
                  for _ in range(2)]
        used = lambda model, rank: model if rank == 0 and i % 2 == 0 else model[:3]
        optimizer.zero_grad()
        loss_of(used(model, kv.rank), *halves[kv.rank]).backward()
        optimizer.step()
        alone.zero_grad(set_to_none=False)
        sum(loss_of(used(plain, rank), *half) for rank, half in enumerate(halves)).div(2).backward()
        alone.step()
    for ours, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    print("equal")
    """, servers=2).finish()
    for name in ("worker 0", "worker 1"):
        assert ended[name][:2] == (0, "equal"), ended[name]


def test_ranks_of_a_job_may_close_and_begin_again(tmp_path):
    ended = Job(tmp_path, """
    import torch, heddle as mx
    kv = mx.kv.create("dist_sync")
    import heddle.torch as ht
    w = torch.nn.Parameter(torch.full((3,), float(kv.rank)))
    for rule in (None, None, mx.optimizer.SGD(), mx.optimizer.SGD()):
        optimizer = ht.DistributedOptimizer(torch.optim.SGD([w], lr=0.5), [("w", w)], kv, store_optimizer=rule)
        if rule is None:
            ht.broadcast_parameters([("w", w)], kv)
        optimizer.zero_grad()
        (w * (1 + kv.rank)).sum().backward()
        optimizer.step()
        optimizer.close()
        assert kv.keys() == []
        kv.barrier()  # the other rank's next turn has keys again
    print(w.tolist())
    """).finish()
    for name in ("worker 0", "worker 1"):
        assert ended[name][:2] == (0, "[-3.0, -3.0, -3.0]"), ended[name]


def test_dist_async_applies_every_gradient(tmp_path):
    """Of a linear loss the gradients are known, so is the end, whatever the order."""
    ended = Job(tmp_path, """
    import torch, heddle as mx
    kv = mx.kv.create("dist_async")
    import heddle.torch as ht
    w = torch.nn.Parameter(torch.full((3,), float(kv.rank)))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([w], lr=0.5), [("w", w)], kv,
                                        store_optimizer=mx.optimizer.SGD(), average=False)
    for _ in range(8):
        optimizer.zero_grad()
        (w * (kv.rank + 1)).sum().backward()
        optimizer.step()
    kv.barrier()
    out = mx.nd.zeros((3,))
    kv.pull("w", out=out)
    print(out.asnumpy().tolist())
    """).finish()
    for name in ("worker 0", "worker 1"):
        assert ended[name][:2] == (0, "[-12.0, -12.0, -12.0]"), ended[name]


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_overwriting_right_after_a_push_on_a_slow_link(tmp_path, kind):
    """The server is stopped while 32 MB are on their way to it, more than the sockets hold; what is written over the
    gradient then must not arrive."""
    (tmp_path / "server").write_text("")
    job = Job(tmp_path, f"""
    import os, pathlib, signal, threading, time, torch, heddle as mx
    kv = mx.kv.create({kind!r})
    import heddle.torch as ht
    while not (text := pathlib.Path({str(tmp_path / 'server')!r}).read_text()).endswith("."):
        time.sleep(0.01)
    server = int(text[:-1])
    w = torch.nn.Parameter(torch.zeros(8 << 20))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("w", w)], kv,
                                        store_optimizer=mx.optimizer.SGD())
    kv.barrier()
    os.kill(server, signal.SIGSTOP)
    try:
        w.sum().backward()
        gradient = w.grad
        with torch.no_grad():
            w.add_(0)  # step refuses it, but waits for what is under way
        threading.Timer(0.5, os.kill, [server, signal.SIGCONT]).start()
        try:
            optimizer.step()
        except mx.InvalidState:
            gradient.fill_(1000)
        else:
            raise AssertionError("step has taken a weight that was changed")
    finally:
        os.kill(server, signal.SIGCONT)
    out = mx.nd.zeros(w.shape)
    kv.pull("w", out=out)
    print(out.asnumpy().min(), out.asnumpy().max())
    """, workers=1)
    (tmp_path / "server").write_text(f"{job.processes['server 0'].pid}.")
    ended = job.finish()
    assert ended["worker 0"][:2] == (0, "-1.0 -1.0"), ended["worker 0"]


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_the_weights_after_a_step_are_the_new_ones_on_a_slow_link(tmp_path, kind):
    """The server is stopped before the weights leave it, so they come half a second later: step waits for them."""
    (tmp_path / "server").write_text("")
    job = Job(tmp_path, f"""
    import os, pathlib, signal, threading, time, torch, heddle as mx
    kv = mx.kv.create({kind!r})
    import heddle.torch as ht
    while not (text := pathlib.Path({str(tmp_path / 'server')!r}).read_text()).endswith("."):
        time.sleep(0.01)
    server = int(text[:-1])
    w = torch.nn.Parameter(torch.zeros(8 << 20))
    optimizer = ht.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("w", w)], kv,
                                        store_optimizer=mx.optimizer.SGD())
    kv.barrier()
    for step in range(2):
        optimizer.zero_grad()
        w.sum().backward()
        os.kill(server, signal.SIGSTOP)
        try:
            threading.Timer(0.5, os.kill, [server, signal.SIGCONT]).start()
            optimizer.step()
            print(w.min().item(), w.max().item())
        finally:
            os.kill(server, signal.SIGCONT)
    """, workers=1)
    (tmp_path / "server").write_text(f"{job.processes['server 0'].pid}.")
    ended = job.finish()
    assert ended["worker 0"][:2] == (0, "-1.0 -1.0\n-2.0 -2.0"), ended["worker 0"]


EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "torch" / "digits.py"


@pytest.mark.parametrize("store", ["device", "dist_sync", "dist_async"])
def test_the_example_learns_the_digits_as_well_as_pytorch_alone(tmp_path, store):
    if store == "device":
        done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True)
        outputs = [done.stdout]
    else:
        ended = Job(tmp_path, f"""
    import runpy, sys
    sys.argv = ["digits.py", {store!r}]
    runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
        """).finish()
        assert ended["worker 0"][0] == ended["worker 1"][0] == 0, ended
        outputs = [ended["worker 0"][1], ended["worker 1"][1]]
    reached = [float(part) for part in re.findall(r"([\d.]+)% of the test", "".join(outputs))]
    assert len(reached) == len(outputs) + 1 and min(reached) >= 94, outputs
