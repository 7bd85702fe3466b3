"""Lookahead decoding: the window and the pool equal a naive Jacobi iteration; what it gains, and how often it waits."""

import random
from collections.abc import Sequence

import pytest
import torch
from drafter_checks import accept_some, opened, paths, request
from tiny_models import counting_model, full_forward
from torch import Tensor

from decoding.drafters import LookaheadDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.rules.tree import Proposal, ProposalKind


def target_logits(target: CausalLM, text: Sequence[int], proposal: Proposal) -> Tensor:
    """Return the target's logits at every node; each path runs separately as a plain text."""
    tree = proposal.tree
    texts = [[*text, *(tree.token_list[at] for at in tree.shape.path(node))] for node in range(len(tree))]
    return torch.stack([full_forward(target.model, whole)[-1] for whole in texts])


class NaiveLookahead:
    """A naive reference: the window is a table, each column takes a plain forward pass, and the pool is a searched
    list.
    """

    def __init__(self, target: CausalLM, prompt: Sequence[int], drafter: LookaheadDrafter) -> None:
        self._target, self._guesses, self._ngram = target, drafter.guesses, drafter.ngram
        self._levels = [
            [prompt[(level + i) % len(prompt)] for i in range(drafter.window)] for level in range(drafter.ngram - 1)
        ]
        self._seen: list[tuple[int, ...]] = []

    def read(self, text: Sequence[int], since: int) -> None:
        for end in range(max(since + 1, self._ngram), len(text) + 1):
            self._remember(text[end - self._ngram : end])

    def tree(self, root: int) -> set[tuple[int, ...]]:
        guesses = [ngram[1:] for ngram in reversed(self._seen) if ngram[0] == root][: self._guesses]
        columns = [self._column(i)[1:] for i in range(len(self._levels[0]))]
        return {tuple(path[:end]) for path in (*guesses, *columns) for end in range(1, len(path) + 1)}

    def jacobi_step(self, text: Sequence[int]) -> None:
        """Extend every column by one token; all columns read the window as it was before."""
        self._levels[0][0] = text[-1]
        said = [
            int(full_forward(self._target.model, [*text[:-1], *self._column(i)])[-1].argmax())
            for i in range(len(self._levels[0]))
        ]
        for i, token in enumerate(said):
            self._remember([*(level[i] for level in self._levels), token])
        self._levels = [*self._levels[1:], said]

    def _column(self, i: int) -> list[int]:
        return [*self._levels[0][: i + 1], *(level[i] for level in self._levels[1:])]

    def _remember(self, ngram: Sequence[int]) -> None:
        if tuple(ngram) in self._seen:
            self._seen.remove(tuple(ngram))
        self._seen.append(tuple(ngram))


@pytest.mark.parametrize("sizes", [(4, 4, 2), (1, 3, 1), (5, 2, 3), (3, 5, 9), (1, 2, 1)])
def test_window_and_pool_are_those_of_a_naive_jacobi_iteration_step_by_step(
    tiny_llama: CausalLM, sizes: tuple[int, int, int]
) -> None:
    chance, prompt, drafter = random.Random(sizes[0]), [3, 1, 4, 1, 5], LookaheadDrafter(*sizes)
    session = opened(drafter, tiny_llama, prompt_length=len(prompt))
    naive = NaiveLookahead(tiny_llama, prompt, drafter)
    text, read = [*prompt, 9], 0
    for _ in range(10):
        (proposal,) = session.propose([request(text)])
        naive.read(text, read)
        read = len(text)
        assert paths(proposal.tree) == naive.tree(text[-1])
        assert proposal.kind is ProposalKind.DETERMINISTIC
        session.observe([proposal], [target_logits(tiny_llama, text, proposal)])
        naive.jacobi_step(text)
        text += accept_some(proposal, chance)


def test_ngrams_of_the_window_are_accepted_before_the_text_repeats_anything() -> None:
    """The target counts to 63, so no n-gram of the text repeats, and all accepted n-grams come from the Jacobi
    iteration.
    """
    engine = Engine(CausalLM(counting_model(64)), LookaheadDrafter(7, 4, 4))
    generation = engine.decode([7, 14, 21, 28, 35, 42, 0], DecodingConfig(50))
    assert list(generation.tokens) == list(range(1, 51))
    accepted = [step.accepted for step in generation.steps]
    assert accepted[7:11] == [3, 3, 3, 3], "from the prompt's 7 on, which three steps of the window continued"
    assert sum(accepted) == 28 and len(accepted) == 22


def test_without_room_for_the_window_only_guesses_run_and_nothing_is_learnt(tiny_llama: CausalLM) -> None:
    session = opened(LookaheadDrafter(3, 5, 2), tiny_llama, prompt_length=4)
    text = [6, 1, 2, 3, 4, 5, 8, 6]
    (whole,) = session.propose([request(text)])
    (small,) = session.propose([request(text, depth=2)])
    assert paths(small.tree) == {(1,), (1, 2)}, "a window of depth 5 does not fit"
    session.observe([small], [torch.randn(3, 16)])
    session.observe([Proposal.root_only(6)], [torch.randn(1, 16)])
    assert paths(session.propose([request(text)])[0].tree) == paths(whole.tree)
