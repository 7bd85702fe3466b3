"""Texts of a served model as token ids of the target, for `headstart verify`."""

from collections.abc import Callable, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.measure.proof.finding import Finding
from decoding.measure.proof.reference import EngineText, Reference
from trainer.servers.answers import CONTROLS, Completion, CompletionRequest
from trainer.servers.client import ServedModel
from trainer.servers.counters import find_counts
from trainer.servers.texts import Scorer, rounding_or_rule

Source = Literal["token ids", "token ids with the log-probabilities", "only texts, which are tokenized again here"]

_SCORED_TEXTS = 16
"""Number of texts with a fault that a server is asked to score; scoring takes one request per token."""
_USUAL_DRAFT = 7
"""Number of drafted tokens that we assume for a server that does not count them."""


class ServedWriter:
    """A served model that continues prompts of token ids.

    Construction asks the server how it reports token ids, whether it accepts prompts of token ids, and whether it
    accepts controls other than temperature and top-p. Raises UserError if the server rejects a control that is to be
    tested, or reads another prompt than the one that was sent. Without a ``tokenizer``, the server must accept and
    report token ids.
    """

    def __init__(
        self,
        served: ServedModel,
        reference: Reference,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt: tuple[int, ...],
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self._served, self._reference, self._tokenizer = served, reference, tokenizer
        self.on_answer = on_answer
        self.takes_ids = served.check_ids(prompt)
        self._controls = served.taken_controls(self._prompt_to_send(prompt))
        self.refused_controls = tuple(name for name in CONTROLS if name not in self._controls)
        if "top_k" in self.refused_controls and reference.sampling.top_k:
            raise UserError("the server rejects top_k", "omit --top-k")
        self.source: Source = "token ids"
        self.retold = 0
        """Number of texts that had to be tokenized again, because the server reported no token ids."""
        self.unlike = 0
        """Number of texts that were tokenized again and then did not decode to the same text."""
        self.greedy: list[EngineText] = []
        """The greedy texts that the server wrote last."""
        self._logprobs: int | None = None
        if self._answer(prompt, None).token_ids is None:
            self._logprobs = 1
            told = self._answer(prompt, 1)
            self.source = "token ids with the log-probabilities"
            if _ids_of(told) is None:
                self._logprobs, self.source = None, "only texts, which are tokenized again here"

    def write(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, greedy: bool, seed: int
    ) -> list[EngineText]:
        """Request a continuation of each prompt, each with a different seed."""
        sampling = self._reference.sampling
        temperature, top_p = (0.0, 1.0) if greedy else (sampling.temperature, sampling.top_p)
        controls = self._controls if greedy or not sampling.top_k else {**self._controls, "top_k": sampling.top_k}
        requests = [
            CompletionRequest(
                self._prompt_to_send(prompt), max_new_tokens, temperature, top_p, seed + index, self._logprobs, controls
            )
            for index, prompt in enumerate(prompts)
        ]
        answers = self._served.many(requests, self.on_answer)
        texts = [
            EngineText(self._read(prompt, answer), self._tokens(answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        self.greedy = texts if greedy else self.greedy
        return texts

    def rounding_or_rule(self, faulty: Sequence[int]) -> Finding:
        """Have the server score some of its greedy texts, to tell rounding from a wrong rule. ``faulty`` lists the
        numbers of these texts, from 1.
        """
        counts = find_counts(self._served.metrics(), self._served.served.model)
        width = 1 + ((counts.tokens if counts else None) or _USUAL_DRAFT)
        forced = self._text_tokenizer("a", add_special_tokens=False)["input_ids"][-1]
        scorer = Scorer(self._served, self._controls, forced)
        texts = [self.greedy[number - 1] for number in faulty[:_SCORED_TEXTS]]
        return rounding_or_rule(scorer, texts, width, self._reference.eos_token_ids)

    def _answer(self, prompt: tuple[int, ...], logprobs: int | None) -> Completion:
        return self._served.many([CompletionRequest(self._prompt_to_send(prompt), 2, logprobs=logprobs)])[0]

    def _prompt_to_send(self, prompt: tuple[int, ...]) -> str | tuple[int, ...]:
        return prompt if self.takes_ids else str(self._text_tokenizer.decode(list(prompt)))

    @property
    def _text_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise UserError("the server neither accepts nor reports token ids, and its texts need a tokenizer")
        return self._tokenizer

    def _read(self, prompt: tuple[int, ...], answer: Completion) -> tuple[int, ...]:
        """Return the prompt, after checking that the server read it as it was sent."""
        read = len(prompt)
        if answer.prompt_ids is not None:
            read = len(answer.prompt_ids)
        elif answer.prompt_tokens:
            read = answer.prompt_tokens
        if answer.prompt_ids not in (None, prompt) or read != len(prompt):
            raise UserError(
                f"the server read a prompt of {read} tokens instead of {len(prompt)}: the server uses another "
                "tokenizer than the target, or it adds tokens; run 'headstart diagnose'"
            )
        return prompt

    def _tokens(self, answer: Completion) -> tuple[int, ...]:
        """Return the answer's tokens, including the EOS that ended the answer, even if the server omits this token."""
        tokens = _ids_of(answer)
        if tokens is None:
            tokens = tuple(self._text_tokenizer(answer.text, add_special_tokens=False)["input_ids"])
            self.retold += bool(answer.text)
            self.unlike += self._text_tokenizer.decode(list(tokens)) != answer.text
        vocabulary, ends = self._reference.target.vocab_size, self._reference.eos_token_ids
        if unknown := [token for token in tokens if not 0 <= token < vocabulary]:
            raise UserError(
                f"the server wrote token {unknown[0]}, but the target's last token is {vocabulary - 1}: the server "
                "serves another model"
            )
        return answer.with_end(tokens, ends)


def _ids_of(answer: Completion) -> tuple[int, ...] | None:
    """Return the token ids that the server reports, even for an empty answer; None if it does not report ids."""
    if answer.token_ids is not None:
        return answer.token_ids
    return () if not answer.text and answer.finish_reason == "stop" else None
