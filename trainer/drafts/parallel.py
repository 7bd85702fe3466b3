"""The objective of a parallel draft: the target's distribution at the text's own positions, and at masks behind them.

The mask of position t + j is trained like that position itself: by the target's distribution there, which read the
text's true tokens. The draft knows them only up to t, and by the bias the last one.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.base import TextStart
from decoding.drafters.draft_state import DraftState
from decoding.drafters.registry import named_drafter
from decoding.model.architecture import windows
from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import lm_head_input
from decoding.model.parallel import ParallelDraft
from decoding.rules.best_tree import FITTED_RANKS, best_tree
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import SamplingConfig
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
from trainer.drafts.start import InitialDraft, write_draft
from trainer.learning.losses import Teacher
from trainer.learning.objective import GreedyTexts
from trainer.recipe.draft import DraftSection, ParallelSection


class ParallelObjective(DistillObjective):
    """A parallel draft, its teacher, and the losses between them."""

    terms = ("logits", "masked")

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

    def weights(self, step: int) -> tuple[float, ...]:
        return 1.0, self._parallel.weight

    def _blocks(self, batch: Batch, step: int) -> Blocks:
        return sample_blocks(batch, self._parallel.anchors, self._parallel.tokens - 1, self._seed, step)

    def counts(self, batch: Batch, step: int = 0) -> Float[Tensor, " terms"]:
        return torch.stack([batch.labelled(1).sum(), self._blocks(batch, step).trained.sum()])

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
            taught = self._teacher.for_batch(batch, ahead.places, ahead.stored) if self._soft else None
            return taught, None
        assert isinstance(self._teacher, OnlineTeacher), "the recipe refuses a draft that reads a cache's target"
        states = self._teacher.states(batch)
        teacher = self._teacher.of_states(ahead.places, states) if self._soft else None
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


@torch.inference_mode()
def rank_accuracies(
    target: CausalLM, draft: ParallelDraft, texts: Sequence[tuple[Sequence[int], int]]
) -> list[list[float]]:
    """Return at ``[d][r]`` the share of labels that are the draft's rank-r token d + 1 tokens behind a root (from 0).

    Every new token of ``texts``, pairs of tokens and prompt length, is a root once, as in decoding. The bias reads the
    text's own token before each label.
    """
    config = draft.parts.config
    ranks = min(FITTED_RANKS, config.outputs)
    counts, totals = torch.zeros(config.tokens, ranks), torch.zeros(config.tokens, 1)
    for tokens, prompt_length in texts:
        for begin, logits in enumerate(_over_text(target, draft, tokens, prompt_length), start=prompt_length + 1):
            labels = torch.tensor(tokens[begin : begin + config.tokens])
            hits = logits[: len(labels)].topk(ranks).indices.cpu() == labels[:, None]
            counts[: len(labels)] += hits
            totals[: len(labels)] += 1
    shares: list[list[float]] = (counts / totals.clamp(min=1)).tolist()
    return shares


def _over_text(
    target: CausalLM, draft: ParallelDraft, tokens: Sequence[int], prompt_length: int
) -> list[Float[Tensor, "depths vocab"]]:
    """Return the draft's logits behind every new token but the last, each as a root; one row for each label."""
    config, markov = draft.parts.config, draft.parts.markov
    state = DraftState(draft.model, target, SamplingConfig(), 1, len(tokens), config.tokens)
    state.admit(0, TextStart(prompt_length, GeneratorSource.from_seed(0, "draft")))
    added = _added(target, draft, tokens)
    found, read = [], 0
    for root in range(prompt_length, len(tokens) - 1):
        new = None if added is None else [added[read : root + 1]]
        read = root + 1
        logits = state.look_ahead([tokens[:read]], [config.mask_token] * (config.tokens - 1), new)[0]
        logits = logits[: len(tokens) - read, : config.outputs]
        if markov is not None:
            before = torch.tensor(tokens[root : root + len(logits)], device=logits.device)
            logits = markov.added_to(logits, before.clamp(max=config.vocab_size - 1))
        found.append(state.over_target_vocabulary(logits))
    return found


def _added(target: CausalLM, draft: ParallelDraft, tokens: Sequence[int]) -> Float[Tensor, "tokens width"] | None:
    """Return what the draft adds to the embeddings: the first token was written from no state, the others from one."""
    if not draft.reads_target:
        return None
    states = lm_head_input(target.model, {"input_ids": torch.tensor([list(tokens)], device=target.device)})[0]
    return draft.parts.read(torch.cat((torch.zeros_like(states[:1]), states[:-1])))
