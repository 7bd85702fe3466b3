"""The evaluation, its peers and its report, on tiny models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from decoding.drafters import DraftModelDrafter, PromptLookupDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.baselines import transformers_generate
from decoding.measure.evaluate import (
    EvaluationConfig,
    evaluate,
    measure_acceptance,
    standard_methods,
    write_report,
)
from decoding.measure.methods import SETTINGS
from decoding.measure.report import COLUMNS, markdown_table, table_rows
from decoding.measure.report.terminal import narrow_table, wide_table
from decoding.metrics import acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_cost_curve
from decoding.rules.sampling import SamplingConfig

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9)]


@pytest.fixture(scope="module")
def report(tiny_llama: CausalLM, tiny_draft: CausalLM) -> dict[str, Any]:
    """Every setting, a draft and prompt lookup, on three prompts."""
    drafters = {"draft": DraftModelDrafter(tiny_draft, 2), "prompt lookup": PromptLookupDrafter()}
    config = EvaluationConfig(max_new_tokens=12, settings=SETTINGS)
    return evaluate(tiny_llama, standard_methods(tiny_llama, drafters, config), PROMPTS, config)


def row(report: dict[str, Any], setting: str, method: str) -> dict[str, Any]:
    (found,) = [row for row in report["rows"] if (row["setting"], row["method"]) == (setting, method)]
    return found


def test_every_method_is_measured_under_every_setting(report: dict[str, Any]) -> None:
    methods = [(row["setting"], row["method"]) for row in report["rows"]]
    assert len(methods) == len(set(methods)) == 2 * 6 + 3
    assert ("greedy", "transformers generate") in methods
    assert ("T=1", "transformers assisted, 2 tokens") in methods
    assert ("T=1, typical", "draft") in methods


def test_by_default_what_was_asked_is_decoded_greedily_and_at_temperature_1_by_lossless_rules_alone(
    tiny_llama: CausalLM, tiny_draft: CausalLM
) -> None:
    methods = standard_methods(tiny_llama, {"draft": DraftModelDrafter(tiny_draft, 2)}, EvaluationConfig())
    ours = [(each.setting, each.name) for each in methods if not each.name.startswith("transformers")]
    assert ours == [(setting, name) for setting in ("greedy", "T=1") for name in ("plain", "draft")]
    assert {each.label for each in methods} == {"lossless"}


def test_greedy_texts_in_fp32_are_all_identical(report: dict[str, Any]) -> None:
    greedy = [row for row in report["rows"] if row["setting"] == "greedy"]
    assert len(greedy) == 6
    assert all(
        row["identical_to_plain"]
        == {
            "identical": 3,
            "of": 3,
            "largest_margin": 0.0,
            "ended_early": 0,
        }
        for row in greedy
    )


def test_only_typical_acceptance_is_labelled_lossy(report: dict[str, Any]) -> None:
    lossy = {(row["setting"], row["method"]) for row in report["rows"] if row["label"] == "lossy"}
    assert lossy == {("T=1, typical", "draft"), ("T=1, typical", "prompt lookup")}


def test_plain_decoding_writes_one_token_per_pass_at_a_speed_up_of_one(report: dict[str, Any]) -> None:
    plain = row(report, "greedy", "plain")
    assert plain["tokens_per_pass"]["value"] == 1
    assert plain["speedup"]["median"] == 1
    assert plain["passes"] == 3 * 11  # twelve tokens each, the first from the prefill


def test_the_split_of_the_time_adds_up(report: dict[str, Any]) -> None:
    split = row(report, "greedy", "draft")["time_split"]
    assert sum(split.values()) == pytest.approx(1)
    assert all(share >= 0 for share in split.values())


def test_the_report_names_the_machine_the_versions_and_the_commit(report: dict[str, Any]) -> None:
    assert report["hardware"]["processor"] and report["versions"]["torch"] == torch.__version__ and report["commit"]
    assert set(report["cost_curve_ms"]) == {"1", "2", "4", "8", "16", "32"}


def test_the_report_survives_being_written(report: dict[str, Any], tmp_path: Path) -> None:
    write_report(report, tmp_path / "new" / "report.json")
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == json.loads(json.dumps(report))


def test_a_partial_difference_is_reported_with_its_margin(tiny_llama: CausalLM) -> None:
    config = EvaluationConfig(max_new_tokens=6, settings=("greedy",))
    plain, *_ = standard_methods(tiny_llama, {}, config)
    bent = type(plain)("greedy", "bent", "lossless", lambda prompt, seed: _with_other_last(plain.decode(prompt, seed)))
    found = row(evaluate(tiny_llama, [plain, bent], PROMPTS, config), "greedy", "bent")["identical_to_plain"]
    assert found["identical"] == 0 and found["of"] == 3 and found["largest_margin"] > 0


def _with_other_last(run: Any) -> Any:
    return run._replace(tokens=(*run.tokens[:-1], (run.tokens[-1] + 1) % 16))


def test_the_tables_have_a_row_per_method(report: dict[str, Any]) -> None:
    rows, settings = report["rows"], {row["setting"] for row in report["rows"]}
    assert wide_table(report).row_count == len(rows) and narrow_table(report).row_count == len(rows) + len(settings)
    assert len(markdown_table(report).splitlines()) == len(rows) + 2
    assert all(len(cells) == len(COLUMNS) for cells in table_rows(report))


def test_no_prompts_and_an_unknown_setting_are_refused(tiny_llama: CausalLM) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        evaluate(tiny_llama, standard_methods(tiny_llama, {}, EvaluationConfig()), [], EvaluationConfig())
    with pytest.raises(ValueError, match="setting is 'beam'"):
        standard_methods(tiny_llama, {}, EvaluationConfig(settings=("beam",)))


def test_transformers_is_timed_from_its_first_token(tiny_llama: CausalLM) -> None:
    text = transformers_generate(tiny_llama, (1, 2, 3), DecodingConfig(8))
    assert text.tokens == Engine(tiny_llama).decode((1, 2, 3), DecodingConfig(8)).tokens
    assert text.first_tokens == 1 and text.first_seconds > 0 and text.decode_seconds > 0


@pytest.mark.parametrize("tokens", [3, None])
def test_assisted_generation_with_the_target_as_its_own_assistant_gives_the_same_text(
    tiny_llama: CausalLM, tokens: int | None
) -> None:
    text = transformers_generate(tiny_llama, (1, 2, 3), DecodingConfig(9), tiny_llama, tokens)
    assert text.tokens == Engine(tiny_llama).decode((1, 2, 3), DecodingConfig(9)).tokens
    assert text.first_tokens > 1


def test_sampling_controls_reach_transformers(tiny_llama: CausalLM) -> None:
    config = DecodingConfig(20, SamplingConfig(1.0, top_k=1))
    assert (
        transformers_generate(tiny_llama, (1, 2), config).tokens
        == Engine(tiny_llama).decode((1, 2), DecodingConfig(20)).tokens
    )


def test_the_quick_figures_of_a_perfect_draft(tiny_llama: CausalLM) -> None:
    figures = measure_acceptance(tiny_llama, DraftModelDrafter(tiny_llama, 2), PROMPTS, DecodingConfig(10))
    assert figures.tokens_per_pass.value == 3.0 and [share.value for share in figures.conditional] == [1.0, 1.0]
    assert figures.texts == ((9, 3),) * 3  # ten new tokens less the prefill's


def test_the_cost_curve_has_a_cost_for_each_size_within_a_short_context(tiny_llama: CausalLM) -> None:
    curve = measure_cost_curve(tiny_llama, sizes=(1, 4), prefix=500, repeats=2)  # its context holds 96
    assert set(curve) == {1, 4} and all(cost > 0 for cost in curve.values())


def test_no_rounds_and_a_prompt_too_long_are_refused_before_anything_runs(tiny_llama: CausalLM) -> None:
    with pytest.raises(ValueError, match="rounds is 0"):
        evaluate(tiny_llama, [], PROMPTS, EvaluationConfig(rounds=0))
    with pytest.raises(ValueError, match="a prompt of 90 tokens and 12 new ones make 102"):
        evaluate(tiny_llama, [], [*PROMPTS, (1,) * 90], EvaluationConfig(max_new_tokens=12))


def test_the_peer_takes_no_control_from_the_models_own_generation_config(tiny_llama: CausalLM) -> None:
    own = tiny_llama.model.generation_config
    try:
        tiny_llama.model.generation_config = GenerationConfig(bad_words_ids=[[t] for t in range(8)], min_p=0.5)
        peculiar = tiny_llama.model.generation_config
        text = transformers_generate(tiny_llama, (1, 2, 3), DecodingConfig(8))
        assert text.tokens == Engine(tiny_llama).decode((1, 2, 3), DecodingConfig(8)).tokens
        assert tiny_llama.model.generation_config is peculiar
    finally:
        tiny_llama.model.generation_config = own


def test_acceptance_is_measured_on_texts_of_seeds_of_their_own_alone_and_in_batches(
    tiny_llama: CausalLM, tiny_draft: CausalLM
) -> None:
    drafter, sampling = DraftModelDrafter(tiny_draft, 2), SamplingConfig(temperature=1.0)
    texts = []
    for seed, prompt in enumerate(PROMPTS, start=5):
        steps = Engine(tiny_llama, drafter).decode(prompt, DecodingConfig(12, sampling, seed=seed)).steps[1:]
        texts.append([step.counts for step in steps])
    config = DecodingConfig(12, sampling, seed=5)
    assert acceptance(texts).accepted_per_drafted.value > 0
    for batch_size in (1, 3):
        assert measure_acceptance(tiny_llama, drafter, PROMPTS, config, batch_size) == acceptance(texts)


def test_measuring_acceptance_tells_of_every_text_that_ends_however_it_does(
    tiny_llama: CausalLM, tiny_draft: CausalLM
) -> None:
    drafter, ended = DraftModelDrafter(tiny_draft, 2), []
    plain = Engine(tiny_llama).decode(PROMPTS[0], DecodingConfig(12)).tokens
    for ends in ((), plain[:1], plain[5:6]):  # none, at once, somewhere
        ended.clear()
        config = DecodingConfig(12, eos_token_ids=ends)
        measure_acceptance(tiny_llama, drafter, PROMPTS, config, 2, lambda: ended.append(1))
        assert len(ended) == len(PROMPTS)
