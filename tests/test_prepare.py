"""Features and teacher caches written ahead of a training: by the same rules as within it."""

import io
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from tiny_models import tiny_model
from tiny_training import recipe_content, write_corpus, write_target

from trainer.commands.prepare import prepare_features
from trainer.data.batch import collate
from trainer.learning.teachers import SampledTailTeacher
from trainer.processes import Process
from trainer.recipe.reading import parse_recipe
from trainer.recipe.recipe import AnyRecipe
from trainer.run import distributed
from trainer.run.kinds import kind_of
from trainer.target.teacher_cache import TeacherStore

CPU = torch.device("cpu")


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Path]:
    """A target and texts to train on; accelerate's state is as new before and after."""
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    AcceleratorState._reset_state(True)
    yield tmp_path
    AcceleratorState._reset_state(True)


def shards_of(folder: Path) -> dict[str, int]:
    """A file that is written anew is another file."""
    return {path.name: path.stat().st_ino for path in folder.glob("*.safetensors")}


def recipe_with_features(workshop: Path, **data: Any) -> AnyRecipe:
    content = recipe_content(workshop, "medusa")
    section = {"folder": str(workshop / "features")}
    return parse_recipe({**content, "features": section, "data": {**content["data"], **data}})


def recipe_with_teacher(workshop: Path, temperature: float = 1.0) -> AnyRecipe:
    teacher = {"folder": str(workshop / "teacher"), "top_k": 5, "tail": 3}
    draft = {"teacher": teacher, "loss": {"temperature": temperature}}
    return parse_recipe({**recipe_content(workshop, "draft"), "draft": draft})


def test_features_written_ahead_are_those_that_training_reads(workshop: Path) -> None:
    prepare_features(recipe_with_features(workshop), Console(file=io.StringIO()))
    before = shards_of(workshop / "features")
    heard = io.StringIO()
    kind_of(recipe_with_features(workshop)).assemble(CPU, Process(console=Console(file=heard)))
    assert before and shards_of(workshop / "features") == before and "written here" not in heard.getvalue()


def test_a_teacher_cache_written_ahead_is_what_a_draft_is_trained_from(workshop: Path) -> None:
    """24 texts of 20 tokens, of which 19 are predicted, at 8 tokens of 2 + 4 bytes and a total of 4."""
    heard = io.StringIO()
    store = prepare_features(recipe_with_teacher(workshop, 2.0), Console(file=heard, width=200))
    before = shards_of(workshop / "teacher")
    assert f"teacher cache: 456 positions in {workshop}/teacher, 0.000 GB: 52 bytes a position" in heard.getvalue()
    again = io.StringIO()
    job = kind_of(recipe_with_teacher(workshop, 2.0)).assemble(CPU, Process(console=Console(file=again)))
    assert before and shards_of(workshop / "teacher") == before and "written here" not in again.getvalue()
    assert isinstance(store, TeacherStore)
    batch = collate(job.dataset.examples[:3], range(3))
    (inputs,) = job.objective.inputs(batch, 0)
    taught = inputs.labels[0].teacher
    assert isinstance(taught, SampledTailTeacher)
    assert torch.equal(taught.logits, store.for_batch(batch).logits) and taught.temperature == 2.0
    with pytest.raises(ValueError, match=r"holds a teacher cache made with temperature 2\.0 and not 1\.5: "):
        kind_of(recipe_with_teacher(workshop, 1.5)).assemble(CPU, Process(console=Console(file=again)))


@pytest.mark.parametrize("kind", ["medusa", "draft"])
def test_a_recipe_that_stores_nothing_has_nothing_to_write(workshop: Path, kind: str) -> None:
    with pytest.raises(
        ValueError, match=r"no features section: give features\.folder=FOLDER .* draft\.teacher\.folder"
    ):
        prepare_features(parse_recipe(recipe_content(workshop, kind)), Console(file=io.StringIO()))


def test_packed_documents_that_would_see_one_another_are_refused_ahead_of_training_too(workshop: Path) -> None:
    tiny_model("falcon").save_pretrained(workshop / "target")
    with pytest.raises(ValueError, match=r"data\.packing is on, but a falcon model lets packed texts see one another"):
        prepare_features(recipe_with_features(workshop, packing=True), Console(file=io.StringIO()))
    assert not (workshop / "features").exists()


def test_processes_that_write_features_wait_as_long_for_one_another_as_those_that_train(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = []
    own = distributed.InitProcessGroupKwargs
    monkeypatch.setattr(
        distributed, "InitProcessGroupKwargs", lambda **options: timeouts.append(options["timeout"]) or own(**options)
    )
    prepare_features(recipe_with_features(workshop), Console(file=io.StringIO()))
    assert timeouts == [timedelta(minutes=30)]
