"""The `heddle` command, which comes with the package: `heddle launch`, `run`, `scheduler`, `server`, `status`, `trace`,
`wire-dump`, `bench`, `doctor`.

Also `python -m heddle`. `heddle server --module NAME` is `python -m heddle.server --module NAME`.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Becomes the command, with the arguments of this process."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["server"] and any(argument.split("=")[0] == "--module" for argument in arguments):
        os.environ["HEDDLE_ROLE"] = "server"  # the role is the command, as it is without a module
        os.execv(sys.executable, [sys.executable, "-m", "heddle.server", *arguments[1:]])
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "heddle")
    if not os.path.exists(program):
        sys.exit("heddle: this package was built without the command (HEDDLE_BUILD_TOOLS)")
    os.execv(program, ["heddle", *arguments])


if __name__ == "__main__":
    main()
