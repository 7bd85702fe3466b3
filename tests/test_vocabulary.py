"""A trimmed vocabulary changes the drafted tokens but never the target's output."""

from pathlib import Path

import pytest
import torch
from tiny_models import full_forward, tiny_model

from decoding.drafters import Drafter, DraftModelDrafter, DraftTreeDrafter
from decoding.files.folder import OUTPUT_TOKENS_NAME, write_output_tokens
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_draft
from decoding.model.vocabulary import most_frequent_tokens, trimmed_vocabulary, with_filled_vocabulary

KEPT = (1, 2, 5, 8, 9, 13)
PROMPTS = ([1, 2, 3], [5], [7, 7, 0, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1])


# --- which tokens --------------------------------------------------------------------------------------------------


def test_the_commonest_tokens_by_hand() -> None:
    texts = [[7, 7, 7, 3], [3, 9, 9, 5], [2]]  # 7 occurs three times, 3 and 9 occur twice, 2 and 5 once
    assert most_frequent_tokens(texts, 1, 10) == (7,)
    assert most_frequent_tokens(texts, 2, 10) == (3, 7), "of 3 and 9 the lower"
    assert most_frequent_tokens(texts, 4, 10) == (2, 3, 7, 9)
    assert most_frequent_tokens(texts, 3, 10, always=(0, 5)) == (0, 5, 7)
    assert most_frequent_tokens(texts, 7, 10) == (0, 1, 2, 3, 5, 7, 9), "the texts have five: then the lowest ids"
    assert most_frequent_tokens(texts, 99, 10) == tuple(range(10)), "there are no more"
    assert most_frequent_tokens([], 2, 10, always=(4,)) == (0, 4)
    with pytest.raises(ValueError, match="count is 1: use at least 1, and at least the 2"):
        most_frequent_tokens([[1]], 1, 10, (3, 4))


# --- a trimmed lm_head ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_logits_kept_are_the_models_own(family: str, tied: bool, biased: bool) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    if biased:
        model.get_output_embeddings().bias = torch.nn.Parameter(torch.arange(16.0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole = full_forward(model, [3, 15, 4])
    trimmed = trimmed_vocabulary(model, reversed(KEPT))
    assert trimmed.output_tokens is not None and tuple(trimmed.output_tokens.tolist()) == KEPT
    torch.testing.assert_close(full_forward(trimmed.model, [3, 15, 4]), whole[:, list(KEPT)])
    assert trimmed.vocab_size == 16, "it still reads every token"
    assert trimmed.model.get_input_embeddings().weight is model.get_input_embeddings().weight, "shared, not copied"
    assert torch.equal(full_forward(model, [3, 15, 4]), whole), "the model given stays as it is"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def drafters(draft: CausalLM) -> list[Drafter]:
    return [DraftModelDrafter(draft, 3), DraftTreeDrafter(draft, 3, 3, 12)]


# --- a whole vocabulary again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_that_was_cut_off_gets_the_mean_logit_and_never_the_best(tied: bool) -> None:
    draft = trimmed_vocabulary(tiny_model(tie_word_embeddings=tied), KEPT)
    filled = full_forward(with_filled_vocabulary(draft), list(range(16)))
    kept, others = filled[:, list(KEPT)], filled[:, [token for token in range(16) if token not in KEPT]]
    torch.testing.assert_close(kept, full_forward(draft.model, list(range(16))))
    torch.testing.assert_close(others, kept.mean(1, keepdim=True).expand_as(others))
    assert bool((others < kept.amax(1, keepdim=True)).all())
    model = tiny_model()
    assert with_filled_vocabulary(CausalLM(model)) is model
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.arange(16.0))
    bias: torch.Tensor = with_filled_vocabulary(trimmed_vocabulary(model, (1, 4))).get_output_embeddings().bias
    assert bias.tolist() == [2.5, 1.0, 2.5, 2.5, 4.0, *[2.5] * 11]


# --- a trimmed draft's folder --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_with_output_tokens_is_read_as_a_trimmed_draft(
    tmp_path: Path, tiny_llama: CausalLM, tied: bool
) -> None:
    model = tiny_model(seed=1, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    write_output_tokens(tmp_path, KEPT)
    draft = load_draft(str(tmp_path), tiny_llama, None)
    assert draft.output_tokens is not None and tuple(draft.output_tokens.tolist()) == KEPT
    torch.testing.assert_close(full_forward(draft.model, [3, 4]), full_forward(model, [3, 4])[:, list(KEPT)])
    read, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(full_forward(read, [3, 4]), full_forward(model, [3, 4])), "to transformers it is the whole draft"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "output_tokens.json of .* cannot be read"),
        ("[1, true]", "is not a list of token ids"),
        ("[3, 99]", "token 99 is unknown to the draft, which has tokens 0 to 15"),
    ],
)
def test_a_list_that_is_none_is_refused(
    tmp_path: Path, tiny_llama: CausalLM, content: str | None, complaint: str
) -> None:
    tiny_model().save_pretrained(tmp_path)
    write_output_tokens(tmp_path, KEPT)
    if content is None:
        (tmp_path / OUTPUT_TOKENS_NAME).unlink()
    else:
        (tmp_path / OUTPUT_TOKENS_NAME).write_text(content)
    with pytest.raises(ValueError, match=complaint):
        load_draft(str(tmp_path), tiny_llama, None)
