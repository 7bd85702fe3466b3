"""Evidence against a distribution: its mean is 1 if the tokens come from the distribution,
so its inverse is a p-value.
"""

import itertools
import math

import pytest
import torch

from decoding.measure.proof.statistics import Cells, CountTest, LogProbability

P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


def test_the_evidence_of_a_token_has_mean_one_under_the_distribution_for_every_tilt() -> None:
    each = torch.stack([LogProbability.of(P[None], torch.tensor([token])).log_evidence for token in range(4)])
    assert torch.allclose(P @ each.exp(), torch.ones(each.shape[1], dtype=torch.float64))


def test_the_evidence_of_two_tokens_has_mean_one_though_the_second_p_follows_from_the_first_token() -> None:
    after = torch.stack([P, P.flip(0), P.roll(1), P.roll(2)])
    mean = 0.0
    for first, second in itertools.product(range(4), repeat=2):
        found = LogProbability.of(torch.stack([P, after[first]]), torch.tensor([first, second]))
        mean += float(P[first] * after[first, second]) / found.p_value if found.p_value < 1 else 0.0
    assert mean <= 1, "1 / p is the evidence, or less where that is below 1"


def test_the_mean_log_probability_by_hand() -> None:
    p = torch.tensor([[0.75, 0.25]], dtype=torch.float64)
    mean = 0.75 * math.log(0.75) + 0.25 * math.log(0.25)
    variance = 0.75 * (math.log(0.75) - mean) ** 2 + 0.25 * (math.log(0.25) - mean) ** 2
    found = LogProbability.of(p, torch.tensor([1])).plus(LogProbability.of(p, torch.tensor([0])))
    assert found.tokens == 2
    assert found.excess == pytest.approx(math.log(0.25) + math.log(0.75) - 2 * mean)
    assert found.variance == pytest.approx(2 * variance)
    assert found.z == pytest.approx(found.excess / math.sqrt(2 * variance))
    assert found.standard_error == pytest.approx(math.sqrt(2 * variance) / 2)


def test_a_token_of_probability_zero_is_a_proof() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]] * 3)
    found = LogProbability.of(p, torch.tensor([0, 2, 1]))
    assert (found.tokens, found.impossible, found.p_value) == (2, 1, 0.0)


@pytest.mark.parametrize(("heat", "is_found"), [(1.0, False), (1.4, True), (0.7, True)])
def test_a_thousand_tokens_of_another_temperature_are_found_and_those_of_the_right_one_are_not(
    heat: float, is_found: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 8, generator=generator, dtype=torch.float64) * 1.5
    tokens = torch.multinomial((logits / heat).softmax(-1), 1, generator=generator).squeeze(1)
    p_value = LogProbability.of(logits.softmax(-1), tokens).p_value
    assert p_value < 1e-7 if is_found else p_value > 1e-3


def test_the_evidence_of_counts_has_mean_one_over_all_counts_that_four_draws_can_give() -> None:
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    mean = torch.zeros(5, dtype=torch.float64)
    for counts in itertools.product(range(5), repeat=3):
        if sum(counts) == 4:
            ways = math.factorial(4) / math.prod(map(math.factorial, counts))
            probability = ways * math.prod(float(q) ** n for q, n in zip(p, counts, strict=True))
            mean += probability * Cells(torch.tensor(counts).double(), p).log_evidence.exp()
    assert torch.allclose(mean, torch.ones(5, dtype=torch.float64))


def test_outcomes_expected_fewer_than_five_times_are_counted_together() -> None:
    cells = Cells.pooled(torch.tensor([40.0, 40.0, 12.0, 8.0]), P)  # 100 draws: 50, 30, 15 and 5 are expected
    assert cells.counts.tolist() == [40, 40, 12, 8]
    cells = Cells.pooled(torch.tensor([20.0, 20.0, 6.0, 4.0]), P)  # 50 draws: 25, 15, 7.5 and 2.5
    assert cells.counts.tolist() == [20, 20, 6, 4] and cells.p.tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05])
    cells = Cells.pooled(torch.tensor([10.0, 6.0, 3.0, 1.0]), P)  # 20 draws: 10, 6, 3 and 1
    assert cells.counts.tolist() == [10, 6, 4] and cells.p.tolist() == pytest.approx([0.5, 0.3, 0.2])


def test_a_draw_of_an_outcome_of_probability_zero_is_a_proof() -> None:
    counted = CountTest.of([Cells.pooled(torch.tensor([10.0, 9.0, 1.0]), torch.tensor([0.5, 0.5, 0.0]))])
    assert counted.p_value == 0


def test_nothing_drawn_proves_nothing() -> None:
    assert CountTest.of([]).p_value == CountTest.of([Cells(torch.zeros(2), torch.tensor([0.5, 0.5]))]).p_value == 1


def test_the_shift_that_tokens_are_said_to_find_is_found_in_about_four_of_five_cases() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    other = p**1.3 / (p**1.3).sum()
    mean = float((p * p.log()).sum())
    variance = float((p * (p.log() - mean) ** 2).sum())
    shift, tokens = float((other * p.log()).sum()) - mean, 1
    while LogProbability.none()._replace(tokens=tokens, variance=tokens * variance).least_found(1e-6) > shift:
        tokens += 10
    generator = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(40):
        drawn = torch.multinomial(other, tokens, replacement=True, generator=generator)
        found += LogProbability.of(p.expand(tokens, 3), drawn).p_value < 1e-6
    assert 26 <= found <= 39
