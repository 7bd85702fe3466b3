"""Answers by two real servers, of which one is killed on the way and comes back: rows lost, and the pace.

Two `transformers serve` processes serve MODEL; `headstart regenerate` asks both. One of them gets a SIGKILL when a
third of the rows are answered, and is started again when two thirds are. Prints the answers per second before, between
and after, and the rows that are missing, set aside or there twice; endpoints.json in the output folder holds the same.

    python benchmarks/endpoints.py --model FOLDER --prompts FILE.jsonl [FILE.jsonl ...] --rows 10000 --output FOLDER
"""

# ruff: noqa: E402  # waiting of threads is set before torch is imported
import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from decoding.measure.machine import commit, hardware, versions

WORDS = 8
"""Words of a prompt: the first of a row's question."""
_FIELDS = ("question", "prompt", "text", "instruction")


def write_prompts(files: list[Path], rows: int, path: Path) -> None:
    """Write short prompts, over and over again where the files have too few."""
    texts = []
    for line in (line for file in files for line in file.read_text().splitlines()):
        row = json.loads(line)
        text = next(row[name] for name in _FIELDS if isinstance(row.get(name), str))
        texts.append(" ".join(text.split()[:WORDS]))
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in islice(cycle(texts), rows)))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_server(model: str, port: int, log: Path) -> "subprocess.Popen[bytes]":
    program = str(Path(sys.executable).with_name("transformers"))
    command = [program, "serve", model, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with log.open("ab") as out:
        return subprocess.Popen([*command, "--dtype", "float32"], stdout=out, stderr=out, start_new_session=True)


def is_up(port: int) -> bool:
    with suppress(OSError):
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200)
    return False


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    while not condition():
        assert process.poll() is None, f"it ended with {process.returncode}"
        time.sleep(0.2)


def kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answered(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def report(output: Path, rows: int, marks: list[tuple[float, int]]) -> dict[str, Any]:
    """Print and return the pace between the marks (seconds, answers), and what is wrong with the rows."""
    pace = []
    for name, (begin, before), (end, after) in zip(
        ("both servers", "one killed", "it is back"), marks, marks[1:], strict=False
    ):
        pace.append((after - before) / (end - begin))
        print(f"{name}: {after - before} answers in {end - begin:.0f} s, {pace[-1]:.1f}/s")
    found = [json.loads(line)["row"] for line in output.read_text().splitlines()]
    aside = output.with_name(output.name + ".failed.jsonl")
    set_aside = [json.loads(line) for line in aside.read_text().splitlines()] if aside.exists() else []
    missing, twice = rows - len({*found, *(row["row"] for row in set_aside)}), len(found) - len(set(found))
    print(f"{rows} rows: {len(found)} answered, {len(set_aside)} set aside, {missing} missing, {twice} twice")
    for row in set_aside[:5]:
        print(f"  row {row['row']}: {row['reason']}")
    counts = {"answered": len(found), "set_aside": len(set_aside), "missing": missing, "twice": twice}
    machine = {"hardware": hardware(), "versions": versions(), "commit": commit()}
    return {**machine, "answers_per_second": pace, "rows": rows, **counts}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    write_prompts(given.prompts, given.rows, given.output / "prompts.jsonl")
    output, ports = given.output / "answers.jsonl", (free_port(), free_port())
    servers = [start_server(given.model, port, given.output / f"server-{port}.log") for port in ports]
    try:
        for port, server in zip(ports, servers, strict=True):
            wait_for(lambda port=port: is_up(port), server)  # type: ignore[misc]
        command = [sys.executable, "-c", "from trainer.cli import main; main()", "regenerate", "--completions"]
        command += [word for port in ports for word in ("--endpoint", f"http://127.0.0.1:{port}/v1")]
        command += ["--model", given.model, "--concurrency", str(given.concurrency), "--output", str(output)]
        command += ["--prompts", str(given.output / "prompts.jsonl"), "--max-new-tokens", str(given.max_new_tokens)]
        run = subprocess.Popen(command, start_new_session=True)
        servers.append(run)
        wait_for(lambda: answered(output) > 0, run)
        marks = [(time.monotonic(), answered(output))]
        wait_for(lambda: answered(output) >= given.rows // 3, run)
        marks.append((time.monotonic(), answered(output)))
        kill(servers[1])
        print(f"killed 127.0.0.1:{ports[1]}", flush=True)
        wait_for(lambda: answered(output) >= 2 * given.rows // 3, run)
        marks.append((time.monotonic(), answered(output)))
        servers[1] = start_server(given.model, ports[1], given.output / f"server-{ports[1]}.log")
        print(f"started 127.0.0.1:{ports[1]} again", flush=True)
        code = run.wait()
        marks.append((time.monotonic(), answered(output)))
        print(f"headstart regenerate ended with {code}")
        found = report(output, given.rows, marks) | {"max_new_tokens": given.max_new_tokens}
        (given.output / "endpoints.json").write_text(json.dumps(found, indent=1) + "\n")
    finally:
        for process in servers:
            kill(process)


if __name__ == "__main__":
    main()
