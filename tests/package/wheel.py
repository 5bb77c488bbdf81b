"""Goal: the wheel works where neither a compiler nor heddle's libraries are.

Method: tools/wheel.sh builds it (or, with --built, packs what a build tree has), it is installed into an empty
environment beside NumPy, and there, with nothing else in PATH and PYTHONPATH, run a small program, jobs of
several processes and the command. Every library that a process maps comes from the wheel, or is one that the
wheel's tag promises on every machine.
"""

import argparse
import importlib.util
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]

# What manylinux tags promise; glibc's parts and the compiler's run-time libraries.
PROMISED = re.compile(r"(ld-linux-x86-64|ld-linux-aarch64|lib(c|m|dl|rt|pthread|util|resolv|gcc_s|stdc\+\+|z))\.so\.\d.*")

PROGRAM = """
import importlib.metadata, os, pathlib, numpy, numpy.random
def mapped():
    return {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
others = mapped()  # of the interpreter and NumPy
import heddle as mx
assert mx.__version__ == importlib.metadata.version("heddle-kv")
package = pathlib.Path(mx.__file__).parent
assert package.is_relative_to(os.environ["VIRTUAL_ENV"]), package
for name in ("_core.pyi", "py.typed"):
    assert (package / name).exists(), name
kv = mx.kv.create("device")
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
kv.init("w", mx.nd.ones((2,)))
kv.push("w", [mx.nd.ones((2,), mx.cpu(i)) for i in range(2)])
out = mx.nd.zeros((2,))
kv.pull("w", out=out)
print(package)
print(out.asnumpy().tolist())
print("\\n".join(sorted(mapped() - others)))
"""

JOB = """
import heddle as mx
kv = mx.kv.create("dist_sync")
kv.init("w", mx.nd.zeros((3,)))
kv.push("w", mx.nd.full((3,), kv.rank + 1))
out = mx.nd.zeros((3,))
kv.pull("w", out=out)
assert out.asnumpy().tolist() == [3, 3, 3]
kv.barrier()
print("summed")
"""


def run(*command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                          timeout=900, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}"
    return done.stdout


def packing(built, work):
    """Options of tools/wheel.sh: takes what a build tree has."""
    settings = {"cmake.source-dir": ROOT / "tests" / "package" / "prebuilt", "build-dir": work / "cmake",
                "cmake.define.HEDDLE_BUILD_DIR": built, "build.targets": "all"}
    return [f"--config-settings={name}={value}" for name, value in settings.items()]  # pip 23.0 has no -C


def build(work, python, *options, **environment):
    """The wheel: what tools/wheel.sh makes with that Python."""
    wheels = work / "wheels"
    print(run(ROOT / "tools" / "wheel.sh", *options,
              env={**os.environ, "PYTHON": str(python), "WHEELS": str(wheels), **environment}))
    (wheel,) = wheels.iterdir()
    return wheel


def check_names(wheel, minor=sys.version_info.minor):
    """The wheel says what it needs: a manylinux tag; one for all Pythons from 3.12 on, or of the version 3.`minor`."""
    expected = f"cp3{minor}-cp3{minor}" if minor < 12 else "cp312-abi3"
    assert re.fullmatch(rf"heddle_kv-[0-9.]+-{expected}-manylinux_\d+_\d+_\w+\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    for needed in ("heddle/_core.pyi", "heddle/py.typed", "heddle/bin/heddle"):
        assert needed in names, needed
    assert not [name for name in names if name.split("/")[0] not in
                ("heddle", "heddle_kv.libs") and ".dist-info" not in name], names


def clean_environment(folder):
    """The variables of a process in the environment of that folder, and nothing beside it."""
    clean = {name: value for name, value in os.environ.items()
             if not name.startswith(("HEDDLE_", "DMLC_", "PYTHON", "LD_"))}
    clean.update(PATH=f"{folder / 'bin'}:/usr/bin:/bin", VIRTUAL_ENV=str(folder))
    return clean


def make_environment(work, wheel):
    """An environment with the wheel and NumPy, without pip."""
    folder = work / "empty"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--no-index",
        "--no-deps", "--quiet", wheel)
    # NumPy as this interpreter has it, without the network.
    packages = pathlib.Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip())
    source = pathlib.Path(importlib.util.find_spec("numpy").origin).parents[1]
    for part in source.glob("numpy*"):
        shutil.copytree(part, packages / part.name)
    return folder, clean_environment(folder)


def check_program(folder, environment, work):
    package, first, *mapped = run("python", "-c", PROGRAM, env=environment, cwd=work).splitlines()
    package = pathlib.Path(package)
    assert first == "[0.0, 0.0]", first
    brought = [path for path in mapped if path.startswith(f"{folder}/")]
    assert any("libtbb" in path for path in brought), mapped  # one that is not linked in
    foreign = [path for path in mapped if path not in brought and "/lib-dynload/" not in path
               and not PROMISED.fullmatch(os.path.basename(path))]
    for line in run("ldd", package / "bin" / "heddle").splitlines():
        name, _, path = line.strip().partition(" => ")
        if path and not path.startswith(f"{folder}/") and not PROMISED.fullmatch(name):
            foreign.append(line.strip())
    assert not foreign, f"libraries that are neither the wheel's nor everywhere: {foreign}"


def check_jobs(environment, work):
    """A job by the server module, one by the command, and what the command is beside."""
    script = work / "job.py"
    script.write_text(JOB)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = {**environment, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NUM_WORKER": "2",
           "DMLC_NUM_SERVER": "1"}
    commands = [("scheduler", ["-m", "heddle.server"]), ("server", ["-m", "heddle.server"]),
                ("worker", [script]), ("worker", [script])]
    processes = [subprocess.Popen(["python", *command], env={**job, "DMLC_ROLE": role}, cwd=work, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for role, command in commands]
    try:
        for process, (role, _) in zip(processes, commands):
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0 and ("summed" in output) == (role == "worker"), f"{role}: {output}"
    finally:
        for process in processes:
            process.kill()
    launched = run("heddle", "launch", "-n", "2", "-s", "1", "--", "python", script, env=environment, cwd=work)
    assert launched.count("summed") == 2, launched
    assert "launch" in run("python", "-m", "heddle", "--help", env=environment, cwd=work)
    assert "--module" in run("heddle", "server", "--module", "os", "--help", env=environment, cwd=work)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--built", metavar="DIR", help="a build tree to pack; else everything is built")
    parser.add_argument("--work", metavar="DIR", type=pathlib.Path, default=ROOT / "build" / "wheel-test")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    wheel = build(work, sys.executable, *(packing(arguments.built, work) if arguments.built else []))
    check_names(wheel)
    folder, environment = make_environment(work, wheel)
    check_program(folder, environment, work)
    check_jobs(environment, work)
    print(f"{wheel.name} works")


if __name__ == "__main__":
    main()
