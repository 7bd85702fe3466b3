"""A whole run on the Hub: what is exported on the way, what lies beside the weights, and that nothing local leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_hub import REPOSITORY, FakeHub
from fake_hub import hub as hub
from test_export import CONFIG, random_heads, report_of, write_json
from typer.testing import CliRunner

from decoding.measure.planning.plan_file import read_plan
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.heads import MedusaHeads
from decoding.model.hub import local_folder
from trainer.cli import app
from trainer.commands.artefact_options import PushOptions
from trainer.export import export, push
from trainer.export.beside import published_plan, published_provenance

SECRET = "hf_SomebodyElsesTokenInARecipe"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder: heads in final/ with their provenance, an evaluation's folder and a plan beside it."""
    run = tmp_path / "runs" / "medusa"
    (run / "evaluation").mkdir(parents=True)
    random_heads().save_pretrained(run / "final")
    recipe = {"target": f"{tmp_path}/models/target", "output": str(run), "note": f"key {SECRET}"}
    provenance = {
        "commit": "0123456789ab",
        "recipe": recipe,
        "data": {f"{tmp_path}/data/train.jsonl": {"sha256": "ab", "rows": 3}},
        "target": {"name": f"{tmp_path}/models/target", "fingerprint": "feed"},
        "steps": 1,
    }
    write_json(run / "final" / "provenance.json", provenance)
    mine = stored_fingerprint(run / "final")
    write_json(run / "evaluation" / "report.json", report_of(target="feed", heads=mine) | {"output": str(tmp_path)})
    write_json(run / "plan.json", plan_of(run / "final", mine))
    return run


def plan_of(weights: Path, fingerprint: str) -> dict[str, Any]:
    """A plan of heads and of a draft, at batch size 1, which chose a tree of 2."""
    heads, draft = f"heads:{weights}", f"draft:{weights}-draft,tokens=4"
    best = {"spec": f"{heads},tree=0/1", "tree": [[0], [1]], "speedup": 1.5}
    drafters = [{"drafter": heads, "kind": "tree", "depth_by_batch_size": [[1, 2, 1]]}]
    return {
        "format": "headstart plan 1",
        "fingerprints": {"target": "feed", "drafters": {heads: fingerprint, draft: "beef"}},
        "hardware": {"processor": "a processor", "threads": 2, "gpu": None},
        "dtype": "float32",
        "temperature": 0.0,
        "text_tokens": 9,
        "curves": [],
        "drafters": drafters,
        "cells": [{"batch_size": 1, "context": None, "choices": [{"drafter": heads, "best": best}]}],
    }


def stored(hub: FakeHub, name: str) -> Any:
    return json.loads(hub.files[name])


def test_a_run_goes_in_one_commit_with_all_that_is_known_of_it(
    hub: FakeHub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    pushed = push(run, REPOSITORY)
    names = ["README.md", "config.json", "model.safetensors", "plan.json", "provenance.json", "report.json"]
    assert sorted(hub.files) == sorted(pushed.files) == names
    assert len(hub.asked("/commit/")) == 1
    text = str(pushed)
    assert f"{run / 'final'} in the format headstart" in text and "read back bit-equal" in text
    assert f"with the report {run / 'evaluation' / 'report.json'}" in text
    assert f"with the plan {run / 'plan.json'}" in text
    assert f"{hub.address}/{REPOSITORY}: sent" in text and f"read it as {REPOSITORY}@{pushed.commit}" in text
    for name, content in hub.files.items():
        assert str(tmp_path).encode() not in content and SECRET.encode() not in content, name
    assert stored(hub, "provenance.json")["target"] == {"name": "target", "fingerprint": "feed"}
    assert list(stored(hub, "provenance.json")["data"]) == ["train.jsonl"]
    assert list(scratch.iterdir()) == [], "the exported folder is gone"


def test_what_was_pushed_is_read_by_its_revision_and_its_plan_names_the_repository(hub: FakeHub, run: Path) -> None:
    pushed = push(run, REPOSITORY)
    folder = local_folder(pushed.name)
    assert MedusaHeads.from_pretrained(folder).config.tree == ((0,), (1,)) != CONFIG.tree, "the plan's tree"
    plan = read_plan(folder / "plan.json")
    assert plan.content["fingerprints"]["drafters"] == {
        f"heads:{REPOSITORY}": stored_fingerprint(pushed.name),  # with that tree, unlike the run's own
        "draft:final-draft,tokens=4": "beef",
    }
    assert plan.best_of(f"heads:{REPOSITORY}")["best"]["spec"] == f"heads:{REPOSITORY},tree=0/1"


def test_an_exported_folder_goes_as_it_lies_there(hub: FakeHub, run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", "vllm")
    push(tmp_path / "out", REPOSITORY)
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert "report.json" not in hub.files, "only what is given to an export goes into its folder"
    with pytest.raises(ValueError, match="is exported already, and format is of the export: leave it out, or give the"):
        push(tmp_path / "out", REPOSITORY, format="headstart")
    with pytest.raises(ValueError, match="and check_prompts is of the export"):
        push(tmp_path / "out", REPOSITORY, check_prompts=0)
    options = PushOptions(source=tmp_path / "out", repository=REPOSITORY)
    assert "nothing was sent" in str(push(**vars(options))), "the command's own defaults are of no export"


def test_of_several_reports_one_must_be_given(hub: FakeHub, run: Path, tmp_path: Path) -> None:
    (run / "later").mkdir()
    (run / "later" / "report.json").write_bytes((run / "evaluation" / "report.json").read_bytes())
    with pytest.raises(
        ValueError, match=r"holds several files report\.json \(.*later/report.json\): give one by --repo"
    ):
        push(run, REPOSITORY)
    assert hub.requests == []
    assert f"with the report {run / 'later' / 'report.json'}" in str(
        push(run, REPOSITORY, report=run / "later" / "report.json")
    )
    (run / "final" / "report.json").write_bytes((run / "later" / "report.json").read_bytes())
    assert f"with the report {run / 'final' / 'report.json'}" in str(push(run, REPOSITORY)), "beside the weights"


def test_a_run_of_other_weights_than_its_report_sends_nothing(hub: FakeHub, run: Path) -> None:
    write_json(run / "evaluation" / "report.json", report_of(target="feed", heads="0" * 16))
    with pytest.raises(ValueError, match="measured the heads 0000000000000000"):
        push(run, REPOSITORY)
    assert hub.requests == []


def test_the_command_takes_every_option(hub: FakeHub, run: Path) -> None:
    words = ["push", str(run), REPOSITORY, "--public", "--revision", "v1", "--message", "Two heads", "--format", "vllm"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "in the format vllm" in done.output and hub.visibility == "public"
    assert "plan.json" in hub.repositories[REPOSITORY].files("v1") and "plan.json" not in hub.files


# --- what lies beside the weights -------------------------------------------------------------------------------------


def test_an_export_carries_its_provenance_and_what_was_given(run: Path, tmp_path: Path) -> None:
    summary = export(run, tmp_path / "out", "headstart", run / "evaluation" / "report.json", plan=run / "plan.json")
    assert {"provenance.json", "report.json", "plan.json"} <= summary.files.keys()
    assert json.loads((tmp_path / "out" / "report.json").read_text())["output"] == tmp_path.name
    again = export(tmp_path / "out", tmp_path / "again", "headstart")
    assert "plan.json" not in again.files, "what is not given does not go on"
    assert (tmp_path / "again" / "provenance.json").read_text() == (tmp_path / "out" / "provenance.json").read_text()
    export(run, tmp_path / "out", "headstart", overwrite=True)
    assert not (tmp_path / "out" / "plan.json").exists(), "an export replaces an earlier one that had more beside it"


def test_a_published_plan_names_weights_without_their_folders(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "a" / "final", "feed")
    plan["fingerprints"]["drafters"]["hybrid:/elsewhere/final,of=heads"] = "feed"
    told = published_plan(plan, "feed", "new", None)
    assert list(told["fingerprints"]["drafters"].items()) == [
        ("heads:final", "feed"),
        ("draft:final-draft,tokens=4", "beef"),
        ("hybrid:final,of=heads", "feed"),
    ]
    assert told["drafters"][0]["drafter"] == told["cells"][0]["choices"][0]["drafter"] == "heads:final"
    assert str(tmp_path) not in json.dumps(told) and "elsewhere" not in json.dumps(told)


def test_a_published_provenance_keeps_names_of_the_hub() -> None:
    commit = "0" * 40
    provenance = {
        "target": {"name": "zoe/target", "fingerprint": "feed"},
        "revisions": {"target": f"zoe/target@{commit}"},
        "data": {"zoe/data:train": {"sha256": "ab"}, "/home/zoe/private.jsonl": {"sha256": "cd"}},
        "recipe": {"target": "zoe/target@main", "output": "/home/zoe/run"},
    }
    assert published_provenance(provenance) == {
        **provenance,
        "data": {"zoe/data:train": {"sha256": "ab"}, "private.jsonl": {"sha256": "cd"}},
        "recipe": {"target": "zoe/target@main", "output": "run"},
    }
