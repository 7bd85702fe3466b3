"""A GGUF file as a model: it is decoded as it says, converted once, and refused if it would be misread."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import FakeHub, folder_on
from fake_hub import hub as hub
from gguf import GGUFReader
from gguf.quants import dequantize
from test_gguf import LLAMA3, LLAMA3_ROPE, SIZES, byte_level, split
from tiny_models import tiny_model
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoding.errors import UserError
from decoding.model import gguf_file
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.gguf_file import source_of
from decoding.model.hub import local_folder, revisions
from decoding.model.loading import eos_token_ids, load_model, load_tokenizer
from trainer.doctor.models import read_skeleton
from trainer.export.card import target_argument
from trainer.export.companions import published_provenance, target_of
from trainer.export.exporter import export
from trainer.export.gguf import write_file
from trainer.export.gguf_vocabulary import metadata_of, tensors_of, vocabulary_of
from trainer.export.serve import Serving, commands_of
from trainer.export.task import Artefact

TEXT = "hell 2024  55 l1l hell\n\n 7<|end|>"
ROPE = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def write(
    folder: Path,
    family: str = "llama",
    type: str = "f32",
    tokenizer: PreTrainedTokenizerFast | None = None,
    change: Change = lambda metadata, tensors: None,
    **sizes: Any,
) -> tuple[Path, Any]:
    """Write a random model as GGUF, after ``change``; return the file and the model."""
    model = tiny_model(family, **{**SIZES, **sizes})
    tokenizer = tokenizer or byte_level()
    tokenizer.chat_template = tokenizer.chat_template or "{{ messages[0]['content'] }}!"
    metadata = {**metadata_of(model), **vocabulary_of(tokenizer, SIZES["vocab"], (0, 5))[0]}
    tensors = dict(tensors_of(model))
    change(metadata, tensors)
    folder.mkdir()
    write_file(folder / "model.gguf", metadata, tensors.items(), type)
    return folder / "model.gguf", model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(60)[None]).logits.float()
    return found


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 24}),
        ("llama", {"rope_parameters": ROPE}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_a_file_is_read_to_the_last_bit_with_what_transformers_reader_ignores(
    tmp_path: Path, family: str, sizes: dict[str, Any]
) -> None:
    file, model = write(tmp_path / "it", family, **sizes)
    read = load_model(str(file), torch.float32)
    assert torch.allclose(logits(read), logits(model.eval()), rtol=1e-5, atol=1e-5)
    if read.config.rope_parameters["rope_type"] == "default":
        assert torch.equal(logits(read), logits(model))


def test_quantised_weights_are_dequantised_once_and_the_file_is_named(tmp_path: Path, cache: Path) -> None:
    file, model = write(tmp_path / "it", type="q8_0")
    (tmp_path / "it" / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.py", null]}}')
    read, tokenizer = load_model(str(file), torch.float32), load_tokenizer(str(file))
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(file).tensors}
    assert torch.equal(read.lm_head.weight, torch.from_numpy(stored["output.weight"]))
    assert float((logits(read) - logits(model)).abs().max()) > 0
    assert tokenizer(TEXT)["input_ids"] == byte_level()(TEXT)["input_ids"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert eos_token_ids(read) == (0, 5)
    (folder,) = cache.glob("model-*-1")
    assert folder == local_folder(str(file)) and "model.gguf" not in [path.name for path in folder.iterdir()]
    source = source_of(folder)
    assert source is not None and (source["file"], source["quantisation"]) == ("model.gguf", "Q8_0")
    again = export(file, tmp_path / "f32", "gguf", type="f32").folder / "model.gguf"
    assert torch.equal(logits(load_model(str(again), torch.float32)), logits(read)), "llama.cpp may get these weights"
    (folder / "README.md").write_text("here")
    assert stored_fingerprint(str(file)) == stored_fingerprint(folder) and (folder / "README.md").is_file(), "kept"
    findings, skeleton = read_skeleton(str(file), torch.float32, False)
    assert skeleton is not None and "read from model.gguf (quantised: Q8_0), as" in findings[1].found


@pytest.mark.parametrize(
    ("tokenizer", "named"),
    [
        (byte_level(pre_tokenizers.Digits(individual_digits=True)), "smollm"),
        (byte_level(split(LLAMA3), ignore_merges=True), "llama-bpe"),
        (byte_level(split(LLAMA3)), "smaug-bpe"),
    ],
)
def test_texts_are_split_by_the_pre_tokenizer_that_the_file_names(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, named: str
) -> None:
    file, _ = write(tmp_path / "it", tokenizer=tokenizer)
    read = load_tokenizer(str(file))
    again = vocabulary_of(read, SIZES["vocab"], (0,))[0]
    assert again["tokenizer.ggml.pre"] == named
    assert read(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]


def dropped(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["blk.0.attn_post_norm.weight"] = torch.ones(32)


def pruned(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    del tensors["blk.1.ffn_up.weight"]


def of_mars(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    metadata["general.architecture"] = "mars"


def in_parts(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    metadata["split.count"] = 3


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        (dropped, {}, r"stores [\d,]+ weights, but transformers reads [\d,]+, and 0 tensors .*original model"),
        (pruned, {}, r"stores [\d,]+ weights, but transformers reads [\d,]+, and 1 tensors .*original model"),
        (of_mars, {}, "transformers cannot read .*architecture mars is not supported yet.*: give the folder"),
        (in_parts, {}, "is one of 3 parts: join them with llama-gguf-split --merge"),
        (write, {"rope_parameters": LLAMA3_ROPE}, "would ignore that rotary embeddings are scaled.*: give the folder"),
        (write, {"rope_parameters": YARN}, "would ignore that rotary embeddings are scaled.*: give the folder"),
    ],
)
def test_what_would_be_misread_is_refused_and_leaves_nothing(
    tmp_path: Path, cache: Path, change: Any, sizes: dict[str, Any], message: str
) -> None:
    file, _ = write(tmp_path / "it", **({} if change is write else {"change": change}), **sizes)
    with pytest.raises(UserError, match=message) as caught:
        load_model(str(file))
    assert "\n" not in str(caught.value) and not list(cache.glob("*-1"))


def test_other_files_are_refused_before_anything_is_converted(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write(tmp_path / "it")
    content = file.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            load_tokenizer(str(file))
        assert str(file) in str(caught.value)

    for length in (40, len(content) // 2, len(content) - 64):
        file.write_bytes(content[:length])
        refused("is damaged or was not fetched completely .*: fetch it again")
    file.write_bytes(b"PK\x03\x04" + content[4:])
    refused("is not a GGUF file: give a GGUF file")
    file.write_bytes(content)
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    refused(r"needs the package gguf: pip install 'headstart\[gguf\]'")
    file.unlink()
    refused("there is no file .*: give a GGUF file, or ORG/NAME:FILE.gguf")
    assert not list(cache.glob("*/")), "a refused file leaves nothing, which might be as large as its weights"


def test_a_killed_conversion_is_made_anew(tmp_path: Path, cache: Path) -> None:
    file, _ = write(tmp_path / "it")
    left = local_folder(str(file))
    left.rename(left.with_name(f"{left.name}.partial"))
    assert (local_folder(str(file)) / "model.safetensors").is_file() and len(list(cache.glob("*/"))) == 1


def test_a_file_on_the_hub_is_named_by_repository_revision_and_file(hub: FakeHub, tmp_path: Path) -> None:
    file, model = write(tmp_path / "it")
    name, commit = "zoe/small:quantised/it.gguf", None
    (tmp_path / "hub" / "quantised").mkdir(parents=True)
    (tmp_path / "hub" / "other.gguf").write_text("not fetched")
    file.rename(tmp_path / "hub" / "quantised" / "it.gguf")
    commit = folder_on(hub, "zoe/small", tmp_path / "hub", branch="v1")
    assert torch.equal(logits(load_model("zoe/small@v1:quantised/it.gguf", torch.float32)), logits(model.eval()))
    assert not any("other.gguf" in request.path for request in hub.requests)
    found = revisions({"target": "zoe/small@v1:quantised/it.gguf"})["target"]
    assert found == f"zoe/small@{commit}:quantised/it.gguf" and local_folder(found).is_dir()
    with pytest.raises(UserError, match=r"zoe/small has no file quantised/it\.gguf"):
        load_model(name)
    with pytest.raises(UserError, match=r"zoe/small has no file \*\.gguf"):
        load_model("zoe/small@v1:*.gguf")
    assert not any("other.gguf" in request.path for request in hub.requests), "a name is not a pattern"


@pytest.mark.parametrize(
    ("name", "revision", "words", "argument"),
    [
        ("/models/It.Q4_1.gguf", None, ("-m", "/models/It.Q4_1.gguf"), "It.Q4_1.gguf"),
        ("zoe/small:It.gguf", "zoe/small@abc:It.gguf", ("--hf-repo", "zoe/small", "--hf-file", "It.gguf"), None),
    ],
)
def test_a_server_gets_the_original_file_and_a_card_its_name(
    tmp_path: Path, name: str, revision: str | None, words: tuple[str, ...], argument: str | None
) -> None:
    stored = {"recipe": {}, "data": {}, "target": {"name": name}, "revisions": {"target": revision} if revision else {}}
    (tmp_path / "provenance.json").write_text(json.dumps(stored))
    artefact = Artefact("gguf", 9, "f32", 8, 9, 1, at_once=3, markov_rank=2)
    (found,) = commands_of(Serving(artefact, tmp_path, "DIR", target_of(tmp_path)))
    assert found.argv[: 1 + len(words)] == ("llama-server", *words)
    assert not any("to make the target's file" in note for note in found.notes)
    argument = argument or name
    assert target_argument(stored) == argument and published_provenance(stored)["target"]["name"] == argument
    (shown,) = commands_of(Serving(artefact, tmp_path, "DIR", target_of(tmp_path), target_argument(stored)))
    assert shown.argv[: 1 + len(words)] == ("llama-server", *words[:-1], Path(words[-1]).name)
