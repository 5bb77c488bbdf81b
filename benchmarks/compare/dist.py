"""The group `dist`: what crosses processes, against sockets that move the same bytes.

Each program forks its servers and measures its limits in turn with heddle, in one run.
"""

from compare.programs import add_bars

TARGETS = ["bench_tcp"]


def run_tcp(context):
    """The TCP transport by itself: small, long, many and urgent messages."""
    add_bars(context, "benchmarks/dist/bench_tcp")


SECTIONS = {"tcp": run_tcp}
