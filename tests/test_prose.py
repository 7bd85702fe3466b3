"""The prose lint: every rule finds its break, where it stands, and leaves plain sentences alone."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_prose", ROOT / "scripts" / "check_prose.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_prose"] = module
    spec.loader.exec_module(module)
    return module


lint = _load()


def _found(tmp_path: Path, source: str, suffix: str = ".py") -> list[tuple[int, str]]:
    path = tmp_path / f"page{suffix}"
    path.write_text(source)
    return [(finding.line, finding.sentence) for finding in lint.findings(path)]


@pytest.mark.parametrize("word", ["Of", "What", "Whether", "Those", "How", "Is"])
def test_a_docstring_that_starts_with_a_banned_word_is_refused(tmp_path: Path, word: str) -> None:
    assert _found(tmp_path, f'def work():\n    """{word} the rows. More."""\n') == [(2, f"{word} the rows.")]


def test_modules_classes_functions_fields_and_help_texts_are_read(tmp_path: Path) -> None:
    source = (
        '"""What it does."""\nclass Row:\n    """How rows look."""\n    size: int = 0\n    """Of the row."""\n\n'
        '    async def read(self):\n        """Is read."""\n\n\nlimit = Option(help="How many rows.")\n'
    )
    assert [line for line, _ in _found(tmp_path, source)] == [1, 3, 5, 8, 11]


@pytest.mark.parametrize(
    "words",
    [
        "Drop so many tokens.",
        "Keep the draft as it is.",
        "Keep the texts as they are now.",
        "Return weights that were learnt.",
        "Draw by chance.",
        "Print the size said before.",
        "Choose the rule that the loop goes by.",
        "Sort rows. What is left is dropped.",
        "Sort rows; what was not read is dropped.",
        "Yield steps and what is of them.",
    ],
)
def test_a_banned_phrase_is_refused_in_docstrings_comments_and_pages(tmp_path: Path, words: str) -> None:
    assert len(_found(tmp_path, f'"""{words}"""\n')) == 1
    assert len(_found(tmp_path, f"size = 1  # {words}\n")) == 1
    assert len(_found(tmp_path, f"# A page\n\n{words}\n", ".md")) == 1


def test_a_phrase_broken_over_two_lines_is_found_on_its_first(tmp_path: Path) -> None:
    assert _found(tmp_path, "size = 1\n# Drop rows, so\n# many of them.\n") == [(2, "Drop rows, so many of them.")]
    assert _found(tmp_path, 'class Row:\n    """Rows, so\n    many."""\n') == [(2, "Rows, so many.")]


@pytest.mark.parametrize(
    "words",
    [
        "Follow p for as long as it is a child; count rows as often as it is read.",
        "Write text as it is formatted by the tokenizer.",
        "Return what the target wrote, and whether it ended.",
        "Offer ``what is it`` and `so many` as names.",
        "Isolate rows. Ofttimes, Howard.",
    ],
)
def test_plain_sentences_and_code_are_left_alone(tmp_path: Path, words: str) -> None:
    assert _found(tmp_path, f'"""{words}"""\n') == []
    assert _found(tmp_path, f'text = "so many"\nrows = 1  # {words}\n') == []
    assert _found(tmp_path, f"{words}\n\n```sh\necho so many, learnt by chance\n```\n", ".md") == []


def test_the_lint_prints_place_sentence_and_rule_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.py"
    page.write_text('"""Whether rows are read."""\n')
    assert lint.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"{page}:1: 'Whether rows are read.'" in printed and "start with a verb" in printed
    page.write_text('"""True if rows are read."""\n')
    assert lint.main([str(tmp_path)]) == 0
    with pytest.raises(ValueError, match="name files or folders that exist"):
        lint.main([str(tmp_path / "elsewhere")])


def test_without_arguments_the_packages_the_scripts_and_the_pages_are_read() -> None:
    checked = lint.files([lint.ROOT / place for place in lint.PLACES])
    assert len(checked) >= 120
    assert {"README.md", "generate.py", "cli.py", "check_prose.py"} <= {path.name for path in checked}
