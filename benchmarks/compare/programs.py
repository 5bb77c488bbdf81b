"""Runs benchmark programs: those that print one JSON object on their last line, and those that write bars."""

import contextlib
import json
import os
import socket
import subprocess
import tempfile

FIELDS = ["what", "ours", "unit", "against", "limit", "ratio", "spread", "bar", "holds"]


class Children(contextlib.ExitStack):
    """Starts processes. Those that still run when its `with` ends, for whatever reason, are killed."""

    def start(self, command, **options):
        """As subprocess.Popen does, for text."""
        try:
            process = self.enter_context(subprocess.Popen(command, text=True, **options))
        except OSError as error:
            raise RuntimeError(f"{' '.join(command)}: {error}") from error
        self.callback(process.kill)
        return process


def _object(command, output):
    """What is on the last line of a command's output."""
    try:
        return json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise RuntimeError(f"{' '.join(command)}: expected an object on the last line of its output: {error}") from error


def run_json(command, environment=None):
    """Runs a command and returns the object it printed. A failure says which command and why."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              check=False, timeout=600, env={**os.environ, **(environment or {})})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr.strip()}")
    return _object(command, done.stdout)


def run_job(programs, environment, workers):
    """Runs one job of several processes on this machine: programs is {role: command}, each role's once but the
    worker's `workers` times. Returns the object that worker 0 printed on its last line."""
    with socket.create_server(("127.0.0.1", 0)) as probe, socket.create_server(("127.0.0.1", 0)) as other:
        ports = probe.getsockname()[1], other.getsockname()[1]
    shared = {**os.environ, **environment, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(ports[0]),
              "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": "1", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(ports[1])}
    with Children() as children:
        processes = []
        for role, command in programs.items():
            for rank in range(workers if role == "worker" else 1):
                own = {"HEDDLE_RANK": str(rank)} if role == "worker" else {}
                processes.append((role, children.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                                       env={**shared, **own, "DMLC_ROLE": role})))
        outputs = {}
        for role, process in processes:
            output, errors = process.communicate(timeout=600)
            if process.returncode != 0:
                raise RuntimeError(f"{role}: {' '.join(process.args)}: status {process.returncode}\n{errors.strip()}")
            outputs.setdefault(role, []).append(output)
    return _object(programs["worker"], outputs["worker"][0])


def interleave(programs, reps, measure):
    """Measures each program once a repetition, in turn: {name: [value of each repetition]}."""
    values = {name: [] for name in programs}
    for _ in range(reps):
        for name, command in programs.items():
            values[name].append(measure(command))
    return values


def add_bars(context, program, *arguments, build_dir=None):
    """Runs a program that takes `--json FILE [--quick]` and writes there one bar a line, an object with the
    fields of Report.add, or with the field `missing`; adds its bars. One that writes nothing has said on stderr
    what is missing."""
    with tempfile.TemporaryDirectory() as folder:
        bars = os.path.join(folder, "bars.json")
        command = [os.path.join(build_dir or context.build_dir, program), *arguments, "--json", bars]
        if context.quick:
            command.append("--quick")
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                  check=False, timeout=1800)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{' '.join(command)}: {error}") from error
        if done.returncode not in (0, 1) or not os.path.exists(bars):
            raise RuntimeError(f"{program}: status {done.returncode}\n{done.stderr.strip()}")
        with open(bars, encoding="utf-8") as file:
            lines = [line for line in file if line.strip()]
        for line in lines:
            _add_line(context.report, program, line)
        if not lines and not done.stderr.strip():
            raise RuntimeError(f"{program}: has measured nothing, and does not say why")
        if not lines:
            context.report.add_missing(" ".join(done.stderr.split()))


def _add_line(report, program, line):
    try:
        bar = json.loads(line)
        if "missing" in bar:
            report.add_missing(bar["missing"])
            return
        fields = [bar.pop(field) for field in FIELDS]
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"{program}: expected a bar, or what is missing, got {line.strip()}") from error
    report.add(*fields, **bar)
