"""Speculative decoding on one page (Leviathan et al. 2211.17192, Chen et al. 2302.01318). Read this first.

This page handles one text and a draft that writes chains, without a cache. The loop in `decoding.generate` does the
same for batches, trees, every drafter and every acceptance rule; tests compare it with this page, token by token. The
steps are numbered as in docs/explanation/speculation.md. Texts have exactly the target's distribution.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

from jaxtyping import Float
from torch import Tensor

from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import SamplingConfig, probabilities

Model = Callable[[Sequence[int]], Float[Tensor, "length vocab"]]
"""A language model. Row i (from 0) of its logits predicts the token after the first i + 1 tokens of the text."""


def speculate(
    target: Model,
    draft: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    chain: int,
    sampling: SamplingConfig,
    seed: int = 0,
    eos_token_ids: Collection[int] = (),
) -> Iterator[list[int]]:
    """Write up to ``max_new_tokens`` tokens after the prompt; yield the new tokens of each target pass.

    Draft and target share a vocabulary. At most ``chain`` tokens are drafted for a pass.
    Greedy decoding is no special case: at temperature 0, p and q have all their mass on the best token, so a drafted
    token is accepted if and only if it is the target's best token.
    """
    text, longest = list(prompt), len(prompt) + max_new_tokens
    # Draft and target have separate streams of random numbers, so the draft's draws do not change the target's draws.
    draft_source, source = (GeneratorSource.from_seed(seed, stream) for stream in ("draft", "verify"))

    # 0. Prefill: the target reads the prompt and writes the first token.
    # From here on, the target has written the last token of the text but has not yet read it.
    new = [source.draw(probabilities(target(text)[-1:], sampling)[0])]
    text += new
    yield new
    while len(text) < longest and text[-1] not in eos_token_ids:
        # 1. Propose: the draft writes a chain, token by token, and remembers the distribution q of each token.
        drafted, q = list[int](), list[Tensor]()
        for _ in range(min(chain, longest - len(text) - 1)):  # the target's token needs room as well
            q.append(probabilities(draft(text + drafted)[-1:], sampling)[0])
            drafted.append(draft_source.draw(q[-1]))

        # 2. Verify: one target pass computes the target's distribution p after the text and after each drafted token.
        p = probabilities(target(text + drafted)[len(text) - 1 :], sampling)

        # 3. Commit: keep drafted tokens, in order, until one is rejected. In place of the rejected token, write a token
        # drawn from the part of p that exceeds q; if no token is rejected, add a token drawn from p.
        accepted, rest = 0, p[len(drafted)]
        for token, q_token, p_token in zip(drafted, q, p, strict=False):
            residual = (p_token - q_token).clamp(min=0)
            if not source.accept(float(p_token[token] / q_token[token])) and residual.any():
                rest = residual
                break
            accepted += 1
        new = [*drafted[:accepted], source.draw(rest)]
        end = next((index for index, token in enumerate(new) if token in eos_token_ids), len(new))
        text += (new := new[: end + 1])
        yield new
