"""Acceptance of a target with a drafter on prompts, greedy and at temperature 1, as plain values and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.generate import DecodingConfig
from decoding.measure.evaluate import measure_acceptance
from decoding.measure.figures import estimate, told
from decoding.model.causal_lm import CausalLM
from decoding.prompts import encode_prompt
from decoding.rules.sampling import SamplingConfig
from trainer.data.conversations import Conversation, read_conversations
from trainer.terminal.progress import ProgressBar

_NAMES = {"tokens_per_pass": "tokens per pass", "accepted_per_drafted": "accepted/drafted"}
_TEMPERATURES = {"greedy": 0.0, "T=1": 1.0}

Figures = dict[str, dict[str, Any]]
"""By setting: tokens per target pass, and the share of drafted tokens that were accepted, as `told` gives them."""


def read_heldout(
    path: str | Path,
    field: str | None,
    limit: int | None,
    tokenizer: PreTrainedTokenizerBase,
    holds: int,
    max_new_tokens: int,
) -> list[tuple[Conversation, tuple[int, ...]]]:
    """Return the first ``limit`` prompts of a file with their token ids, without those that are too long.

    ``holds``: the longest text, in tokens, that target and speculator can hold. ValueError if no prompt is left.
    """
    chat = tokenizer.chat_template is not None
    conversations = read_conversations(path, field, limit, 1, chat)
    encoded = [(each, encode_prompt(each.open_after(()), tokenizer, chat)) for each in conversations]
    fitting = [(each, prompt) for each, prompt in encoded if 0 < len(prompt) <= holds - max_new_tokens]
    if not fitting:
        raise ValueError(f"no held-out prompt leaves room for {max_new_tokens} new tokens: lower max_new_tokens")
    return fitting


def measure_figures(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int,
    console: Console,
) -> Figures:
    """Decode the prompts in each setting by ``config``. ValueError where every text ended with its first token."""
    found = {}
    for setting, temperature in _TEMPERATURES.items():
        sampled = replace(config, sampling=SamplingConfig(temperature))
        with ProgressBar(console, f"measuring the draft, {setting}", len(prompts)) as bar:
            acceptance = measure_acceptance(target, drafter, prompts, sampled, batch_size, bar.advance)
        if not acceptance.passes:
            raise ValueError(f"every text ended with its first token, {setting}: give held-out prompts to be answered")
        found[setting] = {name: told(getattr(acceptance, name)) for name in _NAMES}
    return found


def compared(figures: Mapping[str, Figures], title: str) -> Table:
    """Return a table with a column for each of ``figures`` by its name, with 95% intervals."""
    table = Table("setting", "figure", *figures, title=title)
    for setting, names in next(iter(figures.values())).items():
        for name in names:
            table.add_row(setting, _NAMES[name], *(estimate(each[setting][name]) for each in figures.values()))
    return table


def tokens_per_pass(figures: Figures) -> str:
    """Return the tokens per target pass of every setting, in one line."""
    return "; ".join(f"{name}: {estimate(held['tokens_per_pass'])} tokens per pass" for name, held in figures.items())
