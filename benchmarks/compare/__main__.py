"""The command line of benchmarks/compare.sh."""

import argparse
import json
import os
import platform
import subprocess
import sys
import traceback

from compare import build, dist, engine, gpu, host, kernels, local, python
from compare.bars import Report

# A group is a module with TARGETS (what to build), SECTIONS ({name: function(context)}) and, optionally,
# missing(context) (the peers that are not there). Each section adds its bars to context.report.
GROUPS = {"engine": engine, "local": local, "kernels": kernels, "python": python, "dist": dist,
          "host": host, "gpu": gpu}


class Context:
    """What sections need: where the programs are, how much to run, and where bars go."""

    def __init__(self, build_dir, quick, may_build, report):
        self.build_dir = build_dir
        self.quick = quick
        self.may_build = may_build
        self.report = report
        self.cores = len(os.sched_getaffinity(0))
        self.reps = 2 if quick else 5


def parse_selection(words):
    """Turns ["engine", "local:sum"] into {group: [section...]}, all of it if empty. Raises RuntimeError."""
    selection = {}
    for word in words or GROUPS:
        group, _, section = word.partition(":")
        if group not in GROUPS:
            raise RuntimeError(f"unknown group {group!r}; known: {', '.join(GROUPS)}")
        known = GROUPS[group].SECTIONS
        if section and section not in known:
            raise RuntimeError(f"unknown section {word!r}; {group} has {', '.join(known)}")
        chosen = selection.setdefault(group, [])
        chosen += [s for s in ([section] if section else known) if s not in chosen]
    return selection


def check_writable(path):
    """Raises OSError if it is not, before time is spent on measuring. Leaves it as it was."""
    was_there = os.path.lexists(path)
    with open(path, "a", encoding="utf-8"):
        pass
    if not was_there:
        os.remove(path)


def write_json(path, context):
    report = context.report
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"machine": platform.machine(), "cores": context.cores, "quick": context.quick,
                   "missing": report.missing, "bars": report.bars, "measured": report.measured}, file, indent=1)
        file.write("\n")


def measure(selection, context):
    if context.may_build:
        build.build_release([t for group in selection for t in GROUPS[group].TARGETS])
    for name, chosen in selection.items():
        group = GROUPS[name]
        context.report.group = name
        for peer in getattr(group, "missing", lambda _: [])(context):
            context.report.add_missing(peer)
        for section in chosen:
            group.SECTIONS[section](context)


def run(arguments, context):
    selection = parse_selection(arguments.groups)
    if arguments.json:
        check_writable(arguments.json)
    try:
        measure(selection, context)
    finally:
        if arguments.json:
            write_json(arguments.json, context)


def main(words=None):
    """Returns the exit status; `words` instead of the command line's."""
    sections = "; ".join(f"{name}: {', '.join(group.SECTIONS)}" for name, group in GROUPS.items())
    parser = argparse.ArgumentParser(
        prog="benchmarks/compare.sh", description="Compares heddle with its peers and limits.",
        epilog=f"Groups and their sections: {sections}.")
    parser.add_argument("groups", nargs="*", metavar="group[:section]", help="default: all groups")
    parser.add_argument("--json", metavar="FILE", help="also write the bars there")
    parser.add_argument("--quick", action="store_true",
                        help="a smoke test: small and few runs; exit status 0 whatever the bars say")
    parser.add_argument("--build-dir", metavar="DIR", help="use what is built there; build nothing")
    arguments = parser.parse_args(words)

    report = Report()
    context = Context(arguments.build_dir or build.RELEASE_DIR, arguments.quick,
                      arguments.build_dir is None, report)
    try:
        run(arguments, context)
    except (build.BuildError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(f"compare.sh: {error}", file=sys.stderr)
        return 2
    except Exception:  # a mistake of ours; Python's own status for it would say that a bar falls short
        traceback.print_exc()
        return 2
    short = sum(not bar["holds"] for bar in report.bars)
    print(f"{len(report.bars)} bars, {short} fall short", flush=True)
    return 1 if short and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
