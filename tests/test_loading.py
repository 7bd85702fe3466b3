"""Reading models, with every mismatch said plainly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding import HeadstartModel
from decoding.dtypes import DTYPES, fast_dtype, parse_dtype
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import check_same_tokenizer, eos_token_ids, load_draft, load_model, load_tokenizer
from trainer.commands.shared_options import LoadingOptions
from trainer.recipe.common import TrainingSection


def saved(folder: Path, vocab: int = 128, size: int = 128) -> Path:
    tiny_model(vocab=vocab).save_pretrained(folder)
    byte_tokenizer(size=size).save_pretrained(folder)
    return folder


def test_a_saved_model_is_read_in_the_dtype_asked_for(tmp_path: Path) -> None:
    model = load_model(str(saved(tmp_path / "model")), torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training


def test_weights_that_exceed_the_first_of_several_gpus_are_spread_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that stays on the host would be fetched at every pass."""
    folder, asked = saved(tmp_path / "model"), []
    model = tiny_model()
    weights = 4 * sum(value.numel() for value in load_model(str(folder)).state_dict().values())

    def read(*args: object, device_map: str | None, **named: object) -> object:
        asked.append(device_map)
        return model, {"missing_keys": set()}

    monkeypatch.setattr("decoding.model.loading.AutoModelForCausalLM.from_pretrained", read)
    for gpus, free in ((1, weights), (2, 2 * weights), (2, weights)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device, free=free: (free, free))
        assert load_model(str(folder), torch.float32) is model
    assert asked == [None, None, "auto"]
    assert load_model(str(folder), torch.bfloat16) is model and asked[-1] is None, "half of the bytes fit"
    load_model(str(folder), torch.float32, torch.device("cpu"))
    assert asked[-1] is None, "a device that was asked for is taken"
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match=r"does not fit on the GPUs without cpu and disk"):
        load_model(str(folder), torch.float32)


def test_vocabularies_padded_to_other_sizes_are_one_family(tmp_path: Path) -> None:
    target = CausalLM(tiny_model(vocab=160))
    draft = load_draft(str(saved(tmp_path / "draft", vocab=136)), target, byte_tokenizer())
    assert draft.vocab_size == 136


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    folder, target = saved(tmp_path / "model"), CausalLM(tiny_model(vocab=128))
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"does not contain a model: config\.json is missing"):
        load_model(str(tmp_path))
    for path in folder.glob("*token*"):
        path.unlink()
    for read in (load_tokenizer, lambda name: load_draft(name, target, byte_tokenizer())):
        with pytest.raises(ValueError, match="no tokenizer could be read"):
            read(str(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")  # a pickle does not count
    with pytest.raises(ValueError, match=r"lacks \.safetensors files"):
        load_model(str(folder))


def test_another_tokenizer_is_refused_with_a_token_that_differs() -> None:
    with pytest.raises(ValueError, match="88 of the target's 128 tokens are missing"):
        check_same_tokenizer(byte_tokenizer(), byte_tokenizer(size=40))
    with pytest.raises(ValueError, match=r"token '.+' is 0 in the draft and 127 in the target"):
        check_same_tokenizer(byte_tokenizer(), byte_tokenizer(shift=1))


def test_a_draft_of_another_tokenizer_is_loaded_only_where_that_is_asked_for(tmp_path: Path) -> None:
    target, folder = CausalLM(tiny_model(vocab=128)), str(saved(tmp_path / "draft"))
    remedy = r"give this draft as other-tokenizer:.*/draft, which is slower$"
    with pytest.raises(ValueError, match=rf"is 0 in the draft and 1 in the target: .*{remedy}"):
        load_draft(folder, target, byte_tokenizer(shift=1))
    assert load_draft(folder, target, byte_tokenizer(shift=1), other_tokenizer=True).vocab_size == 128


def test_the_end_of_a_text_comes_from_the_generation_config_else_the_tokenizer() -> None:
    model = tiny_model()
    assert eos_token_ids(model) == ()
    assert eos_token_ids(model, byte_tokenizer()) == (0,)
    model.generation_config.eos_token_id = [3, 4]
    assert eos_token_ids(model, byte_tokenizer()) == (3, 4)


def test_what_ends_a_text_is_the_same_for_a_model_and_its_folder(tmp_path: Path) -> None:
    assert eos_token_ids(str(tmp_path), byte_tokenizer()) == (0,), "a folder without a model"
    model = tiny_model("llama", eos_token_id=[7, 5])
    model.config.save_pretrained(tmp_path)
    assert eos_token_ids(str(tmp_path), byte_tokenizer()) == eos_token_ids(model) == (7, 5)
    model.generation_config.eos_token_id = [3, 4]
    model.generation_config.save_pretrained(tmp_path)
    assert eos_token_ids(str(tmp_path), byte_tokenizer()) == (3, 4)


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [
        ({"avx2": True, "avx512_bf16": False}, "fp32"),
        ({"avx512_bf16": True}, "bf16"),
        ({"bf16": True}, "bf16"),
        ({}, "fp32"),
    ],
)
def test_the_fast_dtype_is_bf16_only_where_the_processor_multiplies_it(
    capabilities: dict[str, bool], fast: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert fast_dtype() == fast and parse_dtype("fast") == DTYPES[fast]
    assert TrainingSection(steps=1).mixed_precision == {"bf16": "bf16", "fp32": "no"}[fast]
    assert TrainingSection(steps=1, mixed_precision="bf16").mixed_precision == "bf16"
    assert LoadingOptions().dtype == "fast"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("bf16", torch.bfloat16), ("float16", torch.float16), (torch.float64, torch.float64), ("auto", torch.float32)],
)
def test_a_dtype_has_the_same_names_in_python_as_in_commands(tmp_path: Path, given: Any, wanted: torch.dtype) -> None:
    assert HeadstartModel.from_pretrained(str(saved(tmp_path / "target")), dtype=given).target.dtype == wanted


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtype": "bf61"}, "^dtype is 'bf61': give one of fast, bf16, fp16, fp32$"),
        ({"torch_dtype": torch.int8}, "^dtype is 'torch.int8': give one of fast"),
        ({"dtype": 16}, "^dtype is '16': give one of fast"),
        ({"device": "gpu"}, "^device is 'gpu', which cannot be used: .*: give cpu, cuda or cuda:N$"),
        ({"device": "cuda:77"}, "^device is 'cuda:77', which cannot be used: .*: give cpu, cuda or cuda:N$"),
    ],
)
def test_a_wrong_argument_is_named_and_not_blamed_on_the_model(
    tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        HeadstartModel.from_pretrained(str(saved(tmp_path / "target")), **options)
