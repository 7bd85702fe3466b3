"""Seconds of a run's held-out evaluation by its batch size, with the draft that a recipe begins with; in turns.

Usage: heldout.py RECIPE [section.key=value ...] [--sizes 1,2,4,8,16] [--rounds 2], for example

    heldout.py recipes/any/draft.yaml name=x target=ORG/NAME data.train=a.jsonl data.heldout=b.jsonl output=x

``--json FILE`` writes the wall seconds, the tokens per pass and the machine.

CPU seconds are this process's own, and hold on a busy machine; wall seconds only on a quiet one.
"""

# ruff: noqa: E402  # waiting of threads is set before torch is imported
import argparse
import json
import statistics
import time
from pathlib import Path

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import torch

from decoding.measure.machine import commit, hardware, versions
from trainer import load_recipe
from trainer.run.heldout import Evaluator
from trainer.run.kinds import kind_of
from trainer.target.loading import Target
from trainer.terminal.place import ALONE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--sizes", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_intermixed_args()
    recipe = load_recipe(given.recipe, given.overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = kind_of(recipe).assemble(device, ALONE)
    assert isinstance(job.target, Target), "the recipe keeps its target"
    target, sizes = job.target.model, [int(size) for size in given.sizes.split(",")]
    taken: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    found: dict[int, float] = {}
    for turn in range(given.rounds + 1):  # the first warms up
        for size in sizes[turn % len(sizes) :] + sizes[: turn % len(sizes)]:
            section = recipe.evaluation.model_copy(update={"batch_size": size, **({} if turn else {"prompts": size})})
            evaluator = Evaluator(target, job.tokenizer, job.heldout, section)
            wall, cpu = time.perf_counter(), time.process_time()
            evaluation = evaluator.evaluate(job.objective)
            if turn:
                taken[size].append((time.perf_counter() - wall, time.process_time() - cpu))
                found[size] = evaluation.figures["tokens_per_pass"]
    about = {"prompts": recipe.evaluation.prompts, "dtype": str(target.dtype), "threads": torch.get_num_threads()}
    print(f"{about['prompts']} prompts, {target.dtype} on {device}, {about['threads']} threads")
    rows = []
    for size, pairs in taken.items():
        wall, cpu = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        rows.append({"batch_size": size, "seconds": wall, "cpu_seconds": cpu, "tokens_per_pass": found[size]})
        print(f"batch size {size:>2}: {wall:7.2f} s, {cpu:7.2f} s of CPU, tokens per pass {found[size]:.4f}")
    if given.json:
        machine = {"hardware": hardware(), "versions": versions(), "commit": commit()}
        given.json.write_text(json.dumps({**machine, **about, "sizes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
