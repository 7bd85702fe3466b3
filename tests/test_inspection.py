"""`headstart data inspect` shows which tokens are trained, and counts everything."""

import io
from pathlib import Path
from typing import Any

from tiny_tokenizer import byte_tokenizer
from tiny_training import CHAT_TEMPLATE, tiny_tokenizer, write_rows
from transformers import GenerationConfig
from typer.testing import CliRunner

from trainer.cli import app
from trainer.commands.inspection import run_inspect
from trainer.commands.options import InspectOptions
from trainer.terminal.console import standard_output


def tokenizer_folder(folder: Path, template: str | None = CHAT_TEMPLATE) -> str:
    tiny_tokenizer(template).save_pretrained(folder / "target")
    return str(folder / "target")


def inspected(folder: Path, source: str, terminal: bool = False, **options: Any) -> str:
    """Return what is printed for a source and the tiny tokenizer."""
    output = io.StringIO()
    colours: Any = {"force_terminal": True, "color_system": "standard", "no_color": False} if terminal else {}
    console = standard_output(file=output, width=200, **colours)
    options.setdefault("target", tokenizer_folder(folder))
    run_inspect(InspectOptions(source=source, **options), console)
    return output.getvalue()


def lines_of_table(text: str) -> dict[str, str]:
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in rows}


def test_without_colour_what_is_trained_stands_in_brackets(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a b", "answer": "c"}])
    text = inspected(tmp_path, path)
    assert "the trained tokens are between ⟦ and ⟧" in text
    assert f"{path}, line 1: prompt_answer, 6 tokens, 2 trained (the template's generation marks)" in text
    assert "<user> a b <assistant>⟦ c <eos>⟧" in text
    assert "\x1b[" not in text


def test_an_answer_without_a_template_ends_as_the_targets_generation_config_says(tmp_path: Path) -> None:
    path, target = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a b", "answer": "c"}]), tmp_path / "plain"
    tiny_tokenizer().save_pretrained(target)
    assert "a b⟦ c <eos>⟧" in inspected(tmp_path, path, target=str(target))
    GenerationConfig(eos_token_id=[3, 2]).save_pretrained(target)
    assert "a b⟦ c <assistant>⟧" in inspected(tmp_path, path, target=str(target))


def test_data_send_nothing_to_the_terminal_and_keep_their_joiners(tmp_path: Path) -> None:
    byte_tokenizer(size=0x2070).save_pretrained(tmp_path / "characters")
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "caf\x1b[2J\x9b1m \u202eمی\u200cخواهم"}])
    text = inspected(tmp_path, path, target=str(tmp_path / "characters"))
    assert not set("\x1b\x9b\u202e") & set(text) and "caf[2J1m می\u200cخواهم" in text


def test_a_row_that_is_cut_or_left_out_says_so(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": "a b c d", "answer": "e f g"}, {"prompt": "a b c d e f g h", "answer": "i"}]
    overrides = ["data.max_length=8", "data.bad_rows=skip"]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, "a b", {"x": 1}])
    text = inspected(tmp_path, path, rows=4, overrides=overrides)
    assert "line 4: the row has the fields ['x'], but training needs" in text
    assert lines_of_table(text)["rows, bad and skipped"] == "1"
    assert "line 1: prompt_answer, 10 tokens, cut to 8, 2 trained" in text
    assert "line 2: prompt_answer, 12 tokens, left out: no answer begins in the first 8" in text
    assert "line 3: text, left out: too short" in text
    assert lines_of_table(text)["sequences left out"] == "2"


def test_the_command_reads_a_source_and_its_options(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}] * 2)
    target = tokenizer_folder(tmp_path)
    words = ["data.prompt_field=question", "data.packing=true"]
    command = ["data", "inspect", path, *words, "--target", target, "--rows", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "<user> a <assistant>⟦ b <eos>⟧" in result.output and "2% full" in result.output  # 10 of 512
