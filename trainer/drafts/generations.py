"""Texts written during the training: by target, draft or both; which of them collapsed; and their files."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter, DraftModelDrafter
from decoding.generate import DecodingConfig, decode_batch_steps
from decoding.model.causal_lm import CausalLM
from decoding.model.vocabulary import with_whole_vocabulary
from decoding.rules.sampling import SamplingConfig
from trainer.data.batch import Example
from trainer.files.shards import write_text
from trainer.recipe.draft import PolicySection
from trainer.terminal.place import ALONE, Place

Kind = Literal["offline", "target", "draft", "loop"]
"""Where a sequence comes from: see `PolicySection`."""
LONGEST_PERIOD = 16
"""In tokens, of what a collapsed text repeats."""
REPEATS = 4
ENDLESS = 32
"""A text that did not end has collapsed if what it repeats at its end is there so often, in so many tokens."""


def is_collapsed(answer: Sequence[int], ended: bool) -> bool:
    """Whether a text is empty, or repeats itself to no end. ``answer`` goes up to the token that ended it, if one did.

    Empty: it ended with its first token. Endless: it was cut off, and its last 32 tokens or more (of a short one three
    quarters, at least 8) are one sequence of up to 16 tokens, four times or more. The rows of a table differ from one
    another, and a text that ends by itself has not collapsed however often it said the same.
    """
    if ended:
        return len(answer) == 1
    needed = max(8, min(ENDLESS, 3 * len(answer) // 4))
    return any(_repeated(answer, period) >= max(needed, REPEATS * period) for period in range(1, LONGEST_PERIOD + 1))


def _repeated(tokens: Sequence[int], period: int) -> int:
    """How many tokens at the end repeat those ``period`` before them, with the first of what they repeat."""
    length = period
    while length < len(tokens) and tokens[-length - 1] == tokens[-length - 1 + period]:
        length += 1
    return length


class Order(NamedTuple):
    """A text to be written, for a position of a step's batch. Both count from 0.

    ``place`` is that in the data set of the example whose prompt it answers.
    """

    step: int
    position: int
    place: int
    kind: Kind
    prompt: tuple[int, ...]


class Written(NamedTuple):
    """A text that was written. ``rejected``: where in ``tokens`` the target put its own in place of a drafted one."""

    step: int
    position: int
    place: int
    kind: Kind
    prompt_length: int
    tokens: tuple[int, ...]
    rejected: tuple[int, ...]
    collapsed: bool

    @property
    def answer(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_length :]

    def example(self, rejected_only: bool) -> Example:
        """To train on: all of the answer, or where the draft was wrong, which may be nowhere."""
        places = self.rejected if rejected_only else range(self.prompt_length, len(self.tokens))
        trained = [False] * len(self.tokens)
        for place in places:
            trained[place] = True
        return Example(self.tokens, tuple(trained), self.prompt_length)


class TextWriter:
    """Writes texts with a draft as it is now. What a text says does not depend on those it is written with, up to
    rounding: each has a seed of its own."""

    def __init__(
        self,
        target: CausalLM,
        policy: PolicySection,
        num_draft_tokens: int,
        eos_token_ids: tuple[int, ...],
        seed: int,
    ) -> None:
        self.target = target
        self._policy, self._num_draft_tokens, self._seed = policy, num_draft_tokens, seed
        on_cpu = target.device.type == "cpu"  # where a pass over five tokens costs five times as much as one
        self._speculates = not on_cpu if policy.speculate is None else policy.speculate
        sampling = SamplingConfig(policy.temperature)
        self._config = DecodingConfig(policy.max_new_tokens, sampling, eos_token_ids=eos_token_ids)

    def write(self, orders: Sequence[Order], draft: CausalLM) -> list[Written]:
        """Texts in the order of steps and positions. Where the target writes, its draft only makes it faster."""
        target, limit = self.target, self.target.vocab_size
        alone = draft.output_tokens is None and draft.vocab_size == limit
        drafter = DraftModelDrafter(draft, (1,) * self._num_draft_tokens)
        writers: dict[Kind, tuple[CausalLM, Drafter | None]] = {
            "target": (target, drafter if self._speculates else None),
            "draft": (draft if alone else with_whole_vocabulary(draft, limit), None),
            "loop": (target, drafter),
        }
        written = []
        for writer in dict.fromkeys(writers.values()):
            if of_it := [order for order in orders if writers[order.kind] == writer]:
                written += self._decode(of_it, *writer)
        return sorted(written)

    def _decode(self, orders: Sequence[Order], model: CausalLM, drafter: Drafter | None) -> list[Written]:
        tokens = [list(order.prompt) for order in orders]
        rejected: list[list[int]] = [[] for _ in orders]
        steps = decode_batch_steps(
            model,
            drafter,
            [order.prompt for order in orders],
            self._config,
            self._policy.batch_size,
            seeds=[_seed_of(self._seed, order) for order in orders],
        )
        for place, step in steps:
            tokens[place] += step.tokens
            if step.accepted < step.offered:
                rejected[place].append(len(tokens[place]) - 1)
        return [
            self._written(order, tuple(text), tuple(corrected))
            for order, text, corrected in zip(orders, tokens, rejected, strict=True)
        ]

    def _written(self, order: Order, tokens: tuple[int, ...], rejected: tuple[int, ...]) -> Written:
        length = len(order.prompt)
        collapsed = is_collapsed(tokens[length:], tokens[-1] in self._config.eos_token_ids)
        return Written(order.step, order.position, order.place, order.kind, length, tokens, rejected, collapsed)


def _seed_of(seed: int, order: Order) -> int:
    """Another for every position of every step."""
    return (seed << 32 | order.step) << 32 | order.position


class WindowFiles:
    """What was written, in a folder of JSON lines: a file for each process and each time that texts were written.

    A file is called by the steps that were done then, as a checkpoint is: ``after-00000020-process-0-of-2.jsonl``. A
    run that goes on from between two such times reads its texts from them. Older ones than ``kept_steps`` are removed.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, kept_steps: int, place: Place = ALONE) -> None:
        self.folder, self.place = folder, place
        self._tokenizer, self._kept_steps = tokenizer, kept_steps

    def text_of(self, written: Written) -> str:
        """Its answer, to look at."""
        return str(self._tokenizer.decode(list(written.answer)))

    def write(self, done: int, texts: Iterable[Written]) -> None:
        """Write this process's texts, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.place.is_first:
            self._remove_others(done)
        rows = ({**text._asdict(), "text": self.text_of(text)} for text in texts)
        name = f"{_window_name(done)}-process-{self.place.rank}-of-{self.place.world}.jsonl"
        write_text(self.folder / name, "".join(json.dumps(row) + "\n" for row in rows))

    def _remove_others(self, done: int) -> None:
        """What is too old, and what as many steps left that were dealt out to another number of processes."""
        for path in self.folder.glob("after-*.jsonl"):
            same = path.name.startswith(_window_name(done))
            if path.name < _window_name(max(0, done - self._kept_steps)) or (
                same and not path.name.endswith(f"-of-{self.place.world}.jsonl")
            ):
                path.unlink(missing_ok=True)

    def read(self, done: int) -> list[Written]:
        """All processes' texts; ValueError if a file is damaged."""
        texts = []
        for path in sorted(self.folder.glob(f"{_window_name(done)}-*.jsonl")):
            try:
                texts += [_read_row(json.loads(line)) for line in path.read_text().splitlines()]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} is damaged ({error!r}): remove the newer checkpoints, so that the run goes on from step "
                    f"{done} or before, or give another output"
                ) from error
        return texts


def _window_name(done: int) -> str:
    return f"after-{done:08d}"


def _read_row(row: dict[str, Any]) -> Written:
    lists = {name: tuple(row[name]) for name in ("tokens", "rejected")}
    return Written(**{name: row[name] for name in Written._fields} | lists)
