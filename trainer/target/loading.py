"""A recipe's target, loaded or only on disk."""

import os
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from decoding.dtypes import parse_dtype
from decoding.errors import UserError
from decoding.model.architecture import max_positions, why_no_chains
from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.loading import eos_token_ids, load_config, load_model, load_tokenizer
from trainer.data.batch import check_documents_are_apart
from trainer.data.dataset import Dataset, heldout_prompts, load_splits
from trainer.processes import agreed, from_first
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.heads import MedusaRecipe


@dataclass(frozen=True)
class StoredTarget:
    """A target without its model in memory."""

    name: str
    """Hub id or folder to load it from."""
    dtype: torch.dtype
    """The dtype to load it in."""
    fingerprint: str
    """`decoding.model.fingerprint.stored_fingerprint` of its weights."""
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
    """Load the target's tokenizer, the training data and the held-out data, and check what needs no model.

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
    dataset, heldout = load_splits(recipe.data, tokenizer, eos_token_ids(name, tokenizer, trusted))
    if evaluation.prompts:
        longest = (positions or 1 << 30) - evaluation.max_new_tokens
        heldout_prompts(heldout.firsts, evaluation.prompts, evaluation.prompt_tokens, longest)
    return tokenizer, dataset, heldout


def load_target(recipe: MedusaRecipe | DraftRecipe, device: torch.device, tokenizer: PreTrainedTokenizerBase) -> Target:
    """Load the recipe's target and check that it fits the data. Every process calls this."""
    name, trusted = recipe.target, recipe.trust_remote_code
    model = agreed(lambda: load_target_model(recipe, device), patient=True)  # one machine may have to download it
    fingerprint = from_first(lambda: stored_fingerprint(name, trusted))
    return Target(name, parse_dtype(recipe.dtype), fingerprint, tokenizer, model)


def load_target_model(recipe: MedusaRecipe | DraftRecipe, device: torch.device) -> CausalLM:
    """Load only the model, on any number of processes; raise UserError if it does not fit the recipe's data."""
    dtype = parse_dtype(recipe.dtype)
    one_process = int(os.environ.get("WORLD_SIZE", "1")) == 1  # one process may use all GPUs
    place = None if device.type == "cuda" and one_process else device
    model = CausalLM(load_model(recipe.target, dtype, place, recipe.trust_remote_code))
    reason = why_no_chains(model.model)
    if reason is not None and recipe.evaluation.prompts:
        raise UserError(f"{reason}, so evaluations cannot verify drafts: set evaluation.prompts=0 to train on it")
    if recipe.data.packing:
        check_documents_are_apart(model.model)
    return model
