"""The distillation objective compares a draft with its target at the right tokens, and only the draft learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distilling import EXAMPLES, AllOnDisk, expected_loss, labelled_logits, objective_for, sums_of
from loss_references import divergence
from tiny_models import counting_model, full_forward, tiny_model
from tiny_training import WORDS, Recorder, tiny_tokenizer, train_toy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decoding.files.folder import write_output_tokens
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import capture_lm_head_input
from decoding.model.loading import load_draft
from trainer.data.batch import Example, collate, pack
from trainer.drafts.distill import DistillObjective
from trainer.drafts.start import InitialDraft, draft_from_target, initial_draft, write_draft
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
    """Positions 3 to 6 of the first text predict its answer;
    no position predicts the first token of the second text.
    """
    model, batch = tiny_model("llama"), collate(EXAMPLES)
    objective = objective_for(model)
    (inputs,) = objective.inputs(batch, step=0)
    assert inputs.positions.tolist() == [3, 4, 5, 6, 8, 9, 10]  # of rows of 8
    expected = torch.cat(
        [full_forward(model, EXAMPLES[0].tokens.tolist())[3:7], full_forward(model, EXAMPLES[1].tokens.tolist())[:3]]
    )
    assert torch.allclose(inputs.teacher.known_logits(0, 7, 1.0).logits, expected, atol=1e-5)


def test_training_brings_the_draft_to_its_target_which_stays_byte_identical(tmp_path: Path) -> None:
    """One layer of the counting model can also count, and learns to count from random weights."""
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
    """The target has 16 tokens and the draft's lm_head has 12 or 20 rows over the same words; only the tokens that both
    models have count.
    """
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
    """Granite divides its logits, and Gemma-2 caps them.

    The loss forms the logits of both sides, which must equal the logits of the models.
    """
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
    draft = objective.decoding_copy()
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


SOME = (
    Example((3, 1, 4, 1, 5, 9, 2, 6), (False,) * 4 + (True,) * 4, 4),
    Example((2, 7, 9, 8), (True,) * 4, 0),
    Example((12, 9, 5, 12, 6, 9), (True,) * 6, 0, (3, 3)),
)
"""The trained tokens are 5 9 2 6, 7 9 8 and 9 5 6 9: 9 occurs four times, 5 and 6 twice. The prompt and the first
tokens of documents are not trained."""


def initial(target: PreTrainedModel, longest: int = 0, **section: Any) -> InitialDraft:
    parsed = DraftSection.model_validate(section)
    return initial_draft(CausalLM(target), tiny_tokenizer(), parsed, SOME, longest=longest)


def draft_folder(folder: Path, words: tuple[str, ...] = WORDS, **changes: Any) -> str:
    tiny_model("llama", **{"seed": 1, "num_hidden_layers": 1, **changes}).save_pretrained(folder)
    tiny_tokenizer(words=words).save_pretrained(folder)
    return str(folder)


# --- from the target -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("count", "chosen"), [(1, [0]), (2, [0, 7]), (3, [0, 4, 7]), (5, [0, 2, 4, 5, 7])])
def test_a_number_of_layers_is_spread_evenly_from_first_to_last(count: int, chosen: list[int]) -> None:
    target = tiny_model("llama", num_hidden_layers=8)
    draft = draft_from_target(target, count)
    for ours, theirs in enumerate(chosen):
        expected = target.model.layers[theirs].mlp.up_proj.weight
        assert torch.equal(draft.model.layers[ours].mlp.up_proj.weight, expected)
    assert len(draft.model.layers) == count


# --- from a config -------------------------------------------------------------------------------------------------


def test_a_draft_from_a_config_is_the_targets_but_for_what_it_says() -> None:
    target = tiny_model("llama", hidden_size=32, num_attention_heads=4, num_key_value_heads=4)
    changes = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 2}
    draft = initial(target, init={"from_config": changes}).model
    differing = {key for key, value in draft.config.to_dict().items() if target.config.to_dict()[key] != value}
    assert differing - {"dtype"} == {*changes, "head_dim", "num_key_value_heads"}
    assert (draft.config.head_dim, draft.config.num_key_value_heads) == (12, 2), "as the target's follow from its own"
    assert draft.config.vocab_size == 16 and full_forward(draft, [1, 2]).shape == (2, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden_size": 8}, "cannot set 'hiden_size' .* such as hidden_size"),
        ({"hidden_size": 15}, r"The hidden size \(15\) is not a multiple of the number of attention heads \(2\)"),
        ({"head_dim": 7}, "is not a valid llama config: RoPE requires an even rotary dimension"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^draft\.init\.from_config.*" + message) as error:
        initial(tiny_model("llama"), init={"from_config": changes})
    assert "\n" not in str(error.value)


# --- from a folder -------------------------------------------------------------------------------------------------


def test_a_draft_with_another_tokenizer_is_refused_with_the_reason(tmp_path: Path) -> None:
    words = ("<unk>", "<eos>", "<user>", "<assistant>", *"bacdefghijkl")
    folder = draft_folder(tmp_path / "draft", words, vocab=len(words))
    with pytest.raises(ValueError, match="the draft's tokenizer differs from the target's tokenizer: token"):
        initial(tiny_model("llama"), init={"from_model": folder})


@pytest.mark.parametrize(
    ("init", "named"),
    [
        ({"from_config": {"max_position_embeddings": 8}}, "from_config"),
        ({"from_model": "FOLDER"}, "from_model"),
        ({}, "from_target"),
    ],
)
def test_a_context_shorter_than_what_will_be_read_is_refused(tmp_path: Path, init: dict[str, Any], named: str) -> None:
    folder = draft_folder(tmp_path / "draft", max_position_embeddings=8)
    section = {key: folder if value == "FOLDER" else value for key, value in init.items()}
    target = tiny_model("llama", max_position_embeddings=8)
    initial(target, longest=8, init=section)
    message = rf"from draft\.init\.{named} reads at most 8 tokens, but this run has texts of 9: lower data\.max_length"
    with pytest.raises(ValueError, match=message):
        initial(target, longest=9, init=section)


# --- a trimmed vocabulary -------------------------------------------------------------------------------------------


def test_a_draft_writes_the_commonest_trained_tokens_and_what_ends_a_text() -> None:
    """In the answers 9, 5 and 6 are the most frequent tokens; 1 is the tokenizer's <eos>, and 14 ends a text of the
    target.
    """
    target = tiny_model("llama")
    target.generation_config.eos_token_id = [14]
    draft = initial(target, vocabulary=5)
    assert draft.output_tokens is not None and draft.output_tokens.tolist() == [1, 5, 6, 9, 14]
    assert draft.model.lm_head.weight.shape == (5, 16)
    whole = draft_from_target(target, 1)
    expected = full_forward(whole, [12, 3, 0])[:, [1, 5, 6, 9, 14]]
    torch.testing.assert_close(full_forward(draft.model, [12, 3, 0]), expected)


def test_a_trimmed_draft_is_trained_on_with_its_own_tokens(tmp_path: Path) -> None:
    """Token 18 is padding, because the target has 16 tokens."""
    folder = draft_folder(tmp_path / "draft", vocab=20)
    write_output_tokens(folder, (1, 5, 9, 18))
    draft = initial(tiny_model("llama"), init={"from_model": folder})
    assert draft.output_tokens is not None and draft.output_tokens.tolist() == [1, 5, 9]
    assert draft.model.lm_head.weight.requires_grad and draft.model.lm_head.weight.shape == (3, 16)
    with pytest.raises(ValueError, match=r"draft\.vocabulary is 3 but .* is already trimmed to 4 tokens: leave"):
        initial(tiny_model("llama"), vocabulary=3, init={"from_model": folder})


# --- its folder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [None, 6])
@pytest.mark.parametrize("tied", [False, True])
def test_a_written_draft_is_read_back_to_the_bit(tmp_path: Path, vocabulary: int | None, tied: bool) -> None:
    target = CausalLM(tiny_model("llama", tie_word_embeddings=tied).to(torch.bfloat16))
    made = initial(target.model, vocabulary=vocabulary)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # it was trained
    finished = CausalLM(made.model.to(torch.bfloat16), made.output_tokens)
    finished.model.config.dtype = torch.bfloat16
    write_draft(finished, tiny_tokenizer(), tmp_path)
    read = load_draft(str(tmp_path), target, tiny_tokenizer())
    assert (read.output_tokens is None) == (vocabulary is None)
    if read.output_tokens is not None and made.output_tokens is not None:
        assert torch.equal(read.output_tokens, made.output_tokens)
    trained = finished.model.state_dict()
    assert read.dtype == torch.bfloat16 and read.model.state_dict().keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in read.model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tiny_tokenizer().get_vocab()


def test_to_transformers_a_trimmed_drafts_folder_is_a_whole_model_that_writes_the_same_text(tmp_path: Path) -> None:
    made = initial(tiny_model("llama"), vocabulary=6)
    assert made.output_tokens is not None
    write_draft(CausalLM(made.model, made.output_tokens), tiny_tokenizer(), tmp_path)
    plain, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    texts = torch.randint(16, (50, 7)).tolist()
    for text in texts:
        logits = full_forward(plain, text)
        assert torch.equal(logits.argmax(-1), made.output_tokens[full_forward(made.model, text).argmax(-1)])
