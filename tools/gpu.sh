#!/usr/bin/env bash
# Runs what needs a GPU, and prints a line for each program and each bar.
#
#   tools/gpu.sh [step...]      in a source tree: what build/cuda has, or the folder that BUILD names
#   ./gpu.sh [step...]          in a bundle (tools/bundle.sh): what it has
#
#   tests        the tests labelled gpu (the default, with `benchmarks`)
#   benchmarks   bench_gpu: the kernels against the device's own copies; QUICK=1: a smoke test
#   memcheck     the tests under compute-sanitizer, for accesses out of bounds
#   racecheck    the same for races in shared memory
#
# Ends with status 1 if something failed, heddle itself too, or a bar falls short. Without a GPU it says so, runs
# nothing and ends with status 0; so do memcheck and racecheck without compute-sanitizer, which comes with CUDA.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

steps=("${@:-}")
[[ -n "${steps[0]}" ]] || steps=(tests benchmarks)
for step in "${steps[@]}"; do
  case "$step" in
    tests | benchmarks | memcheck | racecheck) ;;
    *)
      echo "gpu: expected the steps tests, benchmarks, memcheck or racecheck, given '$step'" >&2
      exit 2
      ;;
  esac
done

# Where the programs are.
tests=()
if [[ -x "$here/bin/heddle" ]]; then
  heddle="$here/bin/heddle"
  bench="$here/bin/bench_gpu"
  for program in "$here"/tests/*; do
    [[ -x "$program" ]] && tests+=("$program")
  done
else
  build="${BUILD:-$here/../build/cuda}"
  heddle="$build/tools/heddle/heddle"
  bench="$build/benchmarks/gpu/bench_gpu"
  if [[ ! -x "$heddle" ]]; then
    echo "gpu: there is no $heddle: cmake --preset cuda && cmake --build --preset cuda" >&2
    exit 2
  fi
  if [[ -e "$build/gpu_tests.txt" ]]; then mapfile -t tests <"$build/gpu_tests.txt"; fi
fi

# Of a program that does not run the doctor says nothing, which is not "none".
if ! said="$("$heddle" --version 2>&1)"; then
  echo "gpu: $heddle does not run here: $said" >&2
  exit 1
fi

# What the doctor says of GPUs: "gpu(0)  ..." or "none  why".
gpus="$("$heddle" doctor 2>/dev/null | sed -n '/^GPUs$/,/^[^ ]/p' | grep -E '^  (gpu\(|none)' || true)"
if ! grep -q '^  gpu(' <<<"$gpus"; then
  echo "gpu: no device found: $(sed -E 's/^ *none *//' <<<"$gpus")"
  exit 0
fi
echo "$gpus"

failed=0
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

line() { printf '%-10s %-28s %-8s %s\n' "$@"; }

# run_tests <step> [command in front...]: each program, its status and GoogleTest's last word.
run_tests() {
  local step="$1" program status
  shift
  for program in "${tests[@]}"; do
    status=passed
    "$@" "$program" >"$log" 2>&1 || status=FAILED
    if [[ $status == FAILED ]]; then
      failed=1
      cat "$log"
    fi
    line "$step" "$(basename "$program")" "$status" \
      "$(grep -E '^\[  (PASSED|SKIPPED) \]|ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tr -s '\n= ' ' ' || true)"
  done
}

for step in "${steps[@]}"; do
  case "$step" in
    tests) run_tests tests env ;;
    memcheck | racecheck)
      sanitizer="$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)"
      if [[ -z "$sanitizer" ]]; then
        line "$step" "-" skipped "no compute-sanitizer, neither on the PATH nor in /usr/local/cuda/bin"
      else
        options=()
        # Calls that fail are what some tests are about.
        [[ $step == racecheck ]] || options=(--report-api-errors no)
        # What is about errors that it would report, or needs what it has for itself, skips.
        HEDDLE_TEST_COMPUTE_SANITIZER=1 run_tests "$step" "$sanitizer" --tool "$step" --error-exitcode 9 "${options[@]}"
      fi
      ;;
    benchmarks)
      if [[ ! -x "$bench" ]]; then
        line benchmarks bench_gpu skipped "not built"
        continue
      fi
      status=passed
      "$bench" ${QUICK:+--quick} || status="SHORT"
      [[ $status == passed ]] || failed=1
      line benchmarks bench_gpu "$status" ""
      ;;
  esac
done
exit "$failed"
