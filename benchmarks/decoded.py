"""Greedy texts by a chain drafter, with the counts used to compare engines: passes, drafted, accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

from decoding.drafters.base import Drafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM


@dataclass(frozen=True)
class Decoded:
    """Texts of several prompts, and the counts of all steps except prefills."""

    texts: tuple[tuple[int, ...], ...]
    """New tokens of each prompt."""
    passes: int
    """Number of target passes."""
    drafted: int
    """Number of drafted tokens: all nodes of the trees, even if the text had no room for them."""
    accepted: tuple[int, ...]
    """Number of accepted drafted tokens at each position."""
    ended: tuple[int, ...]
    """For each position, the number of accepted tokens that ended their text although drafted tokens followed them.
    llama.cpp does not count these tokens.
    """


def decode_greedily(
    target: CausalLM,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    batch_size: int = 1,
    overrun: int = 0,
) -> Decoded:
    """Decode prompts of token ids in our loop; ``drafter`` None means plain decoding.

    ``overrun``: room after ``max_new_tokens`` for drafts in a text's last steps; texts are cut at ``max_new_tokens``.
    If ``overrun`` is the drafter's depth, all drafts are whole, and accepted tokens after the text's end are counted as
    well. Servers that always draft to the same depth (vLLM) count in this way.
    """
    config = DecodingConfig(max_new_tokens + overrun, eos_token_ids=tuple(eos_token_ids))
    texts: list[list[int]] = [[] for _ in prompts]
    passes, drafted = 0, 0
    accepted: list[int] = []
    ended: list[int] = []
    for place, step in Engine(target, drafter).steps(prompts, config, batch_size=batch_size):
        if len(texts[place]) >= max_new_tokens:
            continue
        texts[place] += step.tokens
        if step.is_prefill:
            continue
        passes, drafted = passes + 1, drafted + step.drafted
        unseen = [0] * (step.accepted - len(accepted))
        accepted, ended = accepted + unseen, ended + unseen
        for position in range(step.accepted):
            accepted[position] += 1
        if len(step.tokens) == step.accepted < step.drafted and step.tokens[-1] in eos_token_ids:
            ended[step.accepted - 1] += 1
    cut = tuple(tuple(text[:max_new_tokens]) for text in texts)
    return Decoded(cut, passes, drafted, tuple(accepted), tuple(ended))
