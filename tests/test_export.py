"""An export has the names, shapes and bits that servers load and a correct card, or nothing is written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import hub as hub
from safetensors.torch import load_file
from test_medusa_training import disturb, objective_on
from tiny_models import tiny_model
from tiny_training import recipe_content, write_corpus, write_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from decoding.files.fingerprint import stored_fingerprint
from decoding.files.stored import write_weights
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_model
from trainer.export import folder_formats
from trainer.export.exporter import export
from trainer.recipe.reading import parse_recipe

CONFIG = MedusaConfig(hidden_size=8, vocab_size=12, num_heads=2, num_layers=2, tree=((0,), (1,), (0, 0), (0, 2)))


def random_heads(config: MedusaConfig = CONFIG, dtype: torch.dtype = torch.float32) -> MedusaHeads:
    """Make heads in which every tensor, including biases, is random."""
    generator = torch.Generator().manual_seed(0)
    heads = MedusaHeads(config)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return heads.to(dtype)


@pytest.fixture
def heads_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    random_heads(dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny draft in bf16 with a word-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("draft") / "run"
    vocabulary = {"<unk>": 0, "<eos>": 1} | {chr(97 + i): i + 2 for i in range(14)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tiny_model(vocab=16).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "optimizer_state.json").write_text("{}")
    return folder


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def report_of(**fingerprints: str | None) -> dict[str, Any]:
    """Make a report of heads or a draft, and of prompt lookup, with one row each."""
    drafted = [("medusa", "heads"), ("draft model", "draft"), ("prompt lookup", None), ("plain", None)]
    drafted += [("transformers generate", None), ("transformers assisted", "draft")]
    rows = [
        {
            "setting": "T=1, typical",
            "method": method,
            "label": "lossy",
            "artefact": artefact,
            "drafter": artefact and f"the {artefact}",
        }
        for method, artefact in drafted
    ]
    specs = {"heads": "heads:final", "draft": "draft:final,tokens=4"}
    found = {specs.get(name, name): fingerprint for name, fingerprint in fingerprints.items()}
    return {"drafters": {f"the {kind}": spec for kind, spec in specs.items()}, "fingerprints": found, "rows": rows}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# --- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, {"markov_rank": 3}, {"shared_lm_head": True}])
def test_our_own_format_comes_back_bit_equal_in_its_stored_dtype(tmp_path: Path, change: dict[str, Any]) -> None:
    config = replace(CONFIG, **change)
    random_heads(config, torch.bfloat16).save_pretrained(tmp_path / "run")
    summary = export(tmp_path / "run", tmp_path / "out", "heads")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("run", "out"))
    assert {name: bits(tensor) for name, tensor in before.items()} == {n: bits(t) for n, t in after.items()}
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert MedusaHeads.from_pretrained(tmp_path / "out").config == config
    assert "out, format heads:" in str(summary) and "bit-equal" in summary.compared[0]
    assert summary.files == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert sorted(summary.files) == ["README.md", "config.json", "model.safetensors"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# Medusa heads\n" in card and ("uses the target's lm_head" in card) == ("shared_lm_head" in change)
    assert ("A bias of rank 3 that depends on the" in card) == ("markov_rank" in change)


def test_a_draft_comes_back_with_bit_equal_logits_and_its_tokenizer(draft_folder: Path, tmp_path: Path) -> None:
    summary = export(draft_folder, tmp_path / "out", "draft")
    before, after = (AutoModelForCausalLM.from_pretrained(f, dtype="auto") for f in (draft_folder, tmp_path / "out"))
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    assert after.dtype == torch.bfloat16
    assert torch.equal(before(tokens).logits, after(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a b c")["input_ids"] == [2, 3, 4] and tokenizer.chat_template
    assert "optimizer_state.json" not in summary.files, "only what a server loads is exported"
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= summary.files.keys()
    assert not any(str(draft_folder.parent) in path.read_text(errors="replace") for path in summary.folder.iterdir())


# --- reports ---------------------------------------------------------------------------------------------------------


def test_a_report_of_other_weights_or_on_another_target_does_not_get_onto_a_card(
    heads_folder: Path, tmp_path: Path
) -> None:
    mine, out = stored_fingerprint(heads_folder), tmp_path / "out"
    write_json(heads_folder / "provenance.json", {"target": {"name": "org/target", "fingerprint": "feed"}})
    rejected = [
        ({"rows": report_of()["rows"]}, "does not record the fingerprints of the weights that it measured"),
        (report_of(draft="0" * 16), f"did not measure the heads in .*{mine}"),
        (report_of(heads="0" * 16), f"did not measure the heads in .*{mine}"),
        (report_of(heads=mine, target="0" * 16), r"measured with the target 0{16}, but .* was trained for feed"),
    ]
    for report, complaint in rejected:
        path = write_json(tmp_path / "report.json", report)
        with pytest.raises(ValueError, match=f"{complaint}.*: measure these weights with `headstart evaluate`, or"):
            export(heads_folder, out, "heads", report=path)
    assert not out.exists()
    path = write_json(tmp_path / "report.json", report_of(heads=mine, target="feed"))
    card = (export(heads_folder, out, "heads", report=path).folder / "README.md").read_text()
    assert "base_model: org/target" in card and str(tmp_path) not in card


# --- whole or not at all -------------------------------------------------------------------------------------------


def test_a_corrupted_write_is_caught_and_leaves_nothing(
    heads_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_one_bit_wrong(folder: Path, state: dict[str, torch.Tensor], *sizes: int) -> None:
        wrong = {name: tensor.clone() for name, tensor in state.items()}
        next(iter(wrong.values())).view(torch.int16).reshape(-1)[0] ^= 1
        write_weights(folder, wrong, *sizes)

    monkeypatch.setattr("decoding.model.heads.write_weights", write_one_bit_wrong)
    with pytest.raises(ValueError, match="differs from what was written"):
        export(heads_folder, tmp_path / "out", "heads")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_corrupted_draft_is_caught(draft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.export import folder_formats

    load = folder_formats._load

    def load_one_weight_wrong(folder: Path) -> Any:
        model, tokenizer = load(folder)
        if folder != draft_folder:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1
        return model, tokenizer

    monkeypatch.setattr(folder_formats, "_load", load_one_weight_wrong)
    with pytest.raises(ValueError, match="differs from what was written"):
        export(draft_folder, tmp_path / "out", "draft")
    assert list(tmp_path.iterdir()) == []


# --- refusals ------------------------------------------------------------------------------------------------------


def test_every_format_refuses_what_it_cannot_hold(heads_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    for source, format in ((heads_folder, "draft"), (heads_folder, "gguf"), (draft_folder, "heads")):
        with pytest.raises(ValueError, match="does not accept: use format"):
            export(source, tmp_path / "out", format)
    with pytest.raises(ValueError, match="format is 'onnx': use one of heads, dspark"):
        export(heads_folder, tmp_path / "out", "onnx")
    with pytest.raises(ValueError, match="format 'heads' lacks the type 'f32': omit --type"):
        export(heads_folder, tmp_path / "out", "heads", type="f32")
    with pytest.raises(ValueError, match="format 'gguf' lacks the type 'q4': use one of f32"):
        export(draft_folder, tmp_path / "out", "gguf", type="q4")
    assert not (tmp_path / "out").exists()


def test_a_source_without_weights_or_tokenizer_is_refused(
    heads_folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"the folder .*nowhere does not exist: use the folder of a training run"):
        export(tmp_path / "nowhere", tmp_path / "out", "heads")
    (heads_folder / "model.safetensors").rename(heads_folder / "model.bin")
    with pytest.raises(ValueError, match="contains no weights"):
        export(heads_folder, tmp_path / "out", "heads")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((draft_folder / name).read_bytes())
    with pytest.raises(ValueError, match="contains no tokenizer"):
        export(bare, tmp_path / "out", "draft")


def test_an_occupied_destination_is_refused(heads_folder: Path, tmp_path: Path) -> None:
    export(heads_folder, tmp_path / "out", "heads")
    with pytest.raises(ValueError, match="not empty"):
        export(heads_folder, tmp_path / "out", "heads")
    for destination in (heads_folder, tmp_path):
        with pytest.raises(ValueError, match="is or contains the source"):
            export(heads_folder, destination, "heads")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not a folder"):
        export(heads_folder, tmp_path / "file", "heads")


def test_an_exported_draft_names_no_code_that_is_not_with_it(draft_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(draft_folder, source)
    config = json.loads((source / "config.json").read_text())
    write_json(source / "config.json", {**config, "auto_map": {"AutoConfig": "evil.Config"}})
    export(source, tmp_path / "out", "draft")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """Return the final folder of a run of heads with adapters, on a target of 128 positions."""
    folder = run_of(tmp_path, "medusa")
    torch.manual_seed(0)
    objective = objective_on(CausalLM(load_model(str(tmp_path / "target"), torch.float32)))
    disturb(objective)
    objective.save(folder)
    stored = json.loads((folder / "provenance.json").read_text())
    stored["recipe"]["adapters"] = {"rank": 2}
    (folder / "provenance.json").write_text(json.dumps(stored))
    return folder


def test_the_adapted_target_goes_with_its_heads(final: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = export(final, out, "heads")
    assert {"target/model.safetensors", "target/tokenizer.json", "model.safetensors"} <= summary.files.keys()
    assert stored_fingerprint(out / "target") == stored_fingerprint(final / "target")
    assert stored_fingerprint(out / "target") != stored_fingerprint(tmp_path / "target")
    decoded, card = summary.compared[-1], (out / "README.md").read_text()
    assert "3/3 texts are equal, 3/3 equal plain decoding" in decoded and "logits of 2 heads are bit-equal" in decoded
    assert "`DIR/target` is the adapted target" in card and str(tmp_path) not in card
    assert str(out / "target") in summary.commands[0].argv, "vLLM serves the adapted target"


def test_a_target_that_is_copied_wrongly_is_caught_and_leaves_nothing(
    final: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(source: Path, destination: Path) -> None:
        content = bytearray(Path(source).read_bytes())
        content[-1] ^= 1
        Path(destination).write_bytes(content)

    monkeypatch.setattr("trainer.export.companions.shutil.copyfile", copy)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"target/.* differs from its original after copying"):
        export(final, tmp_path / "out", "heads")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


HEADS = MedusaConfig(hidden_size=16, vocab_size=16, num_heads=2, tree=((0,), (1,), (0, 0)))


def run_of(folder: Path, kind: str) -> Path:
    """Write the final folder of a run in ``folder``, with target, data and provenance but without weights.

    The target has 128 positions and never ends a text, because its end token is outside its vocabulary.
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
    sentence = export(heads.parent, tmp_path / "out", "heads").compared[-1]
    assert sentence.startswith(
        f"3 prompts of heldout.jsonl, trained and exported weights ({name}, tree of 3): 3/3 texts are equal, "
    )
    assert "3/3 equal plain decoding" in sentence and sentence.endswith("logits of 2 heads are bit-equal")


def test_a_draft_that_is_its_target_has_every_token_accepted(target_as_draft: Path, tmp_path: Path) -> None:
    """Each text has 14 tokens: one from the prefill, 10 from two passes of 4 + 1, and the last 3 from a third pass."""
    sentence = export(target_as_draft, tmp_path / "out", "draft").compared[-1]
    assert "(draft model, 4 tokens): 3/3 texts are equal, 3/3 equal plain decoding" in sentence
    assert sentence.endswith(f"{13 / 3:.2f} tokens per target pass; 9/9/6/6 accepted in 9 passes")


def test_without_target_or_prompts_the_export_says_what_to_give(heads: Path, tmp_path: Path) -> None:
    """A recorded target on the Hub is not fetched, but it is used if it is in the cache."""
    stored = json.loads((heads / "provenance.json").read_text())

    def told(name: str, **changes: Any) -> str:
        (heads / "provenance.json").write_text(json.dumps({**stored, **changes}))
        return export(heads, tmp_path / name, "heads").compared[-1]

    elsewhere = told("1", target={"name": "org/none"})
    assert elsewhere.startswith("no prompts were decoded with the exported files: the target org/none cannot be ")
    assert elsewhere.endswith("; pass it as --target")
    (tmp_path / "heldout.jsonl").unlink()
    assert told("2").endswith("heldout.jsonl, is not on this machine; pass a .jsonl file of prompts as --prompts")
    assert "the held-out prompts of the training run are not recorded" in told("3", recipe={})
    (heads / "provenance.json").unlink()
    assert "pass it as --target" in export(heads, tmp_path / "bare", "heads").compared[-1]


def test_heads_that_read_back_otherwise_are_caught_by_their_logits(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = folder_formats.load_heads

    def without_biases(folder: Path, target: Any) -> Any:
        wrong = read(folder, target)
        with torch.no_grad():
            for name, parameter in wrong.named_parameters():
                parameter.mul_(0 if name.endswith("bias") and folder != heads else 1)
        return wrong

    monkeypatch.setattr(folder_formats, "load_heads", without_biases)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        ValueError, match=r"decodes differently from the trained weights: the heads' logits differ after p"
    ):
        export(heads, tmp_path / "out", "heads")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def read_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the written draft read back differently from the trained draft."""
    load = folder_formats.load_draft

    def noisy(name: str, *rest: Any) -> Any:
        read = load(name, *rest)
        if "partial" in name:
            with torch.no_grad():
                read.model.get_output_embeddings().weight.add_(torch.randn(16, 16))
        return read

    torch.manual_seed(0)
    monkeypatch.setattr(folder_formats, "load_draft", noisy)


def test_a_draft_that_reads_back_otherwise_is_caught_by_its_counts(
    target_as_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_with_noise(monkeypatch)
    with pytest.raises(ValueError, match=r"4\.33 tokens per target pass; 9/9/6/6 accepted in 9 passes; exported \d"):
        export(target_as_draft, tmp_path / "out", "draft")
    assert not (tmp_path / "out").exists()


def test_a_format_that_rounds_tells_both_acceptances_and_its_texts_are_equal(
    target_as_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_with_noise(monkeypatch)
    describe = folder_formats.describe_model
    monkeypatch.setattr(folder_formats, "describe_model", lambda *given: replace(describe(*given), rounded=True))
    sentence = export(target_as_draft, tmp_path / "out", "draft").compared[-1]
    assert "3/3 texts are equal, 3/3 equal plain decoding; trained: 4.33 tokens per target pass" in sentence
    assert "; exported: " in sentence and "4.33" not in sentence.partition("exported: ")[2]
