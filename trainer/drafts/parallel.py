"""The objective of a parallel draft: the target's distribution at the text's own positions, and at masks behind them.

The mask of position t + j is trained like that position itself: by the target's distribution there, which read the
text's true tokens. The draft knows them only up to t, and by the bias the last one.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.model.architecture import windows
from decoding.model.causal_lm import CausalLM
from decoding.model.parallel import ParallelDraft
from decoding.rules.best_tree import best_tree
from trainer.data.batch import Batch
from trainer.drafts.blocks import (
    Blocks,
    mask_labels,
    model_inputs,
    rows_of_masks,
    sample_blocks,
    text_labels,
    written_from,
)
from trainer.drafts.distill import (
    DistillObjective,
    DraftAhead,
    DraftInputs,
    OnlineTeacher,
    TaughtLabels,
    TeacherSource,
)
from trainer.drafts.mask_token import even_out_mask_row
from trainer.drafts.rank_accuracies import rank_accuracies
from trainer.drafts.start import InitialDraft, write_draft
from trainer.learning.objective import GreedyTexts
from trainer.learning.teachers import Teacher
from trainer.recipe.draft import DraftSection, ParallelSection


class ParallelObjective(DistillObjective):
    """A parallel draft, its teacher, and the losses between them."""

    def __init__(
        self,
        target: CausalLM,
        teacher: TeacherSource,
        tokenizer: PreTrainedTokenizerBase,
        initial: InitialDraft,
        section: DraftSection,
        seed: int,
    ) -> None:
        """``seed``: the run's, which draws the anchors."""
        super().__init__(target, teacher, tokenizer, initial, section)
        assert section.parallel is not None and initial.parts is not None, "the recipe asks for a parallel draft"
        self._parallel: ParallelSection = section.parallel
        self._parts, self._seed, self._vocab_size = initial.parts, seed, target.vocab_size
        self._windows: Mapping[str, int | None] = windows(initial.model.config.get_text_config(decoder=True))

    @staticmethod
    def _weighted(section: DraftSection) -> dict[str, float]:
        assert section.parallel is not None
        hidden = {"hidden": section.loss.hidden} if section.loss.hidden else {}
        return {"logits": 1.0, "masked": section.parallel.weight, **hidden}

    def _blocks(self, batch: Batch, step: int) -> Blocks:
        return sample_blocks(batch, self._parallel.anchors, self._parallel.tokens - 1, self._seed, step)

    def counts(self, batch: Batch, step: int = 0) -> Float[Tensor, " terms"]:
        text, masks = batch.labelled(1).sum(), self._blocks(batch, step).trained.sum()
        return torch.stack([masks if term == "masked" else text for term in self.terms])

    def ahead(self, batch: Batch, step: int) -> DraftAhead:
        return super().ahead(batch, step)._replace(blocks=self._blocks(batch, step))

    def inputs(self, batch: Batch, step: int, ahead: DraftAhead | None = None) -> tuple[Any, ...]:
        self.module.train()  # an evaluation or a generation leaves it as it decodes
        ahead = ahead or self.ahead(batch, step)
        blocks, (teacher, states) = ahead.blocks, self._taught(batch, ahead)
        assert blocks is not None, "`ahead` draws the blocks"
        behind = None if teacher is None else teacher.rows(rows_of_masks(batch, blocks))
        of_text = TaughtLabels(text_labels(batch, ahead.places, blocks), teacher)
        labels = of_text, TaughtLabels(mask_labels(batch, blocks), behind)
        dtype = self.module.draft.dtype
        given = model_inputs(batch, blocks, self._parts.config.mask_token, self._windows, dtype)
        return (DraftInputs(given, labels, states),)

    def _taught(
        self, batch: Batch, ahead: DraftAhead
    ) -> tuple[Teacher | None, Float[Tensor, "batch positions hidden"] | None]:
        """Return the teacher of the labelled positions, and the states that the draft reads, by one forward."""
        if not self._parallel.reads_target:
            taught = self._teacher.for_batch(batch, ahead.places, ahead.stored) if self._needs_teacher else None
            return taught, None
        assert isinstance(self._teacher, OnlineTeacher), "the recipe refuses a draft that reads a cache's target"
        states = self._teacher.states(batch)
        teacher = self._teacher.of_states(ahead.places, states) if self._needs_teacher else None
        return teacher, written_from(batch, states)

    def writing_draft(self) -> ParallelDraft:
        """Return a copy of the draft with its parts, by their present weights, in the target's dtype."""
        draft, parts = self.draft_for_decoding(), copy.deepcopy(self._parts).to(self._dtype)
        even_out_mask_row(draft.model, parts.config.mask_token, self._vocab_size)
        return ParallelDraft(draft, parts.requires_grad_(False).eval())

    def drafter(self) -> Drafter:
        """Return a drafter of the tree, once there is one; until then of a chain."""
        return named_drafter("parallel", self.writing_draft()) if self._parts.config.tree else super().drafter()

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Fit the tree to the draft: the paths that are right most often on the target's own greedy texts."""
        if self._parallel.tree_nodes:
            accuracies = rank_accuracies(target, self.writing_draft(), texts())
            tree = best_tree(accuracies, self._parallel.tree_nodes)
            self._parts.config = replace(self._parts.config, tree=tree)

    def save(self, folder: Path) -> None:
        draft = self.writing_draft()
        write_draft(draft.model, self._tokenizer, folder)
        draft.parts.save_pretrained(folder)
