"""What one of several processes refuses ends all of them, and none waits for it."""

import json
from pathlib import Path

import pytest
from launched_refusals import PLACES, prepare
from whole_runs import ROOT, TORCHRUN, run


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    for name in PLACES:
        prepare(folder / name)
    script = str(ROOT / "tests" / "system" / "launched_refusals.py")
    run([*TORCHRUN, "--standalone", "--nproc_per_node", "2", script, str(folder), *PLACES], folder)
    return folder


@pytest.mark.parametrize("name", PLACES)
def test_a_refusal_of_one_process_is_an_error_on_both(refused: Path, name: str) -> None:
    place = PLACES[name]
    own, other = (json.loads((refused / f"{name}-{rank}.json").read_text()) for rank in (place.rank, 1 - place.rank))
    assert own["type"] == place.error.__name__ and "planted" in own["message"]
    assert other["type"] == "UserError" and "another process failed" in other["message"]


def test_a_process_that_works_for_long_is_waited_for_as_long_as_it_gives_signs(tmp_path: Path) -> None:
    """Each waits for two seconds here, and one works for four."""
    script = str(ROOT / "tests" / "system" / "launched_patience.py")
    run([*TORCHRUN, "--standalone", "--nproc_per_node", "2", script, str(tmp_path)], tmp_path)
    quick, slow = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert quick == ["done", "given up"] and slow[0] == "done"
