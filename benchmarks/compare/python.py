"""The group `python`: stores through the Python package, against MXNet 1.9.1 from PyPI.

MXNet gets a virtual environment of its own, build/mxnet, with the NumPy that it takes; it needs Python
3.11 or older. The runs of the two take turns.
"""

import os
import shutil
import subprocess

from compare.bars import median
from compare.build import ROOT
from compare.programs import interleave, run_job, run_json

TARGETS = ["heddle_python"]
PROGRAM = os.path.join(ROOT, "benchmarks", "python", "store.py")
TORCH_STEP = os.path.join(ROOT, "benchmarks", "python", "torch_step.py")
ENVIRONMENT = os.path.join(ROOT, "build", "mxnet")
PEER = os.path.join(ENVIRONMENT, "bin", "python")
REQUIREMENTS = ["mxnet==1.9.1", "numpy==1.23.5"]


def missing(context):
    """MXNet, where it is not installed and cannot be."""
    if not os.path.exists(os.path.join(ENVIRONMENT, "installed")) and context.may_build:
        python = shutil.which("python3.11") or "python3"
        commands = [[python, "-m", "venv", ENVIRONMENT], [PEER, "-m", "pip", "install", "-q", *REQUIREMENTS]]
        if all(subprocess.run(command, check=False).returncode == 0 for command in commands):
            with open(os.path.join(ENVIRONMENT, "installed"), "w", encoding="ascii"):
                pass
    found = os.path.exists(os.path.join(ENVIRONMENT, "installed"))
    return [] if found else [f"MXNet ({', '.join(REQUIREMENTS)} from PyPI, with Python 3.11)"]


def interpreter():
    """Python of build/venv, which has what our own programs need."""
    python = os.path.join(ROOT, "build", "venv", "bin", "python")
    return python if os.path.exists(python) else "python3"


def programs(context, program):
    """What runs a Python program of benchmarks/python with heddle and, if it is there, with MXNet:
    {name: (command, environment)}."""
    quick = ["--quick"] if context.quick else []
    path = {"PYTHONPATH": os.path.join(context.build_dir, "python")}
    found = {"heddle": ([interpreter(), program, "heddle", *quick], path)}
    if not missing(context):
        found["mxnet"] = ([PEER, "-W", "ignore", program, "mxnet", *quick], {})
    return found


def _bar_of(size):
    """How much of MXNet's time ours may take."""
    return 1 / 5 if size <= 32768 else 1 / 1.2


def run_store(context):
    """push, then pull, until readable: one device and four, with and without SGD."""
    runs = interleave(programs(context, PROGRAM), context.reps, lambda program: run_json(*program))
    small = [run["local/1/4096/none"] for run in runs["heddle"]]
    floor = median([run["floor"] for run in runs["heddle"]])
    context.report.add_limit(f"push + pull of 4 KiB until readable (a call of nanobind's: {floor:.2f} us)",
                             small, "us", 6)
    for case in runs["heddle"][0]:
        if case == "floor" or "mxnet" not in runs:
            continue
        store, devices, size, updater = case.split("/")
        if devices == "1" and updater == "none" and int(size) > 32768:
            continue  # there MXNet keeps a reference to the caller's array, which our contract forbids
        context.report.add_ratio(f"{store}, {devices} device{'s' * (devices != '1')}, {int(size) // 1024} KiB, "
                                 f"updater {updater}", [run[case] for run in runs["heddle"]], "us", "MXNet 1.9.1",
                                 [run[case] for run in runs["mxnet"]], _bar_of(int(size)))


def run_torch(context):
    """A training step of the digits' network on two processes, against DistributedDataParallel on Gloo."""
    if subprocess.run([interpreter(), "-c", "import torch.distributed"], check=False, capture_output=True).returncode != 0:
        context.report.add_missing("PyTorch (tools/setup.sh torch)")
        return
    server = [interpreter(), "-m", "heddle.server"]
    environment = {"PYTHONPATH": os.path.join(context.build_dir, "python")}
    quick = ["--quick"] if context.quick else []
    jobs = {"heddle": {"scheduler": server, "server": server, "worker": [interpreter(), TORCH_STEP, "heddle", *quick]},
            "gloo": {"worker": [interpreter(), TORCH_STEP, "gloo", *quick]}}
    steps = interleave(jobs, context.reps, lambda job: run_job(job, environment, workers=2)["step"])
    context.report.add_ratio("heddle.torch, a step of the digits on 2 processes", steps["heddle"], "us",
                             "DistributedDataParallel on Gloo", steps["gloo"], 1)


SECTIONS = {"store": run_store, "torch": run_torch}
