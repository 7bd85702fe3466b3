"""Counts of speculation in the forms that three servers write."""

import math

import pytest

from decoding.errors import UserError
from trainer.servers.counters import Counts, NoCounts, parse_counts

VLLM_PAGE = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.78e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 120.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 70.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 35.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 15.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""


def test_a_metrics_page_of_vllm_gives_every_count() -> None:
    counts = parse_counts(VLLM_PAGE)
    assert counts == Counts("vLLM", 100, 300, 120, (70, 35, 15), cumulative=True)
    assert counts.acceptance_length == 1 + sum(counts.reached) / 100 == 2.2
    assert counts.tokens == 3


def test_two_engines_of_one_server_are_added_up() -> None:
    page = VLLM_PAGE + VLLM_PAGE.replace('engine="0"', 'engine="1"')
    assert parse_counts(page) == Counts("vLLM", 200, 600, 240, (140, 70, 30), cumulative=True)


def test_only_the_counts_between_two_readings_are_those_of_a_replay() -> None:
    later = VLLM_PAGE.replace(" 100.0", " 150.0").replace(" 300.0", " 450.0").replace(" 120.0", " 170.0")
    later = later.replace(" 70.0", " 105.0").replace(" 35.0", " 50.0")
    counts = parse_counts(later).since(parse_counts(VLLM_PAGE))
    assert counts == Counts("vLLM", 50, 150, 50, (35, 15, 0), cumulative=True)
    with pytest.raises(ValueError, match="restarted"):
        parse_counts(VLLM_PAGE).since(parse_counts(later))


def test_llama_cpp_counts_on_its_metrics_page_under_its_own_name() -> None:
    page = parse_counts(VLLM_PAGE.replace("vllm:", "llamacpp:"))
    assert (page.server, page.drafts, page.reached) == ("llama.cpp", 100, (70, 35, 15))


def test_sglang_gives_a_length_alone() -> None:
    page = 'sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.2\nsglang:spec_accept_rate{tp_rank="0"} 0.55\n'
    assert parse_counts(page) == Counts("SGLang", length=2.2)
    assert parse_counts(page).since(parse_counts(page)).length == 2.2


@pytest.mark.parametrize(("idle", "length"), [((0.0,), 3.2), ((0.0, 2.2), 2.7)])
def test_an_engine_that_has_not_drafted_does_not_enter_the_average(idle: tuple[float, ...], length: float) -> None:
    page = "".join(f'sglang:spec_accept_length{{dp_rank="{i}"}} {at}\n' for i, at in enumerate((3.2, *idle)))
    assert parse_counts(page).length == pytest.approx(length)
    nobody = parse_counts('sglang:spec_accept_length{dp_rank="0"} 0.0\n')
    assert nobody == Counts("SGLang") and math.isnan(nobody.acceptance_length)


@pytest.mark.parametrize("page", [VLLM_PAGE, 'sglang:spec_accept_length{model_name="m"} 2.2\n'], ids=["vLLM", "SGLang"])
def test_two_models_on_a_page_are_not_mixed_but_chosen_by_name(page: str) -> None:
    other = page.replace('"m"', '"other"').replace(" 120.0", " 20.0").replace(" 2.2", " 1.2")
    assert parse_counts(page + other, "m") == parse_counts(page) == parse_counts(page, "an alias of the only model")
    assert parse_counts(page + other, "other").acceptance_length == 1.2
    with pytest.raises(UserError, match="count 'm' and 'other': name one of them as --model") as error:
        parse_counts(page + other)
    assert not isinstance(error.value, NoCounts), "it is not hidden"


@pytest.mark.parametrize("text", ["hello", "vllm:num_requests_running 0.0\n", "{half"])
def test_a_text_without_counts_is_rejected(text: str) -> None:
    with pytest.raises(NoCounts):
        parse_counts(text)
