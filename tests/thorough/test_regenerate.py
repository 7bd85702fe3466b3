"""Answers from a target in this process: what is requested and written, and what remains after a kill.

The target counts: after token x comes x + 1. In its tokenizer a to l are 4 to 15, followed by <unk>, which is 0, and
<eos>, which is 1. So it continues "j" with "k l <unk> <eos>".
"""

import io
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_chat import ASKED
from tiny_models import counting_model, tiny_model
from tiny_training import CHAT_TEMPLATE, WORDS, tiny_tokenizer, write_rows
from transformers import GenerationConfig, PreTrainedTokenizerBase

from decoding.drafters.base import DraftRequest
from decoding.drafters.draft_model import DraftModelSession
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_tokenizer
from decoding.rules.tree import Proposal
from trainer.commands.options import RegenerateOptions
from trainer.commands.regenerate import run_regenerate
from trainer.data.answers import AnsweredConversation, AnswerFile, Outcome, Summary
from trainer.data.conversations import AnswerKey, OpenConversation, answer_message
from trainer.data.dataset import load_dataset
from trainer.files.folders import hold_file
from trainer.recipe.common import DataSection


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write targets that count, with and without a chat template, and a random target that can end a text, with its
    speculators.
    """
    folder = tmp_path_factory.mktemp("models")
    for name, template in (("plain", None), ("chat", CHAT_TEMPLATE)):
        counting_model().save_pretrained(folder / name)
        tiny_tokenizer(template).save_pretrained(folder / name)
    for name, seed in (("random", 3), ("draft", 4)):
        tiny_model(seed=seed, eos_token_id=1).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    MedusaHeads.for_target(tiny_model(seed=3), MedusaConfig(16, 16)).save_pretrained(folder / "heads")
    return folder


def options(folder: Path, target: Path, rows: Iterable[Any], **changes: Any) -> RegenerateOptions:
    rows = [{"prompt": row} if isinstance(row, str | list) else row for row in rows]
    source = write_rows(folder / "prompts.jsonl", rows)
    defaults: dict[str, Any] = {"max_new_tokens": 30, "batch_size": 2}
    return RegenerateOptions(
        target=str(target), prompts=source, output=folder / "answers.jsonl", **{**defaults, **changes}
    )


def regenerate(chosen: RegenerateOptions) -> Summary:
    return run_regenerate(chosen, Console(file=io.StringIO()))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def set_aside(folder: Path) -> list[dict[str, Any]]:
    return rows(folder / "answers.jsonl.failed.jsonl")


def contents(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"]]


RANDOM = {"temperature": 1.0, "n": 2, "max_new_tokens": 12, "seed": 5}
LETTERS = [*"abcdefg", "a c", "b d"]
"""With two samples each these are 18 conversations: at a batch size of 2, two whole groups and a smaller one."""


# --- what is written ------------------------------------------------------------------------------------------------


def test_without_a_chat_template_a_row_has_the_prompt_and_the_targets_own_answer(models: Path, tmp_path: Path) -> None:
    summary = regenerate(options(tmp_path, models / "plain", ["j", "h i"]))
    assert rows(tmp_path / "answers.jsonl") == [
        {
            "row": 1, "sample": 0, "prompt": "j", "answer": "k l", "answer_tokens": [[14, 15, 0, 1]], "tokens": 4,
            "truncated": False,
        },
        {
            "row": 2, "sample": 0, "prompt": "h i", "answer": "j k l", "answer_tokens": [[13, 14, 15, 0, 1]],
            "tokens": 5, "truncated": False,
        },
    ]  # fmt: skip
    assert (summary.rows, summary.answered, summary.tokens) == (2, 2, 9)


def test_with_a_chat_template_each_turn_is_answered_after_the_targets_own_answers(models: Path, tmp_path: Path) -> None:
    summary = regenerate(options(tmp_path, models / "chat", [["j", "i"], "h"]))
    both, one = rows(tmp_path / "answers.jsonl")
    assert contents(both) == ["j", "k l", "i", "j k l"] and contents(one) == ["h", "i j k l"]
    assert [message["role"] for message in both["messages"]] == ["user", "assistant"] * 2
    assert both["answer_tokens"] == [[14, 15, 0, 1], [13, 14, 15, 0, 1]]
    assert (summary.answered, summary.answers) == (2, 3)


def test_training_reads_the_very_tokens_that_were_written_in_location_of_given_answers(
    models: Path, tmp_path: Path
) -> None:
    said = [("user", "j"), ("assistant", "a a a"), ("user", "h"), ("user", "i")]
    messages = [{"role": role, "content": content} for role, content in said]
    regenerate(options(tmp_path, models / "chat", [{"messages": messages}]))
    section = DataSection(train="", heldout="", max_length=32)
    dataset = load_dataset(str(tmp_path / "answers.jsonl"), section, load_tokenizer(str(models / "chat")))
    trained = [example.tokens[example.trained].tolist() for example in dataset.examples]
    assert trained == [[14, 15, 0, 1], [13, 14, 15, 0, 1]], "the <unk>, which no text holds, among them"


def test_samples_of_a_prompt_differ_and_are_those_of_their_seed(models: Path, tmp_path: Path) -> None:
    texts: dict[str, list[Any]] = {}
    for name, seed in (("one", 5), ("again", 5), ("other", 6)):
        (tmp_path / name).mkdir()
        regenerate(options(tmp_path / name, models / "random", ["a c"], **{**RANDOM, "seed": seed, "n": 4}))
        texts[name] = [row["answer_tokens"] for row in rows(tmp_path / name / "answers.jsonl")]
    assert texts["one"] == texts["again"]
    # Conversation i is decoded with seed + i, so the other run starts with the second conversation of this one.
    assert texts["other"][:3] == texts["one"][1:]
    assert len({str(text) for text in texts["one"]}) == 4


def test_without_options_the_target_samples_as_its_generation_config_says(models: Path, tmp_path: Path) -> None:
    sampled = tmp_path / "sampled"
    shutil.copytree(models / "random", sampled)
    GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1).save_pretrained(sampled)
    regenerate(options(tmp_path, sampled, ["a c"], n=2, max_new_tokens=None))
    made = json.loads((tmp_path / "answers.jsonl.meta.json").read_text())["settings"]
    assert [made[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.5, 3, 0.9, 0.1]
    assert made["max_new_tokens"] == 48, "half of the context"
    (tmp_path / "other").mkdir()
    regenerate(options(tmp_path / "other", sampled, ["a c"], temperature=0.0))
    made = json.loads((tmp_path / "other" / "answers.jsonl.meta.json").read_text())["settings"]
    assert [made[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.0, 0, 1.0, 0.0]


# --- what is not ----------------------------------------------------------------------------------------------------


def test_an_answer_that_is_cut_off_is_marked_and_ends_its_conversation(models: Path, tmp_path: Path) -> None:
    summary = regenerate(options(tmp_path, models / "chat", [["a", "j"]], max_new_tokens=3))
    (row,) = rows(tmp_path / "answers.jsonl")
    assert contents(row) == ["a", "b c d"] and row["truncated"] and row["answer_tokens"] == [[5, 6, 7]]
    assert summary.truncated == 1 and summary.unasked == 1  # no request follows half an answer


def test_many_answers_that_are_cut_off_are_reported_early_and_once(models: Path, tmp_path: Path) -> None:
    for count, early in ((31, []), (40, ["32 of 32"])):
        (folder := tmp_path / str(count)).mkdir()
        said = io.StringIO()
        chosen = options(folder, models / "plain", ["a"] * count, max_new_tokens=1)
        run_regenerate(chosen, Console(file=said, width=1000))
        assert re.findall(r"warning: (\d+ of \d+) answers were cut off so far: start again", said.getvalue()) == early
        assert said.getvalue().count("warning: 100.0% of the answers were cut off at 1 tokens: raise") == 1


def test_an_answer_that_training_would_refuse_is_set_aside(tmp_path: Path) -> None:
    conversation = OpenConversation(AnswerKey(1, 0), 0, (({"role": "user", "content": "a"},),), chat=True)
    with AnswerFile(tmp_path / "answers.jsonl", {}, {}) as answers:
        answers.add([AnsweredConversation(conversation, (answer_message("half \ud83d"),), 1, truncated=False)])
    (row,) = set_aside(tmp_path)
    assert row["problem"] == "failed" and "training would reject the answer: " in row["reason"]
    assert not (tmp_path / "answers.jsonl").exists()


def test_tokens_that_training_would_refuse_are_left_out_and_the_text_is_kept(models: Path, tmp_path: Path) -> None:
    """The target has a token that its tokenizer lacks, as with a padded vocabulary."""
    counting_model().save_pretrained(tmp_path / "target")
    tokenizer = tiny_tokenizer(words=WORDS[:-1])  # without l
    tokenizer.save_pretrained(tmp_path / "target")
    regenerate(options(tmp_path, tmp_path / "target", ["j"]))
    (row,) = rows(tmp_path / "answers.jsonl")
    assert row["answer"] == "k" and "answer_tokens" not in row
    section = DataSection(train="", heldout="")
    assert load_dataset(str(tmp_path / "answers.jsonl"), section, tokenizer).account.bad_rows == 0


def test_a_prompt_beyond_the_targets_context_is_set_aside_and_the_others_are_answered(
    models: Path, tmp_path: Path
) -> None:
    summary = regenerate(options(tmp_path, models / "plain", ["a " * 90, "j"]))
    assert [row["answer"] for row in rows(tmp_path / "answers.jsonl")] == ["k l"]
    (row,) = set_aside(tmp_path)
    assert row["problem"] == "failed" and "the target's context of 96" in row["reason"]
    assert summary.failed == 1


def test_a_later_turn_beyond_the_targets_context_ends_the_conversation_and_the_answer_before_it_stays(
    models: Path, tmp_path: Path
) -> None:
    summary = regenerate(options(tmp_path, models / "chat", [["j", "a " * 90]]))
    assert contents(*rows(tmp_path / "answers.jsonl")) == ["j", "k l"] and (summary.unasked, summary.failed) == (1, 0)


def test_answers_beyond_the_drafts_context_are_decoded_without_drafts_and_the_others_with_them(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models / "draft", tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    propose, drafted = DraftModelSession.propose, list[int]()

    def watched(session: DraftModelSession, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafted.extend(len(request.tokens) for request in requests)
        return propose(session, requests)

    monkeypatch.setattr(DraftModelSession, "propose", watched)
    prompts, files = ["a b c d e f g", "a", "b c d e f g h", "c"], []
    for name, chosen in {"plain": {}, "short": {"drafter": f"draft:{tmp_path / 'short'}"}}.items():
        (tmp_path / f"by {name}").mkdir()
        regenerate(options(tmp_path / f"by {name}", models / "random", prompts, max_new_tokens=12, **chosen))
        files.append((tmp_path / f"by {name}" / "answers.jsonl").read_bytes())
    assert files[0] == files[1] and drafted and max(drafted) < 16
    assert [text for text in caplog.messages if "decoded without drafts: lower --max-new-tokens" in text] != []
    regenerate(options(tmp_path, models / "random", prompts, max_new_tokens=30, **chosen))  # not one fits
    assert len(rows(tmp_path / "answers.jsonl")) == 4


# --- what a kill leaves ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RegenerateOptions, dict[str, bytes]]:
    """Do a run without a kill; return its options and the files that it wrote."""
    folder = tmp_path_factory.mktemp("finished")
    chosen = options(folder, models / "random", LETTERS, **RANDOM)
    regenerate(chosen)
    return chosen, {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_done_is_not_done_again(finished: tuple[RegenerateOptions, dict[str, bytes]]) -> None:
    chosen, files = finished
    paths = [chosen.output.with_name(name) for name in files]
    before = [path.stat().st_mtime_ns for path in paths]
    summary = regenerate(chosen)
    assert (summary.answered, summary.tokens) == (0, 0)
    assert [path.stat().st_mtime_ns for path in paths] == before


def test_a_kill_in_the_middle_of_a_group_leaves_each_answer_that_was_done(
    finished: tuple[RegenerateOptions, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, files = replace(finished[0], output=tmp_path / "answers.jsonl"), finished[1]
    add = AnswerFile.add

    def killed(answers: AnswerFile, outcomes: Sequence[Outcome]) -> list[Outcome]:
        found = add(answers, outcomes)
        if chosen.output.exists():
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(AnswerFile, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        regenerate(chosen)
    monkeypatch.undo()
    assert len(rows(chosen.output)) == 1, "of a group of eight"
    regenerate(chosen)
    assert chosen.output.read_bytes() == files["answers.jsonl"]


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("answers.jsonl", b'{"row": 1, "sample": 0}\n{"row": 2, "sam}\n', r"answers\.jsonl, line 2 is damaged"),
        ("answers.jsonl", b'{"row": 1}\n', r"answers\.jsonl, line 1 is damaged \(it is not an object"),
        ("answers.jsonl.failed.jsonl", b"\xff\xfe\n", r"failed\.jsonl, line 1 is damaged"),
    ],
)
def test_a_damaged_line_is_named_and_said_to_be_answered_again_once_it_is_deleted(
    tmp_path: Path, file: str, content: bytes, complaint: str
) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path, {}, {}):
        (tmp_path / file).write_bytes(content)
    for _ in range(2):  # after an error the file is not locked
        with pytest.raises(
            ValueError, match=f"{complaint}.*: delete the line, and its conversation will be answered again"
        ):
            AnswerFile(path, {}, {})
    assert (tmp_path / file).read_bytes() == content


def test_two_runs_do_not_write_one_file_together(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with (
        AnswerFile(path, {}, {}),
        pytest.raises(ValueError, match=r"answers.jsonl is being written by process \d+ on .*: wait until it ends"),
    ):
        AnswerFile(path, {}, {})
    with hold_file(tmp_path / "new.jsonl"), pytest.raises(ValueError, match="is being written by process"):
        AnswerFile(tmp_path / "new.jsonl", {"seed": 1}, {})
    assert not list(tmp_path.glob("new*")), "not even its settings"


# --- tools ------------------------------------------------------------------------------------------------------------


def counting_target(folder: Path, template: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer(template)
    counting_model().save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    return tokenizer


def test_the_target_sees_the_tools_of_a_row_and_training_on_its_answer_does(tmp_path: Path) -> None:
    """The template ends its question with the name of the first tool, so the target counts on from there."""
    first = "{{ tools[0].function.name if tools else '' }} "
    tokenizer = counting_target(tmp_path, f"{first}{CHAT_TEMPLATE}{{% if add_generation_prompt %}}{first}{{% endif %}}")
    row = {"prompt": "j", "tools": '[{"name": "h"}]'}
    regenerate(options(tmp_path, tmp_path / "target", [row, "j"]))
    having, without = rows(tmp_path / "answers.jsonl")
    assert contents(having) == ["j", "i j k l"] and contents(without) == ["j", "k l"]
    assert having["tools"] == [{"type": "function", "function": {"name": "h"}}] and "tools" not in without
    section = DataSection(train="", heldout="", max_length=32)
    examples = load_dataset(str(tmp_path / "answers.jsonl"), section, tokenizer).examples
    #                                                 h <user> j  h  i   j   k   l <unk> <eos>
    assert [each.tokens.tolist() for each in examples] == [[11, 2, 13, 11, 12, 13, 14, 15, 0, 1], [2, 13, 14, 15, 0, 1]]


@pytest.mark.parametrize(("function", "written"), [("l", ["k l", "i j k l"]), ("i", ["k l"])])
def test_a_result_follows_a_text_that_names_its_function_and_no_other(
    tmp_path: Path, function: str, written: list[str]
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": function, "arguments": "{}"}}
    made = {"role": "assistant", "content": None, "tool_calls": [call]}
    talk = [{"role": "user", "content": "j"}, made, {"role": "tool", "tool_call_id": "1", "content": "h"}, ASKED[1]]
    counting_target(tmp_path, CHAT_TEMPLATE.replace("== 'user'", "!= 'assistant'"))
    regenerate(options(tmp_path, tmp_path / "target", [{"messages": talk}]))
    (row,) = rows(tmp_path / "answers.jsonl")
    assert [each["content"] for each in row["messages"] if each["role"] == "assistant"] == written
