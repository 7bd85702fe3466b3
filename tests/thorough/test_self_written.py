"""Prompts that a target writes itself: what it continues, what is removed and counted,
and what remains after a kill.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_endpoint import Reply, Request, chat, serve
from test_regenerate import regenerate, rows
from tiny_models import counting_model, tiny_model
from tiny_tokenizer import byte_tokenizer
from tiny_training import tiny_tokenizer, write_rows

from decoding.generate import DecodingConfig
from trainer.commands.options import RegenerateOptions
from trainer.data.answers import AnswerFile, Outcome, described_prompts
from trainer.data.self_written import SelfWritten, UserTurn, read_request
from trainer.data.sources import open_source
from trainer.recipe.common import DataSection

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
UNENDED = TEMPLATE.replace("<eos> {% endfor", "{% endfor")
CONTROLS = ["<user>"]
"""Token 2. The other ids: <eos> is 1, <assistant> is 3, and a to l are 4 to 15."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random target with a chat template, one without, and one that counts and so always writes the same
    prompt.
    """
    folder = tmp_path_factory.mktemp("models")
    made = {
        "chat": tiny_model(seed=3, eos_token_id=1, initializer_range=0.1, max_position_embeddings=40),
        "plain": counting_model(),
        "counting": counting_model(),
    }
    lm_head: Any = made["counting"].get_output_embeddings()
    lm_head.weight.data *= 10  # it counts at every temperature
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer = tiny_tokenizer(None if name == "plain" else TEMPLATE)
        tokenizer.add_special_tokens({"additional_special_tokens": CONTROLS})
        tokenizer.save_pretrained(folder / name)
    return folder


def options(folder: Path, target: Path, prompts: str, **changes: Any) -> RegenerateOptions:
    defaults: dict[str, Any] = {"max_new_tokens": 8, "batch_size": 4, "temperature": 1.0}
    return RegenerateOptions(
        target=str(target), prompts=prompts, output=folder / "answers.jsonl", **{**defaults, **changes}
    )


def asked(folder: Path) -> list[str]:
    """Return the first message of each answered conversation."""
    return [row["messages"][0]["content"] for row in rows(folder / "answers.jsonl")]


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do a run without a kill; return the files that it wrote."""
    folder = tmp_path_factory.mktemp("finished")
    regenerate(options(folder, models / "chat", "self:12"))
    return folder


# --- what is written --------------------------------------------------------------------------------------------------


def prompts_of(folder: Path) -> dict[int, str]:
    """Return the prompts from the draws, by the row of their answer."""
    drawn = dict.fromkeys(row["answer"] for row in rows(folder / "answers.jsonl.draws.jsonl"))
    return dict(enumerate(drawn, start=1))


def test_so_many_different_prompts_are_written_and_answered(finished: Path) -> None:
    prompts = asked(finished)
    assert all(len(prompt.split()) >= 4 and not {*CONTROLS, "<eos>"} & {*prompt.split()} for prompt in prompts)
    assert {row["prompt"] for row in rows(finished / "answers.jsonl.draws.jsonl")} == {"<user> "}, "the opening"
    answered = {row["row"]: row["messages"][0]["content"] for row in rows(finished / "answers.jsonl")}
    empty = {row["row"] for row in rows(finished / "answers.jsonl.failed.jsonl")}
    assert answered.keys() | empty == {*range(1, 13)} and not answered.keys() & empty
    assert answered.items() <= prompts_of(finished).items(), "the first ones, in the order of their draws"


def test_the_counts_add_up_and_are_recorded_with_the_answers(finished: Path) -> None:
    (told,) = described_prompts(finished / "answers.jsonl")
    assert told["written_by"] == "the target" and (told["temperature"], told["top_p"]) == (1.0, 0.95)
    assert told["prompts"] == 12 and {"with control tokens", "too short"} <= told["removed"].keys()
    assert told["draws"] == told["prompts"] + told["spare"] + sum(told["removed"].values())
    files = [rows(finished / f"answers.jsonl.draws.jsonl{suffix}") for suffix in ("", ".failed.jsonl")]
    assert told["draws"] == sum(map(len, files))
    assert described_prompts(finished) == [told], "of a folder too"


def test_a_larger_number_adds_prompts_and_keeps_the_answers(models: Path, finished: Path, tmp_path: Path) -> None:
    assert regenerate(options(tmp_path, models / "chat", "self:5")).rows == 5
    assert regenerate(options(tmp_path, models / "chat", "self:12")).before == 5
    assert rows(tmp_path / "answers.jsonl") == rows(finished / "answers.jsonl")
    assert described_prompts(tmp_path / "answers.jsonl") == described_prompts(finished / "answers.jsonl")
    with pytest.raises(ValueError, match=r"to 12 prompts that are not the first .*: ask for at least as many, or"):
        regenerate(options(tmp_path, models / "chat", "self:5"))
    meta = tmp_path / "answers.jsonl.meta.json"
    meta.write_text(meta.read_text().replace('"about"', '"abut"'))
    with pytest.raises(ValueError, match=r"meta\.json is damaged"):
        regenerate(options(tmp_path, models / "chat", "self:12"))


def test_a_folder_of_answers_is_read_without_the_draws(finished: Path) -> None:
    assert [file.name for file in open_source(str(finished), DataSection(train="", heldout="")).files] == [
        "answers.jsonl"
    ]


def test_another_seed_draws_others_and_the_prompts_of_a_file_are_left_out(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    """Seeds of neighbouring runs must not equal seeds of neighbouring draws; otherwise both runs would draw the same
    prompts.
    """
    draws = [row["answer_tokens"] for row in rows(finished / "answers.jsonl.draws.jsonl") if row["tokens"] > 7]
    regenerate(options(tmp_path, models / "chat", "self:4", seed=1))
    others = [row["answer_tokens"] for row in rows(tmp_path / "answers.jsonl.draws.jsonl") if row["tokens"] > 7]
    assert others and sum(each in draws for each in others) < len(others) / 2
    (tmp_path / "apart").mkdir()
    regenerate(options(tmp_path / "apart", models / "chat", f"self:4,except={finished / 'answers.jsonl'}"))
    assert asked(tmp_path / "apart") and not {*asked(tmp_path / "apart")} & {*asked(finished)}
    (told,) = described_prompts(tmp_path / "apart" / "answers.jsonl")
    assert told["removed"]["in answers.jsonl"] > 0


def test_later_turns_are_written_after_the_answers_and_a_conversation_ends_where_none_can_be_used(
    models: Path, tmp_path: Path
) -> None:
    summary = regenerate(options(tmp_path, models / "chat", "self:12,turns=2"))
    written = rows(tmp_path / "answers.jsonl")
    assert {len(row["messages"]) for row in written} == {2, 4}
    for row in written:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * (len(row["messages"]) // 2)
        assert len(row["answer_tokens"]) == len(row["messages"]) // 2
        assert len(row["messages"][-2]["content"].split()) >= 4
    assert summary.unasked == sum(len(row["messages"]) == 2 for row in written)
    before = (tmp_path / "answers.jsonl").read_bytes()
    assert regenerate(options(tmp_path, models / "chat", "self:12,turns=2")).answered == 0
    assert (tmp_path / "answers.jsonl").read_bytes() == before


# --- what a kill leaves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 20, -2])
def test_a_killed_run_ends_with_the_same_prompts_and_answers(
    models: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The last kill comes in the last group of draws, when enough draws are already usable."""
    (told,) = described_prompts(finished / "answers.jsonl")
    chosen, add, left = (
        options(tmp_path, models / "chat", "self:12"),
        AnswerFile.add,
        iter(range(after % told["draws"])),
    )

    def killed(answers: AnswerFile, outcomes: Sequence[Outcome]) -> list[Outcome]:
        found = add(answers, outcomes)
        if found and next(left, None) is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(AnswerFile, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        regenerate(chosen)
    monkeypatch.undo()
    regenerate(chosen)
    for file in finished.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


# --- what is removed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens", "truncated", "fault"),
    [
        ("Why?", (*b"Why?", 0), False, None),
        ("Why?", tuple(b"Why?"), True, "without an end"),
        ("Hm?", (*b"Hm?", 0), False, "too short"),
        ("? ! ? !", None, False, "too short"),
        ("", (0,), False, "too short"),
        ("Why<|end|> not", None, False, "with control tokens"),
        ("Why not", (*b"Why", 0, *b" not", 0), False, "with control tokens"),
        ("no no no no", None, False, "repeating one phrase"),
        ("tell me more. Tell me more!", None, False, "repeating one phrase"),
        ("yes or no, Yes or no? yes or", None, False, "repeating one phrase"),
        ("tell me more, tell me all", None, False, None),
    ],
)
def test_faults_of_prompts(text: str, tokens: Any, truncated: bool, fault: str | None) -> None:
    turn = UserTurn(
        byte_tokenizer("{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}")
    )
    assert turn.fault(text, tokens, truncated) == fault


def test_a_target_that_says_one_thing_for_ever_is_given_up_with_the_counts(models: Path, tmp_path: Path) -> None:
    """After <user> the target writes <assistant>, all letters, <unk> and <eos>."""
    with pytest.raises(
        ValueError, match=r"rarely writes a usable prompt \(256 draws, 0 prompts, 256 with control tokens\): use a file"
    ):
        regenerate(options(tmp_path, models / "counting", "self:3", batch_size=64))
    assert not (tmp_path / "answers.jsonl").exists()


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_the_opening_has_the_templates_system_message_and_the_end_is_the_token_after_the_message() -> None:
    tokenizer = tiny_tokenizer("{% if loop is undefined %}a b {% endif %}" + TEMPLATE.replace("<eos> {%", "<user> {%"))
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROLS})
    turn = UserTurn(tokenizer)
    assert turn.after(()) == (4, 5, 2)
    said = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    assert turn.after(said) == (4, 5, 2, 6, 2, 3, 7, 2, 2)
    assert turn.config(DecodingConfig(eos_token_ids=(1,)), None).eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "has no chat template, so it cannot write prompts: use a file of texts"),
        ("{{ raise_exception('no system message') }}", "rejects a user's turn: no system message"),
        (UNENDED.replace("<assistant> {% endif", "a {% endif"), "must follow the message, not 'a'"),
        ("<user> {% for message in messages %}{{ message.role }}{% endfor %}<eos>", "not nothing: use a file"),
    ],
)
def test_a_target_whose_template_shows_no_users_turn_is_refused(
    models: Path, tmp_path: Path, template: str | None, complaint: str
) -> None:
    counting_model().save_pretrained(tmp_path / "target")
    tiny_tokenizer(template).save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match=complaint):
        regenerate(options(tmp_path, tmp_path / "target", "self:3"))
    assert not list(tmp_path.glob("answers*"))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("prompts.jsonl", None),
        ("self:7", SelfWritten(7, 1, None)),
        ("self:7,except=a=b.jsonl,turns=2", SelfWritten(7, 2, "a=b.jsonl")),
    ],
)
def test_the_forms_of_a_request(given: str, found: SelfWritten | None) -> None:
    assert read_request(given) == found
    assert read_request(given, limit=5) == (found and found._replace(number=5))


@pytest.mark.parametrize("given", ["self:", "self:0", "self:many", "self:3,turns=0", "self:3,except=", "self:3,seed=1"])
def test_a_malformed_request_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"is malformed: write self:COUNT\[,turns=N\]\[,except=FILE\]"):
        read_request(given)


# --- by a server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return (f"{a} {b} {c} {d}" for a in "abc" for b in "ccdef" for c in "efghij" for d in "<ijkl")


def test_a_server_continues_the_tokens_of_the_opening_and_answers_what_it_wrote(
    models: Path, tmp_path: Path, written: Iterator[str]
) -> None:
    def script(request: Request) -> Reply:
        if "messages" in request.body:
            return chat(f"to {request.body['messages'][-1]['content']}")
        status, body = chat(None)
        text = next(written).replace("<", "<user>")
        body["choices"] = [{"index": 0, "finish_reason": "stop", "text": text}]
        return status, body

    with serve(script) as endpoint:
        server = {"endpoint": [endpoint.address], "model": "tiny", "concurrency": 1, "batch_size": 16}
        chosen = options(tmp_path, models / "chat", "self:24", temperature=None, **server)
        regenerate(chosen)
        (opened, *_) = [request for request in endpoint.requests if request.path.endswith("/v1/completions")]
        with pytest.raises(ValueError, match="a server writes first turns only; omit turns, or omit --endpoint"):
            regenerate(replace(chosen, prompts="self:24,turns=2"))
    assert opened.body["prompt"] == [2] and (opened.body["temperature"], opened.body["top_p"]) == (1.0, 0.95)
    answers = rows(tmp_path / "answers.jsonl")
    assert [row["messages"][1]["content"] for row in answers] == [f"to {prompt}" for prompt in asked(tmp_path)]
    (told,) = described_prompts(tmp_path / "answers.jsonl")
    assert (told["draws"], told["prompts"], told["spare"]) == (64, 24, 3)
    assert told["removed"] == {"repeated": 24, "with control tokens": 13}


def test_a_server_alone_lacks_the_template_and_is_refused(tmp_path: Path) -> None:
    chosen = RegenerateOptions(
        prompts="self:3", output=tmp_path / "a.jsonl", endpoint=["http://127.0.0.1:9/v1"], model="tiny"
    )
    with pytest.raises(ValueError, match="in both cases self-written prompts need the chat template of a --target"):
        regenerate(chosen)
    with pytest.raises(ValueError, match="--prompt-field does nothing if the target writes the prompts"):
        regenerate(replace(chosen, target="x", prompt_field="question"))
    source = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}])
    with pytest.raises(ValueError, match="use one source of answers"):
        regenerate(replace(chosen, prompts=source, target="x"))
