"""Checks of an engine in this process that need more than its texts: a draft that is the target, and the cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from decoding.drafters.draft_model import DraftModelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.proof.finding import Finding, judged
from decoding.measure.proof.reference import EngineText
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM

_OWN_ACCEPTANCE = {torch.float32: 0.999, torch.float16: 0.98}
_OWN_ACCEPTANCE_ELSE = 0.9
"""Least share of its own drafts that a target keeps: all but those that rounding decides."""
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


def accepts_itself(
    target: CausalLM, prompts: Sequence[tuple[int, ...]], config: DecodingConfig, batch_size: int
) -> Finding:
    """Let the target draft for itself: every drafted token must be accepted, greedy and, at T > 0, sampled."""
    engine = Engine(target, DraftModelDrafter(target.with_static(None)))  # a static one has a single cache
    least = _OWN_ACCEPTANCE.get(target.dtype, _OWN_ACCEPTANCE_ELSE)
    shares = {}
    settings = {"greedy": replace(config.sampling, temperature=0.0)}
    if not config.sampling.greedy:
        settings["sampled"] = config.sampling
    for setting, sampling in settings.items():
        steps = [step for _, step in engine.steps(prompts, replace(config, sampling=sampling), batch_size=batch_size)]
        accepted, offered = sum(step.accepted for step in steps), sum(step.offered for step in steps)
        # A refusal leaves the tokens behind it untried: a step counts as one refusal, not as all of them.
        refusals = sum(step.accepted < step.offered for step in steps)
        shares[setting] = accepted / (accepted + refusals) if offered else 1.0
    seen = ", ".join(f"{share:.4f} of its drafted tokens kept, {setting}" for setting, share in shares.items())
    passed = min(shares.values()) >= least
    found = f"{seen}; at least {least:g} must be"
    return judged("the target as its own draft", passed, found, acceptance=shares, least=least)


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
