"""Which heads gain most: Medusa-1 in both layouts, hard and soft targets, Medusa-2, Hydra, on the same answers.

Each arm is a recipe with overrides, trained in a process of its own for the same steps on the same tokens, and then
decoded with: top-1 and top-5 of each head on the target's own greedy answers, tokens per target pass and speed-up over
plain decoding on every prompt set. An arm that is finished is not trained again.

    python benchmarks/heads.py --target FOLDER --answers ANSWERS.jsonl --heldout TEST.jsonl --prompts gsm8k=TEST.jsonl
"""

# ruff: noqa: E402  # the path comes first: see below
import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# This folder, where arms.py lies, has a script of a package's name: the repository comes first.
_HERE = Path(__file__).resolve().parent
sys.path = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE), str(_HERE)]

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from arms import ROOT, curve_of, slug, train, write
from rich.table import Table

from decoding.drafters import MedusaDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.evaluate import PLAIN, EvaluationConfig, Method, evaluate, our_method
from decoding.measure.figures import speedup
from decoding.measure.machine import commit, hardware, versions
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads
from decoding.model.loading import eos_token_ids, load_heads, load_model, load_tokenizer, parse_dtype
from decoding.prompts import read_prompts
from decoding.rules.sampling import SamplingConfig
from trainer.heads.medusa import rank_accuracies
from trainer.heads.medusa2 import TARGET_FOLDER
from trainer.terminal.console import standard_output

RECIPES = ROOT / "recipes" / "storyteller-11m"
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Medusa-1": ("medusa1", ()),
    "Medusa-1, KL": ("medusa1", ("heads.loss.forward_kl=1",)),
    "Medusa-1, TVD": ("medusa1", ("heads.loss.tvd=4",)),
    "Medusa-1, acceptance": ("medusa1", ("heads.loss.acceptance=1",)),
    "Medusa-1, shared lm_head": ("medusa1", ("heads.shared_lm_head=true",)),
    "Medusa-1, two blocks": ("medusa1", ("heads.num_layers=2",)),
    "Hydra": ("medusa1", ("heads.sequential=true",)),
    "Hydra, KL": ("medusa1", ("heads.sequential=true", "heads.loss.forward_kl=1")),
    "Medusa-2": ("medusa2", ()),
}
"""Name -> (recipe of storyteller-11m, overrides)."""
OWN_ANSWERS = "Medusa-1 on the data's own answers"


def main() -> None:
    options = _parse()
    console = standard_output() if sys.stdout.isatty() else standard_output(width=150)
    out = Path(options.output)
    results = json.loads(out.read_text()) if out.is_file() else {"arms": {}, "reports": {}}
    results |= {"hardware": hardware(), "versions": versions(), "commit": commit(), "steps": options.steps}
    arms = {name: (*ARMS[name], options.answers) for name in ARMS if not options.arms or name in options.arms}
    if options.own_answers:
        as_many = len(Path(options.answers).read_text().splitlines())
        arms[OWN_ANSWERS] = ("medusa1", (f"data.max_rows={as_many}",), options.own_answers)
    for name, (recipe, overrides, answers) in arms.items():
        folder = Path(options.runs) / slug(name)
        train(RECIPES / f"{recipe}.yaml", [*_given(recipe, answers, options), *overrides], folder)
        results["arms"][name] = curve_of(folder)
    if options.train_only:
        return
    prompt_sets = {name: path for name, _, path in (each.partition("=") for each in options.prompts)}
    for target, names in _by_target(options.target, arms, Path(options.runs)).items():
        model, tokenizer = CausalLM(load_model(target, parse_dtype("bf16"))), load_tokenizer(target)
        heads = {name: load_heads(Path(options.runs) / slug(name) / "final", model) for name in names}
        for prompt_set, path in prompt_sets.items():
            prompts = read_prompts(path, tokenizer, options.limit)
            ends = eos_token_ids(model.model, tokenizer)
            texts = greedy_texts(model, prompts, DecodingConfig(options.max_new_tokens, eos_token_ids=ends))
            for name in names:
                results["arms"][name].setdefault("accuracy", {})[prompt_set] = accuracy(model, heads[name], texts)
            config = EvaluationConfig(options.max_new_tokens, eos_token_ids=ends)
            report = evaluate(model, methods(model, heads, config), prompts, config)
            for row in report["rows"]:
                if row["method"] in heads:
                    measured = results["arms"][row["method"]].setdefault("decoding", {}).setdefault(prompt_set, {})
                    measured[row["setting"]] = {
                        key: row[key]
                        for key in ("tokens_per_pass", "speedup_of_totals", "speedup", "conditional_acceptance")
                    }
            write(results, out)
    for prompt_set in prompt_sets:
        console.print(table(results, prompt_set))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of storyteller-11m, or of another small target")
    parser.add_argument("--answers", required=True, help="rows of `headstart regenerate`")
    parser.add_argument("--own-answers", help="rows of question and answer, for the arm without self-distillation")
    parser.add_argument("--heldout", required=True, help="rows for the evaluations during training")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS))
    parser.add_argument("--train-only", action="store_true", help="leave the measuring to a later call")
    parser.add_argument("--runs", default="runs/heads")
    parser.add_argument("--output", default="heads.json")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--limit", type=int, default=20, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    return parser.parse_args()


def _given(recipe: str, answers: str, options: argparse.Namespace) -> list[str]:
    """Return the overrides that all arms of a recipe share."""
    given = [f"target={options.target}", f"data.train={answers}", f"data.heldout={options.heldout}"]
    if recipe == "medusa1":  # the target stands still: it is run once for all arms on the same answers
        given += [f"features.folder={Path(options.runs) / 'features' / Path(answers).stem}"]
    return [*given, f"training.steps={options.steps}", f"evaluation.every={max(options.steps // 5, 1)}"]


def _by_target(target: str, arms: dict[str, Any], runs: Path) -> dict[str, list[str]]:
    """Medusa-2 brings a target of its own."""
    grouped: dict[str, list[str]] = {}
    for name in arms:
        own = runs / slug(name) / "final" / TARGET_FOLDER
        grouped.setdefault(str(own) if own.is_dir() else target, []).append(name)
    return grouped


def greedy_texts(
    target: CausalLM, prompts: Sequence[Sequence[int]], config: DecodingConfig
) -> list[tuple[Sequence[int], int]]:
    """The target's own answers, as (tokens, prompt length)."""
    return [((*prompt, *Engine(target).decode(prompt, config).tokens), len(prompt)) for prompt in prompts]


def accuracy(
    target: CausalLM, heads: MedusaHeads, texts: Sequence[tuple[Sequence[int], int]]
) -> list[dict[str, float]]:
    """Each head's top-1 and top-5."""
    return [{"top1": ranks[0], "top5": sum(ranks[:5])} for ranks in rank_accuracies(target, heads, texts)]


def methods(target: CausalLM, heads: dict[str, MedusaHeads], config: EvaluationConfig) -> list[Method]:
    """Plain decoding and every arm, greedy and at T=1, to be run in turns."""
    drafters = {name: MedusaDrafter(each) for name, each in heads.items()}
    found = []
    for setting, sampling in (("greedy", SamplingConfig()), ("sampling", SamplingConfig(temperature=1.0))):
        decoding = DecodingConfig(config.max_new_tokens, sampling, eos_token_ids=config.eos_token_ids)
        found.append(our_method(target, setting, PLAIN, None, decoding))
        found += [our_method(target, setting, name, drafter, decoding) for name, drafter in drafters.items()]
    return found


def table(results: dict[str, Any], prompt_set: str) -> Table:
    """An arm a row."""
    shown = Table(title=prompt_set)
    for column in ("arm", "top-1 of head 0, 1, …", "top-5", "tokens/pass greedy", "T=1", "speed-up greedy", "T=1", "s"):
        shown.add_column(column)
    for name, arm in results["arms"].items():
        if prompt_set not in arm.get("decoding", {}):
            continue
        heads, measured = arm["accuracy"][prompt_set], arm["decoding"][prompt_set]
        shown.add_row(
            name,
            " ".join(f"{head['top1']:.2f}" for head in heads),
            " ".join(f"{head['top5']:.2f}" for head in heads),
            *(
                "{value:.2f} [{low:.2f}, {high:.2f}]".format(**measured[setting]["tokens_per_pass"])
                for setting in ("greedy", "sampling")
            ),
            *(speedup(measured[setting]) for setting in ("greedy", "sampling")),
            f"{arm['seconds']:.0f}",
        )
    return shown


if __name__ == "__main__":
    main()
