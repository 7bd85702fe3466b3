"""Jobs of every kind: a target that is released and loaded again, and messages printed only once."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_training import recipe_content, write_corpus, write_rows, write_target

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
