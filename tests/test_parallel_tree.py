"""The tree of a parallel draft: fitted to the target's own texts, stored with the draft, and drafted by default."""

from pathlib import Path

import pytest
import torch
from parallel_training import TEXTS, objective_for
from tiny_models import tiny_model
from tiny_parallel import logits_after, tiny_parallel_draft

from decoding.drafters.parallel import ParallelDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.parallel import ParallelConfig, ParallelDraft, ParallelParts, read_config
from decoding.rules.best_tree import best_tree
from trainer.drafts.parallel import rank_accuracies

TEXT, PROMPT = (3, 1, 4, 1, 5, 9, 2, 6), 3
"""The roots are the tokens 3 to 6: of four labels one is four tokens behind its root, of five labels none."""


@pytest.mark.parametrize(("rank", "reads_target"), [(0, False), (3, False), (0, True), (3, True)])
def test_a_ranks_accuracy_is_its_share_of_the_labels_behind_every_root(
    tiny_llama: CausalLM, rank: int, reads_target: bool
) -> None:
    draft = tiny_parallel_draft(tiny_llama, 4, rank, reads_target)
    found = rank_accuracies(tiny_llama, draft, [(TEXT, PROMPT)])
    for depth in range(4):
        roots = range(PROMPT, len(TEXT) - 1 - depth)
        ranked = [
            logits_after(draft, tiny_llama, TEXT[: root + 1], TEXT[root + 1 : root + 1 + depth]).argsort(
                descending=True
            )
            for root in roots
        ]
        places = [order.tolist().index(TEXT[root + 1 + depth]) for root, order in zip(roots, ranked, strict=True)]
        assert found[depth] == pytest.approx([places.count(place) / len(places) for place in range(10)])


def test_the_fitted_tree_is_saved_and_drafted_unless_a_chain_is_asked_for(tmp_path: Path) -> None:
    model = tiny_model("llama")
    objective = objective_for(model, reads_target=True, tree_nodes=5)
    assert ParallelDrafter(objective.writing_draft()).chains_only and objective.drafter().chains_only
    texts = [(example.tokens.tolist(), example.prompt_length) for example in TEXTS]
    objective.choose_tree(CausalLM(model), lambda: texts)
    wanted = best_tree(rank_accuracies(CausalLM(model), objective.writing_draft(), texts), 5)
    objective.save(tmp_path)
    assert read_config(tmp_path).tree == wanted and len(wanted) == 5
    draft = ParallelDraft(objective.writing_draft().model, ParallelParts.from_pretrained(tmp_path, torch.float32))
    assert ParallelDrafter(draft).max_nodes == objective.drafter().max_nodes == 6
    assert ParallelDrafter(draft, tokens=2).chains_only


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (((0,), (0, 0), (0, 0, 0)), "the tree is 3 deep but a forward drafts 2 tokens: shorten its paths"),
        (((1, 0),), r"tree path \[1, 0\] has no parent"),
        (((8,),), "8"),
    ],
)
def test_a_tree_that_no_forward_drafts_is_refused(tree: tuple[tuple[int, ...], ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ParallelConfig(2, 8, 9, 8, 16, tree=tree)
