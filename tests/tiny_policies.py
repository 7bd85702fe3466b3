"""Tiny policies: a target and a draft with 16 tokens, eight examples with prompts, and the source of batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_models import tiny_model
from tiny_training import tiny_tokenizer

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Example
from trainer.drafts.on_policy import AnswerSource, Order, PolicySource, TextWriter, WindowFiles
from trainer.processes import Process
from trainer.recipe.common import TrainingSection
from trainer.recipe.draft import PolicySection

PROMPTS = [(4, 5, 6), (7,), (8, 9), (10, 11, 12, 13), (5, 4), (6, 6, 6), (14, 15), (9, 8, 7, 6, 5)]
DATA = [Example((*prompt, 4, 5, 1), (False,) * len(prompt) + (True,) * 3, len(prompt)) for prompt in PROMPTS]
"""Eight prompts, all with the answer 4 5 1, where 1 ends a text."""


def target() -> CausalLM:
    return CausalLM(tiny_model("llama"))


def draft() -> CausalLM:
    return CausalLM(tiny_model("llama", seed=1, num_hidden_layers=1))


def policy_of(**section: Any) -> PolicySection:
    return PolicySection.model_validate({"max_new_tokens": 12, **section})


def training_of(**section: Any) -> TrainingSection:
    given = {"steps": 6, "batch_size": 8, "micro_batch_size": 8, "mixed_precision": "no", "learning_rate": 1e-2}
    return TrainingSection.model_validate({**given, **section})


def writer_of(policy: PolicySection, num_draft_tokens: int = 3, ends: tuple[int, ...] = (1,)) -> TextWriter:
    return TextWriter(target(), policy, num_draft_tokens, ends, seed=5)


def orders_of(kind: AnswerSource, count: int = len(PROMPTS)) -> list[Order]:
    """Return an order for each prompt, in one step."""
    return [Order(0, position, position, kind, PROMPTS[position]) for position in range(count)]


def source_of(
    folder: Path,
    policy: PolicySection,
    training: TrainingSection | None = None,
    draft_now: Callable[[], CausalLM] = draft,
    process: int = 0,
    processes: int = 1,
    kept_steps: int = 100,
) -> PolicySource:
    files = WindowFiles(folder, tiny_tokenizer(), kept_steps, Process(process, processes))
    return PolicySource(DATA, training or training_of(), policy, writer_of(policy), draft_now, files)
