#!/usr/bin/env python3
"""Checks that tests, benchmarks and tools make temporary files only in a TempFolder, which takes them with it.

usage: check_temp_files.py <repository root>

Prints one line for each other way and exits with status 1 if there is any.
"""

import pathlib
import re
import sys

FOLDERS = ("tests", "benchmarks", "tools", "examples")
HELPER = "tools/testing/temp_folder.h"
OTHER_WAYS = re.compile(r"\b(mkdtemp|mkstemp|tmpfile|tmpnam|tempnam|TempDir|temp_directory_path)\b")


def check_tree(root):
    offences = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix not in (".h", ".cc", ".cu") or name == HELPER:
                continue
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                if found := OTHER_WAYS.search(line):
                    offences.append(f"{name}:{number}: {found.group(1)}: expected a TempFolder ({HELPER})")
    return offences


if __name__ == "__main__":
    all_offences = check_tree(pathlib.Path(sys.argv[1]))
    print("\n".join(all_offences))
    sys.exit(1 if all_offences else 0)
