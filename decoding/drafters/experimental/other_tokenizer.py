"""A draft model whose tokenizer differs from the target's tokenizer: the two models exchange text.

The method is `transformers`' universal assisted generation (``assistant_tokenizer``). In every step the draft's
tokenizer encodes the text again, and the target's tokenizer encodes the draft's continuation. This is slower than a
draft with the same tokenizer.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.drafters.base import DraftRequest, TextDrafter, TextSession, TextStart, chain_budgets
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, common_length

_LOOKBEHIND = 10  # number of earlier tokens encoded before new text, so that new text is split as in the whole text
_HALF = "\ufffd"  # replacement character, written by decoders for the bytes of an incomplete character


class OtherTokenizerDrafter(TextDrafter):
    """Drafter of a chain: the draft's greedy continuation of the text by ``tokens`` tokens of the draft's vocabulary.

    The chain depends only on the text, so it is deterministic at any temperature.
    """

    name = "draft model with another tokenizer"
    artefact = "draft"

    def __init__(
        self,
        draft: CausalLM,
        draft_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        tokens: int = 5,
    ) -> None:
        if tokens < 1:
            raise UserError(f"tokens is {tokens}: use at least 1")
        largest = max(draft_tokenizer.get_vocab().values())
        if largest >= draft.vocab_size:
            raise UserError(
                f"the draft's tokenizer has token {largest}, but the draft has {draft.vocab_size} tokens: use the "
                "draft's own tokenizer"
            )
        self.draft = draft.with_static(None)  # a static model has only one cache
        self.draft_tokenizer = draft_tokenizer
        self.target_tokenizer = target_tokenizer
        self.tokens = tokens
        self.budgets = chain_budgets(tokens)
        self.label_with_size = f"{self.name}, {tokens} tokens"
        self.special_tokens = frozenset(draft_tokenizer.all_special_ids)
        """Special tokens of the draft; tokens after one of them do not continue the text."""
        bare, framed = _encode(draft_tokenizer, "a"), list(draft_tokenizer("a")["input_ids"])
        starts = (start for start in range(len(framed)) if framed[start : start + len(bare)] == bare)
        self.prefix: tuple[int, ...] = tuple(framed[: next(starts, 0)])
        """Tokens that the draft's tokenizer puts before any text, such as a BOS token."""
        known = draft_tokenizer.get_vocab()
        specials = zip(target_tokenizer.all_special_tokens, target_tokenizer.all_special_ids, strict=True)
        self.unreadable = frozenset(token for text, token in specials if text not in known)
        """Special tokens of the target that the draft's tokenizer would read as ordinary text."""

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "OtherTokenizerSession":
        return OtherTokenizerSession(self, target, max_length)


class OtherTokenizerSession(TextSession):
    """A session that drafts for one text.

    The draft's cache contains the keys of the tokens ``_held``, which are in the draft's vocabulary.
    """

    def __init__(self, drafter: OtherTokenizerDrafter, target: CausalLM, max_length: int) -> None:
        self._drafter = drafter
        self._draft = drafter.draft
        self._target = target
        self._cache = drafter.draft.new_cache(max_length)
        self._held: list[int] = []

    @torch.inference_mode()
    def propose(self, request: DraftRequest) -> Proposal:
        depth = min(request.max_depth, request.max_nodes - 1, self._drafter.tokens)
        own = self._own_tokens(request.tokens)
        longest, limit = len(own) + self._drafter.tokens, self._draft.max_positions
        if depth < 1 or not own or (limit is not None and longest > limit):
            return Proposal.root_only(request.tokens[-1], self._target.device)
        written = self._continue(own)
        drafted = self._translate(request.tokens, own, written)[:depth]
        tree = TokenTree.chain([request.tokens[-1], *drafted], self._target.device)
        return Proposal(tree, ProposalKind.DETERMINISTIC)

    def _own_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Encode the text with the draft's tokenizer; the result is empty if the text ends inside a character."""
        bos = self._drafter.target_tokenizer.bos_token_id
        readable = [token for token in tokens[tokens[0] == bos :] if token not in self._drafter.unreadable]
        text = _decode(self._drafter.target_tokenizer, readable)
        if not text or text.endswith(_HALF):
            return []
        return [*self._drafter.prefix, *_encode(self._drafter.draft_tokenizer, text)]

    def _continue(self, own: list[int]) -> list[int]:
        """Continue the text greedily up to a special token; tokens whose keys are cached do not run again."""
        common = common_length(self._held, own[:-1])
        self._cache.truncate(0, common)
        columns = [self._best(self._draft.append([own[common:]], self._cache).logits)]
        for _ in range(self._drafter.tokens - 1):
            columns.append(self._best(self._draft.step(columns[-1], self._cache).logits))
        written: list[int] = torch.cat(columns).tolist()
        self._held = [*own, *written[:-1]]
        ends = [index for index, token in enumerate(written) if token in self._drafter.special_tokens]
        return written[: ends[0]] if ends else written

    def _best(self, logits: Float[Tensor, "1 vocab"]) -> Tensor:
        best = logits.argmax(-1)
        return best if self._draft.output_tokens is None else self._draft.output_tokens[best]

    def _translate(self, tokens: Sequence[int], own: Sequence[int], written: Sequence[int]) -> list[int]:
        """Encode ``written``, the draft's continuation of the text, with the target's tokenizer."""
        before = _decode(self._drafter.draft_tokenizer, own[-_LOOKBEHIND:])
        after = _decode(self._drafter.draft_tokenizer, [*own[-_LOOKBEHIND:], *written])
        if not after.startswith(before):
            return []
        new = after[len(before) :].rstrip(_HALF)
        if not new:
            return []
        tokenizer = self._drafter.target_tokenizer
        known = _decode(tokenizer, tokens[-_LOOKBEHIND:])
        whole = _encode(tokenizer, known + new)
        # Index of the first new token among all tokens; None if one token contains both known and new text.
        behind = (end for end in range(1, len(whole)) if _decode(tokenizer, whole[:end]) == known)
        end = next(behind, None)
        translated = whole[end:] if end is not None else _encode(tokenizer, new)
        unknown = (index for index, token in enumerate(translated) if token >= self._target.vocab_size)
        return translated[: next(unknown, len(translated))]


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens
