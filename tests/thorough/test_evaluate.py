"""The evaluation with its peers and its report, on tiny models."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import GenerationConfig

from decoding.drafters import DraftModelDrafter, HybridDrafter, MedusaDrafter, PromptLookupDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.measure.measurement import count_steps, evaluate
from decoding.measure.methods import SETTINGS, EvaluationConfig, Method, Run, standard_methods, transformers_generate
from decoding.measure.report.page import write_html
from decoding.measure.results import SameTexts, as_json, report_from_json, write_report
from decoding.metrics import acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.sampling import SamplingConfig

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9)]
GREEDY = EvaluationConfig(max_new_tokens=6, settings=("greedy",))


@pytest.fixture(scope="module")
def report(tiny_llama: CausalLM, tiny_draft: CausalLM) -> dict[str, Any]:
    """Evaluate a draft and prompt lookup in every setting on three prompts; return the report."""
    drafters = {"draft": DraftModelDrafter(tiny_draft, 2), "prompt lookup": PromptLookupDrafter()}
    config = EvaluationConfig(max_new_tokens=12, settings=SETTINGS)
    methods = standard_methods(tiny_llama, drafters, config)
    found: dict[str, Any] = as_json(evaluate(tiny_llama, methods, PROMPTS, config))
    return found


def row(report: dict[str, Any], setting: str, method: str) -> dict[str, Any]:
    (found,) = [row for row in report["rows"] if (row["setting"], row["method"]) == (setting, method)]
    return found


# --- methods ----------------------------------------------------------------------------------------------------------


def test_every_method_is_measured_under_every_setting_and_only_typical_acceptance_is_lossy(
    report: dict[str, Any],
) -> None:
    names = {(row["setting"], row["method"]): row["label"] for row in report["rows"]}
    assert len(names) == len(report["rows"]) == 2 * 6 + 3
    assert ("greedy", "transformers generate") in names and ("T=1", "transformers assisted, 2 tokens") in names
    assert {name for name, label in names.items() if label == "lossy"} == {
        ("T=1, typical", "draft"),
        ("T=1, typical", "prompt lookup"),
    }


def test_by_default_methods_decode_greedily_and_at_temperature_1_by_lossless_rules(
    tiny_llama: CausalLM, tiny_draft: CausalLM
) -> None:
    heads = MedusaDrafter(MedusaHeads.for_target(tiny_llama.model, MedusaConfig(16, 16)))
    drafters = {"heads": heads, "draft": DraftModelDrafter(tiny_draft, 2), "lookup": PromptLookupDrafter()}
    methods = standard_methods(tiny_llama, drafters, EvaluationConfig())
    ours = [(each.setting, each.name) for each in methods if not each.name.startswith("transformers")]
    assert ours == [(setting, name) for setting in ("greedy", "T=1") for name in ("plain", *drafters)]
    assert {each.label for each in methods} == {"lossless"}
    assert {each.name: each.artefact for each in methods if each.artefact} == {
        "transformers assisted, 2 tokens": "draft",
        "transformers assisted, its defaults": "draft",
        "heads": "heads",
        "draft": "draft",
    }
    assert HybridDrafter(heads, PromptLookupDrafter()).artefact == "heads"


def test_a_padded_draft_is_measured_without_the_peer_that_cannot_take_it(tiny_llama: CausalLM) -> None:
    padded = DraftModelDrafter(CausalLM(tiny_model(vocab=20, seed=1)), 2)
    methods = standard_methods(tiny_llama, {"draft": padded}, GREEDY)
    assert [method.name for method in methods] == ["plain", "draft", "transformers generate"]
    assert evaluate(tiny_llama, methods, PROMPTS, GREEDY).rows[1].identical_to_plain == SameTexts(3, 3, 0.0)


def test_what_cannot_be_measured_is_refused_before_anything_runs(tiny_llama: CausalLM) -> None:
    with pytest.raises(ValueError, match="list of prompts is empty"):
        evaluate(tiny_llama, standard_methods(tiny_llama, {}, GREEDY), [], GREEDY)
    with pytest.raises(ValueError, match="a prompt of 90 tokens and 12 new tokens exceed the target's context of 96"):
        evaluate(tiny_llama, [], [*PROMPTS, (1,) * 90], EvaluationConfig(max_new_tokens=12))
    with pytest.raises(ValueError, match="setting is 'beam'"):
        EvaluationConfig(settings=("beam",))
    with pytest.raises(ValueError, match=r"temperatures are 0: use numbers above 0 \(0 is the setting greedy\)"):
        EvaluationConfig(temperatures=(0.0,))


def test_the_draft_s_prefill_counts_as_drafting_here_and_in_assisted_generation(
    tiny_llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances only while the draft reads the prompt."""
    now, draft = [0.0], CausalLM(tiny_model(seed=1))

    def reads(module: object, args: tuple[Any, ...], inputs: dict[str, Any], output: object) -> None:
        ids = inputs.get("input_ids", args[0] if args else None)
        now[0] += 100.0 * (ids is not None and ids.shape[1] >= 20)

    draft.model.register_forward_hook(reads, with_kwargs=True)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    config = EvaluationConfig(max_new_tokens=8, settings=("greedy",))
    methods = standard_methods(tiny_llama, {"draft": DraftModelDrafter(draft, 2)}, config)
    runs = [each.decode([[1, 2, 3, 4] * 5], [0], 1)[0] for each in methods if each.drafter and each.decode]
    assert [(run.first_seconds, run.decode_seconds) for run in runs] == [(0.0, 100.0)] * 3


# --- rows -------------------------------------------------------------------------------------------------------------


def test_greedy_texts_in_fp32_are_all_identical_and_plain_decoding_is_its_own_measure(report: dict[str, Any]) -> None:
    greedy = [row["identical_to_plain"] for row in report["rows"] if row["setting"] == "greedy"]
    assert greedy == [{"identical": 3, "of": 3, "largest_margin": 0.0, "margins": [], "ended_early": 0}] * 6
    plain = row(report, "greedy", "plain")
    assert plain["tokens_per_pass"]["value"] == plain["speedup"]["median"] == 1
    assert plain["passes"] == 3 * 11  # twelve tokens each, the first from the prefill
    split = row(report, "greedy", "draft")["time_split"]
    assert sum(split.values()) == pytest.approx(1) and min(split.values()) >= 0


def test_the_report_names_the_machine_the_versions_and_the_commit_and_survives_being_written(
    report: dict[str, Any], tmp_path: Path
) -> None:
    assert report["hardware"]["processor"] and report["versions"]["torch"] == torch.__version__ and report["commit"]
    assert set(report["cost_curve_ms"]) == {"1", "2", "4", "8", "16", "32"}
    write_report(report_from_json(report), tmp_path / "new" / "report.json")
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == report


def test_texts_that_differ_are_reported_with_their_margin_and_those_that_ended_early_apart(
    tiny_llama: CausalLM,
) -> None:
    plain = Method("greedy", "plain", "lossless", lambda *asked: [Run((3, 4, 5), 2, 1.0, 1.0)])
    texts = {1: (3, 4), 4: (3, 4, 6), 6: (3, 4, 5)}
    bent = Method("greedy", "bent", "lossless", lambda prompts, *_: [Run(texts[prompts[0][0]], 1, 1.0, 1.0)])
    found = row(as_json(evaluate(tiny_llama, [plain, bent], PROMPTS, GREEDY)), "greedy", "bent")["identical_to_plain"]
    assert (found["identical"], found["of"], found["ended_early"]) == (1, 3, 1)
    assert found["margins"] == [found["largest_margin"]]
    alone = as_json(evaluate(tiny_llama, [plain, bent], PROMPTS[:1], GREEDY))
    assert row(alone, "greedy", "bent")["identical_to_plain"]["largest_margin"] is None
    json.dumps(alone, allow_nan=False)


def test_the_speed_up_of_totals_weighs_a_text_by_its_time_and_the_median_does_not(tiny_llama: CausalLM) -> None:
    """Plain decoding takes 24 seconds and the method 22; of three paired runs, two are twice as fast."""

    def method(name: str, short: float) -> Method:
        def run(prompts: Any, *_: Any) -> list[Run]:  # the first token comes from the prefill, which takes a second
            tokens = 101 if len(prompts[0]) == 2 else 11
            return [Run((3,) * tokens, tokens - 1, 1.0, 20.0 if len(prompts[0]) == 2 else short)]

        return Method("greedy", name, "lossless", run)

    methods = [method("plain", 2.0), method("quick", 1.0)]
    found = row(as_json(evaluate(tiny_llama, methods, PROMPTS, GREEDY)), "greedy", "quick")
    assert found["speedup_of_totals"]["value"] == pytest.approx(24 / 22) and found["speedup"]["median"] == 2.0
    assert found["speedup_with_prefill_of_totals"]["value"] == pytest.approx(27 / 25)
    assert found["speedup_of_totals"]["low"] is None, "an interval needs eight observations"
    assert found["speedup_over_transformers"] is None and found["speedup_over_transformers_of_totals"] is None


def test_a_text_that_ends_at_once_leaves_valid_json_and_the_other_texts_figures(
    tiny_llama: CausalLM, tmp_path: Path
) -> None:
    first = Engine(tiny_llama).decode(PROMPTS[0], DecodingConfig(1)).tokens
    config = EvaluationConfig(max_new_tokens=6, settings=("greedy",), eos_token_ids=first)
    methods = standard_methods(tiny_llama, {}, config)
    assert evaluate(tiny_llama, methods, PROMPTS, config).rows[0].passes
    alone = evaluate(tiny_llama, methods, PROMPTS[:1], config)
    assert alone.rows[0].tokens_per_second and alone.rows[0].tokens_per_second.value is None
    write_report(alone, tmp_path / "report.json")
    write_html(alone, tmp_path / "report.html")
    assert "NaN" not in (tmp_path / "report.json").read_text()


def test_greedy_rounds_do_not_count_as_texts_of_their_own(tiny_llama: CausalLM) -> None:
    figures = []
    for rounds in (1, 3):
        config = EvaluationConfig(max_new_tokens=8, settings=("greedy",), rounds=rounds)
        methods = standard_methods(tiny_llama, {"prompt lookup": PromptLookupDrafter()}, config)
        found = evaluate(tiny_llama, methods, PROMPTS, config).rows[1]
        assert found.tokens_per_second and found.speedup and found.speedup.observations == rounds * 3
        figures.append((found.tokens_per_pass, found.passes, found.tokens_per_second.observations))
    assert figures[0] == figures[1]


# --- peers ------------------------------------------------------------------------------------------------------------


def test_transformers_is_timed_from_its_first_tokens_alone_and_in_batches(tiny_llama: CausalLM) -> None:
    texts = transformers_generate(tiny_llama, PROMPTS, DecodingConfig(8))
    assert [text.tokens for text in texts] == [
        Engine(tiny_llama).decode(prompt, DecodingConfig(8)).tokens for prompt in PROMPTS
    ]
    assert len({(text.first_seconds, text.decode_seconds) for text in texts}) == 1, "they share the batch's seconds"
    assert all(text.decode_tokens == 7 and text.first_seconds > 0 and text.decode_seconds > 0 for text in texts)
    (alone,) = transformers_generate(tiny_llama, PROMPTS[:1], DecodingConfig(8))
    assert (alone.tokens, alone.decode_tokens) == (texts[0].tokens, 7)


def test_a_peer_takes_our_controls_and_none_from_the_models_own_generation_config(tiny_llama: CausalLM) -> None:
    plain = Engine(tiny_llama).decode(PROMPTS[0], DecodingConfig(8)).tokens
    own = tiny_llama.model.generation_config
    try:
        tiny_llama.model.generation_config = GenerationConfig(bad_words_ids=[[t] for t in range(8)], min_p=0.5)
        peculiar = tiny_llama.model.generation_config
        for sampling in (SamplingConfig(), SamplingConfig(1.0, top_k=1)):
            (text,) = transformers_generate(tiny_llama, PROMPTS[:1], DecodingConfig(8, sampling))
            assert text.tokens == plain and tiny_llama.model.generation_config is peculiar
    finally:
        tiny_llama.model.generation_config = own


def test_a_peers_run_leaves_torchs_global_chance_as_it_was_and_repeats_by_its_seed(tiny_llama: CausalLM) -> None:
    config = DecodingConfig(12, SamplingConfig(2.0), seed=3)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    for prompts in (PROMPTS[:1], PROMPTS):
        first, again = (transformers_generate(tiny_llama, prompts, config) for _ in range(2))
        assert [text.tokens for text in first] == [text.tokens for text in again]
    assert torch.equal(torch.get_rng_state(), before)


# --- acceptance alone -------------------------------------------------------------------------------------------------


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
        assert count_steps(tiny_llama, drafter, PROMPTS, config, batch_size) == texts
