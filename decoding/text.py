"""A text during decoding (its tokens, random numbers, end and steps), its conversion to characters, and checks of
prompts.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import cache, partial
from numbers import Integral
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.metrics import StepCount
from decoding.model.causal_lm import CausalLM
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import History
from decoding.rules.tree import TokenTree


class TextDecoder(Protocol):
    """The methods of a tokenizer that are needed to find stop strings."""

    def decode(self, token_ids: list[int]) -> Any: ...


class StopCheck:
    """Finder of the end of a text inside a block of new tokens.

    As in transformers' `generate`, a stop string may begin anywhere in the prompt or the text, even inside a token, and
    the text ends if the stop string ends in a new token. Bytes are compared, because a token may be part of a
    character.
    """

    def __init__(
        self, eos_token_ids: tuple[int, ...], stop_strings: tuple[str, ...], tokenizer: TextDecoder | None
    ) -> None:
        if stop_strings and tokenizer is None:
            raise UserError("stop strings need the tokenizer: pass it as tokenizer")
        self._eos = frozenset(eos_token_ids)
        self._strings = tuple(string.encode() for string in stop_strings)
        self._bytes = cache(partial(token_bytes, tokenizer))
        self.reach = max(map(len, self._strings), default=0)
        """Number of tokens before a new token that must be read to see whether a stop string ends in the new token."""

    def cut(self, text: list[int], tokens: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Return ``tokens`` up to and including the token that ends the text, and whether there is such a token.

        ``text``: the tokens before ``tokens``, including the prompt, or at least the last `reach` of them.
        """
        written = b"".join(map(self._bytes, text[max(0, len(text) - self.reach) :]))
        for index, token in enumerate(tokens):
            if token in self._eos:
                return tokens[: index + 1], True
            if self._strings:
                known, written = len(written), written + self._bytes(token)
                if any(written.find(string, max(0, known - len(string) + 1)) >= 0 for string in self._strings):
                    return tokens[: index + 1], True
        return tokens, False


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token inside a text, where its leading space is not stripped."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
        return str(twice[len(once) :]).encode()
    name: Any = tokenizer.convert_ids_to_tokens(token)
    if name is None:
        return b""
    if _BYTE.fullmatch(name):
        return bytes.fromhex(name[3:5])
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
    if "ByteLevel" in decoder and _BYTE_OF.keys() >= set(name):
        return bytes(_BYTE_OF[letter] for letter in name)
    before: Any = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])
    known, whole = (tokenizer.convert_tokens_to_string(names) for names in (before, [*before, name]))
    return whole[len(known) :].encode()


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + index): byte for index, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))
}
"""The alphabet of byte-level tokenizers (GPT-2's ``bytes_to_unicode``)."""


class Step(NamedTuple):
    """One step of the loop for one text: one target pass and its result.

    Of the new ``tokens``, the first ``accepted`` were drafted. The target wrote the last token, unless the text ended
    inside the draft. ``offered`` is the depth of the tree up to the end of the text, which is the largest number of
    tokens that could be accepted. ``room`` is the depth of the deepest draft for which the text had room. The first
    step of a text is its prefill, which writes one token and offers no draft. The seconds are the step's seconds
    divided by the number of rows. ``refused`` are the drafted tokens of a chain after the accepted tokens; the tuple is
    empty for trees and at the end of the text. ``tree``, if requested, is the drafted tree (None if nothing was
    drafted); ``path`` lists its accepted nodes from the root's child down.
    """

    tokens: tuple[int, ...]
    accepted: int
    offered: int
    drafted: int
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    room: int = 0
    is_prefill: bool = False
    logprobs: tuple[float, ...] = ()
    refused: tuple[int, ...] = ()
    tree: TokenTree | None = None
    path: tuple[int, ...] = ()

    @property
    def counts(self) -> StepCount:
        """Counts for the acceptance figures."""
        return StepCount(len(self.tokens), self.accepted, self.offered, self.drafted, self.room)

    def timed(self, draft_seconds: float, verify_seconds: float, total_seconds: float) -> "Step":
        return self._replace(draft_seconds=draft_seconds, verify_seconds=verify_seconds, total_seconds=total_seconds)


@dataclass(frozen=True)
class Generation:
    """A finished text: its new tokens and the steps that wrote them."""

    tokens: tuple[int, ...]
    steps: tuple[Step, ...]

    @staticmethod
    def of(steps: Sequence[Step]) -> "Generation":
        return Generation(tuple(token for step in steps for token in step.tokens), tuple(steps))

    @property
    def counts(self) -> tuple[StepCount, ...]:
        """Counts of the steps for the acceptance figures, without the prefill."""
        return tuple(step.counts for step in self.steps if not step.is_prefill)


class Text:
    """A prompt and the tokens written after it. ``index`` (from 0) counts the prompts."""

    def __init__(self, index: int, prompt: Sequence[int], seed: int, max_new_tokens: int, history: History) -> None:
        self.index = index
        self.tokens = list(map(int, prompt))
        self.prompt_length = len(prompt)
        self.finished = False
        self.hidden = torch.empty(0)
        """Input of the lm_head from which the target wrote the last token, of shape (hidden,)."""
        self._states: list[Tensor] = []
        # Two streams from one seed, so that the draft's draws do not change the target's draws.
        self.source = GeneratorSource.from_seed(seed, "verify")
        self.draft_source = GeneratorSource.from_seed(seed, "draft")
        self.history = history
        self._longest = len(prompt) + max_new_tokens

    @property
    def draft_room(self) -> int:
        """Depth of the deepest draft for which the text has room, together with one more token from the target."""
        return self._longest - len(self.tokens) - 1

    def keep_states(self, states: Float[Tensor, "tokens taps"]) -> None:
        """Keep the target's states at further tokens of the text, for a drafter that reads them."""
        self._states.append(states)

    def hand_over_states(self) -> Float[Tensor, "tokens taps"] | None:
        """Return the states that were kept since the last call (None if there are none), and forget them."""
        states, self._states = self._states, []
        return torch.cat(states) if states else None

    def emit(self, tokens: tuple[int, ...], stop: StopCheck) -> tuple[int, ...]:
        """Append ``tokens`` up to the end of the text; return the tokens that were appended."""
        room = self._longest - len(self.tokens)
        begin = max(0, len(self.tokens) - stop.reach)
        kept, ended = stop.cut(self.tokens[begin:], tokens[:room])
        self.tokens += kept
        self.finished = ended or len(kept) >= room
        return kept


_REMEDY = "use tokenizer(text)['input_ids']"


def check_ids(prompt: Any, vocab_size: int | None = None) -> None:
    """Reject a prompt that is not a list of integer token ids, for example a text or a number.

    With ``vocab_size`` (None: the target is not known yet), also reject an empty prompt and ids outside the vocabulary.
    """
    if isinstance(prompt, str | bytes | Tensor) or not isinstance(prompt, Sized) or not isinstance(prompt, Iterable):
        raise UserError(f"a prompt is {prompt!r:.60}, not a list of token ids: {_REMEDY}")
    if all(type(token) is int for token in prompt) and len(prompt) and vocab_size is not None:
        low, high = min(prompt), max(prompt)
        if low >= 0 and high < vocab_size:
            return  # fast path: prompts may have many thousand tokens
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            kind = type(token).__name__
            raise UserError(f"a prompt contains {token!r:.60}, a {kind}, but token ids are integers: {_REMEDY}")
        if vocab_size is not None and not 0 <= int(token) < vocab_size:
            raise UserError(
                f"token {token} is outside the target's vocabulary (0 to {vocab_size - 1}): use the target's tokenizer"
            )
    if vocab_size is not None and not len(prompt):
        raise UserError("the prompt is empty: use at least one token (a BOS token will do)")


def check_prompt(target: CausalLM, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Raise UserError if a prompt is empty, contains unknown token ids, or exceeds the target's context."""
    check_ids(prompt, target.vocab_size)
    longest = len(prompt) + max_new_tokens
    if target.max_positions is not None and longest > target.max_positions:
        raise UserError(
            f"a prompt of {len(prompt)} tokens and {max_new_tokens} new tokens exceed the target's context of "
            f"{target.max_positions}: shorten the prompt or lower max_new_tokens"
        )


def check_tensor_of_ids(input_ids: Any) -> None:
    """Reject anything but a tensor of integers."""
    if not isinstance(input_ids, Tensor):
        kind = type(input_ids).__name__
        raise UserError(f"input_ids is a {kind}: use a tensor of ids, tokenizer(text, return_tensors='pt').input_ids")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        kind = str(input_ids.dtype).removeprefix("torch.")
        raise UserError(f"input_ids contains {kind} numbers, but token ids are integers: {_REMEDY}")


class Piece(NamedTuple):
    """A piece of text. ``drafted`` is True if its last token was drafted, and False if the target wrote that token."""

    text: str
    drafted: bool


class Detokenizer:
    """Converter of a growing list of tokens into text; it holds back incomplete characters.

    Each token is decoded together with a few tokens before it, because a token's text may depend on its neighbours.
    """

    def __init__(self, tokenizer: TextDecoder) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # number of tokens whose text was returned
        self._context = 0  # index of the first token that is decoded, a few tokens before the new ones

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes, possibly empty."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        text: str = self._tokenizer.decode(self._tokens[self._context :])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context = max(0, self._shown - 4)
        self._shown = len(self._tokens)
        return text[len(before) :]

    def flush(self) -> str:
        """Return the remaining text; incomplete characters become U+FFFD."""
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        text: str = self._tokenizer.decode(self._tokens[self._context :])
        return text[len(before) :]


def stream_pieces(steps: Iterable[Step], tokenizer: TextDecoder, hidden: Container[int] = ()) -> Iterator[Piece]:
    """Yield the text of each token once its step is done; tokens in ``hidden`` (such as EOS) yield nothing."""
    detokenizer = Detokenizer(tokenizer)
    for step in steps:
        yield from step_pieces(step, detokenizer, hidden)
    if rest := detokenizer.flush():
        yield Piece(rest, drafted=False)


def step_pieces(step: Step, detokenizer: Detokenizer, hidden: Container[int] = ()) -> Iterator[Piece]:
    """Yield the text that each token of a step completes."""
    for index, token in enumerate(step.tokens):
        if token not in hidden and (text := detokenizer.push(token)):
            yield Piece(text, drafted=index < step.accepted)


def decode_text(tokens: Iterable[int], tokenizer: TextDecoder, hidden: Container[int] = ()) -> str:
    """Return the text of new tokens as `stream_pieces` streams it."""
    detokenizer = Detokenizer(tokenizer)
    return "".join([*(detokenizer.push(token) for token in tokens if token not in hidden), detokenizer.flush()])


@dataclass
class Tally:
    """Running figures of all steps that were added.

    A prefill counts only in ``prefill_seconds``. ``lengths`` maps a number of accepted drafted tokens to the number of
    passes that accepted exactly this many tokens. Seconds exclude the caller's work between two steps.
    """

    passes: int = 0
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    prefill_seconds: float = 0.0
    lengths: Counter[int] = field(default_factory=Counter)

    @staticmethod
    def of(steps: Iterable[Step]) -> "Tally":
        tally = Tally()
        for step in steps:
            tally.add(step)
        return tally

    def add(self, step: Step) -> None:
        if step.is_prefill:
            self.prefill_seconds += step.total_seconds
            return
        self.passes += 1
        self.tokens += len(step.tokens)
        self.accepted += step.accepted
        self.drafted += step.drafted
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.total_seconds += step.total_seconds
        self.lengths[step.accepted] += 1

    def watch(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Count each step and pass it on."""
        for step in steps:
            self.add(step)
            yield step

    @property
    def overhead_seconds(self) -> float:
        """Seconds that the loop spent outside the draft and the target pass."""
        return max(0.0, self.total_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass, including the token that the target adds; 0 before the first pass."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding; 0 before the first pass."""
        return self.tokens / self.total_seconds if self.total_seconds else 0.0
