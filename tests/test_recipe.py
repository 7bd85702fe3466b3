"""Recipes are typed, can be overridden by section.key=value,
and report every mistake in one sentence with the remedy.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.reading import load_recipe, parse_recipe, read_yaml

ROOT = Path(__file__).resolve().parents[1]
MEDUSA: dict[str, Any] = {
    "kind": "medusa",
    "name": "heads",
    "target": "org/model",
    "output": "runs/heads",
    "data": {"train": "a.jsonl", "heldout": "b.jsonl"},
    "training": {"steps": 10},
}
DRAFT = {**MEDUSA, "kind": "draft"}


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("content", "change", "message"),
    [
        (MEDUSA, {"traget": "x"}, "unknown key 'traget'; did you mean 'target'?"),
        (MEDUSA, {"draft": {}}, "'draft' is for recipes of kind draft, but this is a medusa recipe: omit this key"),
        (DRAFT, {"draft": {"polisy": {}}}, "unknown key 'draft.polisy'; did you mean 'policy'?"),
        (
            DRAFT,
            {"draft": {"zzzz": 1}},
            "'draft.zzzz'; valid keys are dspark, eagle3, gradient_checkpointing, init, loss, num_draft_tokens",
        ),
        (MEDUSA, {"dtype": "float16"}, "dtype: Input should be 'fast', 'bf16', 'fp16' or 'fp32'"),
        (MEDUSA, {"training": {"steps": 0}}, "training.steps: "),
        (
            MEDUSA,
            {"training": {"steps": 1, "learning_rate": float("inf")}},
            "learning_rate: Input should be a finite number",
        ),
        (DRAFT, {"draft": {"init": {"from_model": "m", "from_config": {}}}}, "from_model and from_config: keep one"),
        (DRAFT, {"draft": {"teacher": {"folder": "t"}, "policy": {"loop": 1}}}, "draft.policy generates new answers"),
    ],
)
def test_what_no_recipe_can_say_is_named_with_its_key(
    content: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        parse_recipe({**content, **change}, "my.yaml")
    assert message in str(error.value) and str(error.value).startswith("my.yaml: ")


def test_overrides_replace_and_add_single_values(tmp_path: Path) -> None:
    overrides = [
        "training.steps=3",
        "training.learning_rate=1e-4",
        "heads.num_heads=2",
        "name=other",
        "data.max_rows=5",
    ]
    recipe = load_recipe(write(tmp_path, MEDUSA), overrides)
    assert isinstance(recipe, MedusaRecipe)
    assert (recipe.training.steps, recipe.training.learning_rate, recipe.heads.num_heads) == (3, 1e-4, 2)
    assert (recipe.name, recipe.data.max_rows, recipe.data.train, recipe.target) == ("other", 5, "a.jsonl", "org/model")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps", "override 'training.steps' lacks '=': write section.key=value"),
        ("training.stepps=3", "unknown key 'training.stepps'; did you mean 'steps'?"),
        ("training.steps=x", "training.steps: "),
        ("training.steps=[", "is not a readable recipe: "),
        ("draft.init.from_target.layers.0=1", "is not a readable recipe: "),
    ],
)
def test_a_bad_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    path = write(tmp_path, {**DRAFT, "draft": {"init": {"from_target": {"layers": [0, 1]}}}})
    with pytest.raises(ValueError) as error:
        load_recipe(path, [override])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_values_left_open_are_asked_for_and_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path, {**MEDUSA, "target": "???", "data": {"train": "???", "heldout": "b.jsonl"}})
    with pytest.raises(ValueError) as error:
        load_recipe(path)
    expected = f"{path} needs values for data.train, target: add data.train=... after the recipe"
    assert str(error.value) == expected
    assert load_recipe(path, ["target=org/model", "data.train=c.jsonl"]).data.train == "c.jsonl"


@pytest.mark.parametrize(
    ("kind", "section", "default"), [("medusa", "heads", "cross_entropy"), ("draft", "draft", "forward_kl")]
)
def test_heads_and_drafts_share_one_loss_section_in_which_a_term_that_is_not_named_weighs_0(
    kind: str, section: str, default: str
) -> None:
    def mix_of(loss: dict[str, Any]) -> Any:
        return getattr(parse_recipe({**MEDUSA, "kind": kind, section: {"loss": loss}}), section).loss.mix

    assert mix_of({}) == mix_of({"temperature": 2}) == {default: 1}
    assert getattr(parse_recipe({**MEDUSA, "kind": kind}), section).loss.mix == {default: 1}
    assert mix_of({"acceptance": 0.5}) == mix_of({"acceptance": 0.5, "forward_kl": 0}) == {"acceptance": 0.5}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-3", 0.001), ("-1E4", -1e4), ("1.5e3", 1500.0), (".5e-2", 0.005), ("3", 3), ("1_000", 1000)),
        *(("2026-01-01", "2026-01-01"), ("1e", "1e"), ("", None), ("null", None), ("true", True), ("'1e-3'", "1e-3")),
        ("a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}", {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}),
        *(("[1, a, {b: 2}]", [1, "a", {"b": 2}]), ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}), ("a=b", "a=b")),
    ],
)
def test_values_are_those_of_yaml_with_numbers_as_people_write_them_and_without_dates(text: str, value: Any) -> None:
    found = read_yaml(text)
    assert found == value and type(found) is type(value)
