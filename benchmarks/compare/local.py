"""The group `local`: kernels against the machine's bandwidth, and the local store.

Both programs hold themselves against their limits, in one process, because the limit of each case is a
loop over the same arrays.
"""

from compare.programs import add_bars

TARGETS = ["bench_sum_roofline", "bench_local"]


def run_sum(context):
    """The sum of N arrays against the measured roofline."""
    add_bars(context, "benchmarks/ops/bench_sum_roofline")


def run_store(context):
    """Small and large push and pull of the local store."""
    add_bars(context, "benchmarks/kvstore/bench_local")


SECTIONS = {"sum": run_sum, "store": run_store}
