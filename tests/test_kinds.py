"""One dispatch by kind: every recipe has its kind, and no other code asks which it is."""

import ast
import io
from pathlib import Path
from typing import get_args

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from tiny_training import recipe_content, write_corpus, write_target

import trainer
from trainer.heads.job import HeadsJob
from trainer.pretrain import PretrainKind
from trainer.recipe.pretrain import PretrainRecipe
from trainer.recipe.reading import parse_recipe
from trainer.recipe.recipe import AnyRecipe
from trainer.run import kinds
from trainer.run.kinds import check_folders, kind_of
from trainer.run.train import run_recipe
from trainer.target.loading import StoredTarget, Target
from trainer.terminal.place import Place

ROOT = Path(str(trainer.__file__)).parent
CPU = torch.device("cpu")


def test_every_recipe_has_one_kind() -> None:
    assert kinds._KINDS.keys() == {*get_args(AnyRecipe)}


def test_nothing_asks_for_the_class_of_a_recipe_or_an_objective() -> None:
    """A class of theirs stands in no isinstance: what differs by kind is a method of the kind."""
    asked, files = [], sorted(ROOT.rglob("*.py"))
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                asked += [(file, name) for name in names if name.endswith(("Recipe", "Objective", "Kind", "Job"))]
    assert len(files) > 60 and not asked


@pytest.mark.parametrize("kind", ["medusa", "draft"])
def test_a_recipe_on_a_target_is_read_by_its_tokenizer_and_keeps_it_loaded(tmp_path: Path, kind: str) -> None:
    found = kind_of(parse_recipe(recipe_content(tmp_path, kind)))
    assert found.target == found.tokenizer == str(tmp_path / "target")
    assert found.keeps_target and found.stored is None and [phase.steps for phase in found.phases()] == [4]


def test_a_model_from_nothing_has_no_target(tmp_path: Path) -> None:
    content = {name: value for name, value in recipe_content(tmp_path, "pretrain").items() if "dtype" not in name}
    del content["target"]
    recipe = parse_recipe({**content, "model": {"tokenizer": str(tmp_path)}})
    found = kind_of(recipe)
    assert isinstance(recipe, PretrainRecipe) and isinstance(found, PretrainKind)
    assert (found.target, found.tokenizer, found.keeps_target) == (None, str(tmp_path), False)


def test_the_same_recipe_twice_makes_the_same_weights(tmp_path: Path) -> None:
    """A pretraining run starts from random weights, which the seed decides, not the state of torch's generator."""
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    content = recipe_content(tmp_path, "pretrain")
    del content["target"], content["dtype"]
    model = {"tokenizer": str(tmp_path / "target"), "hidden_size": 16, "intermediate_size": 16}
    model |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    states = []
    for name in ("one", "two"):
        torch.rand(len(states) + 1)  # another state of the generator
        recipe = parse_recipe({**content, "model": model, "output": str(tmp_path / name)})
        final = run_recipe(recipe, Console(file=io.StringIO()))
        states.append((final / "model.safetensors").read_bytes())
        AcceleratorState._reset_state(True)
    assert states[0] == states[1]


def test_a_target_that_is_let_go_is_another_type_and_comes_back_as_it_was(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    features = {"folder": str(tmp_path / "features"), "keep_target": False}
    kind = kind_of(parse_recipe({**recipe_content(tmp_path, "medusa"), "features": features}))
    job = kind.assemble(CPU, Place(console=Console(file=io.StringIO())))
    assert isinstance(job, HeadsJob) and type(job.target) is StoredTarget and not kind.keeps_target
    again = job.target_again(CPU)
    assert type(again) is Target and again.let_go() == job.target


def test_a_folder_that_is_written_ahead_is_named_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    teacher = {"teacher": {"folder": str(tmp_path / "taken")}}
    with pytest.raises(ValueError, match=r"^draft\.teacher\.folder is .*taken"):
        check_folders(kind_of(parse_recipe({**recipe_content(tmp_path, "draft"), "draft": teacher})))


def test_only_the_first_of_several_processes_speaks() -> None:
    heard = io.StringIO()
    for rank in range(3):
        Place(rank, 3, Console(file=heard)).say(f"by {rank}")
    assert heard.getvalue() == "by 0\n"
