"""Commands for servers: their words, their depths, the traps that they name, and which server accepts which format."""

import json
import shlex
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from changed_folders import with_config

from trainer.export.companions import ServingPlan
from trainer.export.serve import ServerCommand, Serving, commands_of
from trainer.export.task import Artefact
from trainer.export.vllm_proposer import HeadsProposer

TARGET = "org/target"
PLAN = ServingPlan("M, 2 threads", (), ((1, 2, 3), (3, 8, 1), (9, 16, 0)))
DRAFT = Artefact("draft", 9, "float32", hidden_size=8, vocab_size=128, layers=1)
HEADS = replace(DRAFT, format="heads", heads=3)
DSPARK = replace(DRAFT, format="dspark", at_once=4, markov_rank=8)
DFLASH = replace(DSPARK, markov_rank=0, dflash=True)
EAGLE3 = replace(DRAFT, format="eagle3", eagle3=True)
GGUF = replace(DRAFT, format="gguf")
CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": 128, "max_position_embeddings": 64, "head_dim": 64}
CONFIG |= {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
CONFIG |= {"num_key_value_heads": 1, "block_size": 4, "mask_token_id": 1, "target_layer_ids": [0]}
CONFIG |= {"draft_vocab_size": 128}
"""Sizes of a draft of any kind."""
KINDS = {"dspark": "Qwen3DSparkModel", "dflash": "DFlashDraftModel", "eagle3": "LlamaForCausalLMEagle3"}


def folder_of(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the folder of a draft; nothing is read from heads and GGUF files."""
    return folder_of(tmp_path / "a folder", **CONFIG)


def commands(artefact: Artefact, folder: Path, **given: Any) -> tuple[ServerCommand, ...]:
    if artefact.reads_states:
        with_config(architectures=[KINDS[artefact.method]], markov_rank=artefact.markov_rank)(folder)
    return commands_of(
        Serving(**{"artefact": artefact, "folder": folder, "path": str(folder), "target": TARGET, **given})
    )


def command(artefact: Artefact, folder: Path, server: str = "vllm", **given: Any) -> ServerCommand:
    (found,) = (each for each in commands(artefact, folder, **given) if each.server == server)
    return found


def vllm_config(found: ServerCommand) -> dict[str, Any]:
    words = shlex.split(found.shell)
    assert words == list(found.argv), "names with blanks are quoted"
    assert words[:3] == ["vllm", "serve", TARGET] and words[-2] == "--speculative-config"
    config: dict[str, Any] = json.loads(words[-1])
    return config


def warned(found: ServerCommand, text: str) -> bool:
    return any(text in warning for warning in found.warnings)


def noted(found: ServerCommand, text: str) -> bool:
    return any(text in note for note in found.notes)


# --- words and depth --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("artefact", "servers"),
    [
        (HEADS, ["vllm"]),
        (DRAFT, ["vllm", "sglang"]),
        (DSPARK, ["vllm", "sglang"]),
        (DFLASH, ["vllm", "sglang"]),
        (EAGLE3, ["vllm", "sglang"]),
        (replace(EAGLE3, format="speculators"), ["vllm"]),
        (GGUF, ["llama.cpp"]),
        (replace(DFLASH, format="gguf"), ["llama.cpp"]),
    ],
)
def test_each_format_has_the_commands_of_the_servers_that_take_it(
    folder: Path, artefact: Artefact, servers: list[str]
) -> None:
    found = commands(artefact, folder, path="DIR")
    assert [each.server for each in found] == servers
    assert all("DIR" in each.shell and str(folder) not in each.shell for each in found)


def test_heads_are_served_by_our_proposer_at_one_depth(folder: Path) -> None:
    plan = replace(PLAN, schedule=((1, 2, 2), (3, 8, 1), (9, 16, 0)))
    found = command(HEADS, folder, plan=plan)
    assert found.argv[:4] == ("vllm", "serve", TARGET, "--speculative-config")
    config = json.loads(found.argv[4])
    module, _, name = config["model"].rpartition(".")
    assert getattr(import_module(module), name) is HeadsProposer and config["method"] == "custom_class"
    assert config["num_speculative_tokens"] == 2 and noted(found, "limit the server with --max-num-seqs 8")
    assert noted(found, "[[1,2,2],[3,8,1],[9,16,0]]")
    assert noted(command(HEADS, folder), "3 tokens at a time: as many as these weights can draft")
    assert found.argv[5] == "--additional-config" and json.loads(found.argv[6]) == {"headstart": {"heads": str(folder)}}
    assert noted(found, "0.32 or later") and warned(found, "drafts by argmax")


def test_a_plan_gives_a_draft_the_table_by_batch_size_and_says_how_its_tokens_were_drawn(folder: Path) -> None:
    assert vllm_config(command(DRAFT, folder))["num_speculative_tokens"] == 4, "the usual depth"
    (folder / "provenance.json").write_text(json.dumps({"recipe": {"draft": {"num_draft_tokens": 6}}}))
    assert vllm_config(command(DRAFT, folder))["num_speculative_tokens"] == 6, "as it was trained"
    config = {
        "method": "draft_model",
        "model": str(folder),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1], [9, 16, 0]],
    }
    found = command(DRAFT, folder, plan=PLAN)
    assert vllm_config(found) == config and warned(found, "drafts by argmax")
    found = command(DRAFT, folder, plan=replace(PLAN, drawn=True))
    assert vllm_config(found) == config | {"draft_sample_method": "probabilistic"}
    assert not warned(found, "drafts by argmax")
    nowhere = command(DRAFT, folder, plan=replace(PLAN, schedule=((1, 16, 0),)))
    assert vllm_config(nowhere)["num_speculative_tokens"] == 6 and warned(nowhere, "found no batch size at which")


def test_llama_cpp_gets_two_files_and_a_chain_that_no_probability_ends(folder: Path) -> None:
    found = command(GGUF, folder, "llama.cpp", target="org/a-target", plan=PLAN)
    assert found.argv == (
        "llama-server", "-m", "a-target.gguf", "-md", f"{folder}/model.gguf", "--spec-type", "draft-simple",
        "--spec-draft-n-max", "3", "--spec-draft-p-min", "0",
    )  # fmt: skip
    assert noted(found, "headstart export org/a-target NEW --format gguf") and noted(found, "server with --parallel 8")
    drawn = command(GGUF, folder, "llama.cpp", plan=replace(PLAN, drawn=True))
    assert drawn.argv[-2:] == ("--spec-draft-sampling", "probabilistic") and not warned(drawn, "argmax")


def test_sglang_verifies_one_token_more_than_is_drafted(folder: Path) -> None:
    assert command(DRAFT, folder, "sglang", plan=PLAN).argv == (
        "python", "-m", "sglang.launch_server", "--model-path", TARGET,
        "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(folder),
        "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
    )  # fmt: skip


@pytest.mark.parametrize(("artefact", "method"), [(DSPARK, "dspark"), (DFLASH, "dflash")])
def test_a_dspark_draft_is_named_by_its_method_in_every_server(folder: Path, artefact: Artefact, method: str) -> None:
    found = command(artefact, folder, path="runs/dspark")
    assert vllm_config(found) == {"method": method, "model": "runs/dspark", "num_speculative_tokens": 4}
    assert not warned(found, "another method"), "vLLM keeps a method of these names, whatever the path"
    assert noted(found, "only on GPUs") == (method == "dspark") and not warned(found, "64 or 128")
    size = {"dspark": ("--speculative-dspark-block-size", "4"), "dflash": ("--speculative-num-draft-tokens", "5")}
    words = command(artefact, folder, "sglang").argv
    assert words[words.index("--speculative-algorithm") + 1] == method.upper() and words[-2:] == size[method]
    file = command(replace(artefact, format="gguf"), folder, "llama.cpp", plan=replace(PLAN, drawn=True))
    assert file.argv[5:7] == ("--spec-type", f"draft-{method}") and warned(file, "drafts by argmax")
    with_config(head_dim=32)(folder)
    assert warned(command(artefact, folder), "head_dim is 32, but vLLM's GPU kernels support only 64 and 128")


def test_an_eagle3_draft_is_named_by_its_method_in_every_server(folder: Path, tmp_path: Path) -> None:
    found = command(EAGLE3, folder, path="runs/eagle3")
    assert vllm_config(found) == {"method": "eagle3", "model": "runs/eagle3", "num_speculative_tokens": 4}
    assert not warned(found, "another method")
    words = command(EAGLE3, folder, "sglang").argv
    assert words[6:] == (
        "EAGLE3", "--speculative-draft-model-path", str(folder),
        "--speculative-num-steps", "4", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5",
    )  # fmt: skip
    file = command(replace(EAGLE3, format="gguf"), folder, "llama.cpp", plan=replace(PLAN, drawn=True))
    assert file.argv[5:7] == ("--spec-type", "draft-eagle3") and warned(file, "drafts by argmax")
    window = {"sliding_window": 4, "layer_types": ["sliding_attention"]}
    for config in (window, {"norm_before_residual": True}, {"eagle_aux_hidden_state_layer_ids": [2, 4]}):
        other = folder_of(tmp_path / "-".join(config), **CONFIG, **config)
        assert [each.server for each in commands(EAGLE3, other)] == ["vllm"]


# --- the traps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my-eagle3-heads", "x/dspark_7b"])
def test_a_path_by_which_vllm_takes_another_method_is_named(tmp_path: Path, name: str) -> None:
    served = folder_of(tmp_path / name, model_type="llama")
    assert warned(command(DRAFT, served), "vLLM chooses another method because")
    assert not warned(command(DRAFT, served, path="DIR"), "another method"), "the server is given this path"
    assert not warned(command(HEADS, served), "another method"), "its path is no model's"


def test_a_draft_of_another_vocabulary_size_or_with_fewer_positions_is_configured_and_named(
    folder: Path, tmp_path: Path
) -> None:
    other, same = (
        str(folder_of(tmp_path / str(size), model_type="llama", vocab_size=size, max_position_embeddings=128))
        for size in (130, 128)
    )
    found = command(DRAFT, folder, target=other, shown_target=TARGET, plan=replace(PLAN, drawn=True))
    assert vllm_config(found)["use_heterogeneous_vocab"] is True
    assert "draft_sample_method" not in vllm_config(found), "vLLM rejects both together"
    assert warned(found, "different sizes") and warned(found, "nothing is drafted after the draft's 64 positions")
    for artefact, target in ((DRAFT, same), (HEADS, other)):
        assert "use_heterogeneous_vocab" not in command(artefact, folder, target=target).shell
