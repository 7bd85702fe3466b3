"""Many prompts at once, beside transformers' batched generate: what the rows say, and what is refused."""

from typing import Any

import pytest
import torch
from decoding.measure.throughput import measure_throughput
from tiny_models import tiny_model

from decoding.drafters import PromptLookupDrafter
from decoding.generate import DecodingConfig
from decoding.measure.baselines import transformers_generate, transformers_generate_batch
from decoding.measure.evaluate import PLAIN, TRANSFORMERS
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import typical_acceptance

PROMPTS = [[1, 2, 1, 2], [5], [7, 7, 0]]
SAMPLED = SamplingConfig(1.0)


def measured(target: CausalLM, config: DecodingConfig) -> dict[str, dict[str, Any]]:
    """The rows of one round by method."""
    drafters = {"lookup": PromptLookupDrafter(3)}
    rows = measure_throughput(target, drafters, PROMPTS, config, (2,), rounds=1, policies=("fixed",))
    return {row["method"]: row for row in rows}


def test_greedy_rows_say_how_many_texts_are_plain_decodings(tiny_llama: CausalLM) -> None:
    rows = measured(tiny_llama, DecodingConfig(6))
    assert list(rows) == [PLAIN, TRANSFORMERS, "lookup, fixed"]
    for row in rows.values():
        assert row["identical_to_plain"] == {"identical": 3, "of": 3} and row["label"] == "lossless"
        assert row["speedup"]["observations"] == row["speedup_over_transformers"]["observations"] == 1


def test_sampled_texts_are_not_compared_with_plain_decodings(tiny_llama: CausalLM) -> None:
    rows = measured(tiny_llama, DecodingConfig(6, SAMPLED))
    assert not any("identical_to_plain" in row for row in rows.values())


def test_the_label_of_a_lossy_rule_is_on_the_rows_it_decoded(tiny_llama: CausalLM) -> None:
    rows = measured(tiny_llama, DecodingConfig(6, SAMPLED, typical_acceptance()))
    assert {name: row["label"] for name, row in rows.items()} == {
        PLAIN: "lossless",
        TRANSFORMERS: "lossless",
        "lookup, fixed": "lossy",
    }


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompts": []}, "there are no prompts to decode: give at least one"),
        ({"rounds": 0}, "rounds is 0: give at least 1"),
        ({"batch_sizes": (4, 0)}, r"batch_sizes is \[4, 0\]: give at least one, each of at least 1"),
        ({"batch_sizes": ()}, r"batch_sizes is \[\]: give at least one"),
    ],
)
def test_what_leaves_nothing_to_measure_is_refused(
    tiny_llama: CausalLM, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        measure_throughput(tiny_llama, {}, **{"prompts": PROMPTS, "config": DecodingConfig(4), **changes})


# --- transformers' generate as a peer -------------------------------------------------------------------------------


def test_a_peers_run_leaves_torchs_global_chance_as_it_was_and_repeats_by_its_seed() -> None:
    target = CausalLM(tiny_model("llama"))
    config = DecodingConfig(12, SamplingConfig(2.0), seed=3)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    single = [transformers_generate(target, [1, 2], config).tokens for _ in range(2)]
    batch = [transformers_generate_batch(target, [[1, 2], [5]], config) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert single[0] == single[1] and batch[0] == batch[1]
