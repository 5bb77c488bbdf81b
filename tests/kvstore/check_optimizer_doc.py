#!/usr/bin/env python3
"""Checks that docs/adding_an_optimizer.md shows the code of tests/kvstore/heavy_ball.cc, which a test compiles.

usage: check_optimizer_doc.py <repository root>
"""

import pathlib
import re
import sys

BLOCK = re.compile(r"^```cpp\n(.*?)^```", re.M | re.S)


def bare(code):
    """Without comments and white space."""
    return re.sub(r"\s", "", re.sub(r"//.*", "", code))


def main(root):
    page = (root / "docs" / "adding_an_optimizer.md").read_text()
    source = bare((root / "tests" / "kvstore" / "heavy_ball.cc").read_text())
    blocks = BLOCK.findall(page)
    strange = [block for block in blocks if bare(block) not in source]
    for block in strange:
        print(f"docs/adding_an_optimizer.md shows what tests/kvstore/heavy_ball.cc does not have:\n{block}")
    if len(blocks) < 3:
        print(f"docs/adding_an_optimizer.md: expected the formula, its kernel and the rule, found {len(blocks)} blocks")
    return 1 if strange or len(blocks) < 3 else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
