#!/bin/sh
# Create an environment with vLLM at its pinned versions, once: in the user's cache folder (or HEADSTART_CACHE), 3 GB.
# `make vllm` calls this. Prints the seconds of the installation, or nothing if the environment
# exists already.
set -eu
cd "$(dirname "$0")/.."
folder=$(.venv/bin/python benchmarks/engines.py)
[ -e "$folder/.ready" ] && exit 0
python=${PYTHON:-python3}
began=$(date +%s)
echo "installing vLLM for the CPU (3 GB) to $folder"
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip="$folder/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps"
torch=$(grep '^torch==' requirements-vllm.lock)
if [ "$(uname -s)" = Linux ]; then # the CPU build is gigabytes smaller
    $pip "$torch+cpu" 2>/dev/null || $pip "$torch+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
fi
$pip --requirement requirements-vllm.lock
touch "$folder/.ready"
echo "installed in $(($(date +%s) - began)) s"
