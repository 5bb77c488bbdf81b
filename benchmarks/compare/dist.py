"""The group `dist`: what crosses processes, against sockets that move the same bytes, and MXNet's dist_sync.

The first two programs fork their servers and measure their limits in turn with heddle, in one run.
"""

import os

from compare import python
from compare.build import ROOT, build_release
from compare.programs import add_bars, interleave, run_json

TARGETS = ["bench_tcp", "bench_dist_store"]
PROGRAM = os.path.join(ROOT, "benchmarks", "python", "dist_store.py")


def missing(context):
    """MXNet, where it is not installed and cannot be."""
    return python.missing(context)


def run_tcp(context):
    """The TCP transport by itself: small, long, many and urgent messages."""
    add_bars(context, "benchmarks/dist/bench_tcp")


def run_store(context):
    """The store dist_sync: short, long and many values, one worker and two; bytes and CPU seconds."""
    add_bars(context, "benchmarks/dist/bench_dist_store")


def run_mxnet(context):
    """Push, then pull, of two workers and one server, from Python."""
    programs = python.programs(context, PROGRAM)
    if "mxnet" not in programs:
        return
    programs["heddle"] = python.over_tcp(programs["heddle"])
    if context.may_build:
        build_release(["heddle_python"])
    runs = interleave(programs, context.reps, lambda program: run_json(*program))
    for case in runs["heddle"][0]:
        what = "1 000 keys of 256 bytes" if case == "keys" else f"{int(case) // 1024} KiB"
        context.report.add_ratio(f"2 workers, sum of {what}, from Python", [run[case] for run in runs["heddle"]], "us",
                                 "MXNet 1.9.1", [run[case] for run in runs["mxnet"]], 0.5)


SECTIONS = {"tcp": run_tcp, "store": run_store, "mxnet": run_mxnet}
