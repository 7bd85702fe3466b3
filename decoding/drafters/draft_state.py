"""A draft model at work on a batch: its cache, and how it keeps up with texts that accept part of what it drafted."""

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from decoding.drafters.base import TextStart
from decoding.model.causal_lm import CausalLM
from decoding.model.vocabulary import over_vocabulary
from decoding.rules.history import History
from decoding.rules.sampling import GeneratorSource, HistoryRows, SamplingConfig
from decoding.rules.tree import TokenTree


def check_draft(draft: CausalLM, target: CausalLM, max_length: int) -> None:
    """Refuse a draft whose context is too short, or which writes tokens that the target does not know."""
    if draft.max_positions is not None and max_length > draft.max_positions:
        raise ValueError(
            f"the text may grow to {max_length} tokens but the draft's context holds {draft.max_positions}: "
            "give a shorter prompt, a lower max_new_tokens, or another draft"
        )
    if draft.output_tokens is not None and (largest := int(draft.output_tokens.max())) >= target.vocab_size:
        raise ValueError(
            f"the draft's trimmed lm_head writes token {largest} but the target knows 0 to {target.vocab_size - 1}: "
            "give a draft that was trimmed for this target"
        )


def shared_tokens(draft: CausalLM, target: CausalLM) -> int:
    """How many of the target's tokens the draft can write."""
    return min(target.vocab_size, draft.vocab_size if draft.output_tokens is None else len(draft.output_tokens))


class DraftState:
    """Between two steps the cache holds each row's text and, behind it, those nodes of its last tree that were run."""

    def __init__(
        self, draft: CausalLM, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int, max_nodes: int
    ) -> None:
        """``max_nodes``: how many nodes of a tree may stand in the cache behind a text."""
        check_draft(draft, target, max_length)
        self.draft = draft
        self._vocab_size = target.vocab_size
        self._sampling = sampling
        self.cache = draft.new_cache(max_length + max_nodes, rows)
        self._lease = self.cache.take()
        self.sources: dict[int, GeneratorSource] = {}
        self._histories: dict[int, History] = {}
        self._committed = [0] * rows
        self._run_trees: dict[int, tuple[TokenTree, int]] = {}
        """Each row's last tree, of which the first so many nodes below the root follow the text in the cache."""

    def admit(self, slot: int, start: TextStart) -> None:
        self.cache.truncate(slot, 0)
        self._committed[slot] = 0
        self._run_trees.pop(slot, None)
        self.sources[slot] = start.source
        self._histories[slot] = History(self._sampling, start.prompt_length, self._vocab_size, self.draft.device)

    def move(self, slot: int, to: int) -> None:
        self.cache.move(slot, to)
        self._committed[to], self._committed[slot] = self._committed[slot], 0
        self.sources[to] = self.sources.pop(slot)
        self._histories[to] = self._histories.pop(slot)
        self._run_trees.pop(to, None)
        if slot in self._run_trees:
            self._run_trees[to] = self._run_trees.pop(slot)

    def catch_up(self, texts: Sequence[Sequence[int]]) -> Float[Tensor, "rows vocab"]:
        """Run what is new of each text; logits after its last token, over the target's vocabulary."""
        self.cache.check(self._lease)
        for slot, text in enumerate(texts):
            self._keep_accepted(slot, text)
        # The prompt of a row that has just begun would make every other row as wide as itself.
        fresh = [slot for slot, text in enumerate(texts) if self._committed[slot] == 0 and len(text) > 1]
        if fresh:
            self.draft.prefill([self._known(texts[slot][:-1]) for slot in fresh], self.cache, fresh)
            for slot in fresh:
                self._committed[slot] = len(texts[slot]) - 1
        logits = self.draft.append(
            [self._known(text[self._committed[slot] :]) for slot, text in enumerate(texts)], self.cache
        ).logits
        self._committed[: len(texts)] = [len(text) for text in texts]
        return self.over_target_vocabulary(logits)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        # A token only the target knows is read as the draft's last: a poorer q, and any q is lossless.
        last = self.draft.vocab_size - 1
        return [min(token, last) for token in tokens]

    def _keep_accepted(self, slot: int, text: Sequence[int]) -> None:
        """Keep the keys of those nodes of the last tree that became text; drop the others."""
        if slot not in self._run_trees:
            return
        tree, run = self._run_trees.pop(slot)
        # Not the last token, even where a lossy rule wrote one it had refused: the next draft starts by running it.
        path = tree.follow(text[self._committed[slot] : -1])
        kept = [node - 1 for node in path if node <= run]
        self.cache.commit(slot, self._committed[slot], kept)
        self._committed[slot] += len(kept)

    def remember(self, trees: Sequence[TokenTree], run: Sequence[int]) -> None:
        """What the cache holds behind the texts now: of each row's tree the first ``run`` nodes below the root."""
        for slot, (tree, count) in enumerate(zip(trees, run, strict=True)):
            self._run_trees[slot] = (tree, count)

    def step(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Run one more token in each row."""
        known = tokens.clamp(max=self.draft.vocab_size - 1)
        return self.over_target_vocabulary(self.draft.step(known, self.cache).logits)

    def run_level(self, trees: Sequence[TokenTree], first: Sequence[int]) -> list[Tensor]:
        """Run each tree's nodes from ``first`` on; their logits, (nodes, vocab) for each row."""
        logits = self.over_target_vocabulary(self.draft.verify(trees, self.cache, first).logits)
        return [
            logits[row, : len(tree) - skipped] for row, (tree, skipped) in enumerate(zip(trees, first, strict=True))
        ]

    def over_target_vocabulary(self, logits: Float[Tensor, "*rows draft_vocab"]) -> Float[Tensor, "*rows vocab"]:
        """Logits over the *target's* vocabulary.

        Padded vocabularies of one family differ in size: what the target does not know is never proposed, what the
        draft does not know has q = 0.
        """
        return over_vocabulary(logits, self.draft.output_tokens, self._vocab_size)

    def history_at(self, slot: int, text: Sequence[int], tree: TokenTree, nodes: Sequence[int]) -> HistoryRows:
        """What the sampling controls need to know at some nodes of a row's tree."""
        return self._histories[slot].at(text, tree, nodes)
