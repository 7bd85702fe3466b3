"""`headstart chat` and `headstart generate`: questions by pipe and by hand, commands, Ctrl-C, what goes where."""

import builtins
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_cli import models as models
from test_conversation import TOKENIZER, fresh_answer, model
from typer.testing import CliRunner, Result
from writing_models import LINE, write_alphabet

from decoding import Conversation
from decoding.drafters import DraftModelDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import ModelOutput
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import RULES
from decoding.text import Step
from trainer.cli import app
from trainer.commands.chat import Chat, Decoder
from trainer.terminal.console import standard_error, standard_output
from trainer.terminal.exit_codes import ExitCode

ANSWER = LINE[:20]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_alphabet(tmp_path_factory.mktemp("alphabet"))


def ask(target: Path, questions: str, *more: str) -> Result:
    words = ["chat", "--target", str(target), "--dtype", "fp32", "--max-new-tokens", "20", *more]
    return CliRunner().invoke(app, words, input=questions)


# --- beginning --------------------------------------------------------------------------------------------------------


def test_a_limit_of_new_tokens_as_long_as_the_context_refuses_no_question() -> None:
    """Each answer is as long as there is room for it; so is the greeting that the beginning checks."""
    engine, config = Engine(model(context=40)), DecodingConfig(40)
    decoder = Decoder(engine, TOKENIZER, config, "plain decoding")
    chat = Chat(decoder, Conversation(engine, TOKENIZER, config), standard_output(), notes=standard_error())
    chat.begin()
    assert chat.answer_lines(["Why?"]) and len(chat.conversation.messages) == 2


# --- from a pipe ------------------------------------------------------------------------------------------------------


def test_each_line_of_a_pipe_is_a_question_and_standard_output_holds_the_answers_alone(target: Path) -> None:
    result = ask(target, "One?\n\n  \nTwo?\n", "--drafter", "lookup")
    assert result.exit_code == 0 and result.stdout == f"{ANSWER}\n\n{ANSWER}\n"
    told = result.stderr.splitlines()
    assert len(told) == 2 and all(line.startswith("prompt lookup (lossless): ") for line in told)
    assert all("; cut off at 20 tokens" in line for line in told)


def test_commands_come_through_a_pipe_too_and_behind_exit_nothing_is_asked(target: Path) -> None:
    result = ask(target, "One?\n/undo\n/undo\n/reset\n/help\nTwo?\n/exit\nThree?\n")
    assert result.exit_code == 0 and result.stdout == f"{ANSWER}\n\n{ANSWER}\n"
    told = result.stderr
    assert told.index("taken back: One?") < told.index("nothing to take back") < told.index("a new conversation begins")
    assert "/reset  start a new conversation" in told


@pytest.mark.parametrize(
    ("questions", "options", "told"),
    [
        ("/foo bar\nOne?\n", [], "unknown command /foo: /help lists all; a space in front makes it a question"),
        ("x" * 70000, [], "shorten the question or undo turns"),
        ("One?\n", ["--rule", "recursive", "--temperature", "1", "--drafter", "lookup"], "recursive"),
        ("One?\n", ["--drafter", "lokup"], "no drafter is called 'lokup'"),
    ],
)
def test_what_a_pipe_asks_wrongly_ends_with_one_sentence(
    target: Path, questions: str, options: list[str], told: str
) -> None:
    result = ask(target, questions, *options)
    assert result.exit_code == ExitCode.BAD_INPUT and result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and told in errors[0]


def test_a_system_message_that_the_template_refuses_is_found_before_any_question(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}user: "
    refused = ask(write_alphabet(tmp_path, template), "One?\n", "--system", "Be brief.")
    assert refused.exit_code == ExitCode.BAD_INPUT and "rejects this prompt: no system role" in refused.stderr


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def chat() -> Chat:
    engine = Engine(model(), DraftModelDrafter(model(1), 2), tokenizer=TOKENIZER)
    config = DecodingConfig(12)
    decoder = Decoder(engine, TOKENIZER, config, "draft model")
    return Chat(decoder, Conversation(engine, TOKENIZER, config), standard_output(), notes=standard_error())


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException] | Callable[[], None]) -> None:
    """Let these lines be typed, with Ctrl-C and Ctrl-D as exceptions."""
    waiting = iter(lines)

    def line(prompt: str) -> str:
        given = next(waiting)
        if isinstance(given, str):
            return given
        if isinstance(given, type):
            raise given
        given()
        return ""

    monkeypatch.setattr("builtins.input", line)


def test_redirected_output_holds_the_answers_alone_and_ctrl_c_at_the_prompt_clears_the_line(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = list[str]()
    typed(monkeypatch, "Why?", KeyboardInterrupt, EOFError)
    line = builtins.input
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or line(prompt))
    chat.talk()
    told = capsys.readouterr()
    assert prompts == [""] * 3 and told.err.count("> ") == 3 and "Ctrl-D leaves" in told.err
    assert told.out.strip() == str(chat.conversation.messages[1]["content"]).strip()


@pytest.mark.parametrize("end", [EOFError, "/exit"])
def test_errors_are_sentences_behind_which_the_conversation_goes_on(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str | type[BaseException]
) -> None:
    typed(monkeypatch, "Why?", "x" * 400, "/foo", "refused", " /foo", end)
    chat.talk()
    told = capsys.readouterr().err
    assert [told.count(part) for part in ("undo turns", "unknown command /foo", "no\n")] == [1, 1, 1]
    assert [message["content"] for message in chat.conversation.messages[::2]] == ["Why?", " /foo"]


def signals(target: CausalLM, at: int) -> Callable[[], None]:
    """Send Ctrl-C to this process inside forward ``at`` (from 1) of the target; returns the end of it."""
    count = 0

    def press(*_: object) -> None:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGINT)

    remove: Callable[[], None] = target.model.model.layers[1].register_forward_pre_hook(press).remove
    return remove


@pytest.fixture
def interrupted(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A chat of two questions: Ctrl-C comes inside the second answer, and a third question follows."""
    removals = []

    def talk(at: int) -> None:
        def prepare() -> None:
            removals.append(signals(chat.decoder.engine.target, at))

        typed(monkeypatch, "Why?", prepare, "And then?", lambda: removals[0](), "So?", EOFError)
        chat.talk()

    yield talk
    for remove in removals:
        remove()


@pytest.mark.parametrize("at", [1, 2, 4])
def test_ctrl_c_stops_the_answer_behind_the_running_pass_and_the_next_turn_is_exact(
    chat: Chat, interrupted: Callable[..., None], capsys: pytest.CaptureFixture[str], at: int
) -> None:
    interrupted(at)
    contents = [message["content"] for message in chat.conversation.messages]
    assert contents[::2] == ["Why?", "And then?", "So?"]
    assert 1 <= len(contents[3]) < 12 and (at > 1 or len(contents[3]) == 1)
    for turn in (1, 2):
        chat.conversation.messages = chat.conversation.messages[: 2 * turn]
        fresh = fresh_answer(chat.conversation, contents[2 * turn])
        assert fresh.startswith(contents[2 * turn + 1]) and (turn == 1 or fresh == contents[5])
        chat.conversation.messages = [
            {"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, contents, strict=True)
        ]
    printed = capsys.readouterr()
    assert "; stopped" in printed.err and "; cut off at 12 tokens" in printed.err


def test_ctrl_c_in_a_pipe_stops_the_answer_and_the_other_questions(
    chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    remove = signals(chat.decoder.engine.target, 3)
    try:
        assert chat.answer_lines(["Why?\n", "And then?\n"]) is False
    finally:
        remove()
    assert len(chat.conversation.messages) == 2 and "; stopped" in capsys.readouterr().err


# --- `headstart generate` on targets whose texts are known: what goes where, and Ctrl-C -------------------------------


TEXT = f"{LINE}\x1b{LINE}"[:40]


def generate(target: Path, *more: str) -> Result:
    words = ["generate", "--target", str(target), "--dtype", "fp32", "--prompt", "Go", "--max-new-tokens", "40", *more]
    return CliRunner().invoke(app, words)


def test_standard_output_holds_the_text_alone_as_the_model_wrote_it(target: Path) -> None:
    for more in ([], ["--drafter", "lookup"]):
        result = generate(target, *more)
        assert result.exit_code == 0 and result.stdout == f"{TEXT}\n"
        assert "tokens per target pass" in result.stderr and "(lossless)" in result.stderr


@pytest.mark.parametrize("drafter", ["draft:PATH/draft", "PATH/heads", "draft-tree:PATH/draft,depth=3,width=2,nodes=7"])
def test_every_kind_of_weights_writes_the_greedy_text(models: Path, drafter: str) -> None:
    words = ["generate", "--target", str(models / "target"), "--prompt", "class A", "--max-new-tokens", "16"]
    words += ["--dtype", "fp32"]
    plain, drafted = (
        CliRunner().invoke(app, [*words, *more]) for more in ([], ["--drafter", drafter.replace("PATH", str(models))])
    )
    assert plain.exit_code == drafted.exit_code == 0 and plain.stdout == drafted.stdout


def test_every_option_reaches_the_decoder(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[DecodingConfig] = []
    steps = Engine.steps

    def spy(engine: Engine, prompt: Sequence[int], config: DecodingConfig) -> Iterator[Step]:
        configs.append(config)
        return steps(engine, prompt, config)

    monkeypatch.setattr(Engine, "steps", spy)
    sampled = ["--rule", "sampled-verify", "--temperature", "0.7", "--seed", "3"]
    generate(target, "--drafter", "lookup", *sampled, "--stop", "1", "--stop", "2")
    own = DecodingConfig(40, SamplingConfig(0.7), RULES["sampled-verify"], (0,), ("1", "2"), seed=3)
    assert configs == [own]


def test_ctrl_c_ends_the_text_and_its_figures_are_still_printed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes inside a pass; nothing is decoded after that pass."""
    verify, passes = CausalLM.verify, list[int]()

    def interrupted(*given: Any, **named: Any) -> ModelOutput:
        passes.append(len(passes))
        if len(passes) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return verify(*given, **named)

    monkeypatch.setattr(CausalLM, "verify", interrupted)
    result = generate(target, "--drafter", "lookup")
    assert result.exit_code == ExitCode.STOPPED and len(passes) == 4
    assert LINE[:4] in result.stdout and LINE[:20] not in result.stdout
    assert "prompt lookup (lossless): " in result.stderr
