#!/usr/bin/env bash
# The long form of the randomised engine tests: new seeds until the time is up.
#
#   tools/soak.sh [-t seconds] [-p preset] [gtest filter]
#
# -t   how long (default 600)          -p   dev, release, asan or tsan (default dev)
# The filter defaults to the randomised tests; '*' soaks the whole engine suite. Stops at the first
# failure and prints the command that repeats it. Last line: "soak: <runs> runs, <seconds> s, no failure".
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=600
preset=dev
while getopts "t:p:" option; do
  case "$option" in
    t) seconds="$OPTARG" ;;
    p) preset="$OPTARG" ;;
    *) sed -n '2,9p' "$0" >&2; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
filter="${1:-*RandomProgram*:*ErrorGraph*:*OppositeListOrders*:*WasSignalled*:*RunByPriority*}"

cmake --preset "$preset" > /dev/null
cmake --build --preset "$preset" --target engine_test
if [[ "$preset" == tsan ]]; then export HEDDLE_WORKER_HOST=threads; fi

runs=0
start=$SECONDS
while ((SECONDS - start < seconds)); do
  seed=$((RANDOM * 32768 + RANDOM))
  run=(env "HEDDLE_TEST_SEED=$seed" "HEDDLE_TEST_ROUNDS=3"
       "build/$preset/tests/engine/engine_test" --gtest_brief=1 "--gtest_filter=$filter")
  if ! "${run[@]}"; then
    echo "soak: failed; repeat with: ${run[*]}"
    exit 1
  fi
  runs=$((runs + 1))
done
echo "soak: $runs runs, $((SECONDS - start)) s, no failure"
