"""The training benchmark from end to end, at sizes that mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks/train_medusa.py"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read where Linux shows it")
def test_a_short_run_measures_a_variant_and_features(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    words = ["--short", "--variants", "soft targets", "--output", str(output)]
    subprocess.run([sys.executable, str(SCRIPT), *words], check=True, timeout=600)
    report = json.loads(output.read_text())
    assert [row["variant"] for row in report["losses"]] == ["soft targets"]
    assert all(run["tokens_per_second"] > 0 for row in report["losses"] for run in row["runs"]["fused"])
    assert report["features"]["target"]["parameters"] >= 2e6 and report["features"]["speedup"]["median"] > 0
    assert report["commit"] and report["hardware"]["processor"]
