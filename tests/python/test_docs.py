"""The Python blocks of the documentation run as printed."""

import importlib
import inspect
import pathlib
import pkgutil
import re

import pytest

import heddle as mx
from blocks import check

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
         if "```python\n" in page.read_text()]


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def test_there_are_pages():
    assert ROOT / "docs" / "python.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_as_printed(page, tmp_path, monkeypatch):
    """In one interpreter a page, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    optimizers, stores = dict(mx.optimizer.Optimizer.opt_registry), dict(mx.kv.KVStoreBase.kv_registry)
    names = {"__name__": "__main__"}
    try:
        for block in blocks_of(page):
            if ">>>" in block:
                check(block, names)
            else:
                exec(compile(block, str(page), "exec"), names)  # noqa: S102
    finally:
        mx.optimizer.Optimizer.opt_registry.clear()
        mx.optimizer.Optimizer.opt_registry.update(optimizers)
        mx.kv.KVStoreBase.kv_registry.clear()
        mx.kv.KVStoreBase.kv_registry.update(stores)


MODULES = sorted(one.name for one in pkgutil.iter_modules(mx.__path__) if not one.name.startswith("_"))


def has_text(value):
    """More than the signature that nanobind writes by itself."""
    return bool(re.sub(r"^\w*\(.*\) -> .*", "", inspect.getdoc(value) or "").strip())


def bare_members(klass):
    """Public methods and properties without a docstring, of the package's own classes among the bases too."""
    for base in klass.__mro__:
        if not base.__module__.startswith("heddle"):
            continue
        for name, member in vars(base).items():
            documented = callable(member) or isinstance(member, (property, staticmethod))
            if not name.startswith("_") and documented and not has_text(getattr(klass, name)):
                yield f"{klass.__name__}.{name}"


@pytest.mark.parametrize("name", ["", *MODULES])
def test_everything_public_has_a_docstring(name):
    """Modules, their functions and classes, and what these show, inherited from the extension or not."""
    if name in ("ray", "torch"):
        pytest.importorskip(name, reason=f"not installed: tools/setup.sh {name}")
    module = importlib.import_module(f"heddle.{name}" if name else "heddle")
    bare = [] if module.__doc__ else [module.__name__]
    names = getattr(module, "__all__", None) or [one for one in vars(module) if not one.startswith("_")]
    for one in names:
        value = getattr(module, one)
        if not callable(value) or not getattr(value, "__module__", "heddle").startswith("heddle"):
            continue
        bare += [] if has_text(value) else [one]
        if isinstance(value, type):
            bare += bare_members(value)
    assert not bare
