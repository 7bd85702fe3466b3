"""Texts written during the training: by target, draft or both; which of them collapsed; and their files."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.vocabulary import with_whole_vocabulary
from decoding.rules.sampling import SamplingConfig
from trainer.data.batch import Example
from trainer.drafts.distill import AnyDraft, drafter_of
from trainer.files.shards import write_text
from trainer.processes import ALONE, Process
from trainer.recipe.draft import LoopTrains, PolicySection

Origin = Literal["offline", "target", "draft", "loop"]
"""Where a sequence comes from: see `PolicySection`."""
LONGEST_PERIOD = 16
"""Tokens of the longest pattern that a collapsed text may repeat."""
REPEATS = 4
"""Repetitions of the pattern, at least."""
ENDLESS = 32
"""Tokens at the end of a collapsed text that repeat one pattern, at least."""


def is_collapsed(answer: Sequence[int], ended: bool) -> bool:
    """Return True for an answer that is empty or repeats itself without end.

    An answer that ``ended`` includes its end token.

    Empty: the first token ended it. Endless: it was cut off, and the last `ENDLESS` or more tokens (of a short answer
    three quarters, at least 8) are one pattern of at most `LONGEST_PERIOD` tokens, at least `REPEATS` times. The rows
    of a table differ from one another; an answer that ended has not collapsed however often it repeats itself.
    """
    if ended:
        return len(answer) == 1
    needed = max(8, min(ENDLESS, 3 * len(answer) // 4))
    return any(_repeated(answer, period) >= max(needed, REPEATS * period) for period in range(1, LONGEST_PERIOD + 1))


def _repeated(tokens: Sequence[int], period: int) -> int:
    """Return the length of the end that repeats with this period, its first ``period`` tokens included."""
    length = period
    while length < len(tokens) and tokens[-length - 1] == tokens[-length - 1 + period]:
        length += 1
    return length


class Order(NamedTuple):
    """A text to be written, for a position of a step's batch. Both count from 0.

    ``place``: the place in the data set of the example with the prompt.
    """

    step: int
    position: int
    place: int
    kind: Origin
    prompt: tuple[int, ...]


class GeneratedText(NamedTuple):
    """A text that was written. ``rejected``: indices in ``tokens`` at which the target replaced a drafted token."""

    step: int
    position: int
    place: int
    kind: Origin
    prompt_length: int
    tokens: tuple[int, ...]
    rejected: tuple[int, ...]
    collapsed: bool

    @property
    def answer(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_length :]

    def example(self, trains: LoopTrains) -> Example:
        """Return the text to train on; the rejected places alone may be none."""
        everything = range(self.prompt_length, len(self.tokens))
        trained = set(everything if trains == "all" else self.rejected)
        return Example(self.tokens, tuple(index in trained for index in range(len(self.tokens))), self.prompt_length)


class TextWriter:
    """Writer of texts by a draft's present weights. On a GPU the texts of the target are written speculatively.

    Up to rounding, a text does not depend on the texts decoded beside it: each has a seed of its own.
    """

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
        self._speculates = target.device.type != "cpu"  # where a pass over five tokens costs five times as much as one
        sampling = SamplingConfig(policy.temperature)
        self._config = DecodingConfig(policy.max_new_tokens, sampling, eos_token_ids=eos_token_ids)

    def write(self, orders: Sequence[Order], draft: AnyDraft) -> list[GeneratedText]:
        """Write texts in the order of steps and positions. Where the target writes, its draft only makes it faster."""
        target, drafter = self.target.at_its_fastest(), drafter_of(draft, self._num_draft_tokens)
        writers: dict[Origin, tuple[CausalLM, Drafter | None]] = {
            "target": (target, drafter if self._speculates else None),
            "loop": (target, drafter),
        }
        if isinstance(draft, CausalLM):
            alone = draft.output_tokens is None and draft.vocab_size == target.vocab_size
            writers["draft"] = (draft if alone else with_whole_vocabulary(draft, target.vocab_size), None)
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
            seeds=[_seed_of(self._seed, order) for order in orders],
        )
        for index, step in steps:
            tokens[index] += step.tokens
            if step.accepted < step.offered:
                rejected[index].append(len(tokens[index]) - 1)
        texts = []
        for order, text, corrected in zip(orders, tokens, rejected, strict=True):
            length = len(order.prompt)
            collapsed = is_collapsed(text[length:], text[-1] in self._config.eos_token_ids)
            where = order.step, order.position, order.place, order.kind
            texts.append(GeneratedText(*where, length, tuple(text), tuple(corrected), collapsed))
        return texts


def _seed_of(seed: int, order: Order) -> int:
    """Return the seed of one position of one step, different for each."""
    return (seed << 32 | order.step) << 32 | order.position


class WindowFiles:
    """GeneratedText texts in a folder of JSON lines: one file for each process and each writing.

    A file is named by the steps done before, as a checkpoint is: ``after-00000020-process-0-of-2.jsonl``. A run that
    resumes between two writings reads its texts from these files; files older than ``kept_steps`` are removed.
    """

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, kept_steps: int, process: Process = ALONE
    ) -> None:
        self.folder, self.process = folder, process
        self._tokenizer, self._kept_steps = tokenizer, kept_steps

    def write(self, done: int, texts: Iterable[GeneratedText]) -> None:
        """Write this process's texts, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.process.is_first:
            self._remove_others(done)
        rows = ({**text._asdict(), "text": str(self._tokenizer.decode(list(text.answer)))} for text in texts)
        name = f"{_window_name(done)}-process-{self.process.rank}-of-{self.process.world}.jsonl"
        write_text(self.folder / name, "".join(json.dumps(row) + "\n" for row in rows))

    def _remove_others(self, done: int) -> None:
        """Remove files older than ``kept_steps``, and files of the same step from another number of processes."""
        for path in self.folder.glob("after-*.jsonl"):
            same = path.name.startswith(_window_name(done))
            if path.name < _window_name(max(0, done - self._kept_steps)) or (
                same and not path.name.endswith(f"-of-{self.process.world}.jsonl")
            ):
                path.unlink(missing_ok=True)

    def read(self, done: int) -> list[GeneratedText]:
        """Return all processes' texts; ValueError if a file is damaged."""
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


def _read_row(row: dict[str, Any]) -> GeneratedText:
    lists = {name: tuple(row[name]) for name in ("tokens", "rejected")}
    return GeneratedText(**{name: row[name] for name in GeneratedText._fields} | lists)
