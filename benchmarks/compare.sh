#!/usr/bin/env bash
# Builds the benchmarks (release preset), runs heddle, its peers and the machine's limits side by side, and
# prints one line a bar: what, ours, the peer or limit it is held against, the bar, `holds` or `falls short`.
#
#   benchmarks/compare.sh [group[:section]...] [--json FILE] [--quick] [--build-dir DIR]
#
# Exit status: 0 if every bar holds, 1 if one falls short (with --quick never), 2 if something could not be built or run.
# `benchmarks/compare.sh --help` lists the groups; docs/performance.md says how to read the lines.
set -euo pipefail
export PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONDONTWRITEBYTECODE=1
exec python3 -m compare "$@"
