"""Jobs of every kind: a target that is released and loaded again, and layers that run again."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_training import recipe_content, write_corpus, write_rows, write_target
from torch import Tensor

from decoding.errors import UserError
from trainer.data.batch import collate
from trainer.processes import Process
from trainer.recipe.reading import parse_recipe
from trainer.run.job import Job, assemble
from trainer.target.loading import StoredTarget, Target

CPU = torch.device("cpu")
POLICY = {"loop_trains": "all", "max_new_tokens": 4}
DSPARK = {"layers": 2, "block_size": 4, "taps": [0], "mask_token": "<user>"}


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


@pytest.mark.parametrize("draft", [{}, {"dspark": DSPARK}, {"eagle3": {"steps": 4, "taps": [0]}}])
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


@pytest.mark.parametrize("draft", [{}, {"dspark": DSPARK}])
def test_prompts_without_answers_suffice_if_every_text_is_written_in_training(
    tmp_path: Path, draft: dict[str, Any]
) -> None:
    """The last row's prompt has `max_length` tokens, so a row with an answer would be skipped too."""
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    content, rows = recipe_content(tmp_path, "draft"), [{"prompt": "a b c"}, {"prompt": "d"}, {"prompt": "e " * 32}]
    content["data"] |= {"train": write_rows(tmp_path / "prompts.jsonl", rows)}

    def job(**policy: float) -> Job:
        recipe = parse_recipe({**content, "draft": {**draft, "policy": {**POLICY, **policy}}})
        return assemble(recipe, CPU, Process(console=Console(file=io.StringIO())), begins=True)

    source = (made := job(target=1, loop=1)).source
    assert source.write(0, range(8))["generated/texts"] == 8 and made.dataset.account.skipped == 1
    texts = [item.example for item in source.examples_at(0, range(8))]
    assert {text.prompt_length for text in texts} == {1, 3} and all(text.trained.any() for text in texts)
    assert all(weight.isfinite().all() for weight in made.objective.module.parameters())
    with pytest.raises(UserError, match=r"line 1: the row has the fields \['prompt'\], but training needs"):
        job(offline=1, loop=1)
    draft = {**draft, "vocabulary": 8}
    with pytest.raises(
        UserError, match=r"draft\.vocabulary chooses tokens from answers, but the data has only prompts"
    ):
        job(loop=1)
    content["data"] |= {"max_length": 8, "train": write_rows(tmp_path / "long.jsonl", rows[2:])}
    with pytest.raises(UserError, match=r"no prompt has less than 8 tokens: raise data\.max_length"):
        job(loop=1)
