"""Pools training seeds: tokens per target pass of drafters in finished evaluations, by what they were trained on.

Intervals resample the questions, each with all its turns, and the seeds. With two groups, the last row of the published
table is their paired ratio. For a curve, a group's name is DRAFTER@TRAINED_TOKENS.

    python benchmarks/pooled.py --evaluations MT-Bench=FOLDER gsm8k=FOLDER \\
        --groups "own prompts=heads:a0,heads:a1" "gsm8k=heads:b0,heads:b1" --output self_written.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from accepted_figures import Counts, plain_json, ratio, read_records, tokens_per_pass
from arms import write


def counts_of(runs: list[dict[str, Any]], labels: list[str], setting: str) -> Counts:
    """Return the tokens and target passes of each question (all its turns), by the seed's place in ``labels``."""
    found: dict[int, dict[int, tuple[float, float]]] = {seed: {} for seed in range(len(labels))}
    for row in runs:
        seed = next((seed for seed, label in enumerate(labels) if f"({label})" in row["method"]), None)
        if seed is not None and row["setting"] == setting:
            for prompt, run in zip(map(int, row["prompts"]), row["runs"], strict=True):
                tokens, passes = found[seed].get(prompt, (0, 0))
                found[seed][prompt] = tokens + run[1], passes + len(run[4])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--groups", nargs="+", required=True, metavar="NAME=LABEL,LABEL")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    groups = {name: labels.split(",") for name, _, labels in (each.partition("=") for each in options.groups)}
    rows, about = [], dict[str, Any]()
    for name, _, folder in (each.partition("=") for each in options.evaluations):
        report = json.loads((Path(folder) / "report.json").read_text())
        about = {key: report[key] for key in ("hardware", "versions", "commit", "title", "dtype", "max_new_tokens")}
        records = [record for path in Path(folder).glob("runs-*.jsonl") for record in read_records(path)]
        runs = [record for record in records if "runs" in record]
        for setting in dict.fromkeys(row["setting"] for row in runs):
            counts = {group: counts_of(runs, labels, setting) for group, labels in groups.items()}
            row = {"set": name, "setting": setting, "prompts": report["prompts"]}
            row["tokens_per_pass"] = {group: plain_json(tokens_per_pass(one)) for group, one in counts.items()}
            row["ratio"] = plain_json(ratio(*counts.values())) if len(counts) == 2 else None
            rows.append(row)
    write({**about, "seeds": len(next(iter(groups.values()))), "rows": rows}, options.output)


if __name__ == "__main__":
    main()
