"""A fingerprint depends on the stored bytes, and not on how they are loaded or divided into files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tiny_training import CHAT_TEMPLATE, WORDS, recipe_content, tiny_tokenizer, write_corpus, write_target

from decoding.files import fingerprint as fingerprints
from decoding.files.fingerprint import prompts_fingerprint, stored_fingerprint, tokenizer_fingerprint
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.recipe.reading import parse_recipe
from trainer.target.loading import load_target


def test_a_targets_fingerprint_does_not_depend_on_the_dtype_it_is_loaded_in(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    found = set()
    for dtype in ("fp32", "bf16"):
        recipe = parse_recipe({**recipe_content(tmp_path, "medusa"), "dtype": dtype})
        target = load_target(recipe, torch.device("cpu"), tiny_tokenizer())
        assert str(target.dtype) in ("torch.float32", "torch.bfloat16")
        found.add(target.fingerprint)
    assert found == {stored_fingerprint(tmp_path / "target")} and len(found.pop()) == 16


def test_a_fingerprint_does_not_depend_on_how_the_weights_are_cut_into_files(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "cut", max_shard_size="4KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    assert stored_fingerprint(tmp_path / "whole") == stored_fingerprint(tmp_path / "cut")


def test_the_weights_of_a_large_folder_are_hashed_once_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "_LARGE", 1)
    tiny_model().save_pretrained(tmp_path / "one")
    read, tensors = list[Path](), fingerprints.files_of_tensors

    def files_of_tensors(folder: Path) -> dict[str, Path]:
        read.append(folder)
        return tensors(folder)

    monkeypatch.setattr(fingerprints, "files_of_tensors", files_of_tensors)
    # A new process has no cache in memory.
    monkeypatch.setattr(fingerprints, "_stored_fingerprint", fingerprints._stored_fingerprint.__wrapped__)
    first = stored_fingerprint(tmp_path / "one")
    assert {stored_fingerprint(tmp_path / "one") for _ in range(3)} == {first} and len(read) == 1
    (kept,) = (tmp_path / "cache" / "fingerprints").iterdir()
    for damaged in (first[:5].encode(), bytes(len(first)), b"\xff" * len(first)):
        kept.write_bytes(damaged)
        assert stored_fingerprint(tmp_path / "one") == first == kept.read_text(), "a damaged entry is written again"
    assert len(read) == 4
    _flip_last_bit(tmp_path / "one")
    assert stored_fingerprint(tmp_path / "one") != first and len(read) == 5
    inner = tmp_path / "one" / "inner"
    inner.mkdir()
    weights = (tmp_path / "one" / "model.safetensors").rename(inner / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), "inner/model.safetensors")}
    (tmp_path / "one" / "model.safetensors.index.json").write_text(json.dumps(index))
    before = stored_fingerprint(tmp_path / "one")
    _flip_last_bit(inner)
    assert stored_fingerprint(tmp_path / "one") != before


def test_a_fingerprint_changes_with_one_bit_of_a_weight_its_dtype_its_name_and_the_config(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "one")

    def changed(name: str, change: Callable[[Path], object]) -> str:
        shutil.copytree(tmp_path / "one", tmp_path / name)
        change(tmp_path / name)
        return stored_fingerprint(tmp_path / name)

    prints = {
        stored_fingerprint(tmp_path / "one"),
        changed("bit", _flip_last_bit),
        changed("dtype", lambda folder: _rewrite(folder, lambda state: {k: v.bfloat16() for k, v in state.items()})),
        changed("name", lambda folder: _rewrite(folder, lambda state: {f"x{k}": v for k, v in state.items()})),
        changed("config", lambda folder: _set(folder / "config.json", rms_norm_eps=1e-3)),
    }
    assert len(prints) == 5
    assert changed("elsewhere", lambda folder: _set(folder / "config.json", use_cache=False)) in prints


def _flip_last_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def _set(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_heads_with_another_tree_are_other_heads(tmp_path: Path) -> None:
    """Figures measured with one tree are not valid for another tree."""
    heads = MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=12, num_heads=2, tree=((0,), (1,))))
    heads.save_pretrained(tmp_path / "heads")
    before = stored_fingerprint(tmp_path / "heads")
    heads.config = replace(heads.config, tree=((0,), (0, 0)))
    heads.save_pretrained(tmp_path / "heads")
    planned = stored_fingerprint(tmp_path / "heads")
    assert planned != before
    with torch.no_grad():
        next(heads.parameters()).add_(1)
    heads.save_pretrained(tmp_path / "heads")
    assert stored_fingerprint(tmp_path / "heads") not in (before, planned)


def test_adapters_are_known_by_their_weights_and_by_the_base_they_belong_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "_LARGE", 1)

    def adapters(name: str, base: str, seed: int) -> str:
        base_model = tiny_model()
        torch.manual_seed(seed)
        model = get_peft_model(base_model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        model.peft_config["default"].base_model_name_or_path = str(tmp_path / base)
        model.save_pretrained(str(tmp_path / name))
        return stored_fingerprint(tmp_path / name)

    tiny_model().save_pretrained(tmp_path / "base")
    tiny_model().save_pretrained(tmp_path / "copy of it")
    tiny_model(seed=1).save_pretrained(tmp_path / "another")
    one = adapters("one", "base", 0)
    assert adapters("same", "copy of it", 0) == one, "the base's weights count, not where they lie"
    assert len({one, adapters("other base", "another", 0), adapters("other weights", "base", 1)}) == 3
    assert len(list((tmp_path / "cache" / "fingerprints").iterdir())) == 3, "only the fingerprints of bases are kept"


def test_tokenizers_and_prompts_are_known_by_what_they_make_of_a_text(tmp_path: Path) -> None:
    other_words = (*WORDS[:4], *"bacdefghijkl")
    tokenizers = (tiny_tokenizer(), tiny_tokenizer(CHAT_TEMPLATE), tiny_tokenizer(words=other_words))
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers}) == 3
    assert tokenizer_fingerprint(tiny_tokenizer()) == tokenizer_fingerprint(tiny_tokenizer())
    assert prompts_fingerprint([(1, 2), (3,)]) == prompts_fingerprint([[1, 2], [3]])
    assert prompts_fingerprint([(1, 2), (3,)]) != prompts_fingerprint([(1,), (2, 3)])


def test_a_draft_whose_model_type_stands_in_a_nested_config_is_known_by_all_of_it(tmp_path: Path) -> None:
    """In the layout of ``speculators`` the top level of config.json has no ``model_type``, and transformers cannot read
    it.
    """
    save_file({"fc.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"transformer_layer_config": {"model_type": "llama", "rope_theta": 1e4}}))
    before = stored_fingerprint(tmp_path)
    assert stored_fingerprint(tmp_path) == before
    _set(config, transformer_layer_config={"model_type": "llama", "rope_theta": 1e6})
    assert stored_fingerprint(tmp_path) != before
