"""Tests of sampled texts, by the mean log-probability of their tokens and by counts of next tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.measure.proof.finding import Finding, judged, undecided
from decoding.measure.proof.reference import EngineText, Reference
from decoding.measure.proof.statistics import Cells, CountTest, LogProbability

DEPTH = 3
"""Number of tokens of a short continuation; the first comes from the prefill, and the others come from speculation."""
_CONTEXT = 25.0
"""Next tokens are counted after a beginning if at least this many draws are expected to begin in that way."""
TESTS = 1 + DEPTH
"""Number of tests with a p-value: the log-probability, and the next token at each position of a continuation."""


def log_probability(reference: Reference, texts: Sequence[EngineText], alpha: float) -> Finding:
    """Compare the mean log-probability of the tokens with its expectation under the target."""
    total, loose = LogProbability.none(), 0
    for text, (p, tokens) in zip(texts, reference.probabilities(texts), strict=True):
        of_text = LogProbability.of(p, tokens)
        if of_text.impossible:
            (allowed,) = reference.possible([text])
            border = allowed & (p.gather(1, tokens[:, None]).squeeze(1) == 0)
            loose += int(border.sum())
            of_text = of_text._replace(impossible=of_text.impossible - int(border.sum()))
        total = total.plus(of_text)
    p_value, least = total.p_value, total.least_found(alpha)
    seen = (
        f"in {total.tokens:,} tokens the mean log-probability is {total.shift:+.3f} nats from its expectation "
        f"(standard error {total.standard_error:.3f}, z = {total.z:+.1f}; a shift of {least:.2f} would be detected)"
    )
    if total.impossible:
        seen += f"; {total.impossible} tokens have probability 0 under the target's controls"
    if loose:
        seen += f"; {loose} tokens at the border of top-k, top-p or min-p are excluded"
    return judged(
        "mean log-probability",
        p_value >= alpha,
        f"p {written_p(p_value)}: {seen}",
        p_value=p_value,
        tokens=total.tokens,
        shift=total.shift,
        least_found=least,
        standard_error=total.standard_error,
        z=total.z,
        impossible=total.impossible,
        at_the_border=loose,
    )


def written_p(value: float) -> str:
    """Format a p-value with its relation: ``= 0.031``, ``< 1.0e-09``."""
    return "= 0" if value == 0 else "= 1" if value == 1 else f"< {value:.1e}" if value < 1e-3 else f"= {value:.3f}"


def likely_beginnings(reference: Reference, prompt: Sequence[int], draws: int) -> dict[tuple[int, ...], Tensor]:
    """Return p, of shape (vocab,) in fp64, after each beginning of fewer than `DEPTH` tokens that is expected at least
    ``_CONTEXT`` times in ``draws`` texts.

    The target alone determines the beginnings; the empty beginning () is the prompt.
    """
    p_after: dict[tuple[int, ...], Tensor] = {}
    level: dict[tuple[int, ...], float] = {(): float(draws)}
    while level:
        rows = reference.after([(*prompt, *path) for path in level], len(prompt)).cpu()  # the counts are on the CPU too
        p_after |= dict(zip(level, rows, strict=True))
        level = {
            (*path, token): expected * float(row[token])
            for (path, expected), row in zip(level.items(), rows, strict=True)
            for token in (row * expected >= _CONTEXT).nonzero().flatten().tolist()
            if token not in reference.eos_token_ids and len(path) < DEPTH - 1
        }
    return p_after


def counts_after(path: tuple[int, ...], p: Tensor, texts: Sequence[tuple[int, ...]]) -> Cells:
    """Count the tokens that follow a beginning, in all texts that start with it."""
    follow = [text[len(path)] for text in texts if text[: len(path)] == path and len(text) > len(path)]
    return Cells.pooled(torch.bincount(torch.tensor(follow, dtype=torch.long), minlength=len(p)), p)


def open_beginnings(reference: Reference, texts: Sequence[EngineText], count: int) -> list[tuple[int, ...]]:
    """Return the beginnings of ``count`` texts. Each beginning is cut so that each of the next `DEPTH` tokens has an
    entropy of about one nat. There, a few continuations receive most draws. If very many continuations were likely, or
    only one, counts would show little.
    """
    beginnings = []
    texts = [text for text in texts if text.tokens]
    for text, (p, _) in zip(texts, reference.probabilities(texts), strict=True):
        entropy = -torch.special.xlogy(p, p).sum(1)
        unlike = (entropy - 1).abs()
        windows = unlike.unfold(0, DEPTH, 1).sum(1) if len(unlike) >= DEPTH else unlike[:1]
        index = int(windows.argmin())
        beginnings.append((float(windows[index]), (*text.prompt, *text.tokens[:index])))
    return [beginning for _, beginning in sorted(beginnings)[:count]]


def next_tokens(
    reference: Reference, drawn: dict[tuple[int, ...], list[tuple[int, ...]]], alpha: float
) -> list[Finding]:
    """Compare many texts drawn after each prompt with the target; return a finding for each position."""
    ends = reference.eos_token_ids
    folded = {
        prompt: [tuple(ends[0] if token in ends else token for token in text) for text in texts]
        for prompt, texts in drawn.items()
    }
    contexts: list[list[Cells]] = [[] for _ in range(DEPTH)]
    for prompt, texts in folded.items():
        for path, p in likely_beginnings(reference, prompt, len(texts)).items():
            contexts[len(path)].append(counts_after(path, p, texts))
    return [
        _of_counts(f"next token, position {position}", CountTest.of(cells), len(cells), alpha)
        for position, cells in enumerate(contexts, start=1)
    ]


def _of_counts(check: str, counts: CountTest, contexts: int, alpha: float) -> Finding:
    if not counts.degrees and counts.p_value:
        return undecided(check, f"only {counts.draws:,} draws follow likely beginnings: use more --draws")
    seen = f"p {written_p(counts.p_value)}: {counts.draws:,} draws in {contexts} contexts, {counts.degrees} free cells"
    return judged(check, counts.p_value >= alpha, seen, contexts=contexts, **counts._asdict())
