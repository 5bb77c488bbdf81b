"""The Python blocks of the documentation run as printed: those tagged `python` here, those tagged `python torch` and
`python ray` where these are installed."""

import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import textwrap

import pytest

import heddle as mx
from blocks import check
from jobs import Job

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
         if "```python\n" in page.read_text()]


def blocks_of(page, tag="python"):
    return re.findall(rf"```{tag}\n(.*?)```", page.read_text(), re.S)


def test_there_are_pages():
    assert ROOT / "docs" / "python.md" in PAGES


def test_every_block_of_the_python_page_says_what_it_is():
    """One without a tag is checked by nothing."""
    fences = re.findall(r"^```(.*)$", (ROOT / "docs" / "python.md").read_text(), re.M)
    assert set(fences[0::2]) == {"python", "python torch", "python ray", "sh"} and set(fences[1::2]) == {""}


@pytest.mark.parametrize("package", ["torch", "ray"])
def test_blocks_that_need_more_are_python(package):
    blocks = blocks_of(ROOT / "docs" / "python.md", f"python {package}")
    assert blocks
    for block in blocks:
        compile(block, f"python {package}", "exec")


def test_the_blocks_for_pytorch_train_a_job(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch: tools/setup.sh torch installs it")
    training, scaling = blocks_of(ROOT / "docs" / "python.md", "python torch")
    ended = Job(tmp_path, textwrap.dedent("""
        import torch
        model, loss = torch.nn.Linear(3, 1), torch.nn.functional.mse_loss
        batches = [(torch.ones(2, 3), torch.ones(2, 1))] * 20
    """) + training + textwrap.dedent("""
        scaler = torch.amp.GradScaler("cpu")
        optimizer.zero_grad()
    """) + scaling + textwrap.dedent("""
        assert loss(model(batches[0][0]), batches[0][1]) < 1e-3
        print([parameter.detach().flatten().tolist() for parameter in model.parameters()])
    """)).finish()
    assert ended["worker 0"][0] == ended["worker 1"][0] == 0, ended
    assert ended["worker 0"][1] == ended["worker 1"][1] != "", ended


def test_the_block_for_ray_runs_a_job(monkeypatch):
    ray = pytest.importorskip("ray", reason="needs Ray: tools/setup.sh ray installs it")
    (block,) = blocks_of(ROOT / "docs" / "python.md", "python ray")
    start = ray.init

    def init(address):
        assert address == "auto"  # of a cluster that is there, in place of which this one is
        return start(num_cpus=11, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
                     runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}})

    def train(path, rate):
        import heddle
        store = heddle.kv.create("dist_sync")
        store.barrier()
        return store.rank, path, rate

    monkeypatch.setattr(ray, "init", init)
    names = {"train": train}
    try:
        exec(compile(block, "python ray", "exec"), names)  # noqa: S102
        assert names["losses"] == [(rank, "data", 0.1) for rank in range(4)]
    finally:
        ray.shutdown()


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
