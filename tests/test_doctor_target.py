"""`headstart doctor` with a target: each fault is found by name, with its remedy; a fitting target has none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_models import TEMPLATE, changed, faults, only, read, save
from peft import LoraConfig, get_peft_model
from tiny_models import FEW_FAMILIES, tiny_model
from tiny_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, MambaConfig, PreTrainedTokenizerFast, Qwen3NextConfig

from trainer.doctor.finding import Finding
from trainer.doctor.reading import Skeleton, read_skeleton
from trainer.doctor.target import check_memory, target_findings

UNTOLD = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '[answer]' }}{% endif %}"
)
"""A template whose answered conversation does not begin with the prompt that asked for the answer."""
EVERYTHING = "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("doctor") / "target")


@pytest.fixture(scope="module")
def skeleton(target: Path) -> Skeleton:
    return read(target)


# --- a set that fits --------------------------------------------------------------------------------------------------


def test_a_fitting_target_has_nothing_to_note_and_its_weights_are_not_loaded(skeleton: Skeleton, target: Path) -> None:
    findings, _ = read_skeleton(str(target), torch.float32, trusted=False)
    assert not faults([*findings, *target_findings(skeleton, 256)])
    assert skeleton.model.device.type == "meta"
    assert [finding.check for finding in findings] == ["files", "code", "architecture"]


def test_the_cache_of_a_text_is_counted_without_weights(skeleton: Skeleton) -> None:
    assert skeleton.cache_bytes(10) == 10 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, head size, fp32
    assert skeleton.bytes == sum(parameter.numel() for parameter in tiny_model(vocab=128).parameters()) * 4


@pytest.mark.parametrize("family", [*FEW_FAMILIES, "qwen3", "opt", "falcon"])
def test_the_cache_is_counted_for_every_kind_of_attention_and_of_experts(tmp_path: Path, family: str) -> None:
    """By a pass with weights: as many bytes for each token."""
    model = tiny_model(family, vocab=128)
    with torch.inference_mode():
        held = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=True).past_key_values
    counted = sum(layer.keys.nbytes + layer.values.nbytes for layer in held.layers)
    assert read(save(tmp_path, family=family)).cache_bytes(3) == counted


def test_adapters_are_checked_with_the_model_that_they_belong_to(tmp_path: Path) -> None:
    base = save(tmp_path / "base")
    adapted = get_peft_model(tiny_model(vocab=128), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(str(tmp_path / "adapters"))
    findings = of_target(tmp_path / "adapters")
    assert not faults(findings) and f"adapters of {base}" in findings[0].found


# --- faults of a target -----------------------------------------------------------------------------------------------


def of_target(folder: Path) -> list[Finding]:
    findings, found = read_skeleton(str(folder), torch.float32, trusted=False)
    return findings if found is None else [*findings, *target_findings(found, 64)]


def test_pickled_weights_are_named_as_such(tmp_path: Path) -> None:
    folder = save(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fault = only(of_target(folder), "files")
    assert "pickled weights (pytorch_model.bin)" in fault.found and "safetensors" in fault.remedy


def test_missing_weights_and_a_missing_config_are_told_apart(tmp_path: Path) -> None:
    folder = save(tmp_path / "cut")
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in only(of_target(folder), "files").found
    (folder / "config.json").unlink()
    assert "config.json is missing" in only(of_target(folder), "files").found


def test_a_config_that_is_not_that_of_the_weights_is_found_by_its_value(tmp_path: Path) -> None:
    folder = save(tmp_path / "other")
    changed(folder, "config.json", hidden_size=20)
    fault = only(of_target(folder), "files")
    assert "20 as hidden_size" in fault.found and "copy the folder again" in fault.remedy


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=128, hidden_size=16, num_hidden_layers=1, state_size=4),
        Qwen3NextConfig(
            vocab_size=128,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        ),
    ],
    ids=["recurrent", "hybrid"],
)
def test_a_model_whose_cache_cannot_roll_back_is_refused_before_its_weights_are_read(
    tmp_path: Path, config: Any
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    fault = only(of_target(tmp_path), "architecture")
    assert "rolled back" in fault.found or "do not take a tree's mask" in fault.found
    assert "give a" in fault.remedy and "attention" in fault.remedy


def test_a_model_with_code_of_its_own_asks_for_trust_first(tmp_path: Path) -> None:
    folder = save(tmp_path / "custom")
    changed(folder, "config.json", model_type="homemade", auto_map={"AutoConfig": "code.Config"})
    fault = only(of_target(folder), "code")
    assert "homemade" in fault.found and "--trust-remote-code" in fault.remedy


def test_a_tokenizer_with_more_tokens_than_the_model_is_a_problem_and_padding_is_none(tmp_path: Path) -> None:
    folder = save(tmp_path / "small", vocab=100)
    fault = only(of_target(folder), "vocabulary")
    assert "the tokenizer has 128 tokens and the model knows 100" in fault.found
    padded = of_target(save(tmp_path / "padded", vocab=160))
    assert not faults(padded) and any("160 tokens, 32 of them padding" in finding.found for finding in padded)


def test_added_tokens_that_the_model_does_not_know_are_noted(tmp_path: Path) -> None:
    folder = save(tmp_path / "padded-later")
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.save_pretrained(folder)
    fault = only(of_target(folder), "vocabulary", "note")
    assert "129 tokens and the model knows 128" in fault.found and "keep <|pad|> out" in fault.remedy


def test_an_lm_head_with_a_bias_is_noted_as_no_place_for_heads(tmp_path: Path) -> None:
    found = read(save(tmp_path / "biased"))
    found.model.model.lm_head.bias = torch.nn.Parameter(torch.zeros(128, device="meta"))
    fault = only(target_findings(found, 64), "lm_head", "note")
    assert "a bias" in fault.found and "train a draft" in fault.remedy


def test_a_target_that_never_ends_a_text_is_noted_and_an_unknown_end_is_a_problem(tmp_path: Path) -> None:
    folder = save(tmp_path / "endless")
    tokenizer = byte_tokenizer(TEMPLATE)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=TEMPLATE).save_pretrained(
        folder
    )
    assert "eos_token_id" in only(of_target(folder), "end of text", "note").remedy
    changed(folder, "generation_config.json", eos_token_id=500)
    assert "token 500" in only(of_target(folder), "end of text").found


@pytest.mark.parametrize(
    ("template", "status", "says"),
    [
        (None, "note", "none: prompts are continued as plain text"),
        (UNTOLD, "problem", "cannot be told"),
        (EVERYTHING, "problem", "marks all"),
        ("{{ raise_exception('no chats here') }}", "problem", "no chats here"),
    ],
    ids=["missing", "without marks", "marks everything", "raises"],
)
def test_a_chat_template_that_training_cannot_use_is_found(
    tmp_path: Path, template: str | None, status: str, says: str
) -> None:
    fault = only(of_target(save(tmp_path / "model", template)), "chat template", status)
    assert says in fault.found
    assert "data.chat_template" in fault.remedy or "{% generation %}" in fault.remedy


def test_a_text_longer_than_the_target_holds_is_a_problem(skeleton: Skeleton) -> None:
    fault = only(target_findings(skeleton, 300), "positions")
    assert "300 tokens are asked for, and the target holds 256" in fault.found
    assert fault.remedy == "give --longest 256 or less"


def test_memory_is_compared_with_weights_and_cache(skeleton: Skeleton) -> None:
    own, per_token = skeleton.bytes, skeleton.cache_bytes(1) or 0
    needed = own + 1000 + per_token * 100

    def status(free: int | None) -> str:
        return check_memory(skeleton, [("heads", 1000)], [], 100, free).status

    assert [status(free) for free in (needed - 1, needed, 2 * needed, None)] == ["problem", "note", "ok", "ok"]
    figures = check_memory(skeleton, [("heads", 1000)], [skeleton], 100, None).figures
    assert figures["cache_bytes_per_token"] == 2 * per_token  # a draft keeps a cache beside the target's
    assert figures["needed_bytes"] == own + 1000 + 2 * per_token * 100
