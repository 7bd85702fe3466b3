"""A chat with a target, in the target's chat template; the target's cache is kept from turn to turn."""

from collections.abc import Generator, Iterator
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.model.cache import PreallocatedCache
from decoding.prompts import encode_prompt
from decoding.text import Step, decode_text


class Conversation:
    """A series of questions and answers. In each turn the target runs only the tokens that it has not run before.

    Each turn encodes all messages again with the chat template, or joins them by line ends if there is no template. So
    the answer is the one that `Engine` decodes for the same messages, even after interrupted or undone turns. The
    target reuses its cache up to the first token that differs. If the template changes an earlier answer, or if the
    answer's text is now split into other tokens, part of that answer runs again. Drafts keep no cache between turns.

    ``messages`` are the messages of finished turns, in the form that chat templates take. ``answer_limit`` is the token
    limit of the last answer: ``max_new_tokens``, or fewer tokens if the context is nearly full.
    """

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, config: DecodingConfig, system: str | None = None
    ) -> None:
        """``system`` is the system message (None: no system message)."""
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
        """Length in tokens of the longest conversation that the target and the drafter support; None for no limit."""
        drafter = self.engine.drafter
        limits = (self.engine.target.max_positions, None if drafter is None else drafter.max_positions)
        return min((limit for limit in limits if limit is not None), default=None)

    def ask(self, question: str) -> Iterator[Step]:
        """Answer a question: yield each decoding step after its target pass, and end the turn after the last step.

        If a turn is closed or interrupted, the text so far becomes its answer; a turn without steps leaves no trace.
        Turn i (from 0) is decoded with the seed ``seed + i``. Raises UserError at once if the template rejects the
        question, or if the question does not fit into the context; the conversation is then unchanged.
        """
        self._end_turn()
        prompt = self.encode(question)
        room = self.config.max_new_tokens
        if (most := self.max_positions) is not None:
            room = min(room, most - len(prompt))
        if room < 1:
            raise UserError(
                f"the conversation has {len(prompt)} tokens, but at most {most} fit: shorten the question or undo turns"
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
        """Return the token ids of all messages and this question, as the prompt for the answer."""
        messages = [*self.messages, {"role": "user", "content": question}]
        return encode_prompt(messages, self.tokenizer, chat=True)

    def undo(self) -> str | None:
        """Remove the last turn and return its question; return None if there is no turn."""
        self._end_turn()
        if len(self.messages) == len(self._system):
            return None
        *self.messages, question, _ = self.messages
        return question["content"]

    def reset(self) -> None:
        """Remove all turns."""
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
                self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def _end_turn(self) -> None:
        """End a turn that the caller abandoned before its last step."""
        if self._turn is not None:
            self._turn.close()
        self._turn = None
