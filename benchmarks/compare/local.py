"""The group `local`: kernels against the machine's bandwidth, and the local store.

Both programs hold themselves against their limits, in one process, because the limit of each case is a
loop over the same arrays. Each takes `--json FILE [--quick]` and writes there one bar a line, an object
with the fields of Report.add.
"""

import json
import os
import subprocess
import tempfile

TARGETS = ["bench_sum_roofline", "bench_local"]
FIELDS = ["what", "ours", "unit", "against", "limit", "ratio", "spread", "bar", "holds"]


def _run(context, program):
    with tempfile.TemporaryDirectory() as folder:
        bars = os.path.join(folder, "bars.json")
        command = [os.path.join(context.build_dir, program), "--json", bars]
        if context.quick:
            command.append("--quick")
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                  check=False, timeout=1800)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{' '.join(command)}: {error}") from error
        if not os.path.exists(bars):
            raise RuntimeError(f"{program}: status {done.returncode}\n{done.stderr.strip()}")
        with open(bars, encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    bar = json.loads(line)
                    context.report.add(*(bar.pop(field) for field in FIELDS), **bar)


def run_sum(context):
    """The sum of N arrays against the measured roofline."""
    _run(context, "benchmarks/ops/bench_sum_roofline")


def run_store(context):
    """Small and large push and pull of the local store."""
    _run(context, "benchmarks/kvstore/bench_local")


SECTIONS = {"sum": run_sum, "store": run_store}
