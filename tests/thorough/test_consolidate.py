"""Artefacts of checkpoints: what the run itself would have written if that step had been its last."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_training import recipe_content, write_corpus, write_target

from decoding.model.fingerprint import stored_fingerprint
from trainer.export.exporter import export
from trainer.recipe.reading import parse_recipe
from trainer.run.train import consolidate, run_recipe

CHANGES: dict[str, dict[str, Any]] = {
    "heads": {"kind": "medusa"},
    "heads on stored features": {"kind": "medusa", "features": {"folder": "features"}},
    "heads with adapters": {"kind": "medusa", "adapters": {"rank": 2}},
    "a draft": {"kind": "draft"},
    "a draft by a teacher cache": {
        "kind": "draft",
        "draft": {"check_costs": False, "teacher": {"folder": "teacher", "top_k": 4}},
    },
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of four steps, with checkpoints of the steps 2 and 4."""
    runs: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in runs:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            write_target(folder / "target")
            write_corpus(folder)
            content = {**recipe_content(folder, CHANGES[name]["kind"]), "checkpoint": {"every": 2}, **CHANGES[name]}
            for section in (content.get("features"), content.get("draft", {}).get("teacher")):
                if section:
                    section |= {"folder": str(folder / section["folder"])}
            runs[name] = run_recipe(parse_recipe(content)).parent
            shutil.rmtree(folder / "features", ignore_errors=True)
            shutil.rmtree(folder / "teacher", ignore_errors=True)
        return runs[name]

    return run


def provenance(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "provenance.json").read_text())
    return content


@pytest.mark.parametrize("name", CHANGES)
def test_the_last_checkpoint_gives_what_the_run_finished(name: str, ran: Callable[[str], Path], tmp_path: Path) -> None:
    run = ran(name)
    told = consolidate(run / "checkpoints" / "step-00000004", tmp_path / "made")
    assert stored_fingerprint(tmp_path / "made") == stored_fingerprint(run / "final"), "weights, config and tree"
    assert told.endswith("weights after step 4 of 4, not the finished weights")
    assert provenance(tmp_path / "made") == {**provenance(run / "final"), "checkpoint": "step-00000004"}
    if name == "heads with adapters":
        assert stored_fingerprint(tmp_path / "made" / "target") == stored_fingerprint(run / "final" / "target")


def test_a_run_that_was_stopped_is_exported_as_its_newest_checkpoint(
    ran: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(ran("a draft") / "checkpoints", tmp_path / "run" / "checkpoints")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    summary = export(tmp_path / "run", tmp_path / "out", "draft")
    place = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert summary.compared[0].startswith(f"made from the checkpoint {place}: weights after step 2 of 4")
    assert summary.compared[-1].startswith("3 prompts of heldout.jsonl decoded with both")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert stored_fingerprint(tmp_path / "out") != stored_fingerprint(ran("a draft") / "final")


def test_checkpoints_that_cannot_be_trusted_are_refused(ran: Callable[[str], Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ran("heads").parent, tmp_path / "copy")
    content = (tmp_path / "copy" / "run" / "checkpoints" / "step-00000002" / "state.json").read_text()
    shutil.copytree(tmp_path / "copy" / "run" / "checkpoints" / "step-00000002", run)
    refused = {
        "SHA256SUMS": ("", r"cannot be read \(.* is not listed in SHA256SUMS\): give another"),
        "state.json": (content.replace('"step": 2', '"step": 3'), "state.json is damaged"),
    }
    for name, (changed, complaint) in refused.items():
        before = (run / name).read_text()
        (run / name).write_text(changed)
        with pytest.raises(ValueError, match=complaint):
            export(run, tmp_path / "out", "headstart")
        (run / name).write_text(before)
    data = Path(json.loads(content)["recipe"]["data"]["train"])
    rows = data.read_text()
    data.write_text(rows.splitlines()[0] + "\n")
    try:
        with pytest.raises(ValueError, match="was written, its training data changed"):
            export(run, tmp_path / "out", "headstart")
    finally:
        data.write_text(rows)
    assert not (tmp_path / "out").exists()
