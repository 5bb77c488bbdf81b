#!/usr/bin/env python3
"""Checks the #include lines of the library against the order of its layers.

usage: check_includes.py <repository root>

Prints one line for each offence and exits with status 1 if there is any. The rules:
  - a folder includes only itself and the folders that LAYERS lists for it;
  - public headers are included as <heddle/x.h>, and include only each other and libraries of C++;
  - nothing includes upwards with "../", and "internal/" headers are included only by their own folder;
  - headers start their code with #pragma once; not Highway's *-inl.h, which are read once per
    instruction set.
"""

import pathlib
import re
import sys

# What each folder of the library may include, besides itself and the public headers.
LAYERS = {
    "base": set(),
    "engine": {"base"},
    "ops": {"base"},
    "storage": {"base", "engine", "ops"},
    "kvstore": {"base", "engine", "ops", "storage"},
    "c_api": {"base", "engine", "ops", "storage", "kvstore"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
STANDARD_HEADER = re.compile(r"^[a-z0-9_]+$")  # <vector>; <fmt/format.h> is not
C_HEADERS = {"stddef.h", "stdint.h"}  # for heddle/c_api.h, which C reads too


def includes_of(path):
    """Yields (line number, bracket, name) of each #include of a file."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1), match.group(2)


def first_code_line(path):
    """The first line that is neither blank nor a // comment."""
    for line in path.read_text().splitlines():
        if line.strip() and not line.lstrip().startswith("//"):
            return line.strip()
    return ""


def check_public(bracket, name):
    if bracket == "<" and (
        name.startswith("heddle/") or STANDARD_HEADER.match(name) or name in C_HEADERS
    ):
        return None
    return "a public header includes only <heddle/...> and the standard library"


def check_layer(folder, bracket, name):
    top = name.split("/")[0]
    if name.startswith("../") or name.startswith("./"):
        return "includes start at the root"
    if top == "heddle":
        return None if bracket == "<" else "public headers are included as <heddle/...>"
    if bracket == "<":
        if top in LAYERS and "/" in name:
            return 'our own headers are included with quotes'
        return None
    if top not in LAYERS:
        return "no folder of the library, or not named from the root"
    if top != folder and top not in LAYERS[folder]:
        allowed = ", ".join(sorted(LAYERS[folder])) or "only itself"
        return f"{folder}/ may include {allowed}"
    if top != folder and "internal" in name.split("/"):
        return f"internal to {top}/"
    return None


def check_tree(root):
    """All offences, as lines `path:line: #include <name>: why`."""
    offences = []
    for folder in ["include", *LAYERS]:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".h", ".cc", ".cu", ".in"):
                continue
            where = path.relative_to(root)
            guarded = ".h" in path.suffixes and not path.name.endswith("-inl.h")
            if guarded and first_code_line(path) != "#pragma once":
                offences.append(f"{where}:1: a header starts with #pragma once")
            for number, bracket, name in includes_of(path):
                if folder == "include":
                    why = check_public(bracket, name)
                else:
                    why = check_layer(folder, bracket, name)
                if why:
                    offences.append(f"{where}:{number}: #include {name}: {why}")
    return offences


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    root = pathlib.Path(sys.argv[1])
    if not (root / "include/heddle/engine.h").is_file():
        sys.exit(f"{root}: expected heddle's root directory")
    offences = check_tree(root)
    for offence in offences:
        print(offence)
    sys.exit(1 if offences else 0)


if __name__ == "__main__":
    main()
