"""The start and the end of a parallel draft: its mask token, its parts, its folder, and going on with a stored one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_training import TEXTS, objective_for
from tiny_models import tiny_model
from tiny_training import WORDS, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_parallel_draft
from decoding.model.parallel import ParallelParts, is_parallel_folder
from trainer.drafts.mask_token import add_mask_token
from trainer.drafts.start import InitialDraft, initial_draft
from trainer.recipe.draft import DraftSection


def started(target: PreTrainedModel, **section: Any) -> InitialDraft:
    parsed = DraftSection.model_validate({"parallel": {"tokens": 4, "markov_rank": 3}, **section})
    return initial_draft(CausalLM(target), tiny_tokenizer(), parsed, TEXTS)


def embeddings(model: Any) -> Tensor:
    weight: Tensor = model.get_input_embeddings().weight
    return weight


def lm_head(model: Any) -> Tensor:
    weight: Tensor = model.get_output_embeddings().weight
    return weight


def test_the_mask_is_an_id_that_no_word_has_and_starts_as_the_mean_embedding() -> None:
    """16 words in a vocabulary padded to 20: token 16 is free."""
    model = tiny_model("llama", vocab=20)
    others = torch.cat((embeddings(model)[:16], embeddings(model)[17:])).detach().clone()
    assert add_mask_token(model, tiny_tokenizer()) == 16
    assert len(embeddings(model)) == len(lm_head(model)) == 20
    assert torch.allclose(embeddings(model)[16], others.mean(0), atol=1e-7)


@pytest.mark.parametrize("tied", [False, True])
def test_where_every_id_is_a_word_the_mask_is_one_more_row(tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    before, head = embeddings(model).detach().clone(), lm_head(model).detach().clone()
    assert add_mask_token(model, tiny_tokenizer()) == 16 == len(WORDS)
    assert torch.equal(embeddings(model)[:16], before) and torch.equal(lm_head(model)[:16], head)
    assert torch.allclose(embeddings(model)[16], before.mean(0), atol=1e-7)
    assert torch.allclose(lm_head(model)[16], head.mean(0), atol=1e-7)
    assert model.config.vocab_size == 17 and (lm_head(model) is embeddings(model)) == tied


@pytest.mark.parametrize(
    ("init", "hidden", "layers"),
    [
        ({"from_target": {"layers": [1, 0]}}, 16, 2),
        ({"from_config": {"hidden_size": 8, "num_hidden_layers": 1}}, 8, 1),
    ],
)
@pytest.mark.parametrize("vocabulary", [None, 6])
def test_every_start_gets_a_mask_and_parts_of_its_sizes(
    init: dict[str, Any], hidden: int, layers: int, vocabulary: int | None
) -> None:
    initial = started(tiny_model("llama"), init=init, vocabulary=vocabulary)
    assert initial.parts is not None and initial.model.config.num_hidden_layers == layers
    assert dict(initial.parts.config.shapes()) == {
        "markov.embedding.weight": (17, 3),
        "markov.output.weight": (17 if vocabulary is None else 6, 3),
        "reader.weight": (hidden, 16),
    }
    assert (initial.parts.config.tokens, initial.parts.config.mask_token) == (4, 16)
    assert not initial.parts.reader.weight.any() and not initial.parts.markov.output.weight.any()


@pytest.mark.parametrize("vocabulary", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_draft_is_a_plain_folder_and_parts_that_read_back_to_the_bit(
    tmp_path: Path, dtype: torch.dtype, vocabulary: int | None
) -> None:
    target = tiny_model("llama").to(dtype)
    objective = objective_for(target, vocabulary=vocabulary)
    objective.save(tmp_path)
    written = objective.writing_draft()
    assert is_parallel_folder(tmp_path)
    parts = ParallelParts.from_pretrained(tmp_path, dtype)
    assert parts.config == written.parts.config
    assert parts.state_dict().keys() == written.parts.state_dict().keys()
    assert all(torch.equal(tensor, written.parts.state_dict()[name]) for name, tensor in parts.state_dict().items())
    model = load_parallel_draft(str(tmp_path), CausalLM(target), tiny_tokenizer()).model
    assert model.vocab_size == 17 and model.dtype == dtype
    state = written.model.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.model.state_dict().items())


def test_the_mask_is_never_the_likeliest_token_of_a_finished_draft(tmp_path: Path) -> None:
    """Its logit is the mean of the others' after the last step, whatever the training made of their rows."""
    objective = objective_for(tiny_model("llama"))
    with torch.no_grad():
        lm_head(objective.module.draft)[:16] -= 5
    objective.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    logits = model(input_ids=torch.tensor([[4, 5, 6, 16, 16]])).logits
    assert torch.allclose(logits[..., 16], logits[..., :16].mean(-1), atol=1e-4)
    assert logits[..., :16].max(-1).values.gt(logits[..., 16]).all()


# --- going on with a stored one -------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A parallel draft of four tokens, with a bias of rank 3 and a reader."""
    objective_for(tiny_model("llama")).save(tmp_path / "parallel")
    return tmp_path / "parallel"


def test_a_stored_parallel_draft_goes_on_with_its_parts_its_mask_and_as_many_tokens_as_the_recipe_says(
    stored: Path,
) -> None:
    init = {"from_model": str(stored)}
    initial = started(tiny_model("llama"), init=init, parallel={"tokens": 6, "markov_rank": 3})
    found = ParallelParts.from_pretrained(stored, torch.float32)
    assert initial.parts is not None and initial.parts.config.tokens == 6 and initial.parts.config.mask_token == 16
    assert all(torch.equal(a, b) for a, b in zip(initial.parts.parameters(), found.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in initial.parts.parameters())
    assert len(embeddings(initial.model)) == 17
