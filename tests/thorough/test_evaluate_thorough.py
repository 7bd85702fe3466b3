"""The evaluation, its peers and its report, on tiny models."""

# ruff: noqa: F811  # a fixture comes by the name that it is imported under
from pathlib import Path
from typing import Any

from test_evaluate import PROMPTS, report  # noqa: F401  # a fixture
from tiny_models import tiny_model

from decoding.drafters import DraftModelDrafter, PromptLookupDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.evaluate import (
    EvaluationConfig,
    evaluate,
    standard_methods,
    write_report,
)
from decoding.measure.report import table_rows, write_html
from decoding.model.causal_lm import CausalLM


def test_a_padded_draft_is_measured_without_the_peer_that_cannot_take_it(tiny_llama: CausalLM) -> None:
    padded = CausalLM(tiny_model(vocab=20, seed=1))
    config = EvaluationConfig(max_new_tokens=6, settings=("greedy", "sampling"))
    methods = standard_methods(tiny_llama, {"draft": DraftModelDrafter(padded, 2)}, config)
    assert [method.name for method in methods] == ["plain", "transformers generate", "draft"] * 2
    rows = evaluate(tiny_llama, methods, PROMPTS, config)["rows"]
    assert rows[2]["identical_to_plain"]["identical"] == 3


def test_a_text_that_ends_at_once_leaves_valid_json_and_the_other_texts_figures(
    tiny_llama: CausalLM, tmp_path: Path
) -> None:
    first = Engine(tiny_llama).decode(PROMPTS[0], DecodingConfig(1)).tokens
    config = EvaluationConfig(max_new_tokens=6, settings=("greedy",), eos_token_ids=first)
    measured = evaluate(tiny_llama, standard_methods(tiny_llama, {}, config), PROMPTS, config)
    assert measured["rows"][0]["passes"] > 0
    alone = evaluate(tiny_llama, standard_methods(tiny_llama, {}, config), PROMPTS[:1], config)
    assert alone["rows"][0]["tokens_per_second"]["value"] is None
    write_report(alone, tmp_path / "report.json")
    write_html(alone, tmp_path / "report.html")
    assert "NaN" not in (tmp_path / "report.json").read_text()


def test_greedy_rounds_do_not_count_as_texts_of_their_own(tiny_llama: CausalLM) -> None:
    figures = []
    for rounds in (1, 3):
        config = EvaluationConfig(max_new_tokens=8, settings=("greedy",), rounds=rounds)
        drafters = {"prompt lookup": PromptLookupDrafter()}
        rows = evaluate(tiny_llama, standard_methods(tiny_llama, drafters, config), PROMPTS, config)["rows"]
        figures.append((rows[-1]["tokens_per_pass"], rows[-1]["passes"], rows[-1]["tokens_per_second"]["observations"]))
        assert rows[-1]["speedup"]["observations"] == rounds * 3
    assert figures[0] == figures[1]


def test_the_page_stands_alone_and_holds_every_figure(report: dict[str, Any], tmp_path: Path) -> None:
    write_html({**report, "title": "a <b>title</b>"}, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert page.count("<svg") == 5, "acceptance in each of three settings, costs, predictions"
    assert "a &lt;b&gt;title" in page
    assert "src=" not in page and "<script" not in page and "<link" not in page
    for cells in table_rows(report):
        assert all(f">{cell}</td>" in page for cell in cells)
