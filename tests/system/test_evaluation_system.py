"""Held-out evaluations by several processes have the figures of one process, decode each prompt once, and raise each
error on all processes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from launched_evaluation import found
from tiny_training import counting_text, write_corpus, write_rows, write_target
from whole_runs import ACCELERATE, ROOT, TORCHRUN, run, write_workshop

from trainer.commands.evaluate import run_evaluate
from trainer.commands.options import EvaluateOptions

PROGRAM = ROOT / "tests" / "system" / "launched_evaluation.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random target, a draft of some of its layers, and the results of two processes."""
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
    assert len(figures) == 6 and len(set(figures)) >= 3  # figures differ by temperature and dtype
    assert alone["fp32, 1 at a time, T=0"] == alone["fp32, 3 at a time, T=0"]
    assert alone["fp32, 1 at a time, T=1"] == alone["fp32, 3 at a time, T=1"]


def test_each_prompt_is_decoded_by_one_of_them(folder: Path) -> None:
    """Of seven single prompts the first process has four; of batches of 3, 2 and 2 it has the first and the last."""
    assert [of_process(folder, rank)["decoded"] for rank in (0, 1)] == [2 * 4 + 4 * 5, 2 * 3 + 4 * 2]


def test_a_prompt_that_one_cannot_decode_ends_the_evaluation_of_both(folder: Path) -> None:
    first, last = (of_process(folder, rank)["refusal"] for rank in (0, 1))
    assert first == "another process failed: see its error message" and "prompt" in last != first


# --- an evaluation as a whole program, dealt over two processes -------------------------------------------------------


OPTIONS: dict[str, Any] = {
    "drafter": ["lookup"],
    "max_new_tokens": 6,
    "settings": ["greedy", "sampling"],
    "dtype": "fp32",
    "policy": ["fixed"],  # the other policy reads the clock
}
TWO = [*ACCELERATE, "--quiet", "--config_file", str(ROOT / "recipes" / "accelerate" / "ddp.yaml")]
TWO += ["--main_process_port", "0", "-m", "trainer.cli", "evaluate", "--drafter", "lookup", "--max-new-tokens", "6"]
TWO += ["--settings", "greedy,sampling", "--batch-size", "1,2", "--dtype", "fp32", "--policy", "fixed"]


def runs(folder: Path) -> dict[Any, Any]:
    """Return the prompts, texts and steps of every record by the record's name."""
    found = {}
    for file in folder.glob("runs-*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            if "runs" in line:
                name = (*line["cell"], *(line[key] for key in ("wave", "turn", "setting", "method", "round")))
                found[name] = line["prompts"], line["digests"], [(run[0], run[4]) for run in line["runs"]]
    return found


def test_two_processes_go_on_where_one_was_killed_with_the_same_texts(tmp_path: Path) -> None:
    workshop = write_workshop(tmp_path)
    rows = [{"question_id": number, "turns": ["a b c"[: 2 * number + 1], "d e"]} for number in range(3)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone, dealt = tmp_path / "alone", tmp_path / "dealt"
    run_evaluate(
        EvaluateOptions(
            target=str(workshop / "target"),
            prompts=str(tmp_path / "questions.jsonl"),
            output=alone,
            batch_size=(1, 2),
            **OPTIONS,
        )
    )
    dealt.mkdir()
    lines = (alone / "runs-0.jsonl").read_text().splitlines(keepends=True)
    (dealt / "runs-0.jsonl").write_text("".join(lines[:5]) + lines[5][:40])
    paths = [
        "--target",
        str(workshop / "target"),
        "--prompts",
        str(tmp_path / "questions.jsonl"),
        "--output",
        str(dealt),
    ]
    run([*TWO, *paths], ROOT)
    assert runs(dealt) == runs(alone) and (dealt / "runs-1.jsonl").is_file()
    report, whole = (json.loads((folder / "report.json").read_text()) for folder in (dealt, alone))
    assert report["processes"] == 2 and report["asked"]["turns"] == "all" and report["prompts"] == 6
    same = ("setting", "method", "prompts", "passes", "tokens_per_pass", "reached")
    assert [[row.get(key) for key in same] for row in report["rows"]] == [
        [row.get(key) for key in same] for row in whole["rows"]
    ]
