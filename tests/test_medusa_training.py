"""The Medusa-1 objective: which label belongs to which head, what is trained, and what stays unchanged."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import counting_model, full_forward, tiny_model
from tiny_training import Recorder, medusa_on, recipe_content, tiny_tokenizer, train_toy, write_corpus, write_target
from torch import Tensor
from torch.nn import functional as F

from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads
from decoding.model.loading import load_model
from trainer.data.batch import Batch, Example, collate
from trainer.data.dataset import Dataset
from trainer.heads.medusa1 import HeadInputs, HeadLabels, MedusaObjective
from trainer.heads.medusa2 import TARGET_FOLDER, Medusa2Objective
from trainer.recipe.common import LossSection
from trainer.recipe.heads import AdaptersSection, HeadsSection
from trainer.recipe.reading import parse_recipe
from trainer.run.heldout import Evaluator
from trainer.run.train import run_recipe
from trainer.target.loading import OnlineTarget

COUNTING = Example(tuple(i % 16 for i in range(20)), (True,) * 20, 0)
HEADS = HeadsSection(num_heads=3)
SOFT = LossSection(forward_kl=1)


def knowing_heads(objective: MedusaObjective, steps_ahead: Sequence[int]) -> None:
    """Make head k predict the last token plus steps_ahead[k] on the counting target, with certainty.

    The target's hidden state is 4 at the last token and 0 elsewhere, so 25 times a permutation gives a logit of 100.
    """
    with torch.no_grad():
        for head, ahead in zip(objective.module.heads.heads, steps_ahead, strict=True):
            head.lm_head.weight.copy_(25 * torch.eye(16).roll(ahead, dims=0))


def sums(objective: MedusaObjective, batch: Batch) -> tuple[list[float], list[float]]:
    losses, hits, _ = objective.module(*objective.inputs(batch, step=0))
    return losses.tolist(), hits.tolist()


def test_head_k_predicts_the_token_k_plus_2_after_the_one_it_reads(counting: CausalLM) -> None:
    """x+1 follows x, and the lm_head predicts it; head 0 is right if it predicts x+2, head 1 if it predicts x+3, ..."""
    objective = medusa_on(counting, HEADS)
    batch = collate([COUNTING])
    knowing_heads(objective, (2, 3, 4))
    losses, hits = sums(objective, batch)
    assert losses == pytest.approx([0, 0, 0], abs=1e-4)
    assert hits == objective.counts(batch).tolist() == [18, 17, 16]


def test_tokens_that_are_not_trained_are_no_labels(counting: CausalLM) -> None:
    module = medusa_on(counting, HEADS).module
    hidden = torch.randn(1, 10, 16)
    batch = collate([Example(tuple(range(10)), (False,) * 6 + (True,) * 4, 6)])

    def losses(tokens: torch.Tensor) -> torch.Tensor:
        labels = HeadLabels.of(batch, HEADS.num_heads)
        return module(HeadInputs(replace(batch, tokens=tokens), hidden, labels)).losses

    other_prompt = torch.where(batch.trained, batch.tokens, 15)
    assert torch.equal(losses(other_prompt), losses(batch.tokens))
    for position in range(6, 10):
        other_answer = batch.tokens.clone()
        other_answer[0, position] = 15
        assert (losses(other_answer) != losses(batch.tokens)).all()


def test_training_learns_to_count_and_leaves_the_target_byte_identical(tmp_path: Path) -> None:
    model = counting_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = medusa_on(CausalLM(model), HEADS)
    texts = [Example(tuple((start + i) % 16 for i in range(20)), (True,) * 20, 0) for start in range(16)]
    recorder = Recorder()
    train_toy(tmp_path, objective, recorder, texts, steps=40, learning_rate=3e-2, checkpoint_every=100)
    for k in range(3):
        assert recorder.figures[1][f"top1/head_{k}"] == 0  # x+1, the prediction of the lm_head, is never right
        assert recorder.figures[40][f"top1/head_{k}"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())


def test_the_tree_is_chosen_by_the_heads_accuracies(counting: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of the nodes are .6, .6*.5 = .3, .6*.2 = .12 (second token of head 1), .3*.4 = .12, and .1; the best
    three are chosen.
    """
    objective = medusa_on(counting, HeadsSection(num_heads=3, tree_nodes=3))
    shares = [[0.6, 0.1], [0.5, 0.15], [0.2, 0.1]]
    monkeypatch.setattr("trainer.heads.medusa1.rank_accuracies", lambda *_: shares)
    objective.choose_tree(counting, list)
    assert objective.module.heads.config.tree == ((0,), (1,), (0, 0))


def own_distribution(model: torch.nn.Module, tokens: Sequence[int], ahead: int) -> torch.Tensor:
    """Return, from a separate forward pass, the model's distribution of the token ``ahead`` tokens after each position,
    if the text has such a token.
    """
    return full_forward(model, tokens)[ahead - 1 : -1].softmax(-1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_soft_targets_are_the_targets_own_distribution_at_the_position_before_the_heads_token(family: str) -> None:
    """This includes families that cap or scale their logits.

    The heads are the lm_head itself, and the loss is KL(p, q).
    """
    model = tiny_model(family)
    objective = medusa_on(CausalLM(model), HeadsSection(num_heads=2, loss=SOFT))
    (inputs,) = objective.inputs(collate([COUNTING]), step=0)
    losses = objective.module(inputs).losses
    for k, loss in enumerate(losses):
        p = own_distribution(model, COUNTING.tokens.tolist(), k + 2)
        head = objective.module.heads.heads[k]
        log_q = head(inputs.hidden[0, : -(k + 2)]).log_softmax(-1)
        expected = (p * (p.log() - log_q)).sum()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_heads_of_few_tokens_learn_the_targets_own_distribution_of_these() -> None:
    """The loss is KL(p given these tokens, q), weighted by their share of p; Σ min(p, q) takes p over all tokens and q
    over these.
    """
    model, tokens = tiny_model("llama"), [0, 2, 3, 7, 11]
    section = HeadsSection(num_heads=2, loss=SOFT, shared_lm_head=True)
    objective = MedusaObjective(OnlineTarget(CausalLM(model)), section, 100, torch.float32, tokens)
    (inputs,) = objective.inputs(collate([COUNTING]), step=0)
    found, lm_head = objective.module(inputs), model.get_output_embeddings().weight
    for k, (loss, hits) in enumerate(zip(found.losses, found.hits, strict=True)):
        p = own_distribution(model, COUNTING.tokens.tolist(), k + 2)
        features = objective.heads.heads[k].features(inputs.hidden[0, : -(k + 2)])  # type: ignore[operator]  # ModuleList's items
        log_q = (features @ lm_head[tokens].T).log_softmax(-1)
        known = p[:, tokens] / p[:, tokens].sum(-1, keepdim=True)
        kl = (p[:, tokens] * (known.log() - log_q)).sum(-1)
        assert hits.item() == pytest.approx(torch.minimum(p[:, tokens], log_q.exp()).sum().item(), rel=1e-4)
        assert loss.item() == pytest.approx(kl.sum().item(), rel=1e-4)


def test_packed_documents_give_the_losses_of_each_alone() -> None:
    target = CausalLM(tiny_model("llama"))
    objective = medusa_on(target, HeadsSection(num_heads=3, loss=LossSection(cross_entropy=1, forward_kl=1)))
    documents = [Example((3, 1, 4, 1, 5), (True,) * 5, 0), Example((9, 2, 6), (True,) * 3, 0), COUNTING]
    packed = Example(
        [token for each in documents for token in each.tokens],
        (True,) * 28,
        0,
        tuple(len(each.tokens) for each in documents),
    )
    together, apart = collate([packed, COUNTING]), collate([*documents, COUNTING])
    assert objective.counts(together).tolist() == objective.counts(apart).tolist()
    assert sums(objective, together)[0] == pytest.approx(sums(objective, apart)[0], rel=1e-5)


def test_heads_start_from_a_folder_of_others(tmp_path: Path, counting: CausalLM) -> None:
    first = medusa_on(counting, HEADS)
    knowing_heads(first, (2, 3, 4))
    first.save(tmp_path)
    again = medusa_on(counting, HeadsSection(num_heads=3, init=str(tmp_path)))
    assert sums(again, collate([COUNTING]))[1] == [18, 17, 16]
    assert {parameter.dtype for parameter in again.module.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match=r"have num_heads 3 and not 4: change the recipe's heads section"):
        medusa_on(counting, HeadsSection(num_heads=4, init=str(tmp_path)))


TWO_HEADS = HeadsSection(num_heads=2, decay=0.5)
TEXT = Example((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (False,) * 3 + (True,) * 7, 3)


def objective_on(
    target: CausalLM, heads: HeadsSection = TWO_HEADS, steps: int = 10, **adapters: Any
) -> Medusa2Objective:
    section = AdaptersSection.model_validate({"rank": 2, "dropout": 0.0, **adapters})
    return Medusa2Objective(target, tiny_tokenizer(), heads, section, steps)


def trained(objective: Medusa2Objective) -> dict[str, Tensor]:
    return {name: p for name, p in objective.module.named_parameters() if p.requires_grad}


def adapters(objective: Medusa2Objective) -> dict[str, Tensor]:
    return {name: p for name, p in trained(objective).items() if name.startswith("model.")}


def loss_of(objective: Medusa2Objective, step: int = 5, weights: Tensor | None = None) -> Tensor:
    total: Tensor = objective.module(*objective.inputs(collate([TEXT]), step), weights).total
    return total


def disturb(objective: Medusa2Objective) -> None:
    """Change the adapters, which start as zero."""
    with torch.no_grad():
        for parameter in adapters(objective).values():
            parameter.add_(0.3 * torch.randn(parameter.shape))


def test_adapters_sit_on_every_linear_layer_but_the_lm_head_and_are_all_that_is_trained_of_the_target() -> None:
    model = tiny_model("llama")
    objective = objective_on(CausalLM(model))
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in adapters(objective)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(adapters(objective)) == 2 * 7 * 2
    assert len(trained(objective)) == len(adapters(objective)) + 2 * 3


def test_the_joint_gradient_is_that_of_the_plain_computation() -> None:
    """Losses computed inside the lm_head's forward pass equal losses computed from the model's output."""
    model = tiny_model("llama")
    objective = objective_on(CausalLM(model), gradient_checkpointing=False)
    disturb(objective)
    names, parameters = zip(*adapters(objective).items(), strict=True)
    fused = torch.autograd.grad(loss_of(objective), parameters)
    output = model(input_ids=torch.tensor([TEXT.tokens.tolist()]), use_cache=False, output_hidden_states=True)
    hidden, labels = output.hidden_states[-1][0], torch.tensor(TEXT.tokens.tolist())
    loss = F.cross_entropy(output.logits[0, 2:-1], labels[3:], reduction="sum")
    for k, head in enumerate(objective.module.heads.heads.heads):
        loss = loss + F.cross_entropy(head(hidden[1 - k : -(k + 2)]), labels[3:], reduction="sum")
    for name, ours, plain in zip(names, fused, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-3, atol=1e-4), name


def test_the_heads_go_first_and_then_adapters_join() -> None:
    objective = objective_on(CausalLM(tiny_model("llama")), heads_first_steps=3, heads_weight=0.2, base_weight=0.7)
    assert objective.weights(2) == (1, 0.5, 0)
    assert objective.weights(3) == pytest.approx((0.2, 0.1, 0.7))
    assert objective.rates(2) == {"heads.": 4, "": 0} and objective.rates(3) == {"heads.": 4, "": 1}
    loss_of(objective, step=2, weights=torch.tensor([1.0, 1.0, 0.0])).backward()
    assert all(not parameter.grad.any() for parameter in adapters(objective).values())  # they exist, and are zero
    assert all(name.startswith(("heads.", "model.")) for name in trained(objective))


def test_training_moves_no_weight_of_the_target_and_no_adapter_before_its_time(tmp_path: Path) -> None:
    model = counting_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = objective_on(CausalLM(model), steps=8, heads_first_steps=4)
    at_start = {name: p.detach().clone() for name, p in trained(objective).items()}
    texts = [Example(tuple((start + i) % 16 for i in range(20)), (True,) * 20, 0) for start in range(8)]
    recorder, still = Recorder(), []
    recorder.actions[4] = lambda: still.append(all(torch.equal(p, at_start[n]) for n, p in adapters(objective).items()))
    train_toy(tmp_path, objective, recorder, texts, steps=8)
    assert still == [True]
    assert all(not torch.equal(p, at_start[name]) for name, p in trained(objective).items() if "lora_B" in name)
    after = {name.replace("base_layer.", ""): tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_target_is_the_adapted_one_and_its_heads_lie_beside_it(tmp_path: Path, tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    objective = objective_on(CausalLM(model))
    disturb(objective)
    objective.module.eval()
    expected = full_forward(model, TEXT.tokens.tolist())
    objective.save(tmp_path)
    merged = load_model(str(tmp_path / TARGET_FOLDER), torch.float32)
    assert torch.allclose(full_forward(merged, TEXT.tokens.tolist()), expected, atol=1e-4)
    assert torch.equal(full_forward(model, TEXT.tokens.tolist()), expected)  # a copy was merged
    assert MedusaHeads.from_pretrained(tmp_path).config.num_heads == 2
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == tied


def test_the_tree_is_chosen_on_texts_of_the_target_as_it_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is a whole run: dropout and checkpointing must be off when the target writes the texts for fitting the
    tree.
    """
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    content = recipe_content(tmp_path, "medusa", steps=2) | {
        "heads": {"num_heads": 2},
        "adapters": {"rank": 2, "dropout": 0.5},
    }
    seen = []

    def greedy_texts(self: Evaluator, dataset: Dataset) -> list[tuple[tuple[int, ...], int]]:
        seen.append((any(module.training for module in self.target.model.modules()), dataset.path))
        return [((1, 2, 3, 4, 5, 6), 2)]

    monkeypatch.setattr(Evaluator, "greedy_texts", greedy_texts)
    run_recipe(parse_recipe(content))
    assert seen == [(False, content["data"]["train"])]  # not the held-out texts, on which the heads are evaluated
