"""Targets whose weights are no plain ones: quantised checkpoints, and folders of LoRA adapters."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_training import TEXTS
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_target_families import Chains, distill
from tiny_models import full_forward, tiny_model
from tiny_training import medusa_on, recipe_content, tiny_tokenizer, write_corpus
from transformers import PreTrainedModel

from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.loading import load_model
from decoding.model.stored import quantisation
from trainer.data.batch import collate
from trainer.doctor.models import read_skeleton
from trainer.export.exporter import NO_PROMPTS, export
from trainer.recipe.heads import HeadsSection
from trainer.recipe.reading import parse_recipe
from trainer.run.train import run_recipe

PROMPT = [3, 1, 4, 1, 5]
BLOCK = 8


def write_fp8(folder: Path) -> PreTrainedModel:
    """Write a model whose matrices are FP8 numbers with a scale for each block; return it with those numbers."""
    model = tiny_model("llama")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    weights, packed = load_file(folder / "model.safetensors"), {}
    for name, value in weights.items():
        if "proj" in name:
            scale = value.abs().max() / 448
            packed[name] = (value / scale).to(torch.float8_e4m3fn)
            blocks = [-(-size // BLOCK) for size in value.shape]
            packed[f"{name}_scale_inv"] = torch.full(blocks, float(scale))
            model.get_parameter(name).data = packed[name].float() * scale
        else:
            packed[name] = value
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK])
    return model


def describe(folder: Path, **method: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))


def check_as_a_target(folder: Path, same: PreTrainedModel) -> None:
    """It decodes plainly and with chains as ``same``, and heads learn from it."""
    target = CausalLM(load_model(str(folder), torch.float32))
    text = Engine(CausalLM(same)).decode(PROMPT, DecodingConfig(10)).tokens
    for drafter in (None, Chains([[*PROMPT, *text]])):
        assert Engine(target, drafter).decode(PROMPT, DecodingConfig(10)).tokens == text
    objective = medusa_on(target, HeadsSection(num_heads=2))
    objective.module(*objective.inputs(collate(TEXTS), step=0)).total.backward()
    assert all(p.grad is not None for p in objective.module.parameters() if p.requires_grad)


def test_an_fp8_checkpoint_is_a_target_and_its_method_is_named(tmp_path: Path) -> None:
    """Without a GPU transformers turns its numbers into plain ones."""
    target = tmp_path / "target"
    check_as_a_target(target, write_fp8(target))
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    assert stored_fingerprint(target) != stored_fingerprint(tmp_path / "plain") and quantisation(target) == "fp8"
    findings, _ = read_skeleton(str(target), torch.float32, False)
    assert "weights quantised by fp8" in findings[-1].found
    write_corpus(tmp_path)
    run_recipe(parse_recipe(recipe_content(tmp_path, "medusa", steps=1)))
    export(tmp_path / "run" / "final", tmp_path / "shown", "headstart", prompts=NO_PROMPTS)
    assert "quantised (fp8)" in (tmp_path / "shown" / "README.md").read_text()


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "bitsandbytes 4-bit": ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes 8-bit": ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "awq": ("gptqmodel", {"quant_method": "awq", "bits": 4}),
    "gptq": ("optimum", {"quant_method": "gptq", "bits": 4}),
    "compressed-tensors": ("compressed_tensors", {"quant_method": "compressed-tensors"}),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_checkpoint_is_made_on_its_device_or_its_missing_package_is_named(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, config = METHODS[method]
    tiny_model("llama").save_pretrained(tmp_path)
    describe(tmp_path, **config)
    assert quantisation(tmp_path) == method
    if importlib.util.find_spec(package) is None:
        with pytest.raises(
            ValueError, match=rf"^no model could be read from .*{package.replace('_', '.')}.*pip install"
        ):
            load_model(str(tmp_path), torch.float32)
    asked, model = [], tiny_model("llama")

    def read(*args: Any, device_map: Any, **named: Any) -> Any:
        asked.append(device_map)
        return model, {"missing_keys": set()}

    monkeypatch.setattr("decoding.model.loading.AutoModelForCausalLM.from_pretrained", read)
    monkeypatch.setattr(model, "to", lambda device: pytest.fail("weights of 4 or 8 bits cannot be moved"))
    assert load_model(str(tmp_path), torch.float32, torch.device("cpu")) is model
    assert asked == [{"": torch.device("cpu")}]
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match=r"^the target is quantised.*draft\.init\.from_model"):
        distill(model)


def test_a_folder_of_adapters_is_the_merged_model(tmp_path: Path) -> None:
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(load_model(str(tmp_path / "base"), torch.float32), lora)
    adapted.save_pretrained(str(tmp_path / "adapters"))
    merged = adapted.merge_and_unload()
    assert not torch.allclose(full_forward(merged, PROMPT), full_forward(base, PROMPT), atol=0.1)
    check_as_a_target(tmp_path / "adapters", merged)
    assert stored_fingerprint(tmp_path / "adapters") != stored_fingerprint(tmp_path / "base")
