"""A chat turn by turn: answers are exact, nothing runs twice, and interrupts and errors do not damage the state."""

import builtins
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_cli import models as models
from tiny_dspark import tiny_dspark
from tiny_models import positions_run, tiny_model
from tiny_tokenizer import byte_tokenizer
from typer.testing import CliRunner, Result
from writing_models import LINE, write_alphabet

from decoding import Conversation, DecodingConfig, Engine
from decoding.drafters import Drafter, DraftModelDrafter, DraftTreeDrafter, DSparkDrafter, PromptLookupDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import ModelOutput
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import RULES
from decoding.text import Generation, Step, stream_pieces
from trainer.cli import app
from trainer.commands.chat import Chat, Decoder
from trainer.terminal.console import standard_error, standard_output
from trainer.terminal.exit_codes import ExitCode

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refused' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ message.role[0] }}>{{ message.content }}|"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TOKENIZER = byte_tokenizer(TEMPLATE)
CONFIG = DecodingConfig(12)
QUESTIONS = ("Why?", "And then?", "So it is.")


def model(seed: int = 0, context: int = 400) -> CausalLM:
    return CausalLM(tiny_model(vocab=128, seed=seed, max_position_embeddings=context))


DRAFTERS: dict[str, Callable[[CausalLM], Drafter | None]] = {
    "plain": lambda target: None,
    "chain": lambda target: DraftModelDrafter(model(1), 3),
    "tree": lambda target: DraftTreeDrafter(model(1), 2, 2, 7),
    "DSpark": lambda target: DSparkDrafter(tiny_dspark(target)),
    "lookup": lambda target: PromptLookupDrafter(3),
}


def conversation(drafter: Drafter | None = None, target: CausalLM | None = None, **changes: object) -> Conversation:
    given = {"tokenizer": TOKENIZER, "config": CONFIG, **changes}
    return Conversation(Engine(target or model(), drafter), **given)  # type: ignore[arg-type]  # of mixed types


def answer(chat: Conversation, question: str) -> str:
    """Return the answer in its streamed form."""
    return "".join(piece.text for piece in stream_pieces(chat.ask(question), TOKENIZER, chat.config.eos_token_ids))


def fresh_answer(chat: Conversation, question: str) -> str:
    """Return the answer of a new engine that receives only the messages."""
    prompt = TOKENIZER.apply_chat_template(
        [*chat.messages, {"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return TOKENIZER.decode(Engine(chat.engine.target).decode(prompt, chat.config).tokens)


@contextmanager
def interrupted_forward(target: CausalLM, fails_at: int) -> Iterator[None]:
    """Simulate Ctrl-C in the n-th forward pass, after the first layer has written into the cache and before the second
    layer runs.
    """
    left = fails_at

    def interrupt(*call: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    handle = target.model.model.layers[1].register_forward_pre_hook(interrupt)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_turn_is_what_a_fresh_engine_answers_and_runs_the_new_tokens_alone(name: str) -> None:
    target = model()
    chat = conversation(DRAFTERS[name](target), target, system="Be brief.")
    held = 0
    for question in QUESTIONS:
        prompt, wanted = chat.encode(question), fresh_answer(chat, question)
        with positions_run(target.model) as run:
            steps = list(chat.ask(question))
        assert run[0] == len(prompt) - held
        tokens = Generation.of(steps).tokens
        assert TOKENIZER.decode(tokens) == chat.messages[-1]["content"] == wanted
        held = len(prompt) + len(tokens) - 1  # the last token was written, but never run
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 3]
    assert [message["content"] for message in chat.messages[1::2]] == list(QUESTIONS)


@pytest.mark.parametrize("name", ["plain", "tree", "DSpark"])
def test_a_turn_that_is_left_keeps_its_steps_so_far_and_the_next_one_is_exact(name: str) -> None:
    target = model()
    chat = conversation(DRAFTERS[name](target), target)
    whole = fresh_answer(chat, "Why?")
    steps = chat.ask("Why?")
    first = [next(steps), next(steps)]
    wanted = TOKENIZER.decode(Generation.of(first).tokens)
    chat.undo()
    assert chat.messages == [], "leaving it and taking it back"
    steps = chat.ask("Why?")
    next(steps), next(steps)
    following = chat.ask("And then?")
    assert chat.messages[-1] == {"role": "assistant", "content": wanted} and whole.startswith(wanted)
    expected = fresh_answer(chat, "And then?")
    assert "".join(piece.text for piece in stream_pieces(following, TOKENIZER)) == expected
    with pytest.raises(StopIteration):
        next(steps)


@pytest.mark.parametrize("name", ["plain", "tree", "DSpark"])
@pytest.mark.parametrize("forwards", [0, 2])
def test_an_interrupt_inside_a_pass_keeps_what_was_written_before_it(name: str, forwards: int) -> None:
    target = model()
    chat = conversation(DRAFTERS[name](target), target)
    answer(chat, "Why?")
    seen: list[Step] = []
    with interrupted_forward(target, forwards), pytest.raises(KeyboardInterrupt):
        seen.extend(chat.ask("And then?"))
    assert len(seen) == forwards
    assert len(chat.messages) == (4 if seen else 2), "a question without a token of an answer is dropped"
    if seen:
        assert chat.messages[-1]["content"] == TOKENIZER.decode(Generation.of(seen).tokens)
    assert answer(chat, "So?") == chat.messages[-1]["content"]
    chat.undo()
    assert fresh_answer(chat, "So?") == answer(chat, "So?")


def test_undo_takes_turns_back_one_by_one_and_reset_all_of_them() -> None:
    chat = conversation(system="Be brief.")
    for question in QUESTIONS:
        answer(chat, question)
    assert [chat.undo() for _ in range(2)] == ["So it is.", "And then?"]
    assert answer(chat, "Or?") == chat.messages[-1]["content"]
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}] and chat.undo() is None
    assert answer(chat, "Why?") == answer(conversation(system="Be brief."), "Why?")


def test_a_question_too_long_is_refused_with_the_remedy_and_the_conversation_goes_on() -> None:
    target = model(context=64)
    chat = conversation(target=target)
    answer(chat, "Why?")
    before = list(chat.messages)
    with pytest.raises(ValueError, match=r"has 91 tokens, but at most 64 fit: shorten the question or undo turns"):
        chat.ask("x" * 60)
    assert chat.messages == before
    assert answer(chat, "So?") == chat.messages[-1]["content"] != ""


def test_an_answer_is_as_long_as_the_context_of_target_and_draft_has_room_for() -> None:
    for drafter in (None, DraftModelDrafter(model(1, context=40), 2)):
        chat = conversation(drafter, model(context=40 if drafter is None else 400), config=DecodingConfig(100))
        prompt = chat.encode("Why?")
        assert len(Generation.of(list(chat.ask("Why?"))).tokens) == chat.answer_limit == 40 - len(prompt)


def test_the_eos_token_is_no_part_of_the_answer_s_text() -> None:
    target = model()
    first = Engine(target).decode(conversation(target=target).encode("Why?"), CONFIG).tokens
    end = first[3]
    assert end not in first[:3]
    chat = conversation(target=target, config=DecodingConfig(12, eos_token_ids=(end,)))
    assert answer(chat, "Why?") == TOKENIZER.decode(first[:3]) == chat.messages[-1]["content"]


ANSWER = LINE[:20]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_alphabet(tmp_path_factory.mktemp("alphabet"))


def ask(target: Path, questions: str, *more: str) -> Result:
    words = ["chat", "--target", str(target), "--dtype", "fp32", "--max-new-tokens", "20", *more]
    return CliRunner().invoke(app, words, input=questions)


# --- beginning --------------------------------------------------------------------------------------------------------


def test_a_limit_of_new_tokens_as_long_as_the_context_refuses_no_question() -> None:
    """Each answer may be as long as there is room; the same applies to the greeting with which a chat is checked."""
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
        ("/foo bar\nOne?\n", [], "unknown command /foo: /help lists the commands; a question must not"),
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
    """Simulate that these lines are typed; exceptions stand for Ctrl-C and Ctrl-D."""
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
    """Send Ctrl-C to this process inside forward pass ``at`` (from 1) of the target;
    return a function that ends this.
    """
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
    """Make a chat of two questions, with Ctrl-C inside the second answer and a third question afterwards."""
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
    """The signal arrives inside a pass, and nothing is decoded after this pass."""
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
