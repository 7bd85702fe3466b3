"""The distillation objective: a small draft learns the target's distribution at every trained token."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import added_to_embeddings, lm_head_input, run_in_lm_head
from decoding.model.parallel import ParallelDraft
from trainer.data.batch import Batch, flat_rows
from trainer.drafts.blocks import Blocks, Labels, text_labels
from trainer.drafts.start import InitialDraft, write_draft
from trainer.learning.fused import Bias, fused_loss
from trainer.learning.losses import HiddenTeacher, LossMix, Teacher
from trainer.learning.objective import EVERYWHERE_THE_SAME, GreedyTexts, TermSums
from trainer.recipe.common import LossSection
from trainer.recipe.draft import DraftSection
from trainer.target.hidden import OnlineTarget, check_logits, logit_scale

AnyDraft = CausalLM | ParallelDraft
"""A draft to decode with: an ordinary one, or a parallel one with its parts."""


def drafter_of(draft: AnyDraft, tokens: int) -> Drafter:
    """Make the drafter of a draft's chain of ``tokens``; a parallel draft has at most the tokens of one forward.

    On a CUDA device its steps are CUDA graphs, if they can be.
    """
    if isinstance(draft, ParallelDraft):
        draft = ParallelDraft(draft.model.at_its_fastest(), draft.parts)
        return named_drafter("parallel", draft, tokens=min(tokens, draft.tokens))
    return named_drafter("draft", draft.at_its_fastest(), tokens=tokens)


class TeacherSource(Protocol):
    """Source of the target's distribution: the target itself, or its logits on disk."""

    def read(self, batch: Batch) -> Mapping[str, Tensor] | None:
        """Return what is on a disk for a batch, on the host; None: the target is to be run."""
        ...

    def for_batch(
        self,
        batch: Batch,
        places: Int[Tensor, " labels"] | None = None,
        stored: Mapping[str, Tensor] | None = None,
    ) -> Teacher:
        """Return the target's distribution at the positions whose next token is trained, row by row.

        ``places`` are those positions in the flattened batch, ``stored`` is what `read` gave, on the batch's device;
        without them they are found, or read, here.
        """
        ...


class DraftAhead(NamedTuple):
    """Parts of a draft's step that are ready before the target runs."""

    places: Int[Tensor, " labels"]
    """Places of the labels one token ahead in the flattened batch."""
    stored: Mapping[str, Tensor] | None = None
    """The teacher's rows, read from a disk."""
    blocks: Blocks | None = None
    """The masks of a parallel draft."""


class OnlineTeacher:
    """The target, run without gradients on every batch."""

    def __init__(self, target: CausalLM) -> None:
        self._target = OnlineTarget(target)

    def states(self, batch: Batch) -> Float[Tensor, "batch positions hidden"]:
        """Return the target's hidden states, as its lm_head reads them."""
        return self._target.hidden(batch)

    def of_states(
        self, places: Int[Tensor, " labels"], states: Float[Tensor, "batch positions hidden"]
    ) -> HiddenTeacher:
        """Return the teacher whose states are known; losses turn them into logits a chunk at a time."""
        return HiddenTeacher(flat_rows(states, places), self._target.lm_head, self._target.transform)

    def read(self, batch: Batch) -> None:
        """Return None: nothing is on a disk."""

    def for_batch(
        self,
        batch: Batch,
        places: Int[Tensor, " labels"] | None = None,
        stored: Mapping[str, Tensor] | None = None,
    ) -> HiddenTeacher:
        """Return the target's hidden states at the labelled positions."""
        return self.of_states(batch.label_places(1) if places is None else places, self.states(batch))


class TaughtLabels(NamedTuple):
    """The labels of one term of the loss, and the target's distribution at them, row by row."""

    at: Labels
    teacher: Teacher | None
    """None where only the data's tokens are trained on."""


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of a draft's step: those of its forward, and the labels at which its logits are compared."""

    model_inputs: Mapping[str, Any]
    labels: tuple[TaughtLabels, ...]
    """One for each term on the logits; the first are those of the text's own positions."""
    written_from: Float[Tensor, "batch positions hidden"] | None = None
    """The target's states that the text's tokens were written from, for a draft that reads them."""


class DistillTraining(nn.Module):
    """The draft with its losses on its logits."""

    def __init__(self, initial: InitialDraft, loss: LossSection, vocab_size: int) -> None:
        """``vocab_size`` is the target's: tokens that only the draft knows are neither trained nor decoded."""
        super().__init__()
        check_logits(initial.model, "draft")
        self.draft: PreTrainedModel = initial.model.train()
        self.parts = initial.parts
        self._mix, self._output_tokens, self._vocab_size = LossMix.of(loss), initial.output_tokens, vocab_size
        config = initial.model.config.get_text_config(decoder=True)
        self._scale, self._soft_cap = logit_scale(config), getattr(config, "final_logit_softcapping", None)

    def forward(self, inputs: DraftInputs) -> TermSums:
        """Return losses and hits, (terms,) each.

        Hits of soft terms are Σ min(p, q), the acceptance of token rejection; of cross entropy alone, correct argmaxes.
        """
        with added_to_embeddings(self.draft, self._read(inputs)):
            hidden = lm_head_input(self.draft, inputs.model_inputs)
        return run_in_lm_head(self.draft, hidden, partial(self._on_logits, inputs))

    def _read(self, inputs: DraftInputs) -> Tensor | None:
        """Return the addition to the embeddings: what the draft reads of the target; nothing for masks."""
        if self.parts is None or inputs.written_from is None:
            return None
        read, positions = self.parts.read(inputs.written_from), inputs.model_inputs["input_ids"].shape[1]
        return nn.functional.pad(read, (0, 0, 0, positions - read.shape[1]))

    def _on_logits(self, inputs: DraftInputs, hidden: Tensor, lm_head: Tensor) -> TermSums:
        """Return the terms, computed inside the bias's output layer if the draft has a bias."""
        if self.parts is None or self.parts.markov is None:
            return self._compared(inputs, hidden, lm_head, None, None)
        markov = self.parts.markov
        embedded = markov.embedding(torch.cat([labels.at.before for labels in inputs.labels]))
        sums: TermSums = markov.output(embedded, partial(self._compared, inputs, hidden, lm_head))
        return sums

    def _compared(
        self, inputs: DraftInputs, hidden: Tensor, lm_head: Tensor, embedded: Tensor | None, output: Tensor | None
    ) -> TermSums:
        """Return one loss for each of the inputs' labels; ``embedded`` and ``output`` are the two sides of the bias."""
        known = slice(None) if self._output_tokens is not None else slice(self._vocab_size)
        losses, hits, begin = [], [], 0
        for labels in inputs.labels:
            end, bias = begin + len(labels.at.labels), None
            if embedded is not None and output is not None:
                bias = Bias(embedded[begin:end], output[known])
            begin = end
            found = fused_loss(
                flat_rows(hidden, labels.at.places) * self._scale,
                lm_head[known],
                labels.at.labels,
                self._mix,
                labels.teacher,
                bias=bias,
                tokens=self._output_tokens,
                soft_cap=self._soft_cap,
            )
            losses.append(found.loss)
            hits.append(found.accepted if self._mix.soft else found.correct.to(found.loss.dtype))
        return TermSums(torch.stack(losses), torch.stack(hits).detach())


class DistillObjective:
    """A draft, its teacher, and the losses between them."""

    terms: tuple[str, ...] = ("logits",)

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
        self._dtype, self._soft, self.output_tokens = target.dtype, section.loss.soft, initial.output_tokens
        self.hit_name = "acceptance" if self._soft else "top1"
        self.module: DistillTraining = DistillTraining(initial, section.loss, target.vocab_size)

    def weights(self, step: int) -> tuple[float, ...]:
        return (1.0,)

    def rates(self, step: int) -> Mapping[str, float]:
        return EVERYWHERE_THE_SAME

    def counts(self, batch: Batch, step: int = 0) -> Float[Tensor, " terms"]:
        return batch.labelled(1).sum()[None]

    def ahead(self, batch: Batch, step: int) -> DraftAhead:
        return DraftAhead(batch.label_places(1), self._teacher.read(batch) if self._soft else None)

    def inputs(self, batch: Batch, step: int, ahead: DraftAhead | None = None) -> tuple[Any, ...]:
        self.module.train()  # an evaluation or a generation leaves it as it decodes
        ahead = ahead or self.ahead(batch, step)
        teacher = self._teacher.for_batch(batch, ahead.places, ahead.stored) if self._soft else None
        return (DraftInputs(batch.model_inputs(), (TaughtLabels(text_labels(batch, ahead.places), teacher),)),)

    def draft_for_decoding(self) -> CausalLM:
        """Return a copy of the draft by its present weights, in the target's dtype."""
        draft: Any = copy.deepcopy(self.module.draft)
        draft.to(self._dtype)
        draft.config.dtype = self._dtype
        return CausalLM(draft.requires_grad_(False).eval(), self.output_tokens)

    def writing_draft(self) -> AnyDraft:
        """Return such a copy with all that it drafts by."""
        return self.draft_for_decoding()

    def drafter(self) -> Drafter:
        return drafter_of(self.writing_draft(), self._section.num_draft_tokens)

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Do nothing: an ordinary draft has no tree of its own."""

    def save(self, folder: Path) -> None:
        write_draft(self.draft_for_decoding(), self._tokenizer, folder)
