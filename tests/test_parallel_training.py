"""The training of parallel drafts: one forward with blocks of masks is many plain ones, and only labels are trained."""

import pytest
from parallel_training import TEXTS, objective_for, reference_terms
from tiny_models import tiny_model

from trainer.data.batch import collate


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2-mixed", "gemma3"])
@pytest.mark.parametrize("kind", ["forward_kl", "tvd"])
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
