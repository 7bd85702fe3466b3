"""Two drafters in one tree: branches of a cheap lookup are added to the tree of a model.

In each step the hybrid decides for each text whether the model also drafts. The model pauses when drafting would cost
more than it gains, because the lookup has found a long and therefore reliable match, or because the model's drafts keep
being rejected. The choice depends only on the text and on earlier steps, never on tokens drawn in this step.
Verification therefore stays lossless in every step.
"""

from collections.abc import Sequence
from dataclasses import replace

from decoding.drafters.base import Drafter, DraftRequest, DraftSession, TextStart
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import DrawnPart, Proposal, ProposalKind, TokenTree, TokenTrie, fetch_tokens

_PRIOR_TRIALS = 4.0
"""Weight of a prior, as a number of trials. The prior of the mean for one match length is the mean for the whole text,
whose own prior is a constant."""
_MEMORY = 50.0  # number of recent trials that a running mean covers
_UNTRIED = 16  # number of steps without the first drafter, after which a text uses this drafter again
_LENGTHS = 5  # number of classes of match lengths: no match, 1, 2 to 3, 4 to 7, 8 or more tokens


class HybridDrafter(Drafter):
    """Drafter that grafts the branches of ``lookup`` onto the tree of ``first``; equal children of a node are merged.

    ``lookup`` is a deterministic drafter without weights, such as prompt lookup. The k-th budget of one drafter is
    paired with the k-th budget of the other; the last budget of the shorter list is paired with the rest of the longer
    list. So each drafter has a share of the nodes. A request that is smaller than every pair goes to ``first`` alone.

    ``first`` skips a step if it is expected to add fewer tokens than ``least_gain`` times the number of tokens that the
    step would write without ``first``. If ``least_gain`` is None, the rough cost of ``first`` is used instead. If
    ``least_gain`` is 0, no step is skipped. The two expected numbers are running means over the text, kept separately
    for each length of the lookup's match.

    If only one of the two drafters drafted, its proposal is used unchanged. If both drafters drafted, the joint
    proposal is deterministic if both parts are deterministic, and it is grafted if the first part has a q. Neither
    session receives the target's logits.
    """

    name = "hybrid"

    def __init__(self, first: Drafter, lookup: Drafter, least_gain: float | None = None) -> None:
        if first is lookup or isinstance(first, HybridDrafter):
            raise UserError(f"the hybrid cannot add a lookup to {first.name}: use another kind of drafter")
        if least_gain is not None and not least_gain >= 0:
            raise UserError(f"least_gain is {least_gain}: use 0 to draft in every step, or a share of a step's tokens")
        self.least_gain = first.rough_cost if least_gain is None else least_gain
        self.first = first
        self.lookup = lookup
        self.name = f"{first.name} with {lookup.name}"
        self.artefact = first.artefact
        self.rough_cost = first.rough_cost
        self.label_with_size = f"{first.label}, with {lookup.label}"
        self.max_positions = first.max_positions
        self.taps = first.taps
        longer = max(len(first.budgets), len(lookup.budgets))
        if lookup.taps:
            raise UserError(
                f"{lookup.name} reads the target's states, which a hybrid does not pass on: use prompt lookup"
            )
        self._pairs = [
            (first.budgets[min(k, len(first.budgets) - 1)], lookup.budgets[min(k, len(lookup.budgets) - 1)])
            for k in range(longer)
        ]
        self.budgets = tuple(Budget(max(a.depth, b.depth), a.nodes + b.nodes - 1) for a, b in self._pairs)

    def split(self, max_nodes: int) -> tuple[int, int]:
        """Split ``max_nodes`` between the trees of ``first`` and ``lookup``; both numbers include the root."""
        fitting = [first.nodes for first, lookup in self._pairs if first.nodes + lookup.nodes - 1 <= max_nodes]
        first_nodes = fitting[-1] if fitting else max_nodes
        return first_nodes, max_nodes - first_nodes + 1

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        if self.lookup.kinds(sampling) != {ProposalKind.DETERMINISTIC}:  # because drawn tokens would lose their q
            raise UserError(
                f"{self.lookup.name} samples its tokens, so a hybrid cannot use it as the lookup: use prompt lookup"
            )
        first = self.first.kinds(sampling)
        return first | {ProposalKind.DETERMINISTIC, *map(_with_lookup, first)}

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "HybridSession":
        sessions = [drafter.open(target, sampling, rows, max_length) for drafter in (self.first, self.lookup)]
        return HybridSession(self, sessions)


class _Mean:
    """A mean over the last trials, which is combined with a prior."""

    def __init__(self) -> None:
        self._value, self._trials = 0.0, 0.0

    def add(self, value: float) -> None:
        self._trials = min(self._trials + 1, _MEMORY)
        self._value += (value - self._value) / self._trials

    def with_prior(self, prior: float) -> float:
        return (self._trials * self._value + _PRIOR_TRIALS * prior) / (self._trials + _PRIOR_TRIALS)


class _FirstChoice:
    """Decides, for one text, whether to use the first drafter; keeps the results on which the decisions are based."""

    def __init__(self) -> None:
        self._looked_up = [_Mean() for _ in range(_LENGTHS)]
        """Number of tokens accepted from the lookup's tree, by the class of the match length."""
        self._added = [_Mean() for _ in range(_LENGTHS)]  # number of further tokens accepted, in steps with both trees
        self._added_to_any = _Mean()
        self._untried = 0
        self.last: tuple[int, int, tuple[TokenTree, TokenTree, TokenTree]] | None = None
        """The last step with a draft: length of the text, class of the match, and the trees (whole, first, lookup)."""

    def wants_first(self, length: int, least_gain: float) -> bool:
        """Decide whether to use the first drafter in a step in which the lookup's match has the class ``length``."""
        added = self._added[length].with_prior(self._added_to_any.with_prior(1.0))
        wants = added >= least_gain * (1 + self._looked_up[length].with_prior(0.0)) or self._untried >= _UNTRIED
        self._untried = 0 if wants else self._untried + 1
        return wants

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare the text with the last step's trees, and learn which tokens were accepted."""
        if self.last is None:
            return
        begin, length, (whole, first, lookup) = self.last
        written, self.last = tokens[begin : begin + whole.shape.max_depth], None
        looked_up = len(lookup.follow(written))
        self._looked_up[length].add(looked_up)
        if len(first) > 1:
            added = len(whole.follow(written)) - looked_up
            self._added[length].add(added)
            self._added_to_any.add(added)


class HybridSession(DraftSession):
    """Sessions of the two drafters. Each session follows the texts independently, whichever branch was accepted."""

    def __init__(self, drafter: HybridDrafter, sessions: Sequence[DraftSession]) -> None:
        self._drafter = drafter
        self._sessions = sessions
        self._choices: dict[int, _FirstChoice] = {}

    def admit(self, row: int, start: TextStart) -> None:
        self._choices[row] = _FirstChoice()
        for session in self._sessions:
            session.admit(row, start)

    def move(self, row: int, to: int) -> None:
        self._choices[to] = self._choices.pop(row)
        for session in self._sessions:
            session.move(row, to)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        # Neither drafter sees the tokens of the other drafter.
        # These tokens may be random draws, and a draft that depends on them would not be lossless.
        splits = [self._drafter.split(request.max_nodes) for request in requests]
        looked_up = self._sessions[1].propose(
            [replace(request, max_nodes=nodes) for request, (_, nodes) in zip(requests, splits, strict=True)]
        )
        lengths = [  # class of each match, 0 for no match; drafts whose match is unknown count as 1
            min(max(proposal.matched, 1).bit_length(), _LENGTHS - 1) if len(proposal.tree) > 1 else 0
            for proposal in looked_up
        ]
        firsts = self._sessions[0].propose(  # even with a depth of 0, because a session reads every request
            [
                replace(request, max_nodes=nodes, max_depth=self._first_depth(row, request, lengths[row]))
                for row, (request, (nodes, _)) in enumerate(zip(requests, splits, strict=True))
            ]
        )
        fetch_tokens([proposal.tree for proposal in (*firsts, *looked_up)])
        proposals = [graft(first, lookup) for first, lookup in zip(firsts, looked_up, strict=True)]
        for row, request in enumerate(requests):
            trees = (proposals[row].tree, firsts[row].tree, looked_up[row].tree)  # without q, which is large
            self._choices[row].last = (len(request.tokens), lengths[row], trees) if request.max_depth else None
        return proposals

    def _first_depth(self, row: int, request: DraftRequest, length: int) -> int:
        """Return the first drafter's greatest depth, or 0 if it must not draft."""
        choice = self._choices[row]
        choice.learn(request.tokens)
        return request.max_depth if request.max_depth and choice.wants_first(length, self._drafter.least_gain) else 0


def graft(first: Proposal, lookup: Proposal) -> Proposal:
    """Join two trees: the first tree's nodes keep their numbers; nodes that only the second tree has follow."""
    if len(first.tree) == 1 or len(lookup.tree) == 1:
        return first if len(lookup.tree) == 1 else lookup
    trie = TokenTrie(first.tree.token_list[0])
    for parent, token in _below_root(first.tree):
        trie.grow(parent, token)
    grafted = [0]
    for parent, token in _below_root(lookup.tree):
        grafted.append(trie.child(grafted[parent], token))
    # The kind must not depend on whether the second tree adds a node, because that depends on the drawn tokens.
    # If some draws kept q and others dropped it, q would no longer be the distribution of the draws that kept q.
    drawn = DrawnPart(len(first.tree), first.kind) if first.kind.has_q else None
    tree = trie.tree(first.tree.tokens.device)
    return Proposal(tree, _with_lookup(first.kind), first.q, drawn, lookup.matched)


def _with_lookup(first: ProposalKind) -> ProposalKind:
    """Return the kind of the tree that results if a lookup is grafted onto a tree of the kind ``first``."""
    return ProposalKind.GRAFTED if first.has_q else first


def _below_root(tree: TokenTree) -> list[tuple[int, int]]:
    """Return (parent, token) of every node but the root."""
    return list(zip(tree.shape.parents[1:], tree.token_list[1:], strict=True))
