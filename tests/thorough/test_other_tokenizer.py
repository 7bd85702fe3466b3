"""A draft with another tokenizer: what it writes is translated, aligned, and never changes the target's text."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_generate_sampling import FALSE_ALARM, LENGTH, PROMPT, exact_probabilities, p_value, small_llama
from tiny_models import counting_model, naive_greedy, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from decoding.drafters import OtherTokenizerDrafter
from decoding.drafters.base import DraftRequest, TextStart
from decoding.drafters.other_tokenizer import OtherTokenizerSession
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.drawing import GeneratorSource
from decoding.rules.proposal import ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import SAMPLED_VERIFY

LETTERS = "abcdefghijklmnop"
PAIRS = tuple(LETTERS[i : i + 2] for i in range(0, 16, 2))
"""ab cd ef ... op"""


def tokenizer(words: Sequence[str], special: Sequence[str] = (), frame: str = "") -> PreTrainedTokenizerFast:
    """Word i is token i; two letters are merged where their pair is a word. The first special token is the EOS."""
    vocabulary = {word: index for index, word in enumerate([*words, *special])}
    merges = [(word[0], word[1]) for word in words if len(word) == 2]
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    raw.decoder = decoders.Fuse()
    if frame:
        specials = [(token, vocabulary[token]) for token in special]
        raw.post_processor = processors.TemplateProcessing(frame, special_tokens=specials)
    named = {"eos_token": special[0], "extra_special_tokens": list(special[1:])} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **named)


def following(successors: Mapping[int, int], vocab: int) -> CausalLM:
    """Writes ``successors[x]`` behind token x."""
    model = counting_model(vocab)
    weight = torch.zeros(vocab, vocab)
    for token, successor in successors.items():
        weight[successor, token] = 1
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(weight)
    return CausalLM(model)


def alphabet_model(words: Sequence[str]) -> CausalLM:
    """Writes the alphabet, round and round, in these words: behind a word comes the longest that goes on."""
    successors = {}
    for index, word in enumerate(words):
        letter = LETTERS[(LETTERS.index(word[-1]) + 1) % 16]
        successors[index] = words.index(max((other for other in words if other[0] == letter), key=len))
    return following(successors, len(words))


SINGLE = list(LETTERS)
DOUBLE = [*LETTERS, *PAIRS]


def opened(drafter: OtherTokenizerDrafter, target: CausalLM) -> OtherTokenizerSession:
    return drafter.open_text(target, SamplingConfig(), TextStart(1, GeneratorSource.from_seed(0)), 60)


def propose(session: OtherTokenizerSession, text: Sequence[int], depth: int = 99, nodes: int = 99) -> list[int]:
    proposal = session.propose(DraftRequest(text, torch.empty(0), depth, nodes))
    assert proposal.tree.token_list[0] == text[-1] and proposal.tree.shape.is_chain
    assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.q is None
    return proposal.tree.token_list[1:]


# --- translation ---------------------------------------------------------------------------------------------------


def test_letters_are_drafted_from_pairs() -> None:
    drafter = OtherTokenizerDrafter(alphabet_model(DOUBLE), tokenizer(DOUBLE), tokenizer(SINGLE), 5)
    session = opened(drafter, alphabet_model(SINGLE))
    text = [SINGLE.index(letter) for letter in "abcd"]
    assert "".join(SINGLE[token] for token in propose(session, text)) == "efghi", "five of the ten letters written"
    assert propose(session, [*text, *text], depth=2) == [4, 5]
    assert propose(session, [*text, 7], nodes=2) == [8]
    assert propose(session, [*text, 7, 8], nodes=1) == []


def test_a_draft_without_a_limit_drafts_behind_a_short_text_too() -> None:
    draft = alphabet_model(DOUBLE)
    draft.max_text = None  # as of one with a window
    session = opened(OtherTokenizerDrafter(draft, tokenizer(DOUBLE), tokenizer(SINGLE), 5), alphabet_model(SINGLE))
    assert "".join(SINGLE[token] for token in propose(session, [0])) == "bcdef"


def test_pairs_are_drafted_from_letters_and_the_last_may_be_half_a_pair() -> None:
    drafter = OtherTokenizerDrafter(alphabet_model(SINGLE), tokenizer(SINGLE), tokenizer(DOUBLE), 5)
    session = opened(drafter, alphabet_model(DOUBLE))
    text = [DOUBLE.index("ab"), DOUBLE.index("cd")]
    assert [DOUBLE[token] for token in propose(session, text)] == ["ef", "gh", "i"]


def test_a_text_that_the_tokenizer_would_split_in_another_way_goes_on_where_it_ends() -> None:
    """Behind a single letter "a", which the target wrote, "b" is not merged into it but drafted alone."""
    drafter = OtherTokenizerDrafter(alphabet_model(SINGLE), tokenizer(SINGLE), tokenizer(DOUBLE), 5)
    session = opened(drafter, alphabet_model(DOUBLE))
    text = [DOUBLE.index("op"), DOUBLE.index("a")]
    assert [DOUBLE[token] for token in propose(session, text)] == ["b", "cd", "ef"]
    text = [DOUBLE.index("a"), DOUBLE.index("b"), DOUBLE.index("cd")]
    assert [DOUBLE[token] for token in propose(session, text)] == ["ef", "gh", "i"], "a b is not split as before"


@pytest.mark.parametrize(("target_words", "draft_words"), [(SINGLE, DOUBLE), (DOUBLE, SINGLE), (SINGLE, SINGLE)])
def test_a_draft_that_is_right_is_accepted_through_the_loop(target_words: list[str], draft_words: list[str]) -> None:
    target = alphabet_model(target_words)
    drafter = OtherTokenizerDrafter(alphabet_model(draft_words), tokenizer(draft_words), tokenizer(target_words), 4)
    generation = Engine(target, drafter).decode([0], DecodingConfig(20))
    assert generation.tokens == Engine(target).decode([0], DecodingConfig(20)).tokens
    spoilt = 1 if target_words is DOUBLE else 0  # the last of the draft may be half a pair
    assert sum(step.accepted for step in generation.steps) >= 10
    assert all(step.accepted >= step.offered - spoilt for step in generation.steps)


def test_what_the_draft_writes_behind_its_end_of_text_is_not_drafted() -> None:
    draft = following({index: index + 1 for index in range(16)}, vocab=20)  # behind p comes <end>, then nothing known
    drafter = OtherTokenizerDrafter(draft, tokenizer(SINGLE, ["<end>"]), tokenizer(SINGLE), 6)
    session = opened(drafter, alphabet_model(SINGLE))
    assert propose(session, [12, 13]) == [14, 15]
    assert propose(session, [14, 15]) == []


def test_of_what_the_drafts_tokenizer_puts_around_a_text_the_draft_reads_what_stands_before_it() -> None:
    framing = tokenizer(SINGLE, ["<end>", "<begin>"], frame="<begin> $A <end>")
    assert framing("abc")["input_ids"] == [17, 0, 1, 2, 16]
    draft = following({index: (index + 1) % 16 for index in range(16)}, vocab=20)
    drafter = OtherTokenizerDrafter(draft, framing, tokenizer(SINGLE), 3)
    session = opened(drafter, alphabet_model(SINGLE))
    assert propose(session, [0, 1, 2]) == [3, 4, 5]
    assert session._held == [17, 0, 1, 2, 3, 4]


def test_special_tokens_are_read_where_the_draft_knows_them_too_and_left_out_where_not() -> None:
    mine, both = tokenizer(SINGLE, ["<end>", "<turn>"]), tokenizer([*SINGLE, "-"], ["<end>"])
    drafter = OtherTokenizerDrafter(following({17: 3, 3: 4, 2: 9}, vocab=20), both, mine, 1)
    session = opened(drafter, alphabet_model(SINGLE))
    assert propose(session, [0, 16]) == [3] and session._held == [0, 17]
    assert propose(session, [0, 1, 2, 17]) == [9] and session._held == [0, 1, 2]


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False)


def test_a_text_that_ends_within_a_letter_is_not_drafted_for() -> None:
    bytes_of = byte_level()
    (letter,) = bytes_of("x")["input_ids"]
    draft = following(dict.fromkeys(range(256), letter), vocab=256)
    session = opened(OtherTokenizerDrafter(draft, byte_level(), bytes_of, 3), CausalLM(tiny_model(vocab=256)))
    text: list[int] = bytes_of("né")["input_ids"]
    assert len(text) == 3
    assert [propose(session, text[:end]) for end in (1, 2, 3)] == [[letter] * 3, [], [letter] * 3]


def test_half_a_letter_at_the_end_of_a_draft_is_left_out() -> None:
    bytes_of = byte_level()
    text, letter = bytes_of("x")["input_ids"], bytes_of("é")["input_ids"]
    draft = following({text[0]: letter[0], letter[0]: letter[1], letter[1]: letter[0]}, vocab=256)
    target = CausalLM(tiny_model(vocab=256))
    for count, wanted in ((1, []), (2, letter), (3, letter), (4, letter * 2)):
        drafter = OtherTokenizerDrafter(draft, byte_level(), bytes_of, count)
        assert propose(opened(drafter, target), text) == wanted


def test_a_text_longer_than_the_drafts_context_is_decoded_without_it() -> None:
    target = alphabet_model(SINGLE)
    draft = alphabet_model(SINGLE)
    draft.max_text = 12
    drafter = OtherTokenizerDrafter(draft, tokenizer(SINGLE), tokenizer(SINGLE), 4)
    assert propose(opened(drafter, target), list(range(8))) == [8, 9, 10, 11]
    assert propose(opened(drafter, target), list(range(9))) == []
    assert len(Engine(target, drafter).decode([0], DecodingConfig(30)).tokens) == 30


# --- keeping up ----------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1))
def test_a_session_after_any_acceptances_is_a_fresh_session(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target, draft = CausalLM(tiny_model(vocab=16)), CausalLM(tiny_model(vocab=24, seed=1))
    drafter = OtherTokenizerDrafter(draft, tokenizer(DOUBLE), tokenizer(SINGLE), 4)
    session, text = opened(drafter, target), [3]
    for _ in range(5):
        drafted = propose(session, text)
        assert drafted == propose(opened(drafter, target), text) and len(drafted) == 4
        kept = int(torch.randint(5, (), generator=generator))
        text += [*drafted[:kept], int(torch.randint(16, (), generator=generator))]


def test_what_the_draft_has_read_is_not_read_again() -> None:
    draft = alphabet_model(SINGLE)
    session = opened(OtherTokenizerDrafter(draft, tokenizer(SINGLE), tokenizer(SINGLE), 3), alphabet_model(SINGLE))
    sizes: list[int] = []
    draft.model.register_forward_pre_hook(
        lambda module, args, named: sizes.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    propose(session, [0, 1, 2, 3])
    propose(session, [0, 1, 2, 3, 4, 5, 9])
    assert sizes == [4, 1, 1, 1, 1, 1], "4 and 5 had been run as a draft; 9 had not"


# --- through the loop ----------------------------------------------------------------------------------------------


def target_as_draft(target: CausalLM) -> OtherTokenizerDrafter:
    return OtherTokenizerDrafter(target, tokenizer(SINGLE), tokenizer(SINGLE), 3)


def test_a_draft_that_is_the_target_is_accepted_whole(tiny_llama: CausalLM) -> None:
    steps = Engine(tiny_llama, target_as_draft(tiny_llama)).decode([1, 2, 3], DecodingConfig(20)).steps
    assert sum(step.accepted for step in steps) > 10
    assert all(step.accepted == step.offered for step in steps)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_is_not_the_drafts_is_refused(tiny_draft: CausalLM) -> None:
    with pytest.raises(ValueError, match="writes tokens up to 23 but the draft knows 0 to 15: give the tokenizer that"):
        OtherTokenizerDrafter(tiny_draft, tokenizer(DOUBLE), tokenizer(SINGLE))


def test_a_draft_of_nothing_is_refused(tiny_draft: CausalLM) -> None:
    with pytest.raises(ValueError, match="num_draft_tokens is 0: give at least 1"):
        OtherTokenizerDrafter(tiny_draft, tokenizer(SINGLE), tokenizer(SINGLE), 0)


def test_a_draft_with_static_shapes_serves_several_texts_without_them() -> None:
    target, draft = alphabet_model(SINGLE), CausalLM(counting_model(), static="eager")
    drafter = OtherTokenizerDrafter(draft, tokenizer(SINGLE), tokenizer(SINGLE), 3)
    assert Engine(target, drafter).decode([1, 2], DecodingConfig(6)).tokens == tuple(range(3, 9))
    texts = Engine(target, drafter).decode([[1, 2], [5]], DecodingConfig(6), batch_size=2)
    assert [text.tokens for text in texts] == [tuple(range(3, 9)), tuple(range(6, 12))]


PROMPTS = ([1, 2, 3], [5], [7, 7, 0, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1])


def random_drafter(count: int = 3) -> OtherTokenizerDrafter:
    return OtherTokenizerDrafter(CausalLM(tiny_model(vocab=24, seed=1)), tokenizer(DOUBLE), tokenizer(SINGLE), count)


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy_output_is_plain_greedy_alone_and_in_batches(tiny_llama: CausalLM, penalty: float) -> None:
    config = DecodingConfig(12, SamplingConfig(repetition_penalty=penalty))
    plain = [naive_greedy(tiny_llama.model, prompt, 12, penalty) for prompt in PROMPTS]
    for drafter in (random_drafter(), target_as_draft(tiny_llama)):
        assert [Engine(tiny_llama, drafter).decode(prompt, config).tokens for prompt in PROMPTS] == plain
        batch = Engine(tiny_llama, drafter).decode(PROMPTS, config, batch_size=3)
        assert [generation.tokens for generation in batch] == plain


def test_sampled_verify_writes_what_plain_decoding_writes_with_the_same_seed(tiny_llama: CausalLM) -> None:
    config = DecodingConfig(12, SamplingConfig(1.0), SAMPLED_VERIFY, seed=3)
    plain = [generation.tokens for generation in Engine(tiny_llama).decode(PROMPTS, config, batch_size=1)]
    for drafter in (random_drafter(), target_as_draft(tiny_llama)):
        for batch_size in (1, 3):
            batch = Engine(tiny_llama, drafter).decode(PROMPTS, config, batch_size=batch_size)
            assert [generation.tokens for generation in batch] == plain


def test_sampled_texts_have_the_targets_distribution() -> None:
    """Chi-square of 400 texts with fixed seeds; were they not, it would fail by chance once in 10**6."""
    target, sampling = small_llama(5), SamplingConfig(1.0)
    draft = CausalLM(tiny_model(vocab=6, seed=3))
    drafter = OtherTokenizerDrafter(draft, tokenizer([*"abcd", "ab", "cd"]), tokenizer([*"abcd"]), 2)
    generations = Engine(target, drafter).decode([PROMPT] * 400, DecodingConfig(LENGTH, sampling), batch_size=40)
    counts = Counter(generation.tokens for generation in generations)
    assert p_value(counts, exact_probabilities(target, sampling)) > FALSE_ALARM
    assert sum(step.accepted for generation in generations for step in generation.steps) > 40
