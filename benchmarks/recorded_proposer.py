"""Our proposer for vLLM, extended to record its drafts, which `served_vllm` returns."""

from typing import Any

from trainer.export.vllm_proposer import HeadsProposer

PROPOSALS: list[tuple[list[int], list[int]]] = []
"""(text, drafted tokens) of every draft."""


class Recorded(HeadsProposer):
    """A `HeadsProposer` that records its drafts in `PROPOSALS`."""

    def propose(self, sampled: Any, counts: Any, tokens: Any, slot_mappings: Any = None) -> list[list[int]]:
        drafts = super().propose(sampled, counts, tokens)
        texts = (tokens[request, : counts[request]].tolist() for request in range(len(sampled)))
        PROPOSALS.extend((text, draft) for text, draft, got in zip(texts, drafts, sampled, strict=True) if got)
        return drafts
