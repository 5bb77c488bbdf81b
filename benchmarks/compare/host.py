"""The group `host`: what crosses processes of one host through shared memory, against TCP, copies, bare wake-ups,
Open MPI and Gloo; TLS; networks that are not loopback.
"""

import json
import os
import shutil
import subprocess
import time

from compare import python
from compare.build import ROOT
from compare.programs import Children, add_bars, interleave, run_job, run_json

TARGETS = ["bench_host", "first_barrier", "heddle_command", "host_sum", "benchmarks/peers/all"]
GLOO_SUM = os.path.join(ROOT, "benchmarks", "python", "gloo_sum.py")


def run_one_worker(context):
    """pushpull of 64 MiB and of 4 KiB, one worker and one server."""
    add_bars(context, "benchmarks/dist/bench_host", "large", "sleeping", "polling")


def run_tls(context):
    """pushpull of 64 MiB over TCP with TLS."""
    add_bars(context, "benchmarks/dist/bench_host", "tls")


def run_network(context):
    """Hosts far apart, and a slow link, in network namespaces; left out where there are none."""
    add_bars(context, "benchmarks/dist/bench_host", "link", "overtake")


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


def _until_last(commands, count):
    """Seconds from here until the last of `count` programs has said when; all commands are started at once."""
    started = time.monotonic()
    with Children() as children:
        processes = [children.start(command, stdout=subprocess.PIPE) for command in commands]
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode != 0 for process in processes):
        raise RuntimeError(f"{' '.join(commands[0])}: status {[process.returncode for process in processes]}")
    # Behind what the launcher puts in front.
    times = [json.loads(line[line.index("{"):])["at"] for output in outputs for line in output.splitlines()]
    if len(times) != count:
        raise RuntimeError(f"{' '.join(commands[0])}: {len(times)} of {count} programs spoke")
    return max(times) - started


def run_launch(context):
    """`heddle launch` of 16 workers and 4 servers until all have passed the first barrier, beyond the time that as
    many programs take to start."""
    workers, servers = 16, 4
    program = os.path.join(context.build_dir, "benchmarks", "dist", "first_barrier")
    heddle = os.path.join(context.build_dir, "tools", "heddle", "heddle")
    launch = [heddle, "launch", "-n", str(workers), "-s", str(servers), "--", program]
    alone = [[program, "start"]] * (workers + servers + 1)
    extra = [_until_last([launch], workers) - _until_last(alone, len(alone)) for _ in range(context.reps)]
    context.report.add_limit("heddle launch -n 16 -s 4 until the first barrier, beyond the programs' start",
                             [seconds * 1000 for seconds in extra], "ms", 1000)


SECTIONS = {"launch": run_launch, "one_worker": run_one_worker, "sum": run_sum, "tls": run_tls,
            "network": run_network}
