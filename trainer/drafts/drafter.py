"""The draft in training as a drafter, for evaluations and for texts that it helps to write."""

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.parallel import ParallelDraft

AnyDraft = CausalLM | ParallelDraft
"""A draft to decode with: an ordinary one, or a parallel one with its parts."""


def drafter_of(draft: AnyDraft, tokens: int) -> Drafter:
    """Make the drafter of a draft's chain of ``tokens``; a parallel draft has at most the tokens of one forward.

    On a CUDA device its steps are CUDA graphs, if they can be.
    """
    if isinstance(draft, ParallelDraft):
        draft = ParallelDraft(draft.model.at_its_fastest(), draft.parts)
        return named_drafter("parallel", draft, tokens=min(tokens, draft.tokens))
    return named_drafter("draft", draft.at_its_fastest(), tokens=tokens)
