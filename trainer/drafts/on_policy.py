"""Batches of which a part is written during the training: by the target, by the draft, or by both together."""

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import get_args

from transformers import PreTrainedTokenizerBase

from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids
from trainer.data.batch import Example
from trainer.data.source import Offline, PlacedExample
from trainer.drafts.distill import AnyDraft
from trainer.drafts.generations import GeneratedText, Order, Origin, TextWriter, WindowFiles
from trainer.processes import ALONE, Process
from trainer.recipe.common import TrainingSection
from trainer.recipe.draft import DraftRecipe, PolicySection

TEXT_PROMPT = 64
"""A plain text has no prompt of its own: its first `TEXT_PROMPT` tokens serve as one, or half of a short text."""
GENERATED = "generated"
"""The folder of the written texts in a run's output."""


def policy_source(
    recipe: DraftRecipe,
    examples: Sequence[Example],
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    draft: Callable[[], AnyDraft],
    process: Process = ALONE,
) -> "PolicySource":
    """Return the source of a draft's batches. ``draft`` gives the draft with its present weights, to decode with.

    Written texts go to the run's output. ValueError if no prompt of the data leaves room for an answer.
    """
    training, policy = recipe.training, recipe.draft.policy
    ends = eos_token_ids(target.model, tokenizer)
    writer = TextWriter(target, policy, recipe.draft.num_draft_tokens, ends, training.seed)
    kept_steps = recipe.checkpoint.every * (recipe.checkpoint.keep + 1) + policy.every
    files = WindowFiles(Path(recipe.output) / GENERATED, tokenizer, kept_steps, process)
    return PolicySource(examples, training, policy, writer, draft, files)


class PolicySource:
    """A step's batch in the shares that a policy gives it, in its order: offline, target, draft, loop.

    The kind of a position, its prompt and its random numbers are functions of seed, step and position. Texts are
    written with the draft's weights at the last multiple of ``policy.every``, and are on disk before they are trained
    on. So a resumed run trains on the same texts, and any number of processes trains on the same batch.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        training: TrainingSection,
        policy: PolicySection,
        writer: TextWriter,
        draft: Callable[[], AnyDraft],
        files: WindowFiles,
    ) -> None:
        self._examples, self._training, self._policy = examples, training, policy
        self._writer, self._draft, self._files = writer, draft, files
        self._offline = Offline(examples, training.batch_size, training.seed)
        self._window = -1
        self._texts: dict[tuple[int, int], GeneratedText] = {}
        """Texts written in this window, by step and position."""
        if not any(self._fits(prompt_of(example)) for example in examples):
            raise ValueError(
                f"no prompt of the training data leaves room for draft.policy.max_new_tokens ({policy.max_new_tokens}) "
                f"in the target's context of {writer.target.max_positions} tokens: lower it"
            )

    def writes_at(self, step: int) -> bool:
        return step % self._policy.every == 0 and bool(self._orders(step, range(self._training.batch_size)))

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        """Write texts for these positions of the window's steps.

        The figures count texts, their new tokens, those at which the draft was rejected, texts that collapsed, and
        seconds: the processes' mean.
        """
        start = time.perf_counter()
        orders = self._orders(step, positions)
        texts = self._writer.write(orders, self._draft()) if orders else []
        self._files.write(step, texts)
        self._window, self._texts = step, {(text.step, text.position): text for text in texts}
        return {
            "generated/texts": len(texts),
            "generated/tokens": sum(len(text.answer) for text in texts),
            "generated/rejected": sum(len(text.rejected) for text in texts),
            "generated/collapsed": sum(text.collapsed for text in texts),
            "generated/seconds": (time.perf_counter() - start) / self._files.process.world,
        }

    def examples_at(self, step: int, positions: Sequence[int]) -> list[PlacedExample]:
        window = step - step % self._policy.every
        if window != self._window:
            self._window, self._texts = window, self._read(window)
        return [
            self._trained(row, self._texts.get((step, position)))
            for position, row in zip(positions, self._offline.examples_at(step, positions), strict=True)
        ]

    def _trained(self, row: PlacedExample, text: GeneratedText | None) -> PlacedExample:
        """Return the data's own row where no text was written, or the text collapsed."""
        if text is None or text.collapsed:
            return row
        return PlacedExample(text.example(self._policy.loop_trains if text.kind == "loop" else "all"), -1)

    def _read(self, window: int) -> dict[tuple[int, int], GeneratedText]:
        """Read the texts of a window in which the run was stopped."""
        wanted = {(order.step, order.position) for order in self._orders(window, range(self._training.batch_size))}
        texts = {(text.step, text.position): text for text in self._files.read(window)} if wanted else {}
        if missing := wanted - texts.keys():
            raise ValueError(
                f"{len(missing)} of the texts that were written after step {window} are not in {self._files.folder} "
                f"any more: put them back, remove the checkpoints after step {window}, or give another output"
            )
        return texts

    def _orders(self, window: int, positions: Sequence[int]) -> list[Order]:
        """Return the orders for texts that a window's first step writes: these positions of all the window's steps."""
        orders = []
        for step in range(window, min(window + self._policy.every, self._training.steps)):
            kinds = self._kinds(step)
            for position, row in zip(positions, self._offline.examples_at(step, positions), strict=True):
                prompt = prompt_of(row.example)
                if kinds[position] != "offline" and self._fits(prompt):
                    orders.append(Order(step, position, row.place, kinds[position], prompt))
        return orders

    def _kinds(self, step: int) -> list[Origin]:
        """Return the origin of each position of a step's batch; each share is met to within one, on average exactly."""
        shares = self._policy.shares(step / max(1, self._training.steps - 1))
        kinds = get_args(Origin)
        bounds = list(accumulate(shares[kind] for kind in kinds))
        # A multiple of 1/1024: the last position stays clear of 1, where the bounds end but for rounding.
        size, offset = self._training.batch_size, random.Random(f"{self._training.seed} {step}").randrange(1024) / 1024
        return [kinds[bisect_right(bounds, (position + offset) / size)] for position in range(size)]

    def _fits(self, prompt: Sequence[int]) -> bool:
        limit = self._writer.target.max_positions
        return bool(prompt) and (limit is None or len(prompt) + self._policy.max_new_tokens <= limit)


def prompt_of(example: Example) -> tuple[int, ...]:
    """Return the tokens before an example's answer; for a plain text, its beginning."""
    return tuple(example.tokens[: example.prompt_length or min(TEXT_PROMPT, len(example.tokens) // 2)].tolist())
