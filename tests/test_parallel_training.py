"""The training of parallel drafts: one forward with blocks of masks is many plain ones, and only labels are trained."""

from collections.abc import Sequence

import pytest
import torch
from distilling import AllOnDisk
from parallel_training import TEXTS, TURNS, objective_for, reference_terms
from tiny_models import counting_model, tiny_model
from tiny_training import tiny_tokenizer
from trainer.drafts.parallel import ParallelObjective

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Example, collate
from trainer.data.sequences import pack
from trainer.drafts.blocks import mask_labels, sample_blocks
from trainer.drafts.start import InitialDraft


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2-mixed", "gemma3"])
@pytest.mark.parametrize("kind", ["forward_kl", "acceptance"])
def test_losses_and_gradients_are_those_of_one_plain_forward_for_each_anchor(family: str, kind: str) -> None:
    error = 1e-11 if family == "gpt2" else 1e-5  # the others' norms compute in fp32 whatever the dtype
    target = tiny_model(family).double()
    objective = objective_for(target, loss={kind: 1.0})
    module = objective.module.double()
    batch = collate(TEXTS)
    (inputs,) = objective.inputs(batch, step=0)
    module.eval()
    sums = module(inputs)
    sums.losses.sum().backward()
    ours = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    text, masked = reference_terms(objective, target, TEXTS, batch, kind)
    (text + masked).backward()
    assert objective.terms == ("logits", "masked")
    assert sums.losses.tolist() == pytest.approx([text.item(), masked.item()], rel=error)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0
        assert (ours[name] - parameter.grad).abs().max() <= error * parameter.grad.abs().max(), name
    assert len(ours) >= 10 and {"parts.reader.weight", "parts.markov.output.weight"} <= ours.keys()


def test_packed_documents_are_kept_apart_and_lose_what_they_lose_alone() -> None:
    """Every position that predicts a trained token is an anchor here, so that both ways draw the same."""
    objective = objective_for(tiny_model("llama"), anchors=20)
    packed = collate(pack(list(TEXTS), max_length=16))
    assert packed.tokens.shape == (1, 16)
    together, apart = (
        objective.module.eval()(*objective.inputs(batch, 0)).losses for batch in (packed, collate(TEXTS))
    )
    assert torch.allclose(together, apart, rtol=1e-5)
    assert objective.counts(packed).tolist() == objective.counts(collate(TEXTS)).tolist()


def test_a_mask_is_trained_where_its_token_is_an_answers_and_in_the_anchors_document() -> None:
    """The answers are tokens 2 to 4 and 6 to 9: positions 1, 2, 3, 5, 6, 7, 8 predict them, and are the anchors.

    Behind position 2 the masks predict tokens 4, 5 and 6, of which 5 is no answer's; behind 7 and 8 the text ends.
    """
    blocks = sample_blocks(collate([TURNS]), anchors=20, depth=3, seed=0, step=0)
    assert blocks.anchors.tolist() == [[1, 2, 3, 5, 6, 7, 8]] and blocks.given.all()
    wanted = {1: [1, 1, 0], 2: [1, 0, 1], 3: [0, 1, 1], 5: [1, 1, 1], 6: [1, 1, 0], 7: [1, 0, 0], 8: [0, 0, 0]}
    assert dict(zip(blocks.anchors[0].tolist(), blocks.trained[0].int().tolist(), strict=True)) == wanted
    labels = mask_labels(collate([TURNS]), blocks)
    assert labels.labels.tolist()[:2] == [1, 5] and labels.before.tolist()[:2] == [4, 1]
    objective = objective_for(tiny_model("llama"), anchors=20)
    assert objective.counts(collate([TURNS])).tolist() == [7, 12]


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


def test_logits_from_disk_teach_the_masks_what_the_target_does() -> None:
    """Each mask has the row of the position that predicts its token, whatever the teacher is."""
    target, batch = tiny_model("llama"), collate(TEXTS)
    online = objective_for(target, reads_target=False)
    stored = ParallelObjective(
        CausalLM(target),
        AllOnDisk(target),
        tiny_tokenizer(),
        InitialDraft(online.module.draft, None, online.module.parts),
        online._section,
        seed=0,
    )
    losses = [objective.module.eval()(*objective.inputs(batch, 0)).losses for objective in (online, stored)]
    assert torch.allclose(*losses, rtol=1e-4)


def test_a_trained_mask_draft_is_accepted_more_often_at_every_term() -> None:
    """A counting target: the masks alone cannot know the token, the text before them can."""
    objective = objective_for(counting_model(), tokens=3)
    texts = [Example(tuple((start + i) % 16 for i in range(10)), (True,) * 10, 0) for start in range(16)]
    batch = collate(texts)
    optimizer = torch.optim.AdamW(objective.module.parameters(), lr=3e-2)
    shares = []
    for step in range(80):
        losses, hits = objective.module(*objective.inputs(batch, step))
        counts = objective.counts(batch, step)
        (losses / counts).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.append((hits / counts).tolist())
    assert max(shares[0]) < 0.5 and min(shares[-1]) > 0.9
