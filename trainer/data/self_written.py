"""Prompts that the target writes itself: it continues a text that ends where the chat template opens a user's turn.

Magpie (2406.08464) makes data from chat models in this way. A draw is removed and counted if it has no end, contains
control tokens, is too short, only repeats one phrase, or repeats an earlier draw.
"""

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.generate import DecodingConfig
from decoding.jsonl import read_rows
from decoding.rules.sampling import SamplingConfig
from trainer.data.answers import AnsweredConversation, AnswerFile, Backend, FailedConversation, Outcome
from trainer.data.conversations import AnswerKey, Message, OpenConversation, read_conversations

WRITING = SamplingConfig(temperature=1.0, top_p=0.95)
LONGEST = 128
"""Longest prompt in tokens, including its end token."""
_SHORTEST = 4
_FIRST_DRAWS, _DRAWS_PER_PROMPT = 256, 10
"""After the first number of draws, the run stops if a usable prompt takes, on average, more draws than the second
number.
"""
_MARK = "\ue000"  # a private-use character that no template contains
_NAME = "self:"


class SelfWritten(NamedTuple):
    """A request for ``number`` prompts, in conversations with ``turns`` turns of the user. Prompts in the file
    ``without`` are not used.
    """

    number: int
    turns: int
    without: str | None


def read_request(prompts: str, limit: int | None = None) -> SelfWritten | None:
    """Read ``self:COUNT[,turns=N][,except=FILE]``; None for other prompts. Raises UserError for malformed options.

    ``limit`` is the largest number of prompts to ask for.
    """
    if not prompts.startswith(_NAME):
        return None
    number, *given = prompts.removeprefix(_NAME).split(",")
    options = dict(option.partition("=")[::2] for option in given)
    turns = options.pop("turns", "1")
    without = options.pop("except", None)
    if options or without == "" or not all(count.isdecimal() and int(count) for count in (number, turns)):
        raise UserError(f"{prompts} is malformed: write self:COUNT[,turns=N][,except=FILE], such as self:2000")
    return SelfWritten(min(int(number), limit or int(number)), int(turns), without)


class UserTurn:
    """The tokens that open a user's turn in a tokenizer's chat template, and the token that ends it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise UserError for a tokenizer without a chat template, or if the opening or the end of a turn cannot be
        found.
        """
        if tokenizer.chat_template is None:
            raise UserError("the target has no chat template, so it cannot write prompts: use a file of texts")
        self._tokenizer = tokenizer
        added: Any = tokenizer.added_tokens_decoder
        specials = {token.content: index for index, token in added.items() if token.special}
        self._specials = frozenset(specials.values())
        opening, message, closing = self._around(())
        end = next((index for text, index in specials.items() if closing.lstrip().startswith(text)), None)
        if not opening or not message or end is None:
            what = repr(closing.strip()[:20]) if opening and message else "nothing"
            raise UserError(
                "the chat template does not show where a user's turn begins and ends: a special token must follow the "
                f"message, not {what}",
                "use a file of prompts",
            )
        self.opening, self._end = opening, end

    def after(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens before the next message of the user."""
        text = self._around(messages)[0].rstrip(" ")  # the space belongs to the token of the first word
        tokens: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(tokens)

    def _around(self, messages: Sequence[Message]) -> tuple[str, str, str]:
        whole = [*messages, {"role": "user", "content": _MARK}]
        try:
            text: Any = self._tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise UserError(f"the chat template rejects a user's turn: {error}") from error
        before, message, behind = str(text).partition(_MARK)
        return before, message, behind

    def config(self, config: DecodingConfig, context: int | None) -> DecodingConfig:
        """Return the settings with which prompts are decoded. ``context`` is the context length of the target. The seed
        of draw i is i plus a hash of the run's seed. So prompts and answers have different seeds, and runs with
        different seeds have no draws in common.
        """
        drawn = int.from_bytes(sha256(f"self-written {config.seed}".encode()).digest()[:7], "big")
        most = min(LONGEST, (context or 2 * LONGEST) // 2)
        ends = tuple(dict.fromkeys((*config.eos_token_ids, self._end)))
        return replace(config, max_new_tokens=most, sampling=WRITING, eos_token_ids=ends, seed=drawn)

    def fault(self, text: str, tokens: Sequence[int] | None, truncated: bool) -> str | None:
        """Return why a turn cannot be used, or None; ``tokens`` are the turn's tokens including its end, if they are
        known.
        """
        if truncated:
            return "without an end"
        spelled: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._specials & {*(tokens or ())[:-1], *spelled}:
            return "with control tokens"
        words = _words(text)
        if len(spelled) < _SHORTEST or not words:
            return "too short"
        if any(words.startswith(words[period:]) for period in range(1, (len(words) + 1) // 2 + 1)):
            return "repeating one phrase"
        return None


def _words(text: str) -> str:
    """Return the words of a text without case and punctuation. Prompts are compared by these words."""
    return " ".join(re.findall(r"\w+", text.casefold()))


class PromptDraws:
    """A `Backend` whose answers are the prompts that a target draws. It also collects the usable prompts among the
    draws.

    Conversations are drawn in groups until enough prompts are usable. The number of groups depends only on the draws of
    finished groups, so a run that was killed and started again ends with the same prompts.
    """

    encoder = None

    def __init__(self, wanted: SelfWritten, turn: UserTurn, backend: Backend, group: int) -> None:
        """``backend`` decodes ``group`` conversations at a time, with the settings of `UserTurn.config`."""
        self._wanted, self._turn, self._backend, self._group = wanted, turn, backend, group
        self._texts, self._faults = dict[int, str](), dict[int, str]()
        """The text of each draw, or why the draw cannot be used, by the number of the draw (from 1)."""
        self._first: dict[str, int] = {}
        """Maps the words of a prompt to the number of the first draw with these words."""
        others = () if wanted.without is None else read_conversations(wanted.without, None, None, 1, chat=True)
        self.others = frozenset(_words(str(other.turns[0][-1]["content"])) for other in others)

    def resume(self, answers: AnswerFile) -> None:
        """Read the draws of an earlier run."""
        for path in (answers.path, answers.set_aside_path):
            for _, row in read_rows(path) if path.exists() and path.stat().st_size else ():
                self._note(row["row"], row.get("answer", ""), row.get("reason"))

    def _note(self, draw: int, text: str, fault: str | None) -> None:
        words = _words(text)
        if fault is None and words in self.others:
            fault = f"in {Path(str(self._wanted.without)).name}"
        if fault is not None:
            self._faults[draw] = fault
            return
        self._texts[draw] = text.strip()
        self._first[words] = min(draw, self._first.get(words, draw))

    def conversations(self) -> Iterator[OpenConversation]:
        """Yield draws until enough prompts are usable; raise UserError if most draws are not usable."""
        text, tokens = self._turn.opening, self._turn.after(())
        opened: Message = {"role": "user", "content": text}
        for index in count():
            if index % self._group == 0:
                usable = sum(draw <= index for draw in self._first.values())
                if usable >= self._wanted.number:
                    return
                if index >= max(_FIRST_DRAWS, _DRAWS_PER_PROMPT * usable):
                    raise UserError(f"the target rarely writes a usable prompt ({self.told()}): use a file of prompts")
            yield OpenConversation(AnswerKey(index + 1, 0), index, ((opened,),), chat=False, spelled=tokens)

    def outcomes(
        self, conversations: Iterable[OpenConversation], done: Container[AnswerKey], on_tokens: Callable[[int], None]
    ) -> Iterator[list[Outcome]]:
        """Yield the draws; a draw that cannot be used counts as failed."""
        for outcomes in self._backend.outcomes(conversations, done, on_tokens):
            yield [self._judged(outcome) for outcome in outcomes]

    def _judged(self, outcome: Outcome) -> Outcome:
        draw = outcome.conversation.key.row
        if isinstance(outcome, AnsweredConversation):
            text, tokens = outcome.answers[0]["content"], (outcome.answer_tokens or (None,))[0]
            if (fault := self._turn.fault(text.strip(), tokens, outcome.truncated)) is None:
                self._note(draw, text, None)
                return outcome
            outcome = FailedConversation(outcome.conversation, "failed", fault)
        self._note(draw, "", "not answered" if outcome.again else outcome.reason)
        return outcome

    @property
    def prompts(self) -> list[str]:
        """The usable prompts in the order of their draws."""
        return [self._texts[draw] for draw in sorted(self._first.values())][: self._wanted.number]

    def counts(self) -> dict[str, Any]:
        """Return the numbers of draws, of prompts, and of draws removed for each reason."""
        removed = Counter(self._faults.values()) + Counter(repeated=len(self._texts) - len(self._first))
        spare = len(self._first) - len(self.prompts)
        draws = len(self._texts) + len(self._faults)
        return {"draws": draws, "prompts": len(self.prompts), "removed": dict(sorted(removed.items())), "spare": spare}

    def told(self) -> str:
        """Return the counts in words."""
        counts = self.counts()
        removed = [f"{number:,} {reason}" for reason, number in counts["removed"].items()]
        parts = [f"{counts['draws']:,} draws", f"{counts['prompts']:,} prompts", *removed]
        return ", ".join([*parts, f"{counts['spare']:,} to spare"] if counts["spare"] else parts)
