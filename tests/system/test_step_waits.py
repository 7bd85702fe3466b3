"""A training step waits for its device once, whatever is trained (see counted_waits.py)."""

import json
import sys
from pathlib import Path

from whole_runs import run

SCRIPT = str(Path(__file__).with_name("counted_waits.py"))
MICRO_BATCHES = 2
FORWARDS = {"heads": (1, 1), "Medusa-2": (1, 2), "draft": (2, 2), "DSpark draft": (1, 1), "EAGLE-3 draft": (1, 1)}
"""For one micro batch, the number of forward passes in which a model of transformers makes a mask, at the first and at
the second step. Each such pass checks whether the positions are those of packed texts. Drafts that read states have
separate masks.
"""


def test_a_step_waits_for_its_device_once_and_each_mask_of_transformers_once(tmp_path: Path) -> None:
    said = run([sys.executable, SCRIPT], tmp_path)
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert found["seen"] == 6, "what waits is seen"
    assert found["steps"].keys() == {f"{kind}, {texts}" for kind in FORWARDS for texts in ("padded", "packed")}
    for name, steps in found["steps"].items():
        for waits, forwards in zip(steps, FORWARDS[name.rpartition(", ")[0]], strict=True):
            assert waits == {"tolist": 1, "in transformers' masks": MICRO_BATCHES * forwards}, name
