"""What a report says of its figures: totals before medians, shares with counts, sentences that its data bear out."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from rich.console import Console

from decoding.drafters import DraftModelDrafter, HybridDrafter, MedusaDrafter, PromptLookupDrafter
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.measure.evaluate import EvaluationConfig, Method, Run, evaluate, standard_methods
from decoding.measure.figures import counted, estimate, identical, number, shares, speedup
from decoding.measure.report import markdown_table, speedup_figure, table_rows, terminal_table, write_html
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8)]
ESTIMATE = {"value": 2.5, "low": 2.25, "high": 2.75, "observations": 12}
SPREAD = {"median": 1.75, "low_quartile": 1.5, "high_quartile": 2.0, "observations": 12}
NOTHING = {"value": None, "low": None, "high": None, "observations": 0}
NO_SPREAD = {"median": None, "low_quartile": None, "high_quartile": None, "observations": 0}


def method(name: str, seconds: dict[int, float]) -> Method:
    """Writes two texts of 11 tokens and, for the prompt of two tokens, one of 101, in seconds by the prompt's length.

    The first token comes from the prefill, which takes a second.
    """

    def run(prompt: Any, seed: int) -> Run:
        tokens = 101 if len(prompt) == 2 else 11
        return Run(tuple([3] * tokens), tokens - 1, 1.0, seconds[len(prompt)])

    return Method("greedy", name, "lossless", run)


def measured(target: CausalLM) -> dict[str, Any]:
    """A method that is twice as fast on two short texts, and as fast as plain decoding on the long one."""
    methods = [method("plain", {3: 2.0, 2: 20.0}), method("quick", {3: 1.0, 2: 20.0})]
    report = evaluate(target, methods, PROMPTS, EvaluationConfig(max_new_tokens=4))
    row: dict[str, Any] = report["rows"][1]
    return {**report, "rows": [row]}


def of_rows(*compared: dict[str, Any] | None, **facts: Any) -> dict[str, Any]:
    """A report with a greedy row for each of these comparisons, in bf16 on a CPU unless told otherwise."""
    rows = [
        {
            "setting": "greedy",
            "method": f"method {index}",
            "label": "lossless",
            "identical_to_plain": each,
            "tokens_per_second": ESTIMATE,
            "speedup": SPREAD,
        }
        for index, each in enumerate(compared)
    ]
    about = {"hardware": {"processor": "X", "cores": 1, "threads": 1}, "dtype": "bfloat16", "parameters": 1e6}
    return {**about, "prompts": 1, "max_new_tokens": 4, "commit": "c", "versions": {}, **facts, "rows": rows}


def parted(identical: int, of: int, margin: float | None, early: int = 0) -> dict[str, Any]:
    return {"identical": identical, "of": of, "largest_margin": margin, "ended_early": early}


# --- speed-ups ------------------------------------------------------------------------------------------------------


def test_the_speed_up_of_totals_weighs_a_text_by_its_time_and_the_median_does_not(tiny_llama: CausalLM) -> None:
    """24 seconds of plain decoding against 22; of three paired runs two are twice as fast."""
    (row,) = measured(tiny_llama)["rows"]
    assert row["speedup_of_totals"]["value"] == pytest.approx(24 / 22) and row["speedup"]["median"] == 2.0
    assert row["speedup_with_prefill_of_totals"]["value"] == pytest.approx(27 / 25)
    assert row["speedup_of_totals"]["low"] is None and row["speedup_of_totals"]["observations"] == 3  # of eight or more
    assert row["speedup_over_transformers"] is None and row["speedup_over_transformers_of_totals"] is None


def test_every_table_and_the_page_say_both_speed_ups_the_totals_first(tiny_llama: CausalLM, tmp_path: Path) -> None:
    report = measured(tiny_llama)
    assert speedup(report["rows"][0]) == "1.09×; median 2.00× [1.50, 2.00]"
    console = Console(file=io.StringIO(), width=250, record=True)
    console.print(terminal_table(report))
    assert re.search(r"1\.09× .*\n.*median 2\.00× \[1\.50, 2\.00\]", console.export_text())
    write_html(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    for place in (markdown_table(report), page):
        assert "1.09×; median 2.00× [1.50, 2.00]" in place
    figure = speedup_figure(report)
    drawn = figure.axes[0]
    assert [bar.get_width() for bar in drawn.patches] == [pytest.approx(24 / 22)]  # type: ignore[attr-defined]
    assert [text.get_text() for text in drawn.texts] == ["1.09×"]
    plt.close(figure)


def test_a_share_is_said_with_what_it_is_a_share_of() -> None:
    found = [
        {"value": 0.887, "low": 0.8, "high": 0.9, "observations": 1312},
        {"value": 1.0, "low": 0.2, "high": 1, "observations": 1},
    ]
    assert shares(found) == "0.89 (1,312) 1.00 (1)" and shares(found, most=1) == "0.89 (1,312)"
    report = of_rows(None)
    report["rows"][0]["conditional_acceptance"] = found
    report["rows"][0]["unconditional_acceptance"] = found
    assert table_rows(report)[0][4] == "0.89 (1,312) 1.00 (1)" and "| 0.89 (1,312) 1.00 (1) |" in markdown_table(report)


def test_a_method_says_which_artefact_drafts_for_it(tiny_llama: CausalLM, tiny_draft: CausalLM) -> None:
    draft, lookup = DraftModelDrafter(tiny_draft, 2), PromptLookupDrafter()
    heads = MedusaDrafter(MedusaHeads.for_target(tiny_llama.model, MedusaConfig(16, 16)))
    drafters = [draft, DraftTreeDrafter(tiny_draft), HybridDrafter(heads, lookup), heads, lookup]
    assert [drafter.artefact for drafter in drafters] == ["draft", "draft", "heads", "heads", None]
    config = EvaluationConfig(settings=("greedy",))
    methods = standard_methods(tiny_llama, {"heads": heads, "draft": draft, "lookup": lookup}, config)
    assert {method.name: method.artefact for method in methods} == {
        "plain": None,
        "transformers generate": None,
        "transformers assisted, 2 tokens": "draft",
        "transformers assisted, its defaults": "draft",
        "heads": "heads",
        "draft": "draft",
        "lookup": None,
    }


# --- what greedy texts say ------------------------------------------------------------------------------------------


def test_a_text_that_ended_early_is_counted_and_leaves_the_others_their_margin(tiny_llama: CausalLM) -> None:
    plain = Method("greedy", "plain", "lossless", lambda prompt, seed: Run((3, 4, 5), 2, 1.0, 1.0))
    cut = {1: (3, 4), 4: (3, 4, 6), 6: (3, 4, 5)}
    bent = Method("greedy", "bent", "lossless", lambda prompt, seed: Run(cut[prompt[0]], 1, 1.0, 1.0))
    report = evaluate(tiny_llama, [plain, bent], PROMPTS, EvaluationConfig(max_new_tokens=4))
    found = report["rows"][1]["identical_to_plain"]
    assert (found["identical"], found["of"], found["ended_early"]) == (1, 3, 1) and found["largest_margin"] > 0
    assert identical(found).startswith("1 of 3, largest logit margin where they part ")
    assert identical(found).endswith(", one ended early")
    alone = evaluate(tiny_llama, [plain, bent], PROMPTS[:1], EvaluationConfig(max_new_tokens=4))
    assert alone["rows"][1]["identical_to_plain"] == parted(0, 1, None, early=1)
    json.dumps(alone, allow_nan=False)


# --- figures that are not there -------------------------------------------------------------------------------------


def test_a_figure_that_could_not_be_measured_is_a_dash_everywhere(tmp_path: Path) -> None:
    assert number(None) == number(float("nan")) == "–"
    assert estimate(NOTHING) == estimate(None) == counted(NOTHING) == shares([]) == shares(None) == speedup({}) == "–"
    assert estimate({**ESTIMATE, "low": None}) == "2.50"
    report = of_rows(parted(0, 1, None, early=1))
    report["cost_curve_ms"] = {"1": 1.0}
    empty = dict.fromkeys(
        ("speedup_of_totals", "tokens_per_second", "tokens_per_pass", "accepted_per_drafted"), NOTHING
    )
    pairs = dict.fromkeys(("speedup", "speedup_with_prefill", "speedup_over_transformers"), NO_SPREAD)
    lists = {"conditional_acceptance": [NOTHING], "unconditional_acceptance": [NOTHING]}
    rest = {"accepted_length_histogram": {}, "time_split": None, "predicted_speedup": None}
    report["rows"][0] |= {**empty, **pairs, **lists, **rest}
    assert table_rows(report)[0][3:] == ("–",) * 5
    write_html(report, tmp_path / "report.html")
    assert "None" not in (tmp_path / "report.html").read_text()
