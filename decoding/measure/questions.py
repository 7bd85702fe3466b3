"""Questions of an evaluation: read from the files that benchmarks come in, asked turn by turn, at any length.

Spec-Bench (2401.07851), MT-Bench, gsm8k, HumanEval, mbpp and any other .jsonl file; a folder of SPEED-Bench
(2604.09557) that its user prepared, as .jsonl or Parquet.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.fields import Tools, find_answer, prompt_of, tools_of
from decoding.jsonl import read_rows
from decoding.prompts import before_the_answer, encode_prompt

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
_SPEC_BENCH = frozenset({"translation", "summarization", "qa", "math_reasoning", "rag"})
_ID_FIELDS = ("question_id", "id", "task_id")
_TASK_FIELDS = ("category", "task")
_SUFFIXES = (".jsonl", ".parquet")
_MOST_TASKS = 30
"""Fields with more values than this name no tasks."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class Question:
    """A question: the messages of its first turn, and the user's texts of its ``later`` turns.

    ``plain``: its text is continued, not answered, without a chat template.
    """

    id: str
    task: str | None
    opening: tuple[dict[str, Any], ...]
    later: tuple[str, ...] = ()
    plain: bool = False
    tools: Tools | None = None


# --- reading ----------------------------------------------------------------------------------------------------------


def read_questions(path: str | Path, field: str | None = None) -> list[Question]:
    """Read the questions of a .jsonl or .parquet file, or of a folder of them.

    ``field`` names the field of the prompt; None takes the first of `decoding.fields.PROMPT_FIELDS` that a row has. A
    list of texts holds one turn each; of messages those before the first answer are asked. A ``text`` without an answer
    beside it is continued, not answered. Ids come from ``question_id``, ``id`` or ``task_id``, else from the line. The
    task is a row's ``category``; in Spec-Bench's file the eight categories of MT-Bench are one task, ``mt_bench``.

    ValueError for a file without prompts, and for a folder of several sets.
    """
    questions = list(_questions(path, field))
    ids = Counter(question.id for question in questions)
    if max(ids.values()) > 1:
        questions = [replace(question, id=str(place)) for place, question in enumerate(questions, start=1)]
    return _with_tasks(questions)


def read_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    field: str | None = None,
    prompt_tokens: int | None = None,
    chat: bool = True,
) -> list[tuple[int, ...]]:
    """Return the first turns of the first ``limit`` questions as token ids, without a chat template unless ``chat``.

    ``field``: as of `read_questions`. ``prompt_tokens`` keeps only that many first tokens of each. ValueError for a
    file without prompts.
    """
    questions = list(islice(_questions(path, field), limit))
    asked = [question if chat else replace(question, plain=True) for question in questions]
    asker = Asker(asked, tokenizer, all_turns=False, prompt_tokens=prompt_tokens)
    return [asker.prompt(place) for place in range(len(asked))]


def _questions(path: str | Path, field: str | None) -> Iterator[Question]:
    """Yield the questions as they are read; ValueError for a file that holds none."""
    found = False
    for number, row, where in _rows(Path(path)):
        found = True
        yield _question(number, row, field, where)
    if not found:
        raise ValueError(f"{path} holds no prompts: give a .jsonl file with one a line")


def _with_tasks(questions: list[Question]) -> list[Question]:
    """Name the tasks: Spec-Bench's six; none if the rows' categories are no tasks."""
    names = {question.task for question in questions}
    if len(names) == 1 or len(names) > _MOST_TASKS or None in names:
        return [replace(question, task=None) for question in questions]
    if names <= MT_BENCH | _SPEC_BENCH and names & {"translation", "math_reasoning"}:
        return [replace(question, task="mt_bench") if question.task in MT_BENCH else question for question in questions]
    return questions


def _question(number: int, row: dict[str, Any], field: str | None, where: str) -> Question:
    name, value = prompt_of(row, field, where)
    opening = before_the_answer(value, where)
    later: tuple[str, ...] = ()
    if isinstance(value, list) and isinstance(value[0], str):
        later = tuple(value[1:])
        if wrong := [turn for turn in later if not isinstance(turn, str)]:
            raise ValueError(f"{where}: a later turn is {type(wrong[0]).__name__}, not text")
    messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else opening
    if not messages:
        raise ValueError(f"{where}: nothing is asked before the first answer: begin with the user's message")
    named = next((row[key] for key in _ID_FIELDS if row.get(key) is not None), number)
    task = next((row[key] for key in _TASK_FIELDS if isinstance(row.get(key), str)), None)
    plain = field is None and name == "text" and find_answer(row) is None
    return Question(str(named), task, tuple(messages), later, plain, tools_of(row, where))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield (number from 1, row, place for errors) of every row of a file or of a folder's one set."""
    number = 0
    for file in _files_of(path) if path.is_dir() else [path]:
        for line, row in read_rows(file):
            number += 1
            yield number, row, f"{file}, line {line}"


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a folder's one set, shards in their order; ValueError for no set and for several."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    sets = {(path.parent, _SHARD.sub("", path.stem)) for path in files}
    if not files:
        raise ValueError(f"folder {folder} holds no .jsonl and no .parquet file: give the folder of a prepared set")
    if len(sets) > 1:
        names = sorted({str((parent / stem).relative_to(folder)) for parent, stem in sets})
        shown = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
        raise ValueError(f"{folder} holds several sets ({shown}): give the folder or the file of one")
    return files


def evenly(questions: Sequence[Question], limit: int) -> list[Question]:
    """Return ``limit`` questions in the file's order, as many of each task as there can be; the first of each."""
    if limit >= len(questions):
        return list(questions)
    places: dict[str | None, list[int]] = {}
    for place, question in enumerate(questions):
        places.setdefault(question.task, []).append(place)
    turns = [(turn, place) for own in places.values() for turn, place in enumerate(own)]
    chosen = sorted(place for _, place in sorted(turns, key=lambda pair: pair[0])[:limit])
    return [questions[place] for place in chosen]


# --- asking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asker:
    """Writer of the questions' prompts as token ids: a `decoding.measure.waves.PromptSource`.

    ``thinking`` is handed to the chat template. ``all_turns`` False asks first turns only. ``prompt_tokens`` keeps that
    many first tokens of each prompt. ``longest``: a first turn of more tokens loses the beginning of its message,
    or if it is a plain text its end. ``filler`` are all questions of the file in its order: a prompt that is asked for
    with a context is preceded by the texts of the questions before it, the last before the first.
    """

    questions: Sequence[Question]
    tokenizer: PreTrainedTokenizerBase
    thinking: bool | None = None
    all_turns: bool = True
    prompt_tokens: int | None = None
    filler: Sequence[Question] = ()
    longest: int | None = None

    def __post_init__(self) -> None:
        template = self.tokenizer.chat_template
        if self.thinking is not None and "enable_thinking" not in str(template):
            given = "--thinking" if self.thinking else "--no-thinking"
            what = "reads no enable_thinking" if template else "is missing"
            raise ValueError(f"{given} has no effect: the target's chat template {what}; leave it out")

    @cached_property
    def ids(self) -> Sequence[str]:
        return [question.id for question in self.questions]

    @cached_property
    def tasks(self) -> Sequence[str | None]:
        return [question.task for question in self.questions]

    def turns(self, place: int) -> int:
        return 1 + len(self.questions[place].later) if self.all_turns else 1

    def prompt(self, place: int, context: int | None = None, answers: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
        """Return a turn's prompt: its question behind the earlier turns and their answers, in the chat template."""
        question = self.questions[place]
        messages = [*question.opening]
        for answer, turn in zip(answers, question.later, strict=False):
            text = str(self.tokenizer.decode(list(answer), skip_special_tokens=True))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]
        if context is None:
            tokens = self._encode(messages, question)[: self.prompt_tokens]
            if self.longest is None or answers or len(tokens) <= self.longest:
                return tokens
            context = self.longest
        return self._filled(place, messages, context)

    def _encode(self, messages: list[dict[str, Any]], question: Question) -> tuple[int, ...]:
        return encode_prompt(messages, self.tokenizer, not question.plain, self.thinking, question.tools)

    def _filled(self, place: int, messages: list[dict[str, Any]], context: int) -> tuple[int, ...]:
        """Return the prompt with so much text before the user's first message that it has ``context`` tokens at most.

        A plain text that is longer is cut at its end; a user's message that is longer loses its beginning.
        """
        question = self.questions[place]
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
        raise ValueError(
            f"a context of {context} tokens has no room for question {question.id} in its chat template: give a longer "
            "one"
        )

    def _tail_ids(self, question: Question, text: str, context: int) -> list[int]:
        """Return at least ``context`` tokens, if the file has as many: those of the questions before, then the text."""
        filler = self.filler or self.questions
        at = next((place for place, other in enumerate(filler) if other.id == question.id), 0)
        ids = self._ids_of(text)
        for other in (*filler[:at][::-1], *filler[at + 1 :][::-1]):
            if len(ids) >= context:
                break
            before = "\n".join(message["content"] for message in other.opening)
            ids = self._ids_of(f"{before}\n\n") + ids
        return ids

    def _ids_of(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def asked(self) -> dict[str, Any]:
        """Tell what was asked of every method: the template and its digest, the thinking mode, the turns.

        ``questions_sha256`` covers what the first turns' tokens do not: ids, tasks and the texts of later turns.
        """
        chat = self.tokenizer.chat_template is not None and not all(question.plain for question in self.questions)
        template = self.tokenizer.chat_template if chat else None
        if template is not None and not isinstance(template, str):  # several, by name
            template = json.dumps(template, sort_keys=True)
        told = [(each.id, each.task, each.later if self.all_turns else ()) for each in self.questions]
        return {
            "template": "chat" if chat else "none",
            "template_sha256": None if template is None else sha256(template.encode()).hexdigest(),
            "thinking": self.thinking,
            "turns": "all" if any(self.turns(place) > 1 for place in range(len(self.questions))) else "first",
            "questions_sha256": sha256(json.dumps(told).encode()).hexdigest(),
        }
