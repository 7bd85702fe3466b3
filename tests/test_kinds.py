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
from trainer.processes import Process
from trainer.recipe.pretrain import PretrainRecipe
from trainer.recipe.reading import parse_recipe
from trainer.recipe.reading import AnyRecipe
from trainer.run import kinds
from trainer.run.kinds import check_folders, kind_of
from trainer.run.train import run_recipe
from trainer.target.loading import StoredTarget, Target

ROOT = Path(str(trainer.__file__)).parent
CPU = torch.device("cpu")


def test_every_recipe_has_one_kind() -> None:
    assert kinds._KINDS.keys() == {*get_args(AnyRecipe)}


BY_KIND = ("Recipe", "Objective", "Kind", "Job")
"""Ends of the classes' names of which there is one for each kind."""


def last_name(node: ast.AST) -> str:
    """The name that an expression ends with: ``recipe`` of ``job.recipe``."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def asks_for_the_kind(node: ast.AST) -> bool:
    """By the class, by an attribute that not every kind has, or by the name of the kind."""
    if isinstance(node, ast.MatchClass):
        return last_name(node.cls).endswith(BY_KIND)
    if isinstance(node, ast.Compare):
        sides = (node.left, *node.comparators)
        return any(isinstance(s, ast.Attribute) and s.attr == "kind" and last_name(s.value) == "recipe" for s in sides)
    if not isinstance(node, ast.Call) or not node.args:
        return False
    if (called := last_name(node.func)) in ("isinstance", "issubclass"):
        return any(last_name(part).endswith(BY_KIND) for part in ast.walk(node.args[1]))
    return called in ("type", "getattr", "hasattr") and last_name(node.args[0]) in (
        "recipe",
        "objective",
        "job",
        "kind",
    )


@pytest.mark.parametrize(
    "question",
    [
        *("isinstance(job.recipe, DraftRecipe)", "isinstance(found, Target | heads.HeadsJob)", "type(recipe) is X"),
        *("getattr(recipe, 'target', None)", "job.recipe.kind == 'draft'", "match found:\n case DraftRecipe(): ..."),
    ],
)
def test_a_question_for_the_kind_is_seen(question: str) -> None:
    assert any(map(asks_for_the_kind, ast.walk(ast.parse(question))))


def test_nothing_but_the_dispatch_asks_for_the_kind_of_a_recipe_or_an_objective() -> None:
    """What differs by kind is a method of the kind."""
    files = sorted(ROOT.rglob("*.py"))
    asking = [file for file in files if any(map(asks_for_the_kind, ast.walk(ast.parse(file.read_text()))))]
    assert len(files) > 60 and asking == [ROOT / "run" / "kinds.py"]


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
    job = kind.assemble(CPU, Process(console=Console(file=io.StringIO())))
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
        Process(rank, 3, Console(file=heard)).say(f"by {rank}")
    assert heard.getvalue() == "by 0\n"
