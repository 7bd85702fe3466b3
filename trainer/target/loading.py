"""The target of a recipe (loaded, or only its description), its hidden states, and the function from the products of
its lm_head to logits.

`trainer.target.features` reads the states from disk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from decoding.dtypes import parse_dtype
from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.model.architecture import max_positions, why_no_chains
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import capture_lm_head_input, capture_taps, lm_head_input
from decoding.model.loading import eos_token_ids, load_config, load_model, load_tokenizer
from trainer.data.batch import Batch, check_documents_are_apart
from trainer.data.dataset import Dataset, heldout_prompts, load_splits
from trainer.learning.spans import span
from trainer.processes import agreed, from_first
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.heads import MedusaRecipe


@dataclass(frozen=True)
class StoredTarget:
    """A target without its model in memory."""

    name: str
    """Hub id or folder from which the target is loaded."""
    dtype: torch.dtype
    """The dtype in which the target is loaded."""
    fingerprint: str
    """`decoding.files.fingerprint.stored_fingerprint` of its weights."""
    tokenizer: PreTrainedTokenizerBase

    def loaded(self, model: CausalLM) -> "Target":
        """Return the same target with its model."""
        return Target(self.name, self.dtype, self.fingerprint, self.tokenizer, model)


@dataclass(frozen=True)
class Target(StoredTarget):
    """A target with its model loaded."""

    model: CausalLM

    def let_go(self) -> StoredTarget:
        """Return the same target without its model."""
        return StoredTarget(self.name, self.dtype, self.fingerprint, self.tokenizer)


def load_data(recipe: MedusaRecipe | DraftRecipe) -> tuple[PreTrainedTokenizerBase, Dataset, Dataset]:
    """Load the target's tokenizer, the training data and the held-out data; make the checks that need no model.

    Every process calls this before it loads a model. Raises UserError for unusable rows, for sequences longer than the
    target's context, and if no held-out prompt leaves room for an answer.
    """
    name, trusted, evaluation = recipe.target, recipe.trust_remote_code, recipe.evaluation
    positions = max_positions(load_config(name, trusted).get_text_config(decoder=True))
    if positions is not None and recipe.data.max_length > positions:
        raise UserError(
            f"data.max_length is {recipe.data.max_length}, but the target's context has {positions} tokens: set "
            f"data.max_length={positions} or less"
        )
    tokenizer = load_tokenizer(name, trusted)
    ends = eos_token_ids(name, tokenizer, trusted)
    dataset, heldout = load_splits(recipe.data, tokenizer, ends, recipe.reads_answers)
    if evaluation.prompts:
        longest = (positions or 1 << 30) - evaluation.max_new_tokens
        heldout_prompts(heldout.firsts, evaluation.prompts, evaluation.prompt_tokens, longest)
    return tokenizer, dataset, heldout


def load_target(recipe: MedusaRecipe | DraftRecipe, device: torch.device, tokenizer: PreTrainedTokenizerBase) -> Target:
    """Load the recipe's target and check that it fits the data. Every process calls this."""
    name, trusted = recipe.target, recipe.trust_remote_code
    # The others wait patiently, because one machine may have to download the model.
    model = agreed(lambda: load_target_model(recipe, device), patient=True)
    fingerprint = from_first(lambda: stored_fingerprint(name, trusted))
    return Target(name, parse_dtype(recipe.dtype), fingerprint, tokenizer, model)


def load_target_model(recipe: MedusaRecipe | DraftRecipe, device: torch.device) -> CausalLM:
    """Load only the model, on any number of processes; raise UserError if it does not fit the recipe's data."""
    dtype = parse_dtype(recipe.dtype)
    chosen = None if device.type == "cuda" else device  # None: the process's GPU, or all GPUs if there is one process
    model = CausalLM(load_model(recipe.target, dtype, chosen, recipe.trust_remote_code))
    reason = why_no_chains(model.model)
    if reason is not None and recipe.evaluation.prompts:
        raise UserError(f"{reason}, so evaluations cannot verify drafts: set evaluation.prompts=0 to train anyway")
    if recipe.data.packing:
        check_documents_are_apart(model.model)
    return model


LogitTransform = Callable[[Tensor], Tensor]
Columns = Mapping[str, Tensor]
"""The values that a store contains for a batch; see `trainer.target.features.FeatureOrigin.columns`."""


class HiddenStates(Protocol):
    """A frozen target's states and lm_head, for training heads."""

    transform: LogitTransform | None
    """Function from the lm_head's products to logits; None if the products are the logits."""

    @property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        """The weight of the target's lm_head."""

    def read(self, batch: Batch) -> Columns | None:
        """Return the values on disk for a batch, on the device of the batch; None if the target must run."""

    def hidden(self, batch: Batch, stored: Columns | None = None) -> Float[Tensor, "batch positions hidden"]:
        """Return the lm_head's input on the batch's device; ``stored`` is the result of `read` on this device."""


class OnlineTarget:
    """The target, run on every batch without gradients."""

    def __init__(self, target: CausalLM) -> None:
        check_logits(target.model)
        self._model, self._layers = target.model.requires_grad_(False), target.num_layers
        self.transform = logit_transform(target.model.config.get_text_config(decoder=True))

    @property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    def read(self, batch: Batch) -> Columns | None:
        """Return None, because nothing is stored."""
        return None

    def hidden(self, batch: Batch, stored: Columns | None = None) -> Float[Tensor, "batch positions hidden"]:
        return self.tapped(batch, ())[0]

    @torch.no_grad()
    def tapped(self, batch: Batch, taps: Sequence[int], stored: Columns | None = None) -> tuple[Tensor, Tensor]:
        """Return the lm_head's input and the states after the layers ``taps``, from one run of the target.

        The two tensors have shapes (batch, positions, hidden) and (batch, positions, taps), on the batch's device; the
        second tensor is empty without taps. ``stored`` is the result of `read` on the batch's device.
        """
        device = batch.tokens.device  # a target spread over devices may end on another device
        inputs, whole = batch.model_inputs(), list[Tensor]()
        with span("target"):
            for rows, longest in _of_similar_length(batch):
                part = {name: value if value is None else value[rows, :longest] for name, value in inputs.items()}
                with capture_taps(self._model, self._layers, taps) as tapped:
                    hidden = lm_head_input(self._model, part)
                states = [state.to(device) for state in (hidden, tapped[0] if tapped else hidden[..., :0])]
                if isinstance(rows, slice):
                    return states[0], states[1]
                whole = whole or [state.new_zeros(*batch.tokens.shape, state.shape[-1]) for state in states]
                for padded, state in zip(whole, states, strict=True):
                    padded[rows, :longest] = state
        return whole[0], whole[1]


_ENOUGH = 512
"""Number of tokens in a forward pass beyond which the products on a CPU do not get faster."""


def _of_similar_length(batch: Batch) -> list[tuple[list[int] | slice, int]]:
    """Return groups of rows to run together, each with the length of its longest row.

    A GPU runs all rows together. A CPU runs few rows of similar length at a time, which need little padding.
    """
    everything: list[tuple[list[int] | slice, int]] = [(slice(None), batch.tokens.shape[1])]
    if batch.tokens.device.type != "cpu":
        return everything
    lengths = batch.attention_mask.sum(1).tolist()
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not groups or lengths[groups[-1][0]] * (len(groups[-1]) + 1) > _ENOUGH:
            groups.append([])
        groups[-1].append(row)
    return everything if len(groups) == 1 else [(rows, lengths[rows[0]]) for rows in groups]


# --- from products to logits ----------------------------------------------------------------------------------------


def logit_scale(config: PreTrainedConfig) -> float:
    """Return the factor from the lm_head's products to logits; Cohere multiplies them by a number, and Granite divides
    them.
    """
    factor, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    return float(factor or 1.0) / float(divisor or 1.0)


def logit_transform(config: PreTrainedConfig) -> LogitTransform | None:
    """Return the function from products to logits (`logit_scale`, Gemma-2's soft cap); None if the products are the
    logits.
    """
    scale, cap = logit_scale(config), getattr(config, "final_logit_softcapping", None)
    if cap:
        return lambda logits: torch.tanh(logits * scale / cap) * cap
    return None if scale == 1.0 else lambda logits: logits * scale


@torch.no_grad()
def check_logits(model: PreTrainedModel, role: str = "target") -> None:
    """Raise UserError for a model whose logits are not `logit_transform` of its lm_head's products.

    Losses are computed from these products, so they would train a wrong distribution.
    """
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UserError(f"the {role}'s lm_head has a bias, which training does not support: use another {role}")
    tokens = torch.tensor([[0, 1]], device=model.device)
    with capture_lm_head_input(model) as captured:
        logits = model(input_ids=tokens, use_cache=False).logits
    weight = model.get_output_embeddings().weight
    products = weight @ captured[0][0].to(weight.device).mT
    transform = logit_transform(model.config.get_text_config(decoder=True))
    expected = (products.mT if transform is None else transform(products.mT)).to(logits.device)
    if not torch.allclose(logits[0].float(), expected.float(), rtol=0.05, atol=0.05 * float(expected.abs().max())):
        raise UserError(
            f"training does not support how the {role} ({model.config.model_type}) turns lm_head products into logits: "
            f"use another {role}"
        )
