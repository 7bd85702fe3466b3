"""Encoding of conversations as token ids, with the assistant's tokens marked as trained."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.fields import REASONING, UNSPOKEN, UNTRAINED, Message, Tools, is_metadata, is_trained
from decoding.prompts import encode_continuation, encode_prompt, with_variables
from trainer.data.batch import Example
from trainer.data.conversations import ANSWER_TOKENS, Transcript, opening_of
from trainer.data.marks import ADVICE, Marked, TokenMarker, has_marks, read_spans, with_spans
from trainer.data.sources import Row
from trainer.recipe.common import DataSection

MARKED = "the template's generation marks"
COMPARED = "comparison of the template's prefixes"
_GOES_ON = "\ue000"  # a private-use character that no template contains
_SHORTEST_TEXT = 8  # in tokens; a shorter last piece of a text is skipped

_ALWAYS = frozenset({"role", "content", "name", "tool_call_id", *REASONING[1:], *UNTRAINED})
"""Message fields that a template may ignore without harm, or that templates read under another name."""

Messages = Sequence[Message]


class Encoded(NamedTuple):
    """The sequences of a transcript, before cutting to the maximum length."""

    transcript: Transcript
    mask_source: str
    """How the trained tokens were found, in words."""
    examples: tuple[Example, ...]
    ignored: tuple[str, ...] = ()
    """Fields of the conversation that the chat template ignores."""


class TranscriptEncoder:
    """Encoder of transcripts with a tokenizer, according to a recipe's data section."""

    def __init__(self, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()) -> None:
        """``ends`` are the target's `decoding.model.loading.eos_token_ids`; by default, the tokenizer's EOS token."""
        own = tokenizer.eos_token_id
        self._end: int | None = own if own in ends or not ends else ends[0]
        self._ends = {*ends, self._end}
        self._max_length = section.max_length
        self._tokenizer = tokenizer
        self._template = chat_template(tokenizer, section)
        self._vocabulary = frozenset(tokenizer.get_vocab().values())

    def encode(self, transcript: Transcript) -> Encoded:
        """Return the transcript's sequences. Raises a UserError that names the row if encoding fails."""
        template = self._template and self._template.with_tools(transcript.tools)
        if transcript.cut_off and transcript.answer_tokens is None:
            transcript = replace(transcript, messages=self._with_open_thinking(transcript))
        ignored = self.ignored(transcript.messages, transcript.tools)
        lost = frozenset(ignored if transcript.answer_tokens is None else ())
        messages = []
        for message in transcript.messages:
            silent = not message["content"].strip() and UNSPOKEN & message.keys() <= lost
            messages.append(message | (UNTRAINED if silent else {}))
        return self._encoded(replace(transcript, messages=tuple(messages)), template)._replace(ignored=ignored)

    def ignored(self, messages: Messages, tools: Tools | None) -> tuple[str, ...]:
        """Return the names of what the chat template ignores: message fields, messages of a role, and "tools"."""
        if self._template is None:
            return (*_extras(messages), *(("tools",) if tools else ()))
        return self._template.with_tools(tools).ignored(messages)

    def _with_open_thinking(self, transcript: Transcript) -> tuple[Message, ...]:
        """Return the messages; if the template reads reasoning, an answer that was cut off while thinking becomes
        reasoning. Otherwise some templates would write an empty, closed thinking section before the answer.
        """
        *before, last = transcript.messages or ({"content": ""},)
        if not last["content"].startswith("<think>") or "</think>" in last["content"]:
            return transcript.messages
        thinking = last["content"].removeprefix("<think>").strip("\n")
        messages = (*before, {**last, "content": "", **dict.fromkeys(REASONING, thinking)})
        return transcript.messages if REASONING[0] in self.ignored(messages, transcript.tools) else messages

    def _encoded(self, transcript: Transcript, template: "ChatTemplate | None") -> Encoded:
        messages, where = transcript.messages, transcript.where
        if transcript.format == "text":
            return Encoded(transcript, "the whole text", self._text_pieces(transcript.text))
        is_pair = transcript.format == "prompt_answer" and template is None  # trains only the last answer
        answers = [message for message in messages if message["role"] == "assistant"][-1 if is_pair else 0 :]
        if answers and not any(map(is_trained, answers)):  # an empty answer would teach the model to stay silent
            return Encoded(transcript, "no answer (each is empty or excluded)", ())
        if is_pair and transcript.answer_tokens is None:
            return Encoded(transcript, "the answer after its prompt", (self._answer_behind_prompt(transcript),))
        if transcript.answer_tokens is not None:
            return Encoded(transcript, "the target's own tokens", self._own_tokens(transcript, template))
        if template is None:
            raise UserError(
                f"{where}: {transcript.format!r} rows need a chat template, which the tokenizer lacks: set "
                "data.chat_template to a Jinja file, or use rows with a prompt and an answer"
            )
        marked = template.encode(messages, where, transcript.cut_off)
        examples = tuple(Example(tokens, trained, trained.index(True)) for tokens, trained in marked)
        return Encoded(transcript, template.mask_source, examples)

    def _text_pieces(self, text: str) -> tuple[Example, ...]:
        """Cut a plain text into consecutive sequences, in which every token is trained."""
        tokens: list[int] = self._tokenizer(text)["input_ids"]
        pieces = [tokens[i : i + self._max_length] for i in range(0, len(tokens), self._max_length)]
        return tuple(Example(tuple(piece), (True,) * len(piece), 0) for piece in pieces if len(piece) >= _SHORTEST_TEXT)

    def _answer_behind_prompt(self, transcript: Transcript) -> Example:
        """Join the prompt, the answer and, unless the answer was cut off, the end-of-text token, without a template."""
        *before, answer = (message["content"] for message in transcript.messages)
        prompt_tokens: list[int] = self._tokenizer("\n".join(before))["input_ids"]
        answer_tokens = encode_continuation(answer, self._tokenizer)
        if self._end is not None and not transcript.cut_off:
            answer_tokens.append(self._end)
        mask = [False] * len(prompt_tokens) + [True] * len(answer_tokens)
        return Example(tuple(prompt_tokens + answer_tokens), tuple(mask), len(prompt_tokens))

    def _own_tokens(self, transcript: Transcript, template: "ChatTemplate | None") -> tuple[Example, ...]:
        """Return one sequence per answer, with exactly the tokens that the target wrote.

        Tokenizing the text of the answer again may lead to other tokens, and an answer that was cut off has no end
        token to train on.
        """
        messages, where, written = transcript.messages, transcript.where, transcript.answer_tokens
        indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        rendered = iter(given if isinstance(given := transcript.prompt_tokens, list) else ())
        examples = []
        for index, tokens in zip(indices, written if isinstance(written, list) else (), strict=False):
            if not self._reads(tokens, messages[index], transcript.cut_off and index == indices[-1]):
                break
            prompt = next(rendered, None) or self.prompt(messages[:index], where, template)
            if not self._knows(prompt):
                break
            if tokens and not (transcript.cut_off and index == indices[-1]):
                tokens = self._with_end(tokens, messages[: index + 1], template)
            trained = (False,) * len(prompt) + (True,) * len(tokens)
            examples.append(Example((*prompt, *tokens), trained, len(prompt)))
        if not isinstance(written, list) or not len(examples) == len(indices) == len(written):
            raise UserError(
                f"{where}: with this tokenizer the field {ANSWER_TOKENS} does not spell each answer",
                "regenerate the answers with this target, or remove the field",
            )
        return tuple(example for example, index in zip(examples, indices, strict=True) if is_trained(messages[index]))

    def _with_end(self, tokens: list[int], messages: Messages, template: "ChatTemplate | None") -> list[int]:
        """Return an answer's tokens. The end token, which some servers leave out, is added if answers end with it."""
        end, last = self._end, self._tokenizer.added_tokens_decoder.get(tokens[-1])
        if end is None or tokens[-1] in self._ends or (last is not None and last.special):
            return tokens
        return tokens if template and not template.ends_in(messages, end) else [*tokens, end]

    def _knows(self, tokens: Any) -> bool:
        """Return True for token ids of this tokenizer."""
        integers = isinstance(tokens, list | tuple) and all(type(token) is int for token in tokens)
        return integers and self._vocabulary.issuperset(tokens)

    def _reads(self, tokens: Any, answer: dict[str, Any], truncated: bool) -> bool:
        """Return True if ``tokens`` are token ids that spell the answer; if there is reasoning, they may spell more."""
        if not isinstance(tokens, list) or not self._knows(tokens) or (not tokens and is_trained(answer)):
            return False
        text, content = read_answer(self._tokenizer, tokens, truncated).strip(), answer["content"].strip()
        return content in text if UNSPOKEN & answer.keys() else content == text

    def prompt(self, messages: Messages, where: str, template: "ChatTemplate | None") -> tuple[int, ...]:
        """Return the tokens that prompt for an answer to ``messages``; ``where`` names the row in errors."""
        if template is None:
            return encode_prompt(list(messages), self._tokenizer, chat=False)
        return template.prompt(messages, where)

    def encode_opening(self, row: Row, section: DataSection) -> tuple[Example, tuple[str, ...]]:
        """Return a prompt without answers, in which nothing is trained, and `Prompt.unread`; see `opening_of`."""
        messages, tools, unread = opening_of(row, section)
        tokens = self.prompt(messages, row.where, self._template and self._template.with_tools(tools))
        return Example(tokens, [False] * len(tokens), len(tokens)), unread


def read_answer(tokenizer: PreTrainedTokenizerBase, tokens: list[int], truncated: bool) -> str:
    """Return the text of an answer's tokens; regeneration stores this text and training compares it."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return whole_characters(str(text), truncated)


def whole_characters(answer: str, truncated: bool) -> str:
    """Return the answer without the incomplete character with which a truncated answer may end."""
    return answer.rstrip("\N{REPLACEMENT CHARACTER}") if truncated else answer


class ChatTemplate:
    """A tokenizer's chat template that separates the assistant's tokens from the other tokens.

    A template with ``{% generation %}`` marks says which tokens belong to the assistant. Without marks, the prompt for
    an answer is compared with the conversation that includes the answer; the difference is the answer. Some templates
    write a turn differently when later turns follow (Qwen3's template omits the thinking). With such a template each
    answer has a separate sequence: the text that the target saw when it wrote the answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Use ``template``; None means the tokenizer's template (if there are several, the one for ``tools``).

        Every conversation has these ``tools``. ``variables`` are as in `decoding.prompts.with_variables`.
        """
        self._tokenizer, self._given, self._tools, self._variables = tokenizer, template, tools, variables or {}
        self._template = with_variables(tokenizer.get_chat_template(template, tools), self._variables)
        self._has_marks = has_marks(self._template)
        if not tokenizer.is_fast:
            raise UserError(
                "finding the assistant's tokens needs a tokenizer that maps tokens to characters: use a target with "
                "a tokenizer.json"
            )
        added: Any = tokenizer.added_tokens_decoder
        self._specials = tuple(token.content for token in added.values() if token.special)
        self._marker = TokenMarker(tokenizer)

    @property
    def mask_source(self) -> str:
        """How the assistant's tokens are found, in words."""
        return MARKED if self._has_marks else COMPARED

    def with_tools(self, tools: Tools | None) -> "ChatTemplate":
        """Return the template for conversations in which the assistant may call ``tools``."""
        return self if tools == self._tools else ChatTemplate(self._tokenizer, self._given, tools, self._variables)

    def ignored(self, messages: Messages) -> tuple[str, ...]:
        """Return the names of what does not change a conversation's text: message fields, roles and "tools"."""
        without = {name: (self, others) for name, others in _extras(messages).items()}
        for role in sorted({message["role"] for message in messages} - {"user", "assistant"}):
            longer = [{**m, "content": m["content"] + _GOES_ON * (m["role"] == role)} for m in messages]
            without[f"{role} messages"] = self, longer
        if self._tools:
            without["tools"] = (self.with_tools(None), [*messages])
        return tuple(name for name, (template, others) in without.items() if self._is_same(messages, template, others))

    def _is_same(self, messages: Messages, template: "ChatTemplate", others: Messages) -> bool:
        with suppress(TemplateError, TypeError):  # raised if the template needs the removed field
            return self._render(messages) == template._render(others)
        return False

    def prompt(self, messages: Messages, where: str) -> tuple[int, ...]:
        """Return the tokens that prompt for an answer to ``messages``; ``where`` names the row in errors."""
        try:
            text = self._asking(messages, where)
        except (TemplateError, TypeError) as error:
            raise UserError(f"{where}: the chat template rejects this conversation: {error}") from error
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def ends_in(self, messages: Messages, end: int) -> bool:
        """Return True if the template writes the token ``end`` after the last answer, or rejects the messages."""
        with suppress(TemplateError, TypeError):  # the tokens of prompts and answers are known without the template
            return self._render(messages).rstrip().endswith(str(self._tokenizer.convert_ids_to_tokens(end)))
        return True

    def encode(self, messages: Messages, where: str, cut_off: bool = False) -> list[Marked]:
        """Return one sequence, or one sequence per answer; ``where`` names the row in errors.

        With ``cut_off``, the end that the template adds after the last answer is not marked as trained, because the
        target did not write it.
        """
        if not any(message["role"] == "assistant" for message in messages):
            raise UserError(f"{where}: the conversation lacks an assistant's answer to train on")
        try:
            encoded = self._by_marks(messages, where) if self._has_marks else self._by_comparison(messages, where)
            if cut_off and is_trained(messages[-1]):
                encoded[-1] = self._without_end(messages, encoded[-1])
        except (TemplateError, TypeError) as error:  # TypeError: the template adds a text to a value that is not text
            raise UserError(f"{where}: the chat template rejects this conversation: {error}") from error
        for sequence in encoded:
            self._check(sequence.trained, where)
        return encoded

    def _by_marks(self, messages: Messages, where: str) -> list[Marked]:
        """Return one sequence, or one per answer if the template rewrites answers when other answers follow."""
        whole = self._marked(messages, where)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(answers) == 1:
            return [whole]
        marked = [self._marked(messages[: index + 1], where) for index in answers]
        kept = [is_trained(messages[index]) for index in answers]
        if all(whole.tokens[: sequence.end] == sequence.tokens[: sequence.end] for sequence in marked):
            ends, wanted = [sequence.end for sequence in marked], [*kept, True]
            marks = (mark and wanted[bisect_right(ends, index)] for index, mark in enumerate(whole.trained))
            return [whole._replace(trained=tuple(marks))]
        for number, index in enumerate(answers):
            before = self._marked(messages[:index], where) if index else Marked((), ())
            tokens, trained = marked[number]
            if tokens[: before.end] != before.tokens[: before.end]:
                raise UserError(
                    f"{where}: the chat template rewrites an answer when a later answer follows, so no sequence is "
                    "equal to what the target saw: use conversations of one answer, or another data.chat_template"
                )
            marked[number] = Marked(tokens, (False,) * before.end + trained[before.end :])
        return [sequence for sequence, wanted in zip(marked, kept, strict=True) if wanted]

    def _marked(self, messages: Messages, where: str) -> Marked:
        text, spans = read_spans(self._render(messages, template=with_spans(self._template)))
        if text != self._render(messages):
            raise UserError(f"{where}: the generation marks of the chat template change its text", ADVICE)
        return self._marker.mark(text, spans, where)

    def _without_end(self, messages: Messages, marked: Marked) -> Marked:
        """Unmark the end that the template adds after the last answer.

        To find where this end begins, make the answer (or reasoning without content) longer: the end begins at the
        first character that changes.
        """
        *before, last = messages
        text = self._render(messages)
        growing = ("content",) if last["content"] or REASONING[0] not in last else REASONING
        longer = self._render([*before, {**last, **{field: last[field] + _GOES_ON for field in growing}}])
        end = next((index for index, here in enumerate(text) if not longer.startswith(here, index)), len(text))
        pairs = zip(marked.trained, self._marker.spell(text)[1], strict=True)
        return marked._replace(trained=tuple(mark and behind <= end for mark, (_, behind) in pairs))

    def _by_comparison(self, messages: Messages, where: str) -> list[Marked]:
        texts, spans = [], []
        for index, message in enumerate(messages):
            if not is_trained(message):
                continue
            asked = self._asking(messages[:index], where)
            answered = self._render(messages[: index + 1])
            if not answered.startswith(asked):
                raise UserError(
                    f"{where}: the chat template renders the text before an answer differently once the answer is "
                    "added, so its tokens cannot be found: set data.chat_template to a template with marks; in it, "
                    f"{ADVICE}"
                )
            texts.append(answered)
            spans.append((len(asked), self._end_of_answer(answered)))
        whole = self._render(messages)
        if all(whole.startswith(text) for text in texts):
            return [self._marker.mark(whole, spans)]
        return [self._marker.mark(text, [span]) for text, span in zip(texts, spans, strict=True)]

    def _asking(self, messages: Messages, where: str) -> str:
        if not messages:
            raise UserError(f"{where}: the conversation begins with the assistant; begin it with a user message")
        return self._render(messages, add_generation_prompt=True)

    def _render(self, messages: Messages, add_generation_prompt: bool = False, template: str | None = None) -> str:
        text: Any = self._tokenizer.apply_chat_template(
            list(messages),
            tools=self._tools,
            chat_template=template or self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return str(text)

    def _end_of_answer(self, text: str) -> int:
        """Return the index after the end-of-turn token. A line break that follows is not from the target."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self._specials) else len(text)

    def _check(self, trained: Sequence[bool], where: str) -> None:
        if any(trained) and not all(trained):
            return
        amount, wrong = ("all", "training would include the prompt") if any(trained) else ("none", "nothing is trained")
        raise UserError(
            f"{where}: the chat template marks {amount} of {len(trained)} tokens as the assistant's text, so {wrong}: "
            f"{shorten(self._template, 160, placeholder=' ...')}",
            ADVICE,
        )


def _extras(messages: Messages) -> dict[str, list[Message]]:
    """Map each field that a template should read to a copy of the messages without this field.

    All names of the reasoning field count as one.
    """
    fields = sorted({name for message in messages for name in message} - _ALWAYS)
    names = {name: REASONING if name in REASONING else (name,) for name in fields if not is_metadata(name)}
    return {
        name: [{field: held for field, held in message.items() if field not in dropped} for message in messages]
        for name, dropped in names.items()
    }


def chat_template(tokenizer: PreTrainedTokenizerBase, section: DataSection) -> ChatTemplate | None:
    """Return the template from a Jinja file, or the tokenizer's own, or None if there is neither."""
    file, variables, given = section.chat_template, section.chat_template_kwargs, None
    if file is not None:
        if not Path(file).is_file():
            raise UserError(f"chat template {file} does not exist: set data.chat_template to a Jinja file")
        given = Path(file).read_text(encoding="utf-8")
    elif tokenizer.chat_template is None:
        with_variables("", variables)  # raises an error, because without a template no variable can be set
        return None
    return ChatTemplate(tokenizer, given, variables=variables)
