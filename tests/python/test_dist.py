"""Jobs of several processes: one script for all roles."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from jobs import Job, free_port


SUMS = """
    import heddle as mx
    kv = mx.kv.create("dist_sync")
    shape = (2, 3)
    kv.init("w", mx.nd.ones(shape))
    kv.push("w", mx.nd.full(shape, kv.rank + 1))
    out = mx.nd.zeros(shape)
    kv.pull("w", out=out)
    assert kv.num_workers == 2 and kv.type == "dist_sync"
    print(out.asnumpy().tolist())
    kv.barrier()
"""


def test_one_script_serves_all_roles(tmp_path):
    ended = Job(tmp_path, SUMS, servers=2).finish()
    for name, (status, output, errors) in ended.items():
        assert (status, errors) == (0, ""), name
        assert output == ("[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]" if name.startswith("worker") else "")


def test_an_optimizer_runs_on_the_servers(tmp_path):
    ended = Job(tmp_path, """
        import heddle as mx
        kv = mx.kv.create("dist_sync")
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
        kv.init(3, mx.nd.zeros((2,)))
        for _ in range(2):
            kv.push(3, mx.nd.ones((2,)))
        out = mx.nd.zeros((2,))
        kv.pull(3, out=out)
        print(out.asnumpy().tolist())
        class Mine(mx.optimizer.Optimizer):
            pass
        for refused in (lambda: kv.set_optimizer(Mine()), lambda: kv._set_updater(print)):
            try:
                refused()
            except mx.Error as error:
                print("refused", "server" in str(error), "expected set_optimizer" in str(error))
    """).finish()
    for name in ("worker 0", "worker 1"):
        assert ended[name][1].split("\n") == ["[-2.0, -2.0]", "refused True False", "refused True True"], ended[name]


def test_commands_reach_the_controller_of_the_servers_module(tmp_path):
    (tmp_path / "controlling.py").write_text(textwrap.dedent("""
        def controller(head, body):
            if head == 9:
                raise ValueError("not this one")
            print(head, body, flush=True)
    """))
    ended = Job(tmp_path, """
        import heddle as mx
        kv = mx.kv.create("dist_async")
        if kv.rank == 0:
            kv._send_command_to_servers(5, "hello")
            try:
                kv._send_command_to_servers(9, "x")
            except mx.Error as error:
                print("server 0: ValueError: not this one" in str(error))
            try:
                kv._send_command_to_servers(-2**31, "trace")
            except mx.InvalidArgument as error:
                print("heddle's own" in str(error))
        kv.barrier()
    """, server_command=["-m", "heddle.server", "--module", "controlling"]).finish()
    assert ended["server 0"][:2] == (0, "5 hello"), ended
    assert ended["worker 0"][:2] == (0, "True\nTrue"), ended


MOMENTUM = """
    import heddle as mx

    @mx.optimizer.register
    class Mine(mx.optimizer.Optimizer):
        def __init__(self, momentum=0, **kwargs):
            super().__init__(**kwargs)
            self.momentum = momentum

        def create_state(self, index, weight):
            return mx.nd.zeros_like(weight)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            if grad.asnumpy().max() > 100:  # it may wait
                raise ValueError("a gradient too large")
            state *= self.momentum
            state -= self._get_lr(index) * (grad + self._get_wd(index) * weight)
            weight += state
"""


def test_an_optimizer_written_in_python_runs_on_servers_whose_module_registers_it(tmp_path):
    """As the built-in one of the same formula, cut keys and later parameters included."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(MOMENTUM))
    ended = Job(tmp_path, """
        import numpy
        import heddle as mx
        import mine
        values = {}
        for name in ("mine", "sgd"):
            kv = mx.kv.create("dist_sync")
            optimizer = mx.optimizer.create(name, learning_rate=0.25, wd=0.5, momentum=0.5)
            optimizer.set_lr_mult({"b": 0.5})
            kv.set_optimizer(optimizer)
            keys, shapes = ["a", "b", "large"], [(3,), (2, 2), (1100, 1000)]
            kv.init(keys, [mx.nd.ones(shape) for shape in shapes])
            for step in range(4):
                if step == 2:
                    kv.barrier()
                    optimizer.lr = 0.125
                    optimizer.momentum = 0.25
                kv.push(keys, [mx.nd.full(shape, step - kv.rank) for shape in shapes])
            outs = [mx.nd.zeros(shape) for shape in shapes]
            kv.pull(keys, out=outs)
            values[name] = [out.asnumpy() for out in outs]
            kv.barrier()
        for ours, expected in zip(values["mine"], values["sgd"]):
            numpy.testing.assert_allclose(ours, expected, rtol=1e-5)
        kv = mx.kv.create("dist_sync")
        kv.set_optimizer(mine.Mine())
        kv.init("a", mx.nd.ones((2,)))
        kv.push("a", mx.nd.ones((2,)) * 1000)
        out = mx.nd.zeros((2,))
        kv.pull("a", out=out)
        try:
            out.asnumpy()
        except mx.Error as error:
            print("ValueError: a gradient too large" in str(error))
        kv.init("rows", mx.nd.sparse.zeros("row_sparse", (3, 2)))
        try:
            kv.push("rows", mx.nd.sparse.row_sparse_array(([[1, 1]], [1]), shape=(3, 2)))
        except mx.Error as error:
            print("expected a dense value for optimizer mine" in str(error))
        kv.barrier()
    """, servers=2, server_command=["-m", "heddle.server", "--module", "mine"]).finish()
    for name in ("worker 0", "worker 1"):
        assert ended[name][:2] == (0, "True\nTrue"), ended[name]


def test_states_of_optimizers_written_in_python_come_from_the_servers_and_go_to_others(tmp_path):
    """Training that stops, saves, loads in a job with another number of servers and goes on gives the same bits."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(MOMENTUM))
    script = textwrap.dedent("""
        import sys
        import heddle as mx
        import mine
        keys, shapes = ["a", "b", "large", 'never "pushed"'], [(3,), (2, 2), (1100, 1000), (1,)]
        parts = {"first": [range(3), range(3, 6)], "second": [range(3, 6)]}[PART]
        kv = mx.kv.create("dist_sync")
        optimizer = mine.Mine(learning_rate=0.3, momentum=0.7)
        if PART == "second":
            optimizer = mine.Mine(learning_rate=9, momentum=0.9)
        if PART == "first":
            optimizer.set_lr_mult({"b": 0.5})
        kv.set_optimizer(optimizer)
        start = [mx.nd.ones(shape) for shape in shapes] if PART == "first" else mx.nd.load("values")
        kv.init(keys, start)

        def values():
            outs = [mx.nd.zeros(shape) for shape in shapes]
            kv.pull(keys, out=outs)
            return outs

        for part in parts:
            if part[0] == 3:
                kv.barrier()
                if kv.rank == 0 and PART == "first":
                    kv.save_optimizer_states("states", dump_optimizer=True)
                    mx.nd.save("values", values())
                elif kv.rank == 0:
                    kv.load_optimizer_states("states")
                    assert (optimizer.momentum, optimizer.lr, optimizer.lr_mult) == (0.7, 0.3, {"b": 0.5})
                else:
                    optimizer.lr = 0.3
                    optimizer.momentum = 0.7
                    optimizer.set_lr_mult({"b": 0.5})
                kv.barrier()
            for step in part:
                kv.push(keys[:3], [mx.nd.full(shape, step / 3 - kv.rank) for shape in shapes[:3]])
        print(*(value.asnumpy().tobytes().hex()[:64] + str(value.sum().asscalar()) for value in values()))
        kv.barrier()
    """)
    results = []
    for part, servers in (("first", 2), ("second", 1)):
        ended = Job(tmp_path, f"PART = {part!r}\nimport os\nos.chdir({str(tmp_path)!r})\n{script}", servers=servers,
                    server_command=["-m", "heddle.server", "--module", "mine"]).finish()
        for name, (status, _, errors) in ended.items():
            assert status == 0, f"{name}: {errors}"
        results += [ended["worker 0"][1], ended["worker 1"][1]]
    assert len(set(results)) == 1 and len(results[0].split()) == 4, results


def test_an_optimizer_written_in_python_is_refused_where_the_servers_do_not_have_it(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(MOMENTUM))
    ended = Job(tmp_path, """
        import heddle as mx
        import mine
        kv = mx.kv.create("dist_sync")
        optimizer = mine.Mine()
        try:
            kv.set_optimizer(optimizer)
        except mx.Error as error:
            print("'mine'" in str(error) and "--module" in str(error))
        # It is not theirs: a change that they would not see used to be refused.
        optimizer.momentum = None
        optimizer.clip_gradient = 5.0
        optimizer.lr_scheduler = lambda num_update: 0.5
        assert optimizer._native is None and optimizer.learning_rate == 0.5
    """, server_command=["-m", "heddle.server"]).finish()
    for name in ("worker 0", "worker 1"):
        assert ended[name][:2] == (0, "True"), ended[name]


def test_the_profiler_records_servers_too(tmp_path):
    ended = Job(tmp_path, f"""
        import os
        os.chdir({str(tmp_path)!r})
        import heddle as mx
        try:
            mx.profiler.set_state("run", profile_process="server")
        except mx.InvalidState as error:
            if os.environ["DMLC_ROLE"] == "worker":
                print("dist store" in str(error))
        kv = mx.kv.create("dist_sync")
        kv.init("weight of one", mx.nd.ones((2,)))
        mx.profiler.set_config(filename="servers.trace", profile_process="server")
        mx.profiler.set_state("run", profile_process="server")
        kv.pushpull("weight of one", mx.nd.ones((2,)))
        mx.nd.waitall()
        mx.profiler.set_state("stop", profile_process="server")
        try:
            mx.profiler.set_state("run", profile_process="scheduler")
        except ValueError as error:
            print("'server'" in str(error))
    """, workers=1).finish()
    assert ended["worker 0"][:2] == (0, "True\nTrue"), ended["worker 0"]
    (trace,) = tmp_path.glob("servers.server*.trace")
    shown = tmp_path / "servers.json"
    done = subprocess.run([sys.executable, "-m", "heddle", "trace", trace, "-o", shown], capture_output=True, text=True,
                          check=False)
    if "built without the command" not in done.stderr:
        assert done.returncode == 0 and '"name":"update ' in shown.read_text(), done.stderr


@pytest.mark.parametrize("hook", ["pass", "sys.excepthook = lambda *raised: print('Traceback, shorter:', raised[1], file=sys.stderr)"])
def test_an_uncaught_exception_fails_the_job_by_name(tmp_path, hook):
    """Whoever shows it: a program that sets a hook of its own used to leave in order."""
    ended = Job(tmp_path, f"""
        import sys
        import heddle as mx
        kv = mx.kv.create("dist_sync")
        kv.init("w", mx.nd.ones((2,)))
        {hook}
        kv.barrier()
        if kv.rank == 1:
            raise ValueError("out of luck")
        kv.push("w", mx.nd.ones((2,)))
        out = mx.nd.zeros((2,))
        kv.pull("w", out=out)
        try:
            out.asnumpy()
        except mx.Error as error:
            print(error)
            raise
    """).finish()
    assert ended["worker 1"][0] == 1 and "out of luck" in ended["worker 1"][2], ended["worker 1"]
    assert ended["worker 0"][0] == 1 and "worker 1" in ended["worker 0"][1], ended["worker 0"]
    for other in ("worker 0", "server 0", "scheduler 0"):
        told = ended[other][1] + ended[other][2]
        assert "its program ended by an uncaught exception: ValueError: out of luck" in told, ended[other]


@pytest.mark.parametrize("raised, told", [
    ("raise KeyboardInterrupt", "KeyboardInterrupt\n"),
    ("raise OSError(2, 'No such file', 'a\\nb\\udcff')", r"FileNotFoundError: [Errno 2] No such file: 'a\nb\udcff'"),
    ("raise Wordless", "Wordless: (its text raised ZeroDivisionError)"),
    ("raise RuntimeError('x' * 20000)", "RuntimeError: " + "x" * 500),
    ("sys.exit('no data\\nat all')", "its process exited with status 1: no data at all"),
])
def test_the_others_are_told_why_a_worker_has_failed(tmp_path, raised, told):
    ended = Job(tmp_path, f"""
        import sys
        import heddle as mx
        class Wordless(Exception):
            def __str__(self):
                return 1 / 0
        kv = mx.kv.create("dist_sync")
        if kv.rank == 1:
            {raised}
        try:
            kv.barrier()
        except mx.Error as error:
            print(error)
    """).finish()
    assert ended["worker 1"][0] == (-signal.SIGINT if "Interrupt" in raised else 1), ended["worker 1"]
    for other in ("worker 0", "scheduler 0"):
        assert told in ended[other][1] + ended[other][2], ended[other]
        assert max(map(len, ended[other][1].splitlines()), default=0) < 2000, ended[other]


@pytest.mark.parametrize("last_line, leave", [("sys.exit(train())", "pass"), ("train()", "sys.exit(3)"),
                                              ("train()", "exit(3)"), ("train()", "raise SystemExit(3)")])
def test_a_failing_exit_fails_the_job_by_name(tmp_path, last_line, leave):
    ended = Job(tmp_path, f"""
        import sys
        import heddle as mx

        def train():
            kv = mx.kv.create("dist_sync")
            kv.init("w", mx.nd.ones((2,)))
            kv.barrier()
            if kv.rank == 1:
                {leave}
                return 3
            out = mx.nd.zeros((2,))
            try:
                while True:
                    kv.pushpull("w", mx.nd.ones((2,)), out=out)
                    out.asnumpy()
            except mx.Error as error:
                print(error)
            return 0

        {last_line}
    """).finish()
    assert ended["worker 1"][0] == 3, ended["worker 1"]
    assert "worker 1" in ended["worker 0"][1], ended["worker 0"]
    assert "exited with status 3" in ended["worker 0"][1], ended["worker 0"]
    assert ended["scheduler 0"][0] == 1, ended["scheduler 0"]


@pytest.mark.parametrize("leave", ["sys.exit(3)", "exit(3)", "raise SystemExit(3)"])
def test_a_failing_exit_with_a_store_that_lives_leaves_no_round_to_the_others(tmp_path, leave):
    """Other ways than sys.exit used to leave in order first."""
    ended = Job(tmp_path, f"""
        import sys
        import heddle as mx
        kv = mx.kv.create("dist_sync")
        kv.init("w", mx.nd.ones((2,)))
        kv.barrier()
        if kv.rank == 1:
            {leave}
        out = mx.nd.zeros((2,))
        try:
            while True:
                kv.pushpull("w", mx.nd.ones((2,)), out=out)
                if out.asnumpy()[0] != 2:
                    print("a round without worker 1")
        except mx.Error as error:
            print(error)
    """).finish()
    assert ended["worker 1"][0] == 3, ended["worker 1"]
    assert "exited with status 3" in ended["worker 0"][1] and "a round without" not in ended["worker 0"][1], ended["worker 0"]


def test_an_exit_that_is_caught_fails_nothing(tmp_path):
    ended = Job(tmp_path, """
        import sys
        import heddle as mx
        kv = mx.kv.create("dist_sync")
        def give_up():
            sys.exit(3)
        try:
            give_up()
        except SystemExit:
            pass
        kv.barrier()
    """).finish()
    assert all(status == 0 for status, _, _ in ended.values()), ended


def test_a_store_that_is_refused_fails_nothing_while_there_are_others(tmp_path):
    """The job failed in the end: a store had gone by an exception."""
    ended = Job(tmp_path, """
        import heddle as mx
        kv = mx.kv.create("dist_sync")
        kv.init("w", mx.nd.zeros((2,)))
        try:
            mx.kv.create("dist_sync" if kv.rank == 0 else "dist_async")
        except mx.Error as error:
            print("refused", error)
        out = mx.nd.zeros((2,))
        kv.pushpull("w", mx.nd.ones((2,)), out=out)
        print(out.asnumpy()[0])
        kv.barrier()
    """).finish()
    assert all(status == 0 for status, _, _ in ended.values()), ended
    assert "refused" in ended["worker 0"][1] + ended["worker 1"][1], ended
    assert all("2.0" in ended[f"worker {rank}"][1] for rank in range(2)), ended


@pytest.mark.parametrize("scheduler", [False, True])
def test_ctrl_c_leaves_a_create_that_waits_for_the_job(run_python, scheduler):
    """For the scheduler, or for another worker. It used to be deaf until its deadline."""
    port = free_port()
    job = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}
    waiting = subprocess.Popen([sys.executable, "-m", "heddle.server"], stderr=subprocess.DEVNULL,
                               env={**os.environ, **job, "DMLC_ROLE": "scheduler"}) if scheduler else None
    try:
        result = run_python("""
import os, signal, threading, time
import heddle as mx
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=lambda: (time.sleep(1), os.kill(os.getpid(), signal.SIGINT))).start()
try:
    mx.kv.create('dist_sync')
except KeyboardInterrupt:
    print('interrupted')
""", DMLC_ROLE="worker", timeout=30, **job)
    finally:
        if waiting is not None:
            waiting.kill()
            waiting.wait()
    assert (result.returncode, result.stdout) == (0, "interrupted\n"), result.stderr


def test_ctrl_c_wins_over_the_error_that_came_meanwhile(run_python):
    """What ends the others of a job, such as Ctrl-C, is often on its way to this process when it hears of them."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        def answer():
            with stranger.accept()[0] as connection:
                connection.sendall(b"no scheduler".ljust(100))
        answers = threading.Thread(target=answer)
        answers.start()
        result = run_python("""
import ctypes, functools, signal
import heddle as mx
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may ignore it
calls = [functools.partial(ctypes.pythonapi.PyErr_SetInterrupt), functools.partial(mx.kv.KVStore, 'dist_sync', True)]
try:
    list(map(functools.partial.__call__, calls))  # no line of Python in between, which would raise by itself
except KeyboardInterrupt:
    print('interrupted')
""", timeout=30, DMLC_ROLE="worker", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=str(stranger.getsockname()[1]),
                            DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1")
        answers.join()
    assert (result.returncode, result.stdout) == (0, "interrupted\n"), result.stderr


CLOSING = """
    import os, signal, threading, time
    import heddle as mx
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kv = mx.kv.create("dist_sync")
    kv.init("w", mx.nd.ones((2,)))
    if kv.rank == 1:
        out = mx.nd.zeros((2,))
        try:
            while True:
                kv.pull("w", out)
                out.wait_to_read()
                time.sleep(0.01)
        except mx.Error as error:
            print(error)
        raise SystemExit
    kv.pushpull("w", mx.nd.ones((2,)))  # for which worker 1 is needed
"""


def test_workers_that_close_do_not_wait_for_each_other(tmp_path):
    """Each has pulls that only the other's close, or more pushes of it, would end."""
    ended = Job(tmp_path, """
        import heddle as mx
        kv = mx.kv.create("dist_sync")
        for key in "a", "b":
            kv.init(key, mx.nd.zeros((1000,)))
        mine, other = ("a", "b") if kv.rank == 0 else ("b", "a")
        kv.push(other, mx.nd.ones((1000,)) * 100)
        out = mx.nd.zeros((1000,))
        for value in range(1, 6):
            kv.push(mine, mx.nd.ones((1000,)) * value)
            kv.pull(mine, out)
        kv.close()
        print(out.asnumpy()[0])
    """).finish()
    for rank in range(2):
        assert ended[f"worker {rank}"][:2] == (0, "5.0"), ended[f"worker {rank}"]
    assert ended["scheduler 0"][0] == 0, ended["scheduler 0"]


@pytest.mark.parametrize("end", ["kv.close()", "del kv\n        time.sleep(0)"])
def test_ctrl_c_leaves_a_close_that_waits_for_other_workers(tmp_path, end):
    """It was deaf while the other one lived. The worker has failed then."""
    ended = Job(tmp_path, CLOSING + f"""
    threading.Timer(1, os.kill, [os.getpid(), signal.SIGINT]).start()
    begun = time.monotonic()
    try:
        {end}
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - begun < 30)
    """).finish(timeout=100)
    assert ended["worker 0"][:2] == (0, "interrupted True"), ended["worker 0"]
    assert "worker 0" in ended["worker 1"][1] and "its program was interrupted" in ended["worker 1"][1], ended["worker 1"]
    assert ended["scheduler 0"][0] == 1, ended["scheduler 0"]


def test_ctrl_c_ends_an_exit_that_waits_for_other_workers(tmp_path):
    """As the end of a process that has failed."""
    ended = Job(tmp_path, CLOSING + """
    def interrupt():
        while True:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    """).finish(timeout=100)
    status, _, errors = ended["worker 0"]
    assert status == 130 and "KeyboardInterrupt" in errors and "Fatal" not in errors, ended["worker 0"]
    assert "worker 0" in ended["worker 1"][1] and "interrupted" in ended["worker 1"][1], ended["worker 1"]
    assert ended["scheduler 0"][0] == 1, ended["scheduler 0"]


@pytest.mark.parametrize("look", ["'other' in kv", "kv.keys()"])
def test_ctrl_c_leaves_a_look_for_keys(tmp_path, monkeypatch, look):
    """It was deaf until the server had answered, or was lost."""
    monkeypatch.setenv("HEDDLE_HEARTBEAT_MS", "60000")
    ended = Job(tmp_path, f"""
        import os, pathlib, signal, threading, time
        import heddle as mx
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pid = pathlib.Path({str(tmp_path / "pid")!r})
        if os.environ["DMLC_ROLE"] == "server":
            pid.write_text(str(os.getpid()))
        kv = mx.kv.create("dist_sync")
        kv.init("w", mx.nd.ones((2,)))
        server, ended = int(pid.read_text()), threading.Event()
        os.kill(server, signal.SIGSTOP)
        tasks = pathlib.Path(f"/proc/{{server}}/task")
        while any(") T " not in task.read_text() for task in tasks.glob("*/stat")):
            time.sleep(0.01)  # until then it may still answer
        def interrupt():
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
            print("at once" if ended.wait(10) else "late")
            os.kill(server, signal.SIGCONT)
        thread = threading.Thread(target=interrupt)
        try:
            thread.start()
            {look}
        except KeyboardInterrupt:
            ended.set()
        thread.join()
    """, workers=1).finish(timeout=100)
    assert ended["worker 0"][:2] == (0, "at once"), ended["worker 0"]


@pytest.mark.parametrize("wait", ["kv.barrier()", "kv.close()", "del kv"])
def test_other_threads_run_while_a_worker_waits_for_the_others(tmp_path, wait):
    """Worker 1 goes on once a thread of worker 0, which waits for it, has made a file."""
    ended = Job(tmp_path, f"""
        import pathlib, threading, time
        import heddle as mx
        file = pathlib.Path({str(tmp_path / "go")!r})
        kv = mx.kv.create("dist_sync")
        kv.init("w", mx.nd.ones((2,)))
        if kv.rank == 0:
            threading.Timer(0.5, file.touch).start()
        while kv.rank == 1 and not file.exists():
            time.sleep(0.01)
        out = mx.nd.zeros((2,))
        kv.pushpull("w", mx.nd.ones((2,)), out=out)
        {wait}
        print(out.asnumpy().tolist())
    """).finish(timeout=100)
    for name in ("worker 0", "worker 1"):
        assert ended[name][:2] == (0, "[2.0, 2.0]"), ended[name]


def test_a_forked_child_leaves_the_stores_of_a_job_to_its_parent(tmp_path):
    ended = Job(tmp_path, """
        import os, sys, warnings
        import heddle as mx
        warnings.simplefilter("ignore")  # of forks, from Python 3.12 on
        kv = mx.kv.create("dist_sync")
        kv.init("w", mx.nd.ones((2,)))
        child = os.fork()
        if child == 0:
            try:
                kv.close()
            except mx.InvalidState as error:
                print("fork" in str(error), flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        kv.barrier()
    """).finish()
    for name, (status, output, errors) in ended.items():
        assert (status, errors, output) == (0, "", "True" if name.startswith("worker") else ""), name


def test_what_is_missing_is_named(run_python):
    result = run_python("import heddle as mx; mx.kv.create('dist_sync')", DMLC_ROLE="worker")
    assert result.returncode == 1 and "ValueError" not in result.stdout
    assert "HEDDLE_ROOT" in result.stderr or "DMLC_PS_ROOT" in result.stderr, result.stderr


@pytest.mark.parametrize("role", ["worker", "nothing"])
def test_the_server_program_refuses_other_roles(role):
    ended = subprocess.run([sys.executable, "-m", "heddle.server"], capture_output=True, text=True, check=False,
                           env={**os.environ, "DMLC_ROLE": role})
    assert ended.returncode == 1 and "role" in ended.stderr


@pytest.mark.parametrize("role", ["", "worker", "scheduler"])
def test_the_server_command_with_a_module_is_a_server_whatever_the_environment_says(role):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "HEDDLE_ROLE"))}
    ended = subprocess.run([sys.executable, "-m", "heddle", "server", "--module", "os"], capture_output=True, text=True,
                           check=False, env={**environment, **({"DMLC_ROLE": role} if role else {})})
    assert ended.returncode == 1 and "server: root_host is missing" in ended.stderr, ended.stderr


@pytest.mark.parametrize("engine", ["serial", "seeded"])
def test_servers_work_whatever_engine_the_variables_name(tmp_path, monkeypatch, engine):
    monkeypatch.setenv("HEDDLE_ENGINE", engine)
    ended = Job(tmp_path, """
        import heddle as mx
        kv = mx.kv.create("dist_sync")
        kv.set_optimizer(mx.optimizer.LAMB(learning_rate=0.5))
        kv.init("w", mx.nd.ones((300, 300)))
        out = mx.nd.zeros((300, 300))
        for _ in range(3):
            kv.pushpull("w", mx.nd.ones((300, 300)), out=out)
        print(bool((out.asnumpy() < 1).all()))
    """, servers=2).finish(timeout=60)
    for name, (status, output, errors) in ended.items():
        assert (status, errors, output) == (0, "", "True" if name.startswith("worker") else ""), name
