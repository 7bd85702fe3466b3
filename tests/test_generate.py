"""The loop: greedy output equals plain greedy decoding whatever is drafted, texts end correctly,
and counts are right.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from drafter_checks import DRAFTERS, TREE, nudged_heads
from hypothesis import strategies as st
from hypothesis_profiles import few
from scripted_drafters import HostileDrafter, ScriptedDrafter
from tiny_models import full_forward, naive_greedy, tiny_model
from torch import Tensor

from decoding.drafters import Drafter, DraftModelDrafter, HybridDrafter, MedusaDrafter, PromptLookupDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.rules.drawing import RandomSource
from decoding.rules.sampling import HistoryRows, SamplingConfig, probabilities
from decoding.rules.tree import Proposal, ProposalKind
from decoding.rules.verify import (
    BLOCK_VERIFICATION,
    GREEDY,
    RECURSIVE_REJECTION,
    TOKEN_REJECTION,
    TOP_K_CHILDREN,
    Decide,
    Rule,
    Verdict,
    typical_acceptance,
)
from decoding.text import Step

TOKENS = st.integers(0, 15)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=5)


@cache
def plain_greedy(prompt: tuple[int, ...], count: int = 14, penalty: float = 1.0) -> tuple[int, ...]:
    return naive_greedy(tiny_model("llama"), prompt, count, penalty)


class Letters:
    """A byte-level decoder in which some tokens are several letters, and some are one byte of a letter."""

    TOKENS = b"a|b|c|d|ab|cd| |\n|\xc3|\xa9|\xe2|\x82|\xac|e|.|xyz".split(b"|")

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.TOKENS[token] for token in token_ids).decode("utf-8", errors="replace")


def shortest_with(prompt: Sequence[int], tokens: Sequence[int], strings: Sequence[str]) -> tuple[int, ...]:
    """Return the tokens up to the first one in which a stop string ends,
    wherever it begins in the prompt or the text.
    """
    written = b"".join(Letters.TOKENS[token] for token in prompt)
    for index, token in enumerate(tokens):
        known, written = len(written), written + Letters.TOKENS[token]
        if any(
            written.rfind(string.encode()) > known - len(string.encode())
            for string in strings
            if string.encode() in written
        ):
            return tuple(tokens[: index + 1])
    return tuple(tokens)


# --- greedy equality ------------------------------------------------------------------------------------------------


def test_the_hostile_drafter_has_tokens_accepted_and_refused(tiny_llama: CausalLM) -> None:
    wanted = plain_greedy((1, 2, 3))
    steps = [
        step
        for seed in range(12)
        for step in Engine(tiny_llama, HostileDrafter(seed, [1, 2, 3, *wanted]))
        .decode([1, 2, 3], DecodingConfig(14))
        .steps
    ]
    accepted, drafted = sum(step.accepted for step in steps), sum(step.drafted for step in steps)
    assert 0.1 < accepted / drafted < 0.9
    assert any(step.accepted >= 3 for step in steps)


# --- what a step counts ---------------------------------------------------------------------------------------------


def counts(steps: Sequence[Step]) -> list[tuple[tuple[int, ...], int, int, int]]:
    return [(step.tokens, step.accepted, step.offered, step.drafted) for step in steps]


def test_a_step_counts_what_was_accepted_offered_and_drafted(counting: CausalLM) -> None:
    drafter = ScriptedDrafter(
        ((0, 1, 2), (2, 3, 9)),  # after 1: a chain whose third token is wrong
        ((0, 0, 2, 2), (9, 5, 9, 6)),  # after 4: 5 is the second child, and 6 is the second child of 5
        ((), ()),  # after 7: nothing
        ((0, 0), (3, 3)),  # after 8: duplicates, both of which are wrong
    )
    generation = Engine(counting, drafter).decode([0], DecodingConfig(10))
    assert generation.tokens == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert counts(generation.steps) == [
        ((1,), 0, 0, 0),
        ((2, 3, 4), 2, 3, 3),
        ((5, 6, 7), 2, 2, 4),
        ((8,), 0, 0, 0),
        ((9,), 0, 1, 2),
        ((10,), 0, 0, 0),
    ]
    assert [step.is_prefill for step in generation.steps] == [True, False, False, False, False, False]


def test_a_step_keeps_its_tree_and_its_accepted_nodes_where_they_are_asked_for(counting: CausalLM) -> None:
    drafts = ((0, 1, 2), (2, 3, 9)), ((0, 0, 2, 2), (9, 5, 9, 6)), ((), ()), ((0, 1), (9, 9))
    config = DecodingConfig(10, eos_token_ids=(6,), trees=True)
    steps = Engine(counting, ScriptedDrafter(*drafts)).decode([0], config).steps
    assert [step.tree and (step.tree.token_list, step.tree.shape.parents, step.path) for step in steps] == [
        None,  # the prefill
        ([1, 2, 3, 9], (-1, 0, 1, 2), (1, 2)),
        ([4, 9, 5, 9, 6], (-1, 0, 0, 2, 2), (2, 4)),  # the text ends inside the draft
    ]
    assert all(
        step.tree is None for step in Engine(counting, ScriptedDrafter(*drafts)).decode([0], DecodingConfig(10)).steps
    )
    config = replace(config, eos_token_ids=(5,))
    last = Engine(counting, ScriptedDrafter(*drafts)).decode([0], config).steps[-1]
    assert (last.tokens, last.accepted, last.offered, last.path) == ((5,), 1, 1, (2,)), "6 was right, but too late"


def test_the_drafter_is_given_the_text_and_the_room_that_is_left(counting: CausalLM) -> None:
    drafter = ScriptedDrafter(((0, 1), (2, 3)), ((0,), (9,)))
    Engine(counting, drafter).decode([15, 0], DecodingConfig(6))
    # Six new tokens: 1 from the prefill; 2 3 4; 5; and 6 without a draft, because the target writes the last token.
    assert drafter.asked == [([15, 0, 1], 4), ([15, 0, 1, 2, 3, 4], 1)]


# --- a drafter that is the target, chains and trees, streams -------------------------------------------------------


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.0, top_p=0.9), SamplingConfig(0.8, top_k=5)])
def test_a_draft_that_is_the_target_is_always_accepted(tiny_llama: CausalLM, sampling: SamplingConfig) -> None:
    drafter = DraftModelDrafter(tiny_llama, 3)
    for seed in range(2):
        generation = Engine(tiny_llama, drafter).decode([1, 2, 3], DecodingConfig(16, sampling, seed=seed))
        assert sum(step.offered for step in generation.steps) > 8
        assert [step.accepted for step in generation.steps] == [step.offered for step in generation.steps]


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, TOKEN_REJECTION), (0.0, typical_acceptance()), (1.0, GREEDY)])
def test_a_rule_that_does_not_fit_the_temperature_is_refused(temperature: float, rule: Rule) -> None:
    with pytest.raises(
        ValueError, match=f"the {rule.name} rule needs .*temperature.*, but the temperature is {temperature:g}"
    ):
        DecodingConfig(9, SamplingConfig(temperature), rule)


@pytest.mark.parametrize("rule", [TOKEN_REJECTION, RECURSIVE_REJECTION, typical_acceptance()])
def test_a_rule_named_in_the_config_is_used_and_steps_without_a_draft_go_on(
    tiny_llama: CausalLM, tiny_draft: CausalLM, rule: Rule
) -> None:
    config = DecodingConfig(9, SamplingConfig(1.0), rule)
    assert len(Engine(tiny_llama, DraftModelDrafter(tiny_draft, 2)).decode([1, 2], config).tokens) == 9
    assert len(Engine(tiny_llama).decode([1, 2], config).tokens) == 9


@pytest.mark.parametrize(
    ("drafter", "rule", "complaint"),
    [
        (PromptLookupDrafter(), TOKEN_REJECTION, "takes sampled proposals, not deterministic proposals"),
        ("heads", TOKEN_REJECTION, "takes sampled proposals, not sampled without replacement proposals"),
        (PromptLookupDrafter(branches=2), BLOCK_VERIFICATION, "takes chains only: use traversal"),
        ("hybrid", TOKEN_REJECTION, "takes sampled proposals, not deterministic or grafted proposals"),
        ("chain", TOP_K_CHILDREN, "takes deterministic proposals, not sampled proposals"),
    ],
)
def test_a_rule_that_does_not_fit_the_drafter_is_refused_before_a_text_begins(
    tiny_llama: CausalLM, tiny_draft: CausalLM, drafter: Any, rule: Rule, complaint: str
) -> None:
    lookup = PromptLookupDrafter()
    if drafter == "heads":
        drafter = MedusaDrafter(nudged_heads(tiny_llama), TREE)
    elif drafter == "hybrid":
        drafter = HybridDrafter(DraftModelDrafter(tiny_draft), lookup)
    elif drafter == "chain":
        drafter = DraftModelDrafter(tiny_draft)
    config = DecodingConfig(9, SamplingConfig(1.0), rule)
    with pytest.raises(ValueError, match=f"the {rule.name} rule {complaint}"):
        Engine(tiny_llama, drafter).steps([[1, 2]], config, batch_size=1)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_models_that_are_being_trained_decode_without_dropout_and_stay_in_training_mode() -> None:
    models = [tiny_model(seed=seed, attention_dropout=0.5) for seed in (0, 1)]
    prompt = [1, 2, 3, 1, 2]
    plain = naive_greedy(models[0], prompt, 12)
    for model in models:
        model.train()
        model.model.layers[0].eval()  # a step in which the machine stood still
    modes = [[module.training for module in model.modules()] for model in models]
    target, draft = map(CausalLM, models)
    steps = Engine(target, DraftModelDrafter(draft, 2)).steps(prompt, DecodingConfig(12))
    tokens: list[int] = []
    for step in steps:
        tokens += step.tokens
        assert [[module.training for module in model.modules()] for model in models] == modes
    assert tuple(tokens) == plain
    assert all(parameter.requires_grad for model in models for parameter in model.parameters())


def test_a_text_longer_than_the_context_is_refused_with_both_lengths(tiny_llama: CausalLM) -> None:
    with pytest.raises(ValueError, match=r"prompt of 90 tokens and 7 new tokens exceed .* context of 96"):
        Engine(tiny_llama).decode([1] * 90, DecodingConfig(7))
    assert len(Engine(tiny_llama, PromptLookupDrafter()).decode([1] * 90, DecodingConfig(6)).tokens) == 6


# --- with sampling, models, caches, drafters and rules together give the target's distribution ------------------------


VOCAB = 4
LENGTH = 4
TEXTS = 400
FALSE_ALARM = 1e-6
PROMPT = [1, 2, 1, 2]
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
# These seeds are chosen so that a missing residual shows: the draft agrees with the target in 0.6 of cases, and
# otherwise differs a lot.
TARGET_SEED, DRAFT_SEED = 5, 3


@cache
def small_llama(seed: int, layers: int = 1) -> CausalLM:
    sizes = {**SMALL, "num_hidden_layers": layers}
    return CausalLM(tiny_model("llama", vocab=VOCAB, seed=seed, initializer_range=0.7, **sizes))


def drafter_called(name: str) -> Drafter:
    return DRAFTERS[name](small_llama(TARGET_SEED), small_llama(DRAFT_SEED))


@cache
def exact_probabilities(target: CausalLM, sampling: SamplingConfig) -> dict[tuple[int, ...], float]:
    """Return the probability of every text of LENGTH tokens after the prompt."""
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, probability in level.items():
            if probability == 0:
                continue
            whole = [*PROMPT, *text]
            seen = torch.zeros(1, VOCAB, dtype=torch.bool)
            seen[0, whole] = True
            row = probabilities(full_forward(target.model, whole)[-1:].double(), sampling, HistoryRows(seen=seen))[0]
            longer.update({(*text, token): probability * chance for token, chance in enumerate(row.tolist())})
        level = longer
    return level


def p_value(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of Pearson's chi-square test; texts that are expected fewer than five times are counted
    together.
    """
    total = counts.total()
    cells: list[tuple[float, float]] = []
    rare_expected, rare_seen = 0.0, 0
    for text, probability in exact.items():
        if probability * total >= 5:
            cells.append((probability * total, counts[text]))
        else:
            rare_expected += probability * total
            rare_seen += counts[text]
    if rare_expected < 1e-9:
        assert rare_seen == 0, "a text of probability 0 was written"
    else:
        cells.append((rare_expected, rare_seen))
    assert len(cells) > 10, "too few cells to see anything"
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    freedom = len(cells) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


def decode_many(
    target: CausalLM, drafter: Drafter, sampling: SamplingConfig, rule: Rule | None = None, texts: int = TEXTS
) -> tuple[float, int]:
    """Return the p-value of the decoded texts, and the number of accepted drafted tokens.

    Forty texts are decoded at a time, which is faster; the tests of batches show that each text depends only on its
    seed.
    """
    config = DecodingConfig(LENGTH, sampling, rule)
    generations = Engine(target, drafter).decode([PROMPT] * texts, config, batch_size=40)
    counts = Counter(generation.tokens for generation in generations)
    accepted = sum(step.accepted for generation in generations for step in generation.steps)
    return p_value(counts, exact_probabilities(target, sampling)), accepted


@pytest.mark.parametrize("name", few(["chain", "Markov heads"], ["chain"]))
def test_the_loop_writes_the_targets_distribution(name: str) -> None:
    """One drafter represents all in `make check`, which also enumerates every rule exactly."""
    chance, accepted = decode_many(small_llama(TARGET_SEED), drafter_called(name), SamplingConfig(1.0))
    assert chance > FALSE_ALARM
    assert accepted > TEXTS / 10, "a draft that is never accepted proves little"


def from_p_after_a_refusal(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    assert proposal.q is not None
    for node, token in enumerate(proposal.tree.token_list[1:], start=1):
        if not source.accept(float(p[node - 1, token] / proposal.q[node - 1, token])):
            return Verdict(tuple(range(1, node)), source.draw(p[node - 1]))
    return Verdict(tuple(range(1, len(proposal.tree))), source.draw(p[len(proposal.tree) - 1]))


def every_draft_kept(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    last = len(proposal.tree) - 1
    return Verdict(tuple(range(1, last + 1)), source.draw(p[last]))


BROKEN: list[tuple[Decide, int]] = [(every_draft_kept, 400), (from_p_after_a_refusal, 600)]


@pytest.mark.parametrize(("broken", "texts"), few(BROKEN, BROKEN[:1]))
def test_the_chi_square_catches_a_broken_rule(broken: Decide, texts: int) -> None:
    rule = Rule("broken", False, frozenset({ProposalKind.SAMPLED}), broken)
    chance, _ = decode_many(small_llama(TARGET_SEED), drafter_called("chain"), SamplingConfig(1.0), rule, texts)
    assert chance < FALSE_ALARM / 100, "caught, and not only just"
