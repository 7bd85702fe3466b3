"""Verdicts of `headstart verify` on real servers, greedy and sampled: one row per server.

A server is specified by its engine, its method and the command that starts it, split into words as in a shell. The
command must serve on port 8123 or print its address as the first line.

    python benchmarks/verified.py --target FOLDER --prompts FILE.jsonl --output FILE.json \
        --server "llama.cpp" "DSpark, 6 tokens" "COMMAND" --server "vLLM 0.32" "plain" "COMMAND --port 8123"
"""

# ruff: noqa: E402  # how threads wait is set before torch is imported
import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from decoding.measure.machine import commit, hardware
from decoding.measure.redact import basename

START_SECONDS = 900


@contextmanager
def served(command: str) -> Iterator[tuple[str, str]]:
    """Start a server; yield its address and its model's name once it answers."""
    with tempfile.NamedTemporaryFile() as printed:
        pipes = {"stdin": subprocess.PIPE, "stdout": printed, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(shlex.split(command), **pipes) as process:
            try:
                yield ready(process, Path(printed.name))
            finally:
                process.terminate()


def ready(process: "subprocess.Popen[bytes]", printed: Path) -> tuple[str, str]:
    """Wait for the first answer; raise RuntimeError if the server exits or is not ready in time."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        time.sleep(1)
        first = printed.read_text().partition("\n")[0]
        address = first if first.startswith("http://") else "http://127.0.0.1:8123"
        try:
            with urllib.request.urlopen(f"{address}/v1/models", timeout=10) as answer:
                return f"{address}/v1", json.load(answer)["data"][0]["id"]
        except OSError:
            continue
    raise RuntimeError(f"the server did not answer within {START_SECONDS} s (exit code {process.poll()})")


def verified(engine: str, method: str, command: str, proof: Sequence[str]) -> dict[str, Any]:
    """Return the verdict on one server with the findings of all tests."""
    with served(command) as (address, model), tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "verdict.json"
        asked = ["--endpoint", address, "--model", model, "--json", str(written)]
        subprocess.run([sys.executable, "-m", "trainer.cli", "verify", *proof, *asked], check=False)
        report = json.loads(written.read_text())
    (findings,) = report["findings"].values()
    return {"engine": engine, "method": method, "verdict": report["verdict"], "findings": findings}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--prompts", required=True, help=".jsonl file")
    parser.add_argument("--limit", default="20", help="prompts")
    parser.add_argument("--server", nargs=3, action="append", required=True, metavar=("ENGINE", "METHOD", "COMMAND"))
    parser.add_argument("--output", type=Path, required=True, help="JSON to write, rewritten after each server")
    options = parser.parse_args(arguments)
    proof = ["--target", options.target, "--prompts", options.prompts, "--limit", options.limit, "--dtype", "fp32"]
    about = {"target": basename(options.target), "set": basename(options.prompts), "prompts": int(options.limit)}
    rows: list[dict[str, Any]] = []
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for server in options.server:
        rows.append(verified(*server, proof))
        report = {**about, "rows": rows, "hardware": hardware(), "commit": commit()}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
