"""The training benchmark compares like with like: both ways have the same loss and the same gradients."""

import argparse
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "benchmarks/train_medusa.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The script as a module; what it does to the path is undone."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("train_medusa_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sys.path = path
    return module


@pytest.mark.parametrize("variant", ["own lm_heads", "shared lm_head", "soft targets"])
def test_both_ways_have_one_loss_and_one_gradient(benchmark: ModuleType, variant: str) -> None:
    case = benchmark.Case("fused", variant, vocabulary=50, hidden_size=8, rows=2, length=12, steps=1, autocast=False)
    found = []
    for way in benchmark.WAYS:
        module, loss_now = benchmark.loss_of(replace(case, way=way))
        loss = loss_now()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in module.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_ratios_are_of_runs_that_took_turns(benchmark: ModuleType) -> None:
    order = []

    def run(case: object) -> dict[str, float]:
        order.append(case.way)  # type: ignore[attr-defined]
        fast = 2.0 if case.way == "fused" else 1.0  # type: ignore[attr-defined]
        seconds = {"loss_seconds": 1 / fast, "processor_seconds": 1 / fast}
        return {"loss": 3.0, "tokens_per_second": 10 * fast, "step_bytes": 8 / fast**2, "peak_bytes": 8, **seconds}

    options = argparse.Namespace(hidden_size=8, rows=1, length=8, steps=1, rounds=3, dtype="fp32")
    row = benchmark.compare("own lm_heads", benchmark.LARGEST, options, run)
    assert order == ["fused", "plain", "plain", "fused", "fused", "plain"]
    assert row["speedup"] == {"median": 2, "low": 2, "high": 2} and row["step_memory"]["median"] == 0.25
    met = {goal["goal"].split(": ")[1]: goal["met"] for goal in benchmark.goals({"losses": [row]})}
    assert met == {"tokens/s of fused over plain": True, "memory of a step, fused over plain": True}


def test_ways_that_disagree_are_not_compared(benchmark: ModuleType) -> None:
    options = argparse.Namespace(hidden_size=8, rows=1, length=8, steps=1, rounds=1, dtype="bf16")
    with pytest.raises(RuntimeError, match=r"losses are 3\.0 and 4\.0"):
        benchmark.compare("own lm_heads", 50, options, lambda case: {"loss": 3.0 if case.way == "fused" else 4.0})
