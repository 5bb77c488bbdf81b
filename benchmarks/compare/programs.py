"""Runs benchmark programs: those that print one JSON object on their last line, and those that write bars."""

import json
import os
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


def interleave(programs, reps, measure):
    """Measures each program once a repetition, in turn: {name: [value of each repetition]}."""
    values = {name: [] for name in programs}
    for _ in range(reps):
        for name, command in programs.items():
            values[name].append(measure(command))
    return values


def add_bars(context, program, *arguments):
    """Runs a program that takes `--json FILE [--quick]` and writes there one bar a line, an object with the
    fields of Report.add; adds its bars."""
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
                    fields = [bar.pop(field) for field in FIELDS]
                    context.report.add(*fields, **bar)
