"""Folders of parallel drafts: written, read back to the bit, and refused in one sentence before anything runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoding.model.parallel import ParallelConfig, ParallelDraft, ParallelParts
from safetensors.torch import load_file, save_file
from tiny_models import full_forward, naive_greedy, tiny_model
from tiny_parallel import tiny_parallel_draft
from tiny_tokenizer import byte_tokenizer

from decoding.drafters import ParallelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_draft, load_parallel_draft
from decoding.model.vocabulary import trimmed_vocabulary, write_output_tokens

VOCAB = 130


def target() -> CausalLM:
    return CausalLM(tiny_model(vocab=VOCAB))


def written(folder: Path, rank: int = 3, reads_target: bool = True) -> ParallelDraft:
    """Write a draft as a training run does."""
    draft = tiny_parallel_draft(target(), rank=rank, reads_target=reads_target)
    draft.model.model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    draft.parts.save_pretrained(folder)
    return draft


@pytest.mark.parametrize(("rank", "reads_target"), [(0, False), (3, False), (0, True), (3, True)])
def test_a_draft_is_read_back_to_the_bit(tmp_path: Path, rank: int, reads_target: bool) -> None:
    draft = written(tmp_path, rank, reads_target)
    read = load_parallel_draft(str(tmp_path), target(), byte_tokenizer())
    assert read.parts.config == draft.parts.config and read.reads_target == reads_target
    found, wanted = read.parts.state_dict(), draft.parts.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(full_forward(read.model.model, [1, 2, VOCAB]), full_forward(draft.model.model, [1, 2, VOCAB]))
    assert not any(parameter.requires_grad for parameter in read.parts.parameters())
    assert (tmp_path / "parallel.safetensors").is_file() == bool(rank or reads_target)


def test_a_draft_with_parts_is_no_ordinary_draft(tmp_path: Path) -> None:
    for name, rank, reads_target in (("bias", 3, False), ("reader", 0, True)):
        written(tmp_path / name, rank, reads_target)
        with pytest.raises(ValueError, match=rf"is a parallel draft with a bias or .* give it as parallel:{tmp_path}"):
            load_draft(str(tmp_path / name), target(), byte_tokenizer())


def test_a_trimmed_draft_has_a_bias_of_its_own_tokens_alone(tmp_path: Path) -> None:
    kept, model, wide = [1, 2, 5, 7], tiny_model(vocab=VOCAB + 1, seed=1), target()
    parts = ParallelParts(ParallelConfig(3, VOCAB, VOCAB + 1, len(kept), 16, markov_rank=2))
    parts.markov.output.weight.data.normal_()  # type: ignore[union-attr]
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    write_output_tokens(tmp_path, kept)
    parts.save_pretrained(tmp_path)
    read = load_parallel_draft(str(tmp_path), wide, byte_tokenizer())
    text = Engine(wide, ParallelDrafter(read)).decode([3, 1], DecodingConfig(10))
    assert text.tokens == naive_greedy(wide.model, [3, 1], 10)
    with pytest.raises(ValueError, match="writes 4, but its model has 16, 131 and 3"):
        ParallelDraft(trimmed_vocabulary(model, kept[:3]), parts)


def test_a_folder_without_parts_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tiny_model(vocab=VOCAB).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no parallel draft \(parallel.json is missing\): give draft:"):
        load_parallel_draft(str(tmp_path), target(), None)
    with pytest.raises(ValueError, match="there is no folder"):
        load_parallel_draft(str(tmp_path / "nowhere"), target(), None)


def _config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "parallel.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / "parallel.safetensors")
        change(tensors)
        save_file(tensors, folder / "parallel.safetensors")

    return write


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "sizes that no memory holds": (_config(vocab_size=10**12, markov_rank=10**6), "markov.embedding.weight"),
    "a mask that the draft cannot read": (_config(mask_token=VOCAB + 1), "mask_token is 131, but the draft reads 131"),
    "states of another width": (_config(target_hidden_size=24), "reads hidden states of size 24 but the target's have"),
    "a missing tensor": (_tensors(lambda tensors: tensors.pop("reader.weight")), "reader.weight"),
    "a tensor too many": (_tensors(lambda tensors: tensors.update(more=torch.ones(2))), "more"),
    "no number": (_tensors(lambda tensors: tensors["reader.weight"].fill_(torch.nan)), "NaN or infinite"),
    "no weights": (lambda folder: (folder / "parallel.safetensors").unlink(), "cannot be read as safetensors"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    written(tmp_path)
    change, problem = BROKEN[name]
    change(tmp_path)
    with pytest.raises(ValueError, match=problem) as raised:
        load_parallel_draft(str(tmp_path), target(), byte_tokenizer())
    assert "\n" not in str(raised.value)
