"""Exports decoded with: the same texts, passes and accepted tokens by the files as by the trained weights, or none."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_export import random_heads
from tiny_training import recipe_content, write_corpus, write_target

from decoding.model.heads import MedusaConfig
from trainer.export import draft, headstart
from trainer.export.exporter import export
from trainer.recipe.reading import parse_recipe

HEADS = MedusaConfig(hidden_size=16, vocab_size=16, num_heads=2, tree=((0,), (1,), (0, 0)))


def run_of(folder: Path, kind: str) -> Path:
    """The final folder of a run in ``folder``: its target, its data, and its provenance without weights.

    The target has 128 positions and ends no text: its end token is none of its vocabulary.
    """
    write_target(folder / "target", max_position_embeddings=128)
    (folder / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": 16}))
    write_corpus(folder)
    final = folder / "run" / "final"
    final.mkdir(parents=True)
    evaluation = {"prompts": 1, "max_new_tokens": 14}
    recipe = parse_recipe({**recipe_content(folder, kind), "evaluation": evaluation}).model_dump(mode="json")
    stored = {"recipe": recipe, "target": {"name": str(folder / "target")}}
    (final / "provenance.json").write_text(json.dumps(stored))
    return final


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    final = run_of(tmp_path, "medusa")
    random_heads(HEADS, torch.bfloat16).save_pretrained(final)
    return final


@pytest.fixture
def target_as_draft(tmp_path: Path) -> Path:
    final = run_of(tmp_path, "draft")
    write_target(final, max_position_embeddings=128)
    return final


@pytest.mark.parametrize(
    ("name", "change"), [("medusa", {}), ("medusa", {"shared_lm_head": True}), ("markov", {"markov_rank": 3})]
)
def test_exported_heads_draft_as_the_trained_ones(
    heads: Path, tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    random_heads(replace(HEADS, **change), torch.bfloat16).save_pretrained(heads)
    sentence = export(heads.parent, tmp_path / "out", "headstart").compared[-1]
    assert sentence.startswith(
        f"3 prompts of heldout.jsonl decoded with both ({name}, tree of 3): 3/3 texts equal, 3/3 as"
    )
    assert "3/3 as in plain decoding" in sentence and sentence.endswith("logits of 2 heads bit-equal")


def test_a_draft_that_is_its_target_has_every_token_accepted(target_as_draft: Path, tmp_path: Path) -> None:
    """14 tokens each: one by the prefill, 10 in 2 passes of 4 + 1, and the last 3 in another."""
    sentence = export(target_as_draft, tmp_path / "out", "draft").compared[-1]
    assert "(draft model, 4 tokens): 3/3 texts equal, 3/3 as in plain decoding" in sentence
    assert sentence.endswith(f"{13 / 3:.2f} tokens per target pass, accepted 9/9/6/6 in 9 passes")


def test_without_target_or_prompts_the_export_says_what_to_give(heads: Path, tmp_path: Path) -> None:
    """A recorded target on the Hub is not fetched: it is taken where it is in the cache."""
    stored = json.loads((heads / "provenance.json").read_text())

    def told(name: str, **changes: Any) -> str:
        (heads / "provenance.json").write_text(json.dumps({**stored, **changes}))
        return export(heads, tmp_path / name, "headstart").compared[-1]

    elsewhere = told("1", target={"name": "org/none"})
    assert elsewhere.startswith("no prompts were decoded with the exported files: the target org/none cannot be ")
    assert elsewhere.endswith("; give it as --target")
    (tmp_path / "heldout.jsonl").unlink()
    assert told("2").endswith("heldout.jsonl, is not on this machine; give a .jsonl file of prompts as --prompts")
    assert "the held-out prompts of the training run are not recorded" in told("3", recipe={})
    (heads / "provenance.json").unlink()
    assert "give it as --target" in export(heads, tmp_path / "bare", "headstart").compared[-1]


def test_heads_that_read_back_otherwise_are_caught_by_their_logits(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = headstart.load_heads

    def without_biases(folder: Path, target: Any) -> Any:
        wrong = read(folder, target)
        with torch.no_grad():
            for name, parameter in wrong.named_parameters():
                parameter.mul_(0 if name.endswith("bias") and folder != heads else 1)
        return wrong

    monkeypatch.setattr(headstart, "load_heads", without_biases)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        ValueError, match=r"decodes differently from the trained weights: the heads' logits differ after p"
    ):
        export(heads, tmp_path / "out", "headstart")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def read_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the written draft read back as another one than the trained."""
    load = draft.load_draft

    def noisy(name: str, *rest: Any) -> Any:
        read = load(name, *rest)
        if "partial" in name:
            with torch.no_grad():
                read.model.get_output_embeddings().weight.add_(torch.randn(16, 16))
        return read

    torch.manual_seed(0)
    monkeypatch.setattr(draft, "load_draft", noisy)


def test_a_draft_that_reads_back_otherwise_is_caught_by_its_counts(
    target_as_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_with_noise(monkeypatch)
    with pytest.raises(ValueError, match=r"4\.33 tokens per target pass, accepted 9/9/6/6 in 9 passes, exported \d"):
        export(target_as_draft, tmp_path / "out", "draft")
    assert not (tmp_path / "out").exists()


def test_a_format_that_rounds_tells_both_acceptances_and_its_texts_are_equal(
    target_as_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_with_noise(monkeypatch)
    describe = draft.describe_model
    monkeypatch.setattr(draft, "describe_model", lambda *given: replace(describe(*given), rounded=True))
    sentence = export(target_as_draft, tmp_path / "out", "draft").compared[-1]
    assert "3/3 texts equal, 3/3 as in plain decoding; trained: 4.33 tokens per target pass" in sentence
    assert "; exported: " in sentence and "4.33" not in sentence.partition("exported")[2]
