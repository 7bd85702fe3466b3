"""Questions of an evaluation: they are read from benchmark files, encoded as prompts, and grouped into waves.

This module reads Spec-Bench (2401.07851), MT-Bench, SPEED-Bench (2604.09557), gsm8k, HumanEval, mbpp,
RedHatAI/speculator_benchmarks, any other .jsonl or .parquet file, and folders of such files.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.fields import CONVERSATIONS, Tools, find_answer, prompt_of, tools_of, warn_of_unread
from decoding.jsonl import read_rows
from decoding.prompts import encode_prompt

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
_SPEC_BENCH = frozenset({"translation", "summarization", "qa", "math_reasoning", "rag"})
_ID_FIELDS = ("question_id", "id", "task_id")
_TASK_FIELDS = ("category", "task")
_UNPREPARED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Placeholder for the prompts in SPEED-Bench's files on the Hub."""
_SPEED_BENCH = re.compile(r"qualitative|throughput_\d+k")
_MOST_TASKS = 30
"""A field with more distinct values than this number does not name tasks."""


@dataclass(frozen=True)
class Question:
    """A question: the messages of its first turn, and the user's texts in the ``later`` turns.

    ``plain`` means that the text is continued without a chat template instead of being answered.
    """

    id: str
    task: str | None
    opening: tuple[dict[str, Any], ...]
    later: tuple[str, ...] = ()
    plain: bool = False
    tools: Tools | None = None
    unread: tuple[str, ...] = ()
    """As in `decoding.fields.Prompt`."""


# --- reading ----------------------------------------------------------------------------------------------------------


def read_questions(path: str | Path, field: str | None = None) -> list[Question]:
    """Read the questions of a .jsonl or .parquet file, of one file in a folder (FOLDER:NAME), or of a whole folder.

    In a whole folder each file is a task, as in RedHatAI/speculator_benchmarks. SPEED-Bench's splits must be named
    one by one, for example FOLDER:qualitative.

    ``field`` names the prompt's field; if it is None, the first of `decoding.fields.PROMPT_FIELDS` in the row is used.
    If the prompt is a list of texts, each text is a turn. If the prompt is a conversation, the messages before the
    first answer are the first turn; in a conversation without answers, each user message is a turn, as in SPEED-Bench.
    A ``text`` in a row without an answer is continued, not answered. A system message and a ``history`` come first, as
    in `decoding.fields.prompt_of`.

    The id is ``question_id``, ``id`` or ``task_id``; without these fields it is the line number. The task is the row's
    ``category``; in Spec-Bench's file the eight categories of MT-Bench are one task, ``mt_bench``.

    Raises UserError if a file contains no prompts.
    """
    files = _files(str(path))
    questions: list[Question] = []
    for file in files:
        read = _questions(file, field)
        questions += read if len(files) == 1 else (replace(question, task=file.stem) for question in read)
    ids = Counter(question.id for question in questions)
    if max(ids.values()) > 1:
        questions = [replace(question, id=str(line)) for line, question in enumerate(questions, start=1)]
    return _with_tasks(questions)


def read_prompts(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, limit: int, field: str | None = None
) -> list[tuple[int, ...]]:
    """Return the first turns of the first ``limit`` questions as token ids.

    ``field`` means the same as in `read_questions`. Raises UserError if a file contains no prompts.
    """
    every = (question for file in _files(str(path)) for question in _questions(file, field))
    asker = Asker(list(islice(every, limit)), tokenizer, all_turns=False)
    warn_of_unread(path, Counter(part for question in asker.questions for part in question.unread))
    return [asker.prompt(index) for index in range(len(asker.questions))]


def _files(name: str) -> list[Path]:
    """Return the named file, the file FOLDER:NAME, or all files of a folder; raise UserError if that is impossible."""
    folder, colon, split = name.rpartition(":")
    if colon and Path(folder).is_dir():
        named = [file for file in _rows_in(Path(folder)) if split in (file.stem, file.name)]
        if not named:
            held = ", ".join(file.stem for file in _rows_in(Path(folder))) or "no .jsonl or .parquet file"
            raise UserError(f"{folder} contains {held}, but not {split!r}", f"name one file as {folder}:NAME")
        return named[:1]
    if not Path(name).is_dir():
        return [Path(name)]
    files = _rows_in(Path(name))
    if not files:
        raise UserError(f"folder {name} contains no prompts", "put .jsonl or .parquet files into it")
    if splits := [file.stem for file in files if _SPEED_BENCH.fullmatch(file.stem)]:
        raise UserError(
            f"{name} contains SPEED-Bench's {' and '.join(splits)}", f"name one split, as in {name}:{splits[0]}"
        )
    return files


def _rows_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in (".jsonl", ".parquet") and file.name[0] != ".")


def _questions(path: str | Path, field: str | None) -> Iterator[Question]:
    """Yield the questions as they are read; raise UserError if the file contains none."""
    number = 0
    for number, (where, row) in enumerate(read_rows(path), start=1):
        yield _question(number, row, field, where)
    if not number:
        raise UserError(f"{path} contains no prompts: use a .jsonl file with one prompt per line")


def _with_tasks(questions: list[Question]) -> list[Question]:
    """Name the task of each question. Spec-Bench has six tasks. In other files, categories that do not look like tasks
    are dropped.
    """
    names = {question.task for question in questions}
    if len(names) == 1 or len(names) > _MOST_TASKS or None in names:
        return [replace(question, task=None) for question in questions]
    if names <= MT_BENCH | _SPEC_BENCH and names & {"translation", "math_reasoning"}:
        return [replace(question, task="mt_bench") if question.task in MT_BENCH else question for question in questions]
    return questions


def _question(number: int, row: dict[str, Any], field: str | None, where: str) -> Question:
    name, messages, _, begins, unread = prompt_of(row, field, where)
    later: tuple[str, ...] = ()
    roles = [message["role"] for message in messages[begins:]]
    if "assistant" in roles and (name in CONVERSATIONS or roles[-1] == "assistant"):
        messages = messages[: begins + roles.index("assistant")]
    elif "assistant" not in roles and roles.count("user") > 1:
        first = begins + roles.index("user") + 1
        messages, later = messages[:first], tuple(message["content"] for message in messages[first:])
    if not messages[begins:]:
        raise UserError(f"{where}: there is no question before the first answer: begin with the user's message")
    if any(_UNPREPARED in text for text in (*later, *(message["content"] for message in messages))):
        raise UserError(
            f"{where}: SPEED-Bench's prompt is a placeholder", "run SPEED-Bench's prepare.py and use its output"
        )
    named = next((row[key] for key in _ID_FIELDS if row.get(key) is not None), number)
    task = next((row[key] for key in _TASK_FIELDS if isinstance(row.get(key), str)), None)
    plain = field is None and name == "text" and find_answer(row) is None
    return Question(str(named), task, tuple(messages), later, plain, tools_of(row, where), unread)


def evenly(questions: Sequence[Question], limit: int) -> list[Question]:
    """Return ``limit`` questions in the order of the file: the first questions of each task, about equally many from
    each task.
    """
    seen: Counter[str | None] = Counter()
    ranked = []
    for index, question in enumerate(questions):
        ranked.append((seen[question.task], index))
        seen[question.task] += 1
    return [questions[index] for index in sorted(index for _, index in sorted(ranked)[:limit])]


# --- asking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asker:
    """A `PromptSource` that encodes questions as token ids.

    If ``all_turns`` is False, only first turns are used. ``filler`` contains all questions of the file. A prompt of a
    given context length is filled with the texts of the questions before it in the file, and then with texts from the
    end of the file.
    """

    questions: Sequence[Question]
    tokenizer: PreTrainedTokenizerBase
    all_turns: bool = True
    filler: Sequence[Question] = ()

    @cached_property
    def ids(self) -> Sequence[str]:
        """Unique ids of the questions."""
        return [question.id for question in self.questions]

    @cached_property
    def tasks(self) -> Sequence[str | None]:
        """Task of each question; None for a question without a task."""
        return [question.task for question in self.questions]

    def turns(self, index: int) -> int:
        """Return the number of turns of a question."""
        return 1 + len(self.questions[index].later) if self.all_turns else 1

    def prompt(self, index: int, context: int | None = None, answers: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
        """Return a turn's prompt in the chat template: the earlier turns with their answers, and the user's text of
        this turn. If ``context`` is set, text of other questions comes first, so that the prompt has as many tokens as
        possible but not more than ``context``.
        """
        question = self.questions[index]
        messages = [*question.opening]
        for answer, turn in zip(answers, question.later, strict=False):
            text = str(self.tokenizer.decode(list(answer), skip_special_tokens=True))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]
        return self._encode(messages, question) if context is None else self._filled(question, messages, context)

    def _encode(self, messages: list[dict[str, Any]], question: Question) -> tuple[int, ...]:
        return encode_prompt(messages, self.tokenizer, not question.plain, question.tools)

    def _filled(self, question: Question, messages: list[dict[str, Any]], context: int) -> tuple[int, ...]:
        """Return the prompt, filled up to at most ``context`` tokens by text before the user's first message.

        A prompt that is too long is shortened: a plain text loses its end, and a user message loses its beginning.
        """
        if question.plain and len(tokens := self._encode(messages, question)) >= context:
            return tokens[:context]
        first = next((index for index, message in enumerate(messages) if message["role"] == "user"), 0)

        def encode(text: str) -> tuple[int, ...]:
            message = {**messages[first], "content": text}
            return self._encode([*messages[:first], message, *messages[first + 1 :]], question)

        ids = self._tail_ids(question, messages[first]["content"], context)
        room = context - len(encode(""))
        while room > 0:
            tokens = encode(str(self.tokenizer.decode(ids[-room:])).lstrip("\N{REPLACEMENT CHARACTER}"))
            if len(tokens) <= context:
                return tokens
            room -= len(tokens) - context
        raise UserError(
            f"a context of {context} tokens is too short for question {question.id} in its chat template: use more "
            "tokens"
        )

    def _tail_ids(self, question: Question, text: str, context: int) -> list[int]:
        """Return the token ids of the text, with other questions before it: at least ``context`` ids, or as many as the
        file provides.
        """
        filler = self.filler or self.questions
        at = next((index for index, other in enumerate(filler) if other.id == question.id), 0)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        for other in (*filler[:at][::-1], *filler[at + 1 :][::-1]):
            if len(ids) >= context:
                break
            before = "\n".join(message["content"] for message in other.opening)
            ids = self.tokenizer(f"{before}\n\n", add_special_tokens=False)["input_ids"] + ids
        return ids

    def asked(self) -> dict[str, Any]:
        """Describe what every method was asked: the template with its fingerprint, and the turns.

        ``questions_sha256`` covers ids, tasks and the texts of later turns; the records have fingerprints of prompts.
        """
        chat = self.tokenizer.chat_template is not None and not all(question.plain for question in self.questions)
        template = self.tokenizer.chat_template if chat else None
        if template is not None and not isinstance(template, str):  # several named templates
            template = json.dumps(template, sort_keys=True)
        questions = [
            (question.id, question.task, question.later if self.all_turns else ()) for question in self.questions
        ]
        return {
            "template": "chat" if chat else "none",
            "template_sha256": None if template is None else sha256(template.encode()).hexdigest(),
            "turns": "all" if any(self.turns(index) > 1 for index in range(len(self.questions))) else "first",
            "questions_sha256": sha256(json.dumps(questions).encode()).hexdigest(),
        }


# --- waves ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenPrompts:
    """Prompts given as token ids: a `PromptSource` with one turn each, whose prompts ignore the context length."""

    prompts: Sequence[Sequence[int]]

    @property
    def ids(self) -> Sequence[str]:
        return [str(index) for index in range(len(self.prompts))]

    @property
    def tasks(self) -> Sequence[str | None]:
        return [None] * len(self.prompts)

    def turns(self, index: int) -> int:
        return 1

    def prompt(self, index: int, context: int | None = None, answers: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
        return tuple(self.prompts[index])


PromptSource = Asker | TokenPrompts
"""Questions by index (from 0), each with one or more turns."""


@dataclass(frozen=True)
class Wave:
    """Questions of one task, by index, that are decoded and timed together."""

    index: int
    questions: tuple[int, ...]


def waves_of(tasks: Sequence[str | None], batch_size: int) -> list[Wave]:
    """Group the questions into waves.

    At batch size 1 a wave is one question; at larger batch sizes it has about twice as many questions as the batch, all
    of one task. The waves of a task have equal sizes, because a small last wave would leave rows of the batch empty.
    """
    groups: list[list[int]] = []
    for task in dict.fromkeys(tasks):
        indices = [index for index, own in enumerate(tasks) if own == task]
        if batch_size == 1:
            groups += [[index] for index in indices]
        else:
            parts = max(1, round(len(indices) / (2 * batch_size)))
            ends = [round(len(indices) * part / parts) for part in range(parts + 1)]
            groups += [indices[begin:end] for begin, end in pairwise(ends)]
    if batch_size == 1:
        groups.sort()
    return [Wave(index, tuple(indices)) for index, indices in enumerate(groups)]
