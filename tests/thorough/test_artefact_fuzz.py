"""Artefacts with something wrong in them are read, or refused in one sentence; nothing else comes of them."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from artefact_mutations import mutate
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_draft, load_heads, load_model, load_parallel_draft
from decoding.model.parallel import ParallelConfig, ParallelParts
from decoding.model.vocabulary import write_output_tokens
from trainer.export import export
from trainer.export.vllm import read_vllm_heads

MUTATIONS = 40
LONGEST = 700
"""Characters of a sentence, with two paths of a temporary folder in it."""


def write_heads(folder: Path) -> None:
    heads = MedusaHeads(MedusaConfig(16, 128, num_heads=3, tree=((0,), (1,), (0, 0), (0, 2))))
    heads.save_pretrained(folder)


def write_vllm_heads(folder: Path) -> None:
    write_heads(folder.parent / "own")
    export(folder.parent / "own", folder, "vllm")


def model_writer(family: str, sharded: bool = False, **changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        model = tiny_model(family, **{"vocab": 128, **changes})
        model.save_pretrained(folder, max_shard_size="8KB" if sharded else "1GB")
        byte_tokenizer().save_pretrained(folder)

    return write


def write_trimmed(folder: Path) -> None:
    model_writer("llama")(folder)
    write_output_tokens(folder, range(0, 128, 2))


def write_adapters(folder: Path) -> None:
    base = folder.parent / "base"
    model_writer("llama")(base)
    adapted = get_peft_model(load_model(str(base), torch.float32), LoraConfig(r=5, target_modules=["q_proj"]))  # type: ignore[arg-type]  # peft's stubs
    adapted.save_pretrained(str(folder))
    byte_tokenizer().save_pretrained(folder)


def read_heads(folder: Path, target: CausalLM) -> None:
    load_heads(folder, target)


def read_draft(folder: Path, target: CausalLM) -> None:
    load_draft(str(folder), target, byte_tokenizer())


def exporter(format: str) -> Callable[[Path, CausalLM], None]:
    return lambda folder, target: export(folder, folder.parent / "out", format, overwrite=True) and None


def write_parallel(folder: Path) -> None:
    model_writer("llama", vocab=129)(folder)
    ParallelParts(ParallelConfig(4, 128, 129, 128, 16, markov_rank=3, target_hidden_size=16)).save_pretrained(folder)


def read_parallel(folder: Path, target: CausalLM) -> None:
    load_parallel_draft(str(folder), target, byte_tokenizer())


CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path, CausalLM], Any]]] = {
    "heads": (write_heads, read_heads),
    "exported heads": (write_heads, exporter("headstart")),
    "vllm heads": (write_vllm_heads, lambda folder, target: read_vllm_heads(folder)),
    "draft": (model_writer("llama"), read_draft),
    "tied draft": (model_writer("llama", tie_word_embeddings=True), read_draft),
    "parallel draft": (write_parallel, read_parallel),
    "sharded draft": (model_writer("llama", sharded=True), read_draft),
    "trimmed draft": (write_trimmed, read_draft),
    "exported draft": (model_writer("llama"), exporter("draft")),
    "adapters": (write_adapters, read_draft),
    "gpt2": (model_writer("gpt2"), read_draft),
    "qwen3-moe": (model_writer("qwen3-moe"), read_draft),
    "gemma3": (model_writer("gemma3"), read_draft),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_artefact_is_read_or_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    write, read = CASES[case]
    target = CausalLM(tiny_model(vocab=128))
    write(tmp_path / "whole")
    read(tmp_path / "whole", target)
    refusals: list[tuple[str, str]] = []
    for seed in range(MUTATIONS):
        broken = tmp_path / f"broken-{seed}"
        copytree(tmp_path / "whole", broken)
        done = mutate(broken, seed)
        try:
            read(broken, target)
        except ValueError as error:
            refusals.append((done, str(error)))
    assert len(refusals) > MUTATIONS / 3
    for done, sentence in refusals:
        assert "\n" not in sentence and len(sentence) < LONGEST, f"{done}: {sentence[:LONGEST]}"
        assert len(sentence.split()) > 4, f"{done}: {sentence}"
