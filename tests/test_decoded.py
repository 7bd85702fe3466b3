"""The counts by which engines are compared, on a target that counts and a draft that counts as well."""

import sys
from pathlib import Path

import pytest
from tiny_models import counting_model

from decoding.drafters import DraftModelDrafter
from decoding.model.causal_lm import CausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from decoded import Decoded, decode_greedily


@pytest.mark.parametrize(
    ("overrun", "drafted", "accepted"),
    [
        # The prefill writes 4; one pass has room for two drafted tokens, 5 and 6, and writes 7.
        (0, 2, (1, 1)),
        # The draft is whole, 5 to 8, and is accepted behind the end too.
        (4, 4, (1, 1, 1, 1)),
    ],
)
def test_a_draft_at_a_texts_end_is_counted_up_to_it_or_whole(
    overrun: int, drafted: int, accepted: tuple[int, ...]
) -> None:
    target = CausalLM(counting_model())
    drafter = DraftModelDrafter(target, 4)
    found = decode_greedily(target, drafter, [[3]], 4, overrun=overrun)
    assert found == Decoded(((4, 5, 6, 7),), 1, drafted, accepted, ended=(0,) * len(accepted))


@pytest.mark.parametrize(
    ("end", "written", "ended"),
    [
        # The prefill writes 4, and of the draft 5 to 8 the second ends the text: 7 and 8 are behind it.
        (6, (4, 5, 6), (0, 1)),
        # The draft's last token ends the text, and none is behind it.
        (8, (4, 5, 6, 7, 8), (0, 0, 0, 0)),
    ],
)
def test_a_token_that_ends_its_text_inside_a_draft_is_told_apart(
    end: int, written: tuple[int, ...], ended: tuple[int, ...]
) -> None:
    target = CausalLM(counting_model())
    found = decode_greedily(target, DraftModelDrafter(target, 4), [[3]], 12, eos_token_ids=[end])
    assert found == Decoded((written,), 1, 4, (1,) * len(ended), ended)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_text_that_has_its_length_is_counted_no_further(batch_size: int) -> None:
    """1 + 5 + 5 tokens make eleven: two passes for each of three texts, though the overrun has room for a third."""
    target = CausalLM(counting_model(vocab=64))
    drafter = DraftModelDrafter(target, 4)
    found = decode_greedily(target, drafter, [[1], [2], [3]], 11, batch_size=batch_size, overrun=4)
    assert found.passes == 6 and found.drafted == 24 and found.accepted == (6, 6, 6, 6)
    assert [len(text) for text in found.texts] == [11, 11, 11]
