"""The sizes that an artefact's files claim are compared with the contents before anything is built."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.files.fingerprint import stored_fingerprint
from decoding.files.folder import check_model_folder, is_heads_folder
from decoding.files.stored import CONFIG_NAME, WEIGHTS_NAME
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_draft, load_heads, load_model, load_tokenizer, model_without_weights
from decoding.rules.tree import MOST_NODES
from trainer.export.exporter import export

CONFIG = MedusaConfig(16, 16, num_heads=3, num_layers=2, tree=((0,), (1,), (0, 0), (0, 2)))
INDEX = "model.safetensors.index.json"


def change(path: Path, **changes: Any) -> None:
    """Set these keys in a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def written_heads(folder: Path, config: MedusaConfig = CONFIG) -> Path:
    MedusaHeads(config).save_pretrained(folder)
    return folder


def written_draft(folder: Path, family: str = "llama", sharded: bool = False, **changes: Any) -> Path:
    tiny_model(family, vocab=128, **changes).save_pretrained(folder, max_shard_size="8KB" if sharded else "1GB")
    byte_tokenizer().save_pretrained(folder)
    return folder


def break_weights(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    tensors[name].view(-1)[3] = value
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})


def never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("nothing is built")

    monkeypatch.setattr("decoding.model.heads.MedusaHead.__init__", build)
    monkeypatch.setattr("decoding.model.loading.AutoModelForCausalLM.from_pretrained", build)


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["num_heads", "num_layers", "hidden_size", "vocab_size"])
def test_heads_that_claim_to_be_enormous_are_refused_before_they_are_built(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(written_heads(tmp_path) / CONFIG_NAME, **{key: 10**18})
    never_built(monkeypatch)
    with pytest.raises(ValueError, match=r"does not fit its config: .*heads\.\d+\..* (missing|has)"):
        MedusaHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_heads": "3"}, "num_heads is '3': use a whole number, 1 or more"),
        ({"shared_lm_head": "false"}, "shared_lm_head is 'false': use true or false"),
        ({"tree": [[0.0]]}, r"tree path \[0.0\] contains 0.0: use whole"),
        ({"tree": [[0], [1, 0]]}, r"tree path \[1, 0\] lacks its parent"),
        ({"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "the tree has depth 4, but there are 3 heads"),
        ({"tree": [[0]] * (MOST_NODES + 1)}, f"the tree has {MOST_NODES + 1} nodes: use at most {MOST_NODES}"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_config_that_describes_no_heads_is_refused_in_one_sentence(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    change(written_heads(tmp_path) / CONFIG_NAME, **changes)
    with pytest.raises(ValueError, match=rf"config\.json does not contain a MedusaConfig \({complaint}"):
        MedusaHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff\xfe", b"[" * 100_000], ids=lambda text: str(text)[:12])
def test_a_config_that_is_no_json_object_is_refused_wherever_it_is_read(text: bytes, tmp_path: Path) -> None:
    (written_heads(tmp_path) / CONFIG_NAME).write_bytes(text)
    for read in (MedusaHeads.from_pretrained, is_heads_folder, lambda f: load_model(str(f))):
        with pytest.raises(ValueError, match=r"config\.json (cannot be read as JSON|contains a list, not an object)"):
            read(tmp_path)


# --- weights that are no numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_heads_that_are_not_finite_are_neither_read_nor_exported(
    value: float, tmp_path: Path, tiny_llama: CausalLM
) -> None:
    break_weights(written_heads(tmp_path / "run"), "heads.1.lm_head.weight", value)
    for read in (
        lambda folder: load_heads(folder, tiny_llama),
        lambda folder: export(folder, tmp_path / "out", "heads"),
    ):
        with pytest.raises(ValueError, match=r"not finite \(1 of 256 values in heads\.1\.lm_head\.weight"):
            read(tmp_path / "run")
    assert not (tmp_path / "out").exists()


def test_a_draft_that_is_not_finite_is_neither_read_nor_exported(tmp_path: Path) -> None:
    target = CausalLM(tiny_model(vocab=128))
    break_weights(written_draft(tmp_path / "run"), "model.norm.weight", float("nan"))
    complaint = r"1 of 16 values in model\.norm\.weight\): use an earlier checkpoint"
    with pytest.raises(ValueError, match=complaint):
        load_draft(str(tmp_path / "run"), target, byte_tokenizer())
    with pytest.raises(ValueError, match=complaint):
        export(tmp_path / "run", tmp_path / "out", "draft")
    assert not (tmp_path / "out").exists()
    load_model(str(tmp_path / "run"), torch.float32)  # only a target, because a pass over a large one costs too much


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_every_family_are_what_they_claim(family: str, tmp_path: Path) -> None:
    for tied in (False, True):
        tiny_model(family, vocab=128, tie_word_embeddings=tied).save_pretrained(tmp_path, max_shard_size="8KB")
        assert (tmp_path / INDEX).is_file()
        check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("family", "key", "layers"),
    [
        ("llama", "num_hidden_layers", 1),  # transformers would read half a model
        ("gpt2", "n_layer", 1),
        ("qwen3-moe", "num_hidden_layers", 10**7),
    ],
)
def test_a_number_of_layers_that_is_not_that_of_the_weights_is_refused_before_they_are_made(
    family: str, key: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(written_draft(tmp_path, family) / CONFIG_NAME, **{key: layers})
    never_built(monkeypatch)
    with pytest.raises(ValueError, match=rf"has {layers} as {key}, but the weights have 2 layers"):
        load_model(str(tmp_path))


def test_a_model_whose_weights_lack_a_tensor_is_not_given_a_random_one(tmp_path: Path) -> None:
    tensors = load_file(written_draft(tmp_path) / WEIGHTS_NAME)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / WEIGHTS_NAME, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight \(missing tensors: 1\): use"):
        load_model(str(tmp_path))


# --- indexes, adapters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("../other/model.safetensors", "is not a file inside its folder"),
        ("{root}/other/model.safetensors", "is not a file inside its folder"),
        ("model.bin", "is not a file inside its folder"),
        ("model-00009-of-00009.safetensors", "is missing"),
    ],
)
def test_an_index_names_files_inside_its_folder_that_are_there(name: Any, complaint: str, tmp_path: Path) -> None:
    written_draft(tmp_path / "other")
    index = written_draft(tmp_path / "draft", sharded=True) / INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    name = name.format(root=tmp_path) if isinstance(name, str) else name
    change(index, weight_map={**weight_map, "model.norm.weight": name})
    with pytest.raises(ValueError, match=rf"index\.json names .*, which {complaint}"):
        load_model(str(tmp_path / "draft"))
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json is not an index of weights"):
        load_model(str(tmp_path / "draft"))


def test_adapters_that_name_no_model_are_refused(tmp_path: Path) -> None:
    base = load_model(str(written_draft(tmp_path / "base")), torch.float32)
    get_peft_model(base, LoraConfig(r=5, target_modules=["q_proj"])).save_pretrained(str(tmp_path / "adapters"))  # type: ignore[arg-type]  # peft's stubs
    load_model(str(tmp_path / "adapters"))
    change(tmp_path / "adapters" / "adapter_config.json", base_model_name_or_path=3)
    with pytest.raises(ValueError, match="has 3 as base_model_name_or_path"):
        load_model(str(tmp_path / "adapters"))


@pytest.mark.parametrize("names", [("one", "one"), ("two", "one"), ("two", "two")])
def test_adapters_of_a_circle_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    """This is true for every walk from adapters to their base: of models, of tokenizers, and of fingerprints."""
    for name, base in zip(("one", "two"), names, strict=True):
        (tmp_path / name).mkdir()
        save_file({"a": torch.zeros(2)}, tmp_path / name / "adapter_model.safetensors")
        (tmp_path / name / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": str(tmp_path / base)})
        )
    folder = tmp_path / "one"
    walks: list[Callable[[], object]] = [
        lambda: load_model(str(folder)),
        lambda: load_tokenizer(str(folder)),
        lambda: model_without_weights(folder, torch.float32),
        lambda: stored_fingerprint(folder),
    ]
    for walk in walks:
        with pytest.raises(ValueError, match="lead back to these adapters"):
            walk()


def test_adapters_of_a_circle_on_the_hub_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/itself"}))
    monkeypatch.setattr("decoding.model.loading.local_folder", lambda name, weights=True: tmp_path)
    for walk in (lambda: load_tokenizer("org/itself"), lambda: model_without_weights(tmp_path, torch.float32)):
        with pytest.raises(ValueError, match="lead back to these adapters"):
            walk()


@pytest.mark.parametrize("changes", [{"r": 10**9}, {"rank_pattern": {"q_proj": 10**9}}], ids=str)
def test_a_rank_that_no_stored_matrix_has_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "org/base", "r": 4, **changes})
    )
    save_file({"a": torch.zeros(4, 16)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has a rank of 1000000000, but no tensor in adapter_model\.safetensors has"):
        load_model(str(tmp_path))
