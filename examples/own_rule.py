"""Your own acceptance rules, and the proof that one rule is lossless and another is not.

    python examples/own_rule.py
    python examples/own_rule.py --target ORG/NAME --drafter draft:runs/draft/final,tokens=4

A rule gets a proposal (a tree of drafted tokens, and the q from which they were drawn), the target's distribution p at
every node, and a source of random decisions. The rule returns the nodes to keep and the token to write after these
nodes.
"""

import argparse

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from decoding import HeadstartModel, speculate
from decoding.measure.proof.enumeration import prove_rule
from decoding.model.loading import load_tokenizer
from decoding.rules.drawing import RandomSource
from decoding.rules.tree import Proposal, ProposalKind
from decoding.rules.verify import Rule, Verdict

# --- a lossless rule: speculative sampling of chains ------------------------------------------------------------------


def rejection(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """Keep a drafted token x with probability p(x)/q(x); at the first rejection, draw from the part of p above q."""
    for place, token in enumerate(proposal.tree.token_list[1:]):
        q = one_hot(torch.tensor(token), p.shape[1]).to(p) if proposal.q is None else proposal.q[place]
        if not source.accept(float(p[place, token] / q[token])):
            beyond = (p[place] - q).clamp(min=0)
            return Verdict(path(place), source.draw(beyond if beyond.any() else p[place]))  # none is left if p = q
    length = len(proposal.tree) - 1
    return Verdict(path(length), source.draw(p[length]))


def path(length: int) -> tuple[int, ...]:
    """Return the first ``length`` nodes of a chain after its root, node 0, which is already written."""
    return tuple(range(1, length + 1))


# The kinds say how drafted tokens may be chosen; a draft of another kind is rejected before decoding starts.
KINDS = frozenset({ProposalKind.SAMPLED, ProposalKind.DETERMINISTIC})
MINE = Rule("my rejection", True, KINDS, rejection, chains_only=True)

# --- the same rule with the commonest mistake -------------------------------------------------------------------------


def careless(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """Draw from the whole of p after a rejection. The rejected token may be drawn again, so it is written too often."""
    nodes, _ = rejection(proposal, p, source)
    return Verdict(nodes, source.draw(p[len(nodes)]))


CARELESS = Rule("careless rejection", True, KINDS, careless, chains_only=True)

# --- a lossy rule, also for trees -------------------------------------------------------------------------------------


def near_the_best(top: int, factor: float) -> Rule:
    """Make a rule that keeps any of the target's ``top`` tokens whose p is at least ``factor`` times the largest p."""

    def decide(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
        tree, best = proposal.tree, p.topk(min(top, p.shape[1])).values
        least = torch.maximum(best[:, -1], factor * best[:, 0]).tolist()
        kept = [0]  # parents come before their children
        for node, parent in enumerate(tree.shape.parents[1:], start=1):
            if parent in kept and float(p[parent, tree.token_list[node]]) >= least[parent]:
                kept.append(node)
        last = max(kept, key=lambda node: tree.shape.depths[node])
        return Verdict(tree.shape.path(last), source.draw(p[last]))

    return Rule(f"among the best {top}", False, frozenset(ProposalKind), decide)  # False labels the rule as lossy


LOSSY = near_the_best(top=3, factor=0.3)

# --- proofs -----------------------------------------------------------------------------------------------------------

# The proof enumerates every outcome of drafting and verifying with its probability, for drafts of each kind and shape
# that the rule supports. Every text must have the same probability as under the target, up to rounding.
for rule in (MINE, CARELESS, LOSSY):
    proof = prove_rule(rule)
    found = "proved lossless" if proof.lossless else f"NOT lossless: {proof.worst}"
    print(f"{rule.name}, called {rule.label}: off by {proof.distance:.1g} over {proof.turns} drafts, {found}")

# --- use --------------------------------------------------------------------------------------------------------------

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="quickstart", help="folder, GGUF file or hub id")
parser.add_argument("--drafter", default="lookup", help="a drafter of chains")
parser.add_argument("--prompt", default="class Stack:\n    def __init__(self):\n        self.items = []\n")
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

tokenizer = load_tokenizer(options.target)
model = HeadstartModel.from_pretrained(options.target, options.drafter)
prompts = [tokenizer(options.prompt)["input_ids"]] * 4  # each with a different seed
for chosen in (None, MINE, LOSSY):  # None means the lossless rule that keeps the most tokens of this drafter
    output = speculate(
        model.target,
        model.drafter,
        prompts,
        rule=chosen,
        policy="fixed",
        temperature=0.7,
        max_new_tokens=options.max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
    )
    print(
        f"{chosen.name if chosen else 'the default rule'}: {output.label}, "
        f"{output.tokens_per_pass:.2f} tokens per target pass"
    )
