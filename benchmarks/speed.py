"""Compares decoding speed with `transformers` in one run, on a trained target and on its function at a larger cost.

All figures are ratios of runs that alternated in one process. The widened target computes exactly the small target's
function (`widen.py`) and thus has its acceptance; its figures are marked "widened".

    python benchmarks/speed.py --target FOLDER --draft FOLDER --heads medusa=FOLDER markov=FOLDER --dspark FOLDER \\
        --prompts FILE.jsonl --output FILE.json
"""

# ruff: noqa: E402  # how threads wait is set before torch is imported
import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from transformers import PreTrainedTokenizerBase
from widen import widened_dspark, widened_heads, widened_to

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.dtypes import parse_dtype
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.measurement import evaluate
from decoding.measure.methods import EvaluationConfig, standard_methods
from decoding.measure.questions import read_prompts
from decoding.measure.report.tables import markdown_table
from decoding.measure.results import Report, as_json
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.heads import MedusaHeads
from decoding.model.loading import eos_token_ids, load_draft, load_dspark, load_heads, load_model, load_tokenizer
from trainer.terminal.console import standard_output

DEPTH = 4
CHAIN = f"draft model, {DEPTH} tokens"


@dataclass(frozen=True)
class Trained:
    """Artefacts trained for a target, any of: a draft, heads by name, a DSpark draft."""

    draft: CausalLM | None
    heads: Mapping[str, MedusaHeads]
    dspark: DSparkDraft | None

    def widened(self, target: CausalLM, width: int) -> "Trained":
        """Return these artefacts for ``target``, widened by ``width``; an ordinary draft stays as it is."""
        heads = {name: widened_heads(each, width) for name, each in self.heads.items()}
        return Trained(self.draft, heads, None if self.dspark is None else widened_dspark(self.dspark, target, width))

    def drafters(self) -> dict[str, Drafter]:
        """Make all drafters with these artefacts, and the lookup, which needs no weights."""
        found: dict[str, Drafter] = {}
        if self.draft is not None:
            found[CHAIN] = named_drafter("draft", self.draft, tokens=DEPTH)
            found["draft tree"] = named_drafter("draft-tree", self.draft, depth=6, width=3, nodes=16)
            found["draft and lookup"] = named_drafter("hybrid", self.draft, of="draft", lookup_tokens=8)
        for name, heads in self.heads.items():
            found[f"{name}, tree of {len(heads.config.tree)}"] = named_drafter("heads", heads)
            found[f"{name} and lookup"] = named_drafter("hybrid", heads, of="heads", lookup_tokens=8)
        if self.dspark is not None:
            found["dspark"] = named_drafter("dspark", self.dspark)
            found["dspark and lookup"] = named_drafter("hybrid", self.dspark, of="dspark", lookup_tokens=8)
        return {**found, "prompt lookup": named_drafter("lookup")}


def measure(target: CausalLM, trained: Trained, prompts: Sequence[Sequence[int]], config: EvaluationConfig) -> Report:
    """Measure all drafters on one target, one text at a time."""
    return evaluate(target, standard_methods(target, trained.drafters(), config), prompts, config)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--draft", help="folder of a draft for the target")
    parser.add_argument("--heads", nargs="+", default=[], metavar="NAME=FOLDER", help="heads for the target")
    parser.add_argument("--dspark", help="folder of a DSpark draft for the target")
    parser.add_argument("--prompts", required=True, help=".jsonl file")
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="how often each method decodes each prompt")
    parser.add_argument("--widen", type=float, default=150e6, help="parameters of the widened target; 0 for none")
    parser.add_argument("--dtype", default="fast")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    return parser.parse_args(arguments)


def read_trained(options: argparse.Namespace, target: CausalLM, tokenizer: PreTrainedTokenizerBase) -> Trained:
    """Load the folders given by ``--draft``, ``--heads`` and ``--dspark``."""
    return Trained(
        load_draft(options.draft, target, tokenizer) if options.draft else None,
        {name: load_heads(folder, target) for name, folder in (each.split("=", 1) for each in options.heads)},
        load_dspark(options.dspark, target) if options.dspark else None,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    model, tokenizer = load_model(options.target, parse_dtype(options.dtype)), load_tokenizer(options.target)
    target = CausalLM(model)
    trained = read_trained(options, target, tokenizer)
    prompts = read_prompts(options.prompts, tokenizer, options.limit)
    eos = eos_token_ids(model, tokenizer)
    config = EvaluationConfig(max_new_tokens=options.max_new_tokens, rounds=options.rounds, eos_token_ids=eos)
    report: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "commit": commit(), "targets": {}}
    name = Path(options.target).name
    report["targets"][name] = {"drafters": measure(target, trained, prompts, config)}
    if options.widen:
        model, stand_in = widened_to(model, int(options.widen))
        wide = f"{name}, widened to {stand_in['parameters'] / 1e6:.0f}M"
        target = CausalLM(model)
        widened = trained.widened(target, stand_in["width"])
        report["targets"][wide] = {"drafters": measure(target, widened, prompts, config)}
    console = standard_output(width=150)
    for name, part in report["targets"].items():
        console.print(f"\n{name}\n\n{markdown_table(part['drafters'])}\n", markup=False, soft_wrap=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(as_json(report), indent=1) + "\n")
    console.print(f"written: {options.output}")


if __name__ == "__main__":
    main()
