"""What is no token id is refused in one sentence that says how to get some."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import naive_greedy

from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.speculation import speculate

CONFIG = DecodingConfig(max_new_tokens=4)
WAYS: dict[str, Callable[[CausalLM, Any], Any]] = {
    "one prompt": lambda target, prompt: Engine(target).decode(prompt, CONFIG),
    "a batch": lambda target, prompt: Engine(target).decode([prompt], CONFIG, batch_size=1),
    "speculate": lambda target, prompt: speculate(target, None, [prompt], max_new_tokens=4, pad_token_id=0),
}
WRONG = {
    "a text": ("ab c", r"a prompt is 'ab c', not a list of token ids: give tokenizer\(text\)\['input_ids'\]"),
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
