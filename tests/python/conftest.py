"""What the Python tests share. They find the package through PYTHONPATH."""

import os
import random
import subprocess
import sys

import numpy
import pytest

import heddle as mx


@pytest.fixture(autouse=True)
def nothing_left_pending():
    """What one test leaves behind, errors too, is not another's."""
    yield
    for _ in range(100):
        try:
            mx.nd.waitall()
            return
        except Exception:  # noqa: BLE001  of the test
            pass
    raise AssertionError("more errors than a test makes")


@pytest.fixture
def seed():
    """A seed that is new in each run, unless HEDDLE_TEST_SEED sets it; pytest shows it when a test fails."""
    chosen = int(os.environ.get("HEDDLE_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"HEDDLE_TEST_SEED={chosen}")
    return chosen


@pytest.fixture
def old_printing():
    """NumPy prints as it did when the pages were published."""
    with numpy.printoptions(legacy="1.13"):
        yield


@pytest.fixture
def run_python():
    """Runs a program in a fresh interpreter: run_python(text, **environment) -> CompletedProcess."""

    def run(text, *arguments, timeout=600, **environment):
        # From 3.12 on Python warns of every fork in a process with threads, which is what some programs are about.
        quiet = {"PYTHONWARNINGS": "ignore::DeprecationWarning"}
        return subprocess.run([sys.executable, "-c", text, *arguments], capture_output=True, text=True,
                              timeout=timeout, env={**os.environ, **quiet, **environment})

    return run
