"""The group `engine`: what an op costs, against other engines that order ops by data."""

import os
import tempfile

from compare import build
from compare.bars import median
from compare.programs import interleave, run_json

TARGETS = ["bench_engine", "benchmarks/peers/all"]

# Where each comes from, should it be missing.
PEERS = {
    "tbb_tracker": "libtbb-dev",
    "tbb_flow_graph": "libtbb-dev",
    "libgomp": "g++",
    "libomp": "clang and libomp-dev",
    "starpu": "libstarpu-dev",
}
# Those whose pushing thread runs ops, too, while it waits. They are measured with it among the workers
# and with it besides them, because which is faster depends on the pattern and the machine.
PUSHER_WORKS = ["tbb_tracker", "tbb_flow_graph", "libgomp", "libomp"]

PATTERNS = {
    "independent": "1024 variables in turn",
    "chain": "on one variable",
    "fanout": "1 writer, then 16 readers",
    "stencil": "1D, width 64",
    "random": "2 reads, 1 write of 256",
}
WORKERS = 2


def _peer_program(context, peer):
    return os.path.join(context.build_dir, "benchmarks/peers/bin", f"peer_{peer}")


def missing(context):
    """The peers that are not there, with the package that brings them."""
    return [f"{peer} (Debian package {package})" for peer, package in PEERS.items()
            if not os.path.exists(_peer_program(context, peer))]


def _bench(context, mode, build_dir=None):
    return [os.path.join(build_dir or context.build_dir, "benchmarks/engine/bench_engine"), mode]


def _peers(context):
    """{name: command} of the peers that are there, in each of their arrangements."""
    programs = {}
    for peer in PEERS:
        program = _peer_program(context, peer)
        if not os.path.exists(program):
            continue
        programs[peer] = [program]
        if peer in PUSHER_WORKS:
            programs[f"{peer}, pusher included"] = [program, "--pusher-included"]
    if not programs:
        raise RuntimeError("no peer is there to compare with")
    return programs


def _run_sizes(context, body_ns=0):
    """How many ops and runs one start of a program measures."""
    ops = 200_000 if body_ns < 10_000 else 20_000
    if context.quick:
        return ["--ops", str(ops // 10), "--runs", "1"]
    return ["--ops", str(ops), "--runs", "3"]


def _measure_patterns(context, workers, pattern, body_ns, programs):
    """Interleaved nanoseconds per op: {name: [median of each repetition]}. A peer that the first repetition shows
    far behind the best one is not run again: some take minutes where others take seconds."""
    flags = ["--pattern", pattern, "--body-ns", str(body_ns), "--workers", str(workers)]
    flags += _run_sizes(context, body_ns)

    def measure(command):
        return median(run_json(command + flags)["runs"])

    first = interleave(programs, 1, measure)
    best = min(values[0] for name, values in first.items() if name != "heddle")
    left = {name: command for name, command in programs.items() if name == "heddle" or first[name][0] < 3 * best}
    later = interleave(left, context.reps - 1, measure)
    return {name: values + later.get(name, []) for name, values in first.items()}


def _best(values):
    """Takes ours out of interleaved values; returns ours, the best peer's name and its values."""
    ours = values.pop("heddle")
    name = min(values, key=lambda peer: median(values[peer]))
    return ours, name, values[name], {peer: median(runs) for peer, runs in values.items()}


def run_verify(context):
    """No program is believed before it has run every pattern in order."""
    for command in [_bench(context, "patterns"), *_peers(context).values()]:
        run_json(command + ["--verify", "--runs", "2"])


def run_empty(context):
    """Empty ops, two workers: ours against the best peer."""
    run_verify(context)
    for pattern, meaning in PATTERNS.items():
        programs = {"heddle": _bench(context, "patterns"), **_peers(context)}
        values = _measure_patterns(context, WORKERS, pattern, 0, programs)
        ours, best, theirs, peers = _best(values)
        context.report.add_ratio(f"empty ops, {pattern} ({meaning})", ours, "ns/op", best, theirs, 0.5,
                                 peers=peers)


def run_bodies(context):
    """Busy ops on all cores, the pusher's included: against the work over the cores, and every peer."""
    most = {1_000: 1.2, 10_000: 1.1}
    for body_ns in most:
        for pattern in PATTERNS:
            programs = {"heddle": _bench(context, "patterns"), **_peers(context)}
            values = _measure_patterns(context, context.cores, pattern, body_ns, programs)
            ours, best, theirs, peers = _best(values)
            what = f"{body_ns // 1000} us ops, {pattern}"
            if pattern != "chain":  # which leaves no two ops to run at once
                ideal = body_ns / context.cores
                context.report.add_ratio(what, ours, "ns/op", "work / cores", [ideal] * len(ours),
                                         1.35 if pattern == "fanout" else most[body_ns])
            context.report.add_ratio(what, ours, "ns/op", best, theirs, 1, below=True, peers=peers)


def run_push(context):
    """The Push call alone, and what it allocates."""
    command = _bench(context, "push-call") + _run_sizes(context)
    runs = [run_json(command) for _ in range(context.reps)]
    report = context.report
    report.add_limit("Push call, deep queue, 1 variable", [r["one_var_ns"] for r in runs], "ns", 40)
    report.add_limit("Push call, deep queue, 3 variables", [r["three_vars_ns"] for r in runs], "ns", 60)
    allocations = [r["allocations_per_1000_ops"] for r in runs]
    report.add("heap allocations, closures up to 64 bytes", max(allocations), "per 1000 ops", "limit", 0,
               max(allocations), None, "none", max(allocations) == 0)


def run_wait(context):
    """Push one op and wait for it."""
    ops = "20000" if context.quick else "200000"
    runs = [run_json(_bench(context, "push-wait") + ["--ops", ops]) for _ in range(context.reps)]
    report = context.report
    report.add_limit("push + wait, back to back, median", [r["back_to_back_p50_ns"] for r in runs], "ns",
                     150)
    report.add_limit("push + wait, back to back, p99", [r["back_to_back_p99_ns"] for r in runs], "ns",
                     1000)
    report.add_limit("push + wait after 200 us of quiet, median", [r["quiet_p50_ns"] for r in runs], "ns",
                     1000)
    report.add_limit("push + wait for all, back to back, median", [r["for_all_p50_ns"] for r in runs], "ns", 300)


def run_wake(context):
    """Push onto a sleeping engine, nobody waiting."""
    ops = "20000" if context.quick else "200000"
    runs = [run_json(_bench(context, "wake") + ["--ops", ops]) for _ in range(context.reps)]
    for pusher, start_us in [("sleeping", 75), ("computing", 200)]:
        calls, starts, bare = ([r[f"{pusher}_{what}_ns"] / 1000 for r in runs]
                               for what in ("call", "start", "bare"))
        ratios = [a / b for a, b in zip(calls, bare)]
        context.report.add(f"Push onto a sleeping engine, pusher then {pusher}: the call", median(calls), "us",
                           "waking a plain thread", median(bare), median(ratios), [min(ratios), max(ratios)],
                           "<= 20 us", median(calls) <= 20)
        context.report.add_limit(f"Push onto a sleeping engine, pusher then {pusher}: the op starts",
                                 starts, "us", start_us)
    context.report.add_limit("Push 300 us after the engine had work, pusher then computing: the op starts",
                             [r["after_work_start_ns"] / 1000 for r in runs], "us", 200)


def _run_tracing_off(context):
    if not context.may_build:
        context.report.add_missing("heddle built with HEDDLE_NO_TRACING (not with --build-dir)")
        return
    build.build_untraced("bench_engine")
    # Two nanoseconds are far less than what a run varies by: many short runs, the least of each start, and
    # the median of the differences.
    flags = ["--pattern", "chain", "--workers", str(WORKERS), "--runs", "9"]
    values = interleave({"with": _bench(context, "patterns"),
                         "without": _bench(context, "patterns", build.UNTRACED_DIR)},
                        5 * context.reps, lambda command: min(run_json(command + flags)["runs"]))
    pairs = list(zip(values["with"], values["without"]))
    costs = [a - b for a, b in pairs]
    ratios = [a / b for a, b in pairs]
    context.report.add("tracing compiled in but off, chain", median(values["with"]), "ns/op",
                       "built without", median(values["without"]), median(ratios),
                       [min(ratios), max(ratios)], f"<= 2 ns more (is {median(costs):.1f})",
                       median(costs) <= 2, costs_ns=costs)


def run_tracing(context):
    """What tracing costs: compiled in but off, and on."""
    _run_tracing_off(context)
    with tempfile.TemporaryDirectory() as folder:
        traced = {"HEDDLE_TRACE": os.path.join(folder, "trace")}
        for body_ns, most in [(10_000, 1.05), (1_000, 1.25)]:
            flags = ["--pattern", "random", "--body-ns", str(body_ns), "--workers", str(context.cores)]
            command = _bench(context, "patterns") + flags + _run_sizes(context, body_ns)
            values = interleave({"on": traced, "off": {}}, context.reps,
                                lambda environment, command=command: median(
                                    run_json(command, environment)["runs"]))
            context.report.add_ratio(f"tracing on, {body_ns // 1000} us ops, random", values["on"],
                                     "ns/op", "tracing off", values["off"], most)


def run_metg(context):
    """The shortest op with which the stencil is half efficient."""
    programs = {"heddle": _bench(context, "patterns"), **_peers(context)}
    flags = ["--metg", "--workers", str(WORKERS)]
    reps = 1 if context.quick else context.reps
    values = interleave(programs, reps, lambda command: run_json(command + flags)["metg_ns"])
    ours, best, theirs, peers = _best(values)
    context.report.add_ratio("smallest op with 50% efficiency, stencil", ours, "ns", best, theirs, 0.5,
                             peers=peers)


def run_pushers(context):
    """More than one source of ops."""
    command = _bench(context, "pushers") + ["--workers", str(WORKERS)] + _run_sizes(context)
    runs = [run_json(command) for _ in range(context.reps)]
    for field, what, one in [("two_ns", "2 pushing threads, random", "one_ns"),
                             ("four_ns", "4 pushing threads, random", "one_ns"),
                             ("inside_ns", "pushes from inside ops, random", "one_ns"),
                             ("async_ns", "async ops completed by another thread, random", "one_ns"),
                             ("async_independent_ns", "async ops completed by another thread, independent",
                              "one_independent_ns")]:
        context.report.add_ratio(what, [r[field] for r in runs], "ns/op", "one pusher", [r[one] for r in runs], 2)


def run_footprint(context):
    """Memory of pending ops and CPU time of an idle engine."""
    memory = [run_json(_bench(context, "memory"))["bytes_per_op"] for _ in range(context.reps)]
    context.report.add_limit("memory per pending op, 3 variables", memory, "bytes", 160)
    watch_ms = 1_000 if context.quick else 10_000
    idle = run_json(_bench(context, "idle") + ["--budget-ms", str(watch_ms)])
    context.report.add_limit(f"CPU time of an idle process in {watch_ms // 1000} s", [idle["cpu_ms"]],
                             "ms", 50 * watch_ms / 10_000)


SECTIONS = {
    "empty": run_empty,
    "bodies": run_bodies,
    "push": run_push,
    "wait": run_wait,
    "wake": run_wake,
    "tracing": run_tracing,
    "metg": run_metg,
    "pushers": run_pushers,
    "footprint": run_footprint,
}
