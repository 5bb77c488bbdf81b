"""The Python blocks of the documentation run as printed."""

import pathlib
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


MODULES = [mx, mx.nd, mx.nd.sparse, mx.kv, mx.optimizer, mx.lr_scheduler, mx.engine, mx.random, mx.profiler,
           mx.np, mx.npx, mx.error]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_everything_public_has_a_docstring(module):
    assert module.__doc__
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    bare = []
    for name in names:
        value = getattr(module, name)
        if not callable(value) or not getattr(value, "__module__", "heddle").startswith("heddle"):
            continue
        if not value.__doc__:
            bare.append(name)
        if isinstance(value, type):
            bare += [f"{name}.{method}" for method, function in vars(value).items()
                     if not method.startswith("_") and callable(function)
                     and not any(getattr(getattr(base, method, None), "__doc__", None) for base in value.__mro__)]
    assert not bare
