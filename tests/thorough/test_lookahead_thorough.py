"""Lookahead decoding: its window and pool beside a naive Jacobi iteration, and the loop with it."""

import random
from collections.abc import Sequence

import pytest
from drafter_checks import (
    accept_some,
    check_greedy,
    check_penalised_greedy,
    check_text_of_the_seed,
    every_start,
    opened,
    paths,
    request,
)
from test_generate_sampling import FALSE_ALARM, decode_many, small_llama
from test_lookahead import target_logits
from tiny_models import full_forward

from decoding.drafters import LookaheadDrafter
from decoding.model.causal_lm import CausalLM
from decoding.rules.proposal import ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import SAMPLED_VERIFY, TRAVERSAL_VERIFICATION, Rule


def test_greedy_output_is_plain_greedy(tiny_llama: CausalLM, counting: CausalLM) -> None:
    for sizes in ((4, 4, 3), (1, 2, 1), (3, 2, 2)):
        check_greedy(tiny_llama, LookaheadDrafter(*sizes))
    check_greedy(counting, LookaheadDrafter(5, 4, 4))
    check_penalised_greedy(tiny_llama, LookaheadDrafter(4, 3, 3))


def test_the_text_of_a_seed_is_plain_decodings(tiny_llama: CausalLM) -> None:
    check_text_of_the_seed(tiny_llama, LookaheadDrafter(4, 3, 3))


@pytest.mark.parametrize("rule", [SAMPLED_VERIFY, TRAVERSAL_VERIFICATION])
def test_the_loop_writes_the_targets_distribution(rule: Rule) -> None:
    chance, accepted = decode_many(small_llama(5), LookaheadDrafter(2, 3, 2), SamplingConfig(1.0), rule)
    assert chance > FALSE_ALARM
    assert accepted > 40, "a draft that is never accepted proves little"


class NaiveLookahead:
    """The window as a table, a plain forward for each of its columns, and a pool that is a list searched through."""

    def __init__(self, target: CausalLM, prompt: list[int], window: int, ngram: int, guesses: int) -> None:
        self._target, self._ngram, self._guesses = target, ngram, guesses
        self._levels = [[prompt[(level + i) % len(prompt)] for i in range(window)] for level in range(ngram - 1)]
        self._seen: list[tuple[int, ...]] = []

    def read(self, text: list[int], since: int) -> None:
        for end in range(max(since + 1, self._ngram), len(text) + 1):
            self._remember(text[end - self._ngram : end])

    def tree(self, root: int) -> set[tuple[int, ...]]:
        guesses = [ngram[1:] for ngram in reversed(self._seen) if ngram[0] == root][: self._guesses]
        columns = [
            [*self._levels[0][1 : i + 1], *(level[i] for level in self._levels[1:])]
            for i in range(len(self._levels[0]))
        ]
        return {start for path in (*guesses, *columns) for start in every_start(path)}

    def jacobi_step(self, text: list[int]) -> None:
        """Every column at once goes on by one token, all read from the window as it was."""
        self._levels[0][0] = text[-1]
        said = []
        for i in range(len(self._levels[0])):
            before = [*text[:-1], *self._levels[0][: i + 1], *(level[i] for level in self._levels[1:])]
            said.append(int(full_forward(self._target.model, before)[-1].argmax()))
        for i, token in enumerate(said):
            self._remember([*(level[i] for level in self._levels), token])
        self._levels = [*self._levels[1:], said]

    def _remember(self, ngram: Sequence[int]) -> None:
        if tuple(ngram) in self._seen:
            self._seen.remove(tuple(ngram))
        self._seen.append(tuple(ngram))


@pytest.mark.parametrize(("window", "ngram", "guesses"), [(4, 4, 2), (1, 3, 1), (5, 2, 3), (3, 5, 9)])
@pytest.mark.parametrize("text_ngrams", [True, False])
def test_window_and_pool_are_those_of_a_naive_jacobi_iteration_step_by_step(
    tiny_llama: CausalLM, window: int, ngram: int, guesses: int, text_ngrams: bool
) -> None:
    chance = random.Random(window)
    prompt = [3, 1, 4, 1, 5]
    session = opened(LookaheadDrafter(window, ngram, guesses, text_ngrams), tiny_llama, prompt_length=len(prompt))
    naive = NaiveLookahead(tiny_llama, prompt, window, ngram, guesses)
    text, read = [*prompt, 9], 0
    for _ in range(10):
        (proposal,) = session.propose([request(text)])
        if text_ngrams:
            naive.read(text, read)
            read = len(text)
        assert paths(proposal.tree) == naive.tree(text[-1])
        assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.tree.token_list[0] == text[-1]
        session.observe([proposal], [target_logits(tiny_llama, text, proposal)])
        naive.jacobi_step(text)
        text += accept_some(proposal, chance)
