#!/usr/bin/env python3
"""Checks what heddle/c_api.h promises against the library.

usage: check_exports.py <repository root> <shared library> <nm>

  - every function that the header declares is exported by the shared library, with C linkage;
  - every function named Heddle... that the library exports with C linkage is declared;
  - every type of heddle/error.h has a status.
"""

import pathlib
import re
import subprocess
import sys


def main(root, library, nm):
    header = (root / "include/heddle/c_api.h").read_text()
    code = re.sub(r"//.*", "", header)
    declared = set(re.findall(r"HEDDLE_API[^;(]*?\b(Heddle\w+)\(", code))
    symbols = subprocess.run([nm, "-D", "--defined-only", library], check=True,
                             capture_output=True, text=True).stdout
    exported = set(re.findall(r" T (Heddle\w+)$", symbols, re.MULTILINE))
    offences = [f"{name} is declared but not exported" for name in sorted(declared - exported)]
    offences += [f"{name} is exported but not declared" for name in sorted(exported - declared)]

    errors = set(re.findall(r"class (\w+) : public", (root / "include/heddle/error.h").read_text()))
    with_status = set(re.findall(r"Typed<(\w+)>\(", (root / "c_api/status.cc").read_text()))
    for name in sorted(errors - with_status - {"Error"}):
        offences.append(f"{name} has no status in c_api/status.cc")

    if len(declared) < 60 or len(errors) < 8:
        offences.append(f"found only {len(declared)} functions and {len(errors)} errors to check")
    print("\n".join(offences))
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), *sys.argv[2:]))
