"""LK by each head's mean acceptance, and labels weighed by the survival of their chain: formulas, sums, checkpoints."""

from pathlib import Path

import pytest
import torch
from plain_heads import COUNTING, HeadLogits, all_logits, assert_same_gradients, disturbed
from safetensors.torch import load_file
from tiny_training import Recorder, interrupt, toy_examples, train_toy
from torch import Tensor
from torch.nn import functional as F

from trainer.data.batch import Example, collate
from trainer.heads.medusa import MedusaObjective, head_weights
from trainer.learning.losses import divergence, prefix_survival
from trainer.recipe.draft import DraftSection
from trainer.recipe.heads import HeadsSection
from trainer.recipe.loss import LossSection
from trainer.run.loop import Interrupted

LK = LossSection(lk=1, lk_eta=10, lk_scope="head")
BOTH = HeadsSection(num_heads=3, markov_rank=4, weighting="prefix_survival", loss=LK)
BATCH = collate([COUNTING])


def sums(objective: MedusaObjective) -> tuple[Tensor, Tensor]:
    losses, hits = objective.module(*objective.inputs(BATCH, step=0))
    return losses, hits


def overlap(head: HeadLogits) -> Tensor:
    """Σ min(p, q) over all labels of a head."""
    return torch.minimum(head.logits.softmax(-1), head.target.softmax(-1)).sum()


def test_soft_heads_report_their_acceptance_and_others_their_right_argmaxes() -> None:
    objective = disturbed(HeadsSection(num_heads=3, loss=LossSection(cross_entropy=1, forward_kl=1)))
    assert objective.hit_name == "acceptance"
    assert sums(objective)[1].tolist() == pytest.approx(
        [overlap(head).item() for head in all_logits(objective, BATCH)], rel=1e-4
    )
    hard = disturbed(HeadsSection(num_heads=3))
    right = [(head.logits.argmax(-1) == head.labels).sum().item() for head in all_logits(hard, BATCH)]
    assert hard.hit_name == "top1" and sums(hard)[1].tolist() == right


def test_the_first_step_of_lk_by_head_is_the_kl() -> None:
    by_head, kl = (disturbed(HeadsSection(num_heads=3, loss=loss)) for loss in (LK, LossSection(forward_kl=1)))
    assert torch.allclose(sums(by_head)[0], sums(kl)[0], rtol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_lk_by_head_goes_by_the_acceptance_of_the_step_before(shared: bool) -> None:
    """One λ for all labels of a head: exp(-10 · .2) for the first."""
    section = HeadsSection(num_heads=3, markov_rank=4, shared_lm_head=shared, loss=LK)
    objective = disturbed(section, torch.float64)
    acceptance = torch.tensor([0.2, 0.1, 0.05], dtype=torch.float64)
    objective.observe(acceptance, torch.tensor([18, 17, 16]))
    expected = [
        divergence(head.logits, head.target, "lk", share=(-10 * mean).exp())
        for head, mean in zip(all_logits(objective, BATCH), acceptance, strict=True)
    ]
    assert_same_gradients(sums(objective)[0], torch.stack(expected), objective)


def test_a_head_without_a_label_keeps_the_acceptance_it_had() -> None:
    module = disturbed(HeadsSection(num_heads=2, loss=LK)).module
    module.observe(torch.tensor([0.5, 0.25]), torch.tensor([4, 3]))
    module.observe(torch.tensor([0.75, 0.0]), torch.tensor([1, 0]))
    assert module.acceptance is not None and module.acceptance.tolist() == [0.75, 0.25]


def test_the_acceptance_that_a_step_observes_is_the_mean_over_its_whole_batch(tmp_path: Path) -> None:
    """It is the figure of that step, whatever the micro batches."""
    for micro in (1, 8):
        objective, recorder = disturbed(BOTH), Recorder()
        train_toy(tmp_path / str(micro), objective, recorder, steps=1, micro_batch_size=micro)
        figures = [recorder.figures[1][f"acceptance/head_{k}"] for k in range(3)]
        assert objective.module.acceptance is not None
        assert objective.module.acceptance.tolist() == pytest.approx(figures) and min(figures) > 0


@pytest.mark.parametrize("loss", [LossSection(cross_entropy=1), LossSection(forward_kl=1)])
@pytest.mark.parametrize("shared", [False, True])
def test_labels_weigh_what_their_chain_gains_by_them(shared: bool, loss: LossSection) -> None:
    """The chain of position t is token t+2 by head 0, t+3 by head 1 and so on, as far as the text goes."""
    section = HeadsSection(
        num_heads=3, markov_rank=4, shared_lm_head=shared, loss=loss, weighting="prefix_survival", survival_alpha=0.3
    )
    objective = disturbed(section, torch.float64)
    heads, chains = all_logits(objective, BATCH), len(COUNTING.tokens) - 2
    q, labelled = torch.zeros(chains, 3, dtype=torch.float64), torch.zeros(chains, 3, dtype=torch.bool)
    for k, head in enumerate(heads):
        count = len(head.labels)
        q[:count, k] = head.logits.softmax(-1)[torch.arange(count), head.labels].detach()
        labelled[:count, k] = True
    weights = prefix_survival(q, labelled, 0.3)
    expected = []
    for k, head in enumerate(heads):
        rows = [
            divergence(head.logits[row, None], head.target[row, None], "forward_kl")
            if loss.soft
            else F.cross_entropy(head.logits[row], head.labels[row])
            for row in range(len(head.labels))
        ]
        expected.append((weights[: len(rows), k] * torch.stack(rows)).sum())
    assert_same_gradients(sums(objective)[0], torch.stack(expected), objective)


def test_survival_takes_the_place_of_the_decay_and_is_multiplied_by_weights() -> None:
    assert head_weights(HeadsSection(num_heads=3, weighting="prefix_survival"), 0, 10) == (1, 1, 1)
    section = HeadsSection(num_heads=3, weighting="prefix_survival", weights=(1, 0, 2))
    assert head_weights(section, 0, 10) == (1, 0, 2)


def test_chains_of_packed_documents_end_with_their_document() -> None:
    objective = disturbed(HeadsSection(num_heads=3, weighting="prefix_survival"))
    documents = [Example((3, 1, 4, 1, 5), (True,) * 5, 0), Example((9, 2, 6), (True,) * 3, 0)]
    packed = Example((3, 1, 4, 1, 5, 9, 2, 6), (True,) * 8, 0, (5, 3))
    together, apart = (objective.module(*objective.inputs(collate(rows), 0)).losses for rows in ([packed], documents))
    assert torch.allclose(together, apart, rtol=1e-5)


def test_eight_micro_batches_of_one_train_as_one_of_eight(tmp_path: Path) -> None:
    trained = []
    for micro in (1, 8):
        objective = disturbed(BOTH)
        train_toy(tmp_path / str(micro), objective, steps=4, micro_batch_size=micro)
        trained.append(objective.module.state_dict())
    assert "acceptance" in trained[0]
    assert all(torch.allclose(tensor, trained[1][name], atol=1e-5) for name, tensor in trained[0].items())


def run_to(folder: Path, last: int, seed: int) -> MedusaObjective:
    """Train six steps in ``folder`` from noise, which a checkpoint replaces, or stop after ``last`` of them."""
    objective, recorder = disturbed(BOTH, seed=seed), Recorder()
    if last == 6:
        train_toy(folder, objective, recorder, toy_examples(), steps=6)
        return objective
    recorder.actions[last] = interrupt
    with pytest.raises(Interrupted):
        train_toy(folder, objective, recorder, toy_examples(), steps=6)
    return objective


def test_a_run_that_was_stopped_resumes_with_its_bias_and_its_acceptance_bit_by_bit(tmp_path: Path) -> None:
    whole = run_to(tmp_path / "straight", 6, seed=0).module.state_dict()
    run_to(tmp_path / "stopped", 3, seed=0)
    resumed = run_to(tmp_path / "stopped", 6, seed=1).module.state_dict()
    assert resumed.keys() == whole.keys() and all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_the_acceptance_is_in_checkpoints_and_not_in_finished_heads(tmp_path: Path) -> None:
    objective = run_to(tmp_path / "run", 6, seed=0)
    (newest,) = (tmp_path / "run").glob("step-00000006")
    stored = load_file(newest / "weights.safetensors")["acceptance"]
    assert objective.module.acceptance is not None and torch.equal(stored, objective.module.acceptance)
    objective.save(tmp_path / "final")
    assert not any("acceptance" in name for name in load_file(tmp_path / "final" / "model.safetensors"))


def test_other_losses_keep_no_acceptance() -> None:
    for loss in (LossSection(lk=1), LossSection(forward_kl=1, lk_scope="head")):
        objective = disturbed(HeadsSection(num_heads=2, loss=loss))
        objective.observe(torch.tensor([0.5, 0.5]), torch.tensor([1, 1]))
        assert objective.module.acceptance is None and "acceptance" not in objective.module.state_dict()


def test_a_draft_has_no_heads_for_lk_to_go_by() -> None:
    with pytest.raises(ValueError, match=r"draft.loss.lk_scope is head, but a draft has no heads: set it to token"):
        DraftSection(loss=LK)
