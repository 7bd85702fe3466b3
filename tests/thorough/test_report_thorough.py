"""What a report says of its figures: totals before medians, shares with counts, sentences that its data bear out."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_report import of_rows, parted

from decoding.measure.figures import greedy_sentence
from decoding.measure.report import terminal_table, write_html


@pytest.mark.parametrize(
    ("compared", "facts", "sentence"),
    [
        ([parted(4, 4, 0.0), parted(4, 4, 0.0)], {}, "All 8 greedy texts are identical to plain decoding's."),
        (
            [parted(4, 4, 0.0), parted(3, 4, 0.125)],
            {},
            "1 of 8 greedy texts differ from plain decoding's; where they part, the two candidates' logits are at most "
            "0.125 apart, near-ties, which a pass over several tokens may round the other way in bfloat16.",
        ),
        (
            [parted(3, 4, 4.5)],
            {},
            "1 of 4 greedy texts differ from plain decoding's; where they part, the two candidates' logits are at most "
            "4.5 apart, more than rounding in bfloat16 explains: look at these texts, and report a fault.",
        ),
        (
            [parted(2, 4, 0.001)],
            {"dtype": "float32"},
            "2 of 4 greedy texts differ from plain decoding's; where they part, the two candidates' logits are at most "
            "0.001 apart. In fp32 on a CPU none may: this is a fault, please report it.",
        ),
        (
            [parted(3, 4, None, early=1)],
            {},
            "1 of 4 greedy texts differ from plain decoding's; one ended where the other went on, which rounding does "
            "not explain: a fault to report.",
        ),
        (
            [parted(3, 4, None)],
            {},
            "1 of 4 greedy texts differ from plain decoding's, by a margin that was not measured.",
        ),
        ([None], {}, ""),
    ],
)
def test_the_sentence_on_greedy_texts_is_made_of_this_reports_data(
    compared: list[dict[str, Any] | None], facts: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    report = of_rows(*compared, **facts)
    assert greedy_sentence(report) == sentence
    gpu = of_rows(*compared, **facts, hardware={"processor": "X", "gpu": "Y", "cores": 1, "threads": 1})
    assert "on a CPU" not in greedy_sentence(gpu)
    report["cost_curve_ms"] = {"1": 1.0, "2": 1.5}
    write_html(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text().replace("&#39;", "'")
    console = Console(file=io.StringIO(), width=600)
    console.print(terminal_table(report))
    said = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]  # the StringIO above
    for place in (page, said):
        assert sentence in place and "near-ties may fall either way" not in place and "CPU all are" not in place
