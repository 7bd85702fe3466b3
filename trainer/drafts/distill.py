"""The distillation objective: a small draft learns the target's distribution at every trained token."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import lm_head_input, run_in_lm_head
from trainer.data.batch import Batch
from trainer.drafts.start import InitialDraft, write_draft
from trainer.learning.fused import fused_loss
from trainer.learning.lora import base_of, refuse_embeddings, with_adapters
from trainer.learning.losses import LossMix
from trainer.learning.objective import EVERYWHERE_THE_SAME, TermSums
from trainer.learning.teachers import HiddenTeacher, Teacher
from trainer.recipe.draft import DraftSection
from trainer.recipe.loss import LossSection
from trainer.target.hidden import OnlineTarget
from trainer.target.logits import check_logits, logit_scale

if TYPE_CHECKING:  # slow to import, and not of use to every draft
    from peft import PeftModel


class TeacherSource(Protocol):
    """Source of the target's distribution: the target itself, or its logits on disk."""

    def for_batch(self, batch: Batch) -> Teacher:
        """Return the target's distribution at the positions whose next token is trained, row by row."""
        ...


class OnlineTeacher:
    """The target, run without gradients on every batch."""

    def __init__(self, target: CausalLM) -> None:
        self._states = OnlineTarget(target)

    def for_batch(self, batch: Batch) -> HiddenTeacher:
        """Return the target's hidden states there, which losses turn into logits a chunk at a time."""
        states = self._states
        return HiddenTeacher(states.hidden(batch)[batch.labelled(1)], states.lm_head, states.transform)


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of a draft's step: a batch, and the target's distribution at its labelled positions, row by row."""

    batch: Batch
    teacher: Teacher | None
    """None where only the data's tokens are trained on."""


class DraftLogits:
    """The way from a draft's lm_head products to its logits, as the losses need it."""

    def __init__(self, model: PreTrainedModel, output_tokens: Int[Tensor, " outputs"] | None, vocab_size: int) -> None:
        """``vocab_size`` is the target's: tokens that only the draft knows are neither trained nor decoded."""
        check_logits(model, "draft")
        config = model.config.get_text_config(decoder=True)
        self._scale, self.soft_cap = logit_scale(config), getattr(config, "final_logit_softcapping", None)
        self.output_tokens, self._vocab_size = output_tokens, vocab_size

    def scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self._scale == 1.0 else hidden * self._scale

    def known(self, lm_head: Float[Tensor, "outputs hidden"]) -> Float[Tensor, "known hidden"]:
        return lm_head if self.output_tokens is not None else lm_head[: self._vocab_size]

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments for the losses of `trainer.learning.fused`."""
        return {"tokens": self.output_tokens, "soft_cap": self.soft_cap}


class DistillTraining(nn.Module):
    """The draft with its losses: on its logits, and where it is asked for on its last hidden state."""

    def __init__(
        self, draft: "PreTrainedModel | PeftModel", logits: DraftLogits, loss: LossSection, hidden_size: int
    ) -> None:
        """``hidden_size`` is the target's."""
        super().__init__()
        self.draft = draft
        self._logits, self._loss = logits, loss
        self._mix = LossMix.of(loss) if loss.mix else None
        width = CausalLM(self.base).hidden_size
        self.projection: nn.Linear | None = None
        if loss.hidden and width != hidden_size:  # trained beside the draft, and no part of it
            self.projection = nn.Linear(width, hidden_size, bias=False)

    @property
    def base(self) -> PreTrainedModel:
        """The draft itself: peft put adapters into it."""
        return self.draft if isinstance(self.draft, PreTrainedModel) else base_of(self.draft)

    def forward(self, inputs: DraftInputs) -> TermSums:
        """Return losses and hits, (terms,) each.

        Hits of soft terms are Σ min(p, q), the acceptance of token rejection; of cross entropy alone, correct argmaxes.
        """
        hidden = lm_head_input(self.base, inputs.batch.model_inputs())
        return run_in_lm_head(self.base, hidden, partial(self._losses, inputs))

    def _losses(self, inputs: DraftInputs, hidden: Tensor, lm_head: Tensor) -> TermSums:
        labelled, teacher = inputs.batch.labelled(1), inputs.teacher
        x, labels, weight = hidden[labelled], inputs.batch.shifted(1)[labelled], self._logits.known(lm_head)
        losses, hits = [], []
        if self._mix is not None:
            imitated = teacher if self._mix.soft else None
            found = fused_loss(self._logits.scaled(x), weight, labels, self._mix, imitated, **self._logits.keywords())
            losses.append(found.loss)
            hits.append(found.accepted if self._mix.soft else found.correct.to(found.loss.dtype))
        if self._loss.hidden:
            assert isinstance(teacher, HiddenTeacher), "the recipe asks for hidden states of the target itself"
            losses.append(self._hidden_loss(x, teacher.hidden))
            hits.append(torch.full_like(losses[-1], torch.nan))  # there is nothing to hit
        return TermSums(torch.stack(losses), torch.stack(hits).detach())

    def _hidden_loss(self, x: Float[Tensor, "labels width"], target: Float[Tensor, "labels hidden"]) -> Tensor:
        projected = x if self.projection is None else self.projection(x)
        wanted = target.float()
        error = (projected.float() - wanted).square().mean(-1)
        return (error / wanted.square().mean(-1).clamp(min=torch.finfo(torch.float32).tiny)).sum()


class DistillObjective:
    """A draft, its teacher, and the losses between them."""

    def __init__(
        self,
        target: CausalLM,
        teacher: TeacherSource,
        tokenizer: PreTrainedTokenizerBase,
        initial: InitialDraft,
        section: DraftSection,
    ) -> None:
        """The finished draft has the target's dtype."""
        self._teacher, self._tokenizer, self._section = teacher, tokenizer, section
        self._dtype, loss = target.dtype, section.loss
        self._needs_teacher = loss.soft or loss.hidden > 0
        self.hit_name = "acceptance" if loss.mix.keys() != {"cross_entropy"} else "top1"
        self.terms = tuple(name for name, wanted in (("logits", loss.mix), ("hidden", loss.hidden)) if wanted)
        self.output_tokens = initial.output_tokens
        logits = DraftLogits(initial.model, initial.output_tokens, target.vocab_size)
        draft: PreTrainedModel | PeftModel = initial.model.train()
        if section.lora is not None:
            refuse_embeddings(initial.model, section.lora, "draft.lora")
            draft = with_adapters(initial.model, section.lora, "draft.lora")
        self.module: DistillTraining = DistillTraining(draft, logits, loss, target.hidden_size)

    def weights(self, step: int) -> tuple[float, ...]:
        return tuple(self._section.loss.hidden if term == "hidden" else 1.0 for term in self.terms)

    def rates(self, step: int) -> Mapping[str, float]:
        return EVERYWHERE_THE_SAME

    def counts(self, batch: Batch) -> Float[Tensor, " terms"]:
        return batch.labelled(1).sum().expand(len(self.terms)).clone()

    def inputs(self, batch: Batch, step: int) -> tuple[Any, ...]:
        self.module.train()  # an evaluation or a generation leaves it as it decodes
        teacher = self._teacher.for_batch(batch) if self._needs_teacher else None
        return (DraftInputs(batch, teacher),)

    def observe(self, hits: Float[Tensor, " terms"], counts: Float[Tensor, " terms"]) -> None:
        """Nothing here depends on the hits."""

    def draft_for_decoding(self) -> CausalLM:
        """Return a copy of the draft by its present weights, adapters merged, in the target's dtype."""
        draft: Any = copy.deepcopy(self.module.draft)
        if self._section.lora is not None:
            draft = cast("PeftModel", draft).merge_and_unload()
        draft.to(self._dtype)
        draft.config.dtype = self._dtype
        return CausalLM(draft.requires_grad_(False).eval(), self.output_tokens)

    def drafter(self) -> Drafter:
        return named_drafter("draft", self.draft_for_decoding(), tokens=self._section.num_draft_tokens)

    def save(self, folder: Path) -> None:
        write_draft(self.draft_for_decoding(), self._tokenizer, folder)
