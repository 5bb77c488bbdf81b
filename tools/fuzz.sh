#!/usr/bin/env bash
# Gives everything that reads bytes of peers (headers, bodies, the handshake, streams) bytes that no
# peer should send, with libFuzzer, for as long as is asked.
#
#   tools/fuzz.sh [seconds] [libFuzzer option...]     3600 seconds unless said
#
# Needs Clang (tools/setup.sh checks). What is found is kept between runs in build/clang/fuzz-corpus; an
# input that fails stays in build/clang as crash-*, and is run again by
#   build/clang/tests/fuzz/wire_fuzz build/clang/crash-...
set -euo pipefail
cd "$(dirname "$0")/.."

seconds="${1:-3600}"
shift || true
if [[ ! "$seconds" =~ ^[1-9][0-9]*$ ]]; then
  echo "fuzz: expected a number of seconds, given '$seconds'" >&2
  exit 2
fi
cmake --preset clang
cmake --build --preset clang --target wire_fuzz wire_mutations
corpus="$PWD/build/clang/fuzz-corpus"
build/clang/tests/fuzz/wire_mutations --corpus "$corpus"
exec build/clang/tests/fuzz/wire_fuzz -max_total_time="$seconds" -max_len=65536 -timeout=20 \
  -rss_limit_mb=1024 -print_final_stats=1 -artifact_prefix="$PWD/build/clang/" "$@" "$corpus"
