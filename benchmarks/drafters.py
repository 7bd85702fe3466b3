"""A measured row for every drafter of the registry, beside plain decoding, by what ``headstart evaluate`` calls.

    python benchmarks/drafters.py --target FOLDER --heads FOLDER --draft FOLDER --other-draft FOLDER \
        --prompts FILE.jsonl --output benchmarks/results/amd-epyc-2-cores/drafters.json
"""

# ruff: noqa: E402  # waiting of threads is set before torch is imported
import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from decoding.drafters.registry import REGISTRY
from trainer.commands.evaluate import run_evaluate
from trainer.commands.options import EvaluateOptions
from trainer.terminal.console import standard_output

SETTINGS = ("greedy", "sampling")


def specs(heads: str, draft: str, other_draft: str) -> list[str]:
    """Return a spec for each name of the registry; for the hybrid one with heads and one with a draft."""
    return [
        f"heads:{heads}",
        f"draft:{draft},tokens=4",
        f"draft-tree:{draft},depth=5,width=3,nodes=16",
        "lookup",
        "lookahead:window=5,ngram=3,guesses=5",
        f"cascade:{draft},tokens=6",
        f"hybrid:{heads},of=heads,lookup_tokens=8",
        f"hybrid:{draft},of=draft,lookup_tokens=8",
        f"other-tokenizer:{other_draft},tokens=5",
    ]


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each drafter's figures under each setting: tokens per pass and speed-ups, with their intervals."""
    kept = ("setting", "method", "label", "tokens_per_pass", "speedup_of_totals", "speedup", "identical_to_plain")
    return [
        {"spec": report["drafters"][row["drafter"]], **{key: row[key] for key in kept if key in row}}
        for row in report["rows"]
        if row["drafter"] is not None and row["timed"] and not row["method"].startswith("transformers")
    ]


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Make a table of the rows, each figure with its 95% interval over prompts."""
    table = Table("setting", "drafter", "tokens per pass", "over plain", "same as plain")
    for row in rows:
        figures = [
            f"{estimate['value']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"
            for estimate in (row["tokens_per_pass"], row["speedup_of_totals"])
        ]
        same = row.get("identical_to_plain")
        table.add_row(row["setting"], row["spec"], *figures, f"{same['identical']}/{same['of']}" if same else "")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--heads", required=True, help="folder of heads trained on it")
    parser.add_argument("--draft", required=True, help="folder of a draft of it")
    parser.add_argument("--other-draft", required=True, help="folder of a model with another tokenizer")
    parser.add_argument("--prompts", required=True, help=".jsonl file")
    parser.add_argument("--limit", type=int, default=12, help="prompts to decode")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2, help="how often each drafter decodes each prompt")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    chosen = parser.parse_args(arguments)

    asked = specs(chosen.heads, chosen.draft, chosen.other_draft)
    missing = REGISTRY.keys() - {spec.partition(":")[0] for spec in asked}
    assert not missing, f"no row for {sorted(missing)}"
    with tempfile.TemporaryDirectory() as folder:
        report = run_evaluate(
            EvaluateOptions(
                target=chosen.target,
                drafter=asked,
                prompts=chosen.prompts,
                output=Path(folder),
                limit=chosen.limit,
                skip_long=True,
                max_new_tokens=chosen.max_new_tokens,
                rounds=chosen.rounds,
                settings=list(SETTINGS),
                dtype=chosen.dtype,
                title="Every drafter of the registry",
            )
        )
    told = ("hardware", "versions", "commit", "dtype", "parameters", "prompts", "rounds", "max_new_tokens")
    result = {**{key: report[key] for key in (*told, "fingerprints", "seconds")}, "rows": rows_of(report)}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps(result, indent=1) + "\n")
    console = standard_output(width=140)
    console.print(table_of(result["rows"]))
    console.print(f"written: {chosen.output}")


if __name__ == "__main__":
    main()
