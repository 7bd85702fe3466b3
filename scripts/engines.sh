#!/bin/sh
# Create .venv-engines with llama.cpp at its pinned version, once: `make engines` calls this when the pins have changed.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -x .venv-engines/bin/python ] || "$python" -m venv .venv-engines
.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement requirements-engines.lock
touch .venv-engines/.ready
