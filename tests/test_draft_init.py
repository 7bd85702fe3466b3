"""Where a draft starts, what it can write, what does not fit and is refused, and that its folder gives it back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import full_forward, tiny_model
from tiny_training import WORDS, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_draft
from decoding.model.vocabulary import write_output_tokens
from trainer.data.batch import Example
from trainer.drafts.start import InitialDraft, draft_from_target, initial_draft, write_draft
from trainer.recipe.draft import DraftSection

EXAMPLES = (
    Example((3, 1, 4, 1, 5, 9, 2, 6), (False,) * 4 + (True,) * 4, 4),
    Example((2, 7, 9, 8), (True,) * 4, 0),
    Example((12, 9, 5, 12, 6, 9), (True,) * 6, 0, (3, 3)),
)
"""Trained are 5 9 2 6, 7 9 8 and 9 5 6 9: 9 four times, 5 and 6 twice; the prompt and documents' first tokens never."""


def initial(target: PreTrainedModel, longest: int = 0, **section: Any) -> InitialDraft:
    parsed = DraftSection.model_validate(section)
    return initial_draft(CausalLM(target), tiny_tokenizer(), parsed, EXAMPLES, longest=longest)


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
    with pytest.raises(ValueError, match="the draft's tokenizer is not the target's: token"):
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
    message = rf"from draft\.init\.{named} reads at most 8 tokens, but texts here have up to 9: lower data\.max_length"
    with pytest.raises(ValueError, match=message):
        initial(target, longest=9, init=section)


# --- a trimmed vocabulary -------------------------------------------------------------------------------------------


def test_a_draft_writes_the_commonest_trained_tokens_and_what_ends_a_text() -> None:
    """Of the answers 9, 5 and 6 are commonest; 1 is the tokenizer's <eos> and 14 the target's own."""
    target = tiny_model("llama")
    target.generation_config.eos_token_id = [14]
    draft = initial(target, vocabulary=5)
    assert draft.output_tokens is not None and draft.output_tokens.tolist() == [1, 5, 6, 9, 14]
    assert draft.model.lm_head.weight.shape == (5, 16)
    whole = draft_from_target(target, 1)
    expected = full_forward(whole, [12, 3, 0])[:, [1, 5, 6, 9, 14]]
    torch.testing.assert_close(full_forward(draft.model, [12, 3, 0]), expected)


def test_a_trimmed_draft_is_trained_on_with_its_own_tokens(tmp_path: Path) -> None:
    """Token 18 is of its padding: the target has 16."""
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
