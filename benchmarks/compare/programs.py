"""Runs benchmark programs: those that print one JSON object on their last line, and those that write bars."""

import json
import os
import socket
import subprocess
import tempfile

FIELDS = ["what", "ours", "unit", "against", "limit", "ratio", "spread", "bar", "holds"]


def run_json(command, environment=None):
    """Runs a command and returns the object it printed. A failure says which command and why."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              check=False, timeout=600, env={**os.environ, **(environment or {})})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr.strip()}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_job(programs, environment, workers):
    """Runs one job of several processes on this machine: programs is {role: command}, each role's once but the
    worker's `workers` times. Returns the object that worker 0 printed on its last line."""
    with socket.create_server(("127.0.0.1", 0)) as probe, socket.create_server(("127.0.0.1", 0)) as other:
        ports = probe.getsockname()[1], other.getsockname()[1]
    shared = {**os.environ, **environment, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(ports[0]),
              "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": "1", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(ports[1])}
    processes = []
    try:
        for role, command in programs.items():
            for rank in range(workers if role == "worker" else 1):
                own = {"HEDDLE_RANK": str(rank)} if role == "worker" else {}
                processes.append((role, subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    env={**shared, **own, "DMLC_ROLE": role})))
        outputs = {}
        for role, process in processes:
            output, errors = process.communicate(timeout=600)
            if process.returncode != 0:
                raise RuntimeError(f"{role}: {' '.join(process.args)}: status {process.returncode}\n{errors.strip()}")
            outputs.setdefault(role, []).append(output)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(str(error)) from error
    finally:
        for _, process in processes:
            process.kill()
    return json.loads(outputs["worker"][0].strip().splitlines()[-1])


def interleave(programs, reps, measure):
    """Measures each program once a repetition, in turn: {name: [value of each repetition]}."""
    values = {name: [] for name in programs}
    for _ in range(reps):
        for name, command in programs.items():
            values[name].append(measure(command))
    return values


def add_bars(context, program, *arguments):
    """Runs a program that takes `--json FILE [--quick]` and writes there one bar a line, an object with the
    fields of Report.add, or with the field `missing`; adds its bars."""
    with tempfile.TemporaryDirectory() as folder:
        bars = os.path.join(folder, "bars.json")
        command = [os.path.join(context.build_dir, program), *arguments, "--json", bars]
        if context.quick:
            command.append("--quick")
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                  check=False, timeout=1800)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{' '.join(command)}: {error}") from error
        if done.returncode not in (0, 1) or not os.path.exists(bars):
            raise RuntimeError(f"{program}: status {done.returncode}\n{done.stderr.strip()}")
        with open(bars, encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    bar = json.loads(line)
                    if "missing" in bar:
                        context.report.add_missing(bar["missing"])
                        continue
                    fields = [bar.pop(field) for field in FIELDS]
                    context.report.add(*fields, **bar)
