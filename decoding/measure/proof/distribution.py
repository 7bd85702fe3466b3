"""Tests of sampled texts: mean log-probability of their tokens, counts of next tokens and of short continuations."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.measure.proof.finding import Finding, judged, undecided
from decoding.measure.proof.reference import EngineText, Reference
from decoding.measure.proof.statistics import Cells, CountTest, LogProbability

DEPTH = 3
"""Tokens of a short continuation: the first comes from the prefill, the next from speculation."""
_CELL = 5.0
"""Draws that are expected in a cell of its own."""
_CONTEXT = 25.0
"""Draws that are expected after a beginning whose next tokens are counted."""
TESTS = 2 + DEPTH
"""Tests with a p-value: log-probability, the next token at each position, continuations."""


def log_probability(reference: Reference, texts: Sequence[EngineText], alpha: float) -> Finding:
    """Compare the mean log-probability of the tokens with its expectation under the target."""
    total, loose = LogProbability.none(), 0
    for text, (p, tokens) in zip(texts, reference.probabilities(texts), strict=True):
        found = LogProbability.of(p, tokens)
        if found.impossible:
            (allowed,) = reference.possible([text])
            border = allowed & (p.gather(1, tokens[:, None]).squeeze(1) == 0)
            loose += int(border.sum())
            found = found._replace(impossible=found.impossible - int(border.sum()))
        total = total.plus(found)
    p_value = total.p_value
    seen = (
        f"{total.tokens:,} tokens, mean log-probability {total.shift:+.3f} nats from its expectation "
        f"(standard error {total.standard_error:.3f}, z = {total.z:+.1f})"
    )
    if total.impossible:
        seen += f"; {total.impossible} tokens have probability 0 under the target's controls"
    if loose:
        seen += f"; {loose} at the border of top-k, top-p or min-p are left out"
    return judged(
        "mean log-probability",
        p_value >= alpha,
        f"p {written_p(p_value)}: {seen}",
        p_value=p_value,
        tokens=total.tokens,
        shift=total.shift,
        standard_error=total.standard_error,
        z=total.z,
        impossible=total.impossible,
        at_the_border=loose,
    )


def written_p(value: float) -> str:
    """Write a p-value with its sign: ``= 0.031``, ``< 1.0e-09``."""
    return "= 0" if value == 0 else "= 1" if value == 1 else f"< {value:.1e}" if value < 1e-3 else f"= {value:.3f}"


@dataclass(frozen=True, eq=False)
class Continuations:
    """The likely beginnings of the texts that follow a prompt, chosen by the target alone, each with its next p."""

    p_after: dict[tuple[int, ...], Tensor]
    """(vocab,) in fp64, by the tokens behind the prompt; () is the prompt itself."""
    draws: int

    @staticmethod
    def of(reference: Reference, prompt: Sequence[int], draws: int, depth: int = DEPTH) -> "Continuations":
        """Compute p after each beginning of fewer than ``depth`` tokens expected ``_CONTEXT`` times."""
        p_after: dict[tuple[int, ...], Tensor] = {}
        level: dict[tuple[int, ...], float] = {(): float(draws)}
        for length in range(depth):
            rows = reference.after([(*prompt, *path) for path in level], len(prompt)).cpu()  # as the counts are
            p_after |= dict(zip(level, rows, strict=True))
            if length < depth - 1:
                level = {
                    (*path, token): expected * float(row[token])
                    for (path, expected), row in zip(level.items(), rows, strict=True)
                    for token in (row * expected >= _CONTEXT).nonzero().flatten().tolist()
                    if token not in reference.eos_token_ids
                }
            if not level:
                break
        return Continuations(p_after, draws)

    def next_tokens(self, texts: Sequence[tuple[int, ...]], position: int) -> list[Cells]:
        """Return the counts of the tokens at a position (from 1), in each beginning apart."""
        found = []
        for path, p in self.p_after.items():
            if len(path) == position - 1:
                follow = [text[len(path)] for text in texts if text[: len(path)] == path and len(text) > len(path)]
                counts = torch.bincount(torch.tensor(follow, dtype=torch.long), minlength=len(p))
                found.append(Cells.pooled(counts, p))
        return found

    def whole(self, texts: Sequence[tuple[int, ...]]) -> Cells:
        """Return the counts of whole continuations; those that are expected too seldom are counted together."""
        cells: dict[tuple[int, ...], float] = {}
        reached: dict[tuple[int, ...], float] = {(): 1.0}
        for path, p in self.p_after.items():  # parents before children
            for token in (p * reached[path] * self.draws >= _CELL).nonzero().flatten().tolist():
                longer = (*path, token)
                if longer in self.p_after:
                    reached[longer] = reached[path] * float(p[token])
                else:
                    cells[longer] = reached[path] * float(p[token])
        counts = Counter(next((text[:n] for n in range(1, DEPTH + 1) if text[:n] in cells), ()) for text in texts)
        rest = max(0.0, 1 - sum(cells.values()))
        values = [counts[path] for path in cells] + [counts[()]]
        return Cells(torch.tensor(values, dtype=torch.float64), torch.tensor([*cells.values(), rest]).double())


def open_beginnings(reference: Reference, texts: Sequence[EngineText], count: int) -> list[tuple[int, ...]]:
    """Return the beginnings of ``count`` texts, cut where the next `DEPTH` tokens have about one nat of entropy each.

    There a few continuations share most of the draws: where all were likely, or one alone, counts would show little.
    """
    found = []
    texts = [text for text in texts if text.tokens]
    for text, (p, _) in zip(texts, reference.probabilities(texts), strict=True):
        entropy = -torch.special.xlogy(p, p).sum(1)
        unlike = (entropy - 1).abs()
        windows = unlike.unfold(0, DEPTH, 1).sum(1) if len(unlike) >= DEPTH else unlike[:1]
        place = int(windows.argmin())
        found.append((float(windows[place]), (*text.prompt, *text.tokens[:place])))
    return [beginning for _, beginning in sorted(found)[:count]]


def next_tokens(
    reference: Reference, drawn: dict[tuple[int, ...], list[tuple[int, ...]]], alpha: float
) -> list[Finding]:
    """Compare texts drawn many times after the same prompts, by prompt, with the target: a finding for each test."""
    ends = reference.eos_token_ids
    folded = {
        prompt: [tuple(ends[0] if token in ends else token for token in text) for text in texts]
        for prompt, texts in drawn.items()
    }
    known = {prompt: Continuations.of(reference, prompt, len(texts)) for prompt, texts in folded.items()}
    findings = []
    for position in range(1, DEPTH + 1):
        contexts = [cells for prompt in folded for cells in known[prompt].next_tokens(folded[prompt], position)]
        findings.append(_of_counts(f"next token, position {position}", CountTest.of(contexts), len(contexts), alpha))
    every = [known[prompt].whole(folded[prompt]) for prompt in folded]
    return [*findings, _of_counts(f"continuations of {DEPTH} tokens", CountTest.of(every), len(every), alpha)]


def _of_counts(check: str, found: CountTest, contexts: int, alpha: float) -> Finding:
    if not found.degrees and not found.impossible:
        return undecided(check, f"{found.draws:,} draws after likely beginnings are too few: give more --draws")
    seen = (
        f"p {written_p(found.p_value)}: {found.draws:,} draws in {contexts} contexts, chi-square "
        f"{found.chi_square:.1f} at {found.degrees} degrees of freedom"
    )
    if found.impossible:
        seen += "; tokens of probability 0 were drawn"
    return judged(
        check,
        found.p_value >= alpha,
        seen,
        p_value=found.p_value,
        draws=found.draws,
        contexts=contexts,
        chi_square=found.chi_square,
        degrees=found.degrees,
        chi_square_p=found.chi_square_p,
    )
