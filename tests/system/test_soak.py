"""A hundred and twenty generations, many of which are interrupted: texts stay right, and nothing accumulates."""

import gc
import random

import torch
from scripted_drafters import HostileDrafter
from tiny_models import tiny_model

from decoding.drafters import Drafter, DraftTreeDrafter, PromptLookupDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.dynamic import of_shape
from decoding.rules.tree import TreeShape


class BrokenOff(Exception):
    """Raised on purpose in the middle of a generation."""


def tensors_alive() -> int:
    """Count the tensors that exist, without those that bounded stores keep on purpose."""
    of_shape.cache_clear()
    TreeShape.chain.cache_clear()
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_nothing_piles_up_over_generations_that_end_are_closed_or_break_off() -> None:
    chance, target, draft = random.Random(0), CausalLM(tiny_model()), CausalLM(tiny_model(seed=1))
    made: list[Drafter | None] = [None, DraftTreeDrafter(draft, 2, 2, 7), PromptLookupDrafter(4)]
    cache, forwards_left, alive = target.new_cache(4), -1, 0

    def count(*call: object) -> None:
        nonlocal forwards_left
        forwards_left -= 1
        if forwards_left == 0:
            raise BrokenOff

    counting = target.model.get_output_embeddings().register_forward_hook(count)
    for generation in range(120):
        if generation == 40:
            alive = tensors_alive()
        prompt = [chance.randrange(16) for _ in range(5)]
        drafter = chance.choice([*made, HostileDrafter(chance.randrange(99), prompt * 3)])
        forwards_left = chance.choice([-1, -1, 1, 3])
        steps, closed_after = [], chance.choice([99, 99, 2])
        config = DecodingConfig(8, eos_token_ids=(1,))
        try:
            for step in Engine(target, drafter).steps(prompt, config, cache=cache if generation % 2 else None):
                steps.append(step)
                if len(steps) == closed_after:
                    break
            else:
                written = tuple(token for step in steps for token in step.tokens)
                assert written == Engine(target).decode(prompt, config).tokens
        except BrokenOff:
            pass
    assert tensors_alive() <= alive + 4
    counting.remove()
    for model in (target, draft):
        assert not model.model.get_output_embeddings()._forward_pre_hooks
