"""Tiny targets, heads and drafts on disk, with their provenance, and the faults that `headstart doctor` found."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_model
from tiny_parallel import tiny_parallel_draft
from tiny_tokenizer import byte_tokenizer

from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.doctor.finding import Finding
from trainer.doctor.reading import Skeleton, read_skeleton

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def save(folder: Path, template: str | None = TEMPLATE, shift: int = 0, **changes: Any) -> Path:
    """Write a tiny model and a tokenizer of one token per byte."""
    tiny_model(**{"vocab": 128, "max_position_embeddings": 256, **changes}).save_pretrained(folder)
    byte_tokenizer(template, shift=shift).save_pretrained(folder)
    return folder


def save_heads(folder: Path, target: Path | None, width: int = 16, vocab: int = 128) -> Path:
    """Write heads, trained on ``target`` by their provenance; None: without one."""
    heads = MedusaHeads.for_target(tiny_model(vocab=vocab, hidden_size=width), MedusaConfig(width, vocab))
    heads.save_pretrained(folder)
    if target is not None:
        write_provenance(folder, target)
    return folder


def write_provenance(folder: Path, target: Path) -> None:
    about = {"target": {"name": str(target), "fingerprint": stored_fingerprint(target)}, "recipe": {}}
    (folder / "provenance.json").write_text(json.dumps(about))


def write_parallel(folder: Path, target: Path, width: int = 16) -> Path:
    draft = tiny_parallel_draft(CausalLM(tiny_model(vocab=128, hidden_size=width)), max_position_embeddings=256, seed=1)
    draft.model.model.save_pretrained(folder)
    draft.parts.save_pretrained(folder)
    byte_tokenizer(TEMPLATE).save_pretrained(folder)
    write_provenance(folder, target)
    return folder


def changed(folder: Path, file: str, **values: Any) -> None:
    """Change keys of a JSON file."""
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def read(folder: Path) -> Skeleton:
    findings, found = read_skeleton(str(folder), torch.float32, trusted=False)
    assert found is not None, findings
    return found


def faults(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings if finding.status != "ok"}


def only(findings: list[Finding], check: str, status: str = "problem") -> Finding:
    """Return the only finding that is not ok."""
    assert {name: finding.status for name, finding in faults(findings).items()} == {check: status}, findings
    return faults(findings)[check]
