"""Randomly damaged artefacts are either read or rejected in one sentence; nothing else happens."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from tiny_dspark import tiny_dflash, tiny_dspark
from tiny_eagle3 import tiny_eagle3
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_dspark, load_eagle3, load_heads
from trainer.export.exporter import export

MUTATIONS = 60
HOSTILE: tuple[Any, ...] = (
    *(-1, 0, 1, 3, 10**7, 2**63, True, None, 0.5, float("nan"), "x", "16", "../x", "a\0b", [], {}),
    *([[0]], [-1], {"x": 1}, [[0]] * 5000),
)


def mutate(folder: Path, draw: random.Random) -> str:
    """Damage one file of an artefact; return a description of the damage."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    path = draw.choice([file for file in files if not file.name.startswith(("tokenizer", "generation"))])
    content = path.read_bytes()
    match draw.choice(("value", "value", "value", "byte", "cut", "missing")):
        case "value":
            value = draw.choice(HOSTILE)
            begin = 8 if path.suffix == ".safetensors" else 0  # after the length of the header
            end = begin + int.from_bytes(content[:8], "little") if begin else len(content)
            known = json.loads(content[begin:end])
            node = draw.choice([known, *(held for held in known.values() if isinstance(held, dict) and held)])
            node[draw.choice([*node, "unheard_of"])] = value
            written = json.dumps(known).encode()
            path.write_bytes((len(written).to_bytes(8, "little") if begin else b"") + written + content[end:])
            return f"{path.name}: {str(value)[:40]} somewhere"
        case "byte":
            index = draw.randrange(len(content))
            path.write_bytes(content[:index] + draw.choice((b"\0", b"\xff", b"{", b'"')) + content[index + 1 :])
            return f"{path.name}: byte {index}"
        case "cut":
            length = draw.choice((0, 7, 8, draw.randrange(len(content)), len(content) - 1))
            path.write_bytes(content[:length])
            return f"{path.name}: cut at {length}"
    path.unlink()
    return f"{path.name}: missing"


@cache
def target() -> CausalLM:
    return CausalLM(tiny_model(vocab=128))


def write_heads(folder: Path) -> None:
    MedusaHeads(MedusaConfig(16, 128, num_heads=3, tree=((0,), (1,), (0, 0), (0, 2)))).save_pretrained(folder)


def write_draft(folder: Path, vocab: int = 128) -> None:
    tiny_model("llama", vocab=vocab).save_pretrained(folder, max_shard_size="8KB")
    byte_tokenizer().save_pretrained(folder)


LINEAR = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path, CausalLM], Any]]] = {
    "heads": (write_heads, load_heads),
    "DSpark": (lambda folder: tiny_dspark(target(), tree=((0,), (1,), (0, 0))).save_pretrained(folder), load_dspark),
    "DFlash": (lambda folder: tiny_dflash(target()).save_pretrained(folder), load_dspark),
    "EAGLE-3": (
        lambda folder: tiny_eagle3(target(), (0, 2, 3), rope_parameters=LINEAR).save_pretrained(folder),
        load_eagle3,
    ),
    "export": (write_draft, lambda folder, _: export(folder, folder.parent / f"out-{folder.name}", "draft")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_artefact_is_read_or_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    write, read = CASES[case]
    write(tmp_path / "whole")
    read(tmp_path / "whole", target())
    refusals = []
    for seed in range(MUTATIONS):
        broken = tmp_path / f"broken-{seed}"
        copytree(tmp_path / "whole", broken)
        done = mutate(broken, random.Random(seed))
        try:
            read(broken, target())
        except ValueError as error:
            refusals.append((done, str(error)))
    assert len(refusals) > MUTATIONS / 3
    for done, sentence in refusals:
        assert "\n" not in sentence and len(sentence.split()) > 4 and len(sentence) < 700, f"{done}: {sentence[:700]}"
