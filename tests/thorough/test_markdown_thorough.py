"""The names that tests/test_markdown.py leaves out for cards, pages and pictures, in the same tests."""

from pathlib import Path

import pytest
import test_markdown as few
from test_markdown import FEW_HOSTILE, HOSTILE


@pytest.mark.parametrize("format", ["headstart", "vllm", "draft"])
@pytest.mark.parametrize("hostile", [name for name in HOSTILE if name not in FEW_HOSTILE])
def test_a_card_has_the_same_parts_whatever_the_names_are(tmp_path: Path, format: str, hostile: str) -> None:
    few.test_a_card_has_the_same_parts_whatever_the_names_are(tmp_path, format, hostile)


@pytest.mark.parametrize("hostile", [name for name in HOSTILE if name not in FEW_HOSTILE[:1]])
def test_a_reports_tables_and_pictures_survive_any_name(tmp_path: Path, hostile: str) -> None:
    few.test_a_reports_tables_and_pictures_survive_any_name(tmp_path, hostile)
