"""Conversations become token ids, with the assistant's own tokens marked as trained."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.fields import UNSPOKEN, Tools
from decoding.prompts import encode_prompt, with_variables
from trainer.data.batch import Example
from trainer.data.conversations import ANSWER_TOKENS, Transcript
from trainer.recipe.common import DataSection

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARKED = "the template's generation marks"
COMPARED = "prefixes of the template compared"
_GOES_ON = "\ue000"  # for private use: no template has it
_SHORTEST_TEXT = 8  # tokens; a shorter last piece of a text is left out

Messages = Sequence[dict[str, Any]]


class Encoded(NamedTuple):
    """The sequences of a transcript, not yet cut to the longest length."""

    transcript: Transcript
    mask_source: str
    """The way in which the trained tokens were found, in words."""
    examples: tuple[Example, ...]
    ignored: tuple[str, ...] = ()
    """Fields of the conversation that the chat template leaves out."""


class TranscriptEncoder:
    """Encodes transcripts with a tokenizer as a recipe's data section says."""

    def __init__(self, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> None:
        self._max_length = section.max_length
        self._tokenizer = tokenizer
        self._template = chat_template(tokenizer, section)
        self._vocabulary = frozenset(tokenizer.get_vocab().values())

    def encode(self, transcript: Transcript) -> Encoded:
        """Return the transcript's sequences; ValueError, naming the row, for one that cannot be encoded."""
        template = self._template and self._template.with_tools(transcript.tools)
        ignored = self.ignored(transcript.messages, transcript.tools)
        return self._encoded(transcript, template)._replace(ignored=ignored)

    def ignored(self, messages: Messages, tools: Tools | None) -> tuple[str, ...]:
        """Return "tools", and the fields of the messages, that the chat template leaves out."""
        if self._template is None:
            return ("tools",) if tools else ()
        return self._template.with_tools(tools).ignored(messages)

    def _encoded(self, transcript: Transcript, template: "ChatTemplate | None") -> Encoded:
        messages, where = transcript.messages, transcript.where
        if transcript.format == "text":
            return Encoded(transcript, "the whole text", self._text_pieces(transcript.text))
        if transcript.format == "prompt_answer":
            if not messages[1]["content"].strip():  # a model would be trained to stay silent
                return Encoded(transcript, "nothing: the answer is empty", ())
            if template is None and transcript.answer_tokens is None:
                return Encoded(transcript, "the answer behind its prompt", (self._answer_behind_prompt(transcript),))
        if transcript.answer_tokens is not None:
            return Encoded(transcript, "the target's own tokens", self._own_tokens(transcript, template))
        if template is None:
            raise ValueError(
                f"{where}: the tokenizer has no chat template, which {transcript.format!r} rows need: name a file with "
                "one in data.chat_template, or use prompt and answer"
            )
        marked = template.encode(messages, where, transcript.cut_off)
        examples = tuple(Example(tokens, trained, trained.index(True)) for tokens, trained in marked)
        return Encoded(transcript, template.mask_source, examples)

    def _text_pieces(self, text: str) -> tuple[Example, ...]:
        """Cut a plain text into consecutive sequences; every token is trained."""
        tokens: list[int] = self._tokenizer(text)["input_ids"]
        pieces = [tokens[i : i + self._max_length] for i in range(0, len(tokens), self._max_length)]
        return tuple(Example(tuple(piece), (True,) * len(piece), 0) for piece in pieces if len(piece) >= _SHORTEST_TEXT)

    def _answer_behind_prompt(self, transcript: Transcript) -> Example:
        """Join the prompt, the answer and, unless the answer was cut off, the end of the text, without a template."""
        prompt, answer = (message["content"] for message in transcript.messages)
        prompt_tokens: list[int] = self._tokenizer(prompt)["input_ids"]
        answer_tokens: list[int] = self._tokenizer(answer, add_special_tokens=False)["input_ids"]
        if self._tokenizer.eos_token_id is not None and not transcript.cut_off:
            answer_tokens = [*answer_tokens, self._tokenizer.eos_token_id]
        mask = [False] * len(prompt_tokens) + [True] * len(answer_tokens)
        return Example(tuple(prompt_tokens + answer_tokens), tuple(mask), len(prompt_tokens))

    def _own_tokens(self, transcript: Transcript, template: "ChatTemplate | None") -> tuple[Example, ...]:
        """Return a sequence for each answer, of the very tokens that the target wrote.

        The answer's text may be other tokens when it is tokenized again, and a cut-off answer has no end to train.
        """
        messages, where, written = transcript.messages, transcript.where, transcript.answer_tokens
        indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        rendered = iter(given if isinstance(given := transcript.prompt_tokens, list) else ())
        examples = []
        for index, tokens in zip(indices, written if isinstance(written, list) else (), strict=False):
            if not self._reads(tokens, messages[index], transcript.cut_off and index == indices[-1]):
                break
            prompt = next(rendered, None) or self._prompt(messages[:index], where, template)
            if not self._knows(prompt):
                break
            trained = (False,) * len(prompt) + (True,) * len(tokens)
            examples.append(Example((*prompt, *tokens), trained, len(prompt)))
        if len(examples) != len(indices) or len(written) != len(indices):
            raise UserError(
                f"{where}: {ANSWER_TOKENS} does not hold the tokens of each answer under this tokenizer",
                "regenerate the answers with this target, or remove the field",
            )
        return tuple(examples)

    def _knows(self, tokens: Any) -> bool:
        """Return True for token ids of this tokenizer."""
        integers = isinstance(tokens, list | tuple) and all(type(token) is int for token in tokens)
        return integers and self._vocabulary.issuperset(tokens)

    def _reads(self, tokens: Any, answer: dict[str, Any], truncated: bool) -> bool:
        """Return True for a list of this tokenizer's tokens that are the answer; of one with reasoning a part is."""
        if not isinstance(tokens, list) or not self._knows(tokens):
            return False
        text, content = read_answer(self._tokenizer, tokens, truncated).strip(), answer["content"].strip()
        return content in text if UNSPOKEN & answer.keys() else content == text

    def _prompt(self, messages: Messages, where: str, template: "ChatTemplate | None") -> tuple[int, ...]:
        if template is None:
            return encode_prompt(list(messages), self._tokenizer, chat=False)
        return template.prompt(messages, where)


def read_answer(tokenizer: PreTrainedTokenizerBase, tokens: list[int], truncated: bool) -> str:
    """Return the text of an answer's tokens, as regeneration writes it down and training compares it."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return whole_characters(str(text), truncated)


def whole_characters(answer: str, truncated: bool) -> str:
    """Return the answer without the half character that a cut may leave at its end."""
    return answer.rstrip("\N{REPLACEMENT CHARACTER}") if truncated else answer


class Marked(NamedTuple):
    """A sequence of token ids; ``trained`` marks the assistant's own, its end of turn included."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]

    @property
    def end(self) -> int:
        """The number of tokens up to the last marked one."""
        return max((index + 1 for index, mark in enumerate(self.trained) if mark), default=0)


class ChatTemplate:
    """A tokenizer's chat template that tells the assistant's tokens from the others.

    A template with ``{% generation %}`` marks says so itself. Without marks, two texts are compared: the prompt that
    asks for an answer, and the conversation with the answer, whose surplus is the answer. Some templates write earlier
    turns differently once others follow (Qwen3 leaves out its thinking): such a conversation gives one sequence for
    each answer, as the target saw it when it wrote that answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """``template`` None: the tokenizer's own, of several the one for ``tools``, which every conversation has.

        ``variables`` are those of `decoding.prompts.with_variables`.
        """
        self._tokenizer, self._given, self._tools, self._variables = tokenizer, template, tools, variables or {}
        self._template = with_variables(tokenizer.get_chat_template(template, tools), self._variables)
        self._has_marks = _GENERATION.search(self._template) is not None
        if not tokenizer.is_fast:
            raise ValueError(
                "the tokenizer cannot say which characters a token stands for, which finding the assistant's tokens "
                "needs: give a target with a tokenizer.json"
            )
        added: Any = tokenizer.added_tokens_decoder
        self._specials = tuple(token.content for token in added.values() if token.special)

    @property
    def mask_source(self) -> str:
        """The way in which the assistant's tokens are found, in words."""
        return MARKED if self._has_marks else COMPARED

    def with_tools(self, tools: Tools | None) -> "ChatTemplate":
        """Return the template of conversations whose assistant may call ``tools``."""
        return self if tools == self._tools else ChatTemplate(self._tokenizer, self._given, tools, self._variables)

    def ignored(self, messages: Messages) -> tuple[str, ...]:
        """Return "tools", and the fields of the messages, that change nothing in the text of a conversation."""
        fields = [name for name in sorted(UNSPOKEN) if any(message.get(name) for message in messages)]
        without = {name: (self, [{**message, name: None} for message in messages]) for name in fields}
        if self._tools:
            without["tools"] = (self.with_tools(None), [*messages])
        return tuple(name for name, (template, others) in without.items() if self._is_same(messages, template, others))

    def _is_same(self, messages: Messages, template: "ChatTemplate", others: Messages) -> bool:
        try:
            return self._render(messages) == template._render(others)
        except (TemplateError, TypeError):  # raised by others that lack what the template needs
            return False

    def prompt(self, messages: Messages, where: str) -> tuple[int, ...]:
        """Return the tokens that ask for an answer to ``messages``; ``where`` names the row in errors."""
        try:
            text = self._asking(messages, where)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{where}: the chat template cannot hold this conversation: {error}") from error
        tokens: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(tokens)

    def encode(self, messages: Messages, where: str, cut_off: bool = False) -> list[Marked]:
        """Return one sequence, or one for each answer; ``where`` names the row in errors.

        With ``cut_off`` the end that the template puts behind the last answer is not marked: nobody wrote it.
        """
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{where}: the conversation has no answer of the assistant's, so nothing would be trained")
        try:
            encoded = self._by_marks(messages, where) if self._has_marks else self._by_comparison(messages, where)
            if cut_off and messages[-1]["role"] == "assistant":
                encoded[-1] = self._without_end(messages, encoded[-1])
        except (TemplateError, TypeError) as error:  # TypeError: a template adds texts to what is none
            raise ValueError(f"{where}: the chat template cannot hold this conversation: {error}") from error
        for sequence in encoded:
            self._check(sequence.trained, where)
        return encoded

    def _by_marks(self, messages: Messages, where: str) -> list[Marked]:
        """Return one sequence; one for each answer if the template rewrites answers once others follow."""
        whole, answers = self._marked(messages), [i for i, each in enumerate(messages) if each["role"] == "assistant"]
        if len(answers) == 1:
            return [whole]
        found = [self._marked(messages[: index + 1]) for index in answers]
        if all(whole.tokens[: each.end] == each.tokens[: each.end] for each in found):
            return [whole]
        for place, index in enumerate(answers):
            before = self._marked(messages[:index]) if index else Marked((), ())
            tokens, trained = found[place]
            if tokens[: before.end] != before.tokens[: before.end]:
                raise ValueError(
                    f"{where}: the chat template writes earlier answers in another way once a later one is there, so "
                    "no sequence is what the target saw: give conversations of one answer, or another template in "
                    "data.chat_template"
                )
            found[place] = Marked(tokens, (False,) * before.end + trained[before.end :])
        return found

    def _marked(self, messages: Messages) -> Marked:
        encoded: Any = self._tokenizer.apply_chat_template(
            list(messages),
            tools=self._tools,
            chat_template=self._template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return Marked(tuple(encoded["input_ids"]), tuple(bool(mark) for mark in encoded["assistant_masks"]))

    def _without_end(self, messages: Messages, marked: Marked) -> Marked:
        """Unmark the tokens from where the text would change if the last answer, or its reasoning alone, went on."""
        *before, last = messages
        text = self._render(messages)
        field = "content" if last["content"] or not last.get("reasoning_content") else "reasoning_content"
        longer = self._render([*before, {**last, field: last[field] + _GOES_ON}])
        end = next((index for index, here in enumerate(text) if not longer.startswith(here, index)), len(text))
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
            tools=self._tools,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return str(text)

    def _end_of_answer(self, text: str) -> int:
        """Return the place behind the end of turn: a line break after it is the template's, not the target's."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self._specials) else len(text)

    def _tokenize(self, text: str, spans: Sequence[tuple[int, int]]) -> Marked:
        """Tokenize the text, marking each token of which any character lies in ``spans``."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
        marks = np.zeros(len(offsets), np.bool_)
        for begin, end in spans:
            marks |= offsets[:, 0].clip(min=begin) < offsets[:, 1].clip(max=end)
        tokens: Any = encoded["input_ids"]
        return Marked(tuple(tokens), tuple(marks.tolist()))

    def _check(self, trained: Sequence[bool], where: str) -> None:
        if any(trained) and not all(trained):
            return
        found, wrong = ("all", "the prompt would be trained too") if any(trained) else ("none", "nothing is trained")
        raise UserError(
            f"{where}: the chat template marks {found} of {len(trained)} tokens as the assistant's, so {wrong}: "
            f"{shorten(self._template, 160, placeholder=' ...')}",
            "put {% generation %} ... {% endgeneration %} around the assistant's content alone",
        )


def chat_template(tokenizer: PreTrainedTokenizerBase, section: DataSection) -> ChatTemplate | None:
    """Return the template in a Jinja file, else the tokenizer's own; None without either."""
    file, variables, given = section.chat_template, section.chat_template_kwargs, None
    if file is not None:
        if not Path(file).is_file():
            raise ValueError(f"there is no chat template {file}: data.chat_template names a Jinja file")
        given = Path(file).read_text(encoding="utf-8")
    elif tokenizer.chat_template is None:
        with_variables("", variables)  # which reads none
        return None
    return ChatTemplate(tokenizer, given, variables=variables)
