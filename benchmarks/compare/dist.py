"""The group `dist`: what crosses processes, against sockets that move the same bytes.

Each program forks its servers and measures its limits in turn with heddle, in one run.
"""

from compare.programs import add_bars

TARGETS = ["bench_tcp", "bench_dist_store"]


def run_tcp(context):
    """The TCP transport by itself: small, long, many and urgent messages."""
    add_bars(context, "benchmarks/dist/bench_tcp")


def run_store(context):
    """The store dist_sync, one worker and one server: short, long and many values."""
    add_bars(context, "benchmarks/dist/bench_dist_store")


SECTIONS = {"tcp": run_tcp, "store": run_store}
