"""Computes rows, hours and disk for an 8B target on one GPU, without measuring, and lists what trainers store per
token.

The recipes are in recipes/any; the target has Qwen3-8B's shape and no weights. `CARDS` and `ASSUMED` are inputs.

    python benchmarks/one_gpu.py FILE.json && python scripts/publish_results.py FILE.json one_gpu
"""

# ruff: noqa: E402  # the path is set first
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE), str(_HERE)]

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decoding.measure.machine import commit
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.commands.dry_run import checkpoint_bytes
from trainer.drafts.dspark_start import dspark_config
from trainer.drafts.eagle3_training import eagle3_config
from trainer.recipe.draft import DSparkSection, TeacherSection
from trainer.recipe.reading import load_recipe
from trainer.target.features import FeatureOrigin
from trainer.target.teacher_cache import TeacherOrigin

CARDS = {"RTX 4090": (24, 165, 1008), "L40S": (48, 362, 864), "H100": (80, 989, 3350)}
"""Memory in GB, dense bf16 TFLOPS and memory bandwidth in GB/s, as published by NVIDIA (taken on `READ`)."""
ASSUMED = {"prompt": 256, "answer": 768, "flops": 0.35, "bandwidth": 0.6, "spare_gb": 4, "slot": 65}
ASSUMED |= {"texts": 256, "evening_h": 6}
"""Tokens in the prompt and in the answer of a text; shares of a card's peaks that are reached; GB left for the loss;
bytes that autograd keeps per slot, layer and unit of width (counted on a CPU with bf16 autocast); largest number of
texts at a time; and hours in an evening."""
_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936},
    "llama": {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "gpt_oss": {"head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088},
}
_SIZES: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "qwen3-4b": ("qwen3", 2560, 9728, 36, {"tie_word_embeddings": True}),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, {"tie_word_embeddings": False}),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, {"tie_word_embeddings": False}),
    "gpt-oss-20b": ("gpt_oss", 2880, 2880, 24, {"num_local_experts": 32, "num_experts_per_tok": 4}),
}
"""Folder in recipes/ -> family, hidden size, intermediate size, layers, and other values of the target's config.json.
"""
LM_HEAD, KV = 4096 * 151936, 2 * 36 * 8 * 128 * 2
"""Weights of the lm_head, and bytes of keys and values per token of a text."""
_SPECULATORS = "https://github.com/vllm-project/speculators/blob/02c0fadc66a810673349f210dea2362d18f4865a/docs/user_guide/tutorials/train_eagle3_offline.md"
_DEEPSPEC = (
    "https://github.com/deepseek-ai/DeepSpec/blob/40c413ead7b70df49c9e734e4542dedef86badf1/scripts/data/README.md"
)
_FP8 = "https://github.com/vllm-project/speculators/blob/fde5c45b641e6268ad4198d8979e6505c1ee0d24/hs_connectors/src/hs_connectors/fp8_hidden_states_connector.py"
OTHERS = (
    (
        f"[speculators]({_SPECULATORS}), EAGLE-3: four states, in bf16, or in [FP8]({_FP8}) since 0.9.0 of 2026-10-16",
        4 * 4096 * 2,
        4 * 4096 + 4 + 8,
    ),
    (f"[DeepSpec]({_DEEPSPEC}), DSpark: six states", 6 * 4096 * 2 + 6),
)
"""The first figure follows from the formula on the first page, the second from the tensors that the second page's code
writes (with a scale and the token's id), and the third from estimate_target_cache_size.py next to the third page."""
READ = "2026-11-26"
"""Day on which the figures of the other trainers were read at these commits. The date of version 0.9.0 is from PyPI."""
SET = ("name=x", "target=x", "output=x", "data.train=x", "data.heldout=x")


def _config(family: str, hidden: int, intermediate: int, layers: int, more: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(family, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers)
    config.update(_SHAPES[family] | more)
    return config


def stored(kind: type[Any], **fields: Any) -> int:
    """Return the bytes per token in a store whose origin is of this kind and has these fields."""
    known = {"target": "", "tokenizer": "", "data": "", "vocab_size": 151936, "dtype": "bfloat16"}
    row_bytes: int = kind(**known, **fields).row_bytes
    return row_bytes


def evening(name: str, target: int, heads: int, draft: DSparkDraft) -> dict[str, Any]:
    """Return what can be trained on a card in one evening. If a draft fits next to the target, the target reads each
    row once and no states are stored.
    """
    (memory, tflops, bandwidth), text = CARDS[name], ASSUMED["prompt"] + ASSUMED["answer"]
    all_of_it, layers = count(draft), count(draft.layers)
    is_draft = 2 * target + 16 * all_of_it + ASSUMED["spare_gb"] * 1e9 <= memory * 1e9
    recipe = load_recipe(_HERE.parent / "recipes" / "any" / f"{'dspark' if is_draft else 'markov'}.yaml", SET)
    served = target * (2 if is_draft else 1)  # bytes: 8 bits on a small card
    texts = min(ASSUMED["texts"], int((0.9 * memory * 1e9 - served) / (KV * text)))
    write = ASSUMED["answer"] * (served / texts + KV * text) / (ASSUMED["bandwidth"] * bandwidth * 1e9)
    blocks = 24 * 6 * (layers + LM_HEAD) + text * count(draft.fc)
    products = blocks if is_draft else ASSUMED["answer"] * 4 * (4096 * 4096 + LM_HEAD)
    read, train = (flops / (ASSUMED["flops"] * tflops * 1e12) for flops in (2 * target * text, 6 * products))
    seen = recipe.training.steps * recipe.training.batch_size
    most = int((ASSUMED["evening_h"] * 3600 - seen * train) / (write + read))
    rows = seen if most >= seen else most // 1000 * 1000
    states = 0 if is_draft else rows * text * stored(FeatureOrigin, hidden_size=4096, states="int8")
    hours = {"write_h": rows * write / 3600, "read_h": rows * read / 3600, "train_h": seen * train / 3600}
    disk = states + checkpoint_bytes(recipe, all_of_it if is_draft else heads)
    method, serve = ("DSpark draft", "bf16") if is_draft else ("Markov heads", "8-bit weights")
    found = {"card": name, "memory": memory, "method": method, "serve": serve, "texts": texts, "rows": rows, **hours}
    return {**found, "hours": sum(hours.values()), "disk_gb": disk / 1e9}


def published(folder: str, kind: str, target: CausalLM, tokenizer: Any) -> dict[str, Any]:
    """Return what a recipe with published hyperparameters needs. Its target is on the same GPU and reads a row once."""
    recipe = load_recipe(_HERE.parent / "recipes" / folder / f"{kind}.yaml", SET[3:])
    section, text = recipe.draft, ASSUMED["prompt"] + ASSUMED["answer"]
    if section.dspark is not None:
        config = dspark_config(target, tokenizer, section.dspark.model_copy(update={"mask_token": "mask"}))
        with torch.device("meta"):
            draft = DSparkDraft(config)
        labels, layers = section.dspark.anchors * section.dspark.block_size, draft.layers
        lm_head = 4 * target.model.get_output_embeddings().weight.numel()  # frozen: no gradient of its weights
    else:
        config = replace(eagle3_config(target, section.eagle3), draft_vocab_size=section.vocabulary)
        with torch.device("meta"):
            draft = Eagle3Draft(config)
        labels, layers = section.eagle3.anchors * section.eagle3.steps, draft.midlayer
        lm_head = 6 * count(draft.lm_head)
    sizes, shape = dict(target.model.named_parameters()), target.model.config
    experts = sum(weight.numel() for name, weight in sizes.items() if ".experts." in name)
    idle = experts and experts * (1 - shape.num_experts_per_tok / shape.num_local_experts)
    embedding = 0 if shape.tie_word_embeddings else target.model.get_input_embeddings().weight.numel()
    read = 2 * text * (count(target.model) - embedding - idle)
    trained = labels * (6 * count(layers) + lm_head) + 6 * text * count(draft.fc)
    flops = recipe.training.steps * recipe.training.batch_size * (read + trained)
    kept = labels * (section.dspark.layers if section.dspark else 1) * ASSUMED["slot"] * shape.hidden_size
    memory = (2 * count(target.model) + 18 * count(draft) + kept) / 1e9 + ASSUMED["spare_gb"]  # 2 bytes: bf16 copies
    hours = {
        card: flops / (ASSUMED["flops"] * tflops * 1e12) / 3600 if memory <= size else None
        for card, (size, tflops, _) in CARDS.items()
    }
    return {"recipe": f"{folder}/{kind}.yaml", "trained": count(draft), "memory_gb": memory, "hours": hours}


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def main() -> None:
    """Compute, and write the JSON."""
    tokenizer: Any = SimpleNamespace(eos_token_id=None, get_vocab=lambda: {"mask": 0})
    with torch.device("meta"):
        targets = {name: CausalLM(AutoModelForCausalLM.from_config(_config(*_SIZES[name]))) for name in _SIZES}
        target = targets["qwen3-8b"]
        config = dspark_config(target, tokenizer, DSparkSection(mask_token="mask"))
        draft = DSparkDraft(config)
        heads = MedusaHeads(MedusaConfig(4096, 151936, shared_lm_head=True, markov_rank=256))
    recipes = [published(name, kind, targets[name], tokenizer) for name in targets for kind in ("dspark", "eagle3")]
    taps, teacher = ", ".join(map(str, config.target_layer_ids)), TeacherSection(folder="")
    of_heads, of_draft = (
        [stored(FeatureOrigin, hidden_size=4096, states=states, layers=layers) for states in ("int8", "bf16")]
        for layers in ("", taps)
    )
    logits = stored(TeacherOrigin, top_k=teacher.top_k, tail=teacher.tail, temperature=1.0)
    ours = ("heads: one state, in int8 or bf16", *of_heads), ("DSpark: five states, in int8 or bf16", *of_draft)
    report = {
        "hardware": {"gpu": "computed"},
        "commit": commit(),
        "assumed": ASSUMED,
        "read": READ,
        "stored": [*ours, ("draft: logits, of trained tokens only", logits), *OTHERS],
        "recipes": recipes,
        "cards": [evening(name, count(target.model), count(heads), draft) for name in CARDS],
    }
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
