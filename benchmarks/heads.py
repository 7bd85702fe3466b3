"""Which heads gain most: Medusa-1 in both layouts, hard and soft targets, Medusa-2, Hydra, on the same answers.

Each arm is a recipe with overrides, trained in a process of its own for the same steps on the same tokens, and then
decoded with: top-1 and top-5 of each head on the target's own greedy answers, tokens per target pass and speed-up over
plain decoding on every prompt set. An arm that is finished is not trained again.

    python benchmarks/heads.py --target FOLDER --answers ANSWERS.jsonl --heldout TEST.jsonl --prompts gsm8k=TEST.jsonl
"""

# ruff: noqa: E402  # the path comes first: see below
import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A script's own folder comes first in the path, where benchmarks/decoding.py would stand for the package.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

from rich.console import Console
from rich.table import Table

from decoding.drafters import MedusaDrafter
from decoding.evaluate import PLAIN, EvaluationConfig, Method, evaluate, our_method
from decoding.generate import DecodingConfig, decode
from decoding.heads import MedusaHeads
from decoding.loading import eos_token_ids, load_heads, load_model, load_tokenizer, parse_dtype
from decoding.machine import commit, hardware, versions
from decoding.prompts import read_prompts
from decoding.sampling import SamplingConfig
from decoding.target import CausalLM
from trainer.medusa import rank_accuracies
from trainer.medusa2 import TARGET_FOLDER

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes" / "storyteller-11m"
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Medusa-1": ("medusa1", ()),
    "Medusa-1, KL": ("medusa1", ("heads.loss.cross_entropy=0", "heads.loss.forward_kl=1")),
    "Medusa-1, TVD": ("medusa1", ("heads.loss.cross_entropy=0", "heads.loss.tvd=4")),
    "Medusa-1, acceptance": ("medusa1", ("heads.loss.cross_entropy=0", "heads.loss.acceptance=1")),
    "Medusa-1, shared lm_head": ("medusa1", ("heads.shared_lm_head=true",)),
    "Medusa-1, two blocks": ("medusa1", ("heads.num_layers=2",)),
    "Hydra": ("medusa1", ("heads.sequential=true",)),
    "Hydra, KL": ("medusa1", ("heads.sequential=true", "heads.loss.cross_entropy=0", "heads.loss.forward_kl=1")),
    "Medusa-2": ("medusa2", ()),
}
"""Name -> (recipe of storyteller-11m, overrides)."""
SECONDS = "seconds.json"
"""Wall time of an arm's training, imports and evaluations included."""
OWN_ANSWERS = "Medusa-1 on the data's own answers"


def main() -> None:
    options = _parse()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    out = Path(options.output)
    results = json.loads(out.read_text()) if out.is_file() else {"arms": {}, "reports": {}}
    results |= {"hardware": hardware(), "versions": versions(), "commit": commit(), "steps": options.steps}
    arms = {name: (*ARMS[name], options.answers) for name in ARMS if not options.arms or name in options.arms}
    if options.own_answers:
        as_many = len(Path(options.answers).read_text().splitlines())
        arms[OWN_ANSWERS] = ("medusa1", (f"data.max_rows={as_many}",), options.own_answers)
    for name, (recipe, overrides, answers) in arms.items():
        folder = Path(options.runs) / _slug(name)
        if not (folder / "final").is_dir():
            train(recipe, overrides, answers, folder, options)
        results["arms"][name] = curve_of(folder)
    if options.train_only:
        return
    prompt_sets = {name: path for name, _, path in (each.partition("=") for each in options.prompts)}
    for target, names in _by_target(options.target, arms, Path(options.runs)).items():
        model, tokenizer = CausalLM(load_model(target, parse_dtype("bf16"))), load_tokenizer(target)
        heads = {name: load_heads(Path(options.runs) / _slug(name) / "final", model) for name in names}
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
                        key: row[key] for key in ("tokens_per_pass", "speedup", "conditional_acceptance")
                    }
            _write(results, out)
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


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def train(recipe: str, overrides: Sequence[str], answers: str, folder: Path, options: argparse.Namespace) -> None:
    """Run an arm to its end, and note the wall time beside it."""
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), str(RECIPES / f"{recipe}.yaml")]
    command += [f"target={options.target}", f"data.train={answers}", f"data.heldout={options.heldout}"]
    if recipe == "medusa1":  # the target stands still: it is run once for all arms on the same answers
        command += [f"features.folder={Path(options.runs) / 'features' / Path(answers).stem}"]
    command += [f"output={folder}", f"training.steps={options.steps}", f"evaluation.every={max(options.steps // 5, 1)}"]
    began = time.perf_counter()
    subprocess.run([*command, *overrides], cwd=ROOT, check=True)
    (folder / SECONDS).write_text(json.dumps({"seconds": time.perf_counter() - began}))


def curve_of(folder: Path) -> dict[str, Any]:
    """Wall time, tokens per target pass on the held-out prompts against trained tokens, and tokens/s (median)."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # A step done again after a kill stands there twice, with the same figures but for the clock's.
    held = list({line["step"]: line for line in lines if "heldout/tokens_per_pass" in line}.values())
    steps = list({line["step"]: line for line in lines if "loss" in line}.values())
    return {
        **json.loads((folder / SECONDS).read_text()),
        "curve": [[line["tokens"], line["heldout/tokens_per_pass"]] for line in held],
        "tokens": steps[-1]["tokens"],
        "training_tokens_per_second": sorted(line.get("tokens_per_second", 0) for line in steps)[len(steps) // 2],
    }


def _by_target(target: str, arms: dict[str, Any], runs: Path) -> dict[str, list[str]]:
    """Medusa-2 brings a target of its own."""
    grouped: dict[str, list[str]] = {}
    for name in arms:
        own = runs / _slug(name) / "final" / TARGET_FOLDER
        grouped.setdefault(str(own) if own.is_dir() else target, []).append(name)
    return grouped


def greedy_texts(
    target: CausalLM, prompts: Sequence[Sequence[int]], config: DecodingConfig
) -> list[tuple[Sequence[int], int]]:
    """The target's own answers, as (tokens, prompt length)."""
    return [((*prompt, *decode(target, None, prompt, config).tokens), len(prompt)) for prompt in prompts]


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


def _write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


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
            *(f"{measured[setting]['speedup']['median']:.2f}×" for setting in ("greedy", "sampling")),
            f"{arm['seconds']:.0f}",
        )
    return shown


if __name__ == "__main__":
    main()
