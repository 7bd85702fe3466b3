"""Twelve hundred generations of every sort, many of them broken off: the texts stay right, and nothing piles up."""

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil  # type: ignore[import-untyped]  # it has no annotations
import torch
from scripted_drafters import HostileDrafter, RandomPolicy
from test_generate import Letters
from tiny_models import FAMILIES, tiny_model

from decoding.drafters import (
    CascadeDrafter,
    Drafter,
    DraftModelDrafter,
    DraftTreeDrafter,
    HybridDrafter,
    LookaheadDrafter,
    PromptLookupDrafter,
)
from decoding.engine import Engine
from decoding.generate import DecodingConfig, Generation
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.policies import FixedPolicy, HeuristicPolicy, Policy
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TreeShape
from decoding.rules.verify import RULES, SAMPLED_VERIFY, Rule

GENERATIONS = 1200
WARM_UP = 300
MOST_GROWTH = 32 * 2**20
"""Bytes, 20 KB a generation; it is one tenth of that."""


class BrokenOff(Exception):
    """Raised on purpose in the middle of a generation."""


class Soak:
    """The models, drafters and kept caches that all generations share, and chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.targets = {family: CausalLM(tiny_model(family)) for family in FAMILIES}
        self.kept = {family: target.new_cache(4) for family, target in self.targets.items()}
        draft = CausalLM(tiny_model("llama", seed=1))
        self.models = [*self.targets.values(), draft]
        self.drafters: list[Drafter | None] = [
            None,
            DraftModelDrafter(draft, (1, 1, 1)),
            DraftModelDrafter(draft, (1, 1, 1, 1), stop_below=0.3),
            DraftModelDrafter(draft, (2, 2)),
            DraftModelDrafter(draft, (2, 2), with_replacement=True),
            DraftTreeDrafter(draft, depth=3, width=2, nodes=7),
            PromptLookupDrafter(4, num_branches=2),
            LookaheadDrafter(window=3, ngram=3, guesses=3),
            CascadeDrafter(draft, PromptLookupDrafter(3), 3),
            HybridDrafter(DraftModelDrafter(draft, (1, 1)), PromptLookupDrafter(3)),
        ]
        self.counts = {"whole": 0, "closed": 0, "broken off": 0, "refused": 0, "compared": 0}

    def prompts(self) -> list[list[int]]:
        chance = self.chance
        return [[chance.randrange(16) for _ in range(chance.randint(1, 9))] for _ in range(chance.randint(1, 4))]

    def sampling(self) -> SamplingConfig:
        chance = self.chance
        return SamplingConfig(
            temperature=chance.choice([0.0, 0.0, 0.7, 1.5]),
            top_k=chance.choice([0, 0, 6]),
            top_p=chance.choice([1.0, 0.9]),
            min_p=chance.choice([0.0, 0.05]),
            repetition_penalty=chance.choice([1.0, 1.3]),
            presence_penalty=chance.choice([0.0, 0.3]),
        )

    def config(self) -> DecodingConfig:
        chance, sampling = self.chance, self.sampling()
        rule: Rule | None = None
        if not sampling.greedy:
            rule = chance.choice([None, SAMPLED_VERIFY, *(rule for rule in RULES.values() if rule.name != "greedy")])
        return DecodingConfig(
            chance.randint(1, 10),
            sampling,
            rule,
            eos_token_ids=tuple(chance.sample(range(16), chance.choice([0, 0, 1, 2]))),
            stop_strings=tuple(chance.sample(["ab", "é", "xyza", "c."], chance.choice([0, 0, 1]))),
            seed=chance.randrange(1000),
            logprobs=chance.random() < 0.2,
        )

    def policy(self) -> Policy:
        made: list[Policy] = [FixedPolicy(), FixedPolicy(), FixedPolicy(depth=2), HeuristicPolicy()]
        return self.chance.choice([*made, RandomPolicy(self.chance.randrange(1000))])

    def generate(self) -> None:
        """One generation with random settings: to its end, closed after some steps, or broken off by an exception."""
        family = self.chance.choice(list(FAMILIES))
        target, prompts, config, policy = self.targets[family], self.prompts(), self.config(), self.policy()
        drafter = self.chance.choice([*self.drafters, HostileDrafter(self.chance.randrange(99), prompts[0] * 3)])
        if isinstance(drafter, HostileDrafter) and config.rule not in (None, SAMPLED_VERIFY):
            return  # its q is none, which the other rules notice
        if isinstance(drafter, HostileDrafter) and not config.sampling.greedy:
            config = DecodingConfig(**{**vars(config), "rule": SAMPLED_VERIFY})
        after = self.chance.choice([None, None, 0, 2, 4])
        kept = self.kept[family] if self.chance.random() < 0.4 else None
        try:
            with broken_off(target, after if self.chance.random() < 0.5 else None):
                self._run(target, drafter, prompts, config, policy, kept, after)
        except BrokenOff:
            self.counts["broken off"] += 1
        except ValueError as error:
            if " rule takes " not in str(error):
                raise
            self.counts["refused"] += 1

    def _run(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        prompts: Sequence[list[int]],
        config: DecodingConfig,
        policy: Policy,
        kept: PreallocatedCache | None,
        closed_after: int | None,
    ) -> None:
        batch_size = self.chance.randint(1, 4)
        steps = Engine(target, drafter, policy, tokenizer=Letters()).steps(prompts, config, batch_size=batch_size)
        if kept is not None:
            prompts = prompts[:1]
            stream = Engine(target, drafter, policy, tokenizer=Letters()).steps(prompts[0], config, cache=kept)
            steps = ((0, step) for step in stream)
        done = []
        for step in steps:
            done.append(step)
            if len(done) == closed_after:
                self.counts["closed"] += 1
                return
        self.counts["whole"] += 1
        exact = config.sampling.greedy or config.rule is SAMPLED_VERIFY
        if exact and self.chance.random() < 0.3:
            wanted = Engine(target, tokenizer=Letters()).decode(prompts, config, batch_size=1)
            written = [Generation.of([step for at, step in done if at == place]) for place in range(len(prompts))]
            assert [text.tokens for text in written] == [text.tokens for text in wanted]
            self.counts["compared"] += 1

    def live_tensors(self) -> int:
        """After the stores that are meant to keep some have been emptied."""
        for model in self.models:
            assert len(model._masks._stored) <= 256
            model._masks._stored.clear()
        chains = TreeShape.chain.cache_info()
        assert chains.maxsize is not None and chains.currsize <= chains.maxsize
        TreeShape.chain.cache_clear()
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@contextmanager
def broken_off(target: CausalLM, after: int | None) -> Iterator[None]:
    """Raises in the middle of the target's n-th forward."""
    left = after

    def count(*call: object) -> None:
        nonlocal left
        if left == 0:
            raise BrokenOff
        left = None if left is None else left - 1

    handle = target.model.get_output_embeddings().register_forward_hook(count)
    try:
        yield
    finally:
        handle.remove()


def test_nothing_piles_up_over_thousands_of_generations() -> None:
    soak = Soak(seed=0)
    tensors = bytes_held = 0
    for generation in range(GENERATIONS):
        if generation == WARM_UP:
            tensors, bytes_held = soak.live_tensors(), psutil.Process().memory_info().rss
        soak.generate()
    assert soak.live_tensors() == tensors
    assert psutil.Process().memory_info().rss - bytes_held < MOST_GROWTH
    for model in soak.models:
        assert not model.model.get_output_embeddings()._forward_pre_hooks
        assert model.model.config._attn_implementation in ("sdpa", "eager")
    assert min(soak.counts.values()) > GENERATIONS / 50, soak.counts
