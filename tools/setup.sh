#!/usr/bin/env bash
# Installs what heddle is built with, from Debian's packages, by name. Nothing is installed twice.
#
#   tools/setup.sh [group...]     groups: build (the default), checks, benchmarks
#
#   build        compiler, CMake and the libraries: enough to build, test, and run every program
#   checks       Clang with its sanitizers, clang-format and clang-tidy
#   benchmarks   the engines that the benchmarks compare with
#
# Works on Debian 12 as root, or as a user with sudo; needs no answers.
set -euo pipefail

build_packages=(
  g++ cmake ninja-build ccache python3
  libtbb-dev libhwy-dev libfmt-dev libspdlog-dev nlohmann-json3-dev libcli11-dev
  libboost1.81-dev libssl-dev libxxhash-dev
  libgtest-dev libgmock-dev librapidcheck-dev libbenchmark-dev
  gnuplot-nox  # heddle bench --plot
)
checks_packages=(clang libclang-rt-14-dev llvm clang-format clang-tidy)
benchmarks_packages=(clang libomp-dev libstarpu-dev)

wanted=()
for group in "${@:-build}"; do
  case "$group" in
    build) wanted+=("${build_packages[@]}") ;;
    checks) wanted+=("${checks_packages[@]}") ;;
    benchmarks) wanted+=("${benchmarks_packages[@]}") ;;
    *)
      echo "setup: expected the groups build, checks or benchmarks, given '$group'" >&2
      exit 2
      ;;
  esac
done

is_installed() {
  [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

if ! command -v dpkg-query >/dev/null; then
  echo "setup: this is not Debian; heddle needs what these packages hold: ${wanted[*]}" >&2
  exit 1
fi

missing=()
for package in "${wanted[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "setup: nothing to install, all ${#wanted[@]} packages are there"
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "setup: not root and no sudo; as root, run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
"${as_root[@]}" apt-get update -q </dev/null
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -q --no-install-recommends "${missing[@]}" </dev/null
echo "setup: installed ${#missing[@]} packages"
