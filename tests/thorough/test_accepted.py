"""The comparison of all arms: its figures from counts made by hand, resuming, and the arms."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from trainer.recipe.reading import load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes" / "storyteller-11m"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """Import the scripts as modules, with their folder in the path as when they are run."""
    path = list(sys.path)
    sys.path.append(str(ROOT / "benchmarks"))
    yield {name: importlib.import_module(name) for name in ("accepted", "accepted_arms", "accepted_figures")}
    sys.path[:] = path


@pytest.fixture(scope="module")
def figures(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["accepted_figures"]


def _counts(counts: list[list[int]], seed: int = 0, first: int = 0, **place: str) -> dict[str, Any]:
    place = {"spec": "lookup", "arm": "A", "drafting": "chain", "set": "s", "setting": "greedy", **place}
    return {"part": "acceptance", **place, "seed": seed, "first": first, "counts": counts}


def test_tokens_per_pass_are_all_tokens_over_all_passes_of_all_seeds(figures: ModuleType) -> None:
    records = [
        _counts([[6, 2]]),
        _counts([[4, 2]], first=1),
        _counts([[3, 3], [5, 3]], seed=1),
        _counts([[9, 1]], arm="B"),
        _counts([[9, 1]], first=2, spec="another way under the same name"),
    ]
    counts = figures.counts_of(records, "lookup", "A", "chain", "s", "greedy")
    assert counts == {0: {0: (6, 2), 1: (4, 2)}, 1: {0: (3, 3), 1: (5, 3)}}
    found = figures.tokens_per_pass(counts)
    assert found.value == pytest.approx(1.8) and found.observations == 2
    assert 1.0 <= found.low < 1.8 < found.high <= 3.0


def test_a_speed_up_is_measured_against_the_turns_that_the_method_took_part_in(figures: ModuleType) -> None:
    place = {"part": "speed", "target": "t", "set": "s", "setting": "greedy"}
    first = {"plain": [10, 10.0, 10, 10, True], "assisted": [10, 8.0, 0, 0, True], "A | chain": [10, 5.0, 10, 5, True]}
    later = {
        "plain": [10, 20.0, 10, 10, True],
        "assisted": [10, 20.0, 0, 0, True],
        "B | chain": [10, 10.0, 10, 2, False],
    }
    records = [{**place, "prompt": prompt, "runs": runs} for runs in (first, later) for prompt in (0, 1)]
    one, other = (figures.speed_of(records, f"{name} | chain", "t", "s", "greedy") for name in "AB")
    assert one["over_plain"]["value"] == 2.0 and one["over_assisted"]["value"] == pytest.approx(1.6)
    assert other["over_plain"]["value"] == 2.0 and other["tokens_per_pass"]["value"] == 5.0
    assert (one["same_as_plain"], other["same_as_plain"], one["tokens_per_second"]) == (2, 0, 2.0)


@pytest.mark.parametrize(
    ("shipped", "name"), [("medusa1", "Medusa-1"), ("markov", "Markov, KL"), ("draft", "draft"), ("dspark", "DSpark")]
)
def test_a_shipped_recipe_trains_what_its_arm_was_measured_with(
    scripts: dict[str, ModuleType], shipped: str, name: str
) -> None:
    arms, given = scripts["accepted_arms"], {"target": "T", "data.train": "A", "data.heldout": "H", "output": "O"}
    arm = arms.ARMS[name]
    overrides = arms.overrides_of(arm, 0, 250, given)
    measured = load_recipe(RECIPES / f"{arm.recipe}.yaml", overrides).model_dump()
    offered = load_recipe(RECIPES / f"{shipped}.yaml", ["target=T", "data.train=A", "data.heldout=H"]).model_dump()
    assert offered["training"] == measured["training"]
    part = "heads" if arm.recipe == "medusa1" else "draft"
    free = {"num_draft_tokens": None}  # evaluations draft chains of a different length
    assert {**offered[part], **free} == {**measured[part], **free}


def test_a_second_run_decodes_the_new_prompts_alone(
    scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("llama", vocab=128).save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"ab{n}ab"}) + "\n" for n in range(5)))

    def run(limit: int) -> list[dict[str, Any]]:
        scripts["accepted"].main(
            f"--target {tmp_path / 'target'} --prompts s={prompts} --measure acceptance speed --arms lookup "
            f"--runs {tmp_path / 'runs'} --limit {limit} --max-new-tokens 6 --batch-size 2 --dtype fp32 "
            f"--summarise {tmp_path / 'out.json'}".split()
        )
        read: list[dict[str, Any]] = scripts["accepted_figures"].read_records(tmp_path / "runs" / "records.jsonl")
        return read

    first = run(2)
    assert [(each["part"], each.get("first"), each.get("prompt")) for each in first] == [
        *[("acceptance", 0, None)] * 2,
        *[("speed", None, place) for _ in range(2) for place in (0, 1)],
    ]
    assert run(2) == first, "nothing is measured twice"
    later = run(3)[len(first) :]
    assert [(each["part"], each.get("first"), each.get("prompt")) for each in later] == [
        *[("acceptance", 2, None)] * 2,
        *[("speed", None, 2)] * 2,
    ]
    alone = tmp_path / "runs" / "records.jsonl"
    alone.unlink()
    counts = [each["counts"] for each in (*first, *later) if each["part"] == "acceptance"]
    assert [each["counts"] for each in run(3) if each["part"] == "acceptance"] == [
        [*counts[0], *counts[2]],
        [*counts[1], *counts[3]],
    ]
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(row["setting"], row["tokens_per_pass"]["observations"]) for row in report["rows"]] == [
        ("greedy", 3),
        ("T=1", 3),
    ]
    assert all(row["speed"]["target"]["over_plain"]["value"] > 0 for row in report["rows"])
