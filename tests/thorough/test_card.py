"""The card has every figure with its label and the origin of the artefact, and contains nothing private."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from test_markdown import FEW_HOSTILE, HARMLESS, SECRETS, kinds

from trainer.export.card import CardFigures, card_figures, render_card
from trainer.export.companions import read_provenance
from trainer.export.serve import ServerCommand
from trainer.export.task import Artefact

HEADS = Artefact("heads", 1234, "bfloat16", hidden_size=8, vocab_size=12, layers=2, heads=2, tree_nodes=4)
DRAFT = Artefact("draft", 1234, "bfloat16", hidden_size=8, vocab_size=12, layers=2)
PROVENANCE: dict[str, Any] = {
    "commit": "0123456789ab-dirty",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "recipe": {
        "kind": "medusa",
        "target": "org/target-1b",
        "data": {"train": "/home/zoe/corpus/train.jsonl"},
        "note": "made from /home/zoe/notes/idea.txt and ~/other/plan.md",
        "api_key": "swordfish",
    },
    "data": {
        "/home/zoe/corpus/train.jsonl": {"sha256": "ab" * 32, "rows": 1234, "license": "CC BY 4.0"},
        "org/set:main": {"sha256": "ab", "rows": 7, "source": "org/set"},
    },
    "target": {"name": "org/target-1b", "fingerprint": "feedfacecafebeef"},
    "steps": 1500,
}
COMMANDS = (
    ServerCommand("vllm", ("vllm", "serve", "TARGET", "--config", '{"model":"DIR"}'), ("tried with 0.1",), ("a|b",)),
)


def row(method: str, temperature: float, value: float, **changes: Any) -> dict[str, Any]:
    """Make a row of heads, whose speed-up over plain decoding has an interval of 0.2 to either side."""
    return {
        "setting": "greedy" if temperature == 0 else f"T={temperature:g}",
        "temperature": temperature,
        "method": method,
        "label": "lossless",
        "artefact": "heads",
        "tokens_per_pass": {"value": 2.314, "low": 2.2, "high": 2.43, "observations": 12},
        "speedup_of_totals": {"value": value, "low": value - 0.2, "high": value + 0.2, "observations": 12},
        "speedup": {"median": 1.712, "low_quartile": 1.6, "high_quartile": 1.82, "observations": 12},
    } | changes


def figures(*rows: dict[str, Any], chains: bool = False, **changes: Any) -> CardFigures:
    """Make the figures of a report in the form that `evaluate` returns."""
    report: dict[str, Any] = {
        "hardware": {"processor": "Example CPU", "cores": 2, "threads": 2, "gpu": "Example GPU"},
        "commit": "abc123def456",
        "dtype": "bfloat16",
        "prompts": 12,
        "prompts_from": "mine.jsonl",
        "max_new_tokens": 96,
        "rows": list(rows),
    }
    return card_figures(report | changes, chains)


def card(
    folder: Path, provenance: dict[str, Any] | None = None, artefact: Artefact = HEADS, **options: Any
) -> ModelCard:
    """Return the card of an artefact whose run wrote this provenance."""
    if provenance is not None:
        (folder / "provenance.json").write_text(json.dumps(provenance))
    return ModelCard(render_card(artefact, read_provenance(folder), options.pop("figures", None), **options))


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_first_table_has_the_fastest_lossless_method_of_each_temperature_and_the_second_all(tmp_path: Path) -> None:
    found = figures(
        row("chain", 0, 1.4),
        row("tree", 0, 1.5),
        row("transformers assisted", 0, 9.0),
        row("plain", 0, 8.0, artefact=None),
        row("tree", 1, 1.25),
        row("typical", 1, 2.5, label="lossy"),
    )
    best = [line.split(" | ")[:3] for line in found.best.splitlines()[2:]]
    assert best == [["| greedy", "tree", "lossless"], ["| T=1", "tree", "lossless"]]
    assert "1.50× [1.30, 1.70]; median 1.71× [1.60, 1.82]" in found.best and "2.31 [2.20, 2.43]" in found.best
    assert len(found.table.splitlines()) == 2 + 6
    text = card(tmp_path, figures=found).text
    assert found.best in text.split("<details>")[0] and found.table in text.split("<details>")[1]
    for fact in ("12 prompts of mine.jsonl", "96 new", "Example GPU, Example CPU in bfloat16", "abc123def456"):
        assert fact in text
    assert "lossy" in figures(row("typical", 1, 2.5, label="lossy")).best, "where there is no other"
    for value, limited in ((0.7, True), (1.1, True), (1.5, False)):
        assert any("show no gain over plain" in limit for limit in figures(row("tree", 0, value)).limits) == limited


# --- origin -----------------------------------------------------------------------------------------------------------


def test_the_card_holds_the_provenance_and_no_path_of_the_users_machine(tmp_path: Path) -> None:
    text = str(card(tmp_path, PROVENANCE, figures=figures(row("tree", 0, 1.5), commit="/home/zoe/checkout at abc")))
    for fact in ("0123456789ab-dirty", '"torch": "2.13.0"', "1500", "feedfacecafebeef", "ab" * 32, "CC BY 4.0"):
        assert fact in text
    assert "`train.jsonl`, 1234 rows" in text and '"train": "train.jsonl"' in text and "idea.txt and plan.md" in text
    assert "https://huggingface.co/datasets/org/set" in text
    for leak in ("zoe", "/home", "corpus", "~/", "swordfish", str(tmp_path)):
        assert leak not in text


@pytest.mark.parametrize(
    ("changes", "base_model", "argument"),
    [
        ({}, "org/target-1b", "--target org/target-1b "),
        ({"target": {"name": "/home/zoe/target"}}, None, "--target TARGET "),
        ({"recipe": {"target": "org/target-1b", "adapters": {"rank": 32}}}, "org/target-1b", "--target TARGET "),
    ],
)
def test_the_base_model_is_named_only_if_it_is_on_the_hub_and_heads_of_an_adapted_target_are_not_its_own(
    tmp_path: Path, changes: dict[str, Any], base_model: str | None, argument: str
) -> None:
    found = card(tmp_path, {**PROVENANCE, **changes}, artefact=Artefact("heads", 9, "float32", 8, 12, 2, heads=2))
    assert found.data.base_model == base_model and argument in found.text and "zoe" not in str(found)
    assert ("not even with the original `org/target-1b`" in found.text) == ("recipe" in changes)


def test_the_card_has_the_servers_commands_and_what_was_read_back(tmp_path: Path) -> None:
    text = card(tmp_path, commands=COMMANDS, compared=("12 tensors", "a|b", "no target in /home/zoe/models")).text
    command = """vllm serve TARGET --config '{"model":"DIR"}'"""
    assert f"**vllm**\n\n```sh\n{command}\n```\n\n- tried with 0.1\n- Warning: a\\|b\n" in text
    assert "read the files back:\n\n- 12 tensors\n- a\\|b\n- no target in models\n" in text


# --- licences and hostile names ---------------------------------------------------------------------------------------


def card_of(folder: Path, name: str, license: str | None = None) -> str:
    """Return the card of an artefact with this name in all its texts except the licence, which its owner chooses."""
    provenance = {**PROVENANCE, "target": {"name": name, "fingerprint": name}, "commit": name, "versions": {name: name}}
    provenance["data"] = {name: {"license": name, "rows": name, "source": name}}
    hardware = {"processor": name, "gpu": name}
    found = figures(row(name, 0, 1.5), dtype=name, prompts_from=name, commit=name, hardware=hardware)
    return str(card(folder, provenance, compared=(name,), license=license, figures=found))


@pytest.mark.parametrize("hostile", FEW_HOSTILE)
def test_names_are_shown_on_a_card_and_make_nothing(tmp_path: Path, hostile: str) -> None:
    def parts(name: str) -> list[str]:
        return [kind for kind in kinds(ModelCard(card_of(tmp_path, name, license=name)).text) if kind not in HARMLESS]

    assert parts(hostile) == parts("harmless")


def test_no_secret_gets_onto_a_card_in_whatever_field_it_stands(tmp_path: Path) -> None:
    for secret in SECRETS:
        text = card_of(tmp_path, secret)
        for found in ("0123456789", "ABCDEFG0", "AKIAIOS", "swordfish", "abc.def", "YWJj", "eyJz"):
            assert found not in text, secret


def test_prompts_that_the_target_wrote_are_counted_on_the_card(tmp_path: Path) -> None:
    counts = {"written_by": "the target", "draws": 128, "prompts": 60, "removed": {"repeated": 3, "too short": 8}}
    about = {"sha256": "ab", "rows": 60, "prompts": [counts, "questions.jsonl"]}
    text = str(card(tmp_path, PROVENANCE | {"data": {"own.jsonl": about}}))
    assert "- the target itself wrote 60 prompts in 128 draws; removed: 3 repeated, 8 too short\n" in text
