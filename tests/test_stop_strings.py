"""Stop strings end a text at the same token as in transformers' `generate`, for each kind of tokenizer."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis_profiles import few
from test_chat import tokenizers_by_kind
from tiny_models import naive_greedy, tiny_model
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.speculation import speculate
from decoding.text import StopCheck, decode_text, stream_pieces

STRINGS = ["a", " a", "b c", "é", " é", "hell", "\nb", "ll ", "  ", "cab", "éc", "<|end|>", "> a", "a<|", "\n"]


def end_of(tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], new: Sequence[int], strings: list[str]) -> int:
    """Return the number of new tokens that transformers writes."""
    criteria = StopStringCriteria(tokenizer, strings)
    whole = torch.tensor([[*prompt, *new]])
    ends = (count for count in range(1, len(new) + 1) if criteria(whole[:, : len(prompt) + count], None))
    return next(ends, len(new))


@pytest.mark.parametrize("kind", few(tokenizers_by_kind(), [*tokenizers_by_kind()][:2]))
def test_a_text_ends_where_the_criteria_of_transformers_end_it(kind: str) -> None:
    """The strings begin in the prompt, inside a token, or with a space, and end inside a block of any size."""
    tokenizer, rng, early, across = tokenizers_by_kind()[kind], random.Random(0), 0, 0
    tokens = tokenizer("a b c a b a  \u00e9 \u00e9c \u65e5\n hell\nb a cab<|end|> a b")[
        "input_ids"
    ]  # common ones are drawn often
    for _ in range(200):
        strings = rng.sample(STRINGS, 3)
        prompt, new = rng.choices(tokens, k=rng.randint(1, 4)), rng.choices(tokens, k=6)
        wanted, stop, text = end_of(tokenizer, prompt, new, strings), StopCheck((), tuple(strings), tokenizer), prompt
        ended = False
        while not ended and len(text) < len(prompt) + len(new):
            at = len(text) - len(prompt)
            kept, ended = stop.cut(text, tuple(new[at : at + rng.randint(1, 5)]))
            text = [*text, *kept]
        assert text == [*prompt, *new[:wanted]], (strings, tokenizer.convert_ids_to_tokens([*prompt, *new]), wanted)
        early += wanted < len(new)
        across += ended and not any(string in tokenizer.decode(text[len(prompt) :]) for string in strings)
    assert early > 30 and across > 2, "strings are found, also where the new text alone does not have them"


def test_a_streamed_text_ends_at_a_stop_string_that_begins_in_the_prompt() -> None:
    tokenizer = tokenizers_by_kind()["sentencepiece"]
    engine = Engine(CausalLM(tiny_model("llama", vocab=len(tokenizer))), None, tokenizer=tokenizer)
    prompt = tokenizer("a b")["input_ids"]
    free = engine.decode(prompt, DecodingConfig(6)).tokens
    stop = str(tokenizer.decode([*prompt, *free[:2]])).removeprefix("<s>")
    steps = engine.steps(prompt, DecodingConfig(6, stop_strings=(stop,)))
    assert "".join(piece.text for piece in stream_pieces(steps, tokenizer)) == decode_text(free[:2], tokenizer)


CONFIG = DecodingConfig(max_new_tokens=4)
WAYS: dict[str, Callable[[CausalLM, Any], Any]] = {
    "one prompt": lambda target, prompt: Engine(target).decode(prompt, CONFIG),
    "a batch": lambda target, prompt: Engine(target).decode([prompt], CONFIG, batch_size=1),
    "speculate": lambda target, prompt: speculate(target, None, [prompt], max_new_tokens=4, pad_token_id=0),
}
WRONG = {
    "a text": ("ab c", r"a prompt is 'ab c', not a list of token ids: use tokenizer\(text\)\['input_ids'\]"),
    "a number": (3, "a prompt is 3, not a list of token ids"),
    "floats": ([1, 2.0], "a prompt contains 2.0, a float, but token ids are integers"),
    "beyond the vocabulary": ([1, 16], r"token 16 is outside the target's vocabulary \(0 to 15\): use the target's"),
    "negative": ([-1], r"token -1 is outside the target's vocabulary \(0 to 15\)"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_token_id_is_refused_with_the_way_to_get_some(tiny_llama: CausalLM, way: str, case: str) -> None:
    prompt, complaint = WRONG[case]
    with pytest.raises(ValueError, match=complaint) as error:
        WAYS[way](tiny_llama, prompt)
    assert "\n" not in str(error.value)


def test_numpys_integers_and_lists_of_tensors_are_ids(tiny_llama: CausalLM) -> None:
    prompt = torch.tensor([3, 1, 4])
    expected = naive_greedy(tiny_llama.model, (3, 1, 4), 4)
    assert Engine(tiny_llama).decode(list(prompt.numpy()), CONFIG).tokens == tuple(expected)
    (generation,) = speculate(tiny_llama, None, [prompt], max_new_tokens=4, eos_token_ids=()).generations
    assert generation.tokens == tuple(expected)
