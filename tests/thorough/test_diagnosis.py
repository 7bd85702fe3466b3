"""Each comparison of `headstart diagnose` separately, on values that can be checked by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import counting_model, tiny_model
from tiny_tokenizer import byte_tokenizer, sentencepiece_like

from decoding.measure.proof.finding import Finding
from decoding.measure.proof.reference import Reference
from decoding.metrics import StepCount, acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.sampling import SamplingConfig
from trainer.servers.acceptance import LoopAcceptance, compare_acceptance, compare_positions, compare_sampling
from trainer.servers.answers import Completion
from trainer.servers.counters import Counts
from trainer.servers.diagnosis import compare_settings, compare_vocabularies
from trainer.servers.speculator import compare_top_1
from trainer.servers.texts import TEXT, HeldOutPrompt, ServerPrompt, compare_rendered, compare_texts, tokens_of

# --- token ids of the prompt ------------------------------------------------------------------------------------------

ASK = HeldOutPrompt("hi", [{"role": "user", "content": "hi"}], tuple(b"[user]hi[a]"))


def rendered(server: bytes) -> Finding:
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[a]' }}{% endif %}"
    )
    tokenizer.bos_token = "^"
    return compare_rendered([ASK], [ServerPrompt(tuple(server), len(server))], tokenizer)


def test_equal_prompts_are_no_difference_and_untold_ones_are_not_compared() -> None:
    assert rendered(b"[user]hi[a]").status == "ok"
    assert compare_rendered([ASK], [ServerPrompt(None, None)], byte_tokenizer()).status == "open"


@pytest.mark.parametrize(
    ("server", "found"),
    [
        (b"^[user]hi[a]", "begins with BOS (94)"),
        (b"[user]hi", "lacks the generation prompt"),
        (b"hi", "lacks the chat template"),
        (b"[system]be kind[user]hi[a]", "adds 15 tokens to the prompt, 'system]be kind['"),
        (b"[user]ho[a]", "after 'er]h', token 7 is 111 ('o[a]'…), but 105 ('i[a]'…) here"),
    ],
)
def test_a_prompt_that_differs_shows_its_first_token_and_its_cause(server: bytes, found: str) -> None:
    finding = rendered(server)
    assert not finding.passed and found in finding.found and finding.remedy


# --- greedy texts -----------------------------------------------------------------------------------------------------


def compared(
    text: str, ids: tuple[int, ...] | None, finish: str = "length", ours: tuple[int, ...] = (4, 5, 6, 7)
) -> Finding:
    """Compare a server's answer with the text of a model that counts: after 3 come 4, 5, 6, 7. Token 0 ends a text."""
    tokenizer = byte_tokenizer(size=16)
    reference = Reference(CausalLM(counting_model()), SamplingConfig(temperature=1.0), (0,))
    answer = Completion(text, ids, None, finish, message={"tool_calls": [{}]} if finish == "tool_calls" else {})
    return compare_texts(reference, [[3]], [ours], [answer], tokenizer, max_new_tokens=4)


def test_equal_texts_are_equal_by_their_ids_and_by_their_text() -> None:
    assert compared("", (4, 5, 6, 7)).status == "ok"
    assert compared("\x04\x05\x06\x07", None).status == "ok"
    assert compared("\x04\x05", None).status == "ok"  # cut off before


def test_a_text_that_the_server_parsed_as_a_call_of_a_tool_is_not_compared() -> None:
    assert compared("", None, "tool_calls").status == "open"
    assert compared("", (4, 5, 6, 7), "tool_calls").status == "ok"  # the tokens are known


@pytest.mark.parametrize(
    ("text", "ids", "finish", "ours", "remedy"),
    [
        ("", (4, 5, 9, 10), "length", (4, 5, 6, 7), "same revision"),
        ("\x04\x05\x09\x0a", None, "length", (4, 5, 6, 7), "same revision"),  # differs at the first different letter
        ("", (4, 5), "stop", (4, 5, 6, 7), "eos_token_id"),  # ends although the other continues
        ("", (4, 5, 0, 9), "length", (4, 5, 0), "eos_token_id"),  # continues after its end
    ],
)
def test_a_text_that_parts_beyond_a_near_tie_has_its_cause(
    text: str, ids: tuple[int, ...] | None, finish: str, ours: tuple[int, ...], remedy: str
) -> None:
    finding = compared(text, ids, finish, ours)
    assert (finding.check, finding.status) == (TEXT, "problem") and remedy in finding.remedy


def test_an_end_that_is_nearly_as_likely_as_the_other_token_is_a_near_tie() -> None:
    """After 8 comes 9.

    The server ends there instead: in the first model the end is 4 below 9, and in the second it is as likely.
    """
    tokenizer, target = byte_tokenizer(size=16), CausalLM(counting_model())
    even = CausalLM(counting_model())
    lm_head: Any = even.model.get_output_embeddings()
    with torch.no_grad():
        lm_head.weight[0] = lm_head.weight[9]  # 0 ends a text, and is as likely as 9 now
    answer = Completion("", (), None, "stop")
    for model, differs in ((target, True), (even, False)):
        reference = Reference(model, SamplingConfig(temperature=1.0), (0,))
        finding = compare_texts(reference, [[8]], [(9, 10)], [answer], tokenizer, 2)
        assert finding.passed is not differs


# --- heads as a server reads them -------------------------------------------------------------------------------------


def random_heads(target: CausalLM) -> MedusaHeads:
    """Make heads with a Markov bias."""
    heads = MedusaHeads(MedusaConfig(target.hidden_size, target.vocab_size, 2, 1, ((0,), (0, 0)), markov_rank=4))
    generator = torch.Generator().manual_seed(0)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return heads


@pytest.fixture
def served_heads(tiny_llama: CausalLM, tmp_path: Path) -> Path:
    random_heads(tiny_llama).save_pretrained(tmp_path)
    return tmp_path


TEXTS = [[place * step % 16 for place in range(40)] for step in (1, 3, 5)]


def top_1(target: CausalLM, served: Path) -> Finding:
    return compare_top_1(target, random_heads(target), served, TEXTS, False)


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_exported_heads_have_the_trained_tokens(tiny_llama: CausalLM, served_heads: Path) -> None:
    finding = top_1(tiny_llama, served_heads)
    assert finding.status == "ok" and finding.figures == {"share": 1.0, "positions": 222}


def misnamed(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["lm_heads.0.weight"] = stored.pop("heads.0.lm_head.weight")
    save_file(stored, folder / "model.safetensors")


def by_other_ids(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["markov.output.weight"] = stored["markov.output.weight"].roll(1, 0)
    save_file(stored, folder / "model.safetensors")


def damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no tensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (misnamed, "heads.0.lm_head.weight is missing"),
        (
            by_other_ids,
            "markov.output.weight has the same rows in another order, as if token ids were mapped differently",
        ),
        (damaged, "cannot be read as safetensors"),
    ],
)
def test_heads_that_are_others_are_named(
    damage: Callable[[Path], None], says: str, tiny_llama: CausalLM, served_heads: Path
) -> None:
    damage(served_heads)
    finding = top_1(tiny_llama, served_heads)
    assert not finding.passed and says in finding.found and "export the speculator again" in finding.remedy


def test_heads_of_another_target_are_named(tiny_llama: CausalLM, served_heads: Path) -> None:
    tokenizer = byte_tokenizer(size=16)
    assert compare_vocabularies(tiny_llama, tokenizer, served_heads).status == "ok"
    rewrite(served_heads, vocab_size=32)
    finding = compare_vocabularies(tiny_llama, tokenizer, served_heads)
    assert not finding.passed and "predict 32 tokens, but the target has 16" in finding.found


def test_a_path_by_which_vllm_takes_another_method_is_named(tiny_llama: CausalLM, tmp_path: Path) -> None:
    served = tmp_path / "my-eagle3-draft"
    tiny_model("llama").save_pretrained(served)
    finding = compare_settings(tiny_llama, served, served, served, 16)
    assert not finding.passed and "'eagle3'" in finding.found and finding.remedy == "rename the folder"


def test_the_targets_own_config_is_read_as_others_read_it(
    tiny_llama: CausalLM, served_heads: Path, tmp_path: Path
) -> None:
    model, target = (
        tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        tmp_path / "t",
    )
    model.save_pretrained(target)  # as written by transformers 5, without the keys of version 4
    finding = compare_settings(tiny_llama, target, served_heads, served_heads, 64)
    assert not finding.passed and "the target's config.json lacks rope_theta" in finding.found


# --- acceptance -------------------------------------------------------------------------------------------------------


def replayed(rates: tuple[float, ...], passes: int = 1000, texts: int = 10) -> LoopAcceptance:
    """Make a replay in which exactly these shares of passes were accepted up to each position."""
    depth = len(rates)
    lengths = [sum(place < rate * passes for rate in rates) for place in range(passes)]
    steps = [StepCount(length + 1, length, depth, depth) for length in lengths]
    return LoopAcceptance(acceptance([steps[text::texts] for text in range(texts)]), depth, texts)


def counted(rates: tuple[float, ...], drafts: int = 1000) -> Counts:
    reached = tuple(rate * drafts for rate in rates)
    return Counts("vLLM", drafts, drafts * len(rates), sum(reached), reached, cumulative=True)


def test_equal_shares_are_no_difference_and_their_lengths_are_one_plus_their_sum() -> None:
    ours = replayed((0.7, 0.4))
    assert ours.length == pytest.approx(2.1)
    finding = compare_acceptance(ours, counted((0.7, 0.4)))
    assert finding.status == "ok"
    assert finding.figures["acceptance_length"] == {"ours": pytest.approx(2.1), "server": pytest.approx(2.1)}


def test_a_difference_within_the_binomial_error_and_the_texts_ends_is_not_real() -> None:
    # The error of two shares near .7 of 1,000 is 0.0205; 3.29 times this and one draft for each of 10 texts make
    # 0.0775.
    near, far = (compare_positions(replayed((0.7,)), counted((share,)))[0] for share in (0.63, 0.61))
    assert not near.real and far.real


def test_a_later_position_alone_is_named() -> None:
    finding = compare_acceptance(replayed((0.7, 0.5)), counted((0.7, 0.1)))
    assert not finding.passed and "a significant difference, first at position 2" in finding.found


def test_drafts_that_the_server_cuts_are_named_before_their_acceptance() -> None:
    cut = Counts("llama.cpp", 1000, 1200, 700, (700.0, 0.0, 0.0))
    finding = compare_acceptance(replayed((0.7, 0.4, 0.2)), cut)
    assert not finding.passed and "drafted on average 1.20 tokens at a time, not 3" in finding.found
    assert "--spec-draft-p-min 0" in finding.remedy


def test_a_server_that_drafts_more_than_the_chain_here_is_named_and_its_further_positions_are_not_compared() -> None:
    finding = compare_acceptance(replayed((0.7, 0.4)), counted((0.7, 0.4, 0.2)))
    assert not finding.passed and "drafts up to 3 tokens at a time, but the chain here has 2" in finding.found
    assert "num_speculative_tokens" in finding.remedy and "0.20" not in finding.found


def test_a_position_that_nothing_reached_here_has_all_passes_as_trials() -> None:
    """All 1,000 drafts were rejected at position 1.

    A server that accepts at position 2 differs at that position as well.
    """
    found = compare_positions(replayed((0.0, 0.0)), counted((0.3, 0.2)))
    assert [position.real for position in found] == [True, True]


def test_a_server_without_counts_is_compared_by_its_length() -> None:
    ours = replayed((0.7, 0.4))
    assert compare_acceptance(ours, Counts("SGLang", length=2.12)).status == "ok"
    assert not compare_acceptance(ours, Counts("SGLang", length=1.5)).passed
    assert compare_acceptance(ours, Counts("llama.cpp")).status == "open"


def test_sampled_drafts_are_told_from_argmax_drafts() -> None:
    sampled, argmax = replayed((0.8, 0.6)), replayed((0.5, 0.2))
    assert compare_sampling(sampled, argmax, counted((0.8, 0.6)), 1.0).status == "ok"
    finding = compare_sampling(sampled, argmax, counted((0.5, 0.2)), 1.0)
    assert (
        not finding.passed
        and "2.40 with sampled drafts and 1.70 with argmax drafts: the server drafts by" in finding.found
    )
    assert "multiply the tokens per target pass by 1.41" in finding.remedy
    assert "accepted more often here" in compare_sampling(argmax, sampled, counted((0.8, 0.6)), 1.0).remedy
    neither = compare_sampling(sampled, argmax, counted((0.1, 0.0)), 1.0)
    assert not neither.passed and "matches neither" in neither.found and "headstart verify" in neither.remedy


def test_drafts_too_few_beside_the_texts_are_not_judged() -> None:
    """One draft per text is uncertain because of the text's end, so 8 drafts of 10 texts could hide that nothing is
    accepted.
    """
    ours, few = replayed((0.8, 0.6)), counted((0.0, 0.0), drafts=8)
    for found in (compare_acceptance(ours, few), compare_sampling(ours, replayed((0.5, 0.2)), few, 1.0)):
        assert found.status == "open" and "to detect even a server that accepts nothing" in found.found


def test_a_servers_text_goes_on_from_our_tokens_without_another_space() -> None:
    """sentencepiece begins a text with a space, but the rest of an answer has no such space."""
    tokenizer = sentencepiece_like([("▁", "a"), ("b", "c")])
    ours, whole = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("a", "abc a"))
    assert tokens_of(Completion("abc a", None, None, "length"), ours, tokenizer, ()) == whole
