"""Questions: how benchmark files are read, which questions are chosen, and their prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import byte_tokenizer

from decoding.measure.questions import MT_BENCH, Asker, Question, evenly, read_questions

CHAT = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
KEY = "questions_sha256"


def written(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text(tokens: tuple[int, ...]) -> str:
    return bytes(tokens).decode()


def spec_bench(*categories: str) -> list[dict[str, Any]]:
    return [{"question_id": 81 + i, "category": name, "turns": ["a", "b"]} for i, name in enumerate(categories)]


# --- reading ----------------------------------------------------------------------------------------------------------


def test_spec_benchs_thirteen_categories_are_six_tasks(tmp_path: Path) -> None:
    others = ["translation", "summarization", "qa", "math_reasoning", "rag"]
    found = read_questions(written(tmp_path, *spec_bench(*sorted(MT_BENCH), *others)))
    assert list(dict.fromkeys(question.task for question in found)) == ["mt_bench", *others]
    assert found[0].id == "81" and found[0].later == ("b",)
    alone = read_questions(written(tmp_path, *spec_bench(*sorted(MT_BENCH))))
    assert [question.task for question in alone] == sorted(MT_BENCH)
    twice = read_questions(written(tmp_path, {"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}))
    assert [question.id for question in twice] == ["1", "2"], "ids that come twice give way to the lines"


def user(content: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": content},)


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"question": "q", "answer": "a"}, Question("1", None, user("q"))),
        ({"task_id": "HumanEval/0", "prompt": "def f"}, Question("HumanEval/0", None, user("def f"))),
        ({"text": "t", "code": "c", "task_id": 7}, Question("7", None, user("t"))),
        ({"text": "once"}, Question("1", None, user("once"), plain=True)),
        ({"messages": [*user("u"), {"role": "assistant", "content": "a"}]}, Question("1", None, user("u"))),
    ],
)
def test_the_rows_of_known_files_are_read_by_their_fields(tmp_path: Path, row: Any, question: Question) -> None:
    assert read_questions(written(tmp_path, row)) == [question]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"turns": ["a", None]}, "line 1: field 'turns' is empty .null., not text or messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "line 1: there is no question before the first answer"),
    ],
)
def test_a_row_that_asks_nothing_or_no_text_is_refused_by_its_line(tmp_path: Path, row: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_questions(written(tmp_path, row))


def test_a_speed_bench_folder_is_read_split_by_split_as_its_prepare_script_writes_it(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": text} for text in ("one", "two")]
    rows = [{"question_id": f"{i:032x}", "category": name, "messages": turns} for i, name in enumerate(("math", "rag"))]
    written(tmp_path, *rows, name="qualitative.jsonl")
    written(tmp_path, {**rows[0], "category": "mixed", "messages": turns[:1]}, name="throughput_1k.jsonl")
    found = read_questions(f"{tmp_path}:qualitative")
    assert [(question.task, question.opening, question.later) for question in found] == [
        ("math", user("one"), ("two",)),
        ("rag", user("one"), ("two",)),
    ]
    assert [question.id for question in read_questions(f"{tmp_path}:throughput_1k")] == ["0" * 32]
    with pytest.raises(
        ValueError, match=r"SPEED-Bench's qualitative and throughput_1k: name one split, as in .*:qualitative"
    ):
        read_questions(tmp_path)
    with pytest.raises(ValueError, match=r"contains qualitative, throughput_1k, but not 'coding': name one file as"):
        read_questions(f"{tmp_path}:coding")
    empty = {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nMore"]}
    with pytest.raises(
        ValueError, match=r"line 1: SPEED-Bench's prompt is a placeholder: run SPEED-Bench's prepare\.py"
    ):
        read_questions(written(tmp_path, empty))


def test_each_file_of_a_folder_of_benchmarks_is_a_task(tmp_path: Path) -> None:
    """As in RedHatAI/speculator_benchmarks, HumanEval has separate fields, and the other files have the fields of
    Spec-Bench.
    """
    written(tmp_path, {"task_id": "HumanEval/0", "prompt": "def f", "canonical_solution": "x"}, name="HumanEval.jsonl")
    written(tmp_path, {"question_id": 241, "category": "qa", "turns": ["a"]}, name="qa.jsonl")
    written(tmp_path, *spec_bench("writing", "stem"), name="question.jsonl")
    assert [question.task for question in read_questions(tmp_path)] == ["HumanEval", "qa", "question", "question"]
    assert [question.task for question in read_questions(f"{tmp_path}:question.jsonl")] == ["writing", "stem"]


def test_the_tools_of_a_question_stand_in_its_prompt(tmp_path: Path) -> None:
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + CHAT
    (question,) = read_questions(written(tmp_path, {"prompt": "one", "tools": '[{"name": "f"}]'}))
    assert text(Asker([question], byte_tokenizer(template)).prompt(0)) == "f <u>one<a>"


def test_a_limit_takes_as_many_of_each_task_as_there_can_be() -> None:
    tasks = ["a"] * 5 + ["b"] * 5 + ["c"]
    questions = [Question(str(place), task, ()) for place, task in enumerate(tasks)]
    assert [question.id for question in evenly(questions, 5)] == ["0", "1", "5", "6", "10"]
    assert evenly(questions, 99) == questions
    alone = [Question(str(place), None, ()) for place in range(4)]
    assert [question.id for question in evenly(alone, 2)] == ["0", "1"]


# --- asking -----------------------------------------------------------------------------------------------------------


def asker(*turns: tuple[str, ...], template: str | None = CHAT, **options: Any) -> Asker:
    questions = [
        Question(str(place), None, ({"role": "user", "content": own[0]},), own[1:]) for place, own in enumerate(turns)
    ]
    return Asker(questions, byte_tokenizer(template), **options)


def test_a_later_turn_is_asked_behind_the_answer_without_its_end() -> None:
    asked = asker(("one", "two"))
    assert asked.turns(0) == 2
    assert text(asked.prompt(0)) == "<u>one<a>"
    assert text(asked.prompt(0, answers=[(*b"yes", 0)])) == "<u>one<a>yes<u>two<a>"
    assert asker(("one", "two"), all_turns=False).turns(0) == 1


def test_a_context_is_filled_with_the_rows_before_and_never_exceeded() -> None:
    asked = asker(("aaaa",), ("bbbb",), ("cccc",))
    assert text(asked.prompt(2, context=10)) == "<u>cccc<a>"
    assert text(asked.prompt(2, context=13)) == "<u>b\n\ncccc<a>"
    assert text(asked.prompt(0, context=99)) == "<u>bbbb\n\ncccc\n\naaaa<a>"
    assert text(asked.prompt(1, context=8)) == "<u>bb<a>"
    plain = [Question("0", None, user("abcdef"), plain=True)]
    assert text(Asker(plain, byte_tokenizer(CHAT)).prompt(0, context=4)) == "abcd", "a plain text is cut at its end"
    with pytest.raises(ValueError, match="a context of 6 tokens is too short for question 1 in its chat template"):
        asked.prompt(1, context=6)


def test_the_digest_of_the_questions_tells_ids_tasks_and_later_turns_apart() -> None:
    def digest(name: str = "q", task: str | None = None, later: str = "two", all_turns: bool = True) -> str:
        return str(Asker([Question(name, task, user("one"), (later,))], byte_tokenizer(), all_turns).asked()[KEY])

    assert len({digest(), digest("r"), digest(task="qa"), digest(later="three")}) == 4
    assert digest(all_turns=False) == digest(later="three", all_turns=False), "nobody asks it"
