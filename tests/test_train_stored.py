"""The benchmark of training from disk compares like with like: both ways train the same batches to the same losses."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_training import tiny_tokenizer, toy_examples

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import collate

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def script(name: str) -> ModuleType:
    """Import a script; what it does to the path is undone."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path = path
    return module


@pytest.mark.parametrize("kind", ["draft", "heads"])
def test_training_from_disk_and_from_the_target_come_to_the_same_loss(
    tiny_llama: CausalLM, kind: str, tmp_path: Path
) -> None:
    stored = script("train_stored")
    examples = toy_examples(12)
    batches = [collate(examples[start : start + 4], range(start, start + 4)) for start in (0, 4, 8)]
    section = {"top_k": 14, "tail": 1}  # of 16 tokens: the sample stands for two
    objectives = stored.KINDS[kind](
        tiny_llama, tiny_tokenizer(), examples, tmp_path, **section if kind == "draft" else {}
    )
    found = stored.compare(objectives, batches)
    trained = sum(int(batch.labelled(1).sum()) for batch in batches[1:]) / 2
    assert found["trained_tokens_per_step"] == trained and set(found["speedup"]) == {"clock", "processor"}
    losses = found["last_losses"]
    assert losses["stored"] == pytest.approx(losses["online"], rel=2e-2) and losses["online"] > 0
