"""A chat with a target: messages in its chat template, and the target's cache kept from turn to turn."""

from collections.abc import Generator, Iterator
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.model.cache import PreallocatedCache
from decoding.prompts import encode_prompt
from decoding.stream import decode_text


class Conversation:
    """Turns of questions and answers; a turn runs only the tokens that the target has not run in an earlier one.

    Each turn encodes all messages anew by the chat template (without a template they are joined by line ends), so that
    its answer is the one that `Engine` decodes for these messages, whatever was interrupted or undone before. The
    target reuses its cache up to the first token that differs from what it ran: of an answer whose text is encoded in
    other tokens than it was written in, and of one that the template changes, a part runs again. Drafts hold no cache
    between turns: they read the conversation anew.

    ``messages`` are those of finished turns, as chat templates take them. ``answer_limit`` is the greatest number of
    tokens of the last answer: ``max_new_tokens``, or fewer where the context has less room.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        config: DecodingConfig,
        system: str | None = None,
    ) -> None:
        """``system`` begins the conversation (None: without)."""
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.messages: list[dict[str, str]] = []
        self.answer_limit = config.max_new_tokens
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._asked = 0
        self._cache: PreallocatedCache | None = None
        self._turn: Generator[Step, None, None] | None = None
        self.reset()

    @property
    def max_positions(self) -> int | None:
        """Length of the longest conversation that target and drafter hold, in tokens; None if nothing limits it."""
        drafter = self.engine.drafter
        limits = (self.engine.target.max_positions, None if drafter is None else drafter.max_positions)
        return min((limit for limit in limits if limit is not None), default=None)

    def ask(self, question: str) -> Iterator[Step]:
        """Answer a question; yield each step when its target pass is done, and end the turn behind the last one.

        A turn that is dropped, closed or interrupted earlier keeps the steps so far as its answer; without any, it
        keeps nothing. Turn i (from 0) of those asked is decoded with the seed ``seed + i``. ValueError at once, with
        the conversation unchanged, for a question that the template refuses or that the context has no room for.
        """
        self._end_turn()
        prompt = self.encode(question)
        room = self.config.max_new_tokens
        if (most := self.max_positions) is not None:
            room = min(room, most - len(prompt))
        if room < 1:
            raise ValueError(
                f"with this question the conversation is {len(prompt)} tokens long, and target and draft hold "
                f"{most}, the answer included: ask a shorter one, undo earlier turns, or reset the conversation"
            )
        if self._cache is None:
            self._cache = self.engine.target.new_cache(len(prompt) + self.config.max_new_tokens)
        self.answer_limit = room
        config = replace(self.config, max_new_tokens=room, seed=self.config.seed + self._asked)
        steps = self.engine.steps(prompt, config, cache=self._cache)
        self._turn = self._answer(question, steps)
        self._asked += 1
        return self._turn

    def encode(self, question: str) -> tuple[int, ...]:
        """Return the token ids that ask for the answer to this question after all messages."""
        messages = [*self.messages, {"role": "user", "content": question}]
        return encode_prompt(messages, self.tokenizer, chat=True)

    def undo(self) -> str | None:
        """Take the last turn back; return its question, None if there is no turn."""
        self._end_turn()
        if len(self.messages) == len(self._system):
            return None
        *self.messages, question, _ = self.messages
        return question["content"]

    def reset(self) -> None:
        """Take all turns back."""
        self._end_turn()
        self.messages = [*self._system]

    def _answer(self, question: str, steps: Iterator[Step]) -> Generator[Step, None, None]:
        tokens: list[int] = []
        try:
            for step in steps:
                tokens += step.tokens
                yield step
        finally:
            if tokens:
                answer = decode_text(tokens, self.tokenizer, hidden=self.config.eos_token_ids)
                self.messages += [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]

    def _end_turn(self) -> None:
        """End a turn that its caller has left before its last step."""
        if self._turn is not None:
            self._turn.close()
        self._turn = None
