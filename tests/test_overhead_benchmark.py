"""The benchmark of the time around the forwards: its clock by hand, and a run at sizes that mean nothing."""

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding import clock
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads

METHODS = {
    "plain",
    "lookup",
    "draft chain",
    "draft tree",
    "draft and lookup",
    "medusa, chain of 2",
    "medusa, deterministic chain of 2",
}


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, with its own folder in the path as where it is run; the loop's clock comes back."""
    path = list(sys.path)
    sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
    monkeypatch.setattr(clock, "time", clock.time)
    yield importlib.import_module("overhead")
    sys.path[:] = path


def test_forwards_within_another_count_once(overhead: ModuleType) -> None:
    watch = overhead.Stopwatch(itertools.count().__next__)
    for step in (watch.enter, watch.enter, watch.leave, watch.leave, watch.enter, watch.leave):
        step()
    assert watch.seconds == 2  # the clock is asked at 0, 1, 2 and 3: by the outer ones alone


def test_only_steps_behind_the_last_prefill_are_counted(overhead: ModuleType) -> None:
    """By a clock that ticks whenever it is asked, so that a forward takes one tick."""
    ticks = itertools.count().__next__
    clock.time = SimpleNamespace(perf_counter=ticks)  # type: ignore[assignment]  # the fixture restores it
    target = CausalLM(tiny_model("llama"))
    watch, split = overhead.Stopwatch(ticks), overhead.Split(0.0, 2, "plain")
    with overhead.ExitStack() as stack:
        watch.watch(target.model, stack)
        overhead.measured(target, None, [[3, 1], [4, 1, 5]], DecodingConfig(4), watch, split)
    assert (split.passes, split.tokens, split.forwards) == (6, 6, 3)  # three steps of two rows
    assert split.verify >= split.forwards and split.whole >= split.total > split.draft + split.verify
    assert 0 < split.overhead < split.outside < 1
    target.model(torch.tensor([[1]]))
    assert watch.seconds == 3  # no hook is left behind


def test_a_run_splits_the_time_of_every_method(
    overhead: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--{name}={tmp_path / name}" for name in ("target", "draft", "heads", "prompts", "output")]
    for name, layers in (("target", 2), ("draft", 1)):
        tiny_model("llama", vocab=128, num_hidden_layers=layers).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    MedusaHeads(MedusaConfig(16, 128, num_heads=2, tree=((0,), (0, 0)))).save_pretrained(tmp_path / "heads")
    (tmp_path / "prompts").write_text('{"prompt": "abcabcabc"}\n{"prompt": "one two one two"}\n')
    words += ["--batch", "3", "--temperature", "1", "--max-new-tokens", "4", "--widen", "0", "--dtype", "fp32"]
    overhead.main(words)
    report = json.loads((tmp_path / "output").read_text())
    splits = report["splits"]
    assert {(s["temperature"], s["batch"]) for s in splits} == {(1.0, 3)}
    assert {s["method"] for s in splits} == METHODS and len(splits) == len(METHODS)
    # Each text goes on for three tokens behind its prefill.
    assert all(s["tokens"] == 3 * s["batch"] and s["whole"] >= s["total"] > 0 for s in splits)
    assert report["clock"] == "wall time" and "overhead" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        overhead.main([*words, "--methods", "plane"])
    assert "no method is called 'plane': choose of plain, lookup, draft chain" in capsys.readouterr().err
