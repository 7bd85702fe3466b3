"""The page of measured drafts says what the JSON says, and every arm of every comparison is on it."""

import importlib.util
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
    """The script as a module, with its own folder in the path as where it is run."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("drafts_benchmark", ROOT / "benchmarks" / "drafts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path = path


@pytest.fixture(scope="module")
def results() -> Any:
    return json.loads(RESULTS.read_text())


def test_the_page_is_what_the_script_writes_from_the_figures(drafts: ModuleType, results: Any) -> None:
    from draft_page import page

    assert (ROOT / "docs" / "drafts-measured.md").read_text() == page(results, drafts.arms_on_the_page())


def test_no_arm_is_missing_from_what_was_measured(drafts: ModuleType, results: Any) -> None:
    names = {name for arms in drafts.arms_on_the_page().values() for name in arms}
    assert len(names) >= 20 and set(results["arms"]) == names
    for measured in results["decoding"].values():
        assert set(measured) == names


def test_an_arm_is_trained_in_a_folder_of_its_own(drafts: ModuleType) -> None:
    names = {name for arms in drafts.COMPARISONS.values() for name in arms}
    assert len({drafts.slug(name) for name in names}) == len(names)
