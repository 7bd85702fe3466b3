"""The target's distribution at every token of a text, from plain forward passes of `transformers`.

This project's caches, trees and batches are not used, because a test must not rely on the code that it tests.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import History, HistoryRows, SamplingConfig, adjusted_logits, probabilities
from decoding.rules.tree import TokenTree

_TOKENS = 4096
"""Largest number of tokens in a forward pass, including padding."""


@dataclass(frozen=True)
class EngineText:
    """An engine's text: the prompt, and the new tokens with the final EOS if there is one."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Reference:
    """A target with the sampling controls (for temperatures above 0) and the EOS ids of its texts.

    If there are several EOS ids, all count as the first one, because servers do not report which of them ended a text.
    """

    target: CausalLM
    sampling: SamplingConfig
    eos_token_ids: tuple[int, ...] = ()

    def probabilities(self, texts: Sequence[EngineText]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each text's distributions after all controls, of shape (tokens, vocab) in fp64, and its tokens."""
        for text, logits in zip(texts, self._logits(texts), strict=True):
            p = probabilities(logits.double(), self.sampling, self._history(text, self.sampling))
            yield self._folded(p, 0.0, lambda ends: ends.sum(1)), self._tokens(text)

    def possible(self, texts: Sequence[EngineText]) -> Iterator[Tensor]:
        """Yield, for each text, a mask of the tokens that slightly looser controls allow, because rounding moves the
        border of top-k, top-p and min-p.
        """
        loose = 1e-4 if self.target.dtype == torch.float32 else 1e-2
        sampling = replace(
            self.sampling,
            top_k=self.sampling.top_k + bool(self.sampling.top_k),
            top_p=min(1.0, self.sampling.top_p + loose),
            min_p=self.sampling.min_p * (1 - loose),
            typical_p=min(1.0, self.sampling.typical_p + loose),
        )
        for p, tokens in replace(self, sampling=sampling).probabilities(texts):
            yield p.gather(1, tokens[:, None]).squeeze(1) > 0

    def margins(self, texts: Sequence[EngineText]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each text, the gap between each token's logit and the best logit, and the best token; both have
        the shape (tokens,).
        """
        greedy = replace(self.sampling, temperature=0.0)
        for text, logits in zip(texts, self._logits(texts), strict=True):
            scores = adjusted_logits(logits, greedy, self._history(text, greedy)).float()
            scores = self._folded(scores, -torch.inf, lambda ends: ends.amax(1))
            own = scores.gather(1, self._tokens(text)[:, None]).squeeze(1)
            yield scores.amax(1) - own, scores.argmax(1)

    def after(self, texts: Sequence[tuple[int, ...]], prompt_length: int) -> Float[Tensor, "texts vocab"]:
        """Return the next-token distribution after each text; its first ``prompt_length`` tokens are the prompt."""
        one = [EngineText(text[:prompt_length], (*text[prompt_length:], 0)) for text in texts]
        return torch.stack([p[-1] for p, _ in self.probabilities(one)])

    def _tokens(self, text: EngineText) -> Int[Tensor, " tokens"]:
        ends = self.eos_token_ids
        folded = [ends[0] if token in ends else token for token in text.tokens]
        return torch.tensor(folded, device=self.target.device)

    def _folded(
        self, values: Float[Tensor, "tokens vocab"], nothing: float, together: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "tokens vocab"]:
        """Combine the values of all EOS ids with the function ``together``. The result is at the first EOS id, and
        ``nothing`` is at the other EOS ids.
        """
        if len(self.eos_token_ids) < 2:
            return values
        ends = torch.tensor(self.eos_token_ids, device=values.device)
        folded = values.index_fill(1, ends, nothing)
        folded[:, ends[0]] = together(values[:, ends])
        return folded

    def _history(self, text: EngineText, sampling: SamplingConfig) -> HistoryRows | None:
        if not sampling.needs_history:
            return None
        target = self.target
        history = History(sampling, len(text.prompt), target.vocab_size, target.device)
        return history.at(text.prompt, TokenTree.chain([text.prompt[-1], *text.tokens[:-1]]))

    @torch.inference_mode()
    def _logits(self, texts: Sequence[EngineText]) -> Iterator[Tensor]:
        """Yield, for each text, the logits that predict its tokens, of shape (tokens, vocab)."""
        model: Any = self.target.model
        can_cut = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        for group in _groups(texts):
            rows = [[*text.prompt, *text.tokens[:-1]] for text in group]
            longest = max(map(len, rows))
            first = min(len(text.prompt) for text in group) - 1
            # Padding on the right is invisible under causal attention.
            ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.target.device)
            cut = {"logits_to_keep": longest - first} if can_cut else {}
            logits = model(input_ids=ids, use_cache=False, **cut).logits[:, -(longest - first) :]
            for text, row in zip(group, logits, strict=True):
                start = len(text.prompt) - 1 - first
                yield row[start : start + len(text.tokens)]


def _groups(texts: Sequence[EngineText]) -> Iterator[list[EngineText]]:
    """Yield groups of consecutive texts that fit in one forward pass."""
    group: list[EngineText] = []
    longest = 0
    for text in texts:
        longer = max(longest, len(text.prompt) + len(text.tokens))
        if group and longer * (len(group) + 1) > _TOKENS:
            yield group
            group, longer = [], len(text.prompt) + len(text.tokens)
        group.append(text)
        longest = longer
    if group:
        yield group
