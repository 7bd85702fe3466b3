"""The page of measured drafts says what the JSON says, and every arm is on it."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc-2-cores" / "drafts.json"


@pytest.fixture(scope="module")
def drafts() -> Iterator[ModuleType]:
    """The page's script, with its own folder in the path as where it is run."""
    path = list(sys.path)
    sys.path.append(str(ROOT / "scripts"))
    yield importlib.import_module("drafts_page")
    sys.path[:] = path


@pytest.fixture(scope="module")
def results() -> Any:
    return json.loads(RESULTS.read_text())


def test_the_page_is_what_the_script_writes_from_the_figures(drafts: ModuleType, results: Any) -> None:
    assert (ROOT / "docs" / "results" / "drafts.md").read_text() == drafts.page(results)


def test_no_arm_is_missing_from_what_was_measured(drafts: ModuleType, results: Any) -> None:
    names = {name for arms in drafts.comparisons_of(results).values() for name in arms}
    assert len(names) >= 20 and set(results["arms"]) == names
    for measured in results["decoding"].values():
        assert set(measured) == names
