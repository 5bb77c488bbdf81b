#!/usr/bin/env python3
"""How long push, then pull, until the sum can be read takes workers and one server with the store dist_sync; with
heddle or with MXNet, whose names are the same. Prints one JSON object: {bytes: median microseconds}, and the same for
"keys", 1 000 keys of 256 bytes in one call each.

    dist_store.py heddle|mxnet [--workers N] [--quick]

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

SIZES = [4096, 32768, 1 << 20, 16 << 20, 64 << 20]
MANY, MANY_BYTES = 1000, 256


def rounds_of(size, quick):
    return max(5, min(300, (1 << 28) // size) // (10 if quick else 1))


def time_case(mx, kv, keys, size, quick):
    """Of arrays of `size` bytes under `keys`: one of them, or a list."""
    shape = (size // 4,)
    many = isinstance(keys, list)

    def each(make):
        return [make() for _ in keys] if many else make()

    kv.init(keys, each(lambda: mx.nd.zeros(shape)))
    value = each(lambda: mx.nd.ones(shape) * (kv.rank + 1))
    out = each(lambda: mx.nd.zeros(shape))
    outs = out if many else [out]
    mx.nd.waitall()

    def once():
        begin = time.perf_counter()
        kv.push(keys, value)
        kv.pull(keys, out=out)
        for one in outs:
            one.wait_to_read()
        return time.perf_counter() - begin

    once()
    total = sum(range(1, kv.num_workers + 1))
    for one in outs:
        if not (one.asnumpy() == total).all():  # later MXNet pulls into what was pushed, too, and sums that
            sys.exit(f"rank {kv.rank}: expected the sum {total} of {size} bytes, got {one.asnumpy()}")
    rounds = rounds_of(size * len(outs), quick)
    for _ in range(rounds // 4 + 1):
        once()
    return statistics.median(once() for _ in range(rounds)) * 1e6


def run_role(library, quick):
    mx = importlib.import_module(library)
    kv = mx.kv.create("dist_sync")  # the other roles end here, or earlier
    times = {size: time_case(mx, kv, key, size, quick) for key, size in enumerate(SIZES)}
    times["keys"] = time_case(mx, kv, list(range(len(SIZES), len(SIZES) + MANY)), MANY_BYTES, quick)
    if kv.rank == 0:
        print(json.dumps(times))


def run_job(workers):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    job = {**os.environ, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
           "DMLC_NODE_HOST": "127.0.0.1", "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": "1"}
    command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), *sys.argv]
    processes = [subprocess.Popen(command, env={**job, "DMLC_ROLE": role})
                 for role in ["scheduler", "server"] + ["worker"] * workers]
    try:
        return max(process.wait(timeout=300) for process in reversed(processes))
    finally:
        for process in processes:
            process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=["heddle", "mxnet"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if "DMLC_ROLE" not in os.environ:
        sys.exit(run_job(arguments.workers))
    run_role(arguments.library, arguments.quick)


if __name__ == "__main__":
    main()
