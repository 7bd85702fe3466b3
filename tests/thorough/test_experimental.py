"""The experimental drafters: what each drafts. Their greedy texts and distributions are tested with all drafters'."""

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from drafter_checks import accept_some, assert_same, check_greedy, check_text_of_the_seed, opened, request
from test_generate_sampling import FALSE_ALARM, decode_many, small_llama
from tiny_models import counting_model, naive_greedy, tiny_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from decoding.drafters import (
    CascadeDrafter,
    DraftModelDrafter,
    LookaheadDrafter,
    OtherTokenizerDrafter,
    PromptLookupDrafter,
)
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig

CONTROLS = [SamplingConfig(), SamplingConfig(1.0, top_p=0.9), SamplingConfig(0.9, repetition_penalty=1.4)]


# --- cascade ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", CONTROLS)
@pytest.mark.parametrize("vocab", [12, 16])
def test_a_cascade_drafts_its_draft_models_own_chain_and_q(
    tiny_llama: CausalLM, vocab: int, sampling: SamplingConfig
) -> None:
    draft = CausalLM(tiny_model("llama", vocab=vocab, seed=1))
    for seed in range(6):
        chance = random.Random(seed)
        text = [chance.randrange(4) for _ in range(chance.randint(1, 8))]
        lookup = PromptLookupDrafter(3, branches=1 + seed % 3)
        cascade = opened(CascadeDrafter(draft, lookup, 5), tiny_llama, sampling, len(text), seed)
        alone = opened(DraftModelDrafter(draft, 5), tiny_llama, sampling, len(text), seed)
        for _ in range(4):
            depth = chance.randint(1, 6)
            ((own,), (expected,)) = (session.propose([request(text, depth)]) for session in (cascade, alone))
            assert_same(own, expected)
            text += [*accept_some(own, chance), *(chance.randrange(16) for _ in range(chance.choice([0, 3])))]


# --- lookahead --------------------------------------------------------------------------------------------------------


def test_whole_ngrams_are_accepted_once_the_pool_knows_the_text(counting: CausalLM) -> None:
    generation = Engine(counting, LookaheadDrafter(6, 4, 5)).decode([0, 7, 0, 7], DecodingConfig(64))
    assert [step.accepted for step in generation.steps[-5:-1]] == [3, 3, 3, 3]


# --- another tokenizer ------------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnop"
SINGLE = list(LETTERS)
DOUBLE = [*LETTERS, *(LETTERS[i : i + 2] for i in range(0, 16, 2))]
"""The letters, then ab cd ef ... op."""


def tokenizer(words: Sequence[str], special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Word i is token i; two letters are merged if their pair is a word. The first special token is the EOS."""
    vocabulary = {word: index for index, word in enumerate([*words, *special])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[(word[0], word[1]) for word in words if len(word) == 2]))
    raw.decoder = decoders.Fuse()
    named = {"eos_token": special[0], "extra_special_tokens": list(special[1:])} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **named)


def following(successors: Mapping[int, int], vocab: int) -> CausalLM:
    """Write ``successors[x]`` after token x."""
    model = counting_model(vocab)
    weight = torch.zeros(vocab, vocab)
    for token, successor in successors.items():
        weight[successor, token] = 1
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(weight)
    return CausalLM(model)


def alphabet_model(words: Sequence[str]) -> CausalLM:
    """Write the alphabet, round and round, in these words, each the longest that fits."""
    successors = {}
    for index, word in enumerate(words):
        letter = LETTERS[(LETTERS.index(word[-1]) + 1) % 16]
        successors[index] = words.index(max((other for other in words if other[0] == letter), key=len))
    return following(successors, len(words))


def drafted(drafter: OtherTokenizerDrafter, target: CausalLM, text: Sequence[int], depth: int = 99) -> list[int]:
    (proposal,) = opened(drafter, target).propose([request(text, depth)])
    assert proposal.tree.shape.is_chain and proposal.q is None
    return proposal.tree.token_list[1:]


def test_a_draft_is_translated_and_aligned_with_the_text() -> None:
    from_pairs = OtherTokenizerDrafter(alphabet_model(DOUBLE), tokenizer(DOUBLE), tokenizer(SINGLE), 5)
    assert drafted(from_pairs, alphabet_model(SINGLE), [0, 1, 2, 3]) == [4, 5, 6, 7, 8], "five of ten letters"
    assert drafted(from_pairs, alphabet_model(SINGLE), [0, 1, 2, 3], depth=2) == [4, 5]
    from_letters = OtherTokenizerDrafter(alphabet_model(SINGLE), tokenizer(SINGLE), tokenizer(DOUBLE), 5)
    for text, wanted in (
        (["ab", "cd"], ["ef", "gh", "i"]),
        (["op", "a"], ["b", "cd", "ef"]),  # b is not merged into the target's own "a"
        (["a", "b", "cd"], ["ef", "gh", "i"]),  # a b is not split as before
    ):
        found = drafted(from_letters, alphabet_model(DOUBLE), [DOUBLE.index(word) for word in text])
        assert [DOUBLE[token] for token in found] == wanted


def test_the_loop_with_another_tokenizer_is_lossless(tiny_llama: CausalLM) -> None:
    draft = CausalLM(tiny_model(vocab=24, seed=1))
    drafter = OtherTokenizerDrafter(draft, tokenizer(DOUBLE), tokenizer(SINGLE), 3)
    check_greedy(tiny_llama, drafter)
    check_text_of_the_seed(tiny_llama, drafter)
    same = OtherTokenizerDrafter(tiny_llama, tokenizer(SINGLE), tokenizer(SINGLE), 3)
    generation = Engine(tiny_llama, same).decode([1, 2, 3], DecodingConfig(20))
    assert generation.tokens == naive_greedy(tiny_llama.model, [1, 2, 3], 20)
    assert all(step.accepted == step.offered for step in generation.steps), "a draft that is the target"
    small = CausalLM(tiny_model(vocab=6, seed=3))
    drafter = OtherTokenizerDrafter(small, tokenizer([*"abcd", "ab", "cd"]), tokenizer([*"abcd"]), 2)
    chance, accepted = decode_many(small_llama(5), drafter, SamplingConfig(1.0))
    assert chance > FALSE_ALARM and accepted > 40
