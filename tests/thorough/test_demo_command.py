"""The command `headstart demo`: errors before it reads a model, and the drafters that it finds."""

import json
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainer.cli import app as program
from trainer.commands import demo
from trainer.commands.options import DemoOptions


def test_without_gradio_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "trainer.demo.app", raising=False)
    monkeypatch.delattr("trainer.demo.app", raising=False)
    result = CliRunner().invoke(program, ["demo"])
    assert result.exit_code == 2
    assert result.stderr.strip().endswith("it is not installed: pip install 'headstart[demo]'")
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_port_that_is_taken_is_told_before_any_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(program, ["demo", "--target", "/no/such/model", "--port", str(port)])
    assert result.exit_code == 2
    assert "Address already in use" in result.stderr and str(port) in result.stderr


def test_drafters_are_those_asked_for_or_lookup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert demo.asked_drafters(DemoOptions(target="ORG/NAME", drafter=["lookup"])) == (["lookup"], [])
    asked, notes = demo.asked_drafters(DemoOptions(target="ORG/NAME"))
    assert asked == ["lookup"] and "Without --drafter" in notes[0]
    monkeypatch.chdir(tmp_path)
    asked, (note,) = demo.asked_drafters(DemoOptions())
    assert asked == ["lookup"] and "make demo" in note


def test_trained_drafters_of_the_embedded_target_are_found_unless_they_are_another_targets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "stored_fingerprint", lambda folder: "mine")
    for recipe, fingerprint in (("medusa1", "mine"), ("dspark", "another")):
        (final := tmp_path / demo.RUNS / recipe / "final").mkdir(parents=True)
        (final / "provenance.json").write_text(json.dumps({"target": {"fingerprint": fingerprint}, "recipe": {}}))
    asked, notes = demo.asked_drafters(DemoOptions())
    assert asked == ["heads:runs/quickstart/medusa1/final", "lookup"]
    assert len(notes) == 1
    (tmp_path / demo.RUNS / "dspark" / "final" / "provenance.json").write_text(
        '{"target": {"fingerprint": "mine"}, "recipe": {}}'
    )
    assert demo.asked_drafters(DemoOptions()) == ([asked[0], "dspark:runs/quickstart/dspark/final", "lookup"], [])
