"""An evaluation as a whole program: dealt over two processes, which go on where one was killed."""

import json
from pathlib import Path
from typing import Any

from whole_runs import ACCELERATE, ROOT, run, write_workshop

from trainer.commands.evaluate import run_evaluate
from trainer.commands.options import EvaluateOptions

OPTIONS: dict[str, Any] = {
    "drafter": ["lookup"],
    "max_new_tokens": 6,
    "settings": ["greedy", "sampling"],
    "dtype": "fp32",
}
TWO = [*ACCELERATE, "--quiet", "--config_file", str(ROOT / "recipes" / "accelerate" / "ddp.yaml")]
TWO += ["--main_process_port", "0", "-m", "trainer.cli", "evaluate", "--drafter", "lookup", "--max-new-tokens", "6"]
TWO += ["--settings", "greedy,sampling", "--batch-size", "1,2", "--dtype", "fp32"]


def runs(folder: Path) -> dict[Any, Any]:
    """The prompts, texts and steps of every record, by its name."""
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
    whole = run_evaluate(
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
    report = json.loads((dealt / "report.json").read_text())
    assert report["processes"] == 2 and report["asked"]["turns"] == "all" and report["prompts"] == 6
    same = ("setting", "method", "prompts", "passes", "tokens_per_pass", "reached")
    assert [[row.get(key) for key in same] for row in report["rows"]] == [
        [row.get(key) for key in same] for row in json.loads(json.dumps(whole["rows"]))
    ]
