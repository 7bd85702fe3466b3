"""Greedy texts by a chain drafter, with the counts by which engines are compared: passes, drafted, accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

from decoding.drafters.base import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM


@dataclass(frozen=True)
class Decoded:
    """Texts of some prompts, and the counts of all steps but the prefills."""

    texts: tuple[tuple[int, ...], ...]
    """New tokens of each prompt."""
    passes: int
    """Target passes."""
    drafted: int
    """Drafted tokens: nodes of the trees, whether or not the text had room for them."""
    accepted: tuple[int, ...]
    """Accepted drafted tokens at each position, from the first."""


def decode_greedily(
    target: CausalLM,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    batch_size: int = 1,
) -> Decoded:
    """Decode prompts of token ids by the loop itself; ``drafter`` None decodes plainly."""
    config = DecodingConfig(max_new_tokens, eos_token_ids=tuple(eos_token_ids))
    texts: list[tuple[int, ...]] = [()] * len(prompts)
    passes, drafted = 0, 0
    accepted: list[int] = []
    for place, step in Engine(target, drafter).steps(prompts, config, batch_size=batch_size):
        texts[place] += step.tokens
        if step.is_prefill:
            continue
        passes, drafted = passes + 1, drafted + step.drafted
        accepted += [0] * (step.accepted - len(accepted))
        for position in range(step.accepted):
            accepted[position] += 1
    return Decoded(tuple(texts), passes, drafted, tuple(accepted))
