"""The group `gpu`: ops and kernels for GPUs against bare launches and the device's own copies.

Each section is a file of benchmarks/gpu, where its bars are written down. Without a GPU, or without CUDA to build
with, there are no bars.
"""

import glob
import os
import shutil

from compare import build
from compare.programs import add_bars

TARGETS = []  # built with CUDA, apart from the others


def missing(_):
    if not glob.glob("/dev/nvidia[0-9]*"):
        return ["a GPU (no device /dev/nvidia*)"]
    if not shutil.which("nvcc") and not os.path.exists("/usr/local/cuda/bin/nvcc"):
        return ["CUDA to build with (no nvcc)"]
    return []


def _section(name, meaning):
    def run(context):
        if missing(context):
            return
        build_dir = build.build_cuda("bench_gpu") if context.may_build else None
        add_bars(context, "benchmarks/gpu/bench_gpu", name, build_dir=build_dir)
    run.__doc__ = meaning
    return run


SECTIONS = {
    "engine": _section("engine", "The cost of an op, what steps make afresh, and overlap of copies and kernels."),
    "kernels": _section("kernels", "Sums, updates and two-bit codes of 256 MiB."),
    "resnet": _section("resnet", "A step with the sizes of ResNet-50's parameters: its kernels, and push and pull."),
}
