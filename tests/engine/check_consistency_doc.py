#!/usr/bin/env python3
"""Checks that every test that docs/consistency.md names exists.

usage: check_consistency_doc.py <repository root>
"""

import pathlib
import re
import sys

NAMED = re.compile(r"`([A-Z]\w+)\.([A-Z]\w+)`")
DEFINED = re.compile(r"\bTEST(?:_P|_F)?\(\s*(\w+),\s*(\w+)\s*\)")


def main(root):
    defined = set()
    for source in (root / "tests").rglob("*.cc"):
        defined.update(".".join(test) for test in DEFINED.findall(source.read_text()))
    text = (root / "docs" / "consistency.md").read_text()
    named = {".".join(test) for test in NAMED.findall(text)}
    missing = sorted(named - defined)
    for name in missing:
        print(f"docs/consistency.md names {name}, which is no test")
    if not named:
        print("docs/consistency.md names no test at all")
    return 1 if missing or not named else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
