"""Parallel drafts exported: whole in our own format, and plainly where other programs leave nothing out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_training import objective_for
from tiny_models import tiny_model
from tiny_training import tiny_tokenizer
from transformers import AutoModelForCausalLM

from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.loading import load_parallel_draft
from trainer.export.exporter import export

PLAIN = {"markov_rank": 0, "reads_target": False}


def saved(folder: Path, target_vocab: int = 16, **changes: Any) -> Path:
    objective_for(tiny_model("llama", vocab=target_vocab), **changes).save(folder)
    return folder


def test_our_own_format_holds_the_draft_and_its_parts_to_the_bit(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "run"), tmp_path / "out"
    summary = export(source, out, "headstart")
    assert "read back equal, to the bit" in summary.compared[0]
    target = CausalLM(tiny_model("llama"))
    ours, theirs = (load_parallel_draft(str(folder), target, tiny_tokenizer()) for folder in (source, out))
    assert ours.parts.config == theirs.parts.config
    for mine, other in ((ours.parts, theirs.parts), (ours.model.model, theirs.model.model)):
        state = other.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in mine.state_dict().items())
    assert stored_fingerprint(out) == stored_fingerprint(source)
    card = (out / "README.md").read_text()
    assert "# Parallel draft\n" in card and "--drafter parallel:DIR" in card
    assert "It drafts 4 tokens in one forward" in card and "A bias of rank 3 by the token before" in card
    assert "this target alone, whose last hidden state it reads" in card


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"reads_target": False}, "a bias by the token before"), ({"markov_rank": 0}, "a reader of the target's states")],
)
def test_a_plain_folder_of_one_that_would_be_read_in_part_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"has {reason}, which every program but this one.*give format headstart"):
        export(saved(tmp_path / "run", **changes), tmp_path / "out", "draft")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("target_vocab", "mask_token", "rows"), [(16, 16, 17), (20, 16, 20)])
def test_one_without_a_bias_and_a_reader_is_a_plain_folder_with_its_mask_token_for_vllm(
    tmp_path: Path, target_vocab: int, mask_token: int, rows: int
) -> None:
    """Of 16 words in a vocabulary of 20 an id is free; in one of 16 the mask is one more row."""
    source, out = saved(tmp_path / "run", target_vocab, **PLAIN), tmp_path / "out"
    export(source, out, "draft")
    assert json.loads((out / "config.json").read_text())["pard_token"] == mask_token
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == rows and not list(out.glob("parallel.safetensors"))
    card = (out / "README.md").read_text()
    assert '"num_speculative_tokens":4,"parallel_drafting":true' in card
    assert ("use_heterogeneous_vocab" in card) == (rows == 17)
    assert (
        load_parallel_draft(str(out), CausalLM(tiny_model("llama", vocab=target_vocab)), tiny_tokenizer()).tokens == 4
    )


def test_other_parts_are_another_fingerprint(tmp_path: Path) -> None:
    """A report of one draft is not put on the card of another that differs in its bias alone."""
    objective = objective_for(tiny_model("llama"))
    objective.save(tmp_path / "one")
    with torch.no_grad():
        objective.module.parts.markov.output.weight[0, 0] += 1
    objective.save(tmp_path / "other")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "other" / "model.safetensors"
    ).read_bytes()
    assert stored_fingerprint(tmp_path / "one") != stored_fingerprint(tmp_path / "other")
