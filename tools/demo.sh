#!/usr/bin/env bash
# Installs what is missing, builds (preset release) and trains a small network on handwritten digits, on four
# logical devices, through the stores `local` and `device`; before that, compares optimizers and compressed
# gradients, and draws their losses into build/release/digits-losses.png. Then the same training in a job of
# processes, three workers and two servers, through `dist_sync`, whose weights must equal those of one process bit
# for bit, and `dist_async`. Safe to repeat.
#
#   tools/demo.sh [option of the training...]     for example: tools/demo.sh --epochs 10 --at-least 0.9
#
# Shows progress while it trains; ends each store with "<store>: test accuracy 0.9xx". Fails if that is below 0.96,
# of `dist_async` below 0.94, or if there is no picture.
set -euo pipefail
cd "$(dirname "$0")/.."

tools/setup.sh build
cmake --preset release
cmake --build --preset release --parallel "$(nproc)" --target digits heddle_command
build/release/examples/digits/digits --store local,device --at-least 0.96 \
  --compare "$PWD/build/release/digits-losses.png" "$@"

job=(build/release/tools/heddle/heddle launch -n 3 -s 2 -- build/release/examples/digits/digits
     --devices 1 --batch 63)
log=build/release/digits-job.log
"${job[@]}" --store dist_sync --equals local --at-least 0.96 "$@" | tee "$log"
"${job[@]}" --store dist_async --at-least 0.94 "$@" | tee -a "$log"
sed -n 's/^\[worker 0\] \(dist_a*sync: test accuracy .*\)/\1/p' "$log"
