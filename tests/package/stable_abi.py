"""Goal: one wheel serves Python 3.12 and all later versions.

Method: the first of python3.12, python3.13, ... on the PATH that works builds it by tools/wheel.sh, in an environment
with what tools/setup.sh names; then it is installed, as a file, into an empty environment of each of these Pythons,
where the checks of wheel.py and the package's tests run. Needs the packages of PyPI. Status 77, and a line that says
why: there is no such Python, or nothing to install from.

    stable_abi.py --work DIR [option of tools/wheel.sh...]
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

import wheel as checks

NEWEST = 20
SKIPPED = 77


def pythons():
    """{minor version: path} of those on the PATH that start and can make environments."""
    found = {}
    for minor in range(12, NEWEST):
        path = shutil.which(f"python3.{minor}")
        if path and subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0:
            found[minor] = path
    return found


def has_headers(python):
    program = "import os, sysconfig; print(os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
    return checks.run(python, "-c", program).strip() == "True"


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def packages(*names):
    """The packages of PyPI, with the versions that tools/setup.sh takes; all if none is named."""
    text = (checks.ROOT / "tools" / "setup.sh").read_text()
    wanted = re.search(r"^python_packages=\((.*?)\)", text, re.M | re.S).group(1).split()
    return [one for one in wanted if not names or one.split("==")[0] in names]


def environment(python, folder, *wanted):
    """An environment with the packages; returns its Python."""
    checks.run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    command = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        skip(f"PyPI's packages cannot be installed for {python}:\n{done.stderr}")
    return inside


def check_on(python, minor, wheel, work):
    """In an empty environment: NumPy, what runs the tests, and the wheel."""
    work.mkdir()
    folder = work / "empty"
    inside = environment(python, folder, *packages("numpy", "pytest"))
    checks.run(inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", wheel)
    clean = checks.clean_environment(folder)
    checks.check_program(folder, clean, work)
    checks.check_jobs(clean, work)
    tested = checks.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", checks.ROOT / "tests" / "python",
                        env={**clean, "PYTHONDONTWRITEBYTECODE": "1"}, cwd=work)
    print(f"Python 3.{minor}: {tested.strip().splitlines()[-1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", metavar="DIR", type=pathlib.Path, required=True)
    arguments, options = parser.parse_known_args()
    found = pythons()
    builders = [minor for minor, python in found.items() if has_headers(python)]
    if not builders:
        skip("on the PATH there is no python3.12 or later that works and has its headers")
    work = arguments.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    builder = builders[0]
    wheel = checks.build(work, environment(found[builder], work / "builder", *packages()), *options)
    checks.check_names(wheel, builder)
    for minor, python in found.items():
        check_on(python, minor, wheel, work / f"3.{minor}")
    print(f"{wheel.name}, built by Python 3.{builder}, works with Python 3.{', 3.'.join(map(str, found))}")


if __name__ == "__main__":
    main()
