"""Counts of speculation, as three servers write them."""

import math

import pytest

from trainer.servers.counters import Counts, parse_counts

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
VLLM_LINE = (
    "INFO 11-22 20:00:01 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.20, Accepted throughput: "
    "12.00 tokens/s, Drafted throughput: 30.00 tokens/s, Accepted: 120 tokens, Drafted: 300 tokens, Per-position "
    "acceptance rate: 0.700, 0.350, 0.150, Avg Draft acceptance rate: 40.0%"
)
LLAMA_LINE = (
    "slot print_timing: id  0 | draft acceptance = 0.40000 (  120 accepted /   300 generated), mean len =  2.20"
)


def test_a_metrics_page_of_vllm_gives_every_count() -> None:
    counts = parse_counts(VLLM_PAGE)
    assert counts == Counts("vLLM", 100, 300, 120, (70, 35, 15), cumulative=True)
    assert counts.acceptance_length == 1 + sum(counts.reached) / 100 == 2.2
    assert counts.per_drafted == 0.4 and counts.tokens == 3


def test_two_engines_of_one_server_are_added_up() -> None:
    page = VLLM_PAGE + VLLM_PAGE.replace('engine="0"', 'engine="1"')
    assert parse_counts(page) == Counts("vLLM", 200, 600, 240, (140, 70, 30), cumulative=True)


def test_only_the_counts_between_two_readings_are_those_of_a_replay() -> None:
    later = VLLM_PAGE.replace(" 100.0", " 150.0").replace(" 300.0", " 450.0").replace(" 120.0", " 170.0")
    later = later.replace(" 70.0", " 105.0").replace(" 35.0", " 50.0")
    counts = parse_counts(later).since(parse_counts(VLLM_PAGE))
    assert counts == Counts("vLLM", 50, 150, 50, (35, 15, 0), cumulative=True)
    with pytest.raises(ValueError, match="started again"):
        parse_counts(VLLM_PAGE).since(parse_counts(later))


def test_a_log_line_of_vllm_gives_the_same_counts() -> None:
    counts = parse_counts(f"noise\n{VLLM_LINE}\nmore noise")
    assert (counts.server, counts.drafts, counts.drafted, counts.accepted) == ("vLLM", 100, 300, 120)
    assert counts.reached == pytest.approx((70, 35, 15)) and not counts.cumulative


def test_two_log_lines_weigh_by_their_passes() -> None:
    other = VLLM_LINE.replace("2.20", "1.10").replace("Accepted: 120", "Accepted: 10")
    other = other.replace("0.700, 0.350, 0.150", "0.100, 0.000, 0.000")
    counts = parse_counts(f"{VLLM_LINE}\n{other}")
    assert counts.drafts == 200 and counts.acceptance_length == pytest.approx(1 + 130 / 200)
    assert counts.reached == pytest.approx((80, 35, 15))


def test_a_line_whose_drafts_are_not_all_whole_takes_its_passes_from_the_length() -> None:
    shorter = VLLM_LINE.replace("Drafted: 300", "Drafted: 270")
    assert parse_counts(shorter).drafts == pytest.approx(100)


def test_an_older_log_line_of_vllm_is_read_as_well() -> None:
    older = (
        "SpecDecoding metrics: Draft acceptance rate: 40.0%, Mean acceptance length: 2.20, Accepted: 120 tokens, "
        "Drafted: 300 tokens, Per-position acceptance rate: 0.700, 0.350, 0.150"
    )
    assert parse_counts(older).drafts == 100


def test_llama_cpp_counts_on_its_metrics_page_and_in_its_log() -> None:
    page = parse_counts(VLLM_PAGE.replace("vllm:", "llamacpp:"))
    assert (page.server, page.drafts, page.reached) == ("llama.cpp", 100, (70, 35, 15))
    line = parse_counts(LLAMA_LINE)
    assert (line.drafts, line.drafted, line.accepted, line.tokens) == (pytest.approx(100), 300, 120, None)
    placed = parse_counts(f"{LLAMA_LINE}\nslot print_timing: id  0 | task 0 |      acc per pos = (0.700, 0.350, 0.150)")
    assert placed.reached == pytest.approx((70, 35, 15))


def test_an_older_log_line_of_llama_cpp_has_no_passes() -> None:
    older = parse_counts("draft acceptance rate = 0.57576 (  171 accepted /   297 generated)")
    assert older.drafts is None and math.isnan(older.acceptance_length)
    assert older.per_drafted == pytest.approx(171 / 297)


def test_answers_of_llama_cpp_are_added_up() -> None:
    one = '{"content": "", "timings": {"predicted_n": 40, "draft_n": 30, "draft_n_accepted": 12}}'
    for text in (f"{one}\n{one}", f"[{one}, {one}]"):
        assert parse_counts(text) == Counts("llama.cpp", None, 60, 24)


def test_sglang_gives_a_length_alone() -> None:
    page = 'sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.2\nsglang:spec_accept_rate{tp_rank="0"} 0.55\n'
    assert parse_counts(page) == Counts("SGLang", length=2.2)
    log = "Decode batch, #running-req: 1, #token: 90, accept len: 2.20, accept rate: 0.40, cuda graph: True"
    assert parse_counts(log).acceptance_length == 2.2 and parse_counts(page).since(parse_counts(page)).length == 2.2


def test_a_text_without_counts_is_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match=r"'hello'.*SpecDecoding metrics.*draft acceptance.*accept len"):
        parse_counts("hello")
    with pytest.raises(ValueError, match="holds no counts of speculation"):
        parse_counts("vllm:num_requests_running 0.0\n")
