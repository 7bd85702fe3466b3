"""Models of the suite: Llama shapes of 1B and 8B with random weights, and drafters with a chosen acceptance.

With purely random weights, the best logits would be near-ties, so any rounding would change the text, and no draft
would predict it. These models count instead: the layers have their usual cost but add almost nothing, and the lm_head
writes token x + 1 after token x. A drafter that also counts is always right. If the lm_head rows of a random share of
tokens are exchanged, the drafter is wrong after these tokens. So the speeds are the speeds of models of these sizes,
but acceptance is forced, and every figure says so.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from decoding.drafters import Drafter, DraftModelDrafter, DSparkDrafter, MedusaDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.drafts.dspark_start import initial_dspark
from trainer.recipe.draft import DraftSection, DSparkSection

# Hidden size, feed-forward size, layers, attention heads, key heads.
SHAPES = {"0.1B": (1024, 4096, 2, 16, 4), "1B": (2048, 8192, 16, 32, 8), "8B": (4096, 14336, 32, 32, 8)}
PRETENDED = {"0.1B": (32, 64, 1, 2, 1), "1B": (32, 64, 2, 2, 1), "8B": (64, 64, 3, 4, 2)}
DRAFT_OF = {"1B": "0.1B", "8B": "1B"}
DRAFTED = 4
"""Tokens of a chain."""
Measurements = Iterator[tuple[str, Callable[[], Any]]]
"""The measurements of a step of the suite, by name; each returns JSON values."""


@dataclass(frozen=True)
class Bench:
    """Device and sizes of the suite, with ``bandwidth`` in bytes/s and ``peak`` of matrix products in FLOP/s.

    An earlier step measures bandwidth and peak; they are None if it failed.
    """

    pretend: bool
    bandwidth: float | None = None
    peak: float | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.pretend else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.pretend else torch.bfloat16

    def pick(self, full: Any, pretended: Any) -> Any:
        """Return ``full`` on a GPU, and otherwise ``pretended``."""
        return pretended if self.pretend else full

    def text(self, length: int, first: int) -> tuple[int, ...]:
        """Return a text of ``length`` tokens that counts up; ``first`` selects where it starts."""
        return tuple((first * 101 + index) % self.vocab for index in range(length))

    @property
    def vocab(self) -> int:
        return 256 if self.pretend else 128_256


def free() -> None:
    """Release unreferenced memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, including the device's work, and the call's result."""
    synchronize()
    begin = time.perf_counter()
    found = run()
    synchronize()
    return time.perf_counter() - begin, found


def counting_model(bench: Bench, size: str, share: float = 1.0) -> PreTrainedModel:
    """Make a model that counts correctly after a ``share`` of all tokens."""
    hidden, intermediate, layers, heads, key_heads = (PRETENDED if bench.pretend else SHAPES)[size]
    config = LlamaConfig(
        vocab_size=bench.vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with bench.device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=bench.dtype)
    model = model.to(bench.device).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(1e-4)
    head = model.get_output_embeddings().weight
    head.copy_(after(model.get_input_embeddings().weight, 1, share))
    return model


def after(embeddings: Tensor, ahead: int, share: float) -> Tensor:
    """Return an lm_head that writes token x + ``ahead`` after x, except after a random 1 - ``share`` of all tokens."""
    generator = torch.Generator().manual_seed(ahead)  # heads are wrong at different tokens
    wrong = (torch.rand(len(embeddings), generator=generator) >= share).nonzero()[:, 0].to(embeddings.device)
    damaged = embeddings.clone()
    damaged[wrong] = embeddings[wrong.roll(1)]
    return damaged.roll(ahead, 0)


def drafter_of(bench: Bench, kind: str, target: CausalLM, size: str, share: float, static: str | None) -> Drafter:
    """Make a chain drafter: ``chain`` is a smaller model, ``medusa`` heads, ``dspark`` a DSpark draft."""
    if kind == "chain":
        draft = counting_model(bench, DRAFT_OF[size], share)
        return DraftModelDrafter(CausalLM(draft, static=static), DRAFTED)
    embeddings = target.model.get_input_embeddings().weight
    if kind == "medusa":
        tree = tuple((0,) * depth for depth in range(1, DRAFTED + 1))
        with bench.device:
            heads = MedusaHeads(MedusaConfig(target.hidden_size, target.vocab_size, DRAFTED, tree=tree))
        heads = heads.to(bench.device, bench.dtype).requires_grad_(False)
        for index, head in enumerate(heads.heads):
            head.lm_head.weight.copy_(after(embeddings, index + 2, share))  # type: ignore[union-attr,operator]
        return MedusaDrafter(heads)
    block = dspark_draft(target).to(bench.device, bench.dtype).requires_grad_(False).eval()
    assert block.markov is not None
    # Only the bias decides, because the block's logits are far smaller.
    table = torch.randn(block.markov.embedding.weight.shape, generator=torch.Generator().manual_seed(2)).to(embeddings)
    block.markov.embedding.weight.copy_(table)
    block.markov.output.weight.copy_(after(table, 1, share))
    return DSparkDrafter(block, DRAFTED)


def dspark_draft(target: CausalLM) -> DSparkDraft:
    """Make an untrained draft as in recipes; its mask token is the last token of the vocabulary."""
    tokenizer: Any = SimpleNamespace(eos_token_id=None, get_vocab=lambda: {"mask": target.vocab_size - 1})
    with target.device:  # a CPU makes its random weights slowly
        return initial_dspark(target, tokenizer, dspark_section(target), ())


def dspark_section(target: CausalLM) -> DraftSection:
    """Return a recipe's section; all values are given, because without pydantic there are no defaults."""
    rank = 256 if target.vocab_size > 1000 else 64
    return DraftSection(dspark=DSparkSection(mask_token="mask", markov_rank=rank))


def weight_bytes(model: torch.nn.Module) -> int:
    """Count the bytes of weights that a pass reads: all except the input embeddings."""
    embeddings = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    read = sum(parameter.nbytes for parameter in model.parameters())
    return int(read - (0 if embeddings is None else embeddings.weight.nbytes))


def cache_bytes(model: PreTrainedModel, positions: float) -> float:
    """Count the bytes of the keys and values of ``positions`` positions."""
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * positions * config.num_key_value_heads * dim * model.dtype.itemsize
