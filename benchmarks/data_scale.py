"""Start real trainings on many generated chats: memory of each rank, time to the first step, a second start.

    python benchmarks/data_scale.py --target FOLDER --output FILE.json [--chats 100000]

Each chat has about 800 tokens of the target's tokenizer, in four turns. One step of Medusa-1 heads is trained on them
by one process and by two, each with an empty cache of tokens first and then with the full one, and on 64 chats:
what a process holds more than that one does, it holds for the data. Where ``/proc`` is not there nothing is measured.

``private_MB`` is the largest sum of the pages that a process shared with nobody: pages of a mapped file, which the
system drops when it needs them, do not count, but are part of ``resident_MB`` (VmHWM).
"""

# ruff: noqa: E402  # waiting of threads is set before torch is imported
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from decoding.measure.machine import commit, hardware, versions

ROOT = Path(__file__).resolve().parents[1]
FEW = 64
MB = 1_000_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the chats, start every training and print and write the figures."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch)
        tokenizer = AutoTokenizer.from_pretrained(options.target)
        tokens = write_chats(folder / "chats.jsonl", options.chats, options.tokens, tokenizer)
        write_chats(folder / "few.jsonl", FEW, options.tokens, tokenizer)
        kinds = (("few", "empty"), ("chats", "empty"), ("chats", "full"))
        starts = [(data, world, cache) for world in options.processes for data, cache in kinds]
        runs = []
        for data, world, cache in starts:
            runs.append(_start(folder, options, data, world, cache))
            print(json.dumps(runs[-1]), flush=True)
    _add_bytes_a_token(runs, tokens)
    content = {
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "chats": options.chats,
        "tokens": tokens,
    }
    content |= {"target": Path(options.target).name, "num_proc": options.num_proc, "runs": runs}
    text = json.dumps(content, indent=2, default=str)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of a target with a chat template")
    parser.add_argument("--chats", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=800, help="of a chat, about")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--num-proc", type=int, default=None, help="data.num_proc; left out: the recipe's default")
    parser.add_argument("--scratch", default=None, help="folder for the chats, the runs and the cache")
    parser.add_argument("--output", default=None, help="JSON file")
    return parser


def write_chats(path: Path, count: int, length: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Write chats of random words in four turns; return the tokens of all, as estimated from the first 50."""
    rng = random.Random(0)
    words = sorted(word for word in (tokenizer.decode([token]).strip() for token in range(len(tokenizer))) if word)
    words = [word for word in words if word.isascii() and word.isalpha() and len(word) > 2]
    seen = 0
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            shares = (length // 6, length // 3, length // 6, length // 3)
            turns = [" ".join(rng.choices(words, k=int(share * 0.76))) for share in shares]
            roles = ("user", "assistant", "user", "assistant")
            messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
            if number < 50:
                encoded: Any = tokenizer.apply_chat_template(messages, return_dict=True)
                seen += len(encoded["input_ids"])
            file.write(json.dumps({"messages": messages}) + "\n")
    return seen * count // min(count, 50)


def _start(folder: Path, options: argparse.Namespace, data: str, world: int, cache: str) -> dict[str, Any]:
    """Train one step; return the seconds until it was done and what each process held at its height."""
    output, caches = folder / f"run-{data}-{world}-{cache}", folder / f"cache-{data}-{world}"
    recipe = _write_recipe(folder, options, data, output, world)
    words = [sys.executable, "-c", "from trainer.cli import main; main()", "train", str(recipe)]
    if world > 1:
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
        launcher += ["--config_file", str(ROOT / "recipes/accelerate/ddp.yaml"), "--num_processes", str(world)]
        words = [*launcher, str(ROOT / "scripts" / "train.py"), str(recipe)]
    env = {**os.environ, "HEADSTART_CACHE": str(caches), "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = str(ROOT)
    begin = time.perf_counter()
    with (output.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
        first_step, ranks = _watch(process, output / "metrics.jsonl", begin, world)
    if process.returncode != 0 or first_step is None:
        raise SystemExit(f"{words} ended with {process.returncode}:\n{output.with_suffix('.log').read_text()[-3000:]}")
    return {
        "data": data,
        "processes": world,
        "cache": cache,
        "seconds_to_first_step": round(first_step, 1),
        "seconds": round(time.perf_counter() - begin, 1),
        "cache_MB": round(sum(file.stat().st_size for file in caches.rglob("*") if file.is_file()) / MB, 1),
        "ranks": sorted(ranks.values(), key=lambda rank: rank["rank"]),
    }


def _write_recipe(folder: Path, options: argparse.Namespace, data: str, output: Path, world: int) -> Path:
    content: dict[str, Any] = {
        "kind": "medusa",
        "name": "data at scale",
        "output": str(output),
        "target": options.target,
        "data": {"train": str(folder / f"{data}.jsonl"), "heldout": str(folder / "few.jsonl"), "max_length": 1024},
        "heads": {"num_heads": 1},
        "training": {"steps": 1, "batch_size": world, "micro_batch_size": 1},
        "evaluation": {"prompts": 0},
        "tracking": "none",
    }
    if options.num_proc is not None:
        content["data"]["num_proc"] = options.num_proc
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def _watch(
    process: "subprocess.Popen[bytes]", metrics: Path, begin: float, world: int
) -> tuple[float | None, dict[int, dict[str, Any]]]:
    """Look at the processes until the end, ten times a second; return the seconds to the first step and each height."""
    first_step = None
    ranks: dict[int, dict[str, Any]] = {}
    while process.poll() is None:
        for identity, rank in _ranks(process.pid, world):
            held = ranks.setdefault(identity, {"rank": rank, "resident_MB": 0.0, "private_MB": 0.0, "cpu_s": 0.0})
            for name, value in _held(identity).items():
                held[name] = max(held[name], round(value, 1))
        if first_step is None and metrics.is_file() and '"loss"' in metrics.read_text():
            first_step = time.perf_counter() - begin
        time.sleep(0.1)
    if first_step is None and metrics.is_file() and '"loss"' in metrics.read_text():
        first_step = time.perf_counter() - begin
    return first_step, ranks


def _ranks(process: int, world: int) -> Iterator[tuple[int, int]]:
    """Yield the training processes below ``process`` with their ranks; helpers of their own do not count."""
    if world == 1:
        yield process, 0
        return
    for child in _children(process):
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            if variable.startswith(b"RANK="):
                yield child, int(variable.removeprefix(b"RANK="))


def _children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _held(process: int) -> dict[str, float]:
    """Return what a process holds, in MB, and the processor's seconds it took; nothing of one that has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        pages = Path(f"/proc/{process}/smaps_rollup").read_text()
        times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return {}
    sizes = {line.split(":")[0]: line.split()[1] for line in (status + pages).splitlines() if line.endswith(" kB")}
    if "VmHWM" not in sizes or "Private_Dirty" not in sizes:
        return {}
    ticks = sum(int(times[place]) for place in (11, 12))
    return {
        "resident_MB": int(sizes["VmHWM"]) * 1024 / MB,
        "private_MB": int(sizes["Private_Dirty"]) * 1024 / MB,
        "cpu_s": ticks / os.sysconf("SC_CLK_TCK"),
    }


def _add_bytes_a_token(runs: Sequence[dict[str, Any]], tokens: int) -> None:
    """Say how much more a rank holds, for each token, than one with few chats does."""
    for run in runs:
        few = next(other for other in runs if other["data"] == "few" and other["processes"] == run["processes"])
        for rank in run["ranks"] if run["data"] != "few" else ():
            more = rank["private_MB"] - few["ranks"][0]["private_MB"]
            rank["private_bytes_a_token"] = round(more * MB / tokens, 2)


if __name__ == "__main__":
    main()
