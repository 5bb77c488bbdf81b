"""Builds what the groups need."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RELEASE_DIR = str(ROOT / "build" / "release")
CUDA_DIR = str(ROOT / "build" / "release-cuda")
UNTRACED_DIR = str(ROOT / "build" / "release-untraced")


class BuildError(Exception):
    """Something could not be built."""


def _call(*command):
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)
    except OSError as error:
        raise BuildError(f"failed: {' '.join(command)}: {error}") from error
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        raise BuildError(f"failed: {' '.join(command)}")
    return done.stdout


def build_release(targets):
    """Configures and builds the targets, if there are any, with the release preset."""
    if not targets:
        return
    _call("cmake", "--preset", "release", "-DHEDDLE_BUILD_BENCHMARKS=ON")
    _call("cmake", "--build", "--preset", "release", "--target", *targets)


def build_untraced(target):
    """Builds a target without the code that records traces."""
    _call("cmake", "--preset", "release", "-B", UNTRACED_DIR, "-DCMAKE_CXX_FLAGS=-DHEDDLE_NO_TRACING")
    _call("cmake", "--build", UNTRACED_DIR, "--target", target)


def build_cuda(target):
    """Builds a target with CUDA; returns where."""
    _call("cmake", "--preset", "release", "-B", CUDA_DIR, "-DWITH_CUDA=ON")
    _call("cmake", "--build", CUDA_DIR, "--target", target)
    return CUDA_DIR
