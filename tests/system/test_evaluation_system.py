"""Held-out evaluations of several processes: the figures of one, each prompt decoded once, errors told by all."""

import json
from pathlib import Path
from typing import Any

import pytest
from launched_evaluation import found
from tiny_training import counting_text, write_corpus, write_rows, write_target
from whole_runs import ROOT, TORCHRUN, run

PROGRAM = ROOT / "tests" / "system" / "launched_evaluation.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target, of whose tokens a draft of some of its layers guesses a few; and what two processes found."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_target(folder / "target", seed=3)
    write_corpus(folder)
    write_rows(folder / "heldout.jsonl", [{"text": counting_text(5 * i, 9 + i)} for i in range(7)])
    run([*TORCHRUN, "--standalone", "--nproc_per_node", "2", str(PROGRAM), str(folder)], folder)
    return folder


def of_process(folder: Path, rank: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"found-{rank}.json").read_text())
    return content


def test_both_processes_find_what_one_finds_in_every_dtype_at_every_temperature(folder: Path) -> None:
    alone = found(folder, None)
    assert of_process(folder, 0)["found"] == of_process(folder, 1)["found"] == alone
    figures = [json.dumps(found) for name, found in alone.items() if "texts" not in name]
    assert len(figures) == 6 and len(set(figures)) >= 3  # temperatures and dtypes differ: equality says something
    assert alone["fp32, 1 at a time, T=0"] == alone["fp32, 3 at a time, T=0"]
    assert alone["fp32, 1 at a time, T=1"] == alone["fp32, 3 at a time, T=1"]


def test_each_prompt_is_decoded_by_one_of_them(folder: Path) -> None:
    """Of seven prompts one at a time the first has four; of batches of 3, 2 and 2 the first and the last."""
    assert [of_process(folder, rank)["decoded"] for rank in (0, 1)] == [2 * 4 + 4 * 5, 2 * 3 + 4 * 2]


def test_a_prompt_that_one_cannot_decode_ends_the_evaluation_of_both(folder: Path) -> None:
    first, last = (of_process(folder, rank)["refusal"] for rank in (0, 1))
    assert first == "another process failed: see its error message" and "prompt" in last != first
