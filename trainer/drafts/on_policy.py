"""Batches with texts that the target, or the target and the draft together, generate during training."""

import json
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids
from decoding.rules.sampling import SamplingConfig
from trainer.data.batch import Example, IndexedExample, Offline
from trainer.drafts.distill import AnyDraft, drafter_of
from trainer.files.folders import write_text
from trainer.processes import ALONE, Process
from trainer.recipe.common import TrainingSection
from trainer.recipe.draft import DraftRecipe, LoopTrains, PolicySection

TEXT_PROMPT = 64
"""Number of tokens at the start of a plain text that serve as its prompt. The prompt is never more than half of the
text.
"""
GENERATED = "generated"
"""The folder of generated texts in a run's output."""
AnswerSource = Literal["offline", "target", "loop"]
"""The source of a sequence: see `PolicySection`."""


class Order(NamedTuple):
    """A text to generate for one position in the batch of one step. Steps and positions count from 0.

    ``example_index`` is the index in the data set of the example with the prompt.
    """

    step: int
    position: int
    example_index: int
    kind: AnswerSource
    prompt: tuple[int, ...]


class GeneratedText(NamedTuple):
    """A generated text. ``rejected`` are the indices of the tokens that replaced a drafted token."""

    step: int
    position: int
    example_index: int
    kind: AnswerSource
    prompt_length: int
    tokens: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def answer(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_length :]

    def example(self, trains: LoopTrains) -> Example:
        """Return the text as a training example.

        If ``trains`` is ``rejected`` and no drafted token was rejected, no token is trained.
        """
        everything = range(self.prompt_length, len(self.tokens))
        trained = set(everything if trains == "all" else self.rejected)
        return Example(self.tokens, tuple(index in trained for index in range(len(self.tokens))), self.prompt_length)


class TextWriter:
    """Generator of texts with a draft's current weights.

    On a GPU, texts of the target are also written with speculative decoding. Each text has a separate seed, so, apart
    from rounding, a text does not depend on the other texts of its batch.
    """

    def __init__(
        self, target: CausalLM, policy: PolicySection, num_draft_tokens: int, eos_token_ids: tuple[int, ...], seed: int
    ) -> None:
        self.target = target
        self._policy, self._num_draft_tokens, self._seed = policy, num_draft_tokens, seed
        # On a CPU a pass over five tokens costs five times as much as a pass over one token.
        self._speculates = target.device.type != "cpu"
        sampling = SamplingConfig(policy.temperature)
        self._config = DecodingConfig(policy.max_new_tokens, sampling, eos_token_ids=eos_token_ids)

    def write(self, orders: Sequence[Order], draft: AnyDraft) -> list[GeneratedText]:
        """Generate texts, and return them ordered by step and position. For texts of the target, the draft only saves
        time.
        """
        target, drafter = self.target.at_its_fastest(), drafter_of(draft, self._num_draft_tokens)
        writers: dict[AnswerSource, tuple[CausalLM, Drafter | None]] = {
            "target": (target, drafter if self._speculates else None),
            "loop": (target, drafter),
        }
        written = []
        for writer in dict.fromkeys(writers.values()):
            if of_it := [order for order in orders if writers[order.kind] == writer]:
                written += self._decode(of_it, *writer)
        return sorted(written)

    def _decode(self, orders: Sequence[Order], model: CausalLM, drafter: Drafter | None) -> list[GeneratedText]:
        tokens = [list(order.prompt) for order in orders]
        rejected: list[list[int]] = [[] for _ in orders]
        steps = Engine(model, drafter).steps(
            [order.prompt for order in orders],
            self._config,
            batch_size=self._policy.batch_size,
            seeds=[(self._seed << 32 | order.step) << 32 | order.position for order in orders],
        )
        for index, step in steps:
            tokens[index] += step.tokens
            if step.accepted < step.offered:
                rejected[index].append(len(tokens[index]) - 1)
        texts = []
        for order, text, corrected in zip(orders, tokens, rejected, strict=True):
            length = len(order.prompt)
            where = order.step, order.position, order.example_index, order.kind
            texts.append(GeneratedText(*where, length, tuple(text), tuple(corrected)))
        return texts


class WindowFiles:
    """Generated texts in a folder of files with JSON lines: one file per process and window of steps.

    Like a checkpoint, a file is named by the number of steps done: ``after-00000020-process-0-of-2.jsonl``. A run that
    resumes within a window reads the window's texts from these files. Files that are more than ``kept_steps`` steps old
    are removed.
    """

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, kept_steps: int, process: Process = ALONE
    ) -> None:
        self.folder, self.process = folder, process
        self._tokenizer, self._kept_steps = tokenizer, kept_steps

    def write(self, done: int, texts: Iterable[GeneratedText]) -> None:
        """Write this process's texts to a file that appears whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.process.is_first:
            self._remove_others(done)
        rows = ({**text._asdict(), "text": str(self._tokenizer.decode(list(text.answer)))} for text in texts)
        name = f"{_window_name(done)}-process-{self.process.rank}-of-{self.process.world}.jsonl"
        write_text(self.folder / name, "".join(json.dumps(row) + "\n" for row in rows))

    def _remove_others(self, done: int) -> None:
        """Remove files that are more than ``kept_steps`` steps old, and files of this step by another number of
        processes.
        """
        for path in self.folder.glob("after-*.jsonl"):
            same = path.name.startswith(_window_name(done))
            if path.name < _window_name(max(0, done - self._kept_steps)) or (
                same and not path.name.endswith(f"-of-{self.process.world}.jsonl")
            ):
                path.unlink(missing_ok=True)

    def read(self, done: int) -> list[GeneratedText]:
        """Return the texts of all processes; raise UserError if a file is damaged."""
        texts = []
        for path in sorted(self.folder.glob(f"{_window_name(done)}-*.jsonl")):
            try:
                for row in map(json.loads, path.read_text().splitlines()):
                    lists = {name: tuple(row[name]) for name in ("tokens", "rejected")}
                    texts.append(GeneratedText(**{name: row[name] for name in GeneratedText._fields} | lists))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path} is damaged ({error!r}): remove the checkpoints after step {done}, or use another output"
                ) from error
        return texts


def _window_name(done: int) -> str:
    return f"after-{done:08d}"


def policy_source(
    recipe: DraftRecipe,
    examples: Sequence[Example],
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    draft: Callable[[], AnyDraft],
    process: Process = ALONE,
) -> "PolicySource":
    """Return the source of a draft's batches. ``draft`` returns the draft with its current weights.

    Texts are saved in the run's output. Raises UserError if no prompt leaves room for an answer.
    """
    training, policy = recipe.training, recipe.draft.policy
    ends = eos_token_ids(target.model, tokenizer)
    writer = TextWriter(target, policy, recipe.draft.num_draft_tokens, ends, training.seed)
    kept_steps = recipe.checkpoint.every * (recipe.checkpoint.keep + 1) + policy.every
    files = WindowFiles(Path(recipe.output) / GENERATED, tokenizer, kept_steps, process)
    return PolicySource(examples, training, policy, writer, draft, files)


class PolicySource:
    """Source of batches mixed by a policy: offline rows first, then texts by the target, then texts by the loop.

    A position's source, prompt and random numbers depend only on seed, step and position. Texts are generated at
    multiples of ``policy.every`` and saved before they train the draft. So a resumed run trains on the same texts, and
    the batch does not depend on the number of processes.
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
        """This window's generated texts, by step and position."""
        if not any(self._fits(prompt_of(example)) for example in examples):
            raise UserError(
                f"draft.policy.max_new_tokens ({policy.max_new_tokens}) is too large: no training prompt leaves so "
                f"much of the target's context of {writer.target.max_positions} tokens free; lower this value"
            )

    def writes_at(self, step: int) -> bool:
        return step % self._policy.every == 0 and bool(self._orders(step, range(self._training.batch_size)))

    def write(self, step: int, positions: Sequence[int]) -> Mapping[str, float]:
        """Generate the texts at these positions in all steps of the window.

        Return the numbers of texts, new tokens and rejections, and also the time in seconds, divided by the number of
        processes.
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
            "generated/seconds": (time.perf_counter() - start) / self._files.process.world,
        }

    def examples_at(self, step: int, positions: Sequence[int]) -> list[IndexedExample]:
        window = step - step % self._policy.every
        if window != self._window:
            self._window, self._texts = window, self._read(window)
        return [
            self._trained(row, self._texts.get((step, position)))
            for position, row in zip(positions, self._offline.examples_at(step, positions), strict=True)
        ]

    def _trained(self, row: IndexedExample, text: GeneratedText | None) -> IndexedExample:
        """Return the text as a training row; if there is no text, return the row from the data."""
        if text is None:
            return row
        return IndexedExample(text.example(self._policy.loop_trains if text.kind == "loop" else "all"), -1)

    def _read(self, window: int) -> dict[tuple[int, int], GeneratedText]:
        wanted = {(order.step, order.position) for order in self._orders(window, range(self._training.batch_size))}
        texts = {(text.step, text.position): text for text in self._files.read(window)} if wanted else {}
        if missing := wanted - texts.keys():
            raise UserError(
                f"{len(missing)} texts generated after step {window} are missing from {self._files.folder}: restore "
                f"them, remove the checkpoints after step {window}, or use another output"
            )
        return texts

    def _orders(self, window: int, positions: Sequence[int]) -> list[Order]:
        """Return the orders for these positions in all steps of a window."""
        orders = []
        for step in range(window, min(window + self._policy.every, self._training.steps)):
            kinds = self._kinds(step)
            for position, row in zip(positions, self._offline.examples_at(step, positions), strict=True):
                prompt = prompt_of(row.example)
                if kinds[position] != "offline" and self._fits(prompt):
                    orders.append(Order(step, position, row.example_index, kinds[position], prompt))
        return orders

    def _kinds(self, step: int) -> list[AnswerSource]:
        """Return the source of each position in a step's batch. A batch meets the shares to within one position; the
        average over batches meets them exactly.
        """
        kinds, shares = get_args(AnswerSource), self._policy.shares
        bounds = list(accumulate(shares[kind] for kind in kinds))
        # Rounding may leave the last bound slightly below 1. The offset is a multiple of 1/1024, so the last position
        # stays clearly below this bound.
        size, offset = self._training.batch_size, random.Random(f"{self._training.seed} {step}").randrange(1024) / 1024
        return [kinds[bisect_right(bounds, (position + offset) / size)] for position in range(size)]

    def _fits(self, prompt: Sequence[int]) -> bool:
        limit = self._writer.target.max_positions
        return bool(prompt) and (limit is None or len(prompt) + self._policy.max_new_tokens <= limit)


def prompt_of(example: Example) -> tuple[int, ...]:
    """Return the tokens before an example's answer; if the example is a plain text, return its first tokens."""
    return tuple(example.tokens[: example.prompt_length or min(TEXT_PROMPT, len(example.tokens) // 2)].tolist())
