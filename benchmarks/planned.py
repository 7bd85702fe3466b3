"""Predictions of `headstart plan` against measurements, and calibrated trees against Medusa's published one.

For every drafter a plan is made on some prompts and checked on others: predicted and measured speed-up, and their
ratio. ``--widen`` gives the target, with the same function, a larger one's cost (`widen.py`).
Then the same heads decode with the published tree of 63 nodes (FasterDecoding/Medusa, ``mc_sim_7b_63``), with the
calibrated tree of as many nodes, and with the planned one, in turns. A killed run resumes: what the output file holds
is not repeated.

    python benchmarks/planned.py --target FOLDER --heads FOLDER --markov FOLDER --draft FOLDER --parallel FOLDER \
        --prompts FILE.jsonl --output FILE.json
"""

# ruff: noqa: E402  # waiting of threads is set before torch is imported
import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from rich.table import Table
from widen import widened_heads, widened_parallel, widened_to

from decoding.drafters import Drafter
from decoding.drafters.registry import DrafterLoader, LoadedWeights, named_drafter
from decoding.drafters.spec import DrafterSpec
from decoding.measure.figures import without_nan
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.planning.check import Group, check_plan, measure_in_turns
from decoding.measure.planning.choose import best
from decoding.measure.planning.make import Measured, Place, PlanConfig, Planner
from decoding.measure.questions import read_prompts
from decoding.metrics import ratio_of_rates
from decoding.model.causal_lm import CausalLM
from decoding.model.dtypes import parse_dtype
from decoding.model.fingerprint import prompts_fingerprint, stored_fingerprint
from decoding.model.heads import MedusaHeads
from decoding.model.loading import eos_token_ids, load_model, load_tokenizer
from decoding.model.parallel import ParallelDraft
from decoding.rules.best_tree import Paths
from trainer.terminal.console import standard_output

# A fact of the public repository FasterDecoding/Medusa (medusa/model/medusa_choices.py): paths of ranks, 63 nodes.
_PUBLISHED = (
    "0 0.0 1 0.1 2 0.0.0 1.0 0.2 3 0.3 4 0.4 2.0 0.5 0.0.1 5 0.6 6 0.7 0.1.0 1.1 7 0.8 0.0.2 3.0 0.9 8 9 1.0.0 0.2.0 "
    "1.2 0.0.3 4.0 2.1 0.0.4 0.0.5 0.0.0.0 0.1.1 0.0.6 0.3.0 5.0 1.3 0.0.7 0.0.8 0.0.9 6.0 0.4.0 1.4 7.0 0.1.2 2.0.0 "
    "3.1 2.2 8.0 0.5.0 1.5 1.0.1 0.2.1 9.0 0.6.0 0.0.0.1 1.6 0.7.0"
)
PUBLISHED: Paths = tuple(tuple(map(int, path.split("."))) for path in _PUBLISHED.split())
GOAL = 0.10
WEIGHTS = ("heads", "markov", "draft", "parallel")
"""Options that name trained weights, and names of their drafters in the tables."""


class Subject(NamedTuple):
    """A target, and the weights that draft for it, by the drafter's name in the tables."""

    name: str
    target: CausalLM
    weights: dict[str, LoadedWeights]

    def load(self, spec: DrafterSpec) -> Drafter:
        """Make a drafter; the path of its spec is the name of its weights."""
        return named_drafter(spec.name, None if spec.path is None else self.weights[spec.path], **spec.options)


def specs_of(subject: Subject) -> dict[str, DrafterSpec]:
    """Return the drafters to plan with, by name; a hybrid joins the best heads to a lookup."""
    kinds = {"heads": "heads", "markov": "heads", "draft": "draft", "parallel": "parallel"}
    specs = {name: DrafterSpec(kinds[name], name, {}) for name in subject.weights}
    specs["lookup"] = DrafterSpec("lookup", None, {})
    if joined := next((name for name in ("markov", "heads") if name in subject.weights), None):
        specs["hybrid"] = DrafterSpec("hybrid", joined, {"of": "heads"})
    return specs


def read_subject(options: argparse.Namespace) -> tuple[Subject, Any]:
    """Read the target with its drafters, and widen them if asked to; returns them and the tokenizer."""
    model, tokenizer = load_model(options.target, parse_dtype(options.dtype)), load_tokenizer(options.target)
    target = CausalLM(model)
    loader, kinds = DrafterLoader(target, tokenizer), {"heads": "heads", "markov": "heads", "draft": "draft"}
    kinds["parallel"] = "parallel draft"
    weights: dict[str, LoadedWeights] = {
        name: loader.read_weights(kind, getattr(options, name))  # type: ignore[arg-type]  # the kinds of the registry
        for name, kind in kinds.items()
        if getattr(options, name)
    }
    given = Subject(Path(options.target).name, target, weights)
    return _widened(given, int(options.widen)) if options.widen else given, tokenizer


def _widened(given: Subject, size: int) -> Subject:
    """Return the same functions at the cost of a target of about ``size`` parameters."""
    wide, told = widened_to(given.target.model, size)
    grown: dict[str, LoadedWeights] = {}
    for name, held in given.weights.items():
        if isinstance(held, MedusaHeads):
            grown[name] = widened_heads(held, told["width"])
        else:
            grown[name] = widened_parallel(held, told["width"]) if isinstance(held, ParallelDraft) else held
    return Subject(f"{given.name}, widened to {told['parameters'] / 1e6:.0f}M", CausalLM(wide), grown)


def measure_pair(
    subject: Subject, spec: DrafterSpec, prompts: Sequence[Sequence[int]], config: PlanConfig, rounds: int
) -> list[dict[str, Any]]:
    """Plan on one half of the prompts and check on the other; return a row for each batch size."""
    plan = Planner(subject.target, subject.load, [spec], prompts[::2], config).run()
    rows = check_plan(subject.target, subject.load, plan, prompts[1::2], config.decoding, rounds)
    return [{"target": subject.name, **row, "within": abs(row["ratio"] - 1) <= GOAL} for row in rows]


def measure_trees(
    subject: Subject, spec: DrafterSpec, prompts: Sequence[Sequence[int]], config: PlanConfig, rounds: int
) -> dict[str, Any]:
    """Decode with the published tree, the calibrated one of its size, and the planned one, in turns, one text each."""
    planner = Planner(
        subject.target, subject.load, [spec], prompts[::2], replace(config, most_nodes=64, batch_sizes=(1,))
    )
    place = Place(1, None)
    held: Measured = planner.measure(planner.families[0])
    held.costs[place] = planner.costs(planner.families[0], place, planner.curve(place))
    size = len(PUBLISHED)
    calibrated = max((c for c in held.candidates if len(c.tree) == size), key=lambda candidate: candidate.tokens)
    planned = best(held.candidates, held.costs[place]).candidate
    trees = {"published": PUBLISHED, "calibrated": calibrated.tree, "planned": planned.tree}
    drafters: dict[str, Drafter | None] = {"plain": None}
    drafters |= {name: subject.load(planner.families[0].of_tree(tree)) for name, tree in trees.items()}
    groups = measure_in_turns(subject.target, drafters, prompts[1::2], config.decoding, 1, rounds)

    def over(name: str, other: str) -> dict[str, float]:
        pairs = [(*mine[:2], *theirs[:2]) for mine, theirs in zip(groups[name], groups[other], strict=True)]
        return ratio_of_rates(pairs)._asdict()

    return {
        "target": subject.name,
        "heads": spec.path,
        "forms": [
            {
                "tree": name,
                "nodes": len(tree),
                "depth": max(map(len, tree)),
                "tokens_per_pass": tokens_per_pass(groups[name]),
                "speedup": over(name, "plain"),
                "over_published": over(name, "published"),
                "paths": [list(path) for path in tree],
            }
            for name, tree in trees.items()
        ],
    }


def tokens_per_pass(groups: Sequence[Group]) -> float:
    return sum(group[0] for group in groups) / max(1, sum(group[2] for group in groups))


def tables(report: dict[str, Any]) -> list[Table]:
    """Return the predictions and the trees as tables."""
    shown = Table("target", "drafter", "batch", "form", "predicted", "measured", "ratio", "tokens/pass", "step cost")
    for row in report["pairs"]:
        shown.add_row(
            row["target"],
            row["drafter"],
            str(row["batch_size"]),
            row["spec"][:40],
            f"{row['predicted']:.2f}×",
            f"{row['measured']['value']:.2f}×",
            f"{row['ratio']:.3f}" + ("" if row["within"] else " (off)"),
            *(f"{row[name]['predicted']:.2f} / {row[name]['measured']:.2f}" for name in ("tokens_per_pass", "cost")),
        )
    trees = Table("target", "heads", "tree", "nodes", "depth", "tokens/pass", "speed-up", "over the published tree")
    for each in report["trees"]:
        for form in each["forms"]:
            trees.add_row(
                each["target"],
                each["heads"],
                form["tree"],
                *(str(form[name]) for name in ("nodes", "depth")),
                f"{form['tokens_per_pass']:.2f}",
                f"{form['speedup']['value']:.2f}×",
                "{value:.3f} [{low:.3f}, {high:.3f}]".format(**form["over_published"]),
            )
    return [shown, trees]


def begun(output: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the report to go on with: the file's, or a new one; SystemExit for a file of another run."""
    about = {"hardware": hardware(), "versions": versions(), "commit": commit()}
    if not output.is_file():
        return {"settings": settings, "pairs": [], "trees": [], "seconds": 0.0, **about}
    report: dict[str, Any] = json.loads(output.read_text())
    held = {**report["settings"], **{name: report[name] for name in about}}
    if changed := [name for name, value in {**settings, **about}.items() if held.get(name) != value]:
        raise SystemExit(f"{output} holds a run with other {', '.join(changed)}: give another file")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    for name in WEIGHTS:
        parser.add_argument(f"--{name}", help=f"folder of the {name}; left out if not given")
    parser.add_argument("--prompts", required=True, help=".jsonl file")
    parser.add_argument("--limit", type=int, default=64, help="prompts; half of them to plan on, half to check on")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2, help="times that each form decodes each prompt of the check")
    parser.add_argument("--seconds", type=float, default=4.0, help="longest time of one measurement of costs")
    parser.add_argument("--widen", type=float, help="measure on the target widened to this many parameters instead")
    parser.add_argument("--only", nargs="+", help="drafters to plan with, by name; all if not given")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write; what it holds is not repeated")
    options = parser.parse_args(arguments)

    subject, tokenizer = read_subject(options)
    prompts = read_prompts(options.prompts, tokenizer, options.limit)
    config = PlanConfig(
        batch_sizes=tuple(options.batch_sizes),
        contexts=(),
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        eos_token_ids=eos_token_ids(subject.target.model, tokenizer),
        seconds=options.seconds,
    )
    settings = {
        "prompts": len(prompts), "max_new_tokens": options.max_new_tokens, "temperature": options.temperature,
        "batch_sizes": options.batch_sizes, "rounds": options.rounds, "dtype": options.dtype, "widen": options.widen,
        "weights": {name: stored_fingerprint(path) for name in WEIGHTS if (path := getattr(options, name))},
        "target": stored_fingerprint(options.target), "prompt_ids": prompts_fingerprint(prompts),
    }  # fmt: skip
    report = begun(options.output, settings)
    console = standard_output(width=170)

    def save(began: float) -> None:
        report["seconds"] += time.perf_counter() - began
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(without_nan(report), indent=1) + "\n")

    specs = {name: spec for name, spec in specs_of(subject).items() if name in (options.only or [name])}
    done = {row["drafter"] for row in report["pairs"]}
    for name, spec in specs.items():
        if str(spec) not in done:
            began = time.perf_counter()
            report["pairs"] += measure_pair(subject, spec, prompts, config, options.rounds)
            save(began)
            console.print(f"{subject.name}, {name}: done")
    with_trees = {each["heads"] for each in report["trees"]}
    for name in ("heads", "markov"):
        four = isinstance(held := subject.weights.get(name), MedusaHeads) and held.config.num_heads >= 4
        if name in specs and four and name not in with_trees:
            began = time.perf_counter()
            report["trees"].append(measure_trees(subject, specs[name], prompts, config, options.rounds))
            save(began)
    for table in tables(report):
        console.print(table)
    within = sum(row["within"] for row in report["pairs"])
    console.print(f"{within} of {len(report['pairs'])} predictions within {GOAL:.0%}; written: {options.output}")


if __name__ == "__main__":
    main()
