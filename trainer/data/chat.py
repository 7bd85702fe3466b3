"""Conversations to token ids, with the assistant's own tokens marked."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARKED = "the template's generation marks"
COMPARED = "prefixes of the template compared"
_GOES_ON = "\ue000"  # for private use: no template has it

Messages = Sequence[dict[str, Any]]


class Marked(NamedTuple):
    """A sequence of token ids, and which of them the assistant wrote, its end of turn included."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]


class ChatTemplate:
    """A tokenizer's chat template, and how to tell which tokens in it are the assistant's.

    A template with ``{% generation %}`` marks says so itself. Of any other, an answer is what the conversation up to
    and with it has beyond the prompt that would ask for it. Where a template writes earlier turns in another way
    once others follow (Qwen3 leaves out what was thought), a conversation gives a sequence for each answer, which is
    how the target sees it when it writes that answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._has_marks = _GENERATION.search(template) is not None
        if not tokenizer.is_fast:
            raise ValueError(
                "the tokenizer cannot say which characters a token stands for, which finding the assistant's tokens "
                "needs: give a target with a tokenizer.json"
            )
        added: Any = tokenizer.added_tokens_decoder
        self._specials = tuple(token.content for token in added.values() if token.special)

    @property
    def mask_source(self) -> str:
        """How the assistant's tokens are found."""
        return MARKED if self._has_marks else COMPARED

    def prompt(self, messages: Messages, where: str) -> tuple[int, ...]:
        """The tokens that ask for the answer to ``messages``; ``where`` names the row in errors."""
        try:
            text = self._asking(messages, where)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{where}: the chat template cannot hold this conversation: {error}") from error
        tokens: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(tokens)

    def encode(self, messages: Messages, where: str, cut_off: bool = False) -> list[Marked]:
        """One sequence, or one for each answer; ``where`` names the row in errors.

        Where the last answer was ``cut_off``, the end that the template gives it is not marked: nobody wrote it.
        """
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{where}: the conversation has no answer of the assistant's, so nothing would be trained")
        try:
            encoded = [self._by_marks(messages)] if self._has_marks else self._by_comparison(messages, where)
            if cut_off and messages[-1]["role"] == "assistant":
                encoded[-1] = self._without_end(messages, encoded[-1])
        except (TemplateError, TypeError) as error:  # TypeError: a template adds texts to what is none
            raise ValueError(f"{where}: the chat template cannot hold this conversation: {error}") from error
        for sequence in encoded:
            self._check(sequence.trained, where)
        return encoded

    def _by_marks(self, messages: Messages) -> Marked:
        encoded: Any = self._tokenizer.apply_chat_template(
            list(messages), chat_template=self._template, return_dict=True, return_assistant_tokens_mask=True
        )
        return Marked(tuple(encoded["input_ids"]), tuple(bool(mark) for mark in encoded["assistant_masks"]))

    def _without_end(self, messages: Messages, marked: Marked) -> Marked:
        """Marks up to where the text would change if the last answer went on."""
        *before, last = messages
        text = self._render(messages)
        longer = self._render([*before, {**last, "content": last["content"] + _GOES_ON}])
        end = next((place for place, here in enumerate(text) if not longer.startswith(here, place)), len(text))
        offsets: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        pairs = zip(marked.trained, offsets, strict=True)
        return marked._replace(trained=tuple(mark and behind <= end for mark, (_, behind) in pairs))

    def _by_comparison(self, messages: Messages, where: str) -> list[Marked]:
        texts, spans = [], []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._asking(messages[:index], where)
            answered = self._render(messages[: index + 1])
            if not answered.startswith(asked):
                raise ValueError(
                    f"{where}: the chat template writes what stands before an answer in another way once the answer is "
                    "there, so the answer's tokens cannot be told: put {% generation %} ... {% endgeneration %} around "
                    "the assistant's content in a template of your own, and name its file in data.chat_template"
                )
            texts.append(answered)
            spans.append((len(asked), self._end_of_answer(answered)))
        whole = self._render(messages)
        if all(whole.startswith(text) for text in texts):
            return [self._tokenize(whole, spans)]
        return [self._tokenize(text, [span]) for text, span in zip(texts, spans, strict=True)]

    def _asking(self, messages: Messages, where: str) -> str:
        if not messages:
            raise ValueError(f"{where}: the conversation begins with the assistant: begin it with the user's message")
        return self._render(messages, add_generation_prompt=True)

    def _render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        text: Any = self._tokenizer.apply_chat_template(
            list(messages),
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return str(text)

    def _end_of_answer(self, text: str) -> int:
        """Behind the end of turn: a line break that follows it is the template's, never written by the target."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self._specials) else len(text)

    def _tokenize(self, text: str, spans: Sequence[tuple[int, int]]) -> Marked:
        """A token is the assistant's if any of its characters is."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets: Any = encoded["offset_mapping"]
        marks = [False] * len(offsets)
        for begin, end in spans:
            for place, (first, behind) in enumerate(offsets):
                marks[place] |= max(first, begin) < min(behind, end)
        tokens: Any = encoded["input_ids"]
        return Marked(tuple(tokens), tuple(marks))

    def _check(self, trained: Sequence[bool], where: str) -> None:
        if any(trained) and not all(trained):
            return
        found = "all" if any(trained) else "none of the"
        wrong = "the prompt would be trained too" if any(trained) else "nothing would be trained"
        shown = " ".join(self._template.split())
        raise ValueError(
            f"{where}: the chat template marks {found} {len(trained)} tokens as the assistant's, so {wrong}: put "
            "{% generation %} ... {% endgeneration %} around the assistant's content alone; the template is "
            f"{shown if len(shown) <= 160 else shown[:160] + ' ...'}"
        )


def chat_template(tokenizer: PreTrainedTokenizerBase, file: str | None) -> ChatTemplate | None:
    """The template in a Jinja file, else the tokenizer's own; None where it has none."""
    if file is not None:
        if not Path(file).is_file():
            raise ValueError(f"there is no chat template {file}: data.chat_template names a Jinja file")
        return ChatTemplate(tokenizer, Path(file).read_text(encoding="utf-8"))
    if tokenizer.chat_template is None:
        return None
    return ChatTemplate(tokenizer, tokenizer.get_chat_template())
