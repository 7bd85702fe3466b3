"""Answers that the target writes in this process, in groups of conversations that are the same in every run."""

import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.prompts import encode_prompt
from decoding.text import check_prompt
from trainer.data.answers import AnsweredConversation, FailedConversation, Outcome
from trainer.data.chat import TranscriptEncoder, read_answer
from trainer.data.conversations import AnswerKey, Message, OpenConversation, answer_message, is_empty
from trainer.data.self_written import UserTurn
from trainer.recipe.common import DataSection

GROUP = 4
"""Number of batches in a group. Larger groups keep batches full, but a resumed run repeats an unfinished group."""
TURN = 2**32
"""Distance between the seeds of successive turns, which exceeds the number of rows in any file."""
_LOGGER = logging.getLogger(__name__)
_UNDRAFTED = (
    "answers that may grow beyond the draft's context of %s tokens are decoded without drafts: lower --max-new-tokens "
    "if this affects most answers"
)


class TargetBackend:
    """The target in this process, which decodes speculatively if there is a drafter.

    Every run of a command decodes the same groups of conversations, so a run that is killed and restarted writes the
    same answers, bit for bit. The groups matter because in bf16 the other texts of a batch can decide near-ties. In its
    first turn, a group whose first conversation has index i uses the seeds seed + i, seed + i + 1, …; in later turns it
    uses other seeds.
    """

    def __init__(
        self,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None,
        config: DecodingConfig,
        batch_size: int,
        user: UserTurn | None = None,
    ) -> None:
        """If a turn has no messages and there is a ``user``, the target writes the turn."""
        self._target, self._tokenizer, self._engine = target, tokenizer, Engine(target, drafter)
        self._user = user
        self._config, self._batch_size, self._warned = config, batch_size, False
        self.encoder = TranscriptEncoder(DataSection(train="", heldout=""), tokenizer)

    def outcomes(
        self, conversations: Iterable[OpenConversation], done: Container[AnswerKey], on_tokens: Callable[[int], None]
    ) -> Iterator[list[Outcome]]:
        """Yield each outcome as soon as it is known. A group whose answers are all done is skipped."""
        waiting = iter(conversations)
        while group := list(islice(waiting, GROUP * self._batch_size)):
            if any(conversation.key not in done for conversation in group):
                yield from self._answer(group, on_tokens)

    def _answer(self, group: Sequence[OpenConversation], on_tokens: Callable[[int], None]) -> Iterator[list[Outcome]]:
        """Answer a group turn by turn; each turn covers all open conversations."""
        texts = [_Text(conversation) for conversation in group]
        for turn in range(max(len(conversation.turns) for conversation in group)):
            seed = self._config.seed + group[0].index + turn * TURN
            yield self._write([text for text in texts if text.is_open and text.lacks_turn], seed, on_tokens)
            asked = [text for text in texts if text.is_open]
            ready = [(text, prompt) for text in asked if (prompt := self._prompt(text))]
            yield [text.outcome() for text in asked if not text.is_open]
            for text, answer in self._decoded(ready, self._config, seed, on_tokens):
                said, text.truncated = self._said(answer, self._config)
                text.answers.append(answer_message(said))
                text.answer_tokens.append(tuple(answer))
                if not text.is_open:
                    yield [text.outcome()]

    def _write(self, texts: Sequence["_Text"], seed: int, on_tokens: Callable[[int], None]) -> list[Outcome]:
        """Let the target write the user's next turn of each text.

        If the turn of a text cannot be used, end the text and return its outcome.
        """
        if not texts:
            return []
        user = self._user
        assert user is not None, "turns without messages need a UserTurn"
        config = user.config(self._config, self._target.max_positions)
        opened = [(text, user.after(text.conversation.with_answers(text.answers))) for text in texts]
        room = (self._target.max_positions or math.inf) - config.max_new_tokens
        ready = [(text, prompt) for text, prompt in opened if len(prompt) <= room]
        for text, tokens in self._decoded(ready, config, seed + TURN // 2, on_tokens):
            said, truncated = self._said(tokens, config)
            if user.fault(said.strip(), tokens, truncated) is None:
                text.add_turn(said.strip())
        ended = [text for text in texts if text.lacks_turn]
        for text in ended:
            text.ended = True
        return [text.outcome() for text in ended]

    def _said(self, tokens: list[int], config: DecodingConfig) -> tuple[str, bool]:
        """Return the text of decoded tokens without the end token, and True if there is no end token."""
        truncated = tokens[-1] not in config.eos_token_ids
        return read_answer(self._tokenizer, tokens if truncated else tokens[:-1], truncated), truncated

    def _decoded(
        self,
        ready: Sequence[tuple["_Text", tuple[int, ...]]],
        config: DecodingConfig,
        seed: int,
        on_tokens: Callable[[int], None],
    ) -> Iterator[tuple["_Text", list[int]]]:
        """Yield each text with the tokens of its answer as soon as the answer ends; text i is decoded with the seed
        ``seed + i``.

        Texts that may grow beyond the drafter's context come last and are decoded without drafts.
        """
        drafter, most = self._engine.drafter, config.max_new_tokens
        limit = None if drafter is None else drafter.max_positions
        long = [limit is not None and len(prompt) + most > limit for _, prompt in ready]
        if any(long) and not self._warned:
            _LOGGER.warning(_UNDRAFTED, limit)
            self._warned = True
        for beyond in sorted(set(long)):
            engine = replace(self._engine, drafter=None) if beyond else self._engine
            indices = [index for index, is_long in enumerate(long) if is_long == beyond]
            tokens: list[list[int]] = [[] for _ in indices]
            prompts, seeds = [ready[index][1] for index in indices], [seed + index for index in indices]
            for index, step in engine.steps(prompts, config, batch_size=self._batch_size, seeds=seeds):
                tokens[index] += step.tokens
                on_tokens(len(step.tokens))
                if tokens[index][-1] in config.eos_token_ids or len(tokens[index]) == most:
                    yield ready[indices[index]][0], tokens[index]

    def _prompt(self, text: "_Text") -> tuple[int, ...] | None:
        """Return the prompt of the next answer; if it cannot be decoded, record the problem and return None."""
        conversation = text.conversation
        try:
            messages, tools = conversation.open_after(text.answers), conversation.tools
            prompt = conversation.spelled or encode_prompt(messages, self._tokenizer, conversation.chat, tools=tools)
        except (TemplateError, UserError) as error:
            text.problem = str(error)
            return None
        try:
            check_prompt(self._target, prompt, self._config.max_new_tokens)
        except UserError as error:
            text.ended = bool(text.answers)  # the answers before a turn that is too long are kept
            text.problem = None if text.ended else str(error)
            return None
        return prompt


class _Text:
    def __init__(self, conversation: OpenConversation) -> None:
        self.conversation = conversation
        self.answers: list[Message] = []
        self.answer_tokens: list[tuple[int, ...]] = []
        self.truncated = False
        self.ended = False
        self.problem: str | None = None

    @property
    def lacks_turn(self) -> bool:
        """True if the target itself writes the next turn."""
        return not self.conversation.turns[len(self.answers)]

    def add_turn(self, content: str) -> None:
        """Set the user's message of the next turn."""
        turns = list(self.conversation.turns)
        turns[len(self.answers)] = ({"role": "user", "content": content},)
        self.conversation = replace(self.conversation, turns=tuple(turns))

    @property
    def is_open(self) -> bool:
        """True while turns remain; an empty or cut-off answer ends the conversation."""
        broken_off = self.ended or self.problem is not None or self.truncated or any(map(is_empty, self.answers))
        return not broken_off and self.conversation.goes_on(self.answers, spelled=True)

    def outcome(self) -> Outcome:
        if self.problem is not None:
            return FailedConversation(self.conversation, "failed", self.problem)
        tokens = sum(map(len, self.answer_tokens))
        own = tuple(self.answer_tokens)
        return AnsweredConversation(self.conversation, tuple(self.answers), tokens, self.truncated, own)
