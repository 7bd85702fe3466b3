"""Tests of engines by `verify`: what is compared with the target, what counts as a fault, and which test finds it."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from planted_faults import Planted, planted, tiny_prompts, tiny_target
from tiny_models import full_forward, naive_greedy

from decoding.drafters import PromptLookupDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.measure.proof.distribution import counts_after, likely_beginnings
from decoding.measure.proof.finding import Finding
from decoding.measure.proof.greedy import cut_at_ends, ends, greedy_identity
from decoding.measure.proof.prove import Effort, EngineWriter, prove
from decoding.measure.proof.reference import EngineText, Reference
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig

SAMPLED = SamplingConfig(1.0)
PROMPTS = tiny_prompts(8)
END = 2
EFFORT = Effort(max_new_tokens=16, draws=150, rounds=3)


@cache
def target() -> CausalLM:
    return tiny_target()


@cache
def faults() -> dict[str, Planted]:
    return {each.name: each for each in planted(target(), SAMPLED, (END,), batch_size=64)}


def reference(*eos: int, sampling: SamplingConfig = SAMPLED) -> Reference:
    return Reference(target(), sampling, eos)


def greedy_texts(count: int = 12) -> list[EngineText]:
    return [EngineText(prompt, naive_greedy(target().model, prompt, count)) for prompt in PROMPTS[:4]]


# --- the reference ----------------------------------------------------------------------------------------------------


def test_the_reference_is_the_softmax_of_plain_forwards_whatever_texts_run_together() -> None:
    texts = [*greedy_texts(), EngineText((1,), (2, 3))]
    for text, (p, tokens) in zip(texts, reference().probabilities(texts), strict=True):
        whole = [*text.prompt, *text.tokens]
        alone = full_forward(target().model, whole)[len(text.prompt) - 1 : -1].double().softmax(-1)
        assert torch.allclose(p, alone, atol=1e-5) and tokens.tolist() == list(text.tokens)


def test_a_penalty_sees_the_text_before_each_token() -> None:
    sampling = SamplingConfig(1.0, repetition_penalty=2.0)
    ((p, _),) = reference(sampling=sampling).probabilities([EngineText((1, 2), (3, 4))])
    logits = full_forward(target().model, [1, 2, 3])
    for row, seen in enumerate(({1, 2}, {1, 2, 3})):
        expected = logits[1 + row].double()
        for token in seen:
            expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
        assert torch.allclose(p[row], expected.softmax(-1), atol=1e-5)


def test_several_ends_count_as_one() -> None:
    text = [EngineText((1, 2), (3, 7))]
    ((p, tokens),) = reference(5, 7).probabilities(text)
    ((alone, _),) = reference().probabilities(text)
    assert tokens.tolist() == [3, 5]
    assert torch.allclose(p[:, 5], alone[:, 5] + alone[:, 7]) and float(p[:, 7].sum()) == 0


def test_the_margin_of_several_ends_is_that_of_the_best_of_them() -> None:
    logits = full_forward(target().model, [1, 2, 3])[1:]
    ((margins, best),) = reference(5, 7).margins([EngineText((1, 2), (3, 7))])
    ends = logits[:, [5, 7]].amax(1)
    own = torch.stack([logits[0, 3], ends[1]])
    assert torch.allclose(margins, torch.maximum(logits.amax(1), ends) - own, atol=1e-5)
    assert best.tolist() == [5 if token == 7 else token for token in logits.argmax(1).tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_with_several_ends_passes_every_test(dtype: torch.dtype) -> None:
    several = CausalLM(copy.deepcopy(target().model).to(dtype))
    proof = Reference(several, SAMPLED, (END, 5, 7))
    engine = Engine(several, PromptLookupDrafter(3))
    writer = EngineWriter(engine, DecodingConfig(sampling=SAMPLED, eos_token_ids=(END, 5, 7)), batch_size=64)
    assert all(finding.passed for finding in prove(proof, writer, PROMPTS, EFFORT))


# --- greedy texts -----------------------------------------------------------------------------------------------------


def test_the_targets_own_greedy_texts_are_identical() -> None:
    finding = greedy_identity(reference(), greedy_texts())
    assert finding.passed and finding.figures["identical"] == 4 and finding.figures["first_divergence"] is None


def test_another_token_is_a_fault_with_its_place_and_its_margin() -> None:
    texts = greedy_texts()
    tokens = list(texts[1].tokens)
    logits = full_forward(target().model, [*texts[1].prompt, *tokens])[len(texts[1].prompt) + 4]
    wrong = int(logits.argmin())
    texts[1] = EngineText(texts[1].prompt, (*tokens[:5], wrong))
    finding = greedy_identity(reference(), texts)
    assert not finding.passed and finding.figures["identical"] == 3 and finding.figures["faults"] == 1
    fault = finding.figures["first_fault"]
    assert (fault["text"], fault["position"], fault["token"], fault["best"]) == (2, 6, wrong, tokens[5])
    assert fault["margin"] == pytest.approx(float(logits.max() - logits.min()), abs=1e-4)


def test_a_token_that_is_as_good_up_to_rounding_is_a_near_tie_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = greedy_texts()[:1]
    second = int(full_forward(target().model, text.prompt)[-1].topk(2).indices[1])
    other = [EngineText(text.prompt, (second, *naive_greedy(target().model, (*text.prompt, second), 5)))]
    assert not greedy_identity(reference(), other).passed
    monkeypatch.setattr("decoding.measure.proof.greedy.near_tie", lambda dtype: 100.0)
    finding = greedy_identity(reference(), other)
    assert finding.passed and finding.figures["near_ties"] == 1 and finding.figures["identical"] == 0


@pytest.mark.parametrize(
    ("tokens", "behind", "early"),
    [
        ((1, 2, 3, 4), 0, 0),
        ((1, 9), 0, 0),
        ((1, 2, 3, 9), 0, 0),
        ((1, 9, 2), 1, 0),
        ((1, 2, 3, 4, 5), 1, 0),
        ((1, 2), 0, 1),
        ((), 0, 1),
    ],
)
def test_a_text_stops_at_its_first_end_or_at_its_greatest_length(
    tokens: tuple[int, ...], behind: int, early: int
) -> None:
    finding = ends(reference(9), [EngineText((1,), tokens)], max_new_tokens=4)
    assert (finding.figures["behind_their_end"], finding.figures["early"]) == (behind, early)
    assert finding.passed == (not behind and not early)


def test_tokens_behind_the_end_are_left_out_of_the_other_tests() -> None:
    texts = [EngineText((1,), (2, 9, 3)), EngineText((1,), (2, 3, 4, 5, 6))]
    assert [text.tokens for text in cut_at_ends(reference(9), texts, 4)] == [(2, 9), (2, 3, 4, 5)]


# --- counts -----------------------------------------------------------------------------------------------------------


def test_the_counts_after_a_beginning_hold_all_probability_and_all_draws() -> None:
    texts = [text.tokens for text in faults()["none: plain decoding"].writer.write([PROMPTS[0]] * 200, 3, False, 0)]
    p_after = likely_beginnings(reference(END), PROMPTS[0], 200)
    first = counts_after((), p_after[()], texts)
    assert float(first.counts.sum()) == 200 and float(first.p.sum()) == pytest.approx(1)
    assert bool((first.p[:-1] * 200 >= 5).all())
    seconds = [counts_after(path, p, texts) for path, p in p_after.items() if len(path) == 1]
    assert len(seconds) > 1 and all(float(each.p.sum()) == pytest.approx(1) for each in seconds)
    assert sum(float(each.counts.sum()) for each in seconds) <= 200


# --- engines ----------------------------------------------------------------------------------------------------------


def first_failure(fault: Planted, effort: Effort = EFFORT) -> Finding:
    return next(finding for finding in prove(fault.reference, fault.writer, PROMPTS, effort) if not finding.passed)


def test_a_right_engine_passes_every_test() -> None:
    right = faults()["none: a draft that is half right"]
    findings = list(prove(right.reference, right.writer, PROMPTS, EFFORT))
    assert len(findings) == 7 and all(finding.passed for finding in findings)
    accepted = [step.accepted for step in right.writer.engine.steps(PROMPTS[0], DecodingConfig(32, SAMPLED))]
    assert sum(accepted) > 0 and 0 in accepted[1:], "a draft that is never refused, or never kept, proves little"


def test_no_residual_after_a_refusal_is_caught_by_the_log_probability() -> None:
    caught = first_failure(faults()["no residual after a refusal"], replace(EFFORT, rounds=8))
    assert caught.check == "mean log-probability" and caught.figures["p_value"] < 1e-9


def test_tokens_behind_the_end_are_caught() -> None:
    assert first_failure(faults()["the EOS is overrun"]).check == "ends of texts"


def test_a_stale_cache_entry_is_caught_in_the_greedy_texts() -> None:
    assert first_failure(faults()["a stale cache entry"]).check == "greedy identity"


def test_at_temperature_zero_only_greedy_texts_are_tested() -> None:
    greedy = reference(sampling=SamplingConfig())
    writer = EngineWriter(Engine(target()), DecodingConfig(sampling=SamplingConfig()))
    assert [finding.check for finding in prove(greedy, writer, PROMPTS, EFFORT)] == ["ends of texts", "greedy identity"]


def test_each_text_has_a_seed_of_its_own_and_the_same_in_every_run() -> None:
    writer = faults()["none: plain decoding"].writer
    asked: Sequence[tuple[int, ...]] = [PROMPTS[0]] * 6
    texts = writer.write(asked, 8, False, 3)
    assert texts == writer.write(asked, 8, False, 3) and len(set(texts)) > 3


def test_no_draw_reaches_further_than_the_texts_before_it() -> None:
    """Otherwise a prompt that just fits the target's context would not fit any more, after an hour of tests."""
    right = faults()["none: plain decoding"].writer
    reached = []

    class Spy:
        def write(
            self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, greedy: bool, seed: int
        ) -> list[EngineText]:
            reached.append(max(map(len, prompts)) + max_new_tokens)
            return right.write(prompts, max_new_tokens, greedy, seed)

    prompts = [(1, 2, 3)] * 4
    for tokens in (3, 5, 16):
        list(prove(reference(), Spy(), prompts, Effort(max_new_tokens=tokens, draws=20)))
    assert len(reached) == 9 and reached[2] <= 3 + 3 and reached[5] <= 3 + 5 and reached[8] <= 3 + 16
