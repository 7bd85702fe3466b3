"""The distillation objective: a draft learns the target's distribution at every trained token."""

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.forward import lm_head_input, run_in_lm_head
from trainer.data.batch import Batch, flat_rows
from trainer.drafts.start import InitialDraft, write_draft
from trainer.learning.fused import fused_loss
from trainer.learning.losses import HiddenTeacher, LossMix, Teacher
from trainer.learning.objective import EVERYWHERE_THE_SAME, GreedyTexts, TermSums
from trainer.recipe.common import LossSection
from trainer.recipe.draft import DraftSection
from trainer.target.loading import OnlineTarget, check_logits, logit_scale

AnyDraft = CausalLM | DSparkDraft | Eagle3Draft
"""A draft to decode with."""


def drafter_of(draft: AnyDraft, tokens: int) -> Drafter:
    """Return a drafter that drafts chains of ``tokens`` tokens. The chain of a DSpark draft is always as long as its
    block.

    On CUDA an ordinary draft decodes with CUDA graphs if possible.
    """
    if isinstance(draft, DSparkDraft):
        return named_drafter("dspark", draft, tokens=draft.config.block_size)
    if isinstance(draft, Eagle3Draft):
        return named_drafter("eagle3", draft, tokens=tokens)
    return named_drafter("draft", draft.at_its_fastest(), tokens=tokens)


class TeacherSource(Protocol):
    """Source of the target's distribution: the target itself, or its logits on disk."""

    def read(self, batch: Batch) -> Mapping[str, Tensor] | None:
        """Return a batch's rows from the disk, on the host; None if the target must run."""
        ...

    def for_batch(
        self, batch: Batch, positions: Int[Tensor, " labels"] | None = None, stored: Mapping[str, Tensor] | None = None
    ) -> Teacher:
        """Return, row by row, the target's distribution at the positions whose next token is trained.

        ``positions`` are these positions in the flattened batch; ``stored`` is the result of `read` on the batch's
        device. If ``positions`` or ``stored`` is None, this function computes what is missing.
        """
        ...


class DraftPrefetch(NamedTuple):
    """The parts of a draft's training step that are prepared without running the target."""

    positions: Int[Tensor, " labels"]
    """Positions before the labels, in the flattened batch."""
    stored: Mapping[str, Tensor] | None = None
    """The teacher's rows from the disk, if they are stored."""


class OnlineTeacher:
    """The target, run on every batch without gradients."""

    def __init__(self, target: CausalLM) -> None:
        self._target = OnlineTarget(target)

    def read(self, batch: Batch) -> None:
        """Return None, because nothing is stored."""

    def for_batch(
        self, batch: Batch, positions: Int[Tensor, " labels"] | None = None, stored: Mapping[str, Tensor] | None = None
    ) -> HiddenTeacher:
        """Return the target's hidden states at the labelled positions."""
        positions = batch.label_positions(1) if positions is None else positions
        return HiddenTeacher(
            flat_rows(self._target.hidden(batch), positions), self._target.lm_head, self._target.transform
        )


class DraftInputs(NamedTuple):
    """Inputs of a draft's step: the inputs of the forward pass, and the labels with their positions."""

    model_inputs: Mapping[str, Any]
    positions: Int[Tensor, " labels"]
    """Positions before the labels, in the flattened batch."""
    labels: Int[Tensor, " labels"]
    teacher: Teacher | None
    """The target's distribution at the labels; None if the only loss is cross entropy."""


class DistillTraining(nn.Module):
    """The module that is trained: the draft, which computes its loss in the forward pass."""

    def __init__(self, initial: InitialDraft, loss: LossSection, vocab_size: int) -> None:
        """``vocab_size`` is the size of the target's vocabulary. The draft's tokens beyond this size are neither
        trained nor decoded.
        """
        super().__init__()
        check_logits(initial.model, "draft")
        self.draft: PreTrainedModel = initial.model.train()
        self._mix, self._output_tokens, self._vocab_size = LossMix.of(loss), initial.output_tokens, vocab_size
        config = initial.model.config.get_text_config(decoder=True)
        self._scale, self._soft_cap = logit_scale(config), getattr(config, "final_logit_softcapping", None)

    def forward(self, inputs: DraftInputs, scale: Float[Tensor, " terms"] | None = None) -> TermSums:
        """Return the losses and the hits, each of shape (terms,), and the total.

        Hits of soft terms are Σ min(p, q), the per-position acceptance; if cross entropy is the only term, hits are
        correct argmaxes.
        """
        hidden = lm_head_input(self.draft, inputs.model_inputs)
        return run_in_lm_head(self.draft, hidden, partial(self._on_logits, inputs, scale))

    def _on_logits(self, inputs: DraftInputs, scale: Tensor | None, hidden: Tensor, lm_head: Tensor) -> TermSums:
        known = slice(None) if self._output_tokens is not None else slice(self._vocab_size)
        loss = fused_loss(
            flat_rows(hidden, inputs.positions) * self._scale,
            lm_head[known],
            inputs.labels,
            self._mix,
            inputs.teacher,
            tokens=self._output_tokens,
            soft_cap=self._soft_cap,
        )
        hits = loss.accepted.sum() if self._mix.soft else loss.correct.sum()
        return TermSums.of(loss.loss[None], hits[None], scale)


class DistillObjective:
    """A draft, its teacher, and the loss between them."""

    terms: tuple[str, ...] = ("logits",)

    def __init__(
        self,
        target: CausalLM,
        teacher: TeacherSource,
        tokenizer: PreTrainedTokenizerBase,
        initial: InitialDraft,
        section: DraftSection,
    ) -> None:
        """Set up the training; the finished draft has the target's dtype."""
        self._teacher, self._tokenizer, self._section = teacher, tokenizer, section
        self._dtype, self._soft, self.output_tokens = target.dtype, section.loss.soft, initial.output_tokens
        self.hit_name = "acceptance" if self._soft else "top1"
        self.module: DistillTraining = DistillTraining(initial, section.loss, target.vocab_size)

    def weights(self, step: int) -> tuple[float, ...]:
        return (1.0,)

    def rates(self, step: int) -> Mapping[str, float]:
        return EVERYWHERE_THE_SAME

    def counts(self, batch: Batch, step: int = 0) -> Float[Tensor, " terms"]:
        return batch.labelled(1).sum()[None]

    def prefetch(self, batch: Batch, step: int) -> DraftPrefetch:
        return DraftPrefetch(batch.label_positions(1), self._teacher.read(batch) if self._soft else None)

    def inputs(self, batch: Batch, step: int, prefetched: DraftPrefetch | None = None) -> tuple[Any, ...]:
        self.module.train()  # decoding leaves the module in evaluation mode
        prefetched = prefetched or self.prefetch(batch, step)
        teacher = self._teacher.for_batch(batch, prefetched.positions, prefetched.stored) if self._soft else None
        labels = batch.tokens.flatten()[prefetched.positions + 1]
        return (DraftInputs(batch.model_inputs(), prefetched.positions, labels, teacher),)

    def decoding_copy(self) -> CausalLM:
        """Return a copy of the draft with its current weights, in the target's dtype."""
        draft: Any = copy.deepcopy(self.module.draft)
        draft.to(self._dtype)
        draft.config.dtype = self._dtype
        return CausalLM(draft.requires_grad_(False).eval(), self.output_tokens)

    def drafter(self) -> Drafter:
        return drafter_of(self.decoding_copy(), self._section.num_draft_tokens)

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Do nothing: an ordinary draft stores no tree."""

    def save(self, folder: Path) -> None:
        write_draft(self.decoding_copy(), self._tokenizer, folder)
