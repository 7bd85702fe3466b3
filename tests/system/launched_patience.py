"""Under torchrun, let one of two processes work for longer than the other waits without a sign from it.

Usage: launched_patience.py FOLDER. FOLDER/RANK.json says how the work ended, with and without signs between the
processes.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

from trainer.processes import agreed, build_accelerator

RANK = int(os.environ["RANK"])
WAIT, WORK = 2, 4  # seconds


def outcome(patient: bool) -> str:
    try:
        return agreed(lambda: time.sleep(RANK * WORK) or "done", patient)
    except RuntimeError:
        return "given up"


if __name__ == "__main__":
    with patch("trainer.processes.TIMEOUT", timedelta(seconds=WAIT)), patch("trainer.processes._SIGN_EVERY", 0.2):
        build_accelerator()
        found = [outcome(patient) for patient in (True, False)]
    (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(found))
