"""Sampling controls: how logits become probabilities, with the same code for target and draft.

The controls are applied in the order of `transformers`: penalties, processors, temperature, top-k, top-p, min-p,
typical-p. Probabilities are fp32 (fp64 for fp64 logits) for models of any dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from decoding.errors import UserError
from decoding.rules.tree import TokenTree


@runtime_checkable
class LogitsProcessor(Protocol):
    """A change to the logits that depends on the text alone, such as any logits processor of `transformers`.

    A processor must keep no state between calls, because it also sees drafted texts that are rejected later.
    """

    def __call__(
        self, input_ids: Int[Tensor, "rows length"], scores: Float[Tensor, "rows vocab"], /
    ) -> Float[Tensor, "rows vocab"]:
        """Return the new scores for the token after each text; ``scores`` may be overwritten."""


@dataclass(frozen=True)
class ForPromptLength:
    """A processor that depends on the prompt's length: ``build(n)`` makes the processor for a prompt of n tokens.

    Every step calls ``build`` once for all texts of the same lengths, so make it cheap, or cache its result.
    """

    build: Callable[[int], LogitsProcessor]


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling controls, with the same meanings as in `transformers`. Temperature 0 is greedy decoding.

    The repetition penalty applies to the tokens of the prompt and the output.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    processors: tuple[LogitsProcessor | ForPromptLength, ...] = ()

    def __post_init__(self) -> None:
        infinite = float("inf")
        for name, fits, wanted in (
            ("temperature", 0 <= self.temperature < infinite, "0 for greedy decoding, or a positive number"),
            ("top_k", self.top_k >= 0, "0 to switch it off, or a positive number of tokens"),
            ("top_p", 0 < self.top_p <= 1, "a share of probability in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "a number in [0, 1): a share of the best token's probability"),
            ("typical_p", 0 < self.typical_p <= 1, "a share of probability in (0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < infinite, "a positive number (1 means no penalty)"),
        ):
            if not fits:
                raise UserError(f"{name} is {getattr(self, name)}: use {wanted}")
        if not isinstance(self.processors, tuple):
            raise UserError(f"processors is a {type(self.processors).__name__}: use a tuple of processors")
        for processor in self.processors:
            if not isinstance(processor, ForPromptLength) and not callable(processor):
                raise UserError(f"processor {processor!r} cannot be called: pass a function of (input_ids, scores)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_seen(self) -> bool:
        return self.repetition_penalty != 1

    @property
    def needs_history(self) -> bool:
        """True if a penalty or a processor reads the earlier tokens of the text."""
        return self.needs_seen or bool(self.processors)


class HistoryRows(NamedTuple):
    """The text before each row's next token, in the form that the controls read.

    A tensor that no control reads is None.

    ``seen`` (rows, vocab) bool: true for tokens of the prompt or the output. ``texts`` (rows, longest) long: the text
    of row i is the first ``lengths[i]`` entries; the rest is padding. ``prompt_lengths``: the number of tokens in each
    row's prompt.
    """

    seen: Tensor | None = None
    texts: Tensor | None = None
    lengths: tuple[int, ...] = ()
    prompt_lengths: tuple[int, ...] = ()

    @staticmethod
    def cat(parts: Sequence["HistoryRows"]) -> "HistoryRows":
        """Join the rows of all parts, one part after another; all parts must come from the same `SamplingConfig`."""

        def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
            given = [tensor for tensor in tensors if tensor is not None]
            assert len(given) in (0, len(tensors)), "rows with different sampling controls cannot be joined"
            return torch.cat(given) if given else None

        longest = max((part.texts.shape[1] for part in parts if part.texts is not None), default=0)
        return HistoryRows(
            joined([part.seen for part in parts]),
            joined([None if part.texts is None else _padded(part.texts, longest) for part in parts]),
            tuple(length for part in parts for length in part.lengths),
            tuple(length for part in parts for length in part.prompt_lengths),
        )

    def groups(self) -> Iterator[tuple[Int[Tensor, " group"], Int[Tensor, "group length"], int]]:
        """Yield groups of rows with equal lengths of text and prompt: row indices, texts, and the prompt's length."""
        assert self.texts is not None, "processors need the texts"
        members: dict[tuple[int, int], list[int]] = {}
        for row, lengths in enumerate(zip(self.lengths, self.prompt_lengths, strict=True)):
            members.setdefault(lengths, []).append(row)
        for (length, prompt_length), rows in members.items():
            index = torch.tensor(rows).to(self.texts.device, non_blocking=True)
            yield index, self.texts[index, :length], prompt_length


def _padded(texts: Int[Tensor, "rows length"], longest: int) -> Int[Tensor, "rows longest"]:
    return F.pad(texts, (0, longest - texts.shape[1]))


class History:
    """The history of one text, updated as the text grows. A history that no control reads takes no time."""

    def __init__(
        self, sampling: SamplingConfig, prompt_length: int, vocab_size: int, device: torch.device | str
    ) -> None:
        self._sampling = sampling
        self._prompt_length = prompt_length
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._known = 0  # number of tokens of the text that the tensors below describe
        device = self._device
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device) if sampling.needs_seen else None
        self._text = torch.zeros(0, dtype=torch.long, device=device) if sampling.processors else None

    def at(self, tokens: Sequence[int], tree: TokenTree, nodes: Sequence[int] | None = None) -> HistoryRows:
        """Return one row for each of ``nodes`` (None: all nodes): the history before the token that follows the node.

        The history consists of ``tokens``, which is the whole text up to the root of ``tree``, and of the path from
        below the root to the node. Only tokens appended since the last call are read: between calls a text may grow but
        must not change.
        """
        if not self._sampling.needs_history:
            return HistoryRows()
        assert tokens[-1] == tree.token_list[0], "the root of the tree is the last token of the text"
        if len(tokens) > self._known:
            self._read(list(tokens[self._known :]))
        path_tokens = [
            [tree.token_list[ancestor] for ancestor in tree.shape.path(node)]
            for node in (range(len(tree)) if nodes is None else nodes)
        ]
        return self._rows(path_tokens)

    def _read(self, fresh: list[int]) -> None:
        """Add the tokens ``fresh``, which follow the known tokens, to the tensors."""
        new = self._on_device(fresh)
        if self._seen is not None:
            self._seen.index_fill_(0, new, True)
        if self._text is not None:
            self._text = torch.cat([self._text, new])
        self._known += len(fresh)

    def _rows(self, path_tokens: list[list[int]]) -> HistoryRows:
        """Return one row per path: the history of the text followed by the path's tokens."""
        row_count = len(path_tokens)
        seen = texts = None
        lengths: tuple[int, ...] = ()
        if self._seen is not None:
            # The index of (row, token) in the flattened (rows, vocab) tensor.
            flat = [row * self._vocab_size + token for row, path in enumerate(path_tokens) for token in path]
            seen = self._seen.repeat(row_count, 1)
            seen.view(-1).index_fill_(0, self._on_device(flat), True)
        if self._text is not None:
            deepest = max(map(len, path_tokens), default=0)
            padded = [token for path in path_tokens for token in path + [0] * (deepest - len(path))]
            paths = self._on_device(padded).view(row_count, deepest)
            texts = torch.cat([self._text.expand(row_count, -1), paths], dim=1)
            lengths = tuple(len(self._text) + len(path) for path in path_tokens)
        prompt_lengths = (self._prompt_length,) * len(lengths)
        return HistoryRows(seen, texts, lengths, prompt_lengths)

    def _on_device(self, values: list[int]) -> Tensor:
        # Non-blocking: does not wait for the work queued on the device.
        return torch.tensor(values, dtype=torch.long).to(self._device, non_blocking=True)


def adjusted_logits(
    logits: Float[Tensor, "rows vocab"], sampling: SamplingConfig, history: HistoryRows | None = None
) -> Float[Tensor, "rows vocab"]:
    """Return the logits after penalties and processors; greedy decoding takes their argmax.

    Without penalties and processors the result is ``logits`` itself; otherwise it is a new tensor in fp32 (fp64 for
    fp64 logits).
    """
    if not sampling.needs_history:
        return logits
    assert history is not None, "penalties and processors need the history"
    logits = _widened(logits)
    if sampling.needs_seen:
        assert history.seen is not None, "a repetition penalty needs the tokens that were seen"
        penalty = sampling.repetition_penalty
        logits = torch.where(history.seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    return _processed(logits, sampling, history) if sampling.processors else logits


def best_tokens(logits: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
    """Return the token with the largest logit; on ties, return the lowest id."""
    return logits.max(-1).indices  # argmax takes six times as long for bf16 on a CPU


def _widened(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    return logits if logits.dtype == torch.float64 else logits.float()


def _processed(
    logits: Float[Tensor, "rows vocab"], sampling: SamplingConfig, history: HistoryRows
) -> Float[Tensor, "rows vocab"]:
    processed = torch.empty_like(logits)
    for rows, texts, prompt_length in history.groups():
        scores = logits[rows]
        for entry in sampling.processors:
            processor = entry.build(prompt_length) if isinstance(entry, ForPromptLength) else entry
            result = processor(texts, scores)
            if result.shape != scores.shape:
                raise UserError(
                    f"processor {type(processor).__name__} returned shape {tuple(result.shape)} for scores of shape "
                    f"{tuple(scores.shape)}: return one score for each token of each row"
                )
            scores = result
        processed[rows] = scores.to(processed.dtype)
    return processed


def probabilities(
    logits: Float[Tensor, "rows vocab"], sampling: SamplingConfig, history: HistoryRows | None = None
) -> Float[Tensor, "rows vocab"]:
    """Return each row's sampling distribution after every control; at temperature 0 all mass is on the argmax."""
    logits = _widened(adjusted_logits(logits, sampling, history))
    if sampling.greedy:
        one_hot = torch.zeros_like(logits)
        return one_hot.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature if sampling.temperature != 1 else logits
    if 0 < sampling.top_k < logits.shape[-1]:
        kth_best = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth_best, -torch.inf)
    if sampling.top_p < 1:
        logits = _nucleus(logits, sampling.top_p)
    if sampling.min_p > 0:
        shares = logits.softmax(-1)
        logits = logits.masked_fill(shares < sampling.min_p * shares.amax(-1, keepdim=True), -torch.inf)
    if sampling.typical_p < 1:
        logits = _typical(logits, sampling.typical_p)
    return logits.softmax(-1)


def _nucleus(logits: Float[Tensor, "rows vocab"], top_p: float) -> Float[Tensor, "rows vocab"]:
    """Keep the smallest set of most probable tokens whose mass reaches ``top_p`` (always at least one)."""
    ascending, order = logits.sort(descending=False)
    dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def _typical(logits: Float[Tensor, "rows vocab"], mass: float) -> Float[Tensor, "rows vocab"]:
    """Keep the tokens whose -log p is nearest the entropy until their mass reaches ``mass`` (2202.00666, section 4).

    Tokens that tie with the last kept token are also kept.
    """
    log_shares = logits.log_softmax(-1)
    entropy = -(log_shares * log_shares.exp()).nansum(-1, keepdim=True)
    distance = (-log_shares - entropy).abs()
    ascending, order = distance.sort(descending=False)
    short_of_mass = logits.gather(-1, order).softmax(-1).cumsum(-1) < mass
    last_kept = short_of_mass.sum(-1, keepdim=True).clamp_(max=logits.shape[-1] - 1)
    return logits.masked_fill(distance > ascending.gather(-1, last_kept), -torch.inf)
