"""Checks of an engine in this process that need more than its texts: a draft that is the target, and the cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.proof.finding import Finding, judged
from decoding.measure.proof.reference import EngineText
from decoding.model.cache import PreallocatedCache

_STALE = {torch.float32: 0.01, torch.float16: 0.1}
_STALE_ELSE = 0.3
"""Least difference of a cached key or value, over the size of its row, that rounding does not explain."""


@dataclass(frozen=True, eq=False)
class EngineWriter:
    """An engine of this process that writes texts to be tested; ``config`` is that of T > 0.

    ``on_answer`` is called for each text that it begins, for a progress bar.
    """

    engine: Engine
    config: DecodingConfig
    batch_size: int = 8
    on_answer: Callable[[], None] = lambda: None

    def write(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, greedy: bool, seed: int
    ) -> list[EngineText]:
        """Decode the prompts, each with a seed of its own."""
        config = replace(self.config, max_new_tokens=max_new_tokens, seed=seed)
        if greedy:
            config = replace(config, sampling=replace(config.sampling, temperature=0.0), rule=None)
        tokens: list[list[int]] = [[] for _ in prompts]
        for index, step in self.engine.steps(prompts, config, batch_size=self.batch_size):
            tokens[index] += step.tokens
            if step.is_prefill:
                self.on_answer()
        return [EngineText(tuple(prompt), tuple(text)) for prompt, text in zip(prompts, tokens, strict=True)]


def cache_consistency(engine: Engine, prompts: Sequence[tuple[int, ...]], config: DecodingConfig) -> Finding:
    """Decode, and compare every cached key and value, and the next logits, with those of a fresh prefill."""
    target = engine.target
    plain = target.with_static(None)  # a static one has a single cache
    limit = _STALE.get(target.dtype, _STALE_ELSE)
    worst, where, logit_gap, positions = 0.0, (0, 0), 0.0, 0
    for number, prompt in enumerate(prompts, start=1):
        cache = target.new_cache(len(prompt) + config.max_new_tokens)
        for _ in engine.steps(prompt, replace(config, seed=config.seed + number), cache=cache):
            pass
        known = cache.text
        cache.truncate(0, len(known))
        fresh = plain.new_cache(len(known))
        # Up to the last token but one: the last one runs in both, and its logits are compared.
        plain.prefill([known], fresh)
        differences = _differences(cache, fresh, len(known))
        positions += len(known)
        at = int(differences.argmax())
        if float(differences[at]) > worst:
            worst, where = float(differences[at]), (number, at + 1)
        again = [known[-1]]
        for each in (cache, fresh):
            each.truncate(0, len(known) - 1)
        gap = target.append([again], cache).logits - plain.append([again], fresh).logits
        logit_gap = max(logit_gap, float(gap.abs().max()))
    seen = (
        f"{positions:,} cached positions, keys and values at most {worst:.2g} of their size from a fresh prefill's "
        f"(rounding explains {limit:g}), next logits at most {logit_gap:.2g} apart"
    )
    passed = worst <= limit
    if not passed:
        seen += f"; the largest difference is at position {where[1]} of text {where[0]}"
    figures = {"positions": positions, "largest_difference": worst, "limit": limit, "logit_gap": logit_gap}
    return judged("cache consistency", passed, seen, **figures)


def _differences(held: PreallocatedCache, fresh: PreallocatedCache, length: int) -> torch.Tensor:
    """Return each position's largest difference in any layer, over the size of the layer's rows: (length,)."""
    found = torch.zeros(length)
    for mine, theirs in zip(held.contents(0, length), fresh.contents(0, length), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            a, b = one.float(), other.float()
            size = b.norm(dim=-1).mean(1, keepdim=True).clamp(min=1e-12)
            found = torch.maximum(found, ((a - b).norm(dim=-1) / size).amax(0).cpu())
    return found
