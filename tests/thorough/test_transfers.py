"""Transfers of a decoding step: how often the host waits for the device, for every drafter and every rule.

The tensors claim to be on a device (see two_devices.py). Everything that leaves it, every awaited copy to it, and every
size that it computes counts as one transfer.
"""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from tiny_dspark import tiny_dflash, tiny_dspark
from tiny_eagle3 import tiny_eagle3
from tiny_models import tiny_model
from two_devices import counting, moved, two_devices

from decoding.drafters import (
    CascadeDrafter,
    Drafter,
    DraftModelDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    Eagle3TreeDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    PromptLookupDrafter,
)
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.drafters.hybrid import HybridDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.at_once import _groups
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import RULES

TREE = ((0,), (1,), (0, 0), (0, 1))
PROMPTS = ([1, 2, 3, 1, 2], [4, 5, 4], [7, 8, 9, 7, 8, 9])
STEPS: dict[str, tuple[int, int]] = {
    "plain": (1, 1),
    "chain": (1, 1),
    "likeliest chain": (1, 1),
    "medusa": (1, 2),  # children that could not be drawn are removed from the tree
    "deterministic medusa": (1, 1),
    "deterministic markov": (1, 1),
    "dspark": (1, 1),
    "deterministic dspark": (1, 1),
    "dspark tree": (1, 2),
    "deterministic dspark tree": (1, 1),
    "dflash": (1, 1),
    "eagle3": (1, 1),
    "deterministic eagle3 tree": (1, 1),
    "eagle3 tree": (1, 2),
    "eagle3 best tree": (4, 4),
    "lookup": (1, 1),
    "lookahead": (2, 2),  # the predictions of the window for all rows
    "cascade": (5, 5),  # one for each token of the chain, because this small draft is hardly ever right
    "draft tree": (4, 4),  # a level of three needs its scores before the next one grows
    "hybrid": (2, 2),  # the drafts of both are joined on the host
}
"""Number of transfers of a step, greedy and at temperature 1, with the default rules."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    # These tensors have no memory whose place could be looked at.
    side_by_side = "decoding.model.heads._side_by_side"
    monkeypatch.setattr(side_by_side, lambda parts: torch.stack([part.detach() for part in parts]))
    with two_devices() as (first, _):
        yield first


def drafter(name: str, target: CausalLM, device: torch.device) -> Drafter | None:
    drawn = "deterministic" not in name and "likeliest" not in name
    if name == "plain":
        return None
    if name == "lookup":
        return PromptLookupDrafter(3)
    if name == "lookahead":
        return LookaheadDrafter(3, 3, 3)
    if name == "cascade":
        return CascadeDrafter(draft(device), draft(device, 2), 4, 2)
    if name == "hybrid":
        return HybridDrafter(DraftModelDrafter(draft(device), 3, False), PromptLookupDrafter(3), least_gain=0)
    if "medusa" in name or "markov" in name:
        torch.manual_seed(5)
        rank = 3 if "markov" in name else 0
        heads = MedusaHeads(MedusaConfig(target.hidden_size, target.vocab_size, 2, tree=TREE, markov_rank=rank))
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter)
        moved(heads, device)
        return MedusaDrafter(heads, sampled=drawn)
    if "dspark" in name or name == "dflash":
        block = tiny_dflash(target) if name == "dflash" else tiny_dspark(target)
        moved(block, device)
        return DSparkDrafter(block, tree=TREE if "tree" in name else None, sampled=drawn)
    if "eagle3" in name:
        own = tiny_eagle3(target)
        moved(own, device)
        if "best" in name:
            return Eagle3TreeDrafter(own, depth=3, width=2, nodes=7)
        return Eagle3Drafter(own, 3) if name == "eagle3" else Eagle3Drafter(own, tree=TREE, sampled=drawn)
    if name == "draft tree":
        return DraftTreeDrafter(draft(device), depth=3, width=2, nodes=7)
    return DraftModelDrafter(draft(device), 3, drawn)


def draft(device: torch.device, seed: int = 1) -> CausalLM:
    return CausalLM(moved(tiny_model("llama", seed=seed), device))  # type: ignore[arg-type]  # a model as it came


def transfers(device: torch.device, name: str, temperature: float, rule: str | None = None) -> int:
    """Return the largest number of transfers in the first steps of a batch, after the prefill and the draft's first
    pass.
    """
    target = CausalLM(moved(tiny_model("llama"), device))  # type: ignore[arg-type]
    config = DecodingConfig(24, SamplingConfig(temperature), None if rule is None else RULES[rule])
    rows = len(PROMPTS)
    steps = Engine(target, drafter(name, target, device)).steps(PROMPTS, config, batch_size=rows)
    list(islice(steps, 2 * rows))
    counts = []
    for _ in range(2):
        with counting() as waits:
            list(islice(steps, rows))
        counts.append(waits.total())
    return max(counts)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_for_the_device_as_often_as_is_listed(device: torch.device, name: str) -> None:
    for temperature, most in zip((0.0, 1.0), STEPS[name], strict=True):
        assert transfers(device, name, temperature) == most, temperature


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_waits_once_in_a_step(device: torch.device, rule: str) -> None:
    name = "likeliest chain" if rule == "top-k" else "chain"
    assert transfers(device, name, float(rule != "greedy"), rule) == 1


def test_places_in_trees_of_known_shapes_are_not_copied_again(device: torch.device) -> None:
    transfers(device, "medusa", 1.0)
    known = _groups.cache_info().misses
    transfers(device, "medusa", 1.0)
    assert _groups.cache_info().misses == known and _groups.cache_info().hits >= 4
