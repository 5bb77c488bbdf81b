"""The group `host`: what crosses processes of one host through shared memory, against TCP, copies, bare wake-ups,
Open MPI and Gloo.
"""

import os
import shutil
import subprocess

from compare import python
from compare.build import ROOT
from compare.programs import add_bars, interleave, run_job, run_json

TARGETS = ["bench_host", "host_sum", "benchmarks/peers/all"]
GLOO_SUM = os.path.join(ROOT, "benchmarks", "python", "gloo_sum.py")


def run_one_worker(context):
    """pushpull of 64 MiB and of 4 KiB, one worker and one server."""
    add_bars(context, "benchmarks/dist/bench_host")


def _mpi(context):
    """What runs Open MPI's sum; None, where it is missing."""
    program = os.path.join(context.build_dir, "benchmarks", "peers", "bin", "peer_mpi")
    if not os.path.exists(program) or not shutil.which("mpirun"):
        context.report.add_missing("Open MPI (Debian packages libopenmpi-dev and openmpi-bin)")
        return None
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "-n", "2", "--oversubscribe", program] + ["--quick"] * context.quick
    return lambda: run_json(command, as_root)


def _gloo(context):
    """What runs Gloo's sum; None, where PyTorch is missing."""
    ours = python.interpreter()
    if subprocess.run([ours, "-c", "import torch.distributed"], check=False, capture_output=True).returncode != 0:
        context.report.add_missing("PyTorch (tools/setup.sh torch)")
        return None
    command = [ours, GLOO_SUM] + ["--quick"] * context.quick
    return lambda: run_job({"worker": command}, {}, workers=2)


def run_sum(context):
    """The sum of 64 MiB of two workers at one server, against Open MPI through shared memory, and Gloo."""
    ours = [os.path.join(context.build_dir, "benchmarks", "dist", "host_sum")] + ["--quick"] * context.quick
    peers = {"Open MPI": (_mpi(context), 1), "Gloo": (_gloo(context), 0.5)}
    programs = {"heddle": lambda: run_json(ours)}
    programs |= {name: peer for name, (peer, _) in peers.items() if peer}
    sums = interleave(programs, context.reps, lambda program: program()["sum"])
    for name, (peer, most) in peers.items():
        if peer:
            context.report.add_ratio("2 workers, sum of 64 MiB through shared memory", sums["heddle"], "us",
                                     name, sums[name], most)


SECTIONS = {"one_worker": run_one_worker, "sum": run_sum}
