"""The group `python`: stores through the Python package, against MXNet 1.9.1 from PyPI, the same from C++, and the
machine's bandwidth.

MXNet gets a virtual environment of its own, build/mxnet, with the NumPy that it takes; it needs Python
3.11 or older. The contenders take turns.
"""

import functools
import os
import shutil
import subprocess

from compare.bars import median
from compare.build import ROOT
from compare.programs import interleave, run_job, run_json

TARGETS = ["heddle_python", "heddle_cases"]
PROGRAM = os.path.join(ROOT, "benchmarks", "python", "store.py")
DIST_PROGRAM = os.path.join(ROOT, "benchmarks", "python", "dist_store.py")
TORCH_STEP = os.path.join(ROOT, "benchmarks", "python", "torch_step.py")
ENVIRONMENT = os.path.join(ROOT, "build", "mxnet")
PEER = os.path.join(ENVIRONMENT, "bin", "python")
REQUIREMENTS = ["mxnet==1.9.1", "numpy==1.23.5"]


@functools.cache  # to try to install it takes long, and one failure is enough
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


def programs(context, program, *arguments):
    """What runs a Python program of benchmarks/python with heddle and, if it is there, with MXNet:
    {name: (command, environment)}."""
    arguments = [*arguments, *(["--quick"] if context.quick else [])]
    path = {"PYTHONPATH": os.path.join(context.build_dir, "python")}
    found = {"heddle": ([interpreter(), program, "heddle", *arguments], path)}
    if not missing(context):
        found["mxnet"] = ([PEER, "-W", "ignore", program, "mxnet", *arguments], {})
    return found


def over_tcp(program):
    """The same, of what `programs` gives for heddle, without shared memory between its processes."""
    command, environment = program
    return command, {**environment, "HEDDLE_SHARED_MEMORY": "0"}


SMALL_MAX = 32768  # bytes of an array: above, memory is what limits
ADDED_MAX = 1  # microseconds that Python may add to a call
LARGE_ADDED_MAX = 0.02  # of C++'s time, where that is more


def _text(case):
    store, devices, size, updater = case.split("/")
    return f"{store}, {devices} device{'s' * (devices != '1')}, {int(size) // 1024} KiB, updater {updater}"


def run_store(context):
    """push, then pull, until readable: one device and four, with and without SGD."""
    runs = {}
    for cases in ("local/1/", "local/4/", "device/1/", "device/4/"):  # a machine drifts: contenders stay close in time
        contenders = programs(context, PROGRAM, cases)
        command, path = contenders["heddle"]
        beside = ["--beside", os.path.join(context.build_dir, "benchmarks", "kvstore", "libheddle_cases.so")]
        contenders["heddle"] = ([*command, *beside], path)
        for name, found in interleave(contenders, context.reps, lambda program: run_json(*program)).items():
            runs[name] = [{**a, **b} for a, b in zip(runs.get(name, [{}] * context.reps), found)]
    cases = [case for case in runs["heddle"][0] if case != "floor"]
    ours, cpp, limits = ({case: [run[case][which] for run in runs["heddle"]] for case in cases}
                         for which in ("us", "cpp", "limit"))

    def added(case):
        """By Python to each call: push, pull and a wait a device."""
        return [(a - b) / (2 + int(case.split("/")[1])) for a, b in zip(ours[case], cpp[case])]

    small = "local/1/4096/none"
    context.report.add_limit("push + pull of 4 KiB until readable", ours[small], "us", 6)
    floor = median([run["floor"] for run in runs["heddle"]])
    context.report.add_limit(f"what Python adds to each of its calls (a call of nanobind's: {floor:.2f} us)",
                             added(small), "us", ADDED_MAX)
    for case in cases:
        devices, size, updater = case.split("/")[1:]
        is_small = int(size) <= SMALL_MAX
        if not is_small:
            if LARGE_ADDED_MAX * median(cpp[case]) > ADDED_MAX * (2 + int(devices)):
                context.report.add_ratio(_text(case), ours[case], "us", "C++", cpp[case], 1 + LARGE_ADDED_MAX)
            else:
                context.report.add_limit(f"{_text(case)}: what Python adds to each of its calls", added(case), "us", ADDED_MAX)
            context.report.add_ratio(_text(case), ours[case], "us", "the bytes over the bandwidth", limits[case],
                                     1 / 0.9, bar="<= 1 / 0.9")
        # There MXNet keeps a reference to the caller's array, which our contract forbids.
        keeps_reference = devices == "1" and updater == "none" and not is_small
        if "mxnet" in runs and not keeps_reference:
            context.report.add_ratio(_text(case), ours[case], "us", "MXNet 1.9.1", [run[case] for run in runs["mxnet"]],
                                     1 / 5 if is_small else 1 / 1.2)


# By bytes, and for many small keys: how much of MXNet's time ours may take.
DIST_BARS = {"4096": 1 / 4, "32768": 1 / 1.5, str(1 << 20): 1 / 1.5, str(16 << 20): 1 / 1.2, str(64 << 20): 1 / 1.2,
             "keys": 1 / 10}


def run_dist(context):
    """The same over dist_sync, one worker and one server on loopback: over TCP, and through shared memory."""
    found = programs(context, DIST_PROGRAM, "--workers", "1")
    if "mxnet" not in found:
        return
    contenders = {"TCP": over_tcp(found["heddle"]), "shared memory": found["heddle"], "mxnet": found["mxnet"]}
    runs = interleave(contenders, context.reps, lambda program: run_json(*program))
    for way in ("TCP", "shared memory"):
        for case in runs[way][0]:
            what = "1 000 keys of 256 bytes" if case == "keys" else f"{int(case) // 1024} KiB"
            context.report.add_ratio(f"dist_sync, {way}, {what}", [run[case] for run in runs[way]], "us", "MXNet 1.9.1",
                                     [run[case] for run in runs["mxnet"]], DIST_BARS[case])


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


SECTIONS = {"store": run_store, "dist": run_dist, "torch": run_torch}
