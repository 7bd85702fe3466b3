"""`headstart doctor` with models names each misfit with its remedy, and finds nothing in a set that fits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import FakeHub, folder_on
from fake_hub import hub as hub
from peft import LoraConfig, get_peft_model
from tiny_dspark import tiny_dspark
from tiny_eagle3 import tiny_eagle3
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, MambaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from decoding.drafters.registry import parse_drafter
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.hub import local_folder
from decoding.measure.proof.finding import Finding
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.cli import app
from trainer.doctor.models import (
    Skeleton,
    check_decoding,
    check_drafter,
    layout_findings,
    read_skeleton,
    target_findings,
)

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def save(folder: Path, template: str | None = TEMPLATE, shift: int = 0, **changes: Any) -> Path:
    """Write a tiny model and a tokenizer of one token per byte."""
    tiny_model(**{"vocab": 128, "max_position_embeddings": 256, **changes}).save_pretrained(folder)
    byte_tokenizer(template, shift=shift).save_pretrained(folder)
    return folder


def save_heads(folder: Path, target: Path | None, width: int = 16, vocab: int = 128) -> Path:
    """Write heads whose provenance says that they were trained on ``target`` (None: no provenance)."""
    heads = MedusaHeads.for_target(tiny_model(vocab=vocab, hidden_size=width), MedusaConfig(width, vocab))
    heads.save_pretrained(folder)
    return folder if target is None else trained_on(folder, target)


def trained_on(folder: Path, target: Path) -> Path:
    about = {"target": {"name": str(target), "fingerprint": stored_fingerprint(target)}, "recipe": {}}
    (folder / "provenance.json").write_text(json.dumps(about))
    return folder


def save_dspark(folder: Path, target: Path, width: int = 16, tiny: Any = tiny_dspark) -> Path:
    tiny(CausalLM(tiny_model(vocab=128, hidden_size=width))).save_pretrained(folder)
    return trained_on(folder, target)


def changed(folder: Path, file: str, **values: Any) -> None:
    """Change keys of a JSON file."""
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("doctor") / "target")


@pytest.fixture(scope="module")
def skeleton(target: Path) -> Skeleton:
    found = read_skeleton(str(target), torch.float32, trusted=False)[1]
    assert found is not None
    return found


def of_target(folder: Path | str) -> list[Finding]:
    findings, found = read_skeleton(str(folder), torch.float32, trusted=False)
    return findings if found is None else [*findings, *target_findings(found)]


def of_drafter(text: str, target: Skeleton) -> list[Finding]:
    return check_drafter(parse_drafter(text), target).findings


def only(findings: list[Finding], check: str, status: str = "problem") -> Finding:
    """Return the only finding that is not ok, apart from the layout; check that it has a remedy."""
    (found,) = [finding for finding in findings if finding.status != "ok" and finding.check != "layout"]
    assert (found.check, found.status) == (check, status) and found.remedy
    return found


def fits(findings: list[Finding]) -> bool:
    return bool(findings) and all(finding.status == "ok" for finding in findings)


# --- the target -------------------------------------------------------------------------------------------------------


def test_a_fitting_target_has_nothing_to_note_and_its_weights_are_not_loaded(skeleton: Skeleton, target: Path) -> None:
    assert fits(of_target(target)) and skeleton.model.device.type == "meta"
    assert skeleton.bytes == sum(parameter.numel() for parameter in tiny_model(vocab=128).parameters()) * 4


def test_adapters_are_checked_with_the_model_that_they_belong_to(target: Path, tmp_path: Path) -> None:
    adapted = get_peft_model(tiny_model(vocab=128), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(target)
    adapted.save_pretrained(str(tmp_path / "adapters"))
    findings = of_target(tmp_path / "adapters")
    assert fits(findings) and f"adapters of {target}" in findings[0].found


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def another_config(folder: Path) -> None:
    changed(folder, "config.json", hidden_size=20)


def own_code(folder: Path) -> None:
    changed(folder, "config.json", model_type="homemade", auto_map={"AutoConfig": "code.Config"})


def recurrent(folder: Path) -> None:
    config = MambaConfig(vocab_size=128, hidden_size=16, num_hidden_layers=1, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def endless(folder: Path) -> None:
    backend = byte_tokenizer(TEMPLATE).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE).save_pretrained(folder)


def unknown_end(folder: Path) -> None:
    changed(folder, "generation_config.json", eos_token_id=500)


@pytest.mark.parametrize(
    ("damage", "check", "status", "says"),
    [
        (pickled, "files", "problem", "pickled weights are never read"),
        (without_config, "files", "problem", "config.json is missing"),
        (another_config, "architecture", "problem", "but config.json says"),
        (own_code, "architecture", "problem", "--trust-remote-code"),
        (endless, "end of text", "note", "neither config nor tokenizer names a token"),
        (unknown_end, "end of text", "problem", "token is 500"),
    ],
)
def test_each_fault_of_a_target_is_found_before_its_weights_are_read(
    damage: Callable[[Path], None], check: str, status: str, says: str, tmp_path: Path
) -> None:
    damage(save(tmp_path))
    assert says in only(of_target(tmp_path), check, status).found


def test_what_a_target_can_do_is_said_before_its_weights_are_read(tmp_path: Path) -> None:
    recurrent(save(tmp_path))
    (found,) = [each.found for each in of_target(tmp_path) if each.check == "architecture"]
    assert found.endswith(
        "works: training, plain (mamba in transformers cannot run several tokens after a cached text)"
    )


def test_a_tokenizer_with_more_tokens_than_the_model_is_a_problem_and_padding_is_none(tmp_path: Path) -> None:
    assert "model has 100" in only(of_target(save(tmp_path / "small", vocab=100)), "vocabulary").found
    assert fits(of_target(save(tmp_path / "padded", vocab=160)))


# --- drafters ---------------------------------------------------------------------------------------------------------


def test_fitting_heads_and_drafts_of_both_kinds_have_nothing_to_note(
    skeleton: Skeleton, target: Path, tmp_path: Path
) -> None:
    save_heads(tmp_path / "heads", target)
    draft = trained_on(save(tmp_path / "draft", seed=1), target)
    save_dspark(tmp_path / "dspark", target)
    save_dspark(tmp_path / "eagle3", target, tiny=tiny_eagle3)
    specs = [f"heads:{tmp_path}/heads", f"{tmp_path}/heads", f"draft:{draft}", f"dspark:{tmp_path}/dspark"]
    specs += [f"eagle3:{tmp_path}/eagle3", f"eagle3-tree:{tmp_path}/eagle3", f"other-tokenizer:{draft}", "lookup"]
    for text in specs:  # a target of two layers lacks the layers that every server reads for EAGLE-3
        found = [each for each in of_drafter(text, skeleton) if "eagle3" not in text or each.check != "layout"]
        assert fits(found), text


DEFAULT_TAPS = {"eagle_aux_hidden_state_layer_ids": None, "num_aux_hidden_states": None}
SLIDING = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "DSpark in flat form; run as in training by vLLM, SGLang, llama.cpp"),
        (
            {"is_causal": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "DSpark in flat form; run as in training by vLLM, SGLang, llama.cpp",
        ),
        (SLIDING, "training by vLLM, SGLang; llama.cpp masks attention in layers 0 differently from training, so"),
        ({"draft_vocab_size": 8}, "training by vLLM, llama.cpp; SGLang does not read d2t"),
        (
            {"markov_rank": 0},
            "DSpark in flat form; run as in training by vLLM, llama.cpp; SGLang does not run a DSpark draft",
        ),
        ({"target_layer_ids": [1]}, "training by vLLM; SGLang does not read states after the last layer; llama"),
        ({"markov_head_type": "gated"}, "training by SGLang; vLLM does not support the gated Markov head; llama"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            "training by vLLM, SGLang; llama.cpp does not scale rotary embeddings by llama3",
        ),
        (
            {"speculators_model_type": "dspark", **SLIDING, "sliding_window_non_causal": True},
            "speculators' nested form; run as in training by llama.cpp; vLLM masks attention in layers 0 "
            "differently from training, so fewer tokens are accepted; SGLang does not read a nested config.json",
        ),
        (
            {"speculators_model_type": "dflash", **SLIDING, "markov_rank": 0, "sample_from_anchor": False},
            "DFlash in speculators' nested form; run as in training by no server; vLLM masks attention in layers 0 "
            "differently from training, so",
        ),
        (DEFAULT_TAPS, "EAGLE-3 in flat form; run as in training by vLLM, SGLang, llama.cpp"),
        (
            {**DEFAULT_TAPS, "norm_before_residual": True},
            "EAGLE-3 in flat form; run as in training by vLLM, llama.cpp; SGLang",
        ),
        (
            {**DEFAULT_TAPS, "norm_output": True, "fc_norm": True},
            "EAGLE-3 in flat form; run as in training by vLLM, SGLang; llama.cpp ignores fc_norm, so fewer tokens are "
            "accepted, ignores norm_output",
        ),
        (
            {**DEFAULT_TAPS, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}},
            "EAGLE-3 in flat form; run as in training by SGLang, llama.cpp; vLLM reads the states one layer before the",
        ),
        (
            {**DEFAULT_TAPS, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}},
            "EAGLE-3 in flat form; run as in training by vLLM, llama.cpp; SGLang reads the states one layer after the",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4], "num_aux_hidden_states": 2},
            "EAGLE-3 in flat form; run as in training by vLLM; SGLang reads the states of the default layers, so fewer "
            "tokens are accepted; llama.cpp does not run a draft that reads 2 layers",
        ),
        (
            {**DEFAULT_TAPS, "speculators_model_type": "eagle3", "norm_before_residual": True},
            "EAGLE-3 in speculators' nested form; run as in training by vLLM, llama.cpp; SGLang does not read a nested",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4], "num_aux_hidden_states": None},
            "EAGLE-3 in flat form; run as in training by no server; vLLM does not run a draft that reads 2 layers;",
        ),
        (
            {**DEFAULT_TAPS, "speculators_model_type": "eagle3"},
            "EAGLE-3 in speculators' nested form; run as in training by llama.cpp; vLLM assumes norm_before_residual "
            "if config.json lacks it, so fewer tokens are accepted; SGLang does not read a nested config.json",
        ),
    ],
)
def test_the_layout_of_a_draft_and_the_servers_that_run_it_are_said_without_a_target(
    target: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    kind, tiny = ("eagle3", tiny_eagle3) if "EAGLE-3" in says else ("dspark", tiny_dspark)
    changed(save_dspark(tmp_path / "draft", target, tiny=tiny), "config.json", **changes)
    (tmp_path / "draft" / "model.safetensors").unlink()
    (finding,) = layout_findings(parse_drafter(f"{kind}:{tmp_path / 'draft'}"))
    assert says in finding.found
    assert finding.status == ("ok" if "training by vLLM, SGLang, llama.cpp" in finding.found else "note")


def test_the_layout_of_other_drafters_needs_a_target(target: Path, tmp_path: Path) -> None:
    for text in ("lookup", f"heads:{save_heads(tmp_path / 'heads', target)}"):
        with pytest.raises(ValueError, match="can be checked only with a target: add --target"):
            layout_findings(parse_drafter(text))


def wide(folder: Path, target: Path) -> str:
    return f"heads:{save_heads(folder, target, width=24)}"


def broken_heads(folder: Path, target: Path) -> str:
    path = save_heads(folder, target) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    return f"heads:{folder}"


def of_another_target(folder: Path, target: Path) -> str:
    return f"heads:{save_heads(folder / 'heads', save(folder / 'other', seed=7))}"


def adapted(folder: Path, target: Path) -> str:
    text = of_another_target(folder, target)
    shutil.copytree(folder / "other", folder / "heads" / "target")
    changed(folder / "heads", "provenance.json", recipe={"adapters": {"rank": 4}})
    return text


def dspark_of_another_target(folder: Path, target: Path) -> str:
    return f"dspark:{save_dspark(folder / 'dspark', save(folder / 'other', seed=7))}"


def dspark_without_a_tensor(folder: Path, target: Path) -> str:
    changed(save_dspark(folder, target), "config.json", num_hidden_layers=2)
    return f"dspark:{folder}"


def wide_dspark(folder: Path, target: Path) -> str:
    return f"dspark:{save_dspark(folder, target, width=24)}"


def eagle3_of_a_deeper_target(folder: Path, target: Path) -> str:
    changed(save_dspark(folder, target, tiny=tiny_eagle3), "config.json", eagle_aux_hidden_state_layer_ids=[2])
    return f"eagle3:{folder}"


def without_provenance(folder: Path, target: Path) -> str:
    return f"heads:{save_heads(folder, None)}"


def draft_of_another_target(folder: Path, target: Path) -> str:
    return f"draft:{trained_on(save(folder / 'draft', seed=1), save(folder / 'other', seed=7))}"


def other_tokenizer(folder: Path, target: Path) -> str:
    return f"draft:{trained_on(save(folder, seed=1, shift=3), target)}"


@pytest.mark.parametrize(
    ("make", "check", "status", "says", "remedy"),
    [
        (wide, "heads", "problem", "states of size 24", "trained on this target"),
        (broken_heads, "heads", "problem", "cannot be read as safetensors", "copy the folder again"),
        (of_another_target, "origin", "problem", "trained on another target", "on this target"),
        (adapted, "origin", "problem", "trained on another target", "heads/target"),
        (dspark_of_another_target, "origin", "problem", "trained on another target", "on this target"),
        (wide_dspark, "draft", "problem", "hidden_size is 24", "trained on this target"),
        (dspark_without_a_tensor, "draft", "problem", "layers.1.input_layernorm.weight is missing", "DSpark"),
        (
            eagle3_of_a_deeper_target,
            "draft",
            "problem",
            "reads layer 1, but only layers 0 to 0",
            "trained on this target",
        ),
        (without_provenance, "origin", "note", "no provenance.json", "headstart evaluate"),
        (draft_of_another_target, "origin", "note", "trained on another target", "headstart realign"),
        (other_tokenizer, "tokens", "problem", "differs from the target's", "other-tokenizer:"),
    ],
)
def test_each_misfit_of_a_drafter_is_found_with_its_remedy(
    make: Callable[[Path, Path], str], check: str, status: str, says: str, remedy: str,
    skeleton: Skeleton, target: Path, tmp_path: Path,
) -> None:  # fmt: skip
    found = only(of_drafter(make(tmp_path, target), skeleton), check, status)
    assert says in found.found and remedy in f"{found.found}; {found.remedy}"


def test_weights_of_the_hub_that_are_not_in_the_cache_are_noted_and_not_fetched(
    hub: FakeHub, target: Path, tmp_path: Path
) -> None:
    save_heads(tmp_path / "heads", target)
    folder_on(hub, "zoe/target", target)
    folder_on(hub, "zoe/heads", tmp_path / "heads")
    findings, skeleton = read_skeleton("zoe/target", torch.float32, trusted=False)
    assert skeleton is not None and "hf download zoe/target" in only(findings, "files", "note").remedy
    assert "weights are not downloaded" in only(of_drafter(f"heads:{tmp_path}/heads", skeleton), "origin", "note").found
    assert not hub.asked("model.safetensors")
    for name in ("zoe/target", "zoe/heads"):
        local_folder(name)
    assert fits(of_target("zoe/target")) and fits(of_drafter("heads:zoe/heads", skeleton))


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_models_that_fit_decode_the_target_s_own_text(target: Path, tmp_path: Path) -> None:
    specs = [parse_drafter(f"heads:{save_heads(tmp_path / 'heads', target)}"), parse_drafter("lookup")]
    findings = check_decoding(str(target), torch.float32, specs, trusted=False)
    assert len(findings) == 3 and fits(findings)
    assert "16 tokens" in findings[0].found and "1 of 1 texts equal the target's greedy texts" in findings[0].found


@pytest.mark.parametrize("width", [16, 24])
def test_the_command_decodes_what_fits_and_leaves_with_code_1_after_a_problem(
    width: int, target: Path, tmp_path: Path
) -> None:
    heads = save_heads(tmp_path / "heads", target, width)
    result = CliRunner().invoke(app, ["doctor", "--target", str(target), "--drafter", f"heads:{heads}", "--json", "-"])
    content = json.loads(result.stdout)
    models = [finding for title, each in content["findings"].items() if title not in ("machine", "packages")
              for finding in each]  # fmt: skip
    assert [finding["check"] for finding in models].count("decoding") == (2 if width == 16 else 0)
    assert (result.exit_code, content["problems"] > 0) == ((0, False) if width == 16 else (1, True))
    assert str(target.parent) not in result.stdout
