"""`headstart realign`: distils a stale draft on answers that its newly tuned target writes.

One folder contains everything; if the command is killed, the same command resumes from this folder. Three files contain
rows: prompts.jsonl to learn from, choosing.jsonl to choose the best weights, and heldout.jsonl to measure. The folder
also contains the answers to the first two files, the files of the training, realigned.json, and final/ with the draft.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from decoding.drafters.registry import LoadedWeights, named_drafter
from decoding.errors import UserError
from decoding.generate import DecodingConfig
from decoding.jsonl import read_lines
from decoding.measure.figures import estimate
from decoding.measure.measurement import count_steps
from decoding.measure.results import Figure, as_json, figure_of
from decoding.metrics import acceptance
from decoding.model.dspark_config import read_dspark_config
from decoding.model.loading import (
    check_same_tokenizer,
    dspark_folder,
    eagle3_folder,
    eos_token_ids,
    load_draft,
    load_dspark,
    load_eagle3,
    load_tokenizer,
)
from decoding.rules.sampling import SamplingConfig
from trainer.commands.findings import account
from trainer.commands.models import read_target
from trainer.commands.options import RealignOptions, RegenerateOptions
from trainer.commands.regenerate import run_regenerate
from trainer.commands.shared_options import ModelOptions
from trainer.data.conversations import check_prompts, read_heldout, short_enough
from trainer.files.folders import check_can_be_folder, hold, write_text
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.reading import overridden, parse_recipe
from trainer.run.train import FINAL, run_recipe
from trainer.terminal.console import ProgressBar, say, standard_error, standard_output

REPORT = "realigned.json"
_PROMPTS, _CHOOSING, _HELDOUT = "prompts.jsonl", "choosing.jsonl", "heldout.jsonl"
_MOST_CHOOSING, _MOST_HELDOUT = 64, 50
_PROMPT_TOKENS, _SEQUENCE_TOKENS = 64, 1024
_NAMES = {"tokens_per_pass": "tokens per target pass", "accepted_per_drafted": "accepted/drafted"}
_TEMPERATURES = {"greedy": 0.0, "T=1": 1.0}

Figures = dict[str, dict[str, Figure]]
"""For each setting, the tokens per target pass and the share of drafted tokens that were accepted."""


class HeldoutFigures(NamedTuple):
    """Figures for a target with a draft on the held-out prompts."""

    figures: Figures
    heldout: int
    """Number of held-out prompts."""
    positions: int
    """Length in tokens of the longest text that both the target and the draft support."""


def run_realign(options: RealignOptions, console: Console | None = None) -> dict[str, Any]:
    """Measure the stale draft, let the target write answers, train the draft on them, and measure the draft again;
    print and return the report.
    """
    watched, console = console or standard_error(), console or standard_output()
    check_can_be_folder(options.output, "output")
    if Path(options.draft).resolve() == (options.output / FINAL).resolve():
        raise UserError(f"{options.draft} was made in this output folder by an earlier run: use another output")
    recipe = recipe_of(options)
    with hold(options.output):
        return _realign(options, recipe, console, watched)


def _realign(options: RealignOptions, recipe: DraftRecipe, console: Console, watched: Console) -> dict[str, Any]:
    check_prompts(options.prompts, recipe.data.prompt_field, None)
    split_prompts(options)
    before = _measure(options, recipe, options.draft, watched)
    summary = "; ".join(f"{name}: {estimate(named['tokens_per_pass'])}" for name, named in before.figures.items())
    say(console, f"tokens per target pass of the stale draft: {summary}")
    recipe = recipe_of(options, before.positions)
    for name in (_PROMPTS, _CHOOSING):
        run_regenerate(_questions(options, recipe, name), console)
    final = run_recipe(recipe, watched)
    after = _measure(options, recipe, str(final), watched)
    report: dict[str, Any] = as_json(
        {
            "target": options.target,
            "draft": options.draft,
            "heldout_prompts": after.heldout,
            "max_new_tokens": options.max_new_tokens,
            "draft_tokens": recipe.draft.num_draft_tokens,
            "before": before.figures,
            "after": after.figures,
            **account(),
        }
    )
    write_text(options.output / REPORT, json.dumps(report, indent=2) + "\n")
    columns = {"stale": before.figures, "realigned": after.figures}
    length = recipe.draft.num_draft_tokens
    title = f"{after.heldout} held-out prompts, chains of {length} drafted tokens, 95% intervals"
    console.print(_compared(columns, title))
    say(console, f"written: {final}, {options.output / REPORT}")
    return report


def split_prompts(options: RealignOptions) -> None:
    """Split the prompts into three files; the last rows are held out."""
    rows = [line.rstrip(b"\n") for _, line in read_lines(options.prompts)]
    if len(rows) < 3:
        raise UserError(f"{options.prompts} has {len(rows)} prompts: use at least 3, ideally hundreds")
    choosing, heldout = (min(most, math.ceil(len(rows) / 20)) for most in (_MOST_CHOOSING, _MOST_HELDOUT))
    options.output.mkdir(parents=True, exist_ok=True)
    learnt, last = rows[:-heldout], rows[-heldout:]
    parts = {_PROMPTS: learnt[:-choosing], _CHOOSING: learnt[-choosing:], _HELDOUT: last}
    for name, part in parts.items():
        write_text(options.output / name, "".join(line.decode() + "\n" for line in part))


def _questions(options: RealignOptions, recipe: DraftRecipe, name: str) -> RegenerateOptions:
    """Return the options that make the target answer a file of prompts."""
    return RegenerateOptions(
        prompts=str(options.output / name),
        output=answers_to(options.output / name),
        target=options.target,
        # Drafting makes this faster and does not change the answers.
        drafter=f"{_kind(recipe)}:{options.draft},tokens={recipe.draft.num_draft_tokens}",
        prompt_field=recipe.data.prompt_field,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        batch_size=recipe.training.batch_size,
        seed=recipe.training.seed,
        dtype=recipe.dtype,
        trust_remote_code=recipe.trust_remote_code,
    )


def _kind(recipe: DraftRecipe) -> str:
    """Return the registry's name for the draft's kind."""
    return "dspark" if recipe.draft.dspark else "eagle3" if recipe.draft.eagle3 else "draft"


def answers_to(prompts: Path) -> Path:
    """Return the path of the answers to a file of prompts."""
    return prompts.with_name(f"{prompts.stem}-answers.jsonl")


def recipe_of(options: RealignOptions, positions: int = 1 << 30) -> DraftRecipe:
    """Return the recipe that trains the draft, with the options' overrides applied.

    ``positions``: length in tokens of the longest text that both the target and the draft support.
    """
    every, folder = max(1, options.steps // 10), dspark_folder(options.draft)
    draft: dict[str, Any] = {"num_draft_tokens": options.draft_tokens}
    if folder is not None:
        stored = read_dspark_config(folder)
        draft["num_draft_tokens"] = min(options.draft_tokens, stored.block_size)
        draft["dspark"] = {
            "layers": stored.num_hidden_layers,
            "block_size": stored.block_size,
            "markov_rank": stored.markov_rank,
            "sample_from_anchor": stored.sample_from_anchor,
        }
    elif eagle3_folder(options.draft) is not None:
        draft["eagle3"] = {}
    content: dict[str, Any] = {
        "kind": "draft",
        "name": "realigned draft",
        "output": str(options.output),
        "target": options.target,
        "data": {
            "train": str(answers_to(options.output / _PROMPTS)),
            "heldout": str(answers_to(options.output / _CHOOSING)),
            "max_length": min(positions - options.max_new_tokens, max(_SEQUENCE_TOKENS, 2 * options.max_new_tokens)),
        },
        "draft": {**draft, "init": {"from_model": options.draft}},
        "training": {"steps": options.steps, "batch_size": 16, "micro_batch_size": 4},
        "evaluation": {
            "every": every,
            "best_prompts": _MOST_CHOOSING,
            "prompt_tokens": _PROMPT_TOKENS,
            "max_new_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "keep": "best",
        },
        "checkpoint": {"every": every},
        "tracking": "none",
    }
    recipe = parse_recipe(overridden(content, options.overrides or ()), "realign")
    if not isinstance(recipe, DraftRecipe):
        raise UserError(f"kind={recipe.kind} does not train a draft: omit the override")
    return recipe


def _measure(options: RealignOptions, recipe: DraftRecipe, name: str, console: Console) -> HeldoutFigures:
    """Load the target and the draft, check that they fit each other, and decode the held-out prompts with them."""
    trusted, room = recipe.trust_remote_code, options.max_new_tokens
    tokenizer = load_tokenizer(options.target, trusted)
    heldout = read_heldout(options.output / _HELDOUT, recipe.data.prompt_field, None, tokenizer)
    kind = _kind(recipe)
    if kind == "draft":
        check_same_tokenizer(tokenizer, load_tokenizer(name, trusted))
    loading = ModelOptions(target=options.target, dtype=recipe.dtype, trust_remote_code=trusted)
    target = read_target(options.target, loading)
    if kind == "draft":
        draft: LoadedWeights = load_draft(name, target, None, trusted)
    else:
        draft = load_dspark(name, target) if kind == "dspark" else load_eagle3(name, target)
    drafter = named_drafter(kind, draft, tokens=recipe.draft.num_draft_tokens)
    positions = min((m.max_positions for m in (target, drafter) if m.max_positions is not None), default=1 << 30)
    if positions < _PROMPT_TOKENS + room:
        raise UserError(
            f"max_new_tokens is {room}, but with {_PROMPT_TOKENS} tokens of prompt this exceeds the {positions} "
            "tokens that target and draft support: lower max_new_tokens"
        )
    prompts = [prompt for _, prompt in short_enough(heldout, positions, room)]
    config = DecodingConfig(room, eos_token_ids=eos_token_ids(target.model, tokenizer))
    figures: Figures = {}
    for setting, temperature in _TEMPERATURES.items():
        sampled = replace(config, sampling=SamplingConfig(temperature))
        with ProgressBar(console, f"measuring the draft, {setting}", len(prompts)) as bar:
            batch_size = recipe.training.batch_size
            measured = acceptance(count_steps(target, drafter, prompts, sampled, batch_size, on_text=bar.advance))
        if not measured.passes:
            raise UserError(f"every text ended with its first token ({setting}): use prompts with longer answers")
        figures[setting] = {name: figure_of(getattr(measured, name)) for name in _NAMES}
    return HeldoutFigures(figures, len(prompts), positions)


def _compared(columns: Mapping[str, Figures], title: str) -> Table:
    """Return a table with a column for each draft; figures have 95% intervals."""
    table = Table("setting", "figure", *columns, title=title)
    for setting, names in next(iter(columns.values())).items():
        for name in names:
            table.add_row(setting, _NAMES[name], *(estimate(column[setting][name]) for column in columns.values()))
    return table
