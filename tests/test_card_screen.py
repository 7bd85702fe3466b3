"""The card's first screen, its metadata for the Hub, licences, and targets and weights of other origins."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from test_card import ESTIMATE, PROVENANCE, SPREAD, TOTALS, report
from test_markdown import HARMLESS, kinds

from trainer.export.artefact import Artefact
from trainer.export.card import render_card
from trainer.export.licences import check_license, target_license
from trainer.export.measured import Measured, read_measured
from trainer.export.origin import read_provenance
from trainer.export.served import ServerCommand

HEADS = Artefact("vllm", 1234, "bfloat16", hidden_size=8, vocab_size=12, layers=2, heads=2, tree_nodes=4)
DRAFT = Artefact("draft", 1234, "bfloat16", hidden_size=8, vocab_size=12, layers=2)


def row(method: str, temperature: float, value: float, **changes: Any) -> dict[str, Any]:
    """A row of heads, whose speed-up over plain decoding has an interval of 0.2 to either side."""
    return {
        "setting": "greedy" if temperature == 0 else f"T={temperature:g}",
        "temperature": temperature,
        "method": method,
        "label": "lossless",
        "artefact": "heads",
        "tokens_per_pass": ESTIMATE,
        "speedup_of_totals": {**TOTALS, "value": value, "low": value - 0.2, "high": value + 0.2},
        "speedup": SPREAD,
    } | changes


def measured(*rows: dict[str, Any], chains: bool = False, **changes: Any) -> Measured:
    content = {**report(), "prompts_from": "mine.jsonl", "rows": list(rows), **changes}
    return read_measured(content, "r", "heads", chains=chains)


def card(
    folder: Path, provenance: dict[str, Any] | None = None, artefact: Artefact = HEADS, **options: Any
) -> ModelCard:
    """The card of an artefact whose run left this provenance."""
    if provenance is not None:
        (folder / "provenance.json").write_text(json.dumps(provenance))
    return ModelCard(render_card(artefact, read_provenance(folder), options.pop("measured", None), **options))


def first_screen(card: ModelCard) -> str:
    return str(card.text).split("<details>")[0].replace("\N{NO-BREAK SPACE}", " ")


def test_a_narrow_table_breaks_no_interval(tmp_path: Path) -> None:
    assert "**1.50× [1.30,\N{NO-BREAK SPACE}1.70]**" in card(tmp_path, measured=measured(row("tree", 0, 1.5))).text


# --- the first screen ----------------------------------------------------------------------------------------------


def test_the_first_screen_has_the_fastest_lossless_method_of_each_temperature(tmp_path: Path) -> None:
    found = measured(
        row("chain", 0, 1.4),
        row("tree", 0, 1.5),
        row("transformers assisted", 0, 9.0),
        row("plain", 0, 8.0, artefact=None),
        row("tree", 1, 1.25),
        row("typical", 1, 2.5, label="lossy", setting="T=1, typical"),
    )
    screen = first_screen(card(tmp_path, PROVENANCE, measured=found))
    assert "| | greedy | T=1 |\n|---|---|---|\n" in screen
    assert "| speed-up over plain decoding | **1.50× [1.30, 1.70]** | **1.25× [1.05, 1.45]** |\n" in screen
    assert "| tokens per target pass | 2.31 [2.20, 2.43] | 2.31 [2.20, 2.43] |\n" in screen
    assert "| text | **lossless** | **lossless** |\n| drafted by | tree | tree |\n" in screen
    assert "12 prompts of `mine.jsonl`, up to 96 new tokens each, on Example GPU, Example CPU (2 threads)" in screen


def test_a_lossy_method_is_on_the_first_screen_only_where_there_is_no_other(tmp_path: Path) -> None:
    found = measured(row("typical", 1, 2.5, label="lossy"))
    assert "| text | **lossy** |" in first_screen(card(tmp_path, PROVENANCE, measured=found))


def test_where_servers_draft_chains_the_first_screen_has_a_chain_s_figures_or_says_that_it_has_a_tree_s(
    tmp_path: Path,
) -> None:
    rows = (
        row("heads, a tree", 0, 1.5, shape="tree"),
        row("heads, a chain", 0, 1.4, shape="chain"),
        row("heads, a tree", 1, 1.25, shape="tree"),
        row("typical chain", 1, 2.5, label="lossy", shape="chain"),
    )
    screen = first_screen(card(tmp_path, measured=measured(*rows, chains=True)))
    assert "| drafted by | heads, a chain | heads, a tree |\n" in screen
    assert "The figures above (T=1) are of a tree. Servers draft one chain from this format" in screen
    screen = first_screen(card(tmp_path, measured=measured(*rows)))
    assert "| drafted by | heads, a tree | heads, a tree |\n" in screen and "are of a tree" not in screen


@pytest.mark.parametrize(
    ("rows", "limit"),
    [
        ([row("tree", 0, 0.7)], "greedy: no faster than plain decoding on these prompts."),
        ([row("tree", 1, 1.1)], "T=1: these prompts do not show a gain, as the interval holds 1×."),
        (
            [row("tree", 0, 1.5), row("prompt lookup", 0, 1.6, artefact=None)],
            "greedy: faster on these prompts, and without any weights, was prompt lookup, 1.60× [1.40, 1.80].",
        ),
        ([row("tree", 0, 1.5), row("prompt lookup", 0, 1.4, artefact=None)], None),
    ],
)
def test_the_first_screen_says_where_nothing_is_gained(tmp_path: Path, rows: Any, limit: str | None) -> None:
    screen = first_screen(card(tmp_path, PROVENANCE, measured=measured(*rows)))
    assert (limit or "**Limits.**") in screen.replace("\\", "")
    assert any(words in screen for words in ("no faster", "show a gain", "without any weights")) == (limit is not None)


def test_the_first_screen_says_from_which_batch_on_it_is_slower(tmp_path: Path) -> None:
    cells = [row("tree", 0, speed, batch_size=size) for size, speed in ((1, 1.5), (4, 1.1), (16, 0.9), (32, 0.8))]
    found = measured(cells[0], grid=cells[1:])
    assert "greedy: slower than plain decoding from batch 16 on." in first_screen(card(tmp_path, measured=found))


def test_everything_behind_the_first_screen_is_folded(tmp_path: Path) -> None:
    text = card(tmp_path, PROVENANCE, measured=measured(row("tree", 0, 1.5))).text
    assert len(first_screen(card(tmp_path)).splitlines()) < 40
    assert text.count("<details><summary>") == text.count("</details>") >= 5
    behind = [part.split("</details>")[1].strip() for part in text.split("<details>")[1:]]
    assert behind == [""] * (len(behind) - 1) + ["Trained and exported with Headstart."]


COMMANDS = (
    ServerCommand("vllm", ("vllm", "serve", "TARGET", "--config", '{"model":"DIR"}'), ("tried with 0.1",), ("a|b",)),
    ServerCommand("transformers", ("python", "-c", "import transformers\n")),
)


def test_the_first_servers_command_is_on_the_first_screen_and_all_are_behind_it(tmp_path: Path) -> None:
    found = card(tmp_path, commands=COMMANDS)
    command = """vllm serve TARGET --config '{"model":"DIR"}'"""
    assert f"```sh\nhf download ORG/NAME --local-dir DIR\n{command}\n```\n" in first_screen(found)
    assert f"**vLLM**\n\n```sh\n{command}\n```\n\n- tried with 0.1\n- Warning: a\\|b\n" in found.text
    assert "hf download zoe/heads --local-dir DIR\n" in card(tmp_path, commands=COMMANDS, repository="zoe/heads").text
    assert "**transformers**\n\n```python\nimport transformers\n```\n" in found.text
    assert "`TARGET` is the model that these weights were trained for." in found.text


def test_the_card_tells_what_was_read_back(tmp_path: Path) -> None:
    text = card(tmp_path, compared=("12 tensors read back bit-equal", "a|b", "no target in /home/zoe/models")).text
    assert "read the files back:\n\n- 12 tensors read back bit-equal\n- a\\|b\n- no target in models\n" in text


# --- metadata ------------------------------------------------------------------------------------------------------


def test_the_metadata_holds_what_was_measured_and_nothing_else(tmp_path: Path) -> None:
    unmeasured = row("tree", 1, 1.5, tokens_per_pass=None, speedup_of_totals=None, speedup=None)
    data = card(tmp_path, PROVENANCE, measured=measured(row("tree", 0, 1.5), unmeasured), license="mit").data
    assert (data.base_model, data.base_model_relation) == ("org/target-1b", "adapter")
    assert (data.library_name, data.pipeline_tag, data.license) == ("vllm", "text-generation", "mit")
    assert data.model_name == "Medusa heads for org/target-1b"
    assert [(found.metric_type, found.metric_value, found.dataset_config) for found in data.eval_results] == [
        ("speedup", 1.5, "greedy"),
        ("tokens_per_target_pass", 2.314, "greedy"),
    ]
    place = "mine.jsonl: 12 prompts, 96 new tokens, on Example GPU, Example CPU (2 threads) in bfloat16"
    assert {found.dataset_name for found in data.eval_results} == {place}
    assert "model-index" not in card(tmp_path, PROVENANCE).data.to_dict()


@pytest.mark.parametrize(
    ("changes", "tags"),
    [({}, ["draft-model"]), ({"at_once": 4}, ["parallel-draft", "draft-model"])],
)
def test_a_draft_is_related_to_its_target_by_no_word_of_the_hubs(
    tmp_path: Path, changes: dict[str, Any], tags: list[str]
) -> None:
    data = card(tmp_path, PROVENANCE, Artefact("draft", 9, "bfloat16", 8, 12, 2, **changes)).data.to_dict()
    assert data["base_model"] == "org/target-1b" and "base_model_relation" not in data
    assert data["tags"] == ["speculative-decoding", *tags, "headstart"]


# --- licences and data ---------------------------------------------------------------------------------------------


def test_data_of_the_hub_is_linked_and_licences_are_named_or_not_recorded(tmp_path: Path) -> None:
    of_hub = {"sha256": "ab", "rows": 7, "source": "org/set"}
    of_file = {"sha256": "cd", "rows": 8, "source": "my notes", "license": "CC BY 4.0"}
    data = {"org/set:main": of_hub, "/home/zoe/more.jsonl": of_file}
    found = card(tmp_path, {**PROVENANCE, "data": data})
    link = "[`org/set`](https://huggingface.co/datasets/org/set)"
    assert f"| org/set:main | 7 | {link} | not recorded (see its card) | ab |\n" in found.text
    assert "| more.jsonl | 8 | my notes | CC BY 4.0 | cd |\n" in found.text
    assert found.data.datasets == ["org/set"]
    assert "datasets" not in card(tmp_path, PROVENANCE).data.to_dict()


def test_the_targets_licence_is_the_one_that_its_own_card_names(tmp_path: Path) -> None:
    assert target_license(None) is None and target_license(str(tmp_path)) is None
    for front_matter, named in [
        ("license: apache-2.0", "apache-2.0"),
        ("license: other\nlicense_name: my-terms", "my-terms"),
        ("license: [mit, gpl]", None),
        ("license: [", None),
        ("tags: [x]", None),
    ]:
        (tmp_path / "README.md").write_text(f"---\n{front_matter}\n---\n# A model\n")
        assert target_license(str(tmp_path)) == named
    text = card(tmp_path, PROVENANCE, target_license="apache-2.0").text
    assert "- The target, [`org/target-1b`](https://huggingface.co/org/target-1b): apache-2.0, by its own card" in text
    assert "- These weights: their owner gave no licence" in text


@pytest.mark.parametrize("license", ["Apache 2.0", "", "mit\n---"])
def test_a_licence_that_the_hub_cannot_know_is_refused(license: str) -> None:
    with pytest.raises(ValueError, match=r"give the Hub's identifier, such as apache-2\.0"):
        check_license(license)


# --- other origins -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("artefact", [HEADS, DRAFT])
def test_the_card_for_the_embedded_target_gives_no_command_that_cannot_work(tmp_path: Path, artefact: Artefact) -> None:
    embedded = {**PROVENANCE, "recipe": {"target": "quickstart"}, "target": {"name": "quickstart"}}
    text = card(tmp_path, embedded, artefact, commands=COMMANDS).text
    assert "**No other machine has this target.**" in text and "```sh\nmake demo\n```" in text
    for command in ("vllm serve", "headstart generate", "from_pretrained", "hf download", "Commands for each server"):
        assert command not in text
    assert "No other machine" not in card(tmp_path, PROVENANCE, artefact).text


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", "a|b\n\n# heading", "![x](http://evil.example/x.png)"]
)
def test_names_and_licences_are_shown_and_make_nothing(tmp_path: Path, hostile: str) -> None:
    def parts(name: str) -> list[str]:
        text = card(tmp_path, {**PROVENANCE, "commit": name}, compared=(name,), target_license=name, license=name).text
        return [kind for kind in kinds(text) if kind not in HARMLESS]

    assert parts(hostile) == parts("harmless")
