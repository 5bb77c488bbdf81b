#!/usr/bin/env python3
"""How long push, then pull, until the sum can be read takes two workers and one server with the store dist_sync; with
heddle or with MXNet, whose names are the same. Prints one JSON object: {bytes: median microseconds}.

    dist_store.py heddle|mxnet [--quick]

Starts the job's processes, which run this file again with DMLC_ROLE set, over loopback.
"""

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time

SIZES = [4096, 1 << 20, 64 << 20]
WORKERS = 2


def rounds_of(size, quick):
    return max(5, min(300, (1 << 28) // size) // (10 if quick else 1))


def time_case(mx, kv, key, size, quick):
    shape = (size // 4,)
    kv.init(key, mx.nd.zeros(shape))
    value = mx.nd.ones(shape) * (kv.rank + 1)
    out = mx.nd.zeros(shape)
    mx.nd.waitall()

    def once():
        begin = time.perf_counter()
        kv.push(key, value)
        kv.pull(key, out=out)
        out.wait_to_read()
        return time.perf_counter() - begin

    once()
    total = sum(range(1, WORKERS + 1))
    if not (out.asnumpy() == total).all():  # later MXNet pulls into what was pushed, too, and sums that
        sys.exit(f"rank {kv.rank}: expected the sum {total} of {size} bytes, got {out.asnumpy()}")
    rounds = rounds_of(size, quick)
    for _ in range(rounds // 4 + 1):
        once()
    return statistics.median(once() for _ in range(rounds)) * 1e6


def run_role(library, quick):
    mx = importlib.import_module(library)
    kv = mx.kv.create("dist_sync")  # the other roles end here, or earlier
    times = {size: time_case(mx, kv, key, size, quick) for key, size in enumerate(SIZES)}
    if kv.rank == 0:
        print(json.dumps(times))


def run_job():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    job = {**os.environ, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
           "DMLC_NODE_HOST": "127.0.0.1", "DMLC_NUM_WORKER": str(WORKERS), "DMLC_NUM_SERVER": "1"}
    command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), *sys.argv]
    processes = [subprocess.Popen(command, env={**job, "DMLC_ROLE": role})
                 for role in ["scheduler", "server"] + ["worker"] * WORKERS]
    try:
        return max(process.wait(timeout=300) for process in reversed(processes))
    finally:
        for process in processes:
            process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=["heddle", "mxnet"])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if "DMLC_ROLE" not in os.environ:
        sys.exit(run_job())
    run_role(arguments.library, arguments.quick)


if __name__ == "__main__":
    main()
