"""Checks of promises that every drafter keeps; each drafter's tests call them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from tiny_models import naive_greedy

from decoding.drafters import Drafter, DraftSession
from decoding.drafters.base import DraftRequest, TextStart
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.drawing import GeneratorSource
from decoding.rules.proposal import Proposal
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree
from decoding.rules.verify import SAMPLED_VERIFY

NO_HIDDEN = torch.empty(0)
PROMPTS = ([1, 2, 3, 1, 2], [5], [7, 7, 0, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8], [4, 4])
ROOM = 96


def request(tokens: Sequence[int], depth: int = 99, nodes: int = 999) -> DraftRequest:
    return DraftRequest(list(tokens), NO_HIDDEN, depth, nodes)


def opened(
    drafter: Drafter,
    target: CausalLM,
    sampling: SamplingConfig | None = None,
    prompt_length: int = 1,
    seed: int = 0,
    rows: int = 1,
    max_length: int = ROOM,
) -> DraftSession:
    """Open a session with a text in every row."""
    session = drafter.open(target, sampling or SamplingConfig(), rows, max_length)
    for slot in range(rows):
        session.admit(slot, TextStart(prompt_length, GeneratorSource.from_seed(seed + slot)))
    return session


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """Return the tree as the set of its paths of tokens from below the root."""
    return {tuple(tree.token_list[at] for at in tree.shape.path(node)) for node in range(1, len(tree))}


def every_start(path: Sequence[int]) -> set[tuple[int, ...]]:
    """Return all beginnings of a path, the path itself included."""
    return {tuple(path[:length]) for length in range(1, len(path) + 1)}


def accept_some(proposal: Proposal, chance: random.Random, vocab: int = 16) -> list[int]:
    """Return a random path of the tree and a token after it, perhaps a rejected one, as lossy rules may write."""
    tree = proposal.tree
    node = chance.randrange(len(tree))
    refused = [tree.token_list[child] for child in tree.shape.children[node]]
    path = [tree.token_list[ancestor] for ancestor in tree.shape.path(node)]
    return [*path, chance.choice([*refused, chance.randrange(vocab)])]


def check_bounds(
    drafter: Drafter, target: CausalLM, sampling: SamplingConfig, seed: int, siblings_differ: bool = True
) -> None:
    """Check on random texts, bounds and logits that each tree has the right root and keeps to the bounds."""
    chance = random.Random(seed)
    session = opened(drafter, target, sampling, seed=seed)
    text = [chance.randrange(16) for _ in range(chance.randint(1, 12))]
    for _ in range(6):
        depth, nodes = chance.choice([0, 1, 2, 3, 5, 99]), chance.choice([1, 2, 3, 5, 9, 17, 40, 999])
        (proposal,) = session.propose([request(text, depth, nodes)])
        tree = proposal.tree
        assert tree.token_list[0] == text[-1]
        assert tree.shape.max_depth <= min(depth, drafter.max_depth)
        assert len(tree) <= min(nodes, drafter.max_nodes)
        if siblings_differ:
            assert len(paths(tree)) == len(tree) - 1
        if proposal.q is not None:
            drawn = proposal.drawn.nodes if proposal.drawn else len(tree)
            parents = {*tree.shape.parents[1:drawn]}
            assert len(proposal.q) >= len(parents) and proposal.q.shape[1] == target.vocab_size
        if chance.random() < 0.8:
            session.observe([proposal], [torch.randn(len(tree), target.vocab_size)])
        text += accept_some(proposal, chance)


def check_budgets(drafter: Drafter) -> None:
    """Check that budgets grow, and that each has room for a path of its depth."""
    budgets = drafter.budgets
    assert all(before.nodes < after.nodes and before.depth <= after.depth for before, after in pairwise(budgets))
    assert all(1 <= budget.depth < budget.nodes for budget in budgets)


def check_greedy(target: CausalLM, drafter: Drafter, count: int = 24) -> None:
    """Check that the output is plain greedy decoding's, in batches of any size, and if texts end inside a block."""
    plain = [naive_greedy(target.model, prompt, count) for prompt in PROMPTS]
    for batch_size in (1, 2, 5):
        texts = Engine(target, drafter).decode(PROMPTS, DecodingConfig(count), batch_size=batch_size)
        assert [text.tokens for text in texts] == plain
    for place in (3, 6, 11):
        eos = tuple({text[place] for text in plain})
        ended = [text[: next(at for at, token in enumerate(text) if token in eos) + 1] for text in plain]
        texts = Engine(target, drafter).decode(PROMPTS, DecodingConfig(count, eos_token_ids=eos), batch_size=3)
        assert [text.tokens for text in texts] == ended


def check_penalised_greedy(target: CausalLM, drafter: Drafter, penalty: float = 1.4) -> None:
    sampling = SamplingConfig(repetition_penalty=penalty)
    for prompt in PROMPTS:
        text = Engine(target, drafter).decode(prompt, DecodingConfig(16, sampling))
        assert text.tokens == naive_greedy(target.model, prompt, 16, penalty)


def check_text_of_the_seed(target: CausalLM, drafter: Drafter) -> None:
    """Check that sampled verify, which draws once per token from its own stream, writes plain decoding's text."""
    for sampling in (SamplingConfig(1.0), SamplingConfig(1.2, top_p=0.9, repetition_penalty=1.3)):
        config = DecodingConfig(20, sampling, SAMPLED_VERIFY, seed=7)
        drafted = Engine(target, drafter).decode(PROMPTS, config, batch_size=3)
        plain = Engine(target).decode(PROMPTS, replace(config, rule=None), batch_size=3)
        assert [text.tokens for text in drafted] == [text.tokens for text in plain]


def propose(
    drafter: Drafter, target: CausalLM, hidden: torch.Tensor, bounds: Sequence[tuple[int, int]] = ()
) -> list[Proposal]:
    """Return the proposals of a stateless drafter, one row per hidden state; row i's text ends with token i."""
    session = drafter.open(target, SamplingConfig(), len(hidden), 40)
    every = bounds or [(99, 99)] * len(hidden)
    return session.propose([DraftRequest([7, row], hidden[row], *bound) for row, bound in enumerate(every)])
