#!/usr/bin/env python3
"""How long push, then pull, until the value can be read takes; with heddle or with MXNet, whose names are the
same. Prints one JSON object: {case: median microseconds}.

    store.py heddle|mxnet [case, or how some begin...] [--quick] [--beside LIBRARY]

With --beside, libheddle_cases.so, the same calls from C++ and loops over the same bytes take turns with ours in this
process, and a case gives {"us": ours, "cpp": C++'s, "limit": the better loop's}.

A case is "store/devices/bytes/updater": local/4/4096/sgd. Every device pushes an array of its own and pulls into
one of its own. Bound: the arrays' bytes over the machine's bandwidth once they leave the cache, and a few
microseconds for waking nobody below.
"""

import argparse
import ctypes
import importlib
import itertools
import json
import statistics
import time

SIZES = [4096, 32768, 1 << 20, 16 << 20, 64 << 20]


def stretch_of(size, quick):
    return max(4, min(1000, (1 << 26) // size) // (4 if quick else 1))


class Case:
    """Push, then pull, through the Python package or MXNet's."""

    def __init__(self, mx, store, devices, size, updater):
        shape = (size // 4,)
        contexts = [mx.cpu(i) for i in range(devices)]
        self.kv = mx.kv.create(store)
        self.kv.init(3, mx.nd.zeros(shape))
        if updater == "sgd":
            self.kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
        self.gradients = [mx.nd.ones(shape, context) for context in contexts]
        self.outs = [mx.nd.zeros(shape, context) for context in contexts]
        mx.nd.waitall()

    def run(self, count):
        """The microseconds of each run."""
        kv, outs = self.kv, self.outs
        gradients = self.gradients
        given, taken = (gradients[0], outs[0]) if len(outs) == 1 else (gradients, outs)
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            kv.push(3, given)
            kv.pull(3, out=taken)
            for out in outs:
                out.wait_to_read()
            times.append((time.perf_counter() - begin) * 1e6)
        return times


class CppCase:
    """The same from C++ (0), and the loops with ordinary (1) and streaming stores (2)."""

    def __init__(self, library, store, devices, size, updater):
        self.library = library
        self.made = ctypes.c_void_p()
        self._check(library.heddle_case_new(store.encode(), devices, ctypes.c_size_t(size), updater == "sgd",
                                            ctypes.byref(self.made)))

    def run(self, which, count):
        times = (ctypes.c_double * count)()
        self._check(self.library.heddle_case_run(self.made, which, count, times))
        return list(times)

    def free(self):
        self.library.heddle_case_free(self.made)

    @staticmethod
    def _check(failed):
        if failed:
            raise RuntimeError("the C++ side has failed")


def medians_in_turn(contenders, stretch, rounds):
    """Of the runs of each, which take turns for a stretch of runs; the first quarter of a stretch warms up."""
    times = [[] for _ in contenders]
    for _ in range(rounds):
        for found, run in zip(times, contenders):
            found += run(stretch)[stretch // 4:]
    return [statistics.median(found) for found in times]


def time_case(mx, library, name, quick):
    store, devices, size, updater = name[0], int(name[1]), int(name[2]), name[3]
    stretch, rounds = stretch_of(size, quick), 2 if quick else 5
    if library is None:
        return medians_in_turn([Case(mx, store, devices, size, updater).run], stretch, rounds)[0]
    # A store keeps its place in memory, and its engine what it has learnt of its ops, which makes one faster than the
    # next by up to half: so several are made of each, and count by their mean.
    found = []
    for _ in range(2 if quick else 6):
        ours, cpp = Case(mx, store, devices, size, updater), CppCase(library, store, devices, size, updater)
        contenders = [ours.run, *(lambda count, of=cpp, which=which: of.run(which, count) for which in range(3))]
        # In turn: what else the machine does meanwhile hits all alike, and each finds in the caches what the
        # others have left there.
        found.append(medians_in_turn(contenders, max(4, stretch // 2), rounds))
        cpp.free()
    of_python, of_cpp, *of_loops = map(statistics.mean, zip(*found))
    return {"us": of_python, "cpp": of_cpp, "limit": min(of_loops)}


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
    parser.add_argument("--beside", metavar="LIBRARY", help="libheddle_cases.so")
    parser.add_argument("cases", nargs="*", help="default: all")
    arguments = parser.parse_args()
    mx = importlib.import_module(arguments.library)
    library = ctypes.CDLL(arguments.beside) if arguments.beside else None
    sizes = SIZES[:3] if arguments.quick else SIZES
    times = {}
    for store, devices, size, updater in itertools.product(["local", "device"], [1, 4], sizes, ["none", "sgd"]):
        case = f"{store}/{devices}/{size}/{updater}"
        if not arguments.cases or case.startswith(tuple(arguments.cases)):
            times[case] = time_case(mx, library, case.split("/"), arguments.quick)
    if arguments.library == "heddle":
        times["floor"] = time_floor(mx)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
