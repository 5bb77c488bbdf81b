#!/usr/bin/env python3
"""What tools/bundle.sh makes runs elsewhere: moved, with an empty environment, with its own libraries.

usage: bundle.py <repository root> <build folder> <work folder>
"""

import glob
import pathlib
import re
import shutil
import subprocess
import sys

# What the machine has to have: the C library.
SYSTEM = re.compile(r"(linux-vdso|ld-linux.*|libc|libm|libdl|librt|libpthread|libresolv|libutil)\.so")
EMPTY = {"PATH": "/usr/bin:/bin"}


def check(holds, what):
    if not holds:
        sys.exit(f"bundle.py: {what}")


def run(*command):
    done = subprocess.run([str(word) for word in command], env=EMPTY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, check=False)
    print(f"$ {' '.join(map(str, command))}\n{done.stdout}")
    return done.returncode, done.stdout


def main(root, build, work):
    work = pathlib.Path(work).resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    subprocess.run([f"{root}/tools/bundle.sh", "--build-dir", build, work / "made"], check=True)
    moved = work / "moved"
    (work / "made").rename(moved)

    programs = [path for folder in ("bin", "tests") for path in sorted((moved / folder).iterdir())]
    check(moved / "bin" / "heddle" in programs, "expected bin/heddle in the bundle")
    for program in programs:
        status, listing = run("ldd", program)
        check(status == 0 and "not found" not in listing, f"{program.name} lacks libraries")
        for name, file in re.findall(r"(\S+) => (\S+)", listing):
            check(SYSTEM.match(name) or str(moved) in str(pathlib.Path(file).resolve()),
                  f"{program.name} takes {name} from {file}, expected the bundle")

    cache = (pathlib.Path(build) / "CMakeCache.txt").read_text(encoding="utf-8")
    if re.search(r"^HEDDLE_CUPTI_LIBRARY:FILEPATH=/", cache, re.MULTILINE):
        check(list((moved / "lib").glob("libcupti.so.*")), "expected CUPTI in the bundle")

    status, version = run(moved / "bin" / "heddle", "--version")
    check(status == 0, f"heddle --version ended with status {status}: {version}")
    status, _ = run(moved / "gpu.sh", "dance")
    check(status == 2, f"expected status 2 for an unknown step, got {status}")
    if not glob.glob("/dev/nvidia[0-9]*"):
        for steps in ([], ["memcheck", "racecheck"]):
            status, output = run(moved / "gpu.sh", *steps)
            check(status == 0 and "no device found: " in output, f"gpu.sh without a device: {status}, {output}")
    shutil.rmtree(work)


main(*sys.argv[1:])
