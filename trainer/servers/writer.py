"""A served model that writes texts to be proved: its answers as the target's token ids."""

from collections.abc import Callable, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.measure.proof.reference import EngineText, Reference
from trainer.servers.answers import CONTROLS, Completion, CompletionRequest
from trainer.servers.client import ServedModel

Source = Literal["token ids", "token ids beside the log-probabilities", "texts alone, tokenized again here"]


class ServedWriter:
    """A served model that continues prompts of token ids.

    Asked once when it is made: which way its token ids come, if it takes prompts of token ids, and if it takes controls
    beside temperature and top-p. ValueError for controls to be tested that it does not take, and for a server that
    reads another prompt than it was sent. ``tokenizer`` None: the server must take and tell token ids.
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
            raise UserError("the server takes no top_k", "leave --top-k out")
        self.source: Source = "token ids"
        self.retold = 0
        """Texts whose tokens had to be made from their text."""
        self.unlike = 0
        """Retold texts whose tokens do not give the text back."""
        self._logprobs: int | None = None
        if self._answer(prompt, None).token_ids is None:
            self._logprobs = 1
            told = self._answer(prompt, 1)
            self.source = "token ids beside the log-probabilities"
            if _ids_of(told) is None:
                self._logprobs, self.source = None, "texts alone, tokenized again here"

    def write(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, greedy: bool, seed: int
    ) -> list[EngineText]:
        """Ask for each prompt's continuation, with a seed of its own."""
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
        return [
            EngineText(self._read(prompt, answer), self._tokens(answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def _answer(self, prompt: tuple[int, ...], logprobs: int | None) -> Completion:
        return self._served.many([CompletionRequest(self._prompt_to_send(prompt), 2, logprobs=logprobs)])[0]

    def _prompt_to_send(self, prompt: tuple[int, ...]) -> str | tuple[int, ...]:
        return prompt if self.takes_ids else str(self._text_tokenizer.decode(list(prompt)))

    @property
    def _text_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ValueError("the server neither takes nor tells token ids, and there is no tokenizer for its texts")
        return self._tokenizer

    def _read(self, prompt: tuple[int, ...], answer: Completion) -> tuple[int, ...]:
        """Return the prompt, which the server must have read as it was sent."""
        read = len(prompt)
        if answer.prompt_ids is not None:
            read = len(answer.prompt_ids)
        elif answer.prompt_tokens:
            read = answer.prompt_tokens
        if answer.prompt_ids not in (None, prompt) or read != len(prompt):
            raise ValueError(
                f"the server read a prompt of {read} tokens where {len(prompt)} were meant: "
                "its tokenizer is not the target's, or it adds tokens of its own; see headstart diagnose"
            )
        return prompt

    def _tokens(self, answer: Completion) -> tuple[int, ...]:
        """Return the answer's tokens, with the EOS that ended it, which some servers leave out."""
        tokens = _ids_of(answer)
        if tokens is None:
            tokens = tuple(self._text_tokenizer(answer.text, add_special_tokens=False)["input_ids"])
            self.retold += bool(answer.text)
            self.unlike += self._text_tokenizer.decode(list(tokens)) != answer.text
        vocabulary, ends = self._reference.target.vocab_size, self._reference.eos_token_ids
        if unknown := [token for token in tokens if not 0 <= token < vocabulary]:
            raise ValueError(
                f"the server wrote token {unknown[0]}, but the target has tokens up to {vocabulary - 1}: "
                "it serves another model"
            )
        if answer.finish_reason == "stop" and ends and not set(tokens) & set(ends):
            tokens += (ends[0],)
        return tokens


def _ids_of(answer: Completion) -> tuple[int, ...] | None:
    """Return the token ids that a server tells, an empty answer's among them; None if it tells none."""
    if answer.token_ids is not None:
        return answer.token_ids
    return () if not answer.text and answer.finish_reason == "stop" else None
