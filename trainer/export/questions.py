"""The target and the prompts by which an export is decoded with, as far as they are on this machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from decoding.measure.redact import basename
from decoding.model.causal_lm import CausalLM
from decoding.model.dtypes import default_device
from decoding.model.hub import only_cached
from decoding.model.loading import load_model, load_tokenizer
from trainer.data.dataset import heldout_prompts, load_heldout_data
from trainer.export.origin import read_stored_provenance
from trainer.quickstart import resolve
from trainer.recipe.reading import parse_recipe
from trainer.run.acceptance import read_heldout

_NEW_TOKENS = 64
"""Tokens of a text after a prompt of the user's; a run's own prompts are answered as its evaluations answered them."""
_ROWS_PER_PROMPT = 16
"""Rows that are read of a run's held-out data for each prompt: some are too long, or hold none."""


class NotHere(Exception):
    """The reason why an export is not decoded with on this machine, with the remedy; no fault of the export."""


class Target(NamedTuple):
    """A target in fp32, in which a pass over several tokens writes what passes over one do."""

    name: str
    model: CausalLM
    tokenizer: PreTrainedTokenizerBase


class Questions(NamedTuple):
    """Prompts as token ids. ``name``: their file's."""

    name: str
    prompts: Sequence[tuple[int, ...]]
    max_new_tokens: int


def read_target(name: str | None, asked: bool, trusted: bool) -> Target:
    """Load a target. `NotHere` where nobody named it, or, unless the user asked for it, where it is not on the disk."""
    if name is None:
        raise NotHere("nothing records a target that these weights draft for; if there is one, give it as --target")
    try:
        with only_cached(not asked):
            model = CausalLM(load_model(name, torch.float32, default_device(), trusted))
            return Target(name, model, load_tokenizer(name, trusted))
    except ValueError as error:
        if asked:
            raise
        raise NotHere(f"their target, {name}, cannot be loaded here ({error}); give it as --target") from error


def read_questions(source: Path, prompts: Path | None, count: int, target: Target, holds: int | None) -> Questions:
    """Read up to ``count`` prompts of a file, or of the held-out data of the run that made ``source``, as it read them.

    ``holds``: the longest text, in tokens, that can be decoded; None without a limit. `NotHere` where no file is given
    and the run's is not on this machine.
    """
    holds = holds or 1 << 30
    if prompts is not None:
        asked = read_heldout(prompts, None, count, target.tokenizer, holds, _NEW_TOKENS)
        return Questions(prompts.name, [tokens for _, tokens in asked], _NEW_TOKENS)
    remedy = "give a .jsonl file of prompts as --prompts"
    stored = read_stored_provenance(source)
    if stored is None or not stored["recipe"]:
        raise NotHere(f"nothing records the held-out prompts of their training; {remedy}")
    try:
        recipe = parse_recipe(stored["recipe"], "provenance.json")
        path = resolve(recipe.data.heldout)
        if not Path(path).exists():
            raise NotHere(f"the held-out data of their training, {path}, is not on this machine; {remedy}")
        section, evaluation = recipe.data, recipe.evaluation
        few = section.model_copy(update={"max_rows": min(section.max_rows or 1 << 30, _ROWS_PER_PROMPT * count)})
        examples = load_heldout_data(few, target.tokenizer).firsts
        read = heldout_prompts(examples, count, evaluation.prompt_tokens, holds - evaluation.max_new_tokens)
    except ValueError as error:
        raise NotHere(f"the held-out data of their training cannot be read ({error}); {remedy}") from error
    return Questions(basename(path), read, evaluation.max_new_tokens)
