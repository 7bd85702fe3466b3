"""Targets that accelerate spread over several devices decode, and can be trained on, like targets on one device."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from test_drafters import random_heads
from tiny_dspark import tiny_dspark
from tiny_eagle3 import tiny_eagle3
from tiny_models import tiny_model
from tiny_training import recipe_content, write_corpus, write_target
from two_devices import MixedDevicesError, moved, spread, two_devices

from decoding.drafters import (
    Drafter,
    DraftModelDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    MedusaDrafter,
    PromptLookupDrafter,
)
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_model
from decoding.rules.sampling import SamplingConfig
from trainer.recipe.reading import parse_recipe
from trainer.run.distributed import build_optimizers
from trainer.run.train import run_recipe

PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9])
"""Prompts of different lengths, so that rows are ragged; there are more prompts than rows, so that rows are refilled
and moved."""
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=1.0, repetition_penalty=1.1)
DRAFTERS = ("plain", "draft tree", "prompt lookup", "shared medusa", "shared markov", "drawn shared markov")
DRAWN = ("chain", "drawn shared markov")
CPU = torch.device("cpu")
Devices = tuple[torch.device, torch.device]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    # These tensors have no memory whose place could be looked at, to see whether weights lie side by side already.
    side_by_side = "decoding.model.heads._side_by_side"
    monkeypatch.setattr(side_by_side, lambda parts: torch.stack([part.detach() for part in parts]))
    with two_devices() as found:
        yield found


def heads_of(name: str, width: int) -> MedusaHeads:
    if "medusa" in name:
        return random_heads("shared" in name, width=width, layers=1)
    torch.manual_seed(5)
    config = MedusaConfig(width, 16, num_heads=2, shared_lm_head="shared" in name, tree=((0,), (1,), (0, 0)))
    heads = MedusaHeads(replace(config, markov_rank=3))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads


def drafter(name: str, family: str, width: int, device: torch.device | None = None) -> Drafter | None:
    """Make the drafter on the first device of the target, or on the CPU."""
    if name == "plain":
        return None
    if name == "prompt lookup":
        return PromptLookupDrafter(3)
    if any(kind in name for kind in ("medusa", "markov")):
        heads = heads_of(name, width)
        if device is not None:
            moved(heads, device)
        return MedusaDrafter(heads, sampled="drawn" in name)
    model = tiny_model(family, seed=1)
    draft = CausalLM(model if device is None else moved(model, device))  # type: ignore[arg-type]
    if name == "draft tree":
        return DraftTreeDrafter(draft, depth=3, width=2, nodes=7)
    return DraftModelDrafter(draft, 3)


def texts_of(target: CausalLM, drafted: Drafter | None, sampling: SamplingConfig) -> list[tuple[int, ...]]:
    config = DecodingConfig(6, sampling)
    return [text.tokens for text in Engine(target, drafted).decode(PROMPTS, config, batch_size=3)]


def test_what_is_mixed_is_noticed(devices: Devices) -> None:
    """The devices of these tests reject the same operations as CUDA."""
    here, there = torch.ones(3, device=devices[0]), torch.ones(3).to(devices[1])
    with pytest.raises(
        MixedDevicesError, match=r"add\.Tensor of tensors that lie apart: \(3,\) on spread:0, \(3,\) on spread:1"
    ):
        here + there
    with pytest.raises(MixedDevicesError):
        here + torch.ones(3)
    with pytest.raises(MixedDevicesError):
        here[torch.zeros(1, dtype=torch.long, device=devices[1])]
    assert (here + here.to(there.device).to(here.device) * torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert here[torch.tensor([0])].device == devices[0] and here.cpu().device.type == "cpu"


@pytest.mark.parametrize(
    ("name", "sampling"), [*((name, GREEDY) for name in DRAFTERS), *((name, SAMPLED) for name in DRAWN)]
)
def test_a_spread_target_writes_the_texts_of_a_whole_one(devices: Devices, name: str, sampling: SamplingConfig) -> None:
    whole = CausalLM(tiny_model("llama"))
    expected = texts_of(whole, drafter(name, "llama", whole.hidden_size), sampling)
    target = CausalLM(spread(tiny_model("llama"), devices))
    assert texts_of(target, drafter(name, "llama", whole.hidden_size, target.device), sampling) == expected


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize(("drafter_of", "tiny"), [(DSparkDrafter, tiny_dspark), (Eagle3Drafter, tiny_eagle3)])
def test_a_draft_reads_layers_of_both_devices(
    devices: Devices, sampling: SamplingConfig, drafter_of: Any, tiny: Any
) -> None:
    whole = CausalLM(tiny_model("llama", num_hidden_layers=4))
    target, draft = CausalLM(spread(tiny_model("llama", num_hidden_layers=4), devices)), tiny(whole)
    expected = texts_of(whole, drafter_of(draft), sampling)
    moved(draft, target.device)
    assert texts_of(target, drafter_of(draft), sampling) == expected


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "falcon"])
def test_every_architecture_may_be_spread(devices: Devices, family: str) -> None:
    """This includes masks by layer type, windows, weights tied across devices, and learned positions."""
    expected = texts_of(CausalLM(tiny_model(family)), drafter("draft tree", family, 0), GREEDY)
    target = CausalLM(spread(tiny_model(family), devices))
    assert texts_of(target, drafter("draft tree", family, 0, target.device), GREEDY) == expected


def test_steps_of_fixed_shapes_are_refused_on_several_devices(devices: Devices) -> None:
    model = spread(tiny_model("llama"), devices)
    with pytest.raises(
        ValueError, match="spread over 2 devices, but steps of fixed shapes run on one device: leave static out"
    ):
        CausalLM(model, static="graphs")


@pytest.mark.parametrize("kind", ["shared", "draft", "dspark"])
def test_a_run_on_a_spread_target_trains_and_evaluates_as_on_a_whole_one(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """This includes evaluations, which decode: a real run died there after hours of training."""

    def load(*args: Any, **named: Any) -> Any:
        model = load_model(*args, **named)
        return spread(model, devices) if placed == "spread" else model

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("trainer.target.loading.load_model", load)
    # Trained modules are on the CPU. Between real devices `Module.to` keeps parameters as parameters, but not here.
    monkeypatch.setattr(
        "trainer.run.loop.build_optimizers", lambda module, *rest: build_optimizers(moved(module, CPU), *rest)
    )
    write_target(tmp_path / "target", seed=3)
    write_corpus(tmp_path)
    rows = {}
    for placed in ("whole", "spread"):
        content = recipe_content(tmp_path, "medusa" if kind == "shared" else "draft")
        content |= {"output": str(tmp_path / placed)}
        content["training"]["steps"] = content["evaluation"]["every"] = 2
        if kind == "dspark":
            content["draft"] = {"dspark": {"markov_rank": 3, "mask_token": "<user>"}}
        if kind == "shared":
            content["heads"] = {"num_heads": 2, "tree_nodes": 4, "shared_lm_head": True}
        AcceleratorState._reset_state(True)
        run_recipe(parse_recipe(content, "test"), Console(quiet=True))
        rows[placed] = [json.loads(line) for line in (tmp_path / placed / "metrics.jsonl").read_text().splitlines()]
    AcceleratorState._reset_state(True)
    kept = [
        [{k: v for k, v in row.items() if "loss" in k or "accept" in k or "pass" in k} for row in rows[name]]
        for name in ("spread", "whole")
    ]
    assert sum("heldout/tokens_per_pass" in row for row in kept[0]) == 1 and len(kept[0]) == len(kept[1])
    for ours, theirs in zip(*kept, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
