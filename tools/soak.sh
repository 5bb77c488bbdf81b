#!/usr/bin/env bash
# The long form of the randomised tests: new seeds until the time is up.
#
#   tools/soak.sh [-t seconds] [-p preset] [-s suite] [gtest filter]
#
# -t   how long (default 600)          -p   dev, release, asan or tsan (default dev)
# -s   engine (default); dist: schedules of faults over the simulated network, 10 000 a run; faults:
#      real processes that are killed and stopped, and a worker that is busy for a minute; memory: one
#      run that is as long as is asked (1800 for half an hour), in which no role may grow by 1 %;
#      hostile: 100 000 connections that mean harm to each role that listens, while a job runs
# The filter defaults to the suite's randomised tests; '*' soaks all of it. Stops at the first
# failure and prints the command that repeats it. Last line: "soak: <runs> runs, <seconds> s, no failure".
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=600
preset=dev
suite=engine
while getopts "t:p:s:" option; do
  case "$option" in
    t) seconds="$OPTARG" ;;
    p) preset="$OPTARG" ;;
    s) suite="$OPTARG" ;;
    *) sed -n '2,13p' "$0" >&2; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
if [[ ! "$seconds" =~ ^[1-9][0-9]*$ ]]; then
  echo "soak: -t: expected a number of seconds, given '$seconds'" >&2
  exit 2
fi
case "$suite" in
  engine) target=engine_test
          program=tests/engine/engine_test
          filter='*RandomProgram*:*ErrorGraph*:*OppositeListOrders*:*WasSignalled*:*RunByPriority*' ;;
  dist)   target=dist_schedule_test
          program=tests/kvstore/dist/dist_schedule_test
          filter='*WorkersSeeWhatTheModelSays/0' ;;
  faults) target=tools_job_test
          program=tests/tools/tools_job_test
          filter='*JobFaults*'
          export HEDDLE_BUSY_SECONDS=60 ;;
  memory) target=tools_job_test
          program=tests/tools/tools_job_test
          filter='JobSoak*'
          export HEDDLE_SOAK_SECONDS="$seconds" ;;
  hostile)
          target=tools_job_test
          program=tests/tools/tools_job_test
          filter='JobHostile*'
          export HEDDLE_HOSTILE_CONNECTIONS=100000 ;;
  *) sed -n '2,13p' "$0" >&2; exit 2 ;;
esac
filter="${1:-$filter}"

cmake --preset "$preset" > /dev/null
cmake --build --preset "$preset" --target "$target"

# As ctest sets them: HEDDLE_TEST_ENVIRONMENT in cmake/HeddleOptions.cmake.
settings=()
case "$preset" in
  tsan) settings=("TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1") ;;
  asan) settings=("ASAN_OPTIONS=detect_stack_use_after_return=1" "UBSAN_OPTIONS=print_stacktrace=1") ;;
esac

# GoogleTest calls it a success when there is nothing to run.
if ! env "${settings[@]}" "build/$preset/$program" --gtest_list_tests "--gtest_filter=$filter" |
  grep '^  ' >/dev/null; then
  echo "soak: no test of $target matches '$filter'" >&2
  exit 2
fi

runs=0
start=$SECONDS
while ((SECONDS - start < seconds)); do
  seed=$((RANDOM * 32768 + RANDOM))
  run=(env "${settings[@]}" "HEDDLE_TEST_SEED=$seed" "HEDDLE_TEST_ROUNDS=3"
       "build/$preset/$program" --gtest_brief=1 "--gtest_filter=$filter")
  if ! "${run[@]}"; then
    echo "soak: failed; repeat with: ${run[*]}"
    exit 1
  fi
  runs=$((runs + 1))
done
echo "soak: $runs runs, $((SECONDS - start)) s, no failure"
