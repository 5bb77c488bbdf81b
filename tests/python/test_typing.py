"""The types that the package declares, its stubs for the extension among them, are right by a type checker."""

import pathlib
import re
import subprocess
import sys

import pytest

import heddle as mx

HERE = pathlib.Path(__file__).parent
PACKAGE = pathlib.Path(mx.__file__).parent


def test_a_type_checker_agrees_with_package_stubs_and_example(tmp_path):
    """A `type: ignore` in the example stands where an error is expected; one too many is an error."""
    pytest.importorskip("mypy", reason="needs mypy: tools/setup.sh installs it")
    (tmp_path / "heddle").symlink_to(PACKAGE)  # mypy takes no source from among the installed packages
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(HERE / "mypy.ini"), "--cache-dir", str(tmp_path / "cache"),
         "heddle", str(HERE / "typed_example.py")],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={"MYPYPATH": str(tmp_path)})
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_stubs_name_what_the_extension_has():
    text = (PACKAGE / "_core.pyi").read_text()
    declared = set(re.findall(r"^(?:def|class) (\w+)", text, re.M))
    assert declared == {name for name in vars(mx._core) if not name.startswith("__")}
    assert (PACKAGE / "py.typed").exists()
