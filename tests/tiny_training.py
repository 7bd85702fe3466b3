"""Tiny inputs of training: a tokenizer of 16 words, files of rows, a target on disk, and a toy objective."""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decoding.drafters import Drafter
from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Batch, BatchSource, Example, Offline
from trainer.heads.medusa1 import MedusaObjective
from trainer.learning.objective import EVERYWHERE_THE_SAME, TermSums
from trainer.recipe.common import TrainingSection
from trainer.recipe.heads import HeadsSection
from trainer.run.checkpoint import Checkpoints, Progress
from trainer.run.loop import Hooks, train
from trainer.target.loading import OnlineTarget

WORDS = ("<unk>", "<eos>", "<user>", "<assistant>", *"abcdefghijkl")
"""Word i is token i: <eos> is 1, <user> 2, <assistant> 3, a 4, b 5, ... l 15."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user> {{ message['content'] }} "
    "{% else %}<assistant> {% generation %}{{ message['content'] }} <eos>{% endgeneration %} {% endif %}"
    "{% endfor %}"
)


def tiny_tokenizer(chat_template: str | None = None, words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word, split at spaces."""
    words_to_ids = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    words_to_ids.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_to_ids, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = chat_template
    return tokenizer


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def counting_text(start: int, length: int) -> str:
    """Return the words of consecutive tokens, which cycle through the twelve letters: 'c d e f'."""
    return " ".join(WORDS[4 + (start + i) % 12] for i in range(length))


def write_target(folder: Path, **changes: Any) -> PreTrainedModel:
    """Write a tiny Llama with its tokenizer into a folder."""
    model = tiny_model("llama", **changes)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def write_corpus(folder: Path, rows: int = 24, length: int = 20) -> tuple[str, str]:
    """Write train.jsonl and heldout.jsonl with counting texts."""
    train_file = write_rows(folder / "train.jsonl", [{"text": counting_text(i, length)} for i in range(rows)])
    return train_file, write_rows(folder / "heldout.jsonl", [{"text": counting_text(7 * i, length)} for i in range(3)])


def recipe_content(folder: Path, kind: str, **training: Any) -> dict[str, Any]:
    """Return a recipe for the target and the corpus in ``folder``, as plain values; its output is ``folder``/run."""
    section = {"steps": 4, "batch_size": 8, "micro_batch_size": 8, "mixed_precision": "no", "learning_rate": 3e-3}
    content: dict[str, Any] = {
        "kind": kind,
        "name": f"tiny {kind}",
        "output": str(folder / "run"),
        "target": str(folder / "target"),
        "dtype": "fp32",
        "data": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl"), "max_length": 32},
        "training": {**section, **training},
        "evaluation": {"every": 1000, "prompts": 2, "tree_prompts": 2, "prompt_tokens": 6, "max_new_tokens": 8},
        "tracking": "none",
    }
    return content


@contextmanager
def cpu_accelerator(mixed_precision: str = "no") -> Iterator[Accelerator]:
    """Make an accelerator of one CPU process; accelerate's singletons are reset before and after."""
    AcceleratorState._reset_state(True)
    try:
        yield Accelerator(cpu=True, mixed_precision=mixed_precision)
    finally:
        AcceleratorState._reset_state(True)


def medusa_on(target: CausalLM, section: HeadsSection, steps: int = 100) -> MedusaObjective:
    """Return the Medusa-1 objective on a target that runs at every step."""
    return MedusaObjective(OnlineTarget(target), section, steps, target.dtype)


class _ToyModule(nn.Module):
    """A module that predicts the next token only from the last one, through dropout."""

    def __init__(self, vocab: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 8)
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.lm_head = nn.Linear(8, vocab, bias=False)

    def forward(self, tokens: Tensor, trained: Tensor, factor: Tensor, scale: Tensor | None = None) -> TermSums:
        logits = self.lm_head(self.dropout(self.middle(self.norm(self.embedding(tokens[:, :-1])))))
        labels, labelled = tokens[:, 1:], trained[:, 1:]
        loss = nn.functional.cross_entropy(logits[labelled], labels[labelled], reduction="sum") * factor
        return TermSums.of(loss[None], (logits.argmax(-1) == labels)[labelled].sum()[None], scale)


class ToyObjective:
    """An objective with dropout whose loss is multiplied by ``factor``, so that a test can make it infinite."""

    terms: tuple[str, ...] = ("next_token",)
    hit_name = "top1"

    def __init__(self, vocab: int = 16, dropout: float = 0.0, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.module: nn.Module = _ToyModule(vocab, dropout)
        self.factor = torch.tensor(1.0)

    def weights(self, step: int) -> tuple[float, ...]:
        return (1.0,)

    def rates(self, step: int) -> Mapping[str, float]:
        return EVERYWHERE_THE_SAME

    def counts(self, batch: Batch, step: int = 0) -> Tensor:
        return batch.trained[:, 1:].sum()[None]

    def prefetch(self, batch: Batch, step: int) -> None:
        pass

    def inputs(self, batch: Batch, step: int, prefetched: Any = None) -> tuple[Tensor, ...]:
        return batch.tokens, batch.trained, self.factor

    def drafter(self) -> Drafter | None:
        return None

    def save(self, folder: Path) -> None:
        raise AssertionError("the loop does not save artefacts")


def toy_examples(count: int = 12, vocab: int = 16) -> list[Example]:
    """Make random sequences of 4 to 12 tokens with random masks that train at least the last token."""
    generator = torch.Generator().manual_seed(7)
    examples = []
    for index in range(count):
        length = 4 + index % 9
        tokens = torch.randint(0, vocab, (length,), generator=generator).tolist()
        trained = (torch.rand(length, generator=generator) < 0.5).tolist()
        examples.append(Example(tuple(tokens), (*trained[:-1], True), 0))
    return examples


def interrupt() -> None:
    """Ask this process to stop, as a scheduler would."""
    os.kill(os.getpid(), signal.SIGTERM)


def await_file(path: Path) -> None:
    """Wait until a file or folder, which another thread or process writes, exists."""
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.01)
    raise TimeoutError(f"{path} was not written within a minute")


class Recorder:
    """Hooks that record the figures of every step, and run a test's function at a given step."""

    def __init__(self) -> None:
        self.figures: dict[int, dict[str, float]] = {}
        self.evaluated: list[int] = []
        self.began_at: list[int] = []
        self.actions: dict[int, Any] = {}

    @property
    def losses(self) -> dict[int, float]:
        return {step: figures["loss"] for step, figures in self.figures.items()}

    def hooks(self) -> Hooks:
        return Hooks(self._on_step, self._evaluate, lambda progress: self.began_at.append(progress.step))

    def _evaluate(self, progress: Progress) -> None:
        self.evaluated.append(progress.step)

    def _on_step(self, progress: Progress, figures: dict[str, float]) -> None:
        self.figures[progress.step] = figures
        if progress.step in self.actions:
            self.actions[progress.step]()


def train_toy(
    folder: Path,
    objective: Any,
    recorder: Recorder | None = None,
    examples: Sequence[Example] | BatchSource | None = None,
    checkpoint_every: int = 2,
    evaluate_every: int = 1000,
    **training: Any,
) -> Progress:
    """Run the loop on one CPU process, with its checkpoints in ``folder``."""
    defaults = {"steps": 6, "batch_size": 8, "micro_batch_size": 8, "mixed_precision": "no", "learning_rate": 1e-2}
    section = TrainingSection.model_validate({**defaults, **training})
    examples = toy_examples() if examples is None else examples
    source = Offline(examples, section.batch_size, section.seed) if isinstance(examples, Sequence) else examples
    with cpu_accelerator(section.mixed_precision) as accelerator:
        return train(
            objective,
            source,
            section,
            accelerator,
            Checkpoints(folder, keep=2, origin={"seed": section.seed}),
            checkpoint_every,
            evaluate_every,
            (recorder or Recorder()).hooks(),
        )
