"""Medusa heads: small networks on the target's last hidden state that predict tokens further ahead.

Head k (from 0) reads the hidden state at position t, from which the target's own lm_head predicts token t+1,
and predicts token t+2+k (Medusa, 2401.10774, section 2.1.1).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
FORMAT = "headstart-medusa"


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of the heads and the tree they draft.

    ``tree`` lists paths of ranks: ``(0, 2)`` is head 1's third best token after head 0's best. Every prefix is there.
    With ``shared_lm_head`` no head has a Linear of its own: all of them write through the target's lm_head.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    tree: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))
    shared_lm_head: bool = False

    def __post_init__(self) -> None:
        deepest = max((len(path) for path in self.tree), default=0)
        if deepest > self.num_heads:
            raise ValueError(f"the tree is {deepest} deep but there are {self.num_heads} heads: shorten its paths")


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b), the identity at the start: W and b are zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = x + F.silu(self.linear(x))
        return residual


class MedusaHead(nn.Module):
    """Residual blocks, each with weights of its own, and a Linear to the vocabulary, unless the target's is shared."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden_size) for _ in range(config.num_layers))
        self.lm_head = None if config.shared_lm_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, hidden: Float[Tensor, "*batch hidden"], lm_head: nn.Module | None = None
    ) -> Float[Tensor, "*batch vocab"]:
        """Logits. ``lm_head`` is the target's, for a head that has none of its own."""
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = _writer(self, lm_head)(hidden)
        return logits


def _writer(head: MedusaHead, lm_head: nn.Module | None) -> nn.Module:
    if head.lm_head is not None:
        return head.lm_head
    if lm_head is None:
        raise ValueError("these heads share the target's lm_head: give it as lm_head")
    return lm_head


class MedusaHeads(nn.Module):
    """All heads of one target."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.num_heads))

    @staticmethod
    def for_target(target: nn.Module, config: MedusaConfig) -> "MedusaHeads":
        """Heads that start as the target's own lm_head: each Linear a copy of its weight, each block the identity."""
        heads = MedusaHeads(config)
        lm_head: nn.Linear = target.get_output_embeddings()  # type: ignore[operator]  # nn.Module's getattr
        if getattr(lm_head, "bias", None) is not None or lm_head.weight.shape != (
            config.vocab_size,
            config.hidden_size,
        ):
            shape = f"{tuple(lm_head.weight.shape)}{' with a bias' if lm_head.bias is not None else ''}"
            raise ValueError(
                f"the target's lm_head is {shape} and cannot be copied into heads of {config.vocab_size} tokens and "
                f"width {config.hidden_size} without one, nor shared by them"
            )
        if config.shared_lm_head:
            return heads
        with torch.no_grad():
            for head in heads.heads:
                head.lm_head.weight.copy_(lm_head.weight)  # type: ignore[union-attr,operator]  # ModuleList's items
        return heads

    def forward(
        self, hidden: Float[Tensor, "*batch hidden"], lm_head: nn.Module | None = None
    ) -> Float[Tensor, "heads *batch vocab"]:
        """Logits of every head. For training use the heads one at a time: this stacks all of them."""
        return torch.stack([head(hidden, lm_head) for head in self.heads])

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(json.dumps({"format": FORMAT, **asdict(self.config)}, indent=2) + "\n")
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, folder / WEIGHTS_NAME, metadata={"format": "pt"})

    @staticmethod
    def from_pretrained(
        folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> "MedusaHeads":
        """Read heads written by `save_pretrained`, in their stored dtype unless another is given.

        Every tensor must be there and nothing else.
        """
        folder = Path(folder)
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} holds no Medusa heads: {name} is missing")
        stored = json.loads((folder / CONFIG_NAME).read_text())
        if stored.pop("format", None) != FORMAT:
            raise ValueError(f"{folder / CONFIG_NAME} does not describe Medusa heads (no format: {FORMAT!r})")
        try:
            tree = tuple(tuple(path) for path in stored.pop("tree"))
            heads = MedusaHeads(MedusaConfig(**stored, tree=tree))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / CONFIG_NAME} does not describe Medusa heads: {error}") from error
        try:
            weights = load_file(folder / WEIGHTS_NAME)
            heads.to(next(iter(weights.values())).dtype).load_state_dict(weights)
        except (SafetensorError, RuntimeError, StopIteration) as error:
            raise ValueError(f"{folder / WEIGHTS_NAME} does not fit its config: {error}") from error
        return heads.to(device=device, dtype=dtype or next(heads.parameters()).dtype).eval()

    def check_fits(self, hidden_size: int, vocab_size: int) -> None:
        """Refuse a target of another width or vocabulary."""
        if self.config.hidden_size != hidden_size:
            raise ValueError(
                f"these heads read hidden states of size {self.config.hidden_size} but the target's have size "
                f"{hidden_size}: give heads that were trained on this target"
            )
        if self.config.vocab_size != vocab_size:
            raise ValueError(
                f"these heads predict {self.config.vocab_size} tokens but the target knows {vocab_size}: "
                "give heads that were trained on this target"
            )


class StackedHeads:
    """All heads of a target at once, for decoding: one product for a layer of blocks, one for a shared lm_head.

    The blocks' weights are laid side by side once, and the heads given hold views of them from then on, so that
    nothing is held twice. Heads that are moved to another device or dtype later are no longer the ones run here.
    """

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads: list[MedusaHead] = list(heads.heads)  # type: ignore[arg-type]  # ModuleList's items
        self._dtype = next(heads.parameters()).dtype
        self._layers: list[tuple[Tensor, Tensor]] = []
        for layer in range(heads.config.num_layers):
            linears: list[nn.Linear] = [head.blocks[layer].linear for head in self._heads]  # type: ignore[misc]
            weight, bias = (torch.stack([getattr(x, part).detach() for x in linears]) for part in ("weight", "bias"))
            for index, linear in enumerate(linears):
                linear.weight.data, linear.bias.data = weight[index], bias[index]
            self._layers.append((weight, bias[:, None]))

    def __call__(
        self, hidden: Float[Tensor, "rows hidden"], count: int, lm_head: nn.Module | None = None
    ) -> Float[Tensor, "count rows vocab"]:
        """Logits of the first ``count`` heads. ``lm_head`` is the target's, for heads that share it."""
        x = hidden.to(self._dtype).expand(count, -1, -1)
        for weight, bias in self._layers:
            x = x + F.silu(torch.baddbmm(bias[:count], x, weight[:count].mT))
        if self._heads[0].lm_head is None:
            writer = _writer(self._heads[0], lm_head)
            logits: Tensor = writer(x.to(next(writer.parameters()).dtype))
            return logits
        return torch.stack([_writer(head, None)(x[k]) for k, head in enumerate(self._heads[:count])])
