"""Interface of drafters: a drafter opens sessions, and a session proposes trees for a batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import History, HistoryRows, SamplingConfig
from decoding.rules.tree import Proposal, ProposalKind, TokenTree


@dataclass(frozen=True)
class DraftRequest:
    """A request to draft a tree for one row, with limits for the size of the tree.

    ``tokens`` is the whole text including the prompt; the last token is the root of the tree. ``hidden`` is the input
    of the target's lm_head from which that token was written. ``max_depth`` limits the drafted tokens on a path; it is
    0 if the row has no room left. ``max_nodes`` includes the root.

    ``states`` is for drafters with `Drafter.taps`: the target's states after these layers, concatenated, at all tokens
    that are new since the last request of this row; the first request includes the prompt. The newest token has no
    states, because the target has not run it yet.

    Between two requests a row's text only grows.
    """

    tokens: Sequence[int]
    hidden: Float[Tensor, " hidden"]
    max_depth: int
    max_nodes: int
    states: Float[Tensor, "tokens taps"] | None = None


@dataclass(frozen=True)
class TextStart:
    """A text that begins in a row: the length of its prompt, and the random source for this text alone."""

    prompt_length: int
    source: GeneratorSource


class TextRows:
    """The random source and the history of the text in each row of a batch; all rows have the same sampling controls.

    ``vocab_size`` is the size of the target's vocabulary. ``device`` is the device on which the controls are applied to
    logits.
    """

    def __init__(self, sampling: SamplingConfig, vocab_size: int, device: torch.device) -> None:
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.device = device
        self.sources: dict[int, GeneratorSource] = {}
        self._histories: dict[int, History] = {}

    def admit(self, row: int, start: TextStart) -> None:
        """Begin a new text in row ``row``, and forget the row's last text."""
        self.sources[row] = start.source
        self._histories[row] = History(self.sampling, start.prompt_length, self.vocab_size, self.device)

    def move(self, row: int, to: int) -> None:
        """Move the text in row ``row`` to row ``to``."""
        self.sources[to] = self.sources.pop(row)
        self._histories[to] = self._histories.pop(row)

    def history_at(self, row: int, text: Sequence[int], tree: TokenTree, nodes: Sequence[int]) -> HistoryRows:
        """Return the history that the sampling controls read at ``nodes`` of a row's tree."""
        return self._histories[row].at(text, tree, nodes)


class DraftSession(Protocol):
    """The work of a drafter on one batch: it drafts a tree for each row in every step.

    The session holds everything that changes during decoding; the drafter and its model keep no state.
    """

    def admit(self, row: int, start: TextStart) -> None:
        """Begin a new text in row ``row``, and forget the row's last text."""

    def move(self, row: int, to: int) -> None:
        """Move the text in row ``row`` to row ``to``. Row ``row`` and all rows after it are no longer used."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Draft a tree for each of the rows 0, 1, ….

        A session must notice new tokens by itself: between two calls a row grows by accepted tokens and by tokens of
        the target, even in steps that do not call the session.
        """

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        """Learn from the target's logits at every node of the last trees, of shape (nodes, vocab), for each row.

        Most sessions ignore the logits.
        """
        return


class Rows(Protocol):
    """Data about each text of a batch, by row."""

    def admit(self, row: int, start: TextStart) -> None:
        """Begin a new text in row ``row``."""

    def move(self, row: int, to: int) -> None:
        """Move the text in row ``row`` to row ``to``."""


class RowsSession(DraftSession):
    """Base of sessions that keep all data of the texts in ``rows``."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def admit(self, row: int, start: TextStart) -> None:
        self._rows.admit(row, start)

    def move(self, row: int, to: int) -> None:
        self._rows.move(row, to)


class Drafter(ABC):
    """A method of drafting, which opens sessions. Its models and settings never change."""

    name: str
    artefact: str | None = None
    """Kind of the trained artefact used for drafting: "heads", "draft", or None."""
    rough_cost: float = 0.1
    """Rough cost of the largest draft, in units of a target pass; used for decisions that must not depend on the clock.
    """

    max_positions: int | None = None
    """Longest text that the drafter supports, in tokens; None if its models set no limit."""
    taps: tuple[int, ...] = ()
    """Layers of the target (from 0, increasing) after which the drafter reads the target's states."""
    budgets: tuple[Budget, ...]
    """Sizes of the trees that the drafter can draft, by increasing cost; the last one is the default."""
    label_with_size = ""

    @property
    def label(self) -> str:
        """The name in tables: the kind of drafter, and the size of its drafts if the size may vary."""
        return self.label_with_size or self.name

    @abstractmethod
    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> DraftSession:
        """Open a session for up to ``rows`` texts of at most ``max_length`` tokens.

        Raises UserError if the target does not fit the drafter.
        """

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        """Return the kinds of proposals that the drafter may make under these sampling controls; by default, only
        deterministic proposals.
        """
        return frozenset({ProposalKind.DETERMINISTIC})

    @property
    def chains_only(self) -> bool:
        """True if the drafter drafts only chains: no budget has room for a branch."""
        return all(budget.nodes == budget.depth + 1 for budget in self.budgets)

    @property
    def chains(self) -> tuple[Budget, ...]:
        """The budgets for targets that cannot run trees; each of them has room only for a chain."""
        return self.budgets if self.chains_only else ()

    def budgets_on(self, target: CausalLM) -> tuple[Budget, ...]:
        """Return the budgets for a target; if the target cannot run trees, these are only budgets for chains."""
        return self.budgets if target.no_trees is None else self.chains

    def label_on(self, target: CausalLM) -> str:
        """Return the label for a target. If the target cannot run trees, a drafter of trees drafts a chain."""
        cut = target.no_trees is not None and not self.chains_only
        return f"{self.name}, chain of {self.chains[-1].depth}" if cut and self.chains else self.label

    @property
    def max_depth(self) -> int:
        """Depth of the deepest tree."""
        return self.budgets[-1].depth

    @property
    def max_nodes(self) -> int:
        """Number of nodes of the largest tree, including the root."""
        return self.budgets[-1].nodes


def chain_budgets(depth: int) -> tuple[Budget, ...]:
    """Return the budgets of a drafter that writes chains of up to ``depth`` tokens."""
    return tuple(Budget(length, length + 1) for length in range(1, depth + 1))


class TextSession(Protocol):
    """A drafter's work on one text: a simpler interface for drafters that gain nothing from a batch."""

    def propose(self, request: DraftRequest) -> Proposal:
        """Draft a tree for the request, whose ``max_depth`` is at least 1."""


class TextDrafter(Drafter):
    """A drafter that drafts for one text at a time."""

    @abstractmethod
    def open_text(self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int) -> TextSession:
        """Open a session for a text of at most ``max_length`` tokens."""

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> DraftSession:
        return _TextByText(self, target, sampling, max_length)


class _TextByText(DraftSession):
    """A session of a batch that calls one text session for each row, one after the other."""

    def __init__(self, drafter: TextDrafter, target: CausalLM, sampling: SamplingConfig, max_length: int) -> None:
        self._drafter, self._target, self._sampling, self._max_length = drafter, target, sampling, max_length
        self._sessions: dict[int, TextSession] = {}

    def admit(self, row: int, start: TextStart) -> None:
        self._sessions[row] = self._drafter.open_text(self._target, self._sampling, start, self._max_length)

    def move(self, row: int, to: int) -> None:
        self._sessions[to] = self._sessions.pop(row)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [
            self._sessions[row].propose(request)
            if request.max_depth > 0
            else Proposal.root_only(request.tokens[-1], self._target.device)
            for row, request in enumerate(requests)
        ]
