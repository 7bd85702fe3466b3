"""A chat turn by turn: exact answers, nothing run twice, and a state that interrupts and refusals leave whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tiny_dspark import tiny_dspark
from tiny_models import positions_run, tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding import Conversation, DecodingConfig, Engine
from decoding.drafters import Drafter, DraftModelDrafter, DraftTreeDrafter, DSparkDrafter, PromptLookupDrafter
from decoding.model.causal_lm import CausalLM
from decoding.text import Generation, Step, stream_pieces

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
    """The answer as it is streamed."""
    return "".join(piece.text for piece in stream_pieces(chat.ask(question), TOKENIZER, chat.config.eos_token_ids))


def fresh_answer(chat: Conversation, question: str) -> str:
    """The answer of a plain engine that knows nothing but the messages."""
    prompt = TOKENIZER.apply_chat_template(
        [*chat.messages, {"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return TOKENIZER.decode(Engine(chat.engine.target).decode(prompt, chat.config).tokens)


@contextmanager
def interrupted_forward(target: CausalLM, fails_at: int) -> Iterator[None]:
    """Ctrl-C in the n-th forward, when its first layer has written into the cache and its second has not."""
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
        held = len(prompt) + len(tokens) - 1  # the last one was written, but never run
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
