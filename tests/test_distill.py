"""The distillation objective: how a draft starts, what it is compared on, and that only it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import counting_model, full_forward, tiny_model
from tiny_training import WORDS, Recorder, tiny_tokenizer, train_toy
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decoding.generate import DecodingConfig, decode
from decoding.target import CausalLM
from trainer.batch import Example, collate
from trainer.distill import DistillObjective, draft_from_target
from trainer.losses import divergence
from trainer.recipe import DraftSection

EXAMPLES = (
    Example((3, 1, 4, 1, 5, 9, 2, 6), (False,) * 4 + (True,) * 4, 4),
    Example((2, 7, 1, 8), (True,) * 4, 0),
)


def objective_for(model: PreTrainedModel, **section: Any) -> DistillObjective:
    return DistillObjective(CausalLM(model), tiny_tokenizer(), DraftSection(**section))


def write_draft(folder: Path, words: tuple[str, ...] = WORDS, **changes: Any) -> str:
    tiny_model("llama", **{"seed": 1, "num_hidden_layers": 1, **changes}).save_pretrained(folder)
    tiny_tokenizer(words=words).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed", "gpt-neox", "gpt2"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tvd"])
def test_a_draft_of_all_the_targets_layers_diverges_by_nothing_and_is_always_accepted(family: str, kind: str) -> None:
    objective = objective_for(tiny_model(family), layers=(0, 1), objective=kind)
    objective.module.eval()  # GPT-2 has dropout
    batch = collate(EXAMPLES)
    losses, accepted = objective.module(*objective.inputs(batch, step=0))
    assert losses.item() == pytest.approx(0, abs=1e-5)
    assert accepted.item() == pytest.approx(objective.counts(batch).item()) == 7


def test_such_a_draft_is_accepted_whole_by_the_decoding_loop() -> None:
    model = tiny_model("llama")
    objective = objective_for(model, layers=(0, 1), num_draft_tokens=3)
    steps = decode(CausalLM(model), objective.drafter(), [1, 2, 3], DecodingConfig(max_new_tokens=13)).steps
    assert [step.accepted for step in steps] == [0, 3, 3, 3]


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed", "gpt2", "gpt-neox"])
def test_a_draft_holds_the_chosen_layers_in_the_order_given(family: str) -> None:
    target = tiny_model(family)
    draft = draft_from_target(target, (-1, 0))
    theirs, ours = target.state_dict(), draft.state_dict()
    layered = 0
    for name, tensor in ours.items():
        swapped = name.replace(".0.", ".X.").replace(".1.", ".0.").replace(".X.", ".1.")
        layered += swapped != name
        assert torch.equal(tensor, theirs[swapped]), name
    assert layered >= 8 and draft.config.num_hidden_layers == 2


def test_a_draft_of_one_layer_runs_and_is_no_part_of_the_target() -> None:
    target = tiny_model("llama")
    draft = draft_from_target(target, (-1,))
    assert draft.config.num_hidden_layers == 1 and target.config.num_hidden_layers == 2
    assert full_forward(draft, [1, 2, 3]).shape == (3, 16)
    addresses = {tensor.data_ptr() for tensor in target.state_dict().values()}
    assert not addresses & {tensor.data_ptr() for tensor in draft.state_dict().values()}


def test_layer_types_follow_the_layers() -> None:
    """The mixed model has full attention in layer 0 and a sliding window in layer 1."""
    draft = draft_from_target(tiny_model("qwen2-mixed"), (1,))
    assert draft.config.layer_types == ["sliding_attention"]
    CausalLM(draft)


@pytest.mark.parametrize("layers", [(2,), (-3,), (0, 5), ()])
def test_layers_that_the_target_does_not_have_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as error:
        draft_from_target(tiny_model("llama"), layers)
    assert str(error.value) == f"draft.layers is {list(layers)} but the target has layers 0 to 1"


def test_what_predicts_a_trained_token_is_compared_and_nothing_else() -> None:
    """Positions 3 to 6 of the first text predict its answer; the second text's first token is predicted by none."""
    model = tiny_model("llama")
    objective = objective_for(model, layers=(0,))
    batch = collate(EXAMPLES)
    target_logits, passed_on = objective.inputs(batch, step=0)
    assert passed_on.labelled(1).nonzero().tolist() == [[0, 3], [0, 4], [0, 5], [0, 6], [1, 0], [1, 1], [1, 2]]
    assert objective.counts(batch).item() == 7
    expected = torch.cat([full_forward(model, EXAMPLES[0].tokens)[3:7], full_forward(model, EXAMPLES[1].tokens)[:3]])
    assert torch.allclose(target_logits, expected, atol=1e-5)


def test_the_loss_is_the_sum_of_divergences_at_those_positions() -> None:
    model = tiny_model("llama")
    objective = objective_for(model, layers=(0,), objective="reverse_kl", temperature=2.0)
    draft = draft_from_target(model, (0,)).eval()
    rows = [(full_forward(m, EXAMPLES[0].tokens)[3:7], full_forward(m, EXAMPLES[1].tokens)[:3]) for m in (draft, model)]
    expected = divergence(torch.cat(rows[0]), torch.cat(rows[1]), "reverse_kl", 2.0)
    assert objective.module(*objective.inputs(collate(EXAMPLES), step=0)).losses.item() == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_a_row_whose_only_trained_token_is_its_first_is_no_loss_and_can_be_differentiated() -> None:
    objective = objective_for(tiny_model("llama"), layers=(0,))
    batch = collate([Example((1, 2, 3), (True, False, False), 0)])
    losses = objective.module(*objective.inputs(batch, step=0)).losses
    losses.sum().backward()
    assert losses.item() == 0 and objective.counts(batch).item() == 0


def test_gradients_flow_to_the_draft_and_not_to_the_target() -> None:
    model = tiny_model("llama")
    objective = objective_for(model, layers=(0,))
    objective.module(*objective.inputs(collate(EXAMPLES), step=0)).losses.sum().backward()
    gradients = [parameter.grad for parameter in objective.module.parameters()]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())


def test_training_brings_the_draft_to_its_target_which_stays_byte_identical(tmp_path: Path) -> None:
    """One layer of the counting model counts as well: from random weights it learns to."""
    model = counting_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = objective_for(model, layers=(0,))
    with torch.no_grad():
        objective.module.draft.get_output_embeddings().weight.normal_(std=0.1)
    texts = [Example(tuple((start + i) % 16 for i in range(10)), (True,) * 10, 0) for start in range(16)]
    recorder = Recorder()
    train_toy(tmp_path, objective, recorder, texts, steps=40, learning_rate=3e-2, checkpoint_every=100)
    assert recorder.figures[1]["acceptance/divergence"] < 0.3 and recorder.figures[40]["acceptance/divergence"] > 0.9
    assert recorder.losses[40] < 0.1 < recorder.losses[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("draft_vocab", [12, 20])
def test_vocabularies_padded_to_other_sizes_are_compared_where_they_agree(tmp_path: Path, draft_vocab: int) -> None:
    """Target 16; the draft's lm_head has 12 or 20 rows over the same words: the first min of both count."""
    words = WORDS[:12]
    model = tiny_model("llama")
    folder = write_draft(tmp_path / "draft", words, vocab=draft_vocab)
    objective = DistillObjective(CausalLM(model), tiny_tokenizer(words=words), DraftSection(init=folder))
    draft = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens, shared = (3, 1, 4, 1, 5), min(16, draft_vocab)
    losses, _ = objective.module(*objective.inputs(collate([Example(tokens, (True,) * 5, 0)]), step=0))
    rows = [full_forward(m, tokens)[:4, :shared] for m in (draft, model)]
    assert losses.item() == pytest.approx(divergence(rows[0], rows[1], "forward_kl").item(), rel=1e-5)


def test_a_draft_from_a_folder_starts_as_it_is_there_in_fp32(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", dtype=torch.bfloat16)
    objective = objective_for(tiny_model("llama").to(torch.bfloat16), init=folder)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    ours = objective.module.draft.state_dict()
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, stored[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("<unk>", "<eos>", "<user>", "<assistant>", *"bacdefghijkl"), "token 'b' is 4 in the draft and 5 in the"),
        (
            ("<unk>", "<eos>", *(f"word{i}" for i in range(98))),
            "14 of the target's 16 tokens are missing and 98 are its",
        ),
    ],
)
def test_a_draft_with_another_tokenizer_is_refused_with_the_reason(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    folder = write_draft(tmp_path / "draft", words, vocab=len(words))
    with pytest.raises(ValueError, match="the draft's tokenizer is not the target's: ") as error:
        objective_for(tiny_model("llama"), init=folder)
    assert message in str(error.value) and "give a draft that was trained with the target's tokenizer" in str(
        error.value
    )


def test_a_draft_that_splits_text_in_another_way_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    tiny_model("llama").save_pretrained(folder)
    other = tiny_tokenizer()
    other.add_tokens(["("])  # split off inside a word, where the target's tokenizer splits at spaces alone
    other.save_pretrained(folder)
    with pytest.raises(ValueError, match="has the target's tokens but splits text in another way"):
        objective_for(tiny_model("llama"), init=str(folder))


def test_a_folder_without_a_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer could be read from"):
        objective_for(tiny_model("llama"), init=str(tmp_path / "none"))


def test_a_saved_draft_is_a_plain_folder_in_the_targets_dtype(tmp_path: Path) -> None:
    objective = objective_for(tiny_model("llama").to(torch.bfloat16), layers=(1,))
    objective.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16 and loaded.config.num_hidden_layers == 1
    trained: dict[str, Tensor] = objective.module.draft.state_dict()
    assert all(torch.equal(tensor, trained[name].bfloat16()) for name, tensor in loaded.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tiny_tokenizer().get_vocab()
    assert {parameter.dtype for parameter in objective.module.parameters()} == {torch.float32}
