"""The card: every figure with its label, where the artefact comes from, and nothing that is nobody's business."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from decoding.measure.redact import basename, is_hub_id, without_local_paths
from trainer.export.artefact import Artefact
from trainer.export.card import render_card
from trainer.export.measured import read_measured, read_report
from trainer.export.origin import read_provenance

ESTIMATE = {"value": 2.314, "low": 2.2, "high": 2.43, "observations": 12}
SPREAD = {"median": 1.712, "low_quartile": 1.6, "high_quartile": 1.82, "observations": 12}
TOTALS = {"value": 1.512, "low": 1.4, "high": 1.62, "observations": 12}
SHARES = [
    {"value": 0.71, "low": 0.69, "high": 0.73, "observations": 2812},
    {"value": 0.48, "low": 0.45, "high": 0.51, "observations": 1996},
]


def report() -> dict[str, Any]:
    """A report as `evaluate` returns it: a lossless row, a lossy one, and a peer without acceptance."""
    figures = {
        "artefact": "heads",
        "passes": 1996,
        "prompts": 12,
        "speedup_of_totals": TOTALS,
        "tokens_per_pass": ESTIMATE,
        "conditional_acceptance": SHARES,
        "unconditional_acceptance": SHARES,
        "speedup": SPREAD,
        "speedup_with_prefill": SPREAD,
    }
    greedy = {"identical": 11, "of": 12, "largest_margin": 0.03125, "ended_early": 0}
    peer = {"setting": "greedy", "method": "transformers generate", "label": "lossless", "speedup": SPREAD}
    return {
        "hardware": {"processor": "Example CPU", "cores": 2, "threads": 2, "gpu": "Example GPU"},
        "versions": {"torch": "2.13.0"},
        "commit": "abc123def456",
        "dtype": "bfloat16",
        "prompts": 12,
        "rounds": 1,
        "max_new_tokens": 96,
        "rows": [
            {**peer, "speedup_with_prefill": SPREAD, "speedup_over_transformers": {**SPREAD, "median": float("nan")}},
            {"setting": "greedy", "method": "medusa", "label": "lossless", "speedup_over_transformers": SPREAD}
            | {**figures, "identical_to_plain": greedy},
            {"setting": "T=1, typical", "method": "a|b", "label": "lossy", "speedup_over_transformers": None} | figures,
        ],
    }


PROVENANCE: dict[str, Any] = {
    "commit": "0123456789ab-dirty",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "hardware": {"processor": "Example CPU", "cores": 2, "threads": 2},
    "recipe": {
        "kind": "medusa",
        "target": "org/target-1b",
        "data": {"train": "/home/zoe/corpus/train.jsonl"},
        "note": "made from /home/zoe/notes/idea.txt and ~/other/plan.md",
        "api_key": "swordfish",
    },
    "data": {"/home/zoe/corpus/train.jsonl": {"sha256": "ab" * 32, "rows": 1234}},
    "target": {"name": "org/target-1b", "fingerprint": "feedfacecafebeef"},
    "steps": 1500,
    "tokens": 2_500_000,
}


STRETCHES = [
    {"first_step": 0, "learning_rate": 1e-3, "mixed_precision": "bf16"},
    {"first_step": 20, "learning_rate": 5e-4, "mixed_precision": "no"},
]


def card_of(
    folder: Path,
    format: str = "headstart",
    provenance: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
) -> str:
    """The card of heads or a draft whose run's folder holds this provenance, with this report."""
    if provenance is not None:
        (folder / "provenance.json").write_text(json.dumps(provenance))
    if report is not None:
        (folder / "report.json").write_text(json.dumps(report))
    kind = "draft" if format == "draft" else "heads"
    path = folder / "report.json"
    measured = read_measured(without_local_paths(read_report(path)), str(path), kind) if report is not None else None
    heads = 0 if format == "draft" else 2
    artefact = Artefact(format, 1234, "bfloat16", hidden_size=8, vocab_size=12, layers=2, heads=heads, tree_nodes=4)
    return render_card(artefact, read_provenance(folder), measured).replace("\N{NO-BREAK SPACE}", " ")


def test_the_card_holds_every_figure_with_its_label_and_what_it_was_measured_on(tmp_path: Path) -> None:
    card = card_of(tmp_path, report=report())
    rows = [line for line in card.splitlines() if line.startswith(("| greedy |", "| T=1, typical |"))]
    median, totals, peer = "1.71× [1.60, 1.82]", "1.51× [1.40, 1.62]", "transformers generate"
    assert rows[:6] == [
        f"| greedy | {peer} | **lossless** | – | {median} | – | – |",
        f"| greedy | medusa | **lossless** | {totals} | {median} | – | {median} |",
        f"| T=1, typical | a\\|b | **lossy** | {totals} | {median} | – | – |",
        f"| greedy | {peer} | – | – | – | {median} |",
        f"| greedy | medusa | 2.31 [2.20, 2.43] | 1,996 (12) | – | {median} |",
        f"| T=1, typical | a\\|b | 2.31 [2.20, 2.43] | 1,996 (12) | – | {median} |",
    ]
    assert "| greedy | medusa | 2 | 0.48 [0.45, 0.51] of 1,996 | 0.48 [0.45, 0.51] of 1,996 |" in card
    for fact in ("Example GPU", "Example CPU", "bfloat16", "12 prompts", "96 new tokens", "abc123def456"):
        assert fact in card
    assert "medusa: 11 of 12, largest logit margin where they part 0.0312" in card


def test_the_card_says_how_many_texts_were_decoded_at_a_time_and_how_long_the_prompts_were(tmp_path: Path) -> None:
    measured = report()
    measured["rows"] = [{**row, "batch_size": 8, "context": 2048} for row in measured["rows"]]
    card = card_of(tmp_path, report=measured)
    assert "12 prompts of at most 2048 tokens, decoded 8 at a time, " in card
    assert "12 prompts, " in card_of(tmp_path, report=report())


def test_figures_that_could_not_be_measured_are_dashes_on_the_card(tmp_path: Path) -> None:
    """As where a text ended with its first token, or one that ended early is all that differs."""

    def without_figures(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_figures(held) for key, held in value.items()}
        if isinstance(value, list):
            return [without_figures(held) for held in value]
        return None if isinstance(value, float) else value

    early = {"identical": 11, "of": 12, "largest_margin": None, "ended_early": 1}
    unmeasured = without_figures(report())
    unmeasured["rows"][1]["identical_to_plain"] = early
    card = card_of(tmp_path, report=unmeasured)
    assert "| greedy | medusa | **lossless** | – | – | – | – |\n" in card and "None" not in card
    assert "| greedy | medusa | – | 1,996 (12) | – | – |\n" in card
    assert "- Greedy texts equal to plain decoding's, medusa: 11 of 12, one ended early." in card
    assert "one ended where the other went on, which rounding does not explain: a fault to report." in card
    unmeasured["rows"][1]["identical_to_plain"] = {**early, "ended_early": 0}
    assert "medusa: 11 of 12, largest logit margin where they part –." in card_of(tmp_path, report=unmeasured)


@pytest.mark.parametrize(
    "damage", [{"speedup": "fast"}, {"tokens_per_pass": {"value": "2"}}, {"identical_to_plain": 3}]
)
def test_a_report_with_what_is_no_figure_is_refused_in_one_sentence(tmp_path: Path, damage: dict[str, Any]) -> None:
    damaged = report()
    damaged["rows"][1] |= damage
    with pytest.raises(ValueError, match=r"report\.json holds something else than a figure .*: evaluate again"):
        card_of(tmp_path, report=damaged)


def test_the_card_holds_the_provenance_and_no_path_of_the_users_machine(tmp_path: Path) -> None:
    card = card_of(tmp_path, provenance=PROVENANCE, report=report() | {"commit": "/home/zoe/checkout at abc"})
    for fact in ("0123456789ab-dirty", "torch 2.13.0", "1,500", "2,500,000", "feedfacecafebeef", "ab" * 32, "1,234"):
        assert fact in card
    assert "| train.jsonl |" in card and '"train": "train.jsonl"' in card and "idea.txt and plan.md" in card
    for leak in ("zoe", "/home", "corpus", "~/", "swordfish", str(tmp_path)):
        assert leak not in card


def test_a_card_without_provenance_or_report_says_so(tmp_path: Path) -> None:
    card = card_of(tmp_path)
    assert "**Provenance is not recorded**" in card
    assert "Nothing was measured" in card
    assert "None" not in card


def test_a_provenance_of_another_shape_is_refused_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"as data, not an object: the trainer writes it"):
        card_of(tmp_path, provenance={**PROVENANCE, "data": ["train.jsonl"]})


def test_a_provenance_with_gaps_is_shown_with_its_gaps(tmp_path: Path) -> None:
    card = card_of(tmp_path, provenance={"commit": "abc", "target": None})
    assert "`abc`" in card and "Data: not recorded." in card and "Steps: not recorded" in card
    assert "--target TARGET" in card and "None" not in card


@pytest.mark.parametrize(
    ("target", "base_model", "argument"),
    [
        ("org/target-1b", "org/target-1b", "--target org/target-1b "),
        ("/home/zoe/models/target", None, "--target TARGET "),
        ("../runs/my target", None, "--target TARGET "),
    ],
)
def test_the_base_model_is_named_only_if_it_is_on_the_hub(
    tmp_path: Path, target: str, base_model: str | None, argument: str
) -> None:
    card = card_of(tmp_path, provenance={**PROVENANCE, "target": {"name": target}, "recipe": {"target": target}})
    assert ModelCard(card).data.base_model == base_model
    assert argument in card and "zoe" not in card


def test_the_front_matter_and_the_commands_fit_each_format(tmp_path: Path) -> None:
    expected = {
        "headstart": ("headstart", "medusa", "headstart generate --target TARGET --drafter heads:DIR"),
        "vllm": ("vllm", "medusa", "Nothing was measured"),
        "draft": ("transformers", "draft-model", "headstart generate --target TARGET --drafter draft:DIR"),
    }
    for format, (library, tag, command) in expected.items():
        card = card_of(tmp_path, format)
        front_matter = yaml.safe_load(card.split("---\n")[1])
        assert front_matter["library_name"] == library
        assert front_matter["tags"] == ["speculative-decoding", tag, "headstart"]
        assert "license" not in front_matter and "base_model" not in front_matter
        assert command in card


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("/home/zoe/a b/c.jsonl", "c.jsonl"),
        (r"C:\Users\zoe\c.jsonl", "c.jsonl"),
        ("file:///home/zoe/c.jsonl", "c.jsonl"),
        ("--data=/home/zoe/c.jsonl,/home/zoe/d.jsonl", "--data=c.jsonl,d.jsonl"),
        ("ORG/NAME at https://example.org/a/b", "ORG/NAME at https://example.org/a/b"),
        (r".*\.layers\.\d+\.q_proj", r".*\.layers\.\d+\.q_proj"),
        ("<think>a</think>", "<think>a</think>"),
        ("http://zoe:pass@host/v1", "http://(withheld)@host/v1"),
        ("key hf_abcdefghijklmnopqrst", "key (withheld)"),
    ],
)
def test_local_paths_and_secrets_are_cut_out_of_texts_and_nothing_else_is(text: str, published: str) -> None:
    assert without_local_paths({"a": [text]}) == {"a": [published]}


def test_a_folder_that_looks_like_a_hub_id_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("runs/target") and is_hub_id("runs/other") and basename("runs/target/") == "target"


def test_heads_of_an_adapted_target_are_not_said_to_belong_to_the_target_it_was_made_of(tmp_path: Path) -> None:
    adapted = {**PROVENANCE, "recipe": {**PROVENANCE["recipe"], "adapters": {"rank": 32}}}
    card = card_of(tmp_path, provenance=adapted)
    assert "are of no use with `org/target-1b` itself or any other model" in card
    assert (
        "headstart generate --target ADAPTED_TARGET --drafter heads:DIR" in card
        and "--target org/target-1b" not in card
    )
    assert "ADAPTED_TARGET" not in card_of(tmp_path, provenance=PROVENANCE)


def test_the_learning_rate_of_every_stretch_of_steps_is_on_the_card(tmp_path: Path) -> None:
    """Steps count from 1, as in the metrics."""
    card = card_of(tmp_path, provenance={**PROVENANCE, "stretches": STRETCHES})
    first = r"- Trained from step 1: learning\_rate 0.001, mixed\_precision bf16"
    second = r"- Trained from step 21: learning\_rate 0.0005, mixed\_precision no"
    assert f"{first}\n{second}\n" in card
    assert "Trained from" not in card_of(tmp_path, provenance=PROVENANCE)


@pytest.mark.parametrize("stretches", ["x", [1], {"first_step": 0}])
def test_stretches_that_are_none_are_one_sentence(tmp_path: Path, stretches: Any) -> None:
    with pytest.raises(ValueError, match=r"provenance\.json holds .* as stretches: the trainer writes it"):
        card_of(tmp_path, provenance={**PROVENANCE, "stretches": stretches})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"speedup_of_totals": {**TOTALS, "value": 99.0}}, "99.0 is not between 1.4 and 1.62"),
        ({"tokens_per_pass": {**ESTIMATE, "low": -5.0}}, "is not between -5.0"),
        ({"speedup": {**SPREAD, "median": 0.1}}, "0.1 is not between 1.6"),
    ],
)
def test_a_figure_outside_of_its_own_interval_gets_onto_no_card(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    edited = report()
    edited["rows"][1] |= changes
    with pytest.raises(ValueError, match=f"holds something else than a figure .*{complaint}.*: evaluate again"):
        card_of(tmp_path, provenance=PROVENANCE, report=edited)


@pytest.mark.parametrize("changes", [{"prompts": -3}, {"rounds": 0}, {"max_new_tokens": "many"}, {"prompts": True}])
def test_a_count_that_is_none_gets_onto_no_card(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"holds something else than a figure .*is no count"):
        card_of(tmp_path, provenance=PROVENANCE, report={**report(), **changes})


def test_rows_that_are_none_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds 5 as a row of figures: evaluate again"):
        card_of(tmp_path, provenance=PROVENANCE, report={**report(), "rows": [5, None]})
