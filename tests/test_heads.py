"""Medusa heads: their initial weights, saving, and errors."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_dspark import tiny_dspark
from tiny_models import tiny_model
from tiny_training import medusa_on, toy_examples, train_toy
from torch import Tensor
from torch.nn import functional as F

from decoding.errors import UserError
from decoding.files.stored import CONFIG_NAME, WEIGHTS_NAME
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.markov import MarkovBias
from decoding.model.vocabulary import d2t_of
from trainer.data.batch import Batch, Example
from trainer.drafts.dspark_start import start_dspark
from trainer.heads.medusa1 import MedusaObjective, start_heads, with_sharing
from trainer.recipe.common import TrainingSection
from trainer.recipe.heads import HeadsSection
from trainer.run.distributed import build_optimizers, set_learning_rates
from trainer.target.initial import Fit, fit_states, start_bias
from trainer.target.loading import OnlineTarget

CONFIG = MedusaConfig(hidden_size=16, vocab_size=16, num_heads=3, tree=((0,), (1,), (0, 0), (0, 0, 2)))
SHARED = replace(CONFIG, shared_lm_head=True)
LINEAR = replace(CONFIG, shared_lm_head=True, markov_rank=3, linear=True)
FEW = replace(LINEAR, draft_vocab_size=4)


def random_heads(config: MedusaConfig = CONFIG) -> MedusaHeads:
    heads = MedusaHeads(config)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    if config.draft_vocab_size is not None:
        heads.d2t.copy_(d2t_of((0, 3, 4, 9)))
    return heads


@pytest.mark.parametrize("config", [CONFIG, SHARED], ids=["own", "shared"])
def test_heads_start_as_the_targets_lm_head(tiny_llama: CausalLM, config: MedusaConfig) -> None:
    heads = MedusaHeads.for_target(tiny_llama.model, config)
    assert any("lm_head" in name for name in heads.state_dict()) != config.shared_lm_head
    output = tiny_llama.append([[1, 2, 3]], tiny_llama.new_cache(8))
    with torch.inference_mode():
        logits = heads(output.hidden, tiny_llama.model.get_output_embeddings())
    assert logits.shape == (3, 1, 16)
    for head in logits:
        torch.testing.assert_close(head, output.logits, rtol=0, atol=1e-6)  # the sums have a different order


@pytest.mark.parametrize("config", [CONFIG, SHARED, LINEAR, FEW], ids=["own", "shared", "linear", "few tokens"])
def test_saved_and_loaded_heads_are_bit_equal_and_no_pickle(tmp_path: Path, config: MedusaConfig) -> None:
    heads = random_heads(config).bfloat16()
    heads.save_pretrained(tmp_path / "new" / "folder")
    written = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert written == [CONFIG_NAME, WEIGHTS_NAME] == ["config.json", "model.safetensors"]
    read = MedusaHeads.from_pretrained(tmp_path / "new" / "folder")
    assert read.config == config and not read.training
    found, wanted = read.state_dict(), heads.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert {tensor.dtype for name, tensor in found.items() if name != "d2t"} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("d2t", "problem"),
    [
        (torch.tensor([0, 2, 1, 6]), "d2t in .* does not map the outputs to increasing .*: use heads"),
        (torch.tensor([0, 2, 2, 13]), "d2t in .* does not map the outputs to increasing"),
        (torch.tensor([0, 2, 2]), "d2t is not a list of 4 whole numbers"),
        (torch.zeros(4), "d2t is not a list of 4 whole numbers"),
        (None, "d2t is not a list of 4 whole numbers"),
    ],
    ids=["falling", "beyond the vocabulary", "too short", "no whole numbers", "missing"],
)
def test_a_wrong_list_of_the_tokens_that_heads_write_is_refused(
    tmp_path: Path, d2t: Tensor | None, problem: str
) -> None:
    random_heads(FEW).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_NAME) | {"d2t": d2t}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(UserError, match=problem):
        MedusaHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("changes", [{"draft_vocab_size": 16}, {"draft_vocab_size": 4, "shared_lm_head": False}])
def test_heads_of_few_tokens_have_fewer_than_the_target_and_share_their_lm_head(changes: dict[str, Any]) -> None:
    problem = "use fewer than the target's 16 tokens, and heads with shared_lm_head"
    with pytest.raises(UserError, match=problem):
        replace(FEW, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("heads.1.lm_head.weight"), r"heads\.1\.lm_head\.weight is missing"),
        (lambda tensors: tensors.update({"heads.9.lm_head.weight": torch.ones(1)}), r"heads\.9.* is unknown"),
        (lambda tensors: tensors.update({"heads.0.lm_head.weight": torch.ones(4, 16)}), r"size mismatch.*heads\.0"),
    ],
    ids=["missing", "extra", "wrong shape"],
)
def test_weights_that_are_not_exactly_those_of_the_config_are_refused(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]  # a lambda over a dict
    random_heads().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=rf"(?s)model\.safetensors does not fit its config.*{message}"):
        MedusaHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("missing", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_folder_without_heads_is_refused_by_what_is_missing(tmp_path: Path, missing: str) -> None:
    random_heads().save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=f"does not contain Medusa heads, because {missing} is missing"):
        MedusaHeads.from_pretrained(tmp_path)


def test_an_lm_head_with_a_bias_is_refused_for_the_heads_would_lose_it() -> None:
    model = tiny_model()
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.ones(16))
    with pytest.raises(ValueError, match="has a bias, which heads do not support"):
        MedusaHeads.for_target(model, MedusaConfig(16, 16))


# --- heads that share the target's lm_head --------------------------------------------------------------------------


def test_two_steps_of_training_change_the_blocks_alone(tmp_path: Path) -> None:
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = medusa_on(CausalLM(model), HeadsSection(num_heads=3, shared_lm_head=True))
    train_toy(tmp_path / "checkpoints", objective, examples=toy_examples(), steps=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    trained = dict(objective.module.heads.named_parameters())
    assert len(trained) == 3 * 2 and all(parameter.abs().max() > 0 for parameter in trained.values())
    objective.save(tmp_path / "final")
    stored = load_file(tmp_path / "final" / WEIGHTS_NAME)
    assert stored.keys() == trained.keys() and not any("lm_head" in name for name in stored)
    assert MedusaHeads.from_pretrained(tmp_path / "final").config.shared_lm_head


@pytest.mark.parametrize(("vocab", "shares"), [(16, False), (1200, True)])
def test_heads_share_the_lm_head_by_default_if_their_own_would_be_half_the_target(vocab: int, shares: bool) -> None:
    model = tiny_model("llama", vocab=vocab, tie_word_embeddings=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    section, said = with_sharing(HeadsSection(num_heads=1), model)
    share = 16 * vocab / parameters
    assert section.shared_lm_head == shares == (share >= 0.5) and f"{share:.0%} of the target's" in said
    for chosen in (True, False):
        assert with_sharing(HeadsSection(shared_lm_head=chosen), model)[0].shared_lm_head == chosen
    packed = torch.nn.Module()  # as with GPTQ, whose weights are buffers
    packed.register_buffer("qweight", torch.zeros(4 * parameters, dtype=torch.int32))
    model.add_module("packed", packed)
    assert not with_sharing(HeadsSection(num_heads=1), model)[0].shared_lm_head, "next to it the lm_head is small"
    assert with_sharing(HeadsSection(num_heads=10**9 // (16 * vocab) + 1), model)[0].shared_lm_head


# --- heads with a Markov bias: the bias by hand, and the artefact -----------------------------------------------------


BOTH_LAYOUTS = pytest.mark.parametrize("shared", [False, True], ids=["own lm_heads", "shared lm_head"])
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 3), (0, 1, 0), (2, 0, 0))
MARKOV = MedusaConfig(16, 16, num_heads=3, num_layers=1, tree=((0,), (1,), (0, 0)), markov_rank=4)


def random_markov_heads(shared: bool = False, config: MedusaConfig = MARKOV) -> MedusaHeads:
    heads = MedusaHeads(replace(config, shared_lm_head=shared))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return heads


@torch.no_grad()
def reference_logits(heads: MedusaHeads, target: CausalLM, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the logits after these tokens, of which the first is the root: the head's logits plus W2 W1[the last
    token].
    """
    assert heads.markov is not None
    own = heads.heads[len(tokens) - 1](hidden, target.model.get_output_embeddings())
    logits: Tensor = own + heads.markov.output.weight @ heads.markov.embedding.weight[tokens[-1]]
    return logits


# --- the bias -------------------------------------------------------------------------------------------------------


@BOTH_LAYOUTS
def test_every_head_adds_one_shared_bias_of_the_token_before_its_own(tiny_llama: CausalLM, shared: bool) -> None:
    heads, hidden, before = random_markov_heads(shared), torch.randn(5, 16), torch.randint(16, (3, 5))
    with torch.inference_mode():
        logits = heads(hidden, tiny_llama.model.get_output_embeddings(), before=before)
    for k, row in itertools.product(range(3), range(5)):
        tokens = [15] * k + [int(before[k, row])]  # only the last token matters
        torch.testing.assert_close(logits[k, row], reference_logits(heads, tiny_llama, hidden[row], tokens))


# --- on disk --------------------------------------------------------------------------------------------------------


@BOTH_LAYOUTS
def test_heads_with_a_bias_are_saved_whole_and_read_back_bit_equal(tmp_path: Path, shared: bool) -> None:
    heads = random_markov_heads(shared)
    heads.save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG_NAME).read_text())["markov_rank"] == 4
    stored = load_file(tmp_path / WEIGHTS_NAME)
    assert [stored[f"markov.{part}.weight"].shape for part in ("embedding", "output")] == [(16, 4), (16, 4)]
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == dict(heads.config.shapes())
    read = MedusaHeads.from_pretrained(tmp_path)
    assert read.config == heads.config
    assert all(torch.equal(tensor, stored[name]) for name, tensor in read.state_dict().items())


VOCAB, HIDDEN = 5, 4


class Recurrent:
    """A model whose states follow h' = A h + T[x'] with noise, so that one regression is exactly right."""

    transform = None
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))

    def __init__(self, noise: float = 0.0) -> None:
        draw = torch.Generator().manual_seed(2)
        self.map = torch.randn(HIDDEN, HIDDEN, generator=draw) / 4
        self.token = torch.randn(VOCAB, HIDDEN, generator=draw)
        self._noise, self._draw = noise, draw

    def read(self, batch: Batch) -> None:
        return None

    def hidden(self, batch: Batch, stored: Any = None) -> Tensor:
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
    monkeypatch.setattr("trainer.target.initial._RIDGE", 1e-6)
    states = Recurrent()
    fit = fit_states(states, examples(200), 2, 10**6)
    assert fit.tokens.tolist() == list(range(VOCAB)) and fit.counts.sum() == 200 * 28
    assert (fit.maps[0] - states.map).abs().max() < 0.01
    shift = fit.shifts[0] + fit.means - states.token  # T is determined only up to a constant that a_k can absorb
    assert shift.abs().max() < 0.02
    assert (fit.maps[1] - states.map @ states.map).abs().max() < 0.05, "two tokens ahead"


def test_the_second_head_is_fitted_beside_the_firsts_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit is compared with one regression over all pairs, written out. Eight rows run together."""
    monkeypatch.setattr("trainer.target.initial._TOGETHER", 8 * 30)
    monkeypatch.setattr("trainer.target.initial._RIDGE", 1e-6)
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
