"""The distillation objective: what a draft is compared on, and that only it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distilling import EXAMPLES, AllOnDisk, expected_loss, labelled_logits, objective_for, sums_of
from loss_references import divergence
from tiny_models import counting_model, full_forward, tiny_model
from tiny_training import WORDS, Recorder, tiny_tokenizer, train_toy
from transformers import AutoModelForCausalLM

from decoding.model.causal_lm import CausalLM
from decoding.model.forward import capture_lm_head_input
from decoding.model.loading import load_draft
from trainer.data.batch import Example, collate, pack
from trainer.drafts.distill import DistillObjective
from trainer.drafts.start import initial_draft
from trainer.recipe.draft import DraftSection

ALL = {"from_target": {"layers": [0, 1]}}


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed", "gpt-neox", "gpt2"])
@pytest.mark.parametrize("kind", ["forward_kl", "acceptance"])
def test_a_draft_of_all_the_targets_layers_diverges_by_nothing_and_is_always_accepted(family: str, kind: str) -> None:
    objective = objective_for(tiny_model(family), init=ALL, loss={kind: 1})
    sums = sums_of(objective, collate(EXAMPLES))
    assert sums.losses.item() == pytest.approx(0, abs=1e-4)
    assert sums.hits.item() == pytest.approx(7)
    assert objective.counts(collate(EXAMPLES)).item() == 7


def test_what_predicts_a_trained_token_is_compared_and_nothing_else() -> None:
    """Positions 3 to 6 of the first text predict its answer; the second text's first token is predicted by none."""
    model, batch = tiny_model("llama"), collate(EXAMPLES)
    objective = objective_for(model)
    (inputs,) = objective.inputs(batch, step=0)
    assert inputs.places.tolist() == [3, 4, 5, 6, 8, 9, 10]  # of rows of 8
    expected = torch.cat(
        [full_forward(model, EXAMPLES[0].tokens.tolist())[3:7], full_forward(model, EXAMPLES[1].tokens.tolist())[:3]]
    )
    assert torch.allclose(inputs.teacher.known_logits(0, 7, 1.0).logits, expected, atol=1e-5)


def test_training_brings_the_draft_to_its_target_which_stays_byte_identical(tmp_path: Path) -> None:
    """One layer of the counting model counts as well: from random weights it learns to."""
    model = counting_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = objective_for(model)
    with torch.no_grad():
        objective.module.draft.get_output_embeddings().weight.normal_(std=0.1)
    texts = [Example(tuple((start + i) % 16 for i in range(10)), (True,) * 10, 0) for start in range(16)]
    recorder = Recorder()
    train_toy(tmp_path, objective, recorder, texts, steps=40, learning_rate=3e-2, checkpoint_every=100)
    assert recorder.figures[1]["acceptance/logits"] < 0.3 and recorder.figures[40]["acceptance/logits"] > 0.9
    assert recorder.losses[40] < 0.1 < recorder.losses[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("draft_vocab", [12, 20])
def test_vocabularies_padded_to_other_sizes_are_compared_where_they_agree(tmp_path: Path, draft_vocab: int) -> None:
    """Target 16; the draft's lm_head has 12 or 20 rows over the same words: the first min of both count."""
    model, folder = tiny_model("llama"), tmp_path / "draft"
    tiny_model("llama", seed=1, num_hidden_layers=1, vocab=draft_vocab).save_pretrained(folder)
    tiny_tokenizer(words=WORDS[:12]).save_pretrained(folder)
    words, tokens, shared = WORDS[:12], (3, 1, 4, 1, 5), min(16, draft_vocab)
    objective = objective_for(model, words=words, init={"from_model": str(folder)})
    batch = collate([Example(tokens, (True,) * 5, 0)])
    own = labelled_logits(AutoModelForCausalLM.from_pretrained(folder).eval(), batch)[:, :shared]
    expected = divergence(own, labelled_logits(model, batch), "forward_kl", tokens=torch.arange(shared))
    assert sums_of(objective, batch).losses.item() == pytest.approx(expected.item(), rel=1e-5)


# --- what a draft is trained by: mixed losses on any family, hidden states, trimmed vocabularies ----------------------


BATCH = collate(EXAMPLES)
MIX = {"forward_kl": 2.0, "acceptance": 0.25}


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed", "gpt2", "gpt-neox", "granite", "gemma2"])
def test_loss_and_gradients_are_those_of_the_models_own_logits(family: str) -> None:
    """Granite divides its logits, Gemma-2 caps them: both sides' are formed here, and must come out as the models'."""
    target = tiny_model(family)
    objective = objective_for(target, loss=MIX)
    draft = objective.module.draft
    sums = sums_of(objective, BATCH)
    sums.total.backward()
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
