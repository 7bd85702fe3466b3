"""Parallel drafts: a small causal LM that reads the text and mask tokens, and predicts several tokens in one forward.

The draft reads ``x_0 … x_t M … M`` with K - 1 mask tokens M at the positions t+1 to t+K-1. Its output at position t+j
predicts token t+j+1, so that one forward drafts K tokens (PARD, 2504.18583). Beside the transformers model there may be
a `MarkovBias` on the logits of all K tokens, and a reader of the target: the target's hidden state from which a token
was written is added to that token's embedding. Masks have no such state.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import input_embeddings
from decoding.model.markov import MarkovBias
from decoding.model.stored import check_finite, check_tensors, check_whole, read_config_of, read_header
from decoding.rules.tree import MOST_NODES, checked_paths

CONFIG_NAME = "parallel.json"
WEIGHTS_NAME = "parallel.safetensors"
FORMAT = "headstart-parallel"
_REMEDY = "give a parallel draft as headstart wrote it"


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of a parallel draft's parts beside its model; ValueError for an impossible size.

    ``tokens``: K, the tokens drafted in one forward. ``mask_token``: its id in the draft's vocabulary. ``vocab_size``
    and ``outputs``: the tokens that the draft reads and writes. ``hidden_size``: the draft's. ``markov_rank`` 0: no
    bias. ``target_hidden_size`` None: the draft does not read the target's states. ``tree``: the paths of ranks that it
    drafts unless told otherwise, as those of heads (`decoding.model.heads.MedusaConfig`); empty for a chain of K.
    """

    tokens: int
    mask_token: int
    vocab_size: int
    outputs: int
    hidden_size: int
    markov_rank: int = 0
    target_hidden_size: int | None = None
    tree: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        least = {"tokens": 1, "mask_token": 0, "vocab_size": 1, "outputs": 1, "hidden_size": 1, "markov_rank": 0}
        for name, smallest in least.items():
            check_whole(name, getattr(self, name), smallest)
        if self.target_hidden_size is not None:
            check_whole("target_hidden_size", self.target_hidden_size, 1)
        if self.mask_token >= self.vocab_size:
            raise ValueError(f"mask_token is {self.mask_token}, but the draft reads {self.vocab_size} tokens")
        if self.tokens >= MOST_NODES:
            raise ValueError(f"tokens is {self.tokens}: give at most {MOST_NODES - 1}")
        paths = checked_paths(self.tree, self.outputs)
        deepest = max((len(path) for path in paths), default=0)
        if deepest > self.tokens:
            raise ValueError(f"the tree is {deepest} deep but a forward drafts {self.tokens} tokens: shorten its paths")
        object.__setattr__(self, "tree", paths)

    def check_fits(self, target_hidden_size: int) -> None:
        """Raise ValueError if the draft reads hidden states, and of another size than the target's."""
        if self.target_hidden_size not in (None, target_hidden_size):
            raise ValueError(
                f"this parallel draft reads hidden states of size {self.target_hidden_size} but the target's have size "
                f"{target_hidden_size}: give a draft that was trained on this target"
            )

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of every tensor of the parts."""
        if self.markov_rank:
            yield "markov.embedding.weight", (self.vocab_size, self.markov_rank)
            yield "markov.output.weight", (self.outputs, self.markov_rank)
        if self.target_hidden_size is not None:
            yield "reader.weight", (self.hidden_size, self.target_hidden_size)


class ParallelParts(nn.Module):
    """The parts of a parallel draft beside its model: the bias and the reader, each None if the config has none."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        self.config = config
        self.markov = MarkovBias(config.vocab_size, config.outputs, config.markov_rank) if config.markov_rank else None
        self.reader: nn.Linear | None = None
        if config.target_hidden_size is not None:
            self.reader = nn.Linear(config.target_hidden_size, config.hidden_size, bias=False)
            nn.init.zeros_(self.reader.weight)

    def read(self, states: Float[Tensor, "*tokens target_hidden"]) -> Float[Tensor, "*tokens hidden"]:
        """Return what is added to the tokens' embeddings, from the target's states that the tokens were written from.

        Each state is scaled to a mean square of 1, because targets differ by orders of magnitude.
        """
        assert self.reader is not None, "this draft does not read the target's states"
        read: Tensor = self.reader(F.rms_norm(states.to(self.reader.weight), states.shape[-1:], eps=1e-12))
        return read

    def save_pretrained(self, folder: Path) -> None:
        """Write `CONFIG_NAME`, and `WEIGHTS_NAME` if there are weights, into the draft's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(json.dumps({"format": FORMAT, **asdict(self.config)}, indent=2) + "\n")
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        if state:
            save_file(state, folder / WEIGHTS_NAME, metadata={"format": "pt"})

    @staticmethod
    def from_pretrained(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> "ParallelParts":
        """Read parts written by `save_pretrained`, ready to decode, in ``dtype``.

        ValueError, before anything is built, for a tensor that the config does not describe or that is missing;
        ValueError for a weight that is not finite in the dtype.
        """
        config = read_config(folder)
        weights: dict[str, Tensor] = {}
        if shapes := dict(config.shapes()):
            path = folder / WEIGHTS_NAME
            check_tensors(path, read_header(path, _REMEDY), shapes.items(), _REMEDY)
            weights = load_file(path)
        parts = ParallelParts(config)
        parts.load_state_dict(weights)
        parts.to(dtype)
        check_finite(parts.state_dict(), f"{folder} in {dtype}", "give an earlier checkpoint, or train the draft again")
        return parts.to(device).requires_grad_(False).eval()


@dataclass(frozen=True)
class ParallelDraft:
    """A parallel draft: the model that reads text and masks, and its parts.

    ValueError for parts that are not of this model's sizes.
    """

    model: CausalLM
    parts: ParallelParts

    def __post_init__(self) -> None:
        config, trimmed = self.parts.config, self.model.output_tokens
        written = self.model.vocab_size if trimmed is None else len(trimmed)
        width = input_embeddings(self.model.model).embedding_dim
        fits = config.outputs <= written if trimmed is None else config.outputs == written
        if (config.vocab_size, config.hidden_size) != (self.model.vocab_size, width) or not fits:
            raise ValueError(
                f"the parts of this parallel draft are for a model of width {config.hidden_size} that reads "
                f"{config.vocab_size} tokens and writes {config.outputs}, but its model has {width}, "
                f"{self.model.vocab_size} and {written}: {_REMEDY}"
            )

    @property
    def tokens(self) -> int:
        """K: the tokens drafted in one forward."""
        return self.parts.config.tokens

    @property
    def reads_target(self) -> bool:
        """True if it reads the target's hidden states."""
        return self.parts.reader is not None

    def check_fits(self, target: CausalLM) -> None:
        """Raise ValueError for a target whose hidden states it cannot read."""
        self.parts.config.check_fits(target.hidden_size)


def is_parallel_folder(folder: Path) -> bool:
    """Return True if a folder holds the parts of a parallel draft."""
    return (folder / CONFIG_NAME).is_file()


def read_config(folder: Path) -> ParallelConfig:
    """Read the `CONFIG_NAME` in a draft's folder. ValueError unless it describes a parallel draft in `FORMAT`."""
    return read_config_of(ParallelConfig, folder / CONFIG_NAME, FORMAT, _REMEDY)
