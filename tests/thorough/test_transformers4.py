"""transformers 4 and 5 read the same model from the folder of a draft."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from older_readers import DRAFTS, PROBE, VOCABULARY
from tiny_models import full_forward, tiny_model
from tiny_tokenizer import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Olmo3Config, PreTrainedModel

from decoding.model.causal_lm import CausalLM
from trainer.drafts.start import write_draft
from trainer.export.exporter import export
from trainer.files.transformers4 import config_for_both, rope_keys, write_model


def draft(name: str) -> PreTrainedModel:
    family, changes = DRAFTS[name]
    return tiny_model(family, vocab=VOCABULARY, **changes)


def exported(model: PreTrainedModel, folder: Path) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["~", "^"]})
    write_draft(CausalLM(model), tokenizer, folder / "final")
    return export(folder / "final", folder / "out", "draft").folder


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.parametrize("name", DRAFTS)
def test_version_5_reads_the_same_model_beside_the_keys_of_version_4(name: str, tmp_path: Path) -> None:
    model = draft(name)
    folder = exported(model, tmp_path)
    model.save_pretrained(tmp_path / "plain")
    before, after = (AutoConfig.from_pretrained(path).to_dict() for path in (tmp_path / "plain", folder))
    if isinstance(after.get("rope_parameters"), dict):
        after["rope_parameters"].pop("type", None)  # its older name for rope_type
    before.pop("_name_or_path")
    assert {key: after.get(key) for key in before} == before
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(full_forward(read, PROBE), full_forward(model, PROBE))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama, linear", {"rope_theta": 123.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("olmo2, linear", {"rope_theta": 123.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        (
            "gemma3, both",
            {"rope_theta": 321.0, "rope_local_base_freq": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
        (
            "gpt-neox, half",
            {"rotary_emb_base": 123.0, "rotary_pct": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
    ],
)
def test_the_keys_are_those_of_version_4_for_the_family(name: str, keys: dict[str, Any]) -> None:
    assert rope_keys(draft(name).config.to_dict()) == keys


def test_the_tokenizer_has_a_class_of_both_versions_and_its_special_tokens(tmp_path: Path) -> None:
    folder = exported(draft("llama"), tmp_path)
    stored = read_json(folder / "tokenizer_config.json")
    assert stored["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert stored["additional_special_tokens"] == ["~", "^"] and "extra_special_tokens" not in stored
    read = AutoTokenizer.from_pretrained(folder)
    assert set(read.all_special_tokens) == {"<|end|>", "~", "^"}
    assert read("a ~b")["input_ids"] == [97, 32, 126, 98]


def test_what_version_4_has_no_words_for_is_written_for_version_5_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("gemma3", vocab=VOCABULARY)
    model.config.rope_parameters["sliding_attention"] = {"rope_type": "linear", "rope_theta": 9.0, "factor": 2.0}
    write_model(model, byte_tokenizer(), tmp_path)
    assert re.search(r"transformers 4 will misread .*rope_type 'linear' in sliding layers", caplog.text)
    assert "rope_theta" not in read_json(tmp_path / "config.json")
    olmo3 = Olmo3Config(num_hidden_layers=1).to_dict()
    olmo3["rope_parameters"] = {"full_attention": olmo3["rope_parameters"]}
    with pytest.raises(ValueError, match="version 4 supports only one rotary embedding for all layers of a olmo3"):
        config_for_both(Olmo3Config, olmo3)
