"""Distilling a draft: Headstart against TRL's GKD trainer, from the same student, on the same tokens, in turns.

The recipe's draft is made once, and its rows are tokenised once. Each side then trains it in processes of its own, in
turns and with a seed a round: by forward KL on the rows (offline), and on what the student itself writes to the rows'
prompts (on-policy). With "teacher cache" our side reads the target's logits from disk, which TRL cannot: its offline
runs stand beside. A step's batch is run in micro batches of several sizes, and each side is judged by the one that is
fastest for it. Tokens/s are trained tokens over the seconds of the steps, without loading and the first step; memory is
the peak of a training's process. The drafts are then decoded with by the real loop, greedy and at T=1, four tokens
drafted.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0 torch==2.13.0
    python benchmarks/drafts_peer.py --target FOLDER --rows ANSWERS.jsonl --prompts TEST.jsonl \
        --peer-python /tmp/trl/bin/python draft.init.from_target.layers=2
"""

# ruff: noqa: E402  # waiting of threads is set before torch is imported
import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import torch
from arms import ROOT, SECONDS, run, slug, train, write
from drafts_peer_table import OURS, goals, table
from peer_acceptance import DRAFT_TOKENS, measure
from transformers import PreTrainedTokenizerBase

from decoding.generate import DecodingConfig
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.questions import read_prompts
from decoding.model.causal_lm import CausalLM
from decoding.model.dtypes import parse_dtype
from decoding.model.loading import eos_token_ids, load_model, load_tokenizer
from trainer.data.batch import Example
from trainer.data.dataset import load_dataset
from trainer.drafts.start import initial_draft, write_draft
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.reading import load_recipe
from trainer.terminal.console import standard_output

PEER, START = "TRL GKD", "untrained"
PEER_SCRIPT = ROOT / "benchmarks" / "peer_gkd.py"
PEER_RESULT = "training.json"  # as benchmarks/peer_gkd.py calls it, which only the peer's environment can import


class Setting(NamedTuple):
    """The share of texts that the student writes: ``lmbda`` as TRL names it, ``policy`` as a recipe does.

    ``peer``: another setting whose runs of TRL stand beside ours; ``cached``: our side reads the target's logits.
    """

    lmbda: float
    policy: tuple[str, ...]
    peer: str | None = None
    cached: bool = False


_OFFLINE = ("draft.policy.offline=1", "draft.policy.draft=0")
SETTINGS = {
    "offline": Setting(0.0, _OFFLINE),
    "teacher cache": Setting(0.0, _OFFLINE, "offline", cached=True),
    "on-policy": Setting(1.0, ("draft.policy.offline=0", "draft.policy.draft=1")),
    "half on-policy": Setting(0.5, ("draft.policy.offline=0.5", "draft.policy.draft=0.5")),
}


def main() -> None:
    options = _parse()
    check_peer(options.peer_python)
    runs = Path(options.runs)
    recipe = recipe_of(options)
    target, tokenizer = CausalLM(load_model(options.target, parse_dtype("bf16"))), load_tokenizer(options.target)
    examples = load_dataset(options.rows, recipe.data, tokenizer).examples
    rows = write_rows(examples, runs / "rows.jsonl")
    student = write_student(target, tokenizer, recipe, examples, runs / "student")
    results: dict[str, Any] = {
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "note": options.note,
        "prompts": options.limit,
        "max_new_tokens": options.max_new_tokens,
        "training": recipe.training.model_dump(mode="json"),
        "draft": recipe.draft.model_dump(mode="json"),
        "settings": {},
    }
    for name in options.settings:
        written = write_cache(options) if SETTINGS[name].cached else {}
        results["settings"][name] = {**written, **speeds(train_in_turns(name, student, rows, recipe, options))}
        write(results, Path(options.output))
    prompts = read_prompts(options.prompts, tokenizer, options.limit)
    ends = eos_token_ids(target.model, tokenizer)
    config = DecodingConfig(options.max_new_tokens, eos_token_ids=ends)
    arms = {START: [student]} | trained_drafts(results, options)
    pairs = {name: (f"{name}: {OURS}", f"{name}: {PEER}") for name in options.settings}
    results |= measure(target, tokenizer, arms, pairs, prompts, config)
    for name in options.settings:
        results["settings"][name]["goals"] = goals(results, name)
    write(results, Path(options.output))
    (standard_output() if sys.stdout.isatty() else standard_output(width=150)).print(table(results))


def _absolute(path: str) -> str:
    """Our trainer runs in the repository's root, wherever this was called."""
    return str(Path(path).resolve())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the recipe")
    parser.add_argument("--target", type=_absolute, required=True, help="folder of a small target")
    parser.add_argument("--rows", type=_absolute, required=True, help="rows of `headstart regenerate`")
    parser.add_argument("--prompts", type=_absolute, required=True, help="JSONL of held-out prompts to decode from")
    parser.add_argument("--peer-python", required=True, help="the Python of an environment with trl")
    parser.add_argument("--recipe", type=_absolute, default=str(ROOT / "recipes" / "any" / "draft.yaml"))
    parser.add_argument(
        "--settings", nargs="*", choices=list(SETTINGS), default=["offline", "teacher cache", "on-policy"]
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side; the seed is another in each")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of a step")
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[16, 4], help="sequences of a forward pass")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--policy-tokens", type=int, default=96, help="most new tokens that the student writes")
    parser.add_argument("--threads", type=int, help="of each training process")
    parser.add_argument("--limit", type=int, default=40, help="prompts to decode from")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of the texts decoded in the end")
    parser.add_argument(
        "--runs", type=_absolute, default="runs/drafts-peer", help="a run that is finished there is not done again"
    )
    parser.add_argument("--output", default="drafts_peer.json")
    parser.add_argument("--note", default="", help="what a reader has to know of this measurement")
    return parser.parse_args()


# --- what both sides start from -----------------------------------------------------------------------------------


def check_peer(python: str) -> None:
    """ValueError if TRL cannot be run: before an hour is spent on our own half."""
    if subprocess.run([python, "-c", "import trl, datasets"], capture_output=True, check=False).returncode:
        raise ValueError(f"{python} has no trl: make an environment with trl and torch, and give its Python")


def _overrides(options: argparse.Namespace, micro_batch_size: int | None = None) -> list[str]:
    """Return the recipe's overrides, the same for both sides: AdamW, and no setting that GKD lacks."""
    given = [f"target={options.target}", f"data.train={options.rows}", f"data.heldout={options.rows}"]
    given += [f"data.max_length={options.max_length}", "name=peer", "tracking=none"]
    given += [f"training.steps={options.steps}", f"training.learning_rate={options.learning_rate}"]
    given += [f"training.batch_size={options.batch_size}"]
    given += [f"training.micro_batch_size={micro_batch_size or options.batch_size}"]
    given += ["training.optimizer=adamw", "training.weight_decay=0", "training.max_grad_norm=1"]
    given += ["training.mixed_precision=bf16", "draft.loss.forward_kl=1", "draft.check_costs=false"]
    given += [f"draft.num_draft_tokens={DRAFT_TOKENS}", f"checkpoint.every={options.steps}"]
    given += [f"draft.policy.max_new_tokens={options.policy_tokens}", "draft.policy.temperature=1"]
    given += ["evaluation.prompts=0", "evaluation.keep=last", "evaluation.patience=null"]
    return [*given, *options.overrides]


def recipe_of(options: argparse.Namespace) -> DraftRecipe:
    """Read the recipe of the student, the rows and the peer's settings; ValueError unless it is of kind draft."""
    recipe = load_recipe(options.recipe, [*_overrides(options), f"output={options.runs}"])
    if not isinstance(recipe, DraftRecipe):
        raise ValueError(f"{options.recipe} is of kind {recipe.kind!r}: give a recipe of kind draft")
    return recipe


def write_rows(examples: Sequence[Example], path: Path) -> Path:
    """Write the very tokens we train on, for `benchmarks/peer_gkd.py`: the prompt's length, and prompt and answer."""
    lines = []
    for place, example in enumerate(examples):
        tokens, prompt_length = example.tokens.tolist(), example.prompt_length
        one_answer = example == Example(tokens, [place >= prompt_length for place in range(len(tokens))], prompt_length)
        if not prompt_length or not one_answer:
            raise ValueError(
                f"example {place} is no prompt with one answer behind it, which is all that TRL's GKD trains on: "
                "give rows of `headstart regenerate`, and set data.packing=false"
            )
        lines.append(json.dumps({"input_ids": tokens, "prompt_length": prompt_length}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


def write_student(
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    recipe: DraftRecipe,
    examples: Sequence[Example],
    folder: Path,
) -> Path:
    """The recipe's untrained draft, in fp32; the one that is there already, if there is one."""
    if not (folder / "config.json").is_file():
        torch.manual_seed(recipe.training.seed)
        initial = initial_draft(target, tokenizer, recipe.draft, examples, longest=recipe.data.max_length)
        write_draft(CausalLM(initial.model, initial.output_tokens), tokenizer, folder)
    return folder


# --- training -----------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """One training: what on, by whom, in micro batches of which size, and which round, whose number is its seed."""

    setting: str
    side: str
    micro_batch_size: int
    round: int

    def folder(self, runs: str) -> Path:
        return Path(runs) / slug(" ".join(map(str, self)))


def _run_of(setting: str, side: str, micro_batch_size: int, index: int) -> Run:
    """Return one side's run; TRL's of a setting that it lacks is that of the setting beside it."""
    beside = SETTINGS[setting].peer if side == PEER else None
    return Run(beside or setting, side, micro_batch_size, index)


def _cache(options: argparse.Namespace) -> str:
    return f"draft.teacher.folder={Path(options.runs) / 'teacher'}"


def write_cache(options: argparse.Namespace) -> dict[str, float]:
    """Write the target's logits on the rows, ahead of the trainings; return the seconds that it took.

    Logits that are there are read again, which takes the seconds of starting.
    """
    headstart = [sys.executable, "-c", "from trainer.cli import main; main()"]
    command = [*headstart, "features", options.recipe, f"output={options.runs}"]
    return {"cache_seconds": run([*command, *_overrides(options), _cache(options)], options.threads)["seconds"]}


def train_in_turns(
    name: str, student: Path, rows: Path, recipe: DraftRecipe, options: argparse.Namespace
) -> dict[Run, dict[str, Any]]:
    """The figures of every run of a setting."""
    timed = {}
    for index in range(options.rounds):
        for size in options.micro_batch_sizes:
            ours, theirs = (_run_of(name, side, size, index) for side in (OURS, PEER))
            timed[ours] = train_ours(ours, student, recipe.draft.policy.every, options)
            timed[theirs] = train_peer(theirs, student, rows, recipe, options)
    return timed


def train_ours(of: Run, student: Path, every: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run of our trainer on the recipe; its figures."""
    overrides = [*_overrides(options, of.micro_batch_size), *SETTINGS[of.setting].policy]
    overrides += [f"training.seed={of.round}"]
    overrides += [f"draft.init.from_model={student}", "draft.init.from_target=null", "draft.init.from_config=null"]
    overrides += [_cache(options)] if SETTINGS[of.setting].cached else []
    folder = of.folder(options.runs)
    train(Path(options.recipe), overrides, folder, options.threads)
    return {**our_figures(folder / "metrics.jsonl", every), **_memory(folder)}


def _memory(folder: Path) -> dict[str, Any]:
    """Return the peak memory of the run, if it was trained without a stop."""
    used = folder / SECONDS
    return {"peak_gib": json.loads(used.read_text()).get("peak_gib")} if used.is_file() else {}


def our_figures(path: Path, every: int) -> dict[str, Any]:
    """Tokens and seconds of the steps of a run, without the first, or the first ``every`` that are written for at once.

    A step's seconds are from the end of the one before it, what is written for it included.
    """
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if "loss" in line]
    tokens = [after["tokens"] - before["tokens"] for before, after in pairwise(lines)]
    seconds = [count / line["tokens_per_second"] for count, line in zip(tokens, lines[1:], strict=True)]
    first = every - 1  # of these, which begin with the second step
    if not seconds[first:]:
        raise ValueError(f"{path} has {len(lines)} steps, of which the first {every} are not timed: train more")
    return {
        "timed_steps": len(seconds[first:]),
        "seconds_of_training": sum(seconds[first:]),
        "trained_tokens": sum(tokens[first:]),
        "tokens_per_second": sum(tokens[first:]) / sum(seconds[first:]),
        "generation_seconds": sum(line.get("generated/seconds", 0.0) for line in lines[every:]),
        "trained_tokens_of_all_steps": lines[-1]["tokens"],
    }


def train_peer(of: Run, student: Path, rows: Path, recipe: DraftRecipe, options: argparse.Namespace) -> dict[str, Any]:
    """One run of TRL's trainer with the recipe's settings; its figures."""
    folder = of.folder(options.runs)
    if not (folder / PEER_RESULT).is_file():
        command = peer_command(options.peer_python, of, student, rows, folder, recipe)
        used = run(command, options.threads, TRL_EXPERIMENTAL_SILENCE="1", PYTHONPATH="")
        (folder / SECONDS).write_text(json.dumps(used))
    figures: dict[str, Any] = json.loads((folder / PEER_RESULT).read_text())
    figures.pop("student")  # where it lies on this machine
    return {**figures, **_memory(folder)}


def peer_command(python: str, run: Run, student: Path, rows: Path, folder: Path, recipe: DraftRecipe) -> list[str]:
    """`benchmarks/peer_gkd.py` with what the recipe says of the training. ``beta`` 0 is forward KL."""
    training, policy = recipe.training, recipe.draft.policy
    given = {
        "student": student,
        "teacher": recipe.target,
        "rows": rows,
        "output": folder,
        "steps": training.steps,
        "batch-size": training.batch_size,
        "micro-batch-size": run.micro_batch_size,
        "lmbda": SETTINGS[run.setting].lmbda,
        "beta": 0,
        "temperature": policy.temperature,
        "max-new-tokens": policy.max_new_tokens,
        "learning-rate": training.learning_rate,
        "warmup-fraction": training.warmup_fraction,
        "adam-beta2": training.adam_beta2,
        "max-length": recipe.data.max_length,
        "seed": run.round,
    }
    return [python, str(PEER_SCRIPT), *(part for key, value in given.items() for part in (f"--{key}", str(value)))]


def speeds(timed: Mapping[Run, dict[str, Any]]) -> dict[str, Any]:
    """Every run's figures, the median tokens/s of each side and micro batch, and the ratio of both sides' best."""
    groups: dict[str, dict[int, list[float]]] = {OURS: {}, PEER: {}}
    for each, figures in timed.items():
        groups[each.side].setdefault(each.micro_batch_size, []).append(figures["tokens_per_second"])
    medians = {side: {size: statistics.median(each) for size, each in sizes.items()} for side, sizes in groups.items()}
    best = {side: max(sizes, key=lambda size: sizes[size]) for side, sizes in medians.items()}
    peaks = {
        side: max((f["peak_gib"] for each, f in timed.items() if each.side == side and f.get("peak_gib")), default=None)
        for side in groups
    }
    return {
        "runs": [{**each._asdict(), **figures} for each, figures in timed.items()],
        "tokens_per_second": {
            side: {str(size): speed for size, speed in each.items()} for side, each in medians.items()
        },
        "micro_batch_size": best,
        "peak_gib": peaks,
        "ratio": medians[OURS][best[OURS]] / medians[PEER][best[PEER]],
    }


def trained_drafts(results: dict[str, Any], options: argparse.Namespace) -> dict[str, list[Path]]:
    """Where each side's drafts of a setting lie, one a round, of the micro batch that is fastest for it."""
    found = {}
    for name in options.settings:
        for side, size in results["settings"][name]["micro_batch_size"].items():
            folders = [_run_of(name, side, size, index).folder(options.runs) for index in range(options.rounds)]
            found[f"{name}: {side}"] = [folder / "final" if side == OURS else folder for folder in folders]
    return found


if __name__ == "__main__":
    main()
