"""Every recipe in recipes/ can be parsed, says what it is for and whether it was measured,
and contains its own path.
"""

import re
from pathlib import Path

import pytest

from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.reading import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.yaml") if path.parent.name != "accelerate")


def words(path: Path) -> str:
    """Return the text of a recipe on one line."""
    return " ".join(path.read_text().replace("#", " ").split())


def loaded(path: Path) -> MedusaRecipe:
    """Load a recipe, with values for the keys that the user must set."""
    try:
        recipe = load_recipe(path)
    except ValueError as error:
        (yours,) = re.findall(r"needs values for (.*): add", str(error))
        recipe = load_recipe(path, [f"{key}=x" for key in yours.split(", ")])
    return recipe  # type: ignore[return-value]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_is_parsed_and_tells_how_to_launch_it(path: Path) -> None:
    loaded(path)
    comment = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert f"recipes/{path.parent.name}/{path.name}" in comment
    for config in re.findall(r"recipes/accelerate/\w+\.yaml", comment):
        assert (ROOT / config).is_file()


def test_what_a_recipe_says_stands_over_its_base_and_overrides_over_both(tmp_path: Path) -> None:
    base = ROOT / "recipes" / "any" / "medusa1.yaml"
    (tmp_path / "base.yaml").write_text(base.read_text())
    (tmp_path / "mine.yaml").write_text("base: base.yaml\nname: mine\ntraining: {steps: 7, batch_size: 8}\n")
    given = ["target=t", "output=o", "data.train=a", "data.heldout=b", "training.batch_size=12"]
    training = load_recipe(tmp_path / "mine.yaml", given).training
    assert (training.steps, training.batch_size, training.micro_batch_size) == (7, 12, 4)
