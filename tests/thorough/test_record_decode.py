"""The animated picture of decoding: its report, its layout, and the committed picture, which must match its JSON."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))  # the folder of the two scripts
drawing, recording = import_module("decode_picture"), import_module("record_decode")
REPORT = ROOT / "benchmarks" / "results" / "amd-epyc-2-cores" / "decode.json"
PICTURES = [ROOT / "docs" / "pictures" / name for name in ("decode.svg", "decode-narrow.svg")]
SVG = "{http://www.w3.org/2000/svg}"


def steps(*rows: tuple[list[str], int, float]) -> list[dict[str, Any]]:
    return [{"tokens": tokens, "accepted": accepted, "seconds": seconds} for tokens, accepted, seconds in rows]


def report(text: list[str] | None = None) -> dict[str, Any]:
    """Make a report: four tokens take 3 s plainly, and 1 s with a pass that keeps two drafted tokens."""
    text = text or ["a", " b", "\n  c", " d"]
    plain = steps(([text[0]], 0, 0.0), *(([token], 0, 1.0) for token in text[1:]))
    drafted = steps(([text[0]], 0, 0.0), (text[1:], 2, 1.0))
    return {
        "target": "T",
        "drafter": "D",
        "prompt": "P",
        "commit": "c",
        "hardware": {"processor": "X", "cores": 2, "threads": 1},
        "plain": {"seconds": 3.0, "steps": plain},
        "speculative": {"seconds": 1.0, "steps": drafted},
        "speedup": 3.0,
    }


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


# --- the picture ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_the_committed_picture_is_drawn_from_the_committed_report(path: Path) -> None:
    told, svg = json.loads(REPORT.read_text()), path.read_text()
    assert svg == drawing.picture(told, "narrow" in path.stem)
    assert len(svg) < 150_000
    plain, fast = told["plain"], told["speculative"]
    same, text = ("".join(token for step in run["steps"] for token in step["tokens"]) for run in (plain, fast))
    assert same == text and len(text) > 100
    for run in (plain, fast):
        assert sum(step["seconds"] for step in run["steps"]) == pytest.approx(run["seconds"])
        counter = (
            f"{run['tokens']} tokens · {run['tokens_per_pass']:.2f} per pass · {run['tokens_per_second']:.0f} tokens/s"
        )
        assert counter in texts(svg) and f"{run['seconds']:.3f} s" in texts(svg)
    assert told["speedup"] == pytest.approx(plain["seconds"] / fast["seconds"])
    assert f"{told['speedup']:.2f}× the speed, the same text" in texts(svg)


# --- the report -------------------------------------------------------------------------------------------------------


def test_one_command_decodes_both_ways_and_draws_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(vocab=128).save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    output, written = tmp_path / "pictures" / "decode.svg", tmp_path / "results" / "decode.json"
    words = ["--target", str(tmp_path / "target"), "--drafter", "lookup", "--prompt", "abcabcabc", "--dtype", "fp32"]
    words += ["--max-new-tokens", "12", "--runs", "2", "--report", str(written), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["record_decode.py", *words])
    recording.main()
    told = json.loads(written.read_text())
    assert told["plain"]["tokens"] == told["speculative"]["tokens"] == 12
    assert told["plain"]["passes"] == 11 >= told["speculative"]["passes"]
    assert told["plain"]["steps"][0]["seconds"] == 0 and len(told["plain"]["seconds_of_each_run"]) == 2
    assert told["target"] == "target" and {"hardware", "versions", "commit"} <= told.keys()
    assert output.read_text() == drawing.picture(told)
    assert recording.narrow_of(output).read_text() == drawing.picture(told, narrow=True)
    assert f"({told['speedup']:.2f} times the speed of plain decoding)" in capsys.readouterr().out
    output.unlink()
    monkeypatch.setattr(sys, "argv", ["record_decode.py", "--redraw", *words[-4:]])
    recording.main()
    assert output.read_text() == drawing.picture(told)
