"""The whole loop with sampling: models, caches, drafters and rules together give the target's distribution.

Each test decodes TEXTS texts of LENGTH tokens with consecutive seeds and compares their counts with the exact
probability of every text, computed by plain forwards, in a chi-square test. The seeds are fixed; were they not, a
test would fail by chance once in 10**6.
"""

from collections import Counter
from functools import cache

import pytest
import torch
from drafter_checks import DRAFTERS
from tiny_models import full_forward, tiny_model
from torch import Tensor

from decoding.drafters import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.drawing import RandomSource
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import HistoryRows, SamplingConfig, probabilities
from decoding.rules.verify import Decide, Rule, Verdict

VOCAB = 4
LENGTH = 4
TEXTS = 400
FALSE_ALARM = 1e-6
PROMPT = [1, 2, 1, 2]
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
# Chosen so that a missing residual shows: the draft agrees with the target in 0.6 of cases, and differs much elsewhere.
TARGET_SEED, DRAFT_SEED = 5, 3


@cache
def small_llama(seed: int, layers: int = 1) -> CausalLM:
    sizes = {**SMALL, "num_hidden_layers": layers}
    return CausalLM(tiny_model("llama", vocab=VOCAB, seed=seed, initializer_range=0.7, **sizes))


def drafter_called(name: str) -> Drafter:
    return DRAFTERS[name](small_llama(TARGET_SEED), small_llama(DRAFT_SEED))


@cache
def exact_probabilities(target: CausalLM, sampling: SamplingConfig) -> dict[tuple[int, ...], float]:
    """The probability of every text of LENGTH tokens behind the prompt."""
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
    """Of Pearson's chi-square; texts expected fewer than five times are counted together."""
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
    """The p-value of the texts decoded, and how many drafted tokens were accepted.

    Forty at a time, which is faster; the tests of batches show that each is the text of its own seed.
    """
    config = DecodingConfig(LENGTH, sampling, rule)
    generations = Engine(target, drafter).decode([PROMPT] * texts, config, batch_size=40)
    counts = Counter(generation.tokens for generation in generations)
    accepted = sum(step.accepted for generation in generations for step in generation.steps)
    return p_value(counts, exact_probabilities(target, sampling)), accepted


@pytest.mark.parametrize("name", ["chain", "Markov heads"])
def test_the_loop_writes_the_targets_distribution(name: str) -> None:
    """Two that stand for all in `make check`, where every rule is enumerated exactly."""
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


@pytest.mark.parametrize(("broken", "texts"), [(from_p_after_a_refusal, 600), (every_draft_kept, 400)])
def test_the_chi_square_catches_a_broken_rule(broken: Decide, texts: int) -> None:
    rule = Rule("broken", False, frozenset({ProposalKind.SAMPLED}), broken)
    chance, _ = decode_many(small_llama(TARGET_SEED), drafter_called("chain"), SamplingConfig(1.0), rule, texts)
    assert chance < FALSE_ALARM / 100, "caught, and not only just"
