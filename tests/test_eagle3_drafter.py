"""EAGLE-3 drafts as drafters: in every row and after any step, the distribution at every node equals a plain forward
pass.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from drafter_checks import TREE, Follower, accept_some, check_greedy, check_static_shapes, check_to_the_last_position
from hypothesis_profiles import few
from tiny_eagle3 import logits_after, tiny_eagle3
from tiny_models import tiny_model
from torch import Tensor

from decoding.drafters import Drafter, Eagle3Drafter, Eagle3TreeDrafter
from decoding.drafters.eagle3 import Eagle3State
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal

FORMS: dict[str, dict[str, Any]] = {
    "no flags": {},
    "norm before the residual, norm before fc": {"norm_before_residual": True, "norm_before_fc": True},
    "norms of taps, norm of the output": {"fc_norm": True, "norm_output": True},
    "a reduced vocabulary": {"writes": (0, 2, 3, 5, 7, 11), "norm_before_residual": True},
    "a window, norms of queries and keys": {"sliding_window": 3, "qk_norm": True},
    "a window of all slots of the longest text": {"sliding_window": 19},
    "no grouped keys, one tap, another rope": {
        "num_key_value_heads": 2,
        "target_layer_ids": (1,),
        "rope_parameters": {"rope_theta": 300.0, "rope_type": "default"},
        "rms_norm_eps": 1e-2,
    },
}
DRAWN = SamplingConfig(1.0)


@pytest.fixture(scope="module")
def deep() -> CausalLM:
    """Make a target of four layers, of which three can be read."""
    return CausalLM(tiny_model(num_hidden_layers=4))


def distance(proposal: Proposal, draft: Eagle3Draft, target: CausalLM, text: list[int]) -> float:
    """Return the largest difference between the q of a drawn tree and the q of plain forward passes."""
    found = [0.0]
    for node, children in enumerate(proposal.tree.shape.children):
        if children:
            assert proposal.q is not None
            path = [proposal.tree.token_list[at] for at in proposal.tree.shape.path(node)]
            wanted = logits_after(draft, target, text, path).softmax(-1)
            found.append(float((proposal.q[proposal.q_rows[node]] - wanted).abs().max()))
    return max(found)


@pytest.mark.parametrize("tree", [None, TREE, ((0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 1, 1, 0))])
@pytest.mark.parametrize("form", FORMS)
def test_every_q_of_every_step_is_that_of_a_plain_forward(deep: CausalLM, form: str, tree: Any) -> None:
    """Rows have different lengths, and accept, reject, pause and move at random;
    one row grows by many tokens at once.
    """
    draft, chance = tiny_eagle3(deep, **FORMS[form]), random.Random(form)
    follower = Follower(Eagle3Drafter(draft, tree=tree), deep, DRAWN, rows=3)
    texts = [[3, 1, 4, 1, 5], [9], [chance.randrange(16) for _ in range(20)]]
    accepted = 0
    for step in range(6):
        proposals = follower.propose(*texts, depths=[chance.choice([0, 2, 9, 9]) for _ in texts])
        for text, proposal in zip(texts, proposals, strict=True):
            assert distance(proposal, draft, deep, text) < 2e-5
            grown = accept_some(proposal, chance)
            accepted += len(grown) - 1
            text += grown
        if step == 2:
            texts[1] += [chance.randrange(16) for _ in range(20)]
        if step == 3:
            follower.move(2, 0)
            texts = [texts[2], texts[1]]
    assert accepted > 5


def _normed(self: Eagle3Draft, states: Tensor) -> Tensor:
    normed: Tensor = self.norm(states)
    return normed


def _keeping(self: Eagle3State, first: int, texts: Any, states: Any, own: Any = Eagle3State._append) -> None:
    """Plant a fault: keep the key of the first drafted slot of the previous step instead of the key of the accepted
    token.
    """
    begin = self._lengths[0]
    held = self._keys[0, :, begin].clone()
    own(self, first, texts, states)
    if begin:
        self._keys[0, :, begin] = held


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, Eagle3Draft], object]] = {
    "the output's norm": lambda patch, draft: patch.setattr(Eagle3Draft, "recycled", _normed),
    "the residual's norm": lambda patch, draft: setattr(
        draft, "config", replace(draft.config, norm_before_residual=True)
    ),
    "taps in another order": lambda patch, draft: patch.setattr(
        Eagle3Draft, "fused", lambda self, states, own=Eagle3Draft.fused: own(self, states.roll(16, -1))
    ),
    "one position for all": lambda patch, draft: patch.setattr(
        Eagle3Draft, "_rotary", lambda self, positions, own=Eagle3Draft._rotary: own(self, positions * 0)
    ),
    "a window": lambda patch, draft: setattr(draft, "config", replace(draft.config, sliding_window=4)),
    "drafted slots that stay": lambda patch, draft: patch.setattr(Eagle3State, "_append", _keeping),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_plain_forward_tells_faults_apart(deep: CausalLM, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    draft, faulty = tiny_eagle3(deep), tiny_eagle3(deep)
    FAULTS[fault](monkeypatch, faulty)
    follower = Follower(Eagle3Drafter(faulty), deep, DRAWN)
    text, found = [3, 1, 4, 1, 5], []
    for _ in range(3):
        (proposal,) = follower.propose(text)
        found.append(distance(proposal, draft, deep, text))
        text += [*proposal.tree.token_list[1:3], 7]
    assert max(found) > 0.003


def test_a_step_reads_each_token_of_the_text_once_and_runs_one_slot_for_each_further_token(deep: CausalLM) -> None:
    draft = tiny_eagle3(deep)
    read, run = list[int](), list[tuple[int, ...]]()
    draft.fc.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    draft.register_forward_pre_hook(lambda module, args: run.append(tuple(args[0].shape[:2])))
    follower = Follower(Eagle3Drafter(draft, 3), deep)
    follower.propose(list(range(12)) * 2)
    assert read == [23] and run == [(1, 23), (1, 1), (1, 1)]
    follower.propose([*range(12), *range(12), 5], depths=[0])
    assert len(run) == 3, "nothing runs until something is drafted"
    follower.propose([*range(12), *range(12), 5, 6, 7])
    assert read == [23, 3] and run[3:] == [(1, 3), (1, 1), (1, 1)]


def test_the_best_first_tree_holds_the_likeliest_paths_of_plain_forwards(deep: CausalLM) -> None:
    draft, text = tiny_eagle3(deep, writes=(0, 2, 3, 5, 7, 11)), [3, 1, 4, 1, 5]
    follower = Follower(Eagle3TreeDrafter(draft, depth=2, width=6, nodes=9), deep)
    for _ in range(2):
        (proposal,) = follower.propose(text)
        scores = {}
        for token, score in enumerate(logits_after(draft, deep, text).log_softmax(-1).tolist()):
            after = logits_after(draft, deep, text, [token]).log_softmax(-1).tolist()
            scores |= {(token,): score, **{(token, other): score + more for other, more in enumerate(after)}}
        tree = proposal.tree
        found = {tuple(tree.token_list[at] for at in tree.shape.path(node)) for node in range(1, len(tree))}
        assert found == set(sorted(scores, key=lambda path: -scores[path])[:8])
        text += [*tree.token_list[1:2], 9]


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", few(["gemma3", "gpt2", "granite"], ["gemma3"]))
def test_targets_of_other_families_write_plain_greedy_too(family: str) -> None:
    """The families have scaled embeddings and logits, learned positions, and windows."""
    target = CausalLM(tiny_model(family))
    check_greedy(target, Eagle3Drafter(tiny_eagle3(target)), count=8)


@pytest.mark.parametrize("sampling", [SamplingConfig(), DRAWN], ids=["greedy", "T=1"])
@pytest.mark.parametrize(
    "drafter_of", [lambda draft: Eagle3Drafter(draft, tree=TREE), lambda draft: Eagle3TreeDrafter(draft, 3, 2, 7)]
)
def test_static_shapes_write_the_same_texts_with_the_same_counts(
    deep: CausalLM, sampling: SamplingConfig, drafter_of: Callable[[Eagle3Draft], Drafter]
) -> None:
    drafter = drafter_of(tiny_eagle3(deep))
    check_static_shapes(deep, drafter, sampling)


def test_a_text_to_the_last_of_the_targets_positions_is_drafted_for_to_its_end() -> None:
    target = CausalLM(tiny_model(max_position_embeddings=80))
    check_to_the_last_position(target, Eagle3Drafter(tiny_eagle3(target), 6))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": 32}, "a target whose hidden_size is 16, not 32"),
        ({"vocab": 20}, "a target whose vocab_size is 16, not 20"),
        ({"num_hidden_layers": 3}, "reads layer 2, but only layers 0 to 1 can be read"),
    ],
)
def test_a_target_of_other_sizes_is_refused(deep: CausalLM, changes: dict[str, Any], problem: str) -> None:
    other = CausalLM(tiny_model(**{"num_hidden_layers": 4, **changes}))
    with pytest.raises(ValueError, match=f"{problem}: use a draft trained on this target"):
        Engine(other, Eagle3Drafter(tiny_eagle3(deep))).decode([1, 2], DecodingConfig(4))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tokens": 0}, "tokens is 0: use at least 1"),
        ({"tokens": 2, "tree": [[0]]}, "tree and tokens are both given"),
        ({"tree": [[0], [5]]}, "the tree has 6 ranks, but the draft's vocabulary has 4 tokens: use fewer ranks"),
    ],
)
def test_drafts_that_cannot_be_drafted_are_refused(
    tiny_llama: CausalLM, settings: dict[str, Any], problem: str
) -> None:
    draft = tiny_eagle3(tiny_llama, writes=(0, 2, 3, 7))
    with pytest.raises(ValueError, match=problem):
        Eagle3Drafter(draft, **settings)
    with pytest.raises(ValueError, match="width is 5, but the draft's vocabulary has 4 tokens: use at most 4"):
        Eagle3TreeDrafter(draft, width=5)
