"""Proof that target and drafters decode together: a short greedy text with and without each of them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from decoding.drafters.registry import DrafterLoader
from decoding.drafters.spec import DrafterSpec
from decoding.engine import Engine
from decoding.generate import DecodingConfig, Generation
from decoding.model.causal_lm import CausalLM
from decoding.model.dtypes import DTYPES
from decoding.model.loading import UNREADABLE, eos_token_ids, load_model, load_tokenizer
from decoding.prompts import encode_prompt
from trainer.doctor.finding import Finding, note, ok, problem
from trainer.doctor.refusals import refused

TOKENS = 16
"""New tokens of the proof: enough for several passes."""
_PROMPT = "Once upon a time there was"
_REPORT = "prove it on more text with headstart verify, and report it"


class Loading(NamedTuple):
    """The way in which models are loaded for the proof."""

    target: str
    dtype: torch.dtype
    trusted: bool = False


def prove(loading: Loading, specs: Sequence[DrafterSpec]) -> tuple[Finding, list[Finding]]:
    """Decode plainly, then with each drafter; return the target's finding and one for each drafter, in their order."""
    name, dtype, trusted = loading
    try:
        model = load_model(name, dtype, trust_remote_code=trusted)
        target, tokenizer = CausalLM(model), load_tokenizer(name, trusted)
        prompt = encode_prompt(_PROMPT, tokenizer, chat=True)
        config = DecodingConfig(TOKENS, eos_token_ids=eos_token_ids(model, tokenizer))
        plain = Engine(target).decode(prompt, config)
    except UNREADABLE as error:
        return refused("decoding", error, "load it in a wider dtype, or fetch it again"), []
    loader = DrafterLoader(target, tokenizer, trusted)
    known = {value: key for key, value in DTYPES.items()}
    found = ok("decoding", f"{len(plain.tokens)} tokens decoded in {known[dtype]}", tokens=len(plain.tokens))
    return found, [_proved(target, loader, spec, prompt, config, plain) for spec in specs]


def _proved(
    target: CausalLM,
    loader: DrafterLoader,
    spec: DrafterSpec,
    prompt: Sequence[int],
    config: DecodingConfig,
    plain: Generation,
) -> Finding:
    try:
        made = Engine(target, loader.load(spec)).decode(prompt, config)
    except UNREADABLE as error:
        return refused("decoding", error, "give weights that were trained on this target")
    return judged(made, plain, exact=target.dtype == torch.float32)


def judged(made: Generation, plain: Generation, exact: bool) -> Finding:
    """Compare a speculative text with the plain one; only in fp32 (``exact``) must they be equal."""
    passes = made.steps[1:]
    pace = sum(len(step.tokens) for step in passes) / max(1, len(passes))
    accepted = sum(step.accepted for step in passes)
    told = f"{accepted} of {len(made.tokens)} tokens were drafted, {pace:.2f} tokens per target pass"
    figures = {"tokens_per_pass": pace, "accepted": accepted, "equal": made.tokens == plain.tokens}
    if made.tokens == plain.tokens:
        return ok("decoding", f"greedy text equal to plain decoding's; {told}", **figures)
    if exact:
        return problem("decoding", f"the greedy text differs from plain decoding's in fp32; {told}", _REPORT, **figures)
    found = f"the greedy text differs from plain decoding's, as rounding can turn near ties in this dtype; {told}"
    return note("decoding", found, "prove it with headstart verify, in fp32", **figures)
