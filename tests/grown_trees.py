"""Trees of heads and parallel drafts whose nodes have distributions of their own: checks that their tests call."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from drafter_checks import paths, propose
from torch import Tensor

from decoding.drafters import MedusaDrafter
from decoding.drafters.base import DraftRequest
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads
from decoding.rules.proposal import ProposalKind
from decoding.rules.sampling import SamplingConfig

PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 3), (0, 1, 0), (2, 0, 0))
BOTH_LAYOUTS = pytest.mark.parametrize("shared", [False, True], ids=["own lm_heads", "shared lm_head"])
BOTH_TREES = pytest.mark.parametrize("dynamic", [None, 9], ids=["static", "dynamic"])

Reference = Callable[[MedusaHeads, CausalLM, Tensor, Sequence[int]], Tensor]
"""Function from heads, target, a hidden state and the tokens from the root on to the logits after them."""


def with_random_weights(heads: MedusaHeads) -> MedusaHeads:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return heads


def check_static_tree(heads: MedusaHeads, target: CausalLM, reference: Reference) -> None:
    """Check that a child of rank r holds the r-th best token after its own path."""
    hidden = torch.randn(3, 16)
    for row, proposal in enumerate(propose(MedusaDrafter(heads, PATHS), target, hidden)):
        tokens: dict[tuple[int, ...], list[int]] = {(): [row]}
        for path in sorted(PATHS, key=len):
            before = tokens[path[:-1]]
            best = reference(heads, target, hidden[row], before).topk(path[-1] + 1).indices
            tokens[path] = [*before, int(best[-1])]
        assert paths(proposal.tree) == {tuple(text[1:]) for text in tokens.values() if len(text) > 1}
        assert proposal.tree.token_list[0] == row and len(proposal.tree) == len(PATHS) + 1
        assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.q is None


def check_dynamic_tree(heads: MedusaHeads, target: CausalLM, reference: Reference, nodes: int) -> None:
    """Check that the paths have the largest products of probabilities, of all 16 + 256 + 4,096."""
    hidden = torch.randn(2, 16)
    proposals = propose(MedusaDrafter(heads, dynamic_nodes=nodes), target, hidden)
    for row, proposal in enumerate(proposals):
        products: dict[tuple[int, ...], float] = {(): 1.0}
        for length in range(3):
            for path in itertools.product(range(16), repeat=length):
                shares = reference(heads, target, hidden[row], [row, *path]).softmax(-1).tolist()
                products |= {(*path, token): products[path] * share for token, share in enumerate(shares)}
        best = sorted(products, key=products.__getitem__, reverse=True)[:nodes]
        assert paths(proposal.tree) == set(best[1:])
        assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.q is None
        assert proposal.tree.token_list == proposal.tree.tokens.tolist() and proposal.tree.token_list[0] == row
    assert nodes < 12 or proposals[0].tree.shape != proposals[1].tree.shape


def check_rows_alone(heads: MedusaHeads, target: CausalLM, dynamic: int | None) -> None:
    """Check that a row's tree is the same beside others and alone."""
    drafter = MedusaDrafter(heads, None if dynamic else PATHS, dynamic)
    hidden, bounds = torch.randn(5, 16), [(99, 99), (2, 4), (0, 9), (3, 6), (1, 2)]
    session = drafter.open(target, SamplingConfig(), 5, 40)
    requests = [DraftRequest([row + 3], hidden[row], *bounds[row]) for row in range(5)]
    together = session.propose(requests)
    for request, proposal in zip(requests, together, strict=True):
        (alone,) = session.propose([request])
        assert alone.tree.shape == proposal.tree.shape and alone.tree.token_list == proposal.tree.token_list
