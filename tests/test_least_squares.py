"""Heads and biases that start as a regression of the target's states: its coefficients, and what they write."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_dspark import tiny_dspark
from tiny_models import tiny_model
from torch import Tensor
from torch.nn import functional as F

from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.markov import MarkovBias
from trainer.data.batch import Batch, Example
from trainer.drafts.dspark_start import start_dspark
from trainer.heads.medusa import MedusaObjective, start_heads
from trainer.recipe.common import TrainingSection
from trainer.recipe.heads import HeadsSection
from trainer.run.distributed import build_optimizers, set_learning_rates
from trainer.target.hidden import OnlineTarget
from trainer.target.least_squares import Fit, fit_states, start_bias

VOCAB, HIDDEN = 5, 4


class Recurrent:
    """States that follow h' = A h + T[x'] with noise, so that one regression is exactly right."""

    transform = None
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))

    def __init__(self, noise: float = 0.0) -> None:
        draw = torch.Generator().manual_seed(2)
        self.map = torch.randn(HIDDEN, HIDDEN, generator=draw) / 4
        self.token = torch.randn(VOCAB, HIDDEN, generator=draw)
        self._noise, self._draw = noise, draw

    def read(self, batch: Batch) -> Tensor | None:
        return None

    def hidden(self, batch: Batch) -> Tensor:
        states, last = [], torch.randn(len(batch.tokens), HIDDEN, generator=self._draw)
        for token in batch.tokens.T:
            last = last @ self.map.T + self.token[token] + self._noise * torch.randn(last.shape, generator=self._draw)
            states.append(last)
        return torch.stack(states, 1)


def examples(count: int, known: Sequence[int] = range(VOCAB)) -> list[Example]:
    draw = torch.Generator().manual_seed(3)
    tokens = torch.tensor(known)[torch.randint(len(known), (count, 30), generator=draw)]
    return [Example(row.tolist(), (True,) * 30, 0) for row in tokens]


def test_states_that_follow_a_linear_rule_give_its_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.target.least_squares._RIDGE", 1e-6)
    states = Recurrent()
    fit = fit_states(states, examples(200), 2, 10**6)
    assert fit.tokens.tolist() == list(range(VOCAB)) and fit.counts.sum() == 200 * 28
    assert (fit.maps[0] - states.map).abs().max() < 0.01
    shift = fit.shifts[0] + fit.means - states.token  # T is known up to what a_k takes over
    assert shift.abs().max() < 0.02
    assert (fit.maps[1] - states.map @ states.map).abs().max() < 0.05, "two tokens ahead"


def test_the_second_head_is_fitted_beside_the_firsts_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one regression of all pairs that are written out. Eight rows run together."""
    monkeypatch.setattr("trainer.target.least_squares._TOGETHER", 8 * 30)
    monkeypatch.setattr("trainer.target.least_squares._RIDGE", 1e-6)
    rows = examples(13)
    fit = fit_states(Recurrent(noise=0.5), rows, 2, 10**6)
    again, x, y, b = Recurrent(noise=0.5), list[Tensor](), list[Tensor](), list[int]()
    for part in (rows[:8], rows[8:]):
        tokens = torch.tensor([row.tokens.tolist() for row in part])
        hidden = again.hidden(type("Rows", (), {"tokens": tokens}))  # type: ignore[arg-type]
        x += hidden[:, :-3].flatten(0, 1)
        y += hidden[:, 2:-1].flatten(0, 1)
        b += tokens[:, 2:-1].flatten().tolist()
    given = torch.cat((torch.stack(x), torch.ones(len(x), 1)), 1)
    found = torch.linalg.lstsq(given, torch.stack(y) - fit.means[b]).solution
    torch.testing.assert_close(fit.maps[1], found[:-1].T, rtol=0, atol=1e-3)
    torch.testing.assert_close(fit.shifts[1], found[-1], rtol=0, atol=1e-3)


def test_a_token_seen_once_is_drawn_half_way_to_the_mean_and_packed_texts_are_apart() -> None:
    texts = [Example((0, 1, 0, 1, 2, 0), (True,) * 6, 0)]
    fit = fit_states(Recurrent(), texts, 0, 10**6)
    states = Recurrent().hidden(type("Rows", (), {"tokens": torch.tensor([[0, 1, 0, 1, 2, 0]])}))[0]  # type: ignore[arg-type]
    assert fit.maps.shape == (0, HIDDEN, HIDDEN) and fit.counts.tolist() == [1, 2, 1], "pairs begin at positions 0 to 3"
    torch.testing.assert_close(fit.means[2], (states[4] + states[1:5].mean(0)) / 2)
    torch.testing.assert_close(fit.means[1], (states[1] + states[3] + states[1:5].mean(0)) / 3)
    parted = Example((0, 1, 1, 0), (True,) * 4, 0, (2, 2))
    assert fit_states(Recurrent(), [parted], 1, 10**6).counts.sum() == 0


def fit_of(known: Sequence[int], heads: int = 2) -> Fit:
    draw = torch.Generator().manual_seed(5)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    counts = torch.arange(1.0, len(known) + 1)
    maps, shifts = normal(heads, HIDDEN, HIDDEN), normal(heads, HIDDEN)
    return Fit(maps, shifts, torch.tensor(known), counts, normal(len(known), HIDDEN))


@pytest.mark.parametrize("outputs", [(0, 1, 2, 3, 4), (1, 3)])
def test_a_bias_of_full_rank_writes_the_means_and_unknown_tokens_their_mean(outputs: tuple[int, ...]) -> None:
    fit, lm_head = fit_of((0, 2, 3)), Recurrent.lm_head[list(outputs)]
    bias = MarkovBias(VOCAB, len(outputs), HIDDEN + 3)
    start_bias(bias, fit.start(HIDDEN + 3), lm_head)
    torch.testing.assert_close(bias(fit.tokens), fit.means @ lm_head.T, rtol=0, atol=1e-4)
    mean = (fit.counts[:, None] * fit.means).sum(0) / fit.counts.sum()
    torch.testing.assert_close(bias(torch.tensor([1, 4])), (mean @ lm_head.T).expand(2, -1), rtol=0, atol=1e-4)
    small = MarkovBias(VOCAB, len(outputs), 2)
    start_bias(small, fit.start(2), lm_head)
    weights = fit.counts.sqrt()[:, None]
    left, values, right = torch.linalg.svd(weights * (fit.means - mean), full_matrices=False)
    best = mean + left[:, :1] * values[:1] @ right[:1] / weights
    torch.testing.assert_close(small(fit.tokens), best @ lm_head.T, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("shared", "writes"), [(True, None), (False, None), (True, (0, 2, 3))])
def test_heads_start_with_what_the_regression_predicts(shared: bool, writes: tuple[int, ...] | None) -> None:
    fit, lm_head = fit_of((0, 2, 3)), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    lm_head.weight.data = Recurrent.lm_head.clone()
    config = MedusaConfig(HIDDEN, VOCAB, 2, tree=((0,),), shared_lm_head=shared, markov_rank=HIDDEN + 1, linear=True)
    if writes is not None:
        config = replace(config, draft_vocab_size=len(writes))
    heads = MedusaHeads.for_lm_head(lm_head.weight, config)
    if writes is not None:
        heads.write_only(writes, lm_head.weight)
    start_heads(heads, fit.start(HIDDEN + 1), lm_head.weight)
    x, before = torch.randn(7, HIDDEN), torch.tensor([0, 2, 3, 3, 2, 0, 0])
    place = torch.searchsorted(fit.tokens, before)
    for head in range(2):
        wanted = F.linear(x, fit.maps[head], fit.shifts[head]) + fit.means[place]
        found = heads.head_logits(head, x, lm_head if shared else None, before)
        written = lm_head.weight if writes is None else lm_head.weight[list(writes)]
        torch.testing.assert_close(found, wanted @ written.T, rtol=0, atol=1e-4)


def test_fitted_maps_learn_more_slowly_than_the_rest() -> None:
    section = HeadsSection(num_heads=2, markov_rank=3, shared_lm_head=True)
    fitted = MedusaObjective(Recurrent(), section, 1, torch.float32)
    rates = fitted.rates(0)
    (optimizer,) = build_optimizers(fitted.module, TrainingSection(steps=1, batch_size=1, learning_rate=1e-3), rates)
    set_learning_rates([optimizer], 1e-3, rates)
    found = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    slow = {name for name, weight in fitted.module.named_parameters() if found[id(weight)] < 1e-3}
    assert slow == {f"heads.heads.{k}.linear.{part}" for k in range(2) for part in ("weight", "bias")}
    unfitted = MedusaObjective(Recurrent(), section.model_copy(update={"fit_tokens": 0}), 1, torch.float32)
    assert not unfitted.module.heads.config.linear and set(unfitted.rates(0).values()) == {1.0}


@pytest.mark.parametrize("writes", [None, (0, 2, 3, 5)])
def test_a_dspark_drafts_bias_starts_as_the_targets_mean_states(writes: tuple[int, ...] | None) -> None:
    target = CausalLM(tiny_model(num_hidden_layers=4))
    draft, states = tiny_dspark(target, rank=17, writes=writes), OnlineTarget(target)
    texts = [Example(tuple(torch.randint(0, 16, (20,)).tolist()), (True,) * 20, 0) for _ in range(12)]
    start_dspark(draft, states, texts, 10**6)
    fit = fit_states(states, texts, 0, 10**6)
    lm_head = states.lm_head if draft.lm_head is None else draft.lm_head.weight
    assert draft.markov is not None
    torch.testing.assert_close(draft.markov(fit.tokens), fit.means @ lm_head.T, rtol=0, atol=1e-3)
    assert draft.norm.weight.unique().tolist() == pytest.approx([0.3])
