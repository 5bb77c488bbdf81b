"""Runs benchmark programs, which print one JSON object on their last line."""

import json
import os
import subprocess


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
