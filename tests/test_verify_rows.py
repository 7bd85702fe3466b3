"""The rules for all rows at once: the readable rules' verdicts from the same numbers, in one transfer to the host."""

import ast
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decoding.drafters import Drafter, DraftModelDrafter, MedusaDrafter, PromptLookupDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.proof.enumeration import ALL_MODELS, draft_of, model_pair, target_rows
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules import traversal_rows, verify_rows
from decoding.rules.decide import ROW_RULES, decide
from decoding.rules.drawing import GeneratorSource
from decoding.rules.history import History
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import HistoryRows, SamplingConfig, probabilities
from decoding.rules.tree import TokenTree, TreeShape
from decoding.rules.verify import RULES, UNDRAWN, Verdict, lossless_rule

VOCAB, DEEPEST = 3, 3
SAMPLING, PENALISED = SamplingConfig(1.0), SamplingConfig(1.0, repetition_penalty=3.0)
AT_ONCE = [name for name, rule in RULES.items() if rule.decide in ROW_RULES]


@contextmanager
def at_once() -> Iterator[None]:
    """Rules decide all rows at once on the CPU too, as on a device."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("decoding.rules.decide._pays", lambda *_: True)
        yield


class Sample(NamedTuple):
    """A batch to verify: proposals, and the logits of their nodes, padded."""

    proposals: list[Proposal]
    logits: Tensor


def sample(rule: str, seed: int, dtype: torch.dtype) -> Sample:
    """A batch of 2 to 5 rows of kinds that the rule takes, of all sizes, some with the root alone."""
    generator = torch.Generator().manual_seed(seed)

    def below(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    proposals, rows = [], []
    kinds = sorted(RULES[rule].kinds, key=lambda kind: kind.value)
    for row in range(2 + below(4)):
        p, q = model_pair(ALL_MODELS[below(len(ALL_MODELS))], VOCAB, DEEPEST + 1, seed=below(50))
        parents = [-1]
        while len(parents) < 1 + below(6):
            parent = len(parents) - 1 if RULES[rule].chains_only else below(len(parents))
            shape = TreeShape((*parents, parent))
            if shape.max_depth > DEEPEST or max(map(len, shape.children)) > VOCAB:
                break
            parents.append(parent)
        drafted = draft_of(kinds[below(len(kinds))], TreeShape(tuple(parents)), q)(source_of(seed, row))
        rows.append(target_rows(drafted.tree, p).log().to(dtype))
        carried = None if drafted.q is None else drafted.q.to(dtype)
        on_device = TokenTree(drafted.tree.tokens, drafted.tree.shape)  # its tokens come over with the verdicts
        proposals.append(Proposal(on_device, drafted.kind, carried, drafted.drawn))
    return Sample(proposals, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))


def source_of(seed: int, row: int) -> GeneratorSource:
    return GeneratorSource.from_seed(seed, row)


def histories(batch: Sample, sampling: SamplingConfig) -> list[HistoryRows]:
    """Histories of texts of which all are a prompt: one token, and the root."""
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
        of_row = RULES[rule] if len(proposal.tree) > 1 else lossless_rule(proposal)
        p = probabilities(batch.logits[row, : len(proposal.tree)], sampling, history)
        verdicts.append(of_row(proposal, p, source))
    return verdicts


def differs(rule: str, seed: int, dtype: torch.dtype = torch.float64) -> str | None:
    """What the rows at once have otherwise than the readable rule: a verdict, or the place in a source's numbers."""
    batch = sample(rule, seed, dtype)
    sampling = (SAMPLING, PENALISED)[seed % 2]
    alone, together = ([source_of(-seed - 1, row) for row in range(len(batch.proposals))] for _ in range(2))
    wanted = row_by_row(rule, batch, alone, sampling)
    history = HistoryRows.cat(histories(batch, sampling)) if sampling.needs_history else None
    with at_once():
        found = decide(batch.proposals, batch.logits, sampling, RULES[rule], history, together)
    if found != wanted:
        return f"verdicts {found}, not {wanted}"
    if [source.uniform() for source in alone] != [source.uniform() for source in together]:
        return "another count of numbers was taken"
    return None


@pytest.mark.parametrize("waits", [True, False], ids=["on the host", "as on a device"])
@pytest.mark.parametrize("rule", AT_ONCE)
@given(seed=st.integers(0, 2**20), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_rows_at_once_have_the_readable_rules_verdicts(rule: str, waits: bool, seed: int, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if not waits:
            patched.setattr(verify_rows, "_still", lambda walking, rows: rows.every)
        assert differs(rule, seed, dtype) is None


def test_the_batches_compared_hold_every_kind_and_every_length_of_path() -> None:
    batches = {rule: [sample(rule, seed, torch.float32) for seed in range(12)] for rule in AT_ONCE}
    for rule, of_rule in batches.items():
        assert {each.kind for batch in of_rule for each in batch.proposals} >= RULES[rule].kinds
        verdicts = []
        for seed, batch in enumerate(of_rule):
            verdicts += row_by_row(rule, batch, [source_of(seed, row) for row in range(len(batch.proposals))])
        assert {len(verdict.path) for verdict in verdicts} >= {0, 1, 2}
        assert {len(proposal.tree) for batch in of_rule for proposal in batch.proposals} >= {1, 2, 3, 4}


# --- mutants --------------------------------------------------------------------------------------------------------

MUTANTS = {
    "a walk by the uniform of another depth": ("sampled-verify", "uniforms[here, depth]", "uniforms[here, 0]"),
    "a child of any node": ("sampled-verify", "(parents[here] == at[:, None]) &", "(parents[here] >= 0) &"),
    "a residual without the draft": ("token", "(p - chains.q[rows.every, kept.clamp(max=places - 1)])", "p"),
    "a test that takes no number": ("token", "tested = kept + ~whole", "tested = kept"),
    "a prefix by the whole chain's number": ("block", "(before - 1).clamp(min=0)", "0 * before"),
    "prefixes from the shortest up": (
        "block",
        "length - torch.arange(1, places, ",
        "0 * length + torch.arange(1, places, ",
    ),
    "a token from p behind a prefix": ("block", "from_p = whole | ~(masses", "from_p = whole | (masses"),
    "a rejected child that stays": ("traversal", "residual /= rest.to(residual.dtype)[:, None]", "pass"),
    "a node tested before its children": ("traversal", "found[:0:-1]", "found[1:]"),
    "q with the drawn sibling": ("traversal", "q[:count].scatter_(1, before[:count], 0.0)", "pass"),
    "a number for a test of probability 0": ("traversal", "takes = odds > 0", "takes = odds >= 0"),
}


@contextmanager
def mutated(rule: str, was: str, becomes: str) -> Iterator[None]:
    """The rules for rows with one place reading differently."""
    copies: dict[str, dict[str, Any]] = {}
    changed = 0
    for module in (verify_rows, traversal_rows):
        source = Path(str(module.__file__)).read_text()
        changed += source.count(was)
        copy = dict(vars(module)) | copies.get("decoding.rules.verify_rows", {})
        body = [
            node
            for node in ast.parse(source.replace(was, becomes)).body
            if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.ClassDef) and node.name == "_Chains")
        ]
        exec(compile(ast.Module(body, []), "mutant", "exec"), copy)
        copies[module.__name__] = {node.name: copy[node.name] for node in body}
    assert changed == 1, f"{was!r} stands {changed} times in the rules for rows: see their mutants"
    functions = {name: function for copy in copies.values() for name, function in copy.items()}
    with pytest.MonkeyPatch.context() as patched:
        plain = RULES[rule].decide
        patched.setitem(ROW_RULES, plain, functions[ROW_RULES[plain].__name__])
        yield


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_catches_rows_with_one_thing_wrong(name: str) -> None:
    rule = MUTANTS[name][0]
    assert not any(differs(rule, seed) for seed in range(3))
    with mutated(*MUTANTS[name]):
        assert any(found_wrong(rule, seed) for seed in range(60))


def test_the_comparison_catches_rows_that_forget_the_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(rows: verify_rows.TargetRows, nodes: Tensor) -> Tensor:
        return probabilities(rows.logits[nodes], SAMPLING)

    monkeypatch.setattr(verify_rows.TargetRows, "at", at)
    for rule in AT_ONCE:
        assert any(differs(rule, seed) for seed in range(1, 40, 2)), rule


def found_wrong(rule: str, seed: int) -> bool:
    try:
        return differs(rule, seed) is not None
    except (AssertionError, ValueError):
        return True


# --- transfers ------------------------------------------------------------------------------------------------------


class Transfers(TorchDispatchMode):
    """Counts what would make the host wait for a device: numbers and lists read, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "equal")
        return function(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        plain = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            self.count += tensor.dtype != torch.float64  # a source's own numbers are made on the host
            return plain(tensor)

        with pytest.MonkeyPatch.context() as patched, at_once(), self:
            patched.setattr(Tensor, "tolist", tolist)
            patched.setattr(verify_rows, "_still", lambda walking, rows: rows.every)  # as on a device
            yield


def drafters() -> dict[str, tuple[Drafter | None, float, int]]:
    """Drafters, temperatures, and the transfers of a step."""
    draft = CausalLM(tiny_model("llama", vocab=24, seed=2))
    heads = MedusaHeads.for_target(
        tiny_model("llama", vocab=24), MedusaConfig(16, 24, 2, tree=((0,), (1,), (0, 0), (0, 1), (1, 0)))
    )
    chain = MedusaConfig(16, 24, 2, tree=((0,), (0, 0)))
    return {
        "plain": (None, 1.0, 1),
        "greedy chain": (DraftModelDrafter(draft), 0.0, 1),
        "drawn chain": (DraftModelDrafter(draft), 1.0, 1),
        "chain of likeliest tokens": (DraftModelDrafter(draft, sampled=False), 1.0, 1),
        "deterministic heads": (MedusaDrafter(heads, sampled=False), 1.0, 1),
        "lookup": (PromptLookupDrafter(3), 1.0, 1),
        # Which children a draw leaves over decides the tree: its tokens come to the host before the target's pass.
        "drawn heads": (MedusaDrafter(heads), 1.0, 2),
        "chain of drawn heads": (MedusaDrafter(MedusaHeads.for_target(draft.model, chain)), 1.0, 2),
    }


@pytest.mark.parametrize("name", drafters())
def test_a_step_of_a_batch_waits_for_the_device_once_and_for_drawn_trees_twice(name: str) -> None:
    drafter, temperature, wanted = drafters()[name]
    target = CausalLM(tiny_model("llama", vocab=24))
    prompts = [[1, 2, 3, 1, 2], [4, 5, 4], [7, 8, 9, 7, 8, 9], [3, 3, 3]]
    config = DecodingConfig(24, SamplingConfig(temperature))
    steps = Engine(target, drafter).steps(prompts, config, batch_size=4)
    assert all(step.is_prefill for _, step in itertools.islice(steps, 4))
    for _ in range(3):
        transfers = Transfers()
        with transfers.counting():
            list(itertools.islice(steps, 4))
        assert transfers.count == wanted


@pytest.mark.parametrize(
    ("rule", "roots", "chains", "walks"),
    [("sampled-verify", 40, 0, 0), ("sampled-verify", 40, 15, 0), ("sampled-verify", 3, 16, 19), ("block", 0, 40, 0)],
)
def test_on_the_cpu_sixteen_drafts_walk_at_once_and_all_else_is_decided_row_by_row(
    rule: str, roots: int, chains: int, walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    of_rows = ROW_RULES[RULES[rule].decide]
    monkeypatch.setitem(ROW_RULES, RULES[rule].decide, lambda rows: seen.append(len(rows)) or of_rows(rows))
    chain = Proposal(TokenTree.chain([0, 1]), ProposalKind.DETERMINISTIC)
    proposals = [*[Proposal.root_only(0)] * roots, *[chain] * chains]
    sources = [source_of(0, row) for row in range(len(proposals))]
    decide(proposals, torch.zeros(len(proposals), 2, VOCAB), SAMPLING, RULES[rule], None, sources)
    assert sum(seen) == walks


def test_a_chain_deeper_than_pythons_stack_is_planned() -> None:
    assert traversal_rows._tested(TreeShape.chain(3000)) == list(range(3000, 0, -1))
    assert traversal_rows._tested(TreeShape((-1, 0, 0, 1, 1, 2))) == [3, 4, 1, 5, 2]


def test_a_token_whose_recorded_q_is_zero_is_our_own_bug_in_any_row() -> None:
    undrawn = Proposal(TokenTree.chain([0, 1]), ProposalKind.SAMPLED, torch.tensor([[1.0, 0.0]]))
    drawn = Proposal(TokenTree.chain([0, 0]), ProposalKind.SAMPLED, torch.tensor([[1.0, 0.0]]))
    for rule in ("token", "block", "traversal"):
        with pytest.raises(AssertionError, match=UNDRAWN), at_once():
            decide(
                [drawn, undrawn],
                torch.zeros(2, 2, 2),
                SAMPLING,
                RULES[rule],
                None,
                [source_of(0, row) for row in (0, 1)],
            )


def test_rows_refuse_a_target_without_any_weight() -> None:
    logits = torch.stack([torch.zeros(1, 3), torch.full((1, 3), torch.nan)])
    roots = [Proposal.root_only(0), Proposal.root_only(0)]
    with pytest.raises(ValueError, match="no token has any weight: loosen the controls"), at_once():
        decide(roots, logits, SAMPLING, None, None, [source_of(0, row) for row in (0, 1)])
