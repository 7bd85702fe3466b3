"""A server that speculates with this project's loop but answers and counts like vLLM; tests plant differences in it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripted_endpoint import Reply, Request
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig

Render = Callable[[list[dict[str, str]]], Sequence[int]]
"""Function from messages to the token ids of the prompt."""


@dataclass
class SpeculatingServer:
    """The script of a `scripted_endpoint.serve`. ``sampling``: the drafter above temperature 0, if it differs from the
    greedy drafter.

    ``whole``: draft and count whole chains even if they go beyond the longest text, as vLLM does. llama.cpp drafts only
    as many tokens as the text has room for.
    """

    target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter
    render: Render
    sampling: Drafter | None = None
    tokens: int = 3
    whole: bool = True
    eos: tuple[int, ...] = (0,)
    tells_ids: bool = True
    has_page: bool = True
    drafts: int = 100  # the counts before the first request
    drafted: int = 300
    accepted: int = 7
    reached: list[int] = field(default_factory=lambda: [7, 0, 0])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Request) -> Reply:
        route = request.path.removeprefix("/v1").strip("/")
        if route == "metrics":
            return (200, self.page()) if self.has_page else (404, "")
        if route in ("completions", "chat/completions"):
            with self._lock:
                return self._answer(request.body)
        return 404, {"error": {"message": "no such route"}}

    def page(self) -> str:
        """Return the metrics page in the form of vLLM."""
        name = "vllm:spec_decode_num"
        counts = (("drafts", self.drafts), ("draft_tokens", self.drafted), ("accepted_tokens", self.accepted))
        lines = [f'{name}_{which}_total{{engine="0"}} {count}.0' for which, count in counts]
        lines += [
            f'{name}_accepted_tokens_per_pos_total{{engine="0",position="{place}"}} {count}.0'
            for place, count in enumerate(self.reached)
        ]
        return "\n".join(lines) + "\n"

    def _ids(self, body: dict[str, Any]) -> Sequence[int]:
        if "messages" in body:
            return self.render(body["messages"])
        prompt = body["prompt"]
        if isinstance(prompt, str):
            found: list[int] = self.tokenizer(prompt)["input_ids"]
            return found
        return list(prompt)

    def _answer(self, body: dict[str, Any]) -> Reply:
        ids = self._ids(body)
        sampling = SamplingConfig(temperature=body["temperature"])
        most, beyond = body["max_tokens"], self.whole * self.tokens
        config = DecodingConfig(most + beyond, sampling, eos_token_ids=self.eos, seed=body["seed"])
        drafter = self.drafter if sampling.greedy or self.sampling is None else self.sampling
        text = Engine(self.target, drafter).decode(ids, config)
        for step in text.steps:
            if step.drafted and step.room >= beyond:
                self.drafts += 1
                self.drafted += step.drafted
                self.accepted += step.accepted
                self.reached = [count + (step.accepted > place) for place, count in enumerate(self.reached)]
        tokens = text.tokens[:most]
        ended = tokens[-1] in self.eos
        written = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if ended else "length"}
        choice |= {"message": {"role": "assistant", "content": written}} if "messages" in body else {"text": written}
        if self.tells_ids:
            choice |= {"token_ids": list(tokens), "prompt_token_ids": list(ids)}
        return 200, {"id": "1", "choices": [choice], "usage": {"prompt_tokens": len(ids)}}
