"""The package as part of a process: import, exit, signals, children."""

import textwrap

import pytest


def check(result, output=""):
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == output
    assert result.stderr == ""


def test_import_starts_no_thread_and_reads_no_role(run_python):
    check(run_python("""
import os, threading
import heddle
assert threading.active_count() == 1
print(len(os.listdir('/proc/self/task')))
""", DMLC_ROLE="server", HEDDLE_ROLE="scheduler", OPENBLAS_NUM_THREADS="1"), "1")


def test_import_loads_little_beyond_numpy(run_python):
    """Importing takes as long as what it loads: here nothing of NumPy's that NumPy itself leaves for later, and
    of the standard library what is small."""
    result = run_python("""
import sys
import numpy
before = set(sys.modules)
import heddle
print(*sorted(name for name in set(sys.modules) - before if name.split('.')[0] != 'heddle'))
""")
    assert result.returncode == 0, result.stderr
    small = {"__future__", "_json", "atexit", "json", "json.decoder", "json.encoder", "json.scanner", "threading"}
    assert set(result.stdout.split()) <= small


def test_exit_is_clean_with_work_pending(run_python):
    program = textwrap.dedent("""
        import sys, time
        import heddle as mx
        a = mx.nd.zeros((300, 300))
        cycle = [a]
        cycle.append(cycle)
        kv = mx.kv.create('device')
        kv.init('w', a)
        kv._set_updater(lambda key, grad, stored: stored.__iadd__(grad))
        for _ in range(50):
            kv.push('w', [mx.nd.ones((300, 300)), mx.nd.ones((300, 300), mx.cpu(1))])
            kv.pull('w', out=a)
        def late():
            time.sleep(0.05)
            print('done')
        mx.engine.push(late, writes=[a])
        a += 1
        class Late:
            def __init__(self, *held): self.held = held
            def __del__(self): self.held[0].shape
        late_object = Late(a, kv)
    """)
    for ending, status in (("", 0), ("sys.exit(3)", 3), ("raise SystemExit", 0)):
        result = run_python(program + ending)
        assert (result.returncode, result.stdout, result.stderr) == (status, "done\n", ""), ending


@pytest.mark.parametrize("work", ["mx.engine.push(hold, writes=[a])",
                                  "threading.Thread(target=kv.push, args=('w', a), daemon=True).start()"])
def test_ctrl_c_at_exit_ends_the_wait_for_pending_work(run_python, work):
    """Of a function that still runs on another thread the interpreter's end is none in order: it used to abort."""
    result = run_python("""
import os, signal, threading, time
import heddle as mx
signal.signal(signal.SIGINT, signal.default_int_handler)
a = mx.nd.zeros((4,))
started = threading.Event()
def hold(*updated):
    started.set()
    time.sleep(60)
kv = mx.kv.create()
kv.init('w', a)
kv._set_updater(hold)
WORK
started.wait()
def interrupt():
    while True:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
print('exits')
""".replace("WORK", work), timeout=50)
    assert result.returncode == 130, result.stderr
    assert result.stdout.strip() == "exits"
    assert "KeyboardInterrupt" in result.stderr and "Fatal" not in result.stderr


@pytest.mark.parametrize("code, status, said", [("143", 143, ""), ("", 0, ""), ("'stopped'", 1, "stopped\n")])
def test_a_handler_that_exits_during_the_wait_at_exit_is_obeyed(run_python, code, status, said):
    """It gave a traceback and status 1."""
    result = run_python("""
import atexit, os, signal, sys, threading, time
import heddle as mx
signal.signal(signal.SIGTERM, lambda *_: sys.exit(CODE))
a = mx.nd.zeros((4,))
started, leaves = threading.Event(), threading.Event()
def hold():
    started.set()
    time.sleep(60)
mx.engine.push(hold, writes=[a])
started.wait()
def end():
    leaves.wait()
    while True:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end, daemon=True).start()
atexit.register(leaves.set)  # before heddle's wait
""".replace("CODE", code), timeout=50)
    assert (result.returncode, result.stdout, result.stderr) == (status, "", said)


def test_five_hundred_exits(run_python):
    """Each in a process of its own, which forks before the package has started anything, a few at a time."""
    check(run_python("""
import os, sys
import heddle as mx

def work(i):
    a = mx.nd.ones((1 + i % 7, 1000))
    kv = mx.kv.create('local')
    kv.init(1, a)
    for _ in range(i % 5):
        kv.push(1, a * 2)
        kv.pull(1, out=a)
    mx.engine.push(lambda: [i for i in range(1000)], writes=[a])
    sys.exit(0)  # the child's own exit, atexit and finalisation

failures = running = 0
for i in range(500):
    if os.fork() == 0:
        work(i)
    running += 1
    while running > (7 if i < 499 else 0):
        failures += os.wait()[1] != 0
        running -= 1
print(failures)
""", timeout=900), "0")


INTERRUPTED = """
import os, signal, sys, threading, time
import heddle as mx
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
a = mx.nd.zeros((4,))
started, opened = threading.Event(), threading.Event()
def hold():
    started.set()
    opened.wait(600)
mx.engine.push(hold, writes=[a])
started.wait()
kv = mx.kv.create('local')
kv.init('w', mx.nd.ones((4,)))
kv.push('w', a)
out = mx.nd.zeros((4,))
kv.pull('w', out=out)
sent = []
def interrupt():
    time.sleep(0.3)
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    WAIT
except KeyboardInterrupt:
    late = time.monotonic() - sent[0]
    opened.set()
    out.asnumpy()
    print('interrupted' if late < 5 else f'interrupted after {late} seconds')
"""


@pytest.mark.parametrize("wait", ["out.asnumpy()", "out.wait_to_read()", "mx.nd.waitall()", "print(out)",
                                  "kv.init('other', a)", "out.wait_to_write()", "numpy.from_dlpack(out)"])
def test_ctrl_c_leaves_a_blocked_wait(run_python, wait):
    """At once, of a wait that would take ten minutes: the promise is a tenth of a second, of a machine that is idle."""
    check(run_python("import numpy\n" + INTERRUPTED.replace("WAIT", wait)), "interrupted")


@pytest.mark.parametrize("engine", ["threaded", "serial", "seeded"])
def test_ctrl_c_ends_a_function_that_the_main_thread_runs_and_is_raised_once(run_python, engine):
    """Every later wait for what the function writes raised KeyboardInterrupt."""
    check(run_python("""
import os, signal, threading, time
import heddle as mx
signal.signal(signal.SIGINT, signal.default_int_handler)
x, other = mx.nd.zeros((2,)), mx.nd.ones((2,))
mx.nd.waitall()
def body():
    if threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
def run():
    while True:  # a worker may be faster
        mx.engine.push(body, writes=[x])
        x.wait_to_read()
raised = []
for call in (run, x.wait_to_read, x.asnumpy, other.wait_to_read, lambda: (x + other).wait_to_read()):
    try:
        call()
    except (KeyboardInterrupt, mx.OpError) as error:
        raised.append(repr(error))
x[:] = 3
print(*raised, x.asnumpy()[0], sep='\\n')
""", HEDDLE_ENGINE=engine, timeout=50),
          "\n".join(["KeyboardInterrupt()"] + ["OpError('the function was interrupted by KeyboardInterrupt')"] * 3 + ["3.0"]))


def test_ctrl_c_in_a_function_of_an_unrelated_wait_leaves_that_wait(run_python):
    check(run_python("""
import os, signal, time
import heddle as mx
signal.signal(signal.SIGINT, signal.default_int_handler)
x, y = mx.nd.zeros((2,)), mx.nd.zeros((2,))
mx.nd.waitall()
def body():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
mx.engine.push(body, writes=[x])
y += 1
try:
    mx.nd.waitall()
except KeyboardInterrupt:
    print(y.asnumpy()[0])
""", HEDDLE_ENGINE="seeded", timeout=50), "1.0")


@pytest.mark.parametrize("engine", ["serial", "seeded"])
def test_a_function_that_the_main_thread_runs_may_exit(run_python, engine):
    result = run_python("""
import sys
import heddle as mx
x = mx.nd.zeros((2,))
mx.engine.push(lambda: sys.exit(3), writes=[x])
x.wait_to_read()
""", HEDDLE_ENGINE=engine)
    assert (result.returncode, result.stdout) == (3, "") and "Traceback" not in result.stderr


@pytest.mark.parametrize("push", ["one += 1", "kv.push(keys, [one] * 50)", "one[1:3] = one[0:2]", "one.copyto(other)"])
def test_ctrl_c_leaves_a_push_that_waits_for_room(run_python, push):
    """The call that waits is completed: of a list of keys each is pushed, or none. It used to stay until there was
    room, however long that took."""
    check(run_python("""
import os, signal, threading, time
import heddle as mx
signal.signal(signal.SIGINT, signal.default_int_handler)
keys = list(range(50))
one, other, zeros = mx.nd.ones((4,)), mx.nd.ones((4,)), mx.nd.zeros((4,))
counts = mx.kv.create('local')
counts.init(keys, [zeros] * 50)
counts._set_updater(lambda key, value, stored: stored.__iadd__(1))
kv = counts
started, opened = threading.Event(), threading.Event()
def hold():
    started.set()
    opened.wait()
mx.engine.push(hold, reads=[one], writes=[one])
started.wait()
threading.Thread(target=lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGINT))).start()
calls = 0
try:
    while True:
        PUSH
        calls += 1
except KeyboardInterrupt:
    opened.set()
outs = [mx.nd.zeros((4,)) for _ in keys]
kv.pull(keys, out=outs)
pushed = {out.asnumpy()[0] for out in outs}
mx.nd.waitall()
assert len(pushed) == 1 and ('kv' not in 'PUSH' or pushed <= {calls, calls + 1}), (pushed, calls)
assert 'one +=' not in 'PUSH' or one.asnumpy()[0] - 1 in (calls, calls + 1), (one.asnumpy(), calls)
print('interrupted')
""".replace("PUSH", push), HEDDLE_MAX_PENDING_OPS="200", timeout=100), "interrupted")


@pytest.mark.parametrize("push", ["kv.push('w', one)", "kv.pushpull('w', one)", "kv.push(['v', 'w'], [one, one])"])
def test_ctrl_c_leaves_a_push_that_waits_for_the_updater_of_another_thread(run_python, push):
    """It was deaf until that updater had returned. The keys of a list that come before are pushed."""
    check(run_python("""
import os, signal, threading, time
import heddle as mx
signal.signal(signal.SIGINT, signal.default_int_handler)
one, out = mx.nd.ones((2,)), mx.nd.zeros((2,))
kv = mx.kv.create('local')
kv.init(['v', 'w'], [mx.nd.zeros((2,))] * 2)
entered, ended, first = threading.Event(), threading.Event(), [True]
def update(key, value, stored):
    if key == 'w' and first.pop():
        entered.set()
        print('at once' if ended.wait(10) else 'late')
    stored += value
kv._set_updater(update)
other = threading.Thread(target=kv.push, args=('w', one))
other.start()
entered.wait()
try:
    threading.Thread(target=lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGINT))).start()
    PUSH
except KeyboardInterrupt:
    ended.set()
other.join()
first.append(False)
kv.push('w', one)
kv.pull('w', out)
print(out.asnumpy()[0])
""".replace("PUSH", push), timeout=50), "at once\n2.0")


def test_ctrl_c_leaves_an_updater_that_waits_while_there_is_no_room(run_python):
    """What follows a failed updater in the store's queue used to wait for room."""
    check(run_python("""
import os, signal, threading, time
import heddle as mx
signal.signal(signal.SIGINT, signal.default_int_handler)
one = mx.nd.ones((4,))
started, opened = threading.Event(), threading.Event()
def hold():
    started.set()
    opened.wait()
kv = mx.kv.create('local')
kv.init('w', mx.nd.zeros((4,)))
def update(key, value, stored):
    value.wait_to_read()
    stored.wait_to_read()
    while mx.engine.stats()['pushed'] - mx.engine.stats()['done'] < 200:
        one.__iadd__(1)
    one.asnumpy()
kv._set_updater(update)
mx.engine.push(hold, reads=[one], writes=[one])
started.wait()
threading.Thread(target=lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGINT))).start()
try:
    kv.push('w', mx.nd.ones((4,)))
except KeyboardInterrupt:
    print('interrupted')
opened.set()
""", HEDDLE_MAX_PENDING_OPS="200", timeout=40), "interrupted")


@pytest.mark.parametrize("inner", ["another", "outer"])
def test_updaters_at_the_bound_never_wait_for_each_other(run_python, inner):
    """Whoever waited for room held a lock, for the rates that Python had said, for which the op came that was to make it."""
    check(run_python("""
import threading
import heddle as mx
gradient, weight, value = (mx.nd.ones((4,)) for _ in range(3))
mx.nd.waitall()
started, full, asked = threading.Event(), threading.Event(), []
def rate(count):
    asked.append(count)
    if len(asked) == 8:  # for which there is no room, with the op and 7 updates
        full.set()
    return 0.5
outer, another = (mx.optimizer.get_updater(mx.optimizer.SGD(lr_scheduler=rate)) for _ in range(2))
def body():
    started.set()
    full.wait()
    INNER('v', gradient, value)
    outer.optimizer.lr = 0.25
mx.engine.push(body, writes=[weight])
started.wait()
for _ in range(20):
    outer('w', gradient, weight)
mx.nd.waitall()
print(weight.asnumpy()[0], value.asnumpy()[0], outer.optimizer.lr)
""".replace("INNER", inner), HEDDLE_MAX_PENDING_OPS="8", timeout=60), "-9.0 0.5 0.25")


def test_a_signal_handler_runs_during_a_wait(run_python):
    check(run_python("""
import signal, threading
import heddle as mx
a = mx.nd.zeros((4,))
started, opened = threading.Event(), threading.Event()
def hold():
    started.set()
    opened.wait()
mx.engine.push(hold, writes=[a])
started.wait()
signal.signal(signal.SIGALRM, lambda *_: opened.set())  # its own return lets the wait go on
signal.setitimer(signal.ITIMER_REAL, 0.2)
print(a.asnumpy().tolist())
"""), "[0.0, 0.0, 0.0, 0.0]")


def test_other_threads_run_while_one_waits(run_python):
    check(run_python("""
import threading
import heddle as mx
a, opened, started = mx.nd.zeros((4,)), threading.Event(), threading.Event()
def hold():
    started.set()
    opened.wait()
mx.engine.push(hold, writes=[a])
started.wait()
thread = threading.Thread(target=a.wait_to_read)
thread.start()
opened.set()  # needs the GIL that the wait must not hold
thread.join()
print('joined')
"""), "joined")


HELD = """
import sys, threading
import heddle as mx
file = sys.argv[1]
gradient, weight, rows = mx.nd.zeros((4,)), mx.nd.ones((4,)), mx.nd.sparse.zeros('row_sparse', (4, 2))
started, opened = threading.Event(), threading.Event()
def hold():
    started.set()
    opened.wait()
mx.engine.push(hold, writes=[gradient, rows])
started.wait()
optimizer = mx.optimizer.SGD(momentum=0.5)
kv = mx.kv.create('local')
kv.init('w', weight)
kv.set_optimizer(optimizer)
updater = mx.optimizer.get_updater(optimizer)
kv.push('w', gradient)
updater('w', gradient, weight)
threading.Timer(0.3, opened.set).start()  # a thread that needs the GIL
CALL
print(opened.is_set())
"""


@pytest.mark.parametrize("call, waits", [
    ("kv.save_optimizer_states(file)", True), ("updater.get_states()", True), ("mx.nd.save(file, gradient)", True),
    ("mx.nd.save(file, [rows])", True), ("mx.nd.sparse.retain(rows, [1]).indices", True),
    ("kv.close(); gradient.wait_to_read()", True), ("del kv; gradient.wait_to_read()", True),
    ("del updater, weight; mx.nd.waitall()", True), ("del gradient, rows", False)])
def test_other_threads_run_while_a_call_waits(run_python, tmp_path, call, waits):
    """Also where what is dropped goes: whoever waits without the GIL for what another Python thread has to do gets it."""
    result = run_python(HELD.replace("CALL", call), str(tmp_path / "file"), timeout=100)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "True\n" or not waits


# Nobody gets the GIL but when it is released, for there is no other switch; `ticks` tells that somebody has.
TICKING = """
import os, sys, threading, time
import heddle as mx
sys.setswitchinterval(1000)
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.0001)
threading.Thread(target=tick, daemon=True).start()
time.sleep(0.01)
"""


@pytest.mark.parametrize("call", ["mx._core.save(file, [('a', a)], {})", "mx._core.load(file, 0)",
                                  "kv.save_optimizer_states(file)", "kv.load_optimizer_states(file)"])
def test_other_threads_run_while_files_are_written_and_read(run_python, tmp_path, call):
    """One of them wakes up during such a call sooner or later."""
    check(run_python(TICKING + """
file = sys.argv[1]
a = mx.nd.ones((1 << 20,))
kv = mx.kv.create()
kv.init('w', a)
kv.set_optimizer(mx.optimizer.SGD(momentum=0.5))
kv.push('w', a)
mx.nd.waitall()
kv.save_optimizer_states(file) if 'optimizer' in 'CALL' else mx._core.save(file, [('a', a)], {})
for _ in range(500):
    made = None  # to drop what is made releases the GIL, too: not while it is watched
    before = ticks
    made = CALL
    passed = ticks > before
    if passed:
        break
print(passed)
sys.stdout.flush()
os._exit(0)  # the interpreter's exit would wait for a switch
""".replace("'CALL'", repr(call)).replace("CALL", call), str(tmp_path / "file")), "True")


@pytest.mark.parametrize("call", ["mx.nd.empty((1,))", "mx.nd.sparse.zeros('row_sparse', (1, 1))", "mx.engine.new_var('v')",
                                  "mx.engine.engine_type()", "mx.engine.stats()"])
def test_other_threads_run_while_a_call_starts_the_engine(run_python, call):
    """Which takes about as long as a thread to wake up: so in one of some processes. What is made is kept, since to drop it
    releases the GIL too."""
    for _ in range(30):
        result = run_python(TICKING + f"before = ticks\nmade = {call}\nprint(ticks > before)\nsys.stdout.flush()\nos._exit(0)")
        assert (result.returncode, result.stderr) == (0, "")
        if result.stdout == "True\n":
            return
    raise AssertionError("the GIL was held all the time")


def test_a_hundred_forks_of_a_busy_process_fail_clearly_and_never_hang(run_python):
    """A child has none of the engine's threads: all that it asks of heddle is refused at once, and it ends
    as it should. The parent works on."""
    check(run_python("""
import os, sys, threading
import heddle as mx
a = mx.nd.ones((64, 64))
kv = mx.kv.create('local')
kv.init('w', a)
optimizer = mx.optimizer.SGD(momentum=0.5)
over = threading.Event()
def work():
    while not over.is_set():
        kv.push('w', mx.nd.ones((64, 64)))
        kv.pull('w', out=mx.nd.zeros((64, 64)))
        mx.nd.waitall()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
statuses = set()
for i in range(100):
    child = os.fork()
    if child == 0:
        refused = 0
        calls = [lambda: mx.nd.ones((2,)), lambda: a + 1, a.asnumpy, a.wait_to_read, mx.nd.waitall,
                 lambda: kv.push('w', a), lambda: kv.pull('w', out=a), lambda: mx.kv.create('local'),
                 lambda: mx.engine.push(print), mx.engine.dump_state, mx.engine.stats, kv.close, kv.keys,
                 lambda: setattr(optimizer, 'lr', 0.5), lambda: optimizer.momentum, lambda: optimizer.set_lr_mult({'w': 2.0})]
        for call in calls:
            try:
                call()
            except mx.InvalidState as error:
                refused += 'fork' in str(error)
        del a, kv, optimizer, calls, call
        if i % 2:
            os._exit(refused)
        sys.exit(refused)  # with all that finalisation does
    statuses.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
for thread in threads:
    thread.join()
print(statuses, (a + 1).asnumpy()[0, 0])
""", timeout=900), "{16} 2.0")


def test_a_child_that_a_handler_forks_during_a_wait_leaves_it(run_python):
    """It waited for ever for threads that it does not have."""
    check(run_python("""
import os, signal, threading, time
import heddle as mx
a = mx.nd.zeros((4,))
started, ended = threading.Event(), threading.Event()
def hold():
    started.set()
    ended.wait(600)
mx.engine.push(hold, writes=[a])
started.wait()
def wait_for(child):
    for _ in range(200):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]
def fork(*_):
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(wait_for(child)))
        ended.set()
signal.signal(signal.SIGALRM, fork)
signal.setitimer(signal.ITIMER_REAL, 0.3)
parent = os.getpid()
try:
    print(a.asnumpy()[0])
except mx.InvalidState as error:
    os._exit(7 if os.getpid() != parent and "forked" in str(error) else 1)
"""), "7\n0.0")


def test_a_child_draws_random_numbers_whatever_other_threads_were_doing(run_python):
    """The lock of the stream was held in it for ever."""
    check(run_python("""
import os, signal, threading
import heddle as mx
held, over = threading.Event(), threading.Event()
def hold():
    with mx.random._lock:
        held.set()
        over.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    mx.random.seed(3)
    os._exit(mx.random.randint(7, 8).asscalar())
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
over.set()
thread.join()
print(status)
""", timeout=100), "7")


def test_children_that_leave_heddle_alone_work(run_python):
    """As the workers of PyTorch's DataLoader do, and those that multiprocessing forks; one that it spawns may
    use heddle."""
    check(run_python("""
import multiprocessing
import numpy
import heddle as mx
a = mx.nd.ones((4,)) + 1
a.wait_to_read()
with multiprocessing.get_context('fork').Pool(3) as pool:
    print(sum(pool.map(abs, range(-50, 50))))
with multiprocessing.get_context('spawn').Pool(1) as pool:
    print(pool.apply(mx.nd.sum, (a,)).asscalar())
"""), "2500\n8.0")


def test_a_pool_reports_arrays_and_optimizers_that_its_forked_children_cannot_use(run_python):
    """They could not even be unpickled there, and so the pool waited for ever."""
    check(run_python("""
import multiprocessing, operator
import numpy
import heddle as mx
def shape_of(array):
    return array.shape
def count(array):
    return 1
dense = mx.nd.ones((4,))
arrays = [dense, dense.astype('bfloat16'), mx.np.ones(()), mx.nd.ones((2, 2)).tostype('row_sparse')]
with multiprocessing.get_context('fork').Pool(1) as pool:
    for array in arrays:
        for function in (shape_of, numpy.asarray, operator.neg, mx.nd.array, str):
            try:
                pool.apply_async(function, (array,)).get(60)
            except mx.InvalidState as error:
                assert 'fork' in str(error), error
            else:
                print(function)
    optimizer = mx.optimizer.SGD(momentum=0.5, lr_scheduler=mx.lr_scheduler.CosineScheduler(9))
    optimizer.set_lr_mult({'w': 2.0})
    for function in (operator.attrgetter('momentum'), operator.methodcaller('set_wd_mult', {'v': 0.0}),
                     operator.methodcaller('__setattr__', 'lr', 1.0)):
        try:
            pool.apply_async(function, (optimizer,)).get(60)
        except mx.InvalidState as error:
            assert 'fork' in str(error), error
        else:
            print(function)
    updater = mx.optimizer.get_updater(mx.optimizer.SGD(momentum=0.5))
    updater('w', mx.nd.ones((2,)), mx.nd.ones((2,)))
    try:
        pool.apply_async(operator.methodcaller('get_states'), (updater,)).get(60)
    except mx.InvalidState as error:
        assert 'fork' in str(error), error
    print(pool.map(count, [*arrays, optimizer, updater]))
""", timeout=100), "[1, 1, 1, 1, 1, 1]")


def test_threads_that_do_not_end_leave_the_exit_alone(run_python):
    """Daemon threads in the middle of calls: Python ended them there, and so the process aborted."""
    program = textwrap.dedent("""
        import threading
        import heddle as mx
        kv = mx.kv.create()
        kv._set_updater(lambda key, value, stored: stored.__iadd__(value))
        kv.init(list(range(4)), [mx.nd.zeros((4,))] * 4)
        begun = threading.Barrier(5)
        def work(i):
            a = mx.nd.zeros((4,))
            begun.wait()
            while True:
                a += 1
                (a * 2).asnumpy()
                kv.push(i, a)
                kv.pull(i, out=a)
                mx.engine.push(lambda held=a + 1: None, writes=[a])
        for i in range(4):
            threading.Thread(target=work, args=(i,), daemon=True).start()
        begun.wait()
    """)
    for _ in range(15):
        check(run_python(program))


IN_UPDATERS = {
    "updater": "kv._set_updater(lambda key, value, stored: nap())",
    "optimizer": """
@mx.optimizer.register
class Own(mx.optimizer.Optimizer):
    def update(self, index, weight, grad, state):
        begun.set()
        weight -= grad * sum(0.5 for _ in range(200000))
kv.set_optimizer(Own())
""",
    "scheduler": "kv.set_optimizer(mx.optimizer.SGD(lr_scheduler=lambda count: nap() or 0.5))",
}


@pytest.mark.parametrize("kind", IN_UPDATERS)
def test_threads_in_updaters_leave_the_exit_alone(run_python, kind):
    """Python ended them there, with frames of heddle beneath, and so the process aborted."""
    program = """
import sys, threading, time
import heddle as mx
begun = threading.Event()
def nap():
    begun.set()
    time.sleep(0.01)
kv = mx.kv.create()
kv.init(list(range(4)), [mx.nd.zeros((4,))] * 4)
SET
def work(i):
    gradient = mx.nd.ones((4,))
    while True:
        kv.push(i, gradient)
for i in range(4):
    threading.Thread(target=work, args=(i,), daemon=True).start()
begun.wait()
sys.exit(5)
""".replace("SET", IN_UPDATERS[kind])
    for _ in range(8):
        result = run_python(program, timeout=60)
        assert (result.returncode, result.stdout, result.stderr) == (5, "", "")


def test_updaters_that_do_not_end_are_waited_for_half_a_minute(run_python):
    """They were twice: for a minute."""
    check(run_python("""
import threading
import heddle as mx
begun = threading.Event()
def stay(key, value, stored):
    begun.set()
    threading.Event().wait()
kv = mx.kv.create()
kv.init('w', mx.nd.zeros((4,)))
kv._set_updater(stay)
for _ in range(2):
    threading.Thread(target=kv.push, args=('w', mx.nd.ones((4,))), daemon=True).start()
begun.wait()
""", timeout=50))


def test_an_updater_that_runs_at_exit_is_finished(run_python):
    check(run_python("""
import threading, time
import heddle as mx
begun = threading.Event()
def update(key, value, stored):
    begun.set()
    time.sleep(0.3)
    stored += value
    print(stored.asnumpy()[0])
kv = mx.kv.create()
kv.init('w', mx.nd.ones((4,)))
kv._set_updater(update)
threading.Thread(target=kv.push, args=('w', mx.nd.ones((4,))), daemon=True).start()
begun.wait()
"""), "2.0")


def test_a_child_forked_before_the_first_use_exits_with_its_threads_in_calls(run_python):
    """It did not wait for those that were on their way back to Python, and aborted."""
    check(run_python("""
import os, sys, threading
import heddle as mx

def child():
    begun = threading.Barrier(9)
    def work():
        y = mx.nd.zeros((2,))
        begun.wait()
        while True:
            y += 1
            y.asnumpy()
    for _ in range(8):
        threading.Thread(target=work, daemon=True).start()
    begun.wait()
    sys.exit(5)

statuses = set()
for _ in range(14):
    pid = os.fork()
    if pid == 0:
        child()
    statuses.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(statuses)
""", timeout=200), "{5}")


@pytest.mark.parametrize("late_handler, teardown", [(0, 4), (4, 0.5)])
def test_an_exit_may_take_longer_than_threads_stay(run_python, late_handler, teardown):
    """They came back to an interpreter that was going, and the process aborted."""
    check(run_python(f"""
import atexit, contextlib, sys, threading, time
atexit.register(time.sleep, {late_handler})  # so it runs after heddle's own
import heddle as mx
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep({teardown})
sys.slow = Slow()
begun = threading.Barrier(5)
def work():
    a = mx.nd.zeros((4,))
    begun.wait()
    while True:
        with contextlib.suppress(mx.InvalidState):
            a.asnumpy()
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
"""))


def test_an_exit_handler_may_wait_for_a_thread_that_uses_heddle(run_python):
    check(run_python("""
import atexit, contextlib, threading
begun = threading.Event()
def work():
    a = mx.nd.ones((4,))
    begun.set()
    with contextlib.suppress(mx.InvalidState):
        while True:
            (a + 1).asnumpy()
thread = threading.Thread(target=work, daemon=True)
atexit.register(thread.join)  # so it runs after heddle's own
import heddle as mx
thread.start()
begun.wait()
"""))


def test_a_subinterpreter_is_refused(run_python):
    """Its exit used to hang."""
    check(run_python("""
import sys
if sys.version_info < (3, 12):  # later ones refuse NumPy before
    import _xxsubinterpreters as interpreters
    interpreters.run_string(interpreters.create(), '''
try:
    from heddle import _core
except ImportError as error:
    assert 'main interpreter' in str(error.__cause__), error.__cause__
else:
    raise AssertionError('it was imported')
''')
print('refused')
""", PYTHONWARNINGS="ignore"), "refused")
