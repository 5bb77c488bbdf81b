#!/usr/bin/env bash
# Installs what is missing, builds all but the benchmarks (preset dev) and runs all tests.
#
#   tools/test.sh [ctest option...]     for example: tools/test.sh -L engine
#
# The last line is ctest's: "Total Test time (real) = ..."; the exit status is 0 if all passed.
set -euo pipefail
cd "$(dirname "$0")/.."

jobs="$(nproc)"
tools/setup.sh
cmake --preset dev
cmake --build --preset dev --parallel "$jobs"
# Three times as many: many tests wait for a deadline, or for another process.
ctest --preset dev --parallel "$((3 * jobs))" "$@"
