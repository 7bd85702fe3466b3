"""Verdicts for whole batches equal the verdicts of the readable rules with the same random numbers."""

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples, few
from torch import Tensor

import decoding.rules.at_once as batches
import decoding.rules.decide as deciding
from decoding.measure.proof.enumeration import (
    ALL_MODELS,
    ContextModel,
    contexts,
    draft_of,
    grafted_draft,
    model_pair,
    sampled_draft,
    target_rows,
)
from decoding.rules.decide import decide
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import History, HistoryRows, SamplingConfig, probabilities
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, TreeShape
from decoding.rules.verify import RULES, Verdict, lossless_rule, typical_acceptance

VOCAB, DEEPEST = 3, 3
DRAWN = (ProposalKind.SAMPLED, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT)
pair = cache(model_pair)
SAMPLING, PENALISED = SamplingConfig(1.0), SamplingConfig(1.0, repetition_penalty=3.0)
# This rule decides by entropy, which never happens with the published thresholds and this vocabulary.
KNOWN = RULES | {"typical by entropy": typical_acceptance(0.9, 0.9)}
NAMES = [name for name in KNOWN if name != "greedy"]


@contextmanager
def at_once(on_device: bool = False) -> Iterator[None]:
    """Decide rows together, however few there are; ``on_device`` means without checking which rows are finished."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deciding, "_pays", lambda *_: True)
        if on_device:
            patched.setattr(batches, "_still", lambda walking: slice(None))
        yield


class Sample(NamedTuple):
    """A batch to verify: proposals, and the padded logits of their nodes."""

    proposals: list[Proposal]
    logits: Tensor


def sample(rule: str, seed: int, dtype: torch.dtype) -> Sample:
    """Make a batch of 2 to 5 rows of all sizes, of kinds that the rule accepts; some rows consist of only the root.

    Half of the batches are of one kind, and a quarter consist of chains.
    """
    generator = torch.Generator().manual_seed(seed)

    def below(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    proposals, rows = [], []
    kinds = sorted(KNOWN[rule].kinds, key=lambda kind: kind.value)
    kinds = [kinds, kinds, kinds[-1:], [kinds[below(len(kinds))]]][below(4)]
    chains = KNOWN[rule].chains_only or below(4) == 0
    for row in range(2 + below(4)):
        p, q = pair(ALL_MODELS[below(len(ALL_MODELS))], VOCAB, DEEPEST + 1, seed=below(50))
        parents = [-1]
        while len(parents) < 1 + below(6):
            parent = len(parents) - 1 if chains else below(len(parents))
            shape = TreeShape((*parents, parent))
            if shape.max_depth > DEEPEST or max(map(len, shape.children)) > VOCAB:
                break
            parents.append(parent)
        drafted = draft(kinds[below(len(kinds))], TreeShape(tuple(parents)), q, source_of(seed, row), below)
        rows.append(target_rows(drafted.tree, p).log().to(dtype))
        carried = None if drafted.q is None else drafted.q.to(dtype)
        on_device = TokenTree(drafted.tree.tokens, drafted.tree.shape)  # transferred together with the verdicts
        proposals.append(Proposal(on_device, drafted.kind, carried, drafted.drawn))
    return Sample(proposals, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))


def draft(
    kind: ProposalKind, shape: TreeShape, q: ContextModel, source: GeneratorSource, below: Callable[[int], int]
) -> Proposal:
    """Make a draft of the kind; a grafted draft gets a lookup that follows a drawn path and goes beyond its end."""
    if kind is not ProposalKind.GRAFTED or len(shape) == 1:
        return draft_of(kind, shape, q)(source)
    drawn = sampled_draft(shape, q, DRAWN[below(2)])(source)
    path = contexts(drawn.tree)[below(len(drawn.tree))]
    looked_up = [*path, *(below(VOCAB) for _ in range(DEEPEST + 1 - len(path)))]
    return grafted_draft(lambda _: drawn, looked_up)(source)


def source_of(seed: int, row: int) -> GeneratorSource:
    return GeneratorSource.from_seed(seed, row)


def histories(batch: Sample, sampling: SamplingConfig) -> list[HistoryRows]:
    """Make histories of texts that consist of a prompt: one token and the root."""
    found = []
    for row, proposal in enumerate(batch.proposals):
        text = [row % VOCAB, int(proposal.tree.tokens[0])]
        found.append(History(sampling, len(text), VOCAB, "cpu").at(text, proposal.tree))
    return found


def row_by_row(
    rule: str, batch: Sample, sources: Sequence[GeneratorSource], sampling: SamplingConfig = SAMPLING
) -> list[Verdict]:
    verdicts = []
    rows = zip(batch.proposals, sources, histories(batch, sampling), strict=True)
    for row, (proposal, source, history) in enumerate(rows):
        of_row = KNOWN[rule] if len(proposal.tree) > 1 else lossless_rule(proposal)
        p = probabilities(batch.logits[row, : len(proposal.tree)], sampling, history)
        verdicts.append(of_row(proposal, p, source))
    return verdicts


def differs(rule: str, seed: int, dtype: torch.dtype = torch.float64, on_device: bool = False) -> str | None:
    """Return how a batch differs from the readable rule: in a verdict, or in the position of a source."""
    batch = sample(rule, seed, dtype)
    sampling = (SAMPLING, PENALISED)[seed % 2]
    alone, together = ([source_of(-seed - 1, row) for row in range(len(batch.proposals))] for _ in range(2))
    wanted = row_by_row(rule, batch, alone, sampling)
    history = HistoryRows.cat(histories(batch, sampling)) if sampling.needs_history else None
    with at_once(on_device):
        found = decide(batch.proposals, batch.logits, sampling, KNOWN[rule], history, together)
    if found != wanted:
        return f"verdicts {found}, not {wanted}"
    if [source.uniform() for source in alone] != [source.uniform() for source in together]:
        return "another count of numbers was taken"
    return None


@pytest.mark.parametrize("rule", NAMES)
@examples(200)
@given(
    seed=st.integers(0, 2**20), dtype=st.sampled_from([torch.float32, torch.float64]), on_device=st.sampled_from([0, 1])
)
def test_a_batch_has_the_readable_rules_verdicts(rule: str, seed: int, dtype: torch.dtype, on_device: int) -> None:
    assert differs(rule, seed, dtype, bool(on_device)) is None


# --- mutants --------------------------------------------------------------------------------------------------------

MUTANTS = {
    "a walk by the uniform of another depth": ("sampled-verify", "uniforms[here, depth]", "uniforms[here, 0]"),
    "a child of any node": ("sampled-verify", "(parents[here] == at[:, None]) &", "(parents[here] >= 0) &"),
    "a number too many": ("recursive", "number[:, 0] + 1", "number[:, 0] + 2"),
    "a try by the number of another": ("recursive", "before[node] + rank, before", "before[node], before"),
    "a second child of a node kept": (
        "recursive",
        "open_[parents] = kept, tried & ~kept",
        "open_[parents] = kept, tried",
    ),
    "a token tried that left q": ("recursive", "scatter(1, token[leaving], 0)", "clone()"),
    "a draw from p after a rejection": (
        "recursive",
        "torch.where(tried[:, None] & (total > 0), residual / total, now)",
        "now",
    ),
    "a climb that forgets what was kept above": ("block", "p_token[:, depth] * entered[-1] /", "p_token[:, depth] /"),
    "a climb that keeps nothing": ("block", "& (kept > 0)\n    before", "& (kept > 2)\n    before"),
    "a climb that draws from p after a rejection": ("block", "torch.where(ends, whole, rest)", "whole"),
    "a climb that asks from the root down": ("block", "asked.flip(1).cumsum(1).flip(1)", "asked.cumsum(1)"),
    "a climb onto what was looked up": ("traversal", ", ProposalKind.GRAFTED}", "}"),
    "an A that forgets what was kept above": ("traversal", "inner[children], ratio, 1", "inner[children], 1, 1"),
    "nodes that are never kept": ("traversal", "(chance > 0) & (order > 0)", "(chance > 2) & (order > 0)"),
    "nodes asked from the root down": ("traversal", "return order[::-1]", "return order"),
    "a node kept below one that is not": ("typical", "root | (keeps & reached.gather(1, parents))", "root | keeps"),
    "a threshold without the entropy": (
        "typical by entropy",
        "torch.exp(torch.special.xlogy(p, p).sum(-1))",
        "torch.ones_like(p[:, 0])",
    ),
    "the first path of the longest": (
        "typical",
        "reached & (depths == longest), likelihood",
        "reached & (depths == longest), 1",
    ),
}
"""Changes of the file, each with a rule that the change breaks."""


def found_wrong(rule: str, seed: int) -> bool:
    try:
        return differs(rule, seed) is not None
    except (AssertionError, RuntimeError, ValueError):
        return True


@pytest.mark.parametrize("name", few(MUTANTS, [*MUTANTS][::4]))
def test_the_comparison_catches_decisions_with_one_thing_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, was, becomes = MUTANTS[name]
    assert not any(differs(rule, seed) for seed in range(3))
    source, mutant = Path(str(batches.__file__)).read_text(), types.ModuleType("mutant")
    assert source.count(was) == 1
    exec(compile(source.replace(was, becomes), "mutant", "exec"), vars(mutant))
    monkeypatch.setattr(deciding, "at_once", mutant.at_once)
    assert any(found_wrong(rule, seed) for seed in range(300))
