"""Medusa heads: small networks on the target's last hidden state that predict tokens further ahead.

Head k (from 0) reads the hidden state at position t, from which the target's lm_head predicts token t+1, and predicts
token t+2+k (Medusa, 2401.10774, section 2.1.1). Heads with a Markov bias add to their logits a term that depends on the
previous token, t+1+k.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from decoding.errors import UserError, check_whole
from decoding.files.folder import HEADS_FORMAT
from decoding.files.stored import (
    CONFIG_NAME,
    SHARD_BYTES,
    WEIGHTS_NAME,
    check_finite,
    check_tensors,
    has_weights,
    read_config_of,
    read_weights,
    weights_header,
    without_d2t,
    write_weights,
)
from decoding.model.forward import OutputLayer, without_gaps
from decoding.model.markov import MarkovBias
from decoding.model.vocabulary import check_d2t, d2t_of, tokens_of
from decoding.rules.tree import checked_paths

_REMEDY = "use heads that headstart wrote"
_THIS_TARGET = "use heads trained on this target"


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of the heads and the tree that they draft; an impossible size or tree raises UserError.

    ``tree`` lists paths of ranks: ``(0, 2)`` is the third best token of head 1 after the best token of head 0. Every
    prefix must be listed. ``shared_lm_head``: the heads use the target's lm_head instead of output layers.
    ``markov_rank``: rank of the `MarkovBias` that all heads share; 0 means no bias. ``linear``: each head first maps
    the state linearly. ``draft_vocab_size``: the number of different tokens that the heads can write; they then share
    one lm_head of rows that are copied from the target's lm_head. None means all tokens of the target.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    tree: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))
    shared_lm_head: bool = False
    markov_rank: int = 0
    linear: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        least = {"hidden_size": 1, "vocab_size": 1, "num_heads": 1, "num_layers": 0, "markov_rank": 0}
        for name, smallest in least.items():
            check_whole(name, getattr(self, name), smallest)
        for name in ("shared_lm_head", "linear"):
            if type(value := getattr(self, name)) is not bool:
                raise UserError(f"{name} is {value!r}: use true or false")
        if self.draft_vocab_size is not None:
            check_whole("draft_vocab_size", self.draft_vocab_size)
            if self.draft_vocab_size >= self.vocab_size or not self.shared_lm_head:
                raise UserError(
                    f"draft_vocab_size is {self.draft_vocab_size}: use fewer than the target's {self.vocab_size} "
                    "tokens, and heads with shared_lm_head"
                )
        paths = checked_paths(self.tree, self.outputs)
        deepest = max((len(path) for path in paths), default=0)
        if deepest > self.num_heads:
            raise UserError(
                f"the tree has depth {deepest}, but there are {self.num_heads} heads: shorten the paths of the tree"
            )
        object.__setattr__(self, "tree", paths)

    @property
    def outputs(self) -> int:
        """The number of different tokens that the heads can write."""
        return self.draft_vocab_size or self.vocab_size

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of every weight of the heads, head by head."""
        for head in range(self.num_heads):
            if self.linear:
                yield f"heads.{head}.linear.weight", (self.hidden_size, self.hidden_size)
                yield f"heads.{head}.linear.bias", (self.hidden_size,)
            for layer in range(self.num_layers):
                block = f"heads.{head}.blocks.{layer}"
                yield f"{block}.linear.weight", (self.hidden_size, self.hidden_size)
                yield f"{block}.linear.bias", (self.hidden_size,)
            if not self.shared_lm_head:
                yield f"heads.{head}.lm_head.weight", (self.vocab_size, self.hidden_size)
        if self.markov_rank:
            yield "markov.embedding.weight", (self.vocab_size, self.markov_rank)
            yield "markov.output.weight", (self.outputs, self.markov_rank)
        if self.draft_vocab_size is not None:
            yield "lm_head.weight", (self.outputs, self.hidden_size)

    def check_fits(self, hidden_size: int, vocab_size: int) -> None:
        """Raise UserError if the target's hidden size or vocabulary size differs from the size in this config."""
        if self.hidden_size != hidden_size:
            raise UserError(
                f"these heads read states of size {self.hidden_size}, but the target's states have the size "
                f"{hidden_size}: {_THIS_TARGET}"
            )
        if self.vocab_size != vocab_size:
            raise UserError(
                f"these heads were trained for a vocabulary of {self.vocab_size} tokens, but the target's vocabulary "
                f"has {vocab_size}: {_THIS_TARGET}"
            )


class ResidualBlock(nn.Module):
    """Residual block x + SiLU(Wx + b); W and b are zero at the start, so the block is the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = x + F.silu(self.linear(x))
        return residual


class MedusaHead(nn.Module):
    """A head: a linear map if configured, its blocks, and an `OutputLayer` unless it shares the target's lm_head."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.linear = None
        if config.linear:
            self.linear = nn.Linear(config.hidden_size, config.hidden_size)
            nn.init.eye_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden_size) for _ in range(config.num_layers))
        self.lm_head = None if config.shared_lm_head else OutputLayer(config.hidden_size, config.vocab_size, bias=False)

    def features(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """Return the input of the output layer."""
        if self.linear is not None:
            hidden = self.linear(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(
        self, hidden: Float[Tensor, "*batch hidden"], lm_head: nn.Module | None = None
    ) -> Float[Tensor, "*batch vocab"]:
        """Return the logits. ``lm_head``: the target's lm_head, for a head that shares it."""
        return self.written(self.features(hidden), lm_head)

    def written(
        self, features: Float[Tensor, "*batch hidden"], lm_head: nn.Module | None
    ) -> Float[Tensor, "*batch vocab"]:
        """Return the logits. The output layer of the head or of the target computes them, in its dtype and on its
        device.
        """
        writer = lm_head if self.lm_head is None else self.lm_head
        if writer is None:
            raise UserError("these heads share the target's lm_head: pass it as lm_head")
        logits: Tensor = writer(features.to(next(writer.parameters())))
        return logits


class MedusaHeads(nn.Module):
    """All heads of a target, in the order of the tokens that they predict.

    With a ``draft_vocab_size`` the logits have one entry for each of `output_tokens` instead of the whole vocabulary.
    """

    d2t: Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.num_heads))
        rank = config.markov_rank
        self.markov = MarkovBias(config.vocab_size, config.outputs, rank, spread=3.0) if rank else None
        self.lm_head = None
        if config.draft_vocab_size is not None:
            self.lm_head = OutputLayer(config.hidden_size, config.outputs, bias=False).requires_grad_(False)
            self.register_buffer("d2t", torch.zeros(config.outputs, dtype=torch.long))

    @staticmethod
    def for_target(target: nn.Module, config: MedusaConfig) -> "MedusaHeads":
        """Make untrained heads: each output layer is a copy of the target's lm_head, and each block is the identity.

        A Markov bias starts at zero. With a ``draft_vocab_size``, call `write_only` next.
        """
        lm_head: nn.Linear = target.get_output_embeddings()  # type: ignore[operator]  # nn.Module's getattr
        if getattr(lm_head, "bias", None) is not None:
            raise UserError(
                "the target's lm_head has a bias, which heads do not support: use a target without this bias"
            )
        return MedusaHeads.for_lm_head(lm_head.weight, config)

    @staticmethod
    def for_lm_head(weight: Float[Tensor, "vocab hidden"], config: MedusaConfig) -> "MedusaHeads":
        """Make the heads of `for_target` from the weight of the target's lm_head alone."""
        if weight.shape != (config.vocab_size, config.hidden_size):
            raise UserError(f"the target's lm_head has shape {tuple(weight.shape)}: use heads for this shape")
        heads = MedusaHeads(config)
        if config.shared_lm_head:
            return heads
        with torch.no_grad():
            for head in heads.heads:
                head.lm_head.weight.copy_(weight)  # type: ignore[union-attr,operator]  # ModuleList's items
        return heads

    @property
    def output_tokens(self) -> Int[Tensor, " outputs"] | None:
        """The token ids of the outputs, in increasing order; None if the outputs are the whole vocabulary."""
        return None if self.lm_head is None else tokens_of(self.d2t)

    @torch.no_grad()
    def write_only(self, tokens: Sequence[int], lm_head: Float[Tensor, "vocab hidden"]) -> None:
        """Set the tokens that the heads can write, in increasing order; copy their rows from the target's lm_head."""
        assert self.lm_head is not None, "the config must have a draft_vocab_size"
        self.d2t.copy_(d2t_of(tokens))
        self.lm_head.weight.copy_(lm_head[list(tokens)])

    def forward(
        self,
        hidden: Float[Tensor, "*batch hidden"],
        lm_head: nn.Module | None = None,
        before: Int[Tensor, "heads *batch"] | None = None,
    ) -> Float[Tensor, "heads *batch vocab"]:
        """Return the logits of all heads at once; to save memory in training, use `head_logits` for one head at a time.

        ``before``: token t+1+k for head k, the token before the predicted one; only for heads with a Markov bias.
        """
        return torch.stack(
            [
                self.head_logits(k, hidden, lm_head, None if before is None else before[k])
                for k in range(len(self.heads))
            ]
        )

    def head_logits(
        self,
        k: int,
        hidden: Float[Tensor, "*batch hidden"],
        lm_head: nn.Module | None = None,
        before: Int[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of head k (from 0), which predicts token t+2+k.

        ``before``: token t+1+k, only for heads with a Markov bias.
        """
        logits: Tensor = self.heads[k](hidden, lm_head if self.lm_head is None else self.lm_head)
        assert (self.markov is None) == (before is None), "a Markov bias needs the previous token"
        return logits if self.markov is None or before is None else self.markov.added_to(logits, before)

    def save_pretrained(self, folder: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        """Write ``config.json`` and the weights to the folder, in shards as in `write_weights`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(json.dumps({"format": HEADS_FORMAT, **asdict(self.config)}, indent=2) + "\n")
        write_weights(folder, self.state_dict(), shard_bytes)

    @staticmethod
    def from_pretrained(
        folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> "MedusaHeads":
        """Read heads written by `save_pretrained`, in ``dtype`` (None: as stored).

        Raises UserError, before anything is built, if tensors do not match ``config.json``, and later if a weight is
        not finite in the dtype.
        """
        folder = Path(folder)
        config = read_config(folder)
        header = without_d2t(weights_header(folder, _REMEDY), config.draft_vocab_size, folder, _REMEDY)
        check_tensors(folder / WEIGHTS_NAME, header, config.shapes(), _REMEDY)
        return loaded(config, read_weights(folder, _REMEDY), folder, dtype).to(device)


class StackedHeads:
    """All heads of a target as one batch, for decoding.

    Each layer of blocks takes one matrix product, and so does a shared lm_head. The blocks' weights are stored
    contiguously, and the parameters of the given heads become views of them, so that no weight is stored twice, even if
    the heads are stacked again. Heads that are later moved to another device or dtype no longer share these weights. A
    Markov bias is not applied here but later, when tokens are chosen.
    """

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads: list[MedusaHead] = list(heads.heads)  # type: ignore[arg-type]  # ModuleList's items
        self._like, self._lm_head = next(heads.heads.parameters()), heads.lm_head
        blocks = [[head.blocks[layer].linear for head in self._heads] for layer in range(heads.config.num_layers)]
        self._layers = [_stacked(linears) for linears in blocks]  # type: ignore[arg-type]  # ModuleList's items
        maps = [head.linear for head in self._heads if head.linear is not None]
        self._linear = _stacked(maps) if maps else None

    def __call__(
        self, hidden: Float[Tensor, "rows hidden"], count: int, lm_head: nn.Module | None = None
    ) -> Float[Tensor, "count rows vocab"]:
        """Return the logits of the first ``count`` heads, on the device of their output layers.

        ``lm_head``: the target's lm_head, for heads that share it.
        """
        x = hidden.to(self._like).expand(count, -1, -1)
        if self._linear is not None:
            weight, bias = self._linear
            x = torch.baddbmm(bias[:count], x, weight[:count].mT)
        for weight, bias in self._layers:
            x = x + F.silu(torch.baddbmm(bias[:count], x, weight[:count].mT))
        if self._heads[0].lm_head is None:
            return self._heads[0].written(without_gaps(x), lm_head if self._lm_head is None else self._lm_head)
        return torch.stack([head.written(x[k], None) for k, head in enumerate(self._heads[:count])])


def _stacked(linears: Sequence[nn.Linear]) -> tuple[Float[Tensor, "heads out in"], Float[Tensor, "heads 1 out"]]:
    """Return the weights and biases of one layer of all heads, each as one tensor."""
    bias = _side_by_side([linear.bias for linear in linears])
    return _side_by_side([linear.weight for linear in linears]), bias[:, None]


def _side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """Make the parameters views of one tensor (parameters, ...), and return it; copy them only if necessary."""
    first, size = parameters[0].detach(), parameters[0].numel()
    storage = first.untyped_storage().data_ptr()
    if all(
        part.untyped_storage().data_ptr() == storage and part.storage_offset() == first.storage_offset() + k * size
        for k, part in enumerate(parameters)
    ):
        return first.as_strided((len(parameters), *first.shape), (size, *first.stride()))
    stacked = torch.stack([part.detach() for part in parameters])
    for part, view in zip(parameters, stacked, strict=True):
        part.data = view
    return stacked


def loaded(
    config: MedusaConfig, weights: dict[str, Tensor], folder: Path, dtype: torch.dtype | None = None
) -> MedusaHeads:
    """Build heads from these weights, ready to decode, in ``dtype`` (None: the dtype of the weights).

    The heads take over the tensors without copying, and ``weights`` is emptied. If the dtype changes, one tensor after
    another is converted. Raises UserError, naming ``folder`` as the source, if a weight is not finite in that dtype.
    """
    check_finite(weights, f"{folder}", "use an earlier checkpoint, or train the heads again")
    stored = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    if config.draft_vocab_size is not None:
        check_d2t(weights["d2t"], config.vocab_size, folder, _REMEDY)
    with torch.device("meta"):
        heads = MedusaHeads(config)
    heads.load_state_dict(weights, assign=True)
    weights.clear()
    if dtype not in (None, stored):
        heads.to(dtype)
        check_finite(heads.state_dict(), f"{folder} in {dtype}", "use a dtype of a wider range, such as bf16")
    return heads.eval()


def read_config(folder: Path) -> MedusaConfig:
    """Read the ``config.json`` of heads; raise UserError unless it describes heads in `HEADS_FORMAT`."""
    for name, there in ((CONFIG_NAME, (folder / CONFIG_NAME).is_file()), (WEIGHTS_NAME, has_weights(folder))):
        if not there:
            raise UserError(f"{folder} does not contain Medusa heads, because {name} is missing: {_REMEDY}")
    return read_config_of(MedusaConfig, folder / CONFIG_NAME, HEADS_FORMAT, _REMEDY)
