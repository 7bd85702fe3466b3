"""What a draft is trained by: mixed losses on any family, hidden states, trimmed vocabularies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distilling import EXAMPLES, AllOnDisk, expected_loss, labelled_logits, objective_for, sums_of
from loss_references import divergence
from tiny_models import tiny_model
from tiny_training import tiny_tokenizer

from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import capture_lm_head_input
from decoding.model.loading import load_draft
from trainer.data.batch import collate
from trainer.data.sequences import pack
from trainer.drafts.distill import DistillObjective
from trainer.drafts.start import initial_draft
from trainer.recipe.draft import DraftSection

BATCH = collate(EXAMPLES)
MIX = {"forward_kl": 2.0, "acceptance": 0.25}


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed", "gpt2", "gpt-neox", "granite", "gemma2"])
def test_loss_and_gradients_are_those_of_the_models_own_logits(family: str) -> None:
    """Granite divides its logits, Gemma-2 caps them: both sides' are formed here, and must come out as the models'."""
    target = tiny_model(family)
    objective = objective_for(target, loss=MIX)
    draft = objective.module.draft
    sums = sums_of(objective, BATCH)
    sums.losses.sum().backward()
    ours = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad()
    expected = expected_loss(draft, target, BATCH, MIX)
    expected.backward()
    assert sums.losses.item() == pytest.approx(expected.item(), rel=1e-4)
    assert len(ours) >= 5
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(ours[name], parameter.grad, rtol=1e-3, atol=1e-5 * float(parameter.grad.abs().max())), (
            name
        )


def test_packed_documents_lose_what_they_lose_alone() -> None:
    objective = objective_for(tiny_model("llama"), loss=MIX)
    packed = collate(pack(list(EXAMPLES), max_length=12))
    assert packed.tokens.shape[0] == 1
    together, apart = (sums_of(objective, batch).losses.item() for batch in (packed, BATCH))
    assert together == pytest.approx(apart, rel=1e-5)


def test_a_trimmed_draft_is_compared_on_the_tokens_it_writes_and_read_back_as_it_was_trained(tmp_path: Path) -> None:
    target = tiny_model("llama")
    objective = objective_for(target, vocabulary=6, loss={"forward_kl": 1, "acceptance": 1})
    draft = objective.writing_draft()
    assert draft.output_tokens is not None and len(draft.output_tokens) == 6
    own, wanted = labelled_logits(objective.module.draft.eval(), BATCH), labelled_logits(target, BATCH)
    kinds: tuple[Any, ...] = ("forward_kl", "acceptance")
    expected = sum(divergence(own, wanted, kind, tokens=draft.output_tokens).item() for kind in kinds)
    assert sums_of(objective, BATCH).losses.item() == pytest.approx(expected, rel=1e-4)
    objective.save(tmp_path)
    read = load_draft(str(tmp_path), CausalLM(target), tiny_tokenizer())
    assert read.output_tokens is not None and torch.equal(read.output_tokens, draft.output_tokens)
    assert torch.equal(labelled_logits(read.model, BATCH), labelled_logits(draft.model, BATCH))


def test_on_the_datas_tokens_alone_the_target_is_not_run_and_right_tokens_are_counted() -> None:
    target = tiny_model("llama")
    objective = objective_for(target, loss={"cross_entropy": 1})
    with capture_lm_head_input(target) as captured:
        sums = sums_of(objective, BATCH)
    logits, labels = labelled_logits(objective.module.draft.eval(), BATCH), BATCH.tokens.roll(-1, 1)[BATCH.labelled(1)]
    assert not captured and objective.hit_name == "top1"
    assert sums.hits.item() == (logits.argmax(-1) == labels).sum().item()
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert sums.losses.item() == pytest.approx(expected.item(), rel=1e-5)


def test_logits_from_disk_teach_what_the_target_does() -> None:
    target, section = CausalLM(tiny_model("llama")), DraftSection.model_validate({"loss": MIX})
    initial = initial_draft(target, tiny_tokenizer(), section, EXAMPLES)
    stored = DistillObjective(target, AllOnDisk(target.model), tiny_tokenizer(), initial, section)
    online = sums_of(objective_for(target.model, loss=MIX), BATCH)
    assert sums_of(stored, BATCH).losses.item() == pytest.approx(online.losses.item(), rel=1e-4)
