"""What a run will take: counted where it can be counted, and nothing spent on finding out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from tiny_training import recipe_content, toy_examples, write_corpus, write_target
from typer.testing import CliRunner

from trainer.cli import app
from trainer.commands import plan_training as plan_command
from trainer.data.batch import Example, batch_indices
from trainer.drafts.on_policy import PolicySource
from trainer.heads.medusa2 import Medusa2Objective
from trainer.job import Phase
from trainer.recipe.common import TrainingSection
from trainer.recipe.reading import parse_recipe
from trainer.recipe.recipe import AnyRecipe
from trainer.run.measuring import Measured, Pace
from trainer.run.planning import Launch, Plan, Tokens, count_tokens, largest_batch, plan_training

HEADS = 2 * (16 * 16 + 16 + 16 * 16)
"""Parameters of two heads of one block: its matrix, its bias, the Linear to 16 tokens."""


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 16 tokens and width 16, 24 texts of 20 tokens, and two to hold out."""
    folder = tmp_path_factory.mktemp("workshop")
    write_target(folder / "target")
    write_corpus(folder)
    return folder


def recipe(workshop: Path, kind: str = "medusa", training: dict[str, Any] | None = None, **sections: Any) -> AnyRecipe:
    content = recipe_content(workshop, kind, **(training or {}))
    heads = {"heads": {"num_heads": 2}} if kind == "medusa" else {}
    return parse_recipe({**content, **heads, **sections})


def test_trained_parameters_are_counted_by_part(workshop: Path) -> None:
    assert plan_training(recipe(workshop), steps=0).parameters == {"heads": HEADS}
    joint = plan_training(recipe(workshop, adapters={"rank": 2, "modules": ["q_proj"]}), steps=0)
    assert joint.parameters == {"heads": HEADS, "adapters": 2 * 2 * (16 + 16)}  # in both layers, each way
    assert plan_training(recipe(workshop, "draft"), steps=0).parameters.keys() == {"draft"}


@pytest.mark.parametrize(("steps", "batch_size"), [(1, 4), (3, 4), (6, 4), (7, 5), (40, 8)])
def test_tokens_are_those_of_the_runs_own_order(steps: int, batch_size: int) -> None:
    examples = toy_examples(12)
    section = TrainingSection(steps=steps, batch_size=batch_size, micro_batch_size=1, seed=3)
    order = [i for step in range(steps) for i in batch_indices(step, batch_size, 12, 3)]
    assert count_tokens(examples, section) == Tokens(
        sequences=steps * batch_size,
        read=sum(len(examples[i].tokens) for i in order),
        trained=sum(sum(examples[i].trained) for i in order),
        epochs=steps * batch_size / 12,
    )


def test_the_largest_micro_batch_is_that_of_the_longest_text_with_its_padding() -> None:
    short, long = Example((1,) * 3, (True,) * 3, 0), Example((1,) * 9, (False,) * 8 + (True,), 0)
    section = TrainingSection(steps=5, batch_size=4, micro_batch_size=2)
    found = largest_batch([short, short, short, long], section, processes=1)
    assert found.positions == 18  # two rows as long as the long one
    assert found.trained == 6  # two short texts
    alone = section.model_copy(update={"micro_batch_size": 1})
    assert largest_batch([short, short, short, long], alone, processes=4).positions == 9


def test_weights_gradients_and_moments_take_4_4_and_8_bytes_a_trained_parameter(workshop: Path) -> None:
    memory = plan_training(recipe(workshop), steps=0).memory
    assert memory["trained weights, fp32"] == memory["gradients, fp32"] == 4 * HEADS
    assert memory["optimizer's moments, fp32"] == 8 * HEADS
    assert "weights in bf16" not in memory  # the recipe trains in fp32


def test_a_bias_by_the_token_before_is_counted_with_what_passes_through_it(workshop: Path) -> None:
    """Each of the two heads keeps a gradient of its 16 rows; 160 tokens pass, as they are and once for each head."""
    plain, biased = (
        plan_training(recipe(workshop, heads={"num_heads": 2, "markov_rank": rank}), steps=0) for rank in (0, 4)
    )
    assert biased.parameters == {"heads": HEADS + 2 * 16 * 4}
    passing = "activations and logits, roughly"
    assert biased.memory[passing] - plain.memory[passing] == 4 * 4 * (160 + 2 * (16 + 160))


def test_the_keys_that_masks_see_are_counted_with_what_passes(workshop: Path) -> None:
    """8 rows of 20 tokens and 2 masks for each anchor, a byte and an fp32 number for each pair of them.

    All else grows in proportion to the anchors, so that the second difference is of these (20 + 2 a)² pairs alone.
    """
    one, two, three = (
        plan_training(
            recipe(workshop, "draft", draft={"check_costs": False, "parallel": {"tokens": 3, "anchors": anchors}}),
            steps=0,
        ).memory["activations and logits, roughly"]
        for anchors in (1, 2, 3)
    )
    assert three - 2 * two + one == 8 * (1 + 4) * (26**2 - 2 * 24**2 + 22**2) == 8 * 5 * 8


def test_muon_keeps_one_moment_of_the_matrices_inside(workshop: Path) -> None:
    memory = plan_training(recipe(workshop, training={"optimizer": "muon"}), steps=0).memory
    assert memory["optimizer's moments, fp32"] == 8 * HEADS - 4 * 2 * 16 * 16


@pytest.mark.parametrize(
    ("stage", "shares"), [(0, (4, 8, 8)), (1, (4, 4, 2)), (2, (4, 1, 2)), (3, (1, 1, 2))], ids=lambda value: str(value)
)
def test_zero_divides_more_with_each_stage_and_ddp_copies_gradients(
    workshop: Path, stage: int, shares: tuple[int, int, int]
) -> None:
    """Bytes of a parameter on each of four devices: weights, gradients, moments."""
    memory = plan_training(recipe(workshop, training={"micro_batch_size": 2}), Launch(4, stage), steps=0).memory
    parts = ("trained weights, fp32", "gradients, fp32", "optimizer's moments, fp32")
    assert tuple(memory[part] / HEADS for part in parts) == shares


@pytest.mark.parametrize("launch", [(0, 0), (2, 4)])
def test_an_impossible_launch_is_refused(launch: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="give 1 or more and 0 to 3"):
        Launch(*launch)


def test_disk_is_counted_and_nothing_is_left_on_it(workshop: Path) -> None:
    """Features of 24 texts of 20 tokens, 16 fp32 numbers each; lm_head; three checkpoints; heads."""
    before = sorted(workshop.rglob("*"))
    disk = plan_training(recipe(workshop, features={"folder": str(workshop / "features")}), steps=1).disk
    assert disk == {
        "features": 24 * 20 * 16 * 4 + 16 * 16 * 4,
        "checkpoints, 2 and one being written": 3 * 12 * HEADS,
        "the finished artefact": 4 * HEADS,
    }
    assert sorted(workshop.rglob("*")) == before


def test_a_teacher_cache_is_counted_and_measured_on_a_few_rows(workshop: Path) -> None:
    """Of 19 positions of each of 24 texts, at 8 tokens of 2 + 4 bytes and a total of 4."""
    before = sorted(workshop.rglob("*"))
    teacher = {"folder": str(workshop / "teacher"), "top_k": 5, "tail": 3}
    plan = plan_training(recipe(workshop, "draft", draft={"teacher": teacher}), steps=1)
    assert plan.disk["teacher cache"] == 24 * 19 * (8 * 6 + 4)
    assert plan.measured is not None and plan.measured.writing > 0 and plan.tokens.read == 4 * 8 * 20
    online = plan_training(recipe(workshop, "draft"), steps=0)
    assert "teacher cache" not in online.disk
    passing = "activations and logits, roughly"
    assert plan.memory[passing] < online.memory[passing]  # the target is not run, but it is there
    assert plan.memory["target"] == online.memory["target"] > 0
    assert sorted(workshop.rglob("*")) == before


def test_a_draft_that_writes_its_texts_is_measured_in_the_middle_of_the_run_and_leaves_none_of_them(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where half of them are written: for two steps each before steps 4 and 6, one to warm up and three measured."""
    steps: list[int] = []
    own = PolicySource.write
    monkeypatch.setattr(
        PolicySource, "write", lambda self, step, positions: steps.append(step) or own(self, step, positions)
    )
    before = sorted(workshop.rglob("*"))
    policy = {"offline": [1, 0], "loop": [0, 1], "every": 2, "max_new_tokens": 8}
    plan = plan_training(recipe(workshop, "draft", {"steps": 9}, draft={"policy": policy}), steps=3)
    assert plan.measured is not None and steps == [4, 6]
    assert [pace.phase for pace in plan.measured.paces] == [("a step", 0, 9)] and plan.measured.paces[0].fastest > 0
    assert sorted(workshop.rglob("*")) == before


def test_a_target_that_features_replace_takes_no_memory_and_evaluates_at_the_end_alone(workshop: Path) -> None:
    features, every_step = {"folder": str(workshop / "features")}, {"every": 1}
    kept, dropped = (
        plan_training(recipe(workshop, features={**features, "keep_target": keep}, evaluation=every_step), steps=0)
        for keep in (True, False)
    )
    assert kept.memory.keys() - dropped.memory.keys() == {"target"}
    assert (kept.evaluations, dropped.evaluations) == (4, 1)


def test_hours_are_those_of_all_steps_each_at_its_phases_pace_and_of_evaluations() -> None:
    alone = Pace(Phase("alone", 0, 300), step=2.0, fastest=1.0, slowest=3.0)
    joint = Pace(Phase("joint", 300, 700), step=5.0, fastest=4.0, slowest=6.0)
    measured = Measured((alone, joint), evaluation=30.0, writing=40.0, peak_bytes=0)
    plan = Plan({}, {}, {}, Tokens(1, 1, 1, 1.0), steps=1000, evaluations=5, measured=measured, measured_memory=0)
    assert plan.hours == pytest.approx((300 * 2 + 700 * 5 + 5 * 30 + 40) / 3600)


@pytest.mark.parametrize(
    ("heads_first", "phases", "done"),
    [
        (0, [("a step", 0, 8)], [0, 1, 2]),
        (1, [("a step of the heads alone", 0, 1), ("a step with the adapters", 1, 7)], [0, 1, 2, 3]),
        (5, [("a step of the heads alone", 0, 5), ("a step with the adapters", 5, 3)], [0, 1, 2, 5, 6, 7]),
        (8, [("a step", 0, 8)], [0, 1, 2]),
    ],
)
def test_heads_alone_and_heads_with_adapters_are_measured_each_by_its_own_steps(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, heads_first: int, phases: list[Any], done: list[int]
) -> None:
    """Two of each behind one to warm up, from the step on at which the adapters join."""
    steps: list[int] = []
    own = Medusa2Objective.inputs
    monkeypatch.setattr(
        Medusa2Objective, "inputs", lambda self, batch, step, ahead: steps.append(step) or own(self, batch, step, ahead)
    )
    adapters = {"rank": 2, "modules": ["q_proj"], "heads_first_steps": heads_first}
    plan = plan_training(recipe(workshop, training={"steps": 8}, adapters=adapters), steps=2)
    assert plan.measured is not None and [pace.phase for pace in plan.measured.paces] == phases
    assert steps == done
    assert all(0 < pace.fastest <= pace.step <= pace.slowest for pace in plan.measured.paces)


def test_processes_that_a_batch_cannot_be_dealt_out_to_are_refused_as_by_training(workshop: Path) -> None:
    with pytest.raises(
        ValueError, match=r"batch_size \(8\) is not .* training.micro_batch_size \(1\) times 3 processes"
    ):
        plan_training(recipe(workshop, training={"micro_batch_size": 1}), Launch(3), steps=0)


def test_fewer_than_no_steps_are_refused_before_anything_is_loaded(workshop: Path) -> None:
    with pytest.raises(ValueError, match="--steps is -1: give how many"):
        plan_training(recipe(workshop, target="/nowhere"), steps=-1)


def test_a_file_where_features_are_to_be_written_is_found_by_the_plan(workshop: Path) -> None:
    taken = str(workshop / "train.jsonl")
    with pytest.raises(ValueError, match=f"^features.folder is {taken}, but {taken} is a file"):
        plan_training(recipe(workshop, features={"folder": taken}), steps=0)


def test_the_embedded_target_is_built_before_its_plan(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Built(Exception):
        pass

    def build(target: str | None) -> None:
        assert target == "quickstart"
        raise Built

    monkeypatch.setattr(plan_command, "ensure_built", build)
    with pytest.raises(Built):
        plan_command.print_plan(recipe(workshop, target="quickstart"), Launch(), 0)


@pytest.mark.parametrize(("steps", "every", "count"), [(4, 1000, 1), (4, 2, 2), (5, 2, 3), (4, 4, 1), (4, 1, 4)])
def test_evaluations_are_those_in_between_and_the_last(workshop: Path, steps: int, every: int, count: int) -> None:
    section = {"every": every, "prompts": 2, "prompt_tokens": 6, "max_new_tokens": 8}
    assert plan_training(recipe(workshop, training={"steps": steps}, evaluation=section), steps=0).evaluations == count


@pytest.mark.parametrize("kind", ["medusa", "draft"])
def test_a_plan_is_measured_by_real_steps_and_said_in_a_table(
    workshop: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(workshop, kind).model_dump(mode="json")))
    result = CliRunner().invoke(app, ["plan-training", str(tmp_path / "recipe.yaml"), "--steps", "2"])
    assert result.exit_code == 0, result.output
    for part in ("gradients, fp32", "measured here", "free now", "32 sequences", "tokens read", "a step", " h "):
        assert part in result.output
    assert not (workshop / "run").exists()


def begun_run(output: Path, evaluations: int) -> None:
    """The metrics of a run: 1.5, 1.75, 1.875, ... tokens per pass after 1,000, 2,000, 4,000, ... trained tokens."""
    output.mkdir(parents=True)
    with (output / "metrics.jsonl").open("w") as lines:
        for i in range(evaluations):
            texts = [[2 ** (i + 2) - 1, 2 ** (i + 1)]] * 2
            figures = {"tokens": 1000 * 2**i, "heldout/nodes": 5, "heldout/texts": texts}
            lines.write(json.dumps({"step": i + 1, **figures}) + "\n")


@pytest.mark.parametrize(
    ("evaluations", "parts"),
    [
        (4, ["16,000 tokens, 2 times as many", "+0.03 [", "32,000 tokens, 4 times as many", "+0.05 [", "pass on 1.94"]),
        (3, ["comparable evaluations: 3, fewer than the 4 needed"]),
    ],
)
def test_a_run_that_was_begun_forecasts_what_more_training_brings(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluations: int, parts: list[str]
) -> None:
    """The law 2 - 500 / n: of the 0.0625 that is left, one doubling brings a half and two bring three quarters."""
    monkeypatch.setenv("COLUMNS", "200")
    begun_run(tmp_path / "run", evaluations)
    content = recipe(workshop, output=str(tmp_path / "run")).model_dump(mode="json")
    (tmp_path / "recipe.yaml").write_text(json.dumps(content))
    result = CliRunner().invoke(app, ["plan-training", str(tmp_path / "recipe.yaml"), "--steps", "0"])
    assert result.exit_code == 0, result.output
    for part in ("more training, forecast by the run so far", *parts):
        assert part in result.output
