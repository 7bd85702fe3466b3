"""A stale draft for a target that was tuned since: the tuned target writes answers, and the draft is distilled on them.

All of it stands in one folder, where the same command goes on after a kill: prompts.jsonl, choosing.jsonl and
heldout.jsonl (the rows to learn from, to choose the best weights by, and to measure with at the end), the answers to
the first two, the training's own files, final/ with the draft, and realigned.json.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from decoding.drafters.registry import named_drafter
from decoding.drafters.spec import DrafterSpec
from decoding.generate import DecodingConfig
from decoding.jsonl import read_lines
from decoding.measure.machine import commit, hardware, versions
from decoding.model.loading import (
    check_same_tokenizer,
    eos_token_ids,
    load_draft,
    load_tokenizer,
)
from trainer.commands.models import read_target
from trainer.commands.regenerate import run_regenerate
from trainer.commands.training_options import RealignOptions, RegenerateOptions
from trainer.data.splits import not_held_out
from trainer.files.folders import check_can_be_folder, sha256_of
from trainer.files.lock import hold
from trainer.files.shards import write_text
from trainer.quickstart import resolve
from trainer.recipe.reading import parse_recipe
from trainer.recipe.recipe import AnyRecipe
from trainer.run.acceptance import Figures, compared, measure_figures, read_heldout, tokens_per_pass
from trainer.run.train import FINAL, ensure_built, run_recipe
from trainer.target.fingerprints import kept_fingerprint
from trainer.terminal.console import say, standard_error, standard_output

REPORT = "realigned.json"
_STALE = "stale.json"
_PROMPTS, _CHOOSING, _HELDOUT = "prompts.jsonl", "choosing.jsonl", "heldout.jsonl"
_MOST_CHOOSING, _MOST_HELDOUT = 16, 50
_PROMPT_TOKENS, _SEQUENCE_TOKENS = 64, 1024


class Fit(NamedTuple):
    """Figures of a target with its draft on the held-out prompts."""

    figures: Figures
    """The draft's figures by setting."""
    heldout: int
    """Number of prompts measured with."""
    positions: int
    """The longest text that both can hold."""


def run_realign(options: RealignOptions, console: Console | None = None) -> dict[str, Any]:
    """Measure the stale draft, let the target answer, train, measure again; prints and returns the report."""
    watched, console = console or standard_error(), console or standard_output()
    _check(options)
    ensure_built(options.target)
    with hold(options.output):
        return _realign(options, console, watched)


def _realign(options: RealignOptions, console: Console, watched: Console) -> dict[str, Any]:
    split_prompts(options)
    if options.heldout is not None and _digest(options.heldout) == _digest(options.prompts):
        say(watched, not_held_out("--heldout", "--prompts"))
    before = _measure_stale(options, watched)
    say(console, f"the stale draft, {tokens_per_pass(before.figures)}")
    recipe = recipe_of(options, before.positions)
    # The stale draft speculates, which saves time and changes no answer.
    spec = DrafterSpec("draft", options.draft, {"tokens": options.draft_tokens})
    for name in (_PROMPTS, _CHOOSING):
        run_regenerate(_questions(options, name), console, spec)
    final = run_recipe(recipe, watched)
    after = _measure(options, str(final), watched)
    report = {
        "target": options.target,
        "draft": options.draft,
        "heldout_prompts": after.heldout,
        "max_new_tokens": options.max_new_tokens,
        "draft_tokens": options.draft_tokens,
        "before": before.figures,
        "after": after.figures,
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
    }
    write_text(options.output / REPORT, json.dumps(report, indent=2) + "\n")
    title = f"held out, {after.heldout} prompts, chains of {options.draft_tokens} drafted tokens, 95% intervals"
    console.print(compared({"stale": before.figures, "realigned": after.figures}, title))
    say(console, f"written: {final}, {options.output / REPORT}")
    return report


def _check(options: RealignOptions) -> None:
    check_can_be_folder(options.output, "output")
    if Path(options.draft).resolve() == (options.output / FINAL).resolve():
        raise ValueError(f"{options.draft} is what was made here before: name another output to realign it again")
    for name in ("steps", "batch_size", "draft_tokens", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}: give at least 1")


def split_prompts(options: RealignOptions) -> None:
    """Write the three files of prompts, each row to one of them; the last rows are held out."""
    rows = [line.rstrip(b"\n") for _, line in read_lines(resolve(options.prompts))][: options.limit]
    choosing = min(_MOST_CHOOSING, math.ceil(len(rows) / 50))
    if options.heldout is None:
        heldout = rows[len(rows) - min(_MOST_HELDOUT, math.ceil(len(rows) / 20)) :]
        rows = rows[: len(rows) - len(heldout)]
    else:
        heldout = [line.rstrip(b"\n") for _, line in read_lines(resolve(options.heldout))][:_MOST_HELDOUT]
        if not heldout:
            raise ValueError(f"{options.heldout} holds no prompts to measure with: give some, or leave it out")
    if len(rows) < choosing + 1 or not heldout:
        raise ValueError(f"{options.prompts} leaves {len(rows)} prompts to learn from: give at least 3, best hundreds")
    options.output.mkdir(parents=True, exist_ok=True)
    parts = {_PROMPTS: rows[:-choosing], _CHOOSING: rows[-choosing:], _HELDOUT: heldout}
    for name, part in parts.items():
        write_text(options.output / name, "".join(line.decode() + "\n" for line in part))


def _digest(prompts: str) -> str:
    return sha256_of(Path(resolve(prompts)))


def _questions(options: RealignOptions, name: str) -> RegenerateOptions:
    """Return the options to let the target answer a file."""
    return RegenerateOptions(
        prompts=str(options.output / name),
        output=answers_to(options.output / name),
        target=options.target,
        prompt_field=options.prompt_field,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        seed=options.seed,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )


def answers_to(prompts: Path) -> Path:
    """Return the file of the answers to a file of prompts."""
    return prompts.with_name(f"{prompts.stem}-answers.jsonl")


def recipe_of(options: RealignOptions, positions: int) -> AnyRecipe:
    """Return the recipe that trains the draft. ``positions`` is the longest text that target and draft can hold."""
    every = max(1, options.steps // 10)
    content: dict[str, Any] = {
        "kind": "draft",
        "name": "realigned draft",
        "output": str(options.output),
        "target": options.target,
        "dtype": options.dtype,
        "trust_remote_code": options.trust_remote_code,
        "data": {
            "train": str(answers_to(options.output / _PROMPTS)),
            "heldout": str(answers_to(options.output / _CHOOSING)),
            "max_length": min(positions - options.max_new_tokens, max(_SEQUENCE_TOKENS, 2 * options.max_new_tokens)),
        },
        "draft": {
            "init": {"from_model": options.draft},
            "num_draft_tokens": options.draft_tokens,
            "check_costs": False,  # it is there and in use
        },
        "training": {
            "steps": options.steps,
            "batch_size": options.batch_size,
            "micro_batch_size": math.gcd(options.batch_size, 4),
            "learning_rate": options.learning_rate,
            "seed": options.seed,
        },
        "evaluation": {
            "every": every,
            "prompts": _MOST_CHOOSING,
            "prompt_tokens": _PROMPT_TOKENS,
            "max_new_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "keep": "best",
        },
        "checkpoint": {"every": every},
        "tracking": "none",
    }
    return parse_recipe(content, "realign")


def _measure_stale(options: RealignOptions, console: Console) -> Fit:
    """Return the stale draft's figures, kept on disk for a run that goes on."""
    file = options.output / _STALE
    kept = _kept(file, options) if file.exists() else None
    if kept is not None:
        return kept
    found = _measure(options, options.draft, console)
    write_text(file, json.dumps({"options": _made_by(options), "fit": found._asdict()}, indent=2) + "\n")
    return found


def _made_by(options: RealignOptions) -> dict[str, str]:
    """Return everything that the stale figures depend on, except the draft: its folder may hold another one by now."""
    made_by = {name: str(value) for name, value in vars(options).items() if name != "output"}
    made_by["heldout rows"] = sha256_of(options.output / _HELDOUT)
    made_by["target weights"] = kept_fingerprint(resolve(options.target), options.trust_remote_code)
    return made_by


def _kept(file: Path, options: RealignOptions) -> Fit | None:
    """Return the figures in a file; None where they belong to other models or settings, or cannot be read."""
    try:
        kept = json.loads(file.read_bytes())
        if kept["options"] != _made_by(options):
            return None
        fit = Fit(**kept["fit"])
        tokens_per_pass(fit.figures)
        return fit
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _measure(options: RealignOptions, name: str, console: Console) -> Fit:
    """Load target and draft, refuse what does not fit, and decode the held-out prompts with them."""
    trusted = options.trust_remote_code
    tokenizer = load_tokenizer(resolve(options.target), trusted)
    check_same_tokenizer(tokenizer, load_tokenizer(name, trusted))
    target = read_target(options.target, options)
    draft = load_draft(name, target, None, trusted)
    drafter = named_drafter("draft", draft, tokens=options.draft_tokens)
    positions = min((m.max_positions for m in (target, drafter) if m.max_positions is not None), default=1 << 30)
    if positions < _PROMPT_TOKENS + options.max_new_tokens:
        raise ValueError(
            f"max_new_tokens is {options.max_new_tokens}, which with {_PROMPT_TOKENS} of a prompt is more than the "
            f"{positions} tokens that target and draft can hold: lower it"
        )
    heldout = read_heldout(
        options.output / _HELDOUT, options.prompt_field, None, tokenizer, positions, options.max_new_tokens
    )
    prompts = [prompt for _, prompt in heldout]
    config = DecodingConfig(options.max_new_tokens, eos_token_ids=eos_token_ids(target.model, tokenizer))
    figures = measure_figures(target, drafter, prompts, config, options.batch_size, console)
    return Fit(figures, len(prompts), positions)
