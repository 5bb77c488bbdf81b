#!/usr/bin/env python3
"""Checks that docs/embedding.md shows the code of examples/embed, and that this prints what it should.

usage: check_embedding_doc.py <repository root> <embed program>
"""

import pathlib
import re
import subprocess
import sys

BLOCK = re.compile(r"^```cpp\n(.*?)^```", re.M | re.S)
PRINTED = ["product 250250.0", "save failed: no such folder", "sent 250250.0"]  # in some order


def bare(code):
    """Without comments and white space."""
    return re.sub(r"\s", "", re.sub(r"//.*", "", code))


def main(root, program):
    page = (root / "docs" / "embedding.md").read_text()
    source = bare((root / "examples" / "embed" / "embed.cc").read_text())
    # "..." stands for what the page leaves out.
    lines = [line for block in BLOCK.findall(page) for line in block.splitlines() if bare(line.split("...")[0])]
    strange = [line for line in lines if bare(line.split("...")[0]) not in source]
    for line in strange:
        print(f"docs/embedding.md shows what examples/embed/embed.cc does not have: {line}")
    if len(lines) < 10:
        print(f"docs/embedding.md: expected a walk through the example, found {len(lines)} lines of code")
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    printed = sorted(done.stdout.splitlines())
    if done.returncode != 0 or printed != PRINTED:
        print(f"{program}: expected status 0 and {PRINTED}, got {done.returncode} and {printed}")
    return 1 if strange or len(lines) < 10 or done.returncode != 0 or printed != PRINTED else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2]))
