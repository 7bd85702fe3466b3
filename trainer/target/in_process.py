"""Answers by the target in this process, decoded in groups of conversations that are the same in every run."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig, check_prompt
from decoding.model.causal_lm import CausalLM
from decoding.prompts import encode_prompt
from trainer.data.answers import AnsweredConversation, FailedConversation, Outcome
from trainer.data.chat import TranscriptEncoder, read_answer
from trainer.data.conversations import AnswerKey, Message, OpenConversation, answer_message, is_empty
from trainer.recipe.common import DataSection

GROUP = 4
"""Batches in a group: more keep the rows of a batch full, fewer lose less to a kill."""
TURN = 2**32
"""Distance between the seeds of one turn and of the next: larger than any file's number of rows."""


class TargetBackend:
    """The target in this process, speculating if it has a drafter.

    Conversations are decoded in groups that are the same in every run of the same command, so that a run that was
    killed and started again writes the same answers, bit for bit: in bf16 the texts beside a text in its batch can
    decide between two tokens that are equally good. The texts of a group whose first conversation has the
    index i are decoded with the seeds seed + i, seed + i + 1, ...; later turns with seeds of their own.
    """

    def __init__(
        self,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None,
        config: DecodingConfig,
        batch_size: int,
    ) -> None:
        self._target, self._tokenizer, self._engine = target, tokenizer, Engine(target, drafter)
        self._config, self._batch_size = config, batch_size
        self.encoder = TranscriptEncoder(DataSection(train="", heldout=""), tokenizer)

    def outcomes(
        self, conversations: Iterable[OpenConversation], done: Container[AnswerKey], on_tokens: Callable[[int], None]
    ) -> Iterator[list[Outcome]]:
        """Yield the outcomes of one group at a time, without the groups that are done."""
        waiting = iter(conversations)
        while group := list(islice(waiting, GROUP * self._batch_size)):
            if any(conversation.key not in done for conversation in group):
                yield self._answer(group, on_tokens)

    def _answer(self, group: Sequence[OpenConversation], on_tokens: Callable[[int], None]) -> list[Outcome]:
        """Answer a group turn by turn, each turn for all conversations that have one left."""
        texts = [_Text(conversation) for conversation in group]
        for turn in range(max(len(conversation.turns) for conversation in group)):
            ready = [(text, prompt) for text in texts if text.is_open and (prompt := self._prompt(text))]
            if not ready:
                break
            config = replace(self._config, seed=self._config.seed + group[0].index + turn * TURN)
            prompts = [prompt for _, prompt in ready]
            tokens: list[list[int]] = [[] for _ in prompts]
            for index, step in self._engine.steps(prompts, config, batch_size=self._batch_size):
                tokens[index] += step.tokens
                on_tokens(len(step.tokens))
            for (text, _), answer in zip(ready, tokens, strict=True):
                text.truncated = answer[-1] not in config.eos_token_ids
                written = answer if text.truncated else answer[:-1]
                text.answers.append(answer_message(read_answer(self._tokenizer, written, text.truncated)))
                text.answer_tokens.append(tuple(answer))
        return [text.outcome() for text in texts]

    def _prompt(self, text: "_Text") -> tuple[int, ...] | None:
        """Return the prompt of the text's next answer; None, with the problem noted, for one that cannot be decoded."""
        conversation = text.conversation
        try:
            messages, tools = conversation.open_after(text.answers), conversation.tools
            prompt = encode_prompt(messages, self._tokenizer, conversation.chat, tools=tools)
            check_prompt(self._target, prompt, self._config)
        except (TemplateError, ValueError) as error:
            text.problem = str(error)
            return None
        return prompt


class _Text:
    """A conversation under way."""

    def __init__(self, conversation: OpenConversation) -> None:
        self.conversation = conversation
        self.answers: list[Message] = []
        self.answer_tokens: list[tuple[int, ...]] = []
        self.truncated = False
        self.problem: str | None = None

    @property
    def is_open(self) -> bool:
        """True while turns are left to answer; an answer that was cut off or is empty ends the conversation."""
        broken_off = self.problem is not None or self.truncated or any(map(is_empty, self.answers))
        return not broken_off and len(self.answers) < len(self.conversation.turns)

    def outcome(self) -> Outcome:
        if self.problem is not None:
            return FailedConversation(self.conversation, "failed", self.problem)
        tokens = sum(map(len, self.answer_tokens))
        own = tuple(self.answer_tokens)
        return AnsweredConversation(self.conversation, tuple(self.answers), tokens, self.truncated, own)
