"""A target rounded to int8 while it teaches: what is rounded, and what is made of the target as it was."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_models import full_forward, tiny_model
from tiny_training import recipe_content, write_corpus, write_target
from torch import nn

from decoding.dtypes import quantised
from decoding.model.fingerprint import stored_fingerprint
from trainer.data.batch import collate
from trainer.drafts.distill import DistillObjective
from trainer.job import Job
from trainer.processes import Process
from trainer.recipe.reading import parse_recipe
from trainer.run.assemble import assemble
from trainer.target.loading import Target


@pytest.fixture(autouse=True)
def halving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for torchao: to round is to halve every weight."""

    def quantize_(model: nn.Module, config: object, wanted: Any) -> None:
        for name, module in model.named_modules():
            if wanted(module, name):
                module.weight.data.mul_(0.5)

    fake = SimpleNamespace(quantize_=quantize_, Int8WeightOnlyConfig=lambda: None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)


def test_all_linear_layers_are_rounded_and_the_lm_head_if_that_is_asked_for() -> None:
    for lm_head in (True, False):
        model, before = tiny_model(), tiny_model()
        assert quantised(model, lm_head) is model
        for (name, ours), theirs in zip(model.named_parameters(), before.parameters(), strict=True):
            is_rounded = "_proj" in name or (lm_head and name == "lm_head.weight")
            assert torch.equal(ours, theirs * 0.5 if is_rounded else theirs), name


def job_of(folder: Path, **changes: Any) -> Job:
    write_target(folder / "target")
    write_corpus(folder)
    recipe = parse_recipe({**recipe_content(folder, "draft"), **changes})
    job = assemble(recipe, torch.device("cpu"), Process(console=Console(file=io.StringIO())))
    assert isinstance(job.objective, DistillObjective) and isinstance(job.target, Target)
    return job


def test_a_rounded_target_teaches_and_a_draft_is_made_of_it_as_it_was(tmp_path: Path) -> None:
    whole, job = job_of(tmp_path), job_of(tmp_path, quantise="int8")
    rounded = quantised(tiny_model(), lm_head=False)
    assert torch.equal(full_forward(job.target.model.model, [4, 5]), full_forward(rounded, [4, 5]))
    drafts = [objective.draft_for_decoding().model for objective in (job.objective, whole.objective)]
    assert torch.equal(full_forward(drafts[0], [4, 5]), full_forward(drafts[1], [4, 5]))
    assert job.target.fingerprint == whole.target.fingerprint == stored_fingerprint(tmp_path / "target")
    batch = collate(job.dataset.examples[:2], range(2))
    (ours,), (theirs,) = (objective.inputs(batch, 0) for objective in (job.objective, whole.objective))
    assert not torch.equal(ours.labels[0].teacher.hidden, theirs.labels[0].teacher.hidden)
    assert torch.equal(ours.labels[0].teacher.weight, theirs.labels[0].teacher.weight)
