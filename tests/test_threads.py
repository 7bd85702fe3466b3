"""Idle threads sleep soon, unless the user has chosen how they wait; this is set before torch is loaded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from decoding.threads import spin_briefly

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
PROGRAMS = [ROOT / "scripts" / "demo.py", *sorted((ROOT / "benchmarks").glob("*.py"))]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_spin_briefly_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], found: dict[str, str]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    spin_briefly()
    assert {name: os.environ[name] for name in VARIABLES if name in os.environ} == found


def test_the_command_and_the_script_set_it_before_torch_is_loaded() -> None:
    """Both call `guarded` with the work that loads torch; no earlier import loads torch."""
    program = (
        "import os, sys\n"
        "from trainer.commands.usage import guarded\n"
        "assert 'torch' not in sys.modules and 'GOMP_SPINCOUNT' not in os.environ\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            print('before torch:', os.environ.get('GOMP_SPINCOUNT'))\n"
        "            sys.exit()\n"
        "sys.meta_path.insert(0, Finder())\n"
        "guarded(lambda: __import__('torch'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout == "before torch: 1000\n", done.stderr


def test_every_program_calls_it_before_it_imports_what_loads_torch() -> None:
    own = r"^(?:from|import) (?:decoding|trainer)\b"
    programs = [path for path in PROGRAMS if re.search(own, path.read_text(), re.M) and "__main__" in path.read_text()]
    assert len(programs) >= 6
    for path in programs:
        text = path.read_text()
        call = re.search(r"^spin_briefly\(\)", text, re.M)
        assert call is not None, path.name
        before = re.findall(r"^(?:from|import) ([\w.]+)", text[: call.start()], re.M)
        assert not {"torch", "transformers", "trainer", "arms"} & {name.split(".")[0] for name in before}, path.name
        assert [name for name in before if name.startswith("decoding")] == ["decoding.threads"], path.name
