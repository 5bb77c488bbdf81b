#!/usr/bin/env python3
"""The program in docs/c_api.md.

usage: doc_program.py extract <document> <file>    writes the ```c blocks, one after another
       doc_program.py run <document> <program>     runs it, and compares with the ```text block,
                                                   in which ... stands for any text
"""

import pathlib
import re
import subprocess
import sys


def blocks(document, language):
    """The blocks of a language, each with the number of its first line."""
    text = pathlib.Path(document).read_text()
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start()) + 2, match.group(1)


def main(command, document, path):
    if command == "extract":
        source = "".join(f'#line {line} "{document}"\n{code}' for line, code in blocks(document, "c"))
        pathlib.Path(path).write_text(source)
        return 0
    [(_, expected)] = blocks(document, "text")
    pattern = ".*".join(re.escape(part) for part in expected.split("..."))
    given = subprocess.run([path], check=True, capture_output=True, text=True).stdout
    if re.fullmatch(pattern, given):
        return 0
    print(f"expected\n{expected}\ngiven\n{given}")
    return 1


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
