"""A target and its draft, trained within seconds on sentences with few words."""

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decoding.model.causal_lm import CausalLM
from decoding.model.eagle3_config import Eagle3Config, default_layers
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.loading import load_model
from decoding.model.vocabulary import most_frequent_tokens
from trainer.recipe.reading import parse_recipe
from trainer.run.train import run_recipe

END = "<|end|>"
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
_NAMES = ("Ann", "Bob", "Eve", "Tim", "Zoë")
_THINGS = ("apple", "book", "coin", "duck", "egg", "fan")


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return texts such as ``Ann has 12 apples. Bob has 3 coins. Ann gives Bob 12 apples.``"""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        (giver, taker), (first, second) = draw.sample(_NAMES, 2), draw.sample(_THINGS, 2)
        many, few = draw.randint(10, 99), draw.randint(2, 9)
        has = f"{giver} has {many} {first}s. {taker} has {few} {second}s."
        texts.append(f"{has} {giver} gives {taker} {many} {first}s. {taker}'s gift is {few} {second}s.")
    return texts


def bpe_tokenizer(texts: Sequence[str] = (), use_regex: bool = True) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on ``texts``, by default sentences.

    Token 0 is the end token; without ``use_regex`` tokens cross the borders of words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts or sentences(100), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
    fast.chat_template = CHAT
    return fast


def train_pair(folder: Path, steps: int = 70, draft_steps: int = 6) -> tuple[Path, Path]:
    """Train a target, and a draft of one of its layers; return their folders."""
    for name, count in (("train", 400), ("heldout", 4)):
        lines = "".join(json.dumps({"text": text + END}) + "\n" for text in sentences(count, seed=count))
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    target = _trained_target(folder, sentences(400, seed=400), steps)
    draft = {"init": {"from_target": {"layers": [0]}}}
    return target, _trained(folder, "draft", draft_steps, target=str(target), dtype="fp32", draft=draft)


def train_dspark(
    folder: Path, target: Path, name: str, steps: int = 40, vocabulary: int | None = None, **section: Any
) -> Path:
    """Train a DSpark draft of the target of `train_pair` in ``folder``, with these settings; return its folder."""
    section = {
        "layers": 1,
        "block_size": 4,
        "taps": (0, 1),
        "markov_rank": 32,
        "mask_token": "Ā",
        "anchors": 12,
        **section,
    }
    draft = {"vocabulary": vocabulary, "dspark": section}
    return _trained(folder, "draft", steps, target=str(target), dtype="fp32", draft=draft, output=str(folder / name))


def deepened(folder: Path, target: Path, kept: Sequence[int], layers: int = 8) -> Path:
    """Write the target with its layers at the places ``kept`` among layers that change nothing; return its folder."""
    model = LlamaForCausalLM.from_pretrained(target)
    torch.manual_seed(0)
    deep = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": layers}))
    own = model.model.layers
    for layer in deep.model.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(last.weight)
    for place, layer in zip(kept, own, strict=True):
        deep.model.layers[place].load_state_dict(layer.state_dict())
    rest = {name: tensor for name, tensor in model.state_dict().items() if ".layers." not in name}
    deep.load_state_dict(rest, strict=False)
    deep.save_pretrained(folder)
    bpe_tokenizer().save_pretrained(folder)
    return folder


def fit_eagle3(
    folder: Path, target: Path, vocabulary: int | None = None, texts: Tensor | None = None, **changes: Any
) -> Path:
    """Fit an EAGLE-3 draft that reads the default layers to sentences, and return its folder. Training recycles one
    state.

    ``texts``: other texts, of shape (texts, positions).
    """
    torch.manual_seed(0)
    model, tokenizer = CausalLM(load_model(str(target), torch.float32)), bpe_tokenizer()
    tokenizer.pad_token = END
    rows = tokenizer([text + END for text in sentences(96, seed=400)], padding=True, return_tensors="pt")
    ids, known = (rows["input_ids"], rows["attention_mask"] == 1) if texts is None else (texts, texts >= 0)
    size, layers = model.vocab_size, default_layers(model.num_layers)
    writes = most_frequent_tokens(ids.tolist(), vocabulary or size, size)
    sizes: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    sizes |= {"num_key_value_heads": 1, "vocab_size": size, "draft_vocab_size": len(writes)}
    draft = Eagle3Draft(Eagle3Config(**sizes | changes, target_layer_ids=layers))
    draft.write_only(writes)
    with torch.no_grad():
        states = model.model(input_ids=ids, output_hidden_states=True).hidden_states
        tapped, embedded = torch.cat([states[layer + 1] for layer in layers], -1), states[0]
    outputs = torch.full((size,), -100).index_copy(0, torch.tensor(writes), torch.arange(len(writes)))
    labels = outputs[ids].where(known, -100)
    optimizer, positions = torch.optim.AdamW(draft.parameters(), lr=1e-2), torch.arange(ids.shape[1])[None]
    for _ in range(80):
        drawn, loss = torch.randint(len(ids), (16,)), torch.zeros(())
        state = draft.fused(tapped[drawn])
        for first in (1, 2):  # of the tokens that are paired with the state of slot 0
            count = ids.shape[1] - 1 - first
            read = embedded[drawn, first : first + count]
            state = draft(read, state[:, :count], positions[:, :count], lambda *fresh: fresh)
            loss = loss + cross_entropy(draft.logits(state).mT, labels[drawn, first + 1 : first + 1 + count])
            state = draft.recycled(state)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    draft.save_pretrained(folder)
    return folder


def _trained_target(folder: Path, texts: Sequence[str], steps: int) -> Path:
    """Train a Llama of three layers on batches of 16 texts; return its folder."""
    torch.manual_seed(0)
    tokenizer = bpe_tokenizer()
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 1, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes))
    tokenizer.pad_token = END
    rows = tokenizer([text + END for text in texts], padding=True, return_tensors="pt")
    labels = rows["input_ids"].where(rows["attention_mask"] == 1, -100)
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not each for each in matrices)]
    optimizers = (torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.0), torch.optim.AdamW(others, lr=1e-2))
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 1 - 1 / (steps - step + 1)
        drawn = torch.randint(len(texts), (16,))
        model(rows["input_ids"][drawn], labels=labels[drawn]).loss.backward()
        for optimizer in optimizers:
            optimizer.step()  # type: ignore[no-untyped-call]  # torch's Muon
            optimizer.zero_grad()
    model.save_pretrained(folder / "target")
    bpe_tokenizer().save_pretrained(folder / "target")
    return folder / "target"


def _trained(folder: Path, kind: str, steps: int, **sections: Any) -> Path:
    """Train one recipe; return its final folder."""
    training = {"steps": steps, "batch_size": 16, "micro_batch_size": 16, "optimizer": "muon", "learning_rate": 2e-2}
    content = {
        "kind": kind,
        "name": f"tiny {kind}",
        "output": str(folder / kind),
        "data": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl"), "max_length": 48},
        "training": {**training, "mixed_precision": "no"},
        "evaluation": {"every": 1000, "prompts": 1, "tree_prompts": 1, "prompt_tokens": 4, "max_new_tokens": 4},
        "tracking": "none",
        **sections,
    }
    AcceleratorState._reset_state(True)
    try:
        return Path(run_recipe(parse_recipe(content), Console(file=io.StringIO())))
    finally:
        AcceleratorState._reset_state(True)
