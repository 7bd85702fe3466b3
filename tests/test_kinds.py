"""Jobs of every kind: a target that is released and loaded again, and layers that run again."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_training import recipe_content, write_corpus, write_rows, write_target
from torch import Tensor

from trainer.data.batch import collate
from trainer.processes import Process
from trainer.recipe.reading import parse_recipe
from trainer.run.job import assemble
from trainer.target.loading import StoredTarget, Target

CPU = torch.device("cpu")


def test_a_target_that_is_let_go_is_another_type_and_comes_back_as_it_was(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    features = {"folder": str(tmp_path / "features"), "keep_target": False}
    recipe = parse_recipe({**recipe_content(tmp_path, "medusa"), "features": features})
    job = assemble(recipe, CPU, Process(console=Console(file=io.StringIO())))
    assert type(job.target) is StoredTarget
    again = job.target_again(CPU)
    assert type(again) is Target and again.let_go() == job.target


@pytest.mark.parametrize("kind", ["medusa", "draft"])
def test_rows_are_trained_to_end_as_the_target_ends_texts(tmp_path: Path, kind: str) -> None:
    """The end token is 3 in the generation config and 1 in the tokenizer."""
    write_target(tmp_path / "target", eos_token_id=3)
    write_corpus(tmp_path)
    rows = write_rows(tmp_path / "answers.jsonl", [{"prompt": "a b", "answer": "c d"}] * 8)
    content = recipe_content(tmp_path, kind)
    recipe = parse_recipe({**content, "data": {**content["data"], "train": rows}})
    job = assemble(recipe, CPU, Process(console=Console(file=io.StringIO())))
    assert job.dataset.examples[0].tokens.tolist() == [4, 5, 6, 7, 3]


@pytest.mark.parametrize(
    "draft",
    [
        {},
        {"dspark": {"layers": 2, "block_size": 4, "taps": [0], "mask_token": "<user>"}},
        {"eagle3": {"steps": 4, "taps": [0]}},
    ],
)
def test_layers_that_run_again_store_less_and_give_equal_losses_and_gradients(
    tmp_path: Path, draft: dict[str, Any]
) -> None:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    stored, found = [0, 0], list[Any]()
    for again in (False, True):
        content = {**recipe_content(tmp_path, "draft"), "draft": {**draft, "gradient_checkpointing": again}}
        job = assemble(parse_recipe(content), CPU, Process(console=Console(file=io.StringIO())))

        def pack(tensor: Tensor, again: bool = again) -> Tensor:
            stored[again] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            sums = job.objective.module(*job.objective.inputs(collate(job.dataset.examples[:4]), 0))
        sums.total.backward()
        trained = [parameter for parameter in job.objective.module.parameters() if parameter.requires_grad]
        found.append([sums.losses, *(parameter.grad for parameter in trained)])
    assert stored[True] < stored[False] / 2
    assert all(map(torch.equal, *found)) and found[0][1].any()
