"""The classes of errors, and what a failing op or engine call raises."""

import builtins
import contextlib
import gc
import os
import re
import subprocess
import sys
import threading
import traceback

import pytest

import heddle as mx


@pytest.mark.parametrize("name, builtin", [
    ("InvalidArgument", ValueError), ("InvalidType", TypeError), ("UnknownKey", KeyError),
    ("TimeoutError", builtins.TimeoutError), ("OutOfMemory", MemoryError), ("IoError", OSError), ("NetworkError", ConnectionError),
    ("InvalidState", RuntimeError), ("AccessError", RuntimeError), ("OpError", RuntimeError), ("CudaError", RuntimeError),
    ("NcclError", RuntimeError)])
def test_errors_are_python_errors_too(name, builtin):
    error = getattr(mx, name)("the message")
    assert isinstance(error, builtin) and isinstance(error, mx.Error) and isinstance(error, mx.MXNetError)
    assert str(error) == "the message"


@pytest.mark.parametrize("call", [
    lambda: mx.Context("tpu"), lambda: mx.cpu(-1), lambda: mx.cpu("0"), lambda: mx.nd.zeros((1,), "cpu"),
    lambda: mx.lr_scheduler.LRScheduler(warmup_steps=-1), lambda: mx.lr_scheduler.FactorScheduler(1, warmup_begin_lr=9),
    lambda: mx.lr_scheduler.LRScheduler(warmup_mode="x"), lambda: mx.engine.set_type("quick"), lambda: mx.engine.set_type(3),
    lambda: mx.nd.sparse.retain(mx.nd.ones((2, 1)), [0])])
def test_bad_arguments_are_errors_of_heddle(call):
    """They were Python's alone, and an `except heddle.Error` missed them."""
    with pytest.raises(mx.InvalidArgument, match="expected"):
        call()


@pytest.mark.parametrize("call, kind", [
    (lambda: mx.nd.zeros_like(3), mx.InvalidType), (lambda: mx.np.ones_like([1]), mx.InvalidType),
    (lambda: mx.nd.to_dlpack_for_read(3), mx.InvalidType), (lambda: mx.nd.to_dlpack_for_write(3), mx.InvalidType),
    (lambda: mx.nd.add(1, 2, out=mx.nd.zeros((1,))), mx.InvalidType),
    (lambda: mx.nd.power("x", mx.nd.ones((1,))), mx.InvalidType),
    (lambda: mx.np.subtract(mx.np.ones(1), "x"), mx.InvalidType),
    (lambda: mx.nd.arange(float("inf")), mx.InvalidArgument), (lambda: mx.np.arange(10**400), mx.InvalidArgument),
    (lambda: mx.np.arange(float("nan")), mx.InvalidArgument), (lambda: mx.nd.arange("x"), mx.InvalidType),
    (lambda: mx.nd.arange(3, repeat=-1), mx.InvalidArgument), (lambda: mx.nd.arange(1e18), mx.OutOfMemory),
    (lambda: mx.engine.set_bulk_size(float("inf")), mx.InvalidArgument),
    (lambda: mx.engine.set_bulk_size(None), mx.InvalidType),
    (lambda: mx.cpu().__exit__(), mx.InvalidState),
    (lambda: mx.optimizer.SGD(param_dict={"a": 1}), mx.InvalidType),
    (lambda: mx.optimizer.Optimizer(param_dict={"a": 1}), mx.InvalidType),
    (lambda: mx.optimizer.SGD(lr_scheduler=5, learning_rate=1), mx.InvalidType),
    (lambda: mx.optimizer.Optimizer(lr_scheduler=5, learning_rate=1), mx.InvalidType),
    (lambda: mx.optimizer.SGD(lr_scheduler=abs, learning_rate=1), mx.InvalidType),
    (lambda: mx.optimizer.SGD(learning_rate=10**400), mx.InvalidArgument),
    (lambda: setattr(mx.optimizer.SGD(), "lr", 10**400), mx.InvalidArgument),
    (lambda: mx.kv.create().set_gradient_compression({"type": "2bit", "threshold": 10**400}), mx.InvalidArgument),
    (lambda: mx.lr_scheduler.FactorScheduler(1, base_lr="x"), mx.InvalidType),
    (lambda: mx.lr_scheduler.FactorScheduler(1, base_lr=10**400), mx.InvalidArgument),
    (lambda: mx.lr_scheduler.FactorScheduler(1, factor=None), mx.InvalidType),
    (lambda: mx.lr_scheduler.FactorScheduler(1, stop_factor_lr="1"), mx.InvalidType),
    (lambda: mx.lr_scheduler.LRScheduler(warmup_begin_lr=[1]), mx.InvalidType),
    (lambda: mx.lr_scheduler.MultiFactorScheduler(5), mx.InvalidType),
    (lambda: mx.lr_scheduler.MultiFactorScheduler("12"), mx.InvalidType),
    (lambda: mx.lr_scheduler.PolyScheduler(5, pwr="x"), mx.InvalidType),
    (lambda: mx.lr_scheduler.CosineScheduler(5, final_lr=None), mx.InvalidType),
    (lambda: mx.optimizer.SGD().set_lr_mult({None: 2}), mx.InvalidType),
    (lambda: mx.optimizer.Optimizer().set_wd_mult({None: 2}), mx.InvalidType),
    (lambda: mx.optimizer.get_updater(mx.optimizer.SGD())(0, mx.nd.ones((1,)), [1]), mx.InvalidType),
    (lambda: mx.optimizer.get_updater(mx.optimizer.SGD())(0, 1, mx.nd.ones((1,))), mx.InvalidType),
    (lambda: mx.optimizer.get_updater(mx.optimizer.Optimizer())(0, mx.nd.ones((1,)), 1), mx.InvalidType),
    (lambda: mx.optimizer.get_updater(mx.optimizer.SGD())([0], mx.nd.ones((1,)), mx.nd.ones((1,))), mx.InvalidType),
    (lambda: mx.optimizer.get_updater(mx.optimizer.SGD())(None, mx.nd.ones((1,)), mx.nd.ones((1,))), mx.InvalidType)])
def test_bad_values_are_errors_of_heddle(call, kind):
    with pytest.raises(kind) as info:
        call()
    assert type(info.value) is kind


def test_a_sum_of_two_numbers_is_a_number():
    """As with MXNet."""
    assert (mx.nd.add(1, 2), mx.nd.power(2, 3), mx.nd.maximum(2, 3), mx.nd.minimum(2, 3.5)) == (3, 8, 3, 2)
    with pytest.raises(mx.InvalidType, match="maximum: expected an NDArray, got int"):
        mx.nd.maximum(2, 3, out=mx.nd.zeros((1,)))


@pytest.mark.parametrize("call, text", [
    (lambda: mx.engine.push(print, priority="high"), "priority: int"), (lambda: mx.engine.push(print, reads=None), "reads: "),
    (lambda: mx.engine.push(3), "function: "), (lambda: mx.nd.waitall("a"), "timeout: float"),
    (lambda: mx.nd.ones((1,)).clip(0, "x"), "clip: expected a number"),
    (lambda: mx.np.ones((1,)).clip(None, None), "clip: expected a number"),
    (lambda: iter(mx.np.ones(())), "iter: expected an array with at least one axis"),
    (lambda: mx.profiler.set_config(filename=3), "set_config: expected the name of a file, got int")])
def test_errors_name_what_the_caller_has_called(call, text):
    with pytest.raises(TypeError, match=text):
        call()


def test_a_profile_may_have_a_name_of_bytes(tmp_path):
    """It was found to be none when the profiler started."""
    mx.profiler.set_config(filename=os.fsencode(tmp_path / "profile.trace"))
    mx.profiler.set_state("run")
    mx.profiler.set_state("stop")
    assert (tmp_path / "profile.trace").exists()
    with pytest.raises(mx.InvalidArgument, match="set_config: expected a file name that UTF-8 has"):
        mx.profiler.set_config(filename="\udc80")


def test_an_array_too_large_for_numpy_is_out_of_memory(run_python):
    """It was Python's error alone."""
    result = run_python("""
import resource
import heddle as mx
array = mx.nd.zeros((60_000_000,), dtype='bfloat16')
array.wait_to_read()
mapped = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 100_000_000, -1))
try:
    array.asnumpy()
except mx.OutOfMemory as error:
    print(error)
""")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("asnumpy: ") and "60000000" in result.stdout


class Gate:
    """An op that has started, on a thread of the engine's, and has not finished until the gate opens."""

    def __init__(self, *arrays):
        self.started, self.opened = threading.Event(), threading.Event()
        mx.engine.push(self.run, writes=arrays, name="gate")
        assert self.started.wait(60)

    def run(self):
        self.started.set()
        self.opened.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.set()


def test_deadlines_are_timeout_errors():
    a = mx.nd.zeros((2,))
    with Gate(a):
        with pytest.raises(TimeoutError, match="gate"):
            a._wait(0.05)
        with pytest.raises(mx.TimeoutError):
            mx.nd.waitall(0.05)
        with pytest.raises(mx.TimeoutError):
            a._var.wait(0.05)
    mx.nd.waitall()


def test_a_deadline_may_be_as_far_as_one_likes():
    """Those beyond the clock used to have passed."""
    started, opened = threading.Event(), threading.Event()
    a = mx.nd.zeros((2,))
    for timeout in (float("inf"), 1e300, 1e10):
        started.clear()
        opened.clear()

        def hold():
            started.set()
            opened.wait()

        mx.engine.push(hold, writes=[a])
        started.wait()
        with pytest.raises(mx.TimeoutError):
            mx.nd.waitall(-1e300)
        threading.Thread(target=opened.set).start()
        mx.nd.waitall(timeout)
    with pytest.raises(mx.InvalidArgument, match="nan"):
        mx.nd.waitall(float("nan"))


def test_waiting_inside_an_op_is_refused():
    a, b = mx.nd.zeros((2,)), mx.nd.ones((2,))
    mx.engine.push(lambda: b.asnumpy(), writes=[a], name="waits inside")
    with pytest.raises(mx.InvalidState, match="waits inside"):
        a.wait_to_read()


def test_an_op_orders_by_what_it_names():
    a, log = mx.nd.zeros((2,)), []
    var = mx.engine.new_var("mine")
    for i in range(100):
        mx.engine.push(lambda i=i: log.append(i), reads=[a], writes=[var])
    var.wait()
    assert log == list(range(100)) and var.version == 100 and var.name == "mine"
    with pytest.raises(TypeError, match="arrays and variables"):
        mx.engine.push(print, writes=["a"])
    # One array is named as a list of it; one without rows used to name nothing.
    for one in (a, mx.nd.zeros((0, 2)), mx.nd.sparse.zeros("row_sparse", (2, 2)), var):
        with Gate(one):
            mx.engine.push(lambda: log.append("read"), reads=one)
            mx.engine.push(lambda: log.append("written"), writes=one)
            assert "read" not in log
        mx.nd.waitall()
        assert log[100:] == ["read", "written"]
        del log[100:]
    with pytest.raises(TypeError):
        mx.engine.push(None)


def test_ops_of_an_op_are_ordered_after_it():
    a = mx.nd.zeros((2,))

    def fill():
        mx.engine.push(lambda: log.append("inner"), writes=[a])
        log.append("outer")

    log = []
    mx.engine.push(fill, writes=[a])
    mx.nd.waitall()
    assert log == ["outer", "inner"]


def test_an_error_without_a_variable_surfaces_once_at_waitall():
    def fail():
        raise ValueError("nobody's")

    mx.engine.push(fail)
    with pytest.raises(ValueError, match="nobody's"):
        mx.nd.waitall()
    mx.nd.waitall()


def test_an_error_that_is_raised_again_has_the_traceback_of_its_op():
    """Each wait used to add its own frames, with all that their variables held."""
    var = mx.engine.new_var("v")

    def fail():
        raise ValueError("the same")

    mx.engine.push(fail, writes=[var])
    seen = []
    for _ in range(3):
        with pytest.raises(ValueError, match="the same") as raised:
            var.wait()
        seen.append((raised.value, traceback.format_tb(raised.value.__traceback__)))
    assert len(seen[0][1]) == len(seen[2][1]) and "in fail" in seen[2][1][-1]
    assert len({id(error) for error, _ in seen}) == 3 and seen[0][0].args == seen[2][0].args
    var.clear_error()
    with pytest.raises(ValueError):
        mx.nd.waitall()


class Own(Exception):
    def __init__(self, what, *, code):
        super().__init__(f"no {what}")
        self.code = code


class OwnOs(OSError):
    def __init__(self, what):
        super().__init__(5, f"no {what}", "file")


@pytest.mark.parametrize("error", [
    ValueError("no"), KeyError("no"), Own("batch", code=3), OwnOs("batch"), FileNotFoundError(2, "no such batch", "batch"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), ImportError("no", name="batch"), mx.IoError("no"), StopIteration(3),
    ExceptionGroup("several", [ValueError("no"), Own("batch", code=4)])])
def test_each_wait_raises_an_equal_exception_of_its_own(error):
    var = mx.engine.new_var("v")

    def fail():
        error.add_note("noted")
        try:
            raise LookupError("first")
        except LookupError as first:
            raise error from first

    mx.engine.push(fail, writes=[var])
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            var.wait()
        copy = raised.value
        assert copy is not error and type(copy) is type(error)
        assert (copy.args, str(copy), vars(copy)) == (error.args, str(error), vars(error))
        assert [getattr(copy, name, None) for name in ("filename", "reason", "name", "value", "exceptions")] == [
            getattr(error, name, None) for name in ("filename", "reason", "name", "value", "exceptions")]
        assert copy.__cause__ is error.__cause__ and isinstance(copy.__cause__, LookupError)
        text = "".join(traceback.format_exception(copy))
        assert text.count("in fail\n") == 2 and "raise error from first\n" in text and "raise LookupError" in text
        copy.add_note("of this wait")


class Holding(Exception):
    """What an op's exception may not hold on to."""


def fail_alone(array):
    def fail():
        raise Holding
    return fail


def fail_by_closure(array):
    def fail():
        array.shape  # noqa: B018
        raise Holding
    return fail


def fail_by_default(array):
    def fail(held=array):
        raise Holding
    return fail


def fail_in_a_chain(array):
    def deeper(one):
        raise LookupError

    def fail():
        try:
            deeper(array)
        except LookupError as error:
            raise Holding from error
    return fail


def fail_in_a_group(array):
    def fail():
        errors = []
        for inner in (fail_by_closure(array), fail_in_a_chain(array)):
            try:
                inner()
            except Holding as error:
                errors.append(error)
        raise ExceptionGroup("both", errors)
    return fail


@pytest.mark.parametrize("make", [fail_alone, fail_by_closure, fail_by_default, fail_in_a_chain, fail_in_a_group])
def test_a_failure_that_was_waited_for_keeps_no_arrays(make):
    """The variable had the exception, that the frames of the op and of its waits, and these the array with the variable."""
    def wait(array):
        with contextlib.suppress(Holding, ExceptionGroup):
            array.wait_to_read()

    def step():
        array = mx.nd.zeros((1 << 16,))
        mx.engine.push(make(array), writes=[array])
        wait(array)
        try:
            raise ValueError("handled while the op runs, or its error is raised")
        except ValueError:
            wait(array)

    def used():
        gc.collect()
        with contextlib.suppress(Holding, ExceptionGroup):
            mx.nd.waitall()
        return mx._core.memory_stats()["used"]

    step()
    before = used()
    for _ in range(20):
        step()
    assert used() <= before


def test_what_a_wait_was_handling_is_no_part_of_the_ops_exception(run_python):
    """Of the op that the wait runs itself."""
    result = run_python("""
import traceback
import heddle as mx
x = mx.nd.zeros((2,))
def fail():
    raise ValueError('of the op')
mx.engine.push(fail, writes=[x])
try:
    raise LookupError('handled')
except LookupError as handled:
    try:
        x.wait_to_read()
    except ValueError as error:
        assert error.__context__ is handled
    assert handled.__traceback__.tb_frame.f_locals['x'] is x
try:
    x.wait_to_read()
except ValueError as error:
    print(error.__context__)
""", HEDDLE_ENGINE="seeded")
    assert (result.returncode, result.stdout) == (0, "None\n"), result.stderr


def test_an_engine_that_could_not_start_does_not_fail_the_exit_too(run_python):
    result = run_python("import heddle as mx\ntry:\n    mx.nd.ones((2,))\nexcept mx.InvalidArgument as error:\n    print(error)",
                        HEDDLE_NUM_WORKERS="many")
    assert (result.returncode, result.stderr) == (0, "") and "HEDDLE_NUM_WORKERS" in result.stdout


def test_bytes_of_a_message_that_are_no_utf8_are_replaced(run_python):
    """They used to be a UnicodeDecodeError in place of the error."""
    result = run_python("import heddle as mx\ntry:\n    mx.nd.ones((2,))\nexcept mx.InvalidArgument as error:\n"
                        "    print(ascii(str(error)))", HEDDLE_NUM_WORKERS=os.fsdecode(b"\xff"))
    assert result.returncode == 0 and r"given '\ufffd'" in result.stdout, result.stderr


def test_an_exception_of_an_op_comes_back_whatever_its_text_is():
    """One with no UTF-8 used to get lost."""
    class Silent(Exception):
        def __str__(self):
            raise ValueError("no text")

    for error in (ValueError("no " + os.fsdecode(b"\xff")), Silent()):
        x = mx.nd.zeros((2,))

        def fail(error=error):
            raise error

        mx.engine.push(fail, writes=[x])
        with pytest.raises(type(error)) as raised:
            x.asnumpy()
        assert raised.value.args == error.args


def test_clear_error_cures():
    var = mx.engine.new_var("v")

    def fail():
        raise ValueError("once")

    mx.engine.push(fail, writes=[var])
    with pytest.raises(ValueError):
        var.wait()
    var.clear_error()
    var.wait()
    with pytest.raises(ValueError):
        mx.nd.waitall()


def test_bulk_sizes_nest():
    assert mx.engine.set_bulk_size(5) == 0
    with mx.engine.bulk(10):
        assert mx.engine.set_bulk_size(10) == 10
    assert mx.engine.set_bulk_size(0) == 5


def test_the_profiler_records_ops(tmp_path):
    file = tmp_path / "trace"
    mx.profiler.set_config(filename=file, profile_all=True)
    mx.profiler.set_state("run")
    (mx.nd.ones((10,)) + 1).wait_to_read()
    mx.profiler.set_state("run")  # it does
    mx.profiler.dump()
    mx.profiler.set_state("stop")
    assert b"Add" in file.read_bytes()
    mx.profiler.set_state("run")  # once more, afresh
    (mx.nd.ones((10,)) * 2).wait_to_read()
    mx.profiler.set_state("stop")
    assert b"Multiply" in file.read_bytes() and b"Add" not in file.read_bytes()
    with pytest.raises(ValueError):
        mx.profiler.set_state("pause")


def test_a_dump_may_go_on(tmp_path):
    mx.profiler.set_config(filename=tmp_path / "profile.trace")
    mx.profiler.set_state("run")
    (mx.nd.ones((10,)) + 1).wait_to_read()
    mx.profiler.dump(finished=False)
    (mx.nd.ones((10,)) * 2).wait_to_read()
    mx.profiler.dump()
    parts = [(tmp_path / name).read_bytes() for name in ("profile.trace", "profile-2.trace")]
    assert [[name for name in (b"Add", b"Multiply") if name in part] for part in parts] == [[b"Add"], [b"Multiply"]]


def test_the_profiler_leaves_out_what_comes_in_a_pause(tmp_path):
    for call in (mx.profiler.pause, mx.profiler.resume):  # of nothing
        call()
    mx.profiler.set_config(filename=tmp_path / "profile.trace")
    for _ in range(2):
        mx.profiler.set_state("run")
        (mx.nd.ones((10,)) + 1).wait_to_read()
        mx.profiler.pause()
        (mx.nd.ones((10,)) * 2).wait_to_read()
        mx.profiler.pause()
        mx.profiler.resume()
        (mx.nd.ones((10,)) - 1).wait_to_read()
        mx.profiler.resume()
        mx.profiler.pause()
        mx.profiler.resume()
        mx.nd.ones((10,)).sqrt().wait_to_read()
        mx.profiler.set_state("stop")
        mx.profiler.resume()  # ended, not paused
        parts = [(tmp_path / name).read_bytes() for name in ("profile.trace", "profile-2.trace", "profile-3.trace")]
        assert [[name for name in (b"Add", b"Multiply", b"Subtract", b"Sqrt") if name in part] for part in parts] == [
            [b"Add"], [b"Subtract"], [b"Sqrt"]]
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(mx.InvalidArgument, match="'worker' or 'server', got 'kernel'"):
        mx.profiler.pause(profile_process="kernel")
    shown = tmp_path / "profile.json"
    done = subprocess.run([sys.executable, "-m", "heddle", "trace", *sorted(tmp_path.glob("*.trace")), "-o", shown],
                          capture_output=True, text=True, check=False)
    if "built without the command" not in done.stderr:
        assert done.returncode == 0, done.stderr
        assert all(f'"name":"{name}' in shown.read_text() for name in ("Add", "Subtract", "Sqrt"))


@pytest.mark.parametrize("level, shown", [
    ("", ""), ("info", "rows"), ("off", ""),
    ("loud", "environment variable HEDDLE_LOG_LEVEL: expected one of debug, info, warning, error, off")])
def test_the_level_of_log_lines_comes_from_the_environment(level, shown):
    script = """
import heddle as mx
kv = mx.kv.create("local")
kv.init("rows", mx.nd.zeros((2, 2)).tostype("row_sparse"))
kv.pull("rows", out=mx.nd.zeros((2, 2)).tostype("row_sparse"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={**os.environ, "HEDDLE_LOG_LEVEL": level})
    assert shown in done.stderr and bool(done.stderr) == bool(shown)


def test_a_run_of_the_profiler_that_runs_overwrites_no_file(tmp_path):
    mx.profiler.set_config(filename=tmp_path / "profile.trace")
    mx.profiler.set_state("run")
    for _ in range(2):
        mx.profiler.pause()
        mx.profiler.resume()
        mx.profiler.set_state("run")
    mx.profiler.set_state("stop")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["profile-2.trace", "profile-3.trace", "profile.trace"]


def test_a_run_leaves_no_further_files_of_a_former_one(tmp_path):
    """`heddle trace profile*.trace` took them for parts of the new one."""
    mx.profiler.set_config(filename=tmp_path / "profile.trace")
    mx.profiler.set_state("run")
    for _ in range(4):
        mx.profiler.dump(finished=False)
    mx.profiler.set_state("stop")
    (tmp_path / "profile-4.trace").write_bytes(b"of something else")
    mx.profiler.set_state("run")
    mx.profiler.set_state("stop")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["profile-4.trace", "profile-5.trace", "profile.trace"]


def test_run_in_a_pause_goes_on(tmp_path):
    """It began the first file again."""
    mx.profiler.set_config(filename=tmp_path / "profile.trace")
    mx.profiler.set_state("run")
    (mx.nd.ones((10,)) + 1).wait_to_read()
    mx.profiler.pause()
    mx.profiler.set_config(filename=tmp_path / "next.trace")  # of the next run
    mx.profiler.set_state("run")
    (mx.nd.ones((10,)) * 2).wait_to_read()
    mx.profiler.set_state("stop")
    parts = [(tmp_path / name).read_bytes() for name in ("profile.trace", "profile-2.trace")]
    assert [[name for name in (b"Add", b"Multiply") if name in part] for part in parts] == [[b"Add"], [b"Multiply"]]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_profiler_counts_ops():
    def counts():
        return {name: int(count) for name, count in (line.split() for line in mx.profiler.dumps().splitlines()[1:])}

    mx.nd.waitall()  # what other tests have left would be done in the meantime
    mx.profiler.dumps(reset=True)
    assert counts()["pushed"] == counts()["failed"] == 0
    for _ in range(3):
        mx.nd.ones((2,))
    mx.nd.waitall()
    assert counts()["pushed"] == counts()["done"] >= 3
    assert mx.profiler.dumps(True, "table", "total", False) and counts()["done"] == 0


def test_a_failed_op_does_not_keep_the_profiler_running(tmp_path):
    """The next 'run' said that it runs already."""
    def fail():
        raise ValueError("no")

    mx.profiler.set_config(filename=tmp_path / "trace")
    for _ in range(2):
        mx.profiler.set_state("run")
        mx.engine.push(fail, name="failing")
        with pytest.raises(ValueError, match="no"):
            mx.profiler.set_state("stop")
        assert b"failing" in (tmp_path / "trace").read_bytes()


def test_a_dump_after_a_failed_op_goes_on(tmp_path):
    """Nothing was recorded any more."""
    def fail():
        raise ValueError("no")

    mx.profiler.set_config(filename=tmp_path / "profile.trace")
    mx.profiler.set_state("run")
    mx.engine.push(fail, name="failing")
    with pytest.raises(ValueError, match="no"):
        mx.profiler.dump(finished=False)
    mx.nd.waitall()  # the error has been raised
    (mx.nd.ones((10,)) * 2).wait_to_read()
    mx.profiler.dump()
    assert b"failing" in (tmp_path / "profile.trace").read_bytes()
    assert b"Multiply" in (tmp_path / "profile-2.trace").read_bytes()


def test_an_engine_that_is_refused_leaves_the_environment_alone(run_python):
    text = ("import os\nimport heddle as mx\nmx.nd.ones((1,))\nformer = os.environ.get('HEDDLE_ENGINE')\ntry:\n"
            "    mx.engine.set_type('seeded')\nexcept mx.InvalidState:\n"
            "    print(os.environ.get('HEDDLE_ENGINE') == former)")
    for environment in ({}, {"HEDDLE_ENGINE": "serial"}):
        result = run_python(text, **environment)
        assert (result.returncode, result.stdout.strip()) == (0, "True"), result.stderr


def test_the_engine_can_be_looked_at():
    a = mx.nd.zeros((2,))
    with Gate(a):
        a += 1
        assert "gate" in mx.engine.dump_state()
    a.wait_to_read()
    assert mx.engine.stats()["done"] <= mx.engine.stats()["pushed"]


def test_naive_engine_runs_ops_at_once(run_python):
    text = ("import heddle as mx\nlog = []\nmx.engine.push(lambda: log.append(1))\nassert log == [1]\n"
            "a = mx.nd.ones((2,)) + 1\nprint(mx.engine.engine_type(), a.asnumpy())")
    for environment in ({"MXNET_ENGINE_TYPE": "NaiveEngine"}, {"HEDDLE_ENGINE": "serial"},
                        {"MXNET_ENGINE_TYPE": "NaiveEngine", "HEDDLE_ENGINE": ""}):
        result = run_python(text, **environment)
        assert (result.returncode, result.stdout.strip()) == (0, "serial [2. 2.]"), result.stderr
    chosen = run_python("import heddle as mx\nmx.engine.set_type('NaiveEngine')\n" + text)
    assert chosen.stdout.strip() == "serial [2. 2.]", chosen.stderr
    wrong = run_python("import heddle", MXNET_ENGINE_TYPE="Quick")
    assert wrong.returncode == 1 and "InvalidArgument: MXNET_ENGINE_TYPE" in wrong.stderr


@pytest.mark.parametrize("command", [["-m", "heddle", "doctor"], ["-m", "heddle.server"]])
def test_the_command_names_a_wrong_engine_without_a_traceback(command):
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600,
                            env={**os.environ, "MXNET_ENGINE_TYPE": "Quick"})
    assert result.returncode == 1
    assert re.fullmatch("heddle: MXNET_ENGINE_TYPE: expected one of naiveengine, .*, got 'Quick'\n", result.stderr)


@pytest.mark.parametrize("role, text", [("server", "heddle: server: root_host is missing: "), ("worker", "heddle: server.run: ")])
def test_a_server_with_a_module_names_wrong_settings_without_a_traceback(role, text):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEDDLE_", "DMLC_"))}
    result = subprocess.run([sys.executable, "-m", "heddle.server"], capture_output=True, text=True, timeout=600,
                            env={**environment, "HEDDLE_ROLE": role})
    assert result.returncode == 1 and result.stderr.startswith(text) and "Traceback" not in result.stderr


def test_without_ray_its_module_says_what_to_install(run_python):
    result = run_python("import sys\nsys.modules['ray'] = None\nimport heddle.ray")
    assert result.returncode == 1
    assert "ImportError: heddle.ray needs Ray, which is not installed: pip install ray" in result.stderr


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        self.code = code


class Fixed(Exception):
    def __setattr__(self, name, value):
        raise RuntimeError("no attributes")


def _raise_syntax_error():
    exec("def f():\n x = 1\n global x\n")


def _raise_slotted():
    raise Slotted(5)


def _raise_fixed():
    raise Fixed(5)


@pytest.mark.parametrize("function, expected, attribute, value", [
    (_raise_syntax_error, SyntaxError, "lineno", 3), (_raise_slotted, Slotted, "code", 5), (_raise_fixed, Fixed, "args", (5,))])
def test_what_waits_raise_has_all_attributes(function, expected, attribute, value):
    array = mx.nd.zeros((1,))
    mx.engine.push(function, writes=[array])
    for _ in range(2):
        with pytest.raises(expected) as raised:
            array.asnumpy()
        assert getattr(raised.value, attribute) == value
