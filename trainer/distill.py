"""The distillation objective: a small draft learns the target's distribution at every trained token."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafters import Drafter, DraftModelDrafter
from decoding.loading import check_same_tokenizer, load_model, load_tokenizer
from decoding.target import CausalLM
from trainer.batch import Batch
from trainer.losses import acceptance_rate, chunked_divergence
from trainer.objective import EVERYWHERE_THE_SAME, TermSums
from trainer.recipe import DraftSection


class DistillTraining(nn.Module):
    """The draft with its loss: a divergence from the target's distribution, where the next token is trained."""

    def __init__(self, draft: PreTrainedModel, section: DraftSection) -> None:
        super().__init__()
        self.draft = draft
        self._section = section

    def forward(self, target_logits: Float[Tensor, "labels vocab"], batch: Batch) -> TermSums:
        logits = self.draft(**batch.model_inputs(), use_cache=False).logits[batch.labelled(1)]
        # One family may pad its vocabularies differently; what one side does not know, neither can be scored on.
        shared = min(logits.shape[-1], target_logits.shape[-1])
        logits, target_logits = logits[:, :shared], target_logits[:, :shared]
        loss = chunked_divergence(logits, target_logits, self._section.objective, self._section.temperature)
        return TermSums(loss[None], acceptance_rate(logits.detach(), target_logits)[None])


class DistillObjective:
    """A draft, its frozen target, and the divergence between them."""

    terms: tuple[str, ...] = ("divergence",)
    hit_name = "acceptance"

    def __init__(
        self,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        section: DraftSection,
        trust_remote_code: bool = False,
        longest: int = 0,
    ) -> None:
        """``longest`` is how many tokens the draft will read at most, in training and in the evaluations."""
        self._target = target
        target.model.requires_grad_(False)
        self._tokenizer = tokenizer
        self._section = section
        draft = _initial_draft(target, tokenizer, section, trust_remote_code)
        limit = CausalLM(draft).max_positions
        if limit is not None and limit < longest:
            raise ValueError(
                f"draft.init is {section.init!r}, whose context holds {limit} tokens, but would read {longest}: "
                "lower data.max_length and the evaluation's tokens, or give another draft"
            )
        self.module: DistillTraining = DistillTraining(draft.train(), section)

    def weights(self, step: int) -> tuple[float, ...]:
        return (1.0,)

    def rates(self, step: int) -> Mapping[str, float]:
        return EVERYWHERE_THE_SAME

    def counts(self, batch: Batch) -> Float[Tensor, " terms"]:
        return batch.labelled(1).sum()[None]

    def inputs(self, batch: Batch, step: int) -> tuple[Any, ...]:
        with torch.no_grad():
            logits = self._target.model(**batch.model_inputs(), use_cache=False).logits
        return logits[batch.labelled(1)], batch

    def _draft_for_decoding(self) -> PreTrainedModel:
        draft: PreTrainedModel = copy.deepcopy(self.module.draft)
        draft.to(self._target.dtype)  # type: ignore[arg-type]  # transformers' stubs
        draft.config.dtype = self._target.dtype
        return draft

    def drafter(self) -> Drafter:
        return DraftModelDrafter(CausalLM(self._draft_for_decoding()), (1,) * self._section.num_draft_tokens)

    def save(self, folder: Path) -> None:
        self._draft_for_decoding().save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


def _initial_draft(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, section: DraftSection, trust_remote_code: bool
) -> PreTrainedModel:
    """The untrained draft, in fp32 on the target's device."""
    if section.init == "target":
        draft = draft_from_target(target.model, section.layers)
        draft.to(target.device, torch.float32)  # type: ignore[arg-type]  # transformers' stubs
        return draft
    check_same_tokenizer(tokenizer, load_tokenizer(section.init, trust_remote_code))
    return load_model(section.init, torch.float32, target.device, trust_remote_code)


def draft_from_target(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the target's own architecture that starts as the chosen layers of it, in the order given."""
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    total: int = config.num_hidden_layers
    kept = [layer + total if layer < 0 else layer for layer in layers]
    if not kept or min(kept) < 0 or max(kept) >= total:
        raise ValueError(f"draft.layers is {list(layers)} but the target has layers 0 to {total - 1}")
    config.num_hidden_layers = len(kept)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == total:  # layer_types, no_rope_layers and the like: one per layer
            setattr(config, name, [value[layer] for layer in kept])
    draft: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    state = {}
    source = target.state_dict()
    for name in draft.state_dict():
        parts = name.split(".")
        # The first number in a parameter's name is its layer, in every family (model.layers.3., transformer.h.3.).
        position = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        if position is not None:
            parts[position] = str(kept[int(parts[position])])
        state[name] = source[".".join(parts)]
    draft.load_state_dict(state)
    ends = target.generation_config
    if ends is not None:  # how texts end, and nothing of how the target likes to be sampled
        draft.generation_config = GenerationConfig(
            bos_token_id=ends.bos_token_id, eos_token_id=ends.eos_token_id, pad_token_id=ends.pad_token_id
        )
    return draft
