"""A small target for real engines, and speculators that learned its texts,
so that some of their tokens are accepted.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_dspark import tiny_dflash
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import lm_head_input
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.drafts.start import draft_from_target, write_draft

TOKENS = 3
"""Number of tokens that heads and DFlash drafts draft."""
CHAIN = tuple((0,) * depth for depth in range(1, TOKENS + 1))
_TEMPLATE = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}{{ '[a]' }}"
_SIZES: dict[str, Any] = {
    "vocab": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest size that vLLM's attention on a CPU supports
    "max_position_embeddings": 256,
    "initializer_range": 0.06,  # texts that can be learned
    "eos_token_id": 0,
}
_TEXTS, _PROMPT_TOKENS, _TEXT_TOKENS = 96, 8, 48


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of random printable characters."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[list[int]] = torch.randint(33, 127, (count, _PROMPT_TOKENS), generator=generator).tolist()
    return drawn


class Desk:
    """A target in ``folder``/target, and texts by the target for training: (texts, positions), including prompts."""

    def __init__(self, folder: Path, family: str = "llama", layers: int = 2) -> None:
        self.folder, self.tokenizer = folder, byte_tokenizer(_TEMPLATE)
        model = tiny_model(family, num_hidden_layers=layers, **_SIZES)
        model.save_pretrained(folder / "target")
        self.tokenizer.save_pretrained(folder / "target")
        self.target = CausalLM(model)
        asked = prompts(_TEXTS, seed=1)
        written = Engine(self.target).decode(asked, DecodingConfig(_TEXT_TOKENS), batch_size=_TEXTS)
        self.texts = torch.tensor([[*prompt, *text.tokens] for prompt, text in zip(asked, written, strict=True)])

    def write_heads(self, name: str, shared: bool = False, bias: float = 0.0, rank: int = 0) -> Path:
        """Train heads on the texts.

        The biases of their layers start with the standard deviation ``bias`` and stay about as large. ``rank`` is the
        rank of the Markov bias; 0 means no bias.
        """
        torch.manual_seed(0)
        sizes = self.target.hidden_size, self.target.vocab_size, TOKENS, 1
        heads = MedusaHeads.for_target(self.target.model, MedusaConfig(*sizes, CHAIN, shared, rank))
        for parameter in heads.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, std=bias)
        states = lm_head_input(self.target.model, {"input_ids": self.texts}).detach()
        lm_head: Any = self.target.model.get_output_embeddings()
        length = self.texts.shape[1] - TOKENS - 1
        labels = torch.stack([self.texts[:, head + 2 :][:, :length] for head in range(TOKENS)])
        before = torch.stack([self.texts[:, head + 1 :][:, :length] for head in range(TOKENS)]) if rank else None
        _fit(heads.parameters(), lambda: _loss(heads(states[:, :length], lm_head, before), labels))
        heads.save_pretrained(self.folder / name)
        provenance = {"target": {"name": str(self.folder / "target")}}
        (self.folder / name / "provenance.json").write_text(json.dumps(provenance))
        return self.folder / name

    def write_draft(self, name: str) -> Path:
        """Train the target's first layer to continue texts like the target."""
        draft = draft_from_target(self.target.model, 1).train()
        _fit(draft.parameters(), lambda: _loss(draft(self.texts).logits[:, :-1], self.texts[:, 1:]))
        write_draft(CausalLM(draft.eval()), self.tokenizer, self.folder / name)
        return self.folder / name

    def write_dflash(self, name: str, writes: range | None = None) -> Path:
        """Train a DFlash draft to write several tokens after any token of the target's texts.

        ``writes``: the only tokens that the draft can write; None means all tokens.
        """
        draft, target = tiny_dflash(self.target, TOKENS, spread=0.05, intermediate_size=96), self.target
        embeddings, lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
        layers = target.model(self.texts, output_hidden_states=True).hidden_states
        states = torch.cat([layers[tap + 1].detach() for tap in draft.config.target_layer_ids], -1)
        positions = torch.arange(self.texts.shape[1]).expand_as(self.texts)
        masks = torch.full((len(self.texts), TOKENS), draft.config.mask_token_id)
        generator = torch.Generator().manual_seed(0)

        def loss() -> Tensor:
            end = int(torch.randint(_PROMPT_TOKENS, self.texts.shape[1] - TOKENS, (), generator=generator))
            text = draft.text_keys(states[:, :end], positions[:, :end])
            block = embeddings(torch.cat((self.texts[:, end : end + 1], masks), 1)).detach()
            hidden = draft(
                block,
                positions[:, end : end + TOKENS + 1],
                lambda layer, *fresh: tuple(torch.cat(both, 2) for both in zip(text[layer], fresh, strict=True)),
            )
            return _loss(lm_head(hidden[:, 1:]), self.texts[:, end + 1 : end + 1 + TOKENS])

        _fit(draft.requires_grad_(True).parameters(), loss, steps=60)
        if writes is not None:
            whole, draft = draft, tiny_dflash(target, TOKENS, writes=writes, intermediate_size=96)
            draft.load_state_dict({**draft.state_dict(), **whole.state_dict()})
            draft.write_only(writes, lm_head.weight.detach())
        draft.save_pretrained(self.folder / name)
        return self.folder / name


def _fit(parameters: Any, loss: Callable[[], Tensor], steps: int = 40) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
