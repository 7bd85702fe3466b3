"""The Medusa-2 objective, which trains heads jointly with LoRA adapters of the target (2401.10774, section 2.2.2)."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.errors import UserError
from decoding.model.architecture import is_spread
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import lm_head_input, run_in_lm_head
from decoding.model.heads import MedusaHeads
from trainer.data.batch import Batch, flat_rows
from trainer.files.transformers4 import write_model
from trainer.heads.medusa1 import (
    OF_FITTED,
    HeadInputs,
    HeadLabels,
    MedusaTraining,
    decoding_copy,
    fit_tree,
    head_counts,
    head_weights,
    initial_heads,
)
from trainer.learning.fused import fused_loss
from trainer.learning.losses import HiddenTeacher, LossMix
from trainer.learning.objective import GreedyTexts, TermSums, checkpoint_layers
from trainer.learning.spans import span
from trainer.recipe.heads import AdaptersSection, HeadsSection
from trainer.target.loading import check_logits, logit_scale, logit_transform

if TYPE_CHECKING:  # peft is slow to import and needed only here
    from peft import PeftModel

TARGET_FOLDER = "target"
"""Subfolder to which `Medusa2Objective.save` writes the adapted target."""


class JointTraining(nn.Module):
    """The target with adapters, and heads on this target. The last loss term is for the target's own next token."""

    def __init__(self, model: "PeftModel", heads: MedusaTraining) -> None:
        super().__init__()
        self.model = model
        self.heads = heads
        config = self._target.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
        self._transform, self._scale = logit_transform(config), logit_scale(config)

    def forward(
        self,
        batch: Batch,
        joint: bool,
        labels: "JointLabels",
        remembers: bool = False,
        scale: Float[Tensor, " terms"] | None = None,
    ) -> TermSums:
        """Return the losses and the hits, each of shape (heads + 1,), and the total.

        Without ``joint`` the target is not trained. With ``remembers`` the target's loss is the KL divergence from the
        target without adapters; otherwise it is the cross entropy on the data.
        """
        teacher = self._as_it_was(batch) if remembers else None
        with nullcontext() if joint else span("target"), torch.set_grad_enabled(joint):
            hidden = lm_head_input(self._target, batch.model_inputs())
        losses, hits, total = run_in_lm_head(self._target, hidden, partial(self._losses, batch, labels, teacher, scale))
        if not joint:  # data parallelism requires a gradient for every trained parameter
            still = [p for p in self.model.parameters() if p.requires_grad and p.numel()]
            total = total + 0 * sum((p.sum() for p in still), torch.zeros((), device=losses.device))
        return TermSums(losses, hits, total)

    @torch.no_grad()
    def _as_it_was(self, batch: Batch) -> Float[Tensor, "batch positions hidden"]:
        """Return the hidden states of the target without adapters.

        Call this inside `forward`, because elsewhere FSDP2 leaves the weights sharded.
        """
        with span("target"), self.model.disable_adapter():
            return lm_head_input(self._target, batch.model_inputs())

    @property
    def _target(self) -> nn.Module:
        return base_of(self.model)

    def _losses(
        self,
        batch: Batch,
        labels: "JointLabels",
        teacher: Tensor | None,
        scale: Tensor | None,
        hidden: Tensor,
        lm_head: Tensor,
    ) -> TermSums:
        inputs = HeadInputs(batch, hidden, labels.heads, lm_head, self._transform)
        of_heads: TermSums = self.heads(inputs, None if scale is None else scale[:-1])
        at = labels.target
        was = None if teacher is None else HiddenTeacher(flat_rows(teacher, at), lm_head, self._transform)
        mix = LossMix({"cross_entropy": 1.0} if was is None else {"forward_kl": 1.0})
        loss = fused_loss(flat_rows(hidden, at) * self._scale, lm_head, batch.tokens.flatten()[at + 1], mix, was)
        hits = loss.correct.sum()
        if self.heads.hit_name == "acceptance":  # needs a teacher
            hits = torch.full_like(loss.loss, torch.nan) if was is None else loss.accepted.sum()
        own = TermSums.of(loss.loss[None], hits[None], None if scale is None else scale[-1:])
        losses, hits = (torch.cat(parts) for parts in zip(of_heads[:2], own[:2], strict=True))
        return TermSums(losses, hits, of_heads.total + own.total)


class JointLabels(NamedTuple):
    """The labels of the heads and, in the flattened batch, the indices of tokens whose next token is a label of the
    target.
    """

    heads: HeadLabels
    target: Int[Tensor, " labels"]


class Medusa2Objective:
    """Heads and adapters on one target, with the loss Σ weight_k * loss_k plus the loss of the target."""

    def __init__(
        self,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        heads: HeadsSection,
        adapters: AdaptersSection,
        steps: int,
        written: Sequence[int] | None = None,
    ) -> None:
        """``written``: see `medusa1.initial_heads`."""
        _refuse_unfit(target)
        self._tokenizer = tokenizer
        self._section, self._adapters, self._steps, self._dtype = heads, adapters, steps, target.dtype
        self.terms = (*(f"head_{k}" for k in range(heads.num_heads)), "target")
        lm_head = target.model.get_output_embeddings().weight
        training = MedusaTraining(initial_heads(lm_head, heads, written), heads)
        self.hit_name = training.hit_name
        if adapters.gradient_checkpointing:
            checkpoint_layers(target.model)
        self.module: JointTraining = JointTraining(with_adapters(target.model, adapters), training)

    @property
    def heads(self) -> MedusaHeads:
        return self.module.heads.heads

    def _is_joint(self, step: int) -> bool:
        return step >= self._adapters.heads_first_steps

    def weights(self, step: int) -> tuple[float, ...]:
        weights = head_weights(self._section, step, self._steps)
        if not self._is_joint(step):
            return (*weights, 0.0)
        return (*(self._adapters.heads_weight * weight for weight in weights), self._adapters.base_weight)

    def rates(self, step: int) -> Mapping[str, float]:
        rates = {"heads.": self._adapters.heads_rate, "": 1.0 if self._is_joint(step) else 0.0}
        if self.heads.config.linear:  # heads.init may name heads that were fitted
            maps = (f"heads.heads.heads.{k}.linear" for k in range(self._section.num_heads))
            rates |= dict.fromkeys(maps, self._adapters.heads_rate * OF_FITTED)
        return rates

    def counts(self, batch: Batch, step: int = 0) -> Float[Tensor, " terms"]:
        heads = head_counts(batch, self._section.num_heads)
        return torch.cat([heads, batch.labelled(1).sum()[None]])

    def prefetch(self, batch: Batch, step: int) -> JointLabels:
        return JointLabels(HeadLabels.of(batch, self._section.num_heads), batch.label_positions(1))

    def inputs(self, batch: Batch, step: int, prefetched: JointLabels | None = None) -> tuple[Any, ...]:
        joint = self._is_joint(step)
        self.module.eval()
        if joint:
            wake(self.module.model)
        remembers = joint and self._adapters.base_loss == "forward_kl"
        return batch, joint, prefetched or self.prefetch(batch, step), remembers

    def drafter(self) -> Drafter:
        self.module.eval()
        return named_drafter("heads", decoding_copy(self.heads, self._dtype))

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Fit the tree to the heads and the adapted target: see `medusa1.MedusaObjective.choose_tree`."""
        fit_tree(self.heads, target, texts(), self._section.tree_nodes)

    def save(self, folder: Path) -> None:
        """Write the heads; merge the adapters into the target, and write the target to ``target/``."""
        decoding_copy(self.heads, self._dtype).save_pretrained(folder)
        merged = merged_weights(self.module.model)
        write_model(base_of(self.module.model), self._tokenizer, folder / TARGET_FOLDER, merged)


def _refuse_unfit(target: CausalLM) -> None:
    model = target.model
    if is_spread(model):
        raise UserError(
            "adapters cannot train a target spread over several devices: launch one process per GPU to shard the "
            "training, or train heads alone (a recipe without adapters)"
        )
    if cap := getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None):
        raise UserError(
            f"adapters cannot train a target that caps its logits (softly, at {cap}): train heads alone (a recipe "
            "without adapters)"
        )
    check_logits(model)


# --- adapters, through peft -------------------------------------------------------------------------------------------


def with_adapters(model: PreTrainedModel, section: AdaptersSection) -> "PeftModel":
    """Add new adapters, which leave outputs unchanged at first, and freeze all other parameters."""
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules="all-linear",  # without the lm_head
        task_type="CAUSAL_LM",
    )
    kind = model.config.model_type
    unfit = (
        f"{kind} does not support adapters (fused experts, or code that reads layers directly): train heads alone (a "
        "recipe without adapters)"
    )
    try:
        adapted: PeftModel = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(unfit) from error
    if config.target_parameters or kind.startswith("llama4"):
        raise UserError(unfit)
    return adapted


def base_of(model: "PeftModel") -> PreTrainedModel:
    """Return the model that contains the adapters."""
    base: PreTrainedModel = model.get_base_model()  # type: ignore[assignment]  # peft's stub returns a module
    return base


def wake(model: "PeftModel") -> None:
    """Turn on the adapters' dropout and activation checkpointing, but not the model's dropout."""
    for name, module in model.named_modules():
        module.training |= "lora_dropout" in name or isinstance(module, GradientCheckpointingLayer)


def merged_weights(model: "PeftModel") -> dict[str, Tensor]:
    """Return the model's weights on the host with the adapters merged in, under the model's original names.

    Merges one weight at a time, to avoid a second model on the device. Tied weights stay tied.
    """
    base, merged, copies = base_of(model), {}, {}
    for name, tensor in base.state_dict().items():
        if ".lora_" in name:
            continue
        layer, _, leaf = name.rpartition(".base_layer.")
        if tensor.data_ptr() not in copies:
            whole = tensor.detach()
            if layer and leaf == "weight":
                (adapter,) = model.active_adapters
                delta = base.get_submodule(layer).get_delta_weight(adapter)  # type: ignore[operator]  # peft's layer
                whole = (whole + delta).to(whole.dtype)  # added in fp32, because the adapters are fp32
            copies[tensor.data_ptr()] = whole.cpu()
        merged[f"{layer}.{leaf}" if layer else name] = copies[tensor.data_ptr()]
    return merged
