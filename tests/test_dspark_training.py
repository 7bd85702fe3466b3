"""The training of DSpark drafts: one forward pass of all blocks equals many plain passes,
and only labels are trained.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from dspark_training import TEXTS, TURNS, objective_for, reference_terms
from eagle3_training import eagle3_for
from tiny_dspark import logits_after, tiny_dspark
from tiny_models import counting_model, tiny_model
from torch import Tensor
from torch.nn import functional

from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import PairedDSpark
from trainer.data.batch import Example, collate, pack
from trainer.drafts.dspark_training import CONFIDENCE, DSparkObjective, block_logits, labels_of, sample_blocks
from trainer.target.loading import OnlineTarget

WINDOWS = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 3}


def gradients(objective: DSparkObjective) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in objective.module.draft.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "kind", "form"),
    [
        ("llama", "forward_kl", {}),
        ("llama", "total_variation", {"sample_from_anchor": False, "layers": 2}),
        ("llama", "acceptance", {"markov_rank": 0, "sample_from_anchor": False}),
        ("llama", "total_variation", {"vocabulary": 7}),
        ("llama", "acceptance", {"vocabulary": 7, "markov_rank": 0, "sample_from_anchor": False}),
        ("llama", "forward_kl", {"layers": 2, **WINDOWS}),
        ("gpt2", "forward_kl", {"taps": (0,)}),
        ("gemma3", "total_variation", {}),
        ("granite", "forward_kl", {}),
    ],
)
def test_losses_and_gradients_are_those_of_one_plain_forward_for_each_anchor(
    family: str, kind: str, form: dict[str, Any]
) -> None:
    """The drafter computes the same plain forward pass, so training and decoding have the same logits."""
    target = tiny_model(family).double()
    section = {name: form[name] for name in form if name not in WINDOWS}
    objective = objective_for(target, loss={kind: 1.0}, confidence=False, **section)
    objective.module.double()
    config = objective.module.draft.config  # a stored draft that is trained further may have windows
    objective.module.draft.config = replace(config, **{name: form[name] for name in form if name in WINDOWS})
    weights = torch.tensor([1.0, 0.5, 2.0, 0.7])
    sums = objective.module(*objective.inputs(collate(TEXTS), 0), weights)
    sums.total.backward()
    ours = gradients(objective)
    objective.module.zero_grad()
    wanted = reference_terms(objective, target, kind)
    (torch.stack(wanted) * weights).sum().backward()
    assert objective.terms == ("token_1", "token_2", "token_3", "token_4")
    assert sums.losses.tolist() == pytest.approx([term.item() for term in wanted], rel=1e-5)
    theirs = gradients(objective)
    assert (
        ours.keys()
        == theirs.keys()
        == {name for name, p in objective.module.draft.named_parameters() if p.requires_grad}
    )
    assert objective.module.draft.config.outputs == form.get("vocabulary", 16)
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0
        assert (ours[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("make", [partial(objective_for, layers=2), eagle3_for])
def test_masked_attention_avoids_sdpas_grouping_and_makes_no_needless_copies(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast itself casts what a layer reads, and all layers share one copy of a mask."""
    calls, read, attention = list[Any](), list[torch.dtype](), functional.scaled_dot_product_attention
    objective = make(tiny_model("llama").bfloat16())
    inputs = objective.inputs(collate(TEXTS), 0)

    def noted(*args: Any, **named: Any) -> Tensor:
        calls.append(named)
        return attention(*args, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    objective.module.draft.fc.register_forward_pre_hook(lambda _, args: read.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        sums = objective.module(*inputs)
    assert (sums.losses[:2] != sums.losses[:2].bfloat16()).all(), "sums are not rounded"
    masked = [call for call in calls if call.get("attn_mask") is not None]
    assert masked and not any(call.get("enable_gqa") for call in masked) and read == [torch.bfloat16]
    assert make is eagle3_for or len({id(call["attn_mask"]) for call in masked}) == 1 < len(masked)
    assert not any(call["attn_mask"].dtype == torch.float32 for call in masked), "autocast would copy it in each layer"


def test_no_block_sees_another_nor_a_text_beside_its_own() -> None:
    """More anchors, other rows and packed documents do not change the loss of any block; here every position is an
    anchor.
    """
    objective = objective_for(tiny_model("llama"), anchors=20)
    packed = collate(pack(list(TEXTS), max_length=16))
    assert packed.tokens.shape == (1, 16)
    together, apart = (objective.module(*objective.inputs(batch, 0)).losses for batch in (packed, collate(TEXTS)))
    single = sum(objective.module(*objective.inputs(collate([text]), 0)).losses for text in TEXTS)
    assert torch.allclose(together, apart, rtol=1e-5) and torch.allclose(single, apart, rtol=1e-5)
    assert objective.counts(packed).tolist() == objective.counts(collate(TEXTS)).tolist()


def test_a_block_is_trained_up_to_the_first_token_that_is_no_answers() -> None:
    """The answers are tokens 2 to 4 and 6 to 9.

    Positions 1, 2, 3, 5, 6, 7 and 8 predict these tokens, so they are the anchors.
    """
    batch = collate([TURNS])
    blocks = sample_blocks(batch, anchors=20, depth=3, seed=0, step=0)
    assert blocks.anchors.tolist() == [[1, 2, 3, 5, 6, 7, 8]] and blocks.given.all()
    wanted = {1: 3, 2: 2, 3: 1, 5: 3, 6: 3, 7: 2, 8: 1}
    found = [sum(block in labelled for labelled in blocks.labelled) for block in range(7)]
    assert dict(zip(blocks.anchors[0].tolist(), found, strict=True)) == wanted
    labels = labels_of(batch, blocks, slots=3)
    assert labels.text.tolist() == [1, 2, 3, 5, 6, 7, 8] and labels.groups.ends.tolist() == [1, 3, 6, 7, 9, 12, 15]
    assert labels.slots.tolist() == [0, 3, 1, 6, 4, 2, 9, 12, 10, 15, 13, 11, 18, 16, 14]
    assert labels.depths.tolist() == [0, 0, 1, 0, 1, 2, 0, 0, 1, 0, 1, 2, 0, 1, 2]
    behind = labels_of(batch, blocks, slots=4)
    assert behind.slots[labels.depths == 1].tolist() == [2, 6, 14, 18, 22], "behind the newest token's slot"
    assert objective_for(tiny_model("llama"), anchors=20, block_size=3).counts(batch).tolist() == [7, 5, 3, 15]


def test_anchors_are_drawn_by_seed_step_and_example_alone() -> None:
    def drawn(examples: Sequence[Example], step: int, seed: int = 0) -> list[list[int]]:
        blocks = sample_blocks(collate(examples), 4, 3, seed, step)
        return [row[given].tolist() for row, given in zip(blocks.anchors, blocks.given, strict=True)]

    text = Example(tuple(range(4, 16)) * 3, (True,) * 36, 0)
    ((alone,), beside) = drawn([text], step=5), drawn([TURNS, text, TEXTS[1]], step=5)
    assert beside[1] == alone and len(alone) == 4
    assert drawn([text], step=5) == [alone]
    others = [drawn([text], step=6)[0], drawn([text], step=5, seed=1)[0]]
    assert all(other != alone for other in others)


def test_the_weights_of_the_tokens_fall_and_sum_to_one_beside_the_confidences() -> None:
    assert objective_for(tiny_model("llama"), decay=0.5).weights(0) == pytest.approx(
        (8 / 15, 4 / 15, 2 / 15, 1 / 15, 1)
    )


# --- confidence -------------------------------------------------------------------------------------------------------


def test_confidence_changes_no_gradient_of_the_draft() -> None:
    found = []
    for confidence in (True, False):
        objective = objective_for(tiny_model("llama"), confidence=confidence)
        plain = objective_for(tiny_model("llama"), confidence=False).module.draft.state_dict()
        objective.module.draft.load_state_dict(plain, strict=not confidence)
        objective.module(*objective.inputs(collate(TEXTS), 0)).total.backward()
        found.append(gradients(objective))
    own = {name: found[0].pop(name) for name in ("confidence.weight", "confidence.bias")}
    assert all(gradient.abs().max() > 0 for gradient in own.values()) and found[0].keys() == found[1].keys()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_the_best_confidence_is_the_acceptance() -> None:
    """The draft knows nothing: q is 1/16 everywhere, and its confidence is one number, which is best at the mean of Σ
    min.
    """
    objective = objective_for(tiny_model("llama"), anchors=20)
    draft = objective.module.draft
    for parameter in (draft.norm.weight, draft.markov.embedding.weight):
        torch.nn.init.zeros_(parameter)
    (inputs,) = objective.inputs(collate(TEXTS), 0)
    sums, counts = objective.module(inputs), objective.counts(collate(TEXTS))
    share = sums.hits[:-1].sum() / counts[:-1].sum()
    assert 0.1 < share < 0.9 and counts[-1] == counts[:-1].sum() and objective.terms[-1] == CONFIDENCE
    torch.nn.init.constant_(draft.confidence.bias, float(share.logit()))
    objective.module(inputs, torch.eye(len(counts))[-1]).total.backward()
    assert draft.confidence.bias.grad.abs() < 1e-5 * counts[-1]


def test_a_trained_draft_is_accepted_at_every_token_and_knows_it() -> None:
    objective = objective_for(counting_model(), block_size=3, loss={"forward_kl": 1.0, "total_variation": 1.0})
    texts = [Example(tuple((start + i) % 15 for i in range(10)), (True,) * 10, 0) for start in range(5)]
    batch = collate(texts)
    optimizer = torch.optim.AdamW(objective.module.parameters(), lr=2e-2)
    shares = []
    for step in range(60):
        counts = objective.counts(batch, step)
        losses, hits, total = objective.module(*objective.inputs(batch, step), 1 / counts)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.append((hits / counts)[:-1].tolist())
    assert max(shares[0]) < 0.6 and min(shares[-1]) > 0.9
    assert losses[-1] / counts[-1] < 0.5, "less than of even odds"


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_logits_along_a_text_are_those_behind_each_of_its_tokens(kind: str, sample_from_anchor: bool) -> None:
    """This includes a draft with windows and a bias that reads the block; here the bias reads tokens of the text."""
    target, text, first = CausalLM(tiny_model(num_hidden_layers=3)), [3, 1, 4, 1, 5, 9, 2, 6, 5], 2
    windows = {"num_hidden_layers": 2, **WINDOWS}
    draft = tiny_dspark(target, markov_head_type=kind, sample_from_anchor=sample_from_anchor, **windows)
    for depth, labels, logits in block_logits(PairedDSpark(draft, target), OnlineTarget(target), text, first):
        assert labels.tolist() == text[first + 1 + depth :]
        for anchor, row in enumerate(logits, start=first):
            path = text[anchor + 1 : anchor + 1 + depth]
            wanted = logits_after(draft, target, text[: anchor + 1], path)
            torch.testing.assert_close(row, wanted, rtol=0, atol=1e-4)
