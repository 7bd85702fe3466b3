"""End of a text: an EOS token or a stop string."""

from typing import Any, Protocol


class TextDecoder(Protocol):
    """Part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int]) -> Any: ...


class StopCheck:
    """Finder of the end of a text inside a block of new tokens."""

    def __init__(
        self, eos_token_ids: tuple[int, ...], stop_strings: tuple[str, ...], tokenizer: TextDecoder | None
    ) -> None:
        if stop_strings and tokenizer is None:
            raise ValueError("stop strings need the tokenizer: pass it along")
        self._eos = frozenset(eos_token_ids)
        self._strings = stop_strings
        self._tokenizer = tokenizer
        # A character takes at most four byte tokens; four more, as the first character may be incomplete.
        self.reach = 4 * max(map(len, stop_strings)) + 4 if stop_strings else 0
        """Number of tokens, up to the one that ends the text, that the decision reads."""

    def cut(self, text: list[int], tokens: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Return ``tokens`` up to and including the one that ends the text, and True if one does.

        ``text``: the new tokens before them, the last `reach` at least, without the prompt; no text ends in them.
        """
        read = text[max(0, len(text) - self.reach) :]
        for index, token in enumerate(tokens):
            read.append(token)
            if token in self._eos or (self._strings and self._holds_stop_string(read)):
                return tokens[: index + 1], True
        return tokens, False

    def _holds_stop_string(self, text: list[int]) -> bool:
        assert self._tokenizer is not None
        tail = self._tokenizer.decode(text[-self.reach :])
        return any(string in tail for string in self._strings)
