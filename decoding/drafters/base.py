"""What every drafter is: one class, one file. It opens sessions; a session proposes trees for the rows of a batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import GeneratorSource, SamplingConfig


@dataclass(frozen=True)
class DraftRequest:
    """One row's turn. The drafter answers with a tree of at most these bounds.

    ``tokens`` is the whole text, prompt included; its last token is the tree's root. ``hidden`` is what the target's
    lm_head read when it wrote that token. ``max_depth`` counts drafted tokens, 0 where the row has room for none;
    ``max_nodes`` counts the root.
    """

    tokens: Sequence[int]
    hidden: Float[Tensor, " hidden"]
    max_depth: int
    max_nodes: int


@dataclass(frozen=True)
class TextStart:
    """A text that begins in a row: its first ``prompt_length`` tokens are the prompt; ``source`` is its own chance."""

    prompt_length: int
    source: GeneratorSource


class DraftSession(Protocol):
    """A drafter at work on a batch. All state of a generation lives here, none in the drafter or its model."""

    def admit(self, slot: int, start: TextStart) -> None:
        """A new text begins in this row; what was known of the row's last text is forgotten."""

    def move(self, slot: int, to: int) -> None:
        """The text in row ``slot`` goes on in row ``to``; the rows from ``slot`` on are no longer in use."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Draft a tree for each of the rows 0, 1, ….

        A session keeps up with the texts by itself: between two calls a row's tokens grow by whatever was accepted and
        written, also in steps it was not asked in.
        """

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        """What the target said at every node of the last trees, (nodes, vocab) for each row."""


class Drafter(ABC):
    """Opens sessions; holds models and settings, which never change."""

    name: str
    artefact: str | None = None
    """The trained artefact that drafts: "heads", "draft", or None."""

    @property
    def label(self) -> str:
        """Its name in tables: the kind, and how much it drafts where that tells two of a kind apart."""
        return self.name

    @property
    def max_positions(self) -> int | None:
        """The longest text it can draft for, in tokens; None where its own models set no limit."""
        return None

    @property
    @abstractmethod
    def budgets(self) -> tuple[Budget, ...]:
        """The sizes it can draft in, in increasing cost; the last one is what it drafts if nobody says less."""

    @abstractmethod
    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> DraftSession:
        """Start on up to ``rows`` texts of at most ``max_length`` tokens. Refuses a target it does not fit."""

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        """The kinds of its proposals under these controls: deterministic, unless it says otherwise."""
        return frozenset({ProposalKind.DETERMINISTIC})

    @property
    def chains_only(self) -> bool:
        """Whether all it drafts are chains: none of its budgets has room for more."""
        return all(budget.nodes == budget.depth + 1 for budget in self.budgets)

    @property
    def max_depth(self) -> int:
        """The deepest tree it drafts."""
        return self.budgets[-1].depth

    @property
    def max_nodes(self) -> int:
        """The largest tree it drafts, the root included."""
        return self.budgets[-1].nodes


def chain_budgets(depth: int) -> tuple[Budget, ...]:
    """Of a drafter of chains up to ``depth`` tokens."""
    return tuple(Budget(length, length + 1) for length in range(1, depth + 1))


class TextSession(Protocol):
    """A drafter at work on one text: what a drafter that gains nothing from a batch writes instead."""

    def propose(self, request: DraftRequest) -> Proposal:
        """Draft a tree; ``request.max_depth`` is at least 1."""

    def observe(self, proposal: Proposal, logits: Float[Tensor, "nodes vocab"]) -> None:
        """What the target said at every node of the last tree."""


class TextDrafter(Drafter):
    """A drafter that looks at one text at a time."""

    @abstractmethod
    def open_text(self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int) -> TextSession:
        """Start on a text of at most ``max_length`` tokens."""

    def check(self, target: CausalLM, rows: int, max_length: int) -> None:
        """Refuse, before any text begins, what `open_text` could not serve: a target, or so many rows at a time."""

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> DraftSession:
        self.check(target, rows, max_length)
        return _TextByText(self, target, sampling, max_length)


def check_static_rows(draft: CausalLM, rows: int, name: str) -> None:
    """Refuse to draft text by text with a model whose static shapes leave it one cache for all texts."""
    if draft.is_static and rows > 1:
        raise ValueError(
            f"the {name} drafts text by text, and its draft's static shapes serve one text at a time, not {rows}: "
            "give a batch size of 1, or a draft without static shapes"
        )


class _TextByText:
    """A batch of text sessions, asked one after the other."""

    def __init__(self, drafter: TextDrafter, target: CausalLM, sampling: SamplingConfig, max_length: int) -> None:
        self._drafter, self._target, self._sampling, self._max_length = drafter, target, sampling, max_length
        self._sessions: dict[int, TextSession] = {}

    def admit(self, slot: int, start: TextStart) -> None:
        self._sessions[slot] = self._drafter.open_text(self._target, self._sampling, start, self._max_length)

    def move(self, slot: int, to: int) -> None:
        self._sessions[to] = self._sessions.pop(slot)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [
            self._sessions[row].propose(request)
            if request.max_depth > 0
            else Proposal.root_only(request.tokens[-1], self._target.device)
            for row, request in enumerate(requests)
        ]

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        for row, (proposal, row_logits) in enumerate(zip(proposals, logits, strict=True)):
            self._sessions[row].observe(proposal, row_logits)
