"""Which draft gains most: objectives, data policies, starts, vocabularies and sizes, on the same prompts and steps.

Each arm is the recipe of storyteller-11m with overrides, trained in a process of its own for the same steps over the
same prompts, and then decoded with by the real loop, greedy and at T=1, on every prompt set. An arm that is finished is
not trained again. `--train` trains, `--measure` decodes, with neither both are done; `--publish` writes the page and
the picture in docs/ of the results there are.

    python benchmarks/drafts.py --target FOLDER --answers GREEDY.jsonl --sampled-answers T1.jsonl \
        --own-answers TRAIN.jsonl --heldout TEST.jsonl --prompts gsm8k=TEST.jsonl
"""

# ruff: noqa: E402  # the path comes first: see below
import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# This folder, where arms.py lies, has a script of a package's name: the repository comes first.
_HERE = Path(__file__).resolve().parent
sys.path = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE), str(_HERE)]

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from arms import ROOT, curve_of, slug, train, write
from draft_page import publish
from rich.table import Table

from decoding.drafters import DraftModelDrafter
from decoding.generate import DecodingConfig
from decoding.measure.evaluate import PLAIN, EvaluationConfig, Method, evaluate, our_method
from decoding.measure.figures import speedup
from decoding.measure.machine import commit, hardware, versions
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids, load_draft, load_model, load_tokenizer, parse_dtype
from decoding.prompts import read_prompts
from decoding.rules.sampling import SamplingConfig
from trainer.terminal.console import standard_output

RECIPE = ROOT / "recipes" / "storyteller-11m" / "draft.yaml"
BASE = "forward KL"


class Arm(NamedTuple):
    """Overrides of the recipe, and which answers it learns: of the target, greedy or sampled, or the data's own."""

    overrides: tuple[str, ...] = ()
    answers: str = "greedy"


def _loss(**weights: float) -> Arm:
    return Arm(tuple(f"draft.loss.{name}={weight:g}" for name, weight in weights.items()))


def _policy(*overrides: str) -> Arm:
    return Arm(tuple(f"draft.policy.{override}" for override in ("max_new_tokens=96", "every=5", *overrides)))


def _start(*overrides: str) -> Arm:
    return Arm(tuple(f"draft.init.{override}" for override in overrides))


def _shape(layers: int, width: int) -> Arm:
    return _start(f"from_target.layers={layers}", f"from_target.width={width}")


_RANDOM = (
    "{num_hidden_layers: 1, hidden_size: 192, intermediate_size: 520, num_attention_heads: 3, num_key_value_heads: 3}"
)
COMPARISONS: dict[str, dict[str, Arm]] = {
    "objectives": {
        BASE: Arm(),
        "reverse KL": _loss(reverse_kl=1),
        "JSD": _loss(jsd=1),
        "TVD": _loss(tvd=1),
        "acceptance": _loss(acceptance=1),
        "acceptance + KL": _loss(acceptance=0.5, forward_kl=0.5),
        "LK, adaptive": _loss(lk=1),
        "cross entropy": _loss(cross_entropy=1),
        "KL + hidden states": _loss(forward_kl=1, hidden=0.5),
    },
    "data policies": {
        BASE: Arm(),
        "the target's answers at T=1": Arm(answers="sampled"),
        "the data's own answers": Arm(answers="own"),
        "half from the draft (GKD)": _policy("offline=0.5", "draft=0.5"),
        "half from the loop (Draft-OPD)": _policy("offline=0.5", "loop=0.5"),
        "offline, then the loop": _policy("offline=[1,0]", "loop=[0,1]"),
    },
    "starts": {
        BASE: Arm(),
        "random weights, same shape": _start("from_target=null", f"from_config={_RANDOM}"),
        "two layers, narrow": _shape(2, 192),
        "one layer, full width": _shape(1, 320),
        "first and last layer, full width": _start("from_target.layers=[0,-1]", "from_target.width=320"),
    },
    "vocabulary": {
        BASE: Arm(),
        "2,048 tokens": Arm(("draft.vocabulary=2048",)),
        "512 tokens": Arm(("draft.vocabulary=512",)),
    },
    "sizes": {
        BASE: Arm(),
        "1 × 64": _shape(1, 64),
        "1 × 128": _shape(1, 128),
        "one layer, full width": _shape(1, 320),
        "two layers, narrow": _shape(2, 192),
        "4 × 320": _shape(4, 320),
    },
}
"""Comparison -> arm -> what differs. An arm that is in several of them is trained once. The base is one layer, pruned
to a width of 192, which learns the target's greedy answers by forward KL."""
REMOVED = {"objectives": ("TVD++, rewards normalised", "KL, hardest fifth dropped", "KL, AdaSPEC's choice")}
"""Comparison -> arms that were measured and gained nothing; their code is removed, their rows stay on the page."""
LENGTHS = (2, 4, 6)
"""Draft lengths measured in the comparison of sizes, on the first prompt set; all else is measured at 4."""


def main() -> None:
    options = _parse()
    out = Path(options.output)
    results = json.loads(out.read_text()) if out.is_file() else {"arms": {}, "decoding": {}}
    if options.publish:
        publish(results, arms_on_the_page(), ROOT / "docs")
        return
    arms = {name: arm for part in options.comparisons for name, arm in COMPARISONS[part].items()}
    assert len({slug(name) for name in arms}) == len(arms), "every arm has a folder of its own"
    arms = {name: arm for name, arm in arms.items() if not options.arms or name in options.arms}
    results |= {"hardware": hardware(), "versions": versions(), "commit": commit(), "steps": options.steps}
    results["note"] = options.note
    if options.train or not options.measure:
        for name, arm in arms.items():
            train(RECIPE, _overrides(arm, options), Path(options.runs) / slug(name), options.threads)
    if options.measure or not options.train:
        for name in arms:
            results["arms"][name] = curve_of(Path(options.runs) / slug(name)) | {"comparisons": _parts(name)}
        measure(list(arms), results, options)
        for part in options.comparisons:
            for prompt_set in results["decoding"]:
                (standard_output() if sys.stdout.isatty() else standard_output(width=150)).print(
                    table(results, part, prompt_set)
                )


def arms_on_the_page() -> dict[str, list[str]]:
    """Return the arms of each comparison in the order of their rows, the removed ones last."""
    return {part: [*arms, *REMOVED.get(part, ())] for part, arms in COMPARISONS.items()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder of storyteller-11m, or of another small target")
    parser.add_argument("--answers", help="rows of `headstart regenerate`, greedy")
    parser.add_argument("--sampled-answers", help="the same at T=1")
    parser.add_argument("--own-answers", help="rows of question and answer, of which as many are taken")
    parser.add_argument("--heldout", help="rows for the evaluations during training")
    parser.add_argument("--prompts", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--comparisons", nargs="*", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--train", action="store_true", help="train alone")
    parser.add_argument("--measure", action="store_true", help="measure alone")
    parser.add_argument("--arms", nargs="*", help="these alone, of the comparisons")
    parser.add_argument("--threads", type=int, help="of each training process")
    parser.add_argument("--runs", default="runs/drafts")
    parser.add_argument("--output", default="drafts.json")
    parser.add_argument("--publish", action="store_true", help="write docs/drafts-measured.md and its picture")
    parser.add_argument("--note", default="", help="what a reader of the page has to know of this measurement")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--limit", type=int, default=20, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    return parser.parse_args()


def _parts(name: str) -> list[str]:
    return [part for part, arms in COMPARISONS.items() if name in arms]


def _overrides(arm: Arm, options: argparse.Namespace) -> list[str]:
    answers = {"greedy": options.answers, "sampled": options.sampled_answers, "own": options.own_answers}[arm.answers]
    given = [f"target={options.target}", f"data.train={answers}", f"data.heldout={options.heldout}"]
    given += [f"data.max_rows={len(Path(options.answers).read_text().splitlines())}", "draft.check_costs=false"]
    given += [f"training.steps={options.steps}", f"evaluation.every={max(options.steps // 4, 1)}"]
    return [*given, *arm.overrides]


def measure(names: Sequence[str], results: dict[str, Any], options: argparse.Namespace) -> None:
    """Decode with every arm's draft on every prompt set, in turns, and write what was measured after each set."""
    target, tokenizer = CausalLM(load_model(options.target, parse_dtype("bf16"))), load_tokenizer(options.target)
    drafts = {name: load_draft(str(Path(options.runs) / slug(name) / "final"), target, tokenizer) for name in names}
    for name, draft in drafts.items():
        results["arms"][name]["parameters"] = sum(weight.numel() for weight in draft.model.parameters())
    config = EvaluationConfig(options.max_new_tokens, eos_token_ids=eos_token_ids(target.model, tokenizer))
    sets = dict(each.split("=", 1) for each in options.prompts)
    first = next(iter({**results["decoding"], **sets}))
    for prompt_set, path in sets.items():
        prompts = read_prompts(path, tokenizer, options.limit)
        lengths = LENGTHS if prompt_set == first else (4,)
        report = evaluate(target, methods(target, drafts, config, lengths), prompts, config)
        found = results["decoding"].setdefault(prompt_set, {})
        results.setdefault("prompts", {})[prompt_set] = len(prompts)
        results["cost_curve_ms"] = report["cost_curve_ms"]
        for row in report["rows"]:
            if row["method"] == PLAIN:
                continue
            name, _, length = row["method"].rpartition(" @")
            keys = ("tokens_per_pass", "accepted_per_drafted", "conditional_acceptance", "predicted_speedup")
            keys += ("speedup_of_totals", "speedup")
            found.setdefault(name, {}).setdefault(row["setting"], {})[length] = {key: row[key] for key in keys}
        write(results, Path(options.output))


def methods(
    target: CausalLM, drafts: dict[str, CausalLM], config: EvaluationConfig, lengths: Sequence[int]
) -> list[Method]:
    """Plain decoding, and every draft, those of the sizes at each of the lengths, greedy and at T=1."""
    found = []
    for setting, sampling in (("greedy", SamplingConfig()), ("sampling", SamplingConfig(temperature=1.0))):
        decoding = DecodingConfig(config.max_new_tokens, sampling, eos_token_ids=config.eos_token_ids)
        found.append(our_method(target, setting, PLAIN, None, decoding))
        for name, draft in drafts.items():
            for length in lengths if name in COMPARISONS["sizes"] else (4,):
                drafter = DraftModelDrafter(draft, (1,) * length)
                found.append(our_method(target, setting, f"{name} @{length}", drafter, decoding))
    return found


def table(results: dict[str, Any], part: str, prompt_set: str) -> Table:
    """An arm of a comparison a row."""
    shown = Table(title=f"{part}, {prompt_set}, 4 tokens drafted")
    for column in ("arm", "parameters", "tokens/pass greedy", "T=1", "speed-up greedy", "T=1", "trained tokens"):
        shown.add_column(column)
    for name in COMPARISONS[part]:
        if name not in results["decoding"][prompt_set]:
            continue
        arm, measured = results["arms"][name], results["decoding"][prompt_set][name]
        by_setting = [measured[setting]["4"] for setting in ("greedy", "sampling")]
        shown.add_row(
            name,
            f"{arm['parameters'] / 1e6:.2f}M",
            *("{value:.2f} [{low:.2f}, {high:.2f}]".format(**each["tokens_per_pass"]) for each in by_setting),
            *(speedup(each) for each in by_setting),
            f"{arm['tokens']:,}",
        )
    return shown


if __name__ == "__main__":
    main()
