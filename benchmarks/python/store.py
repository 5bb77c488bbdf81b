#!/usr/bin/env python3
"""How long push, then pull, until the value can be read takes; with heddle or with MXNet, whose names are the
same. Prints one JSON object: {case: median microseconds}.

    store.py heddle|mxnet [--quick] [case, or how some begin...]

A case is "store/devices/bytes/updater": local/4/4096/sgd. Every device pushes an array of its own and pulls into
one of its own. Bound: the arrays' bytes over the machine's bandwidth once they leave the cache, and a few
microseconds for waking nobody below.
"""

import argparse
import importlib
import itertools
import json
import statistics
import time

SIZES = [4096, 32768, 1 << 20, 16 << 20, 64 << 20]


def rounds_of(size, quick):
    return max(5, min(4000, (1 << 28) // size) // (20 if quick else 1))


def time_case(mx, store, devices, size, updater, quick):
    shape = (size // 4,)
    contexts = [mx.cpu(i) for i in range(devices)]
    kv = mx.kv.create(store)
    kv.init(3, mx.nd.zeros(shape))
    if updater == "sgd":
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
    gradients = [mx.nd.ones(shape, context) for context in contexts]
    outs = [mx.nd.zeros(shape, context) for context in contexts]
    if devices == 1:
        gradients, outs = gradients[0], outs[0]
    last = outs if devices == 1 else outs[-1]
    mx.nd.waitall()

    def once():
        begin = time.perf_counter()
        kv.push(3, gradients)
        kv.pull(3, out=outs)
        if devices == 1:
            last.wait_to_read()
        else:
            for out in outs:
                out.wait_to_read()
        return time.perf_counter() - begin

    rounds = rounds_of(size, quick)
    for _ in range(rounds // 4 + 2):
        once()
    return statistics.median(once() for _ in range(rounds)) * 1e6


def time_floor(mx):
    """A call of nanobind's that does next to nothing with its arguments."""
    a, b = mx.nd.zeros((2,)), mx.nd.zeros((2,))
    count = 20000
    begin = time.perf_counter()
    for _ in range(count):
        a._is_same_as(b)
    return (time.perf_counter() - begin) / count * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=["heddle", "mxnet"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("cases", nargs="*", help="default: all")
    arguments = parser.parse_args()
    mx = importlib.import_module(arguments.library)
    sizes = SIZES[:3] if arguments.quick else SIZES
    times = {}
    for store, devices, size, updater in itertools.product(["local", "device"], [1, 4], sizes, ["none", "sgd"]):
        case = f"{store}/{devices}/{size}/{updater}"
        if not arguments.cases or case.startswith(tuple(arguments.cases)):
            times[case] = time_case(mx, store, devices, size, updater, arguments.quick)
    if arguments.library == "heddle":
        times["floor"] = time_floor(mx)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
