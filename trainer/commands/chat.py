"""The command `headstart chat`: answer questions from a terminal or a pipe in one conversation."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rich.console import Console

from decoding.conversation import Conversation
from decoding.errors import UserError
from decoding.stream import Tally
from decoding.text import Step
from trainer.commands.generate import Decoder, read_decoder
from trainer.commands.options import ChatOptions
from trainer.terminal.console import say, say_error, standard_error, standard_output
from trainer.terminal.streaming import CtrlC, summary

COMMANDS = """\
/undo   take back the last question and its answer
/reset  start a new conversation; the system message stays
/help   show this list
/exit   leave, as Ctrl-D does
Ctrl-C stops an answer and keeps its text so far. Start a line with a space to ask a question that begins with /."""


def run_chat(options: ChatOptions) -> bool:
    """Answer questions until input ends; return False if Ctrl-C stopped the answer to a piped question."""
    decoder = read_decoder(options)
    conversation = Conversation(decoder.engine, decoder.tokenizer, decoder.config, options.system)
    chat = Chat(decoder, conversation, standard_output())
    chat.begin()
    if not sys.stdin.isatty():
        return chat.answer_lines(sys.stdin)
    say(chat.notes, f"{options.target}, {decoder.label}; /help lists the commands, Ctrl-D leaves")
    decoder.show_legend(chat.console)
    chat.talk()
    return True


@dataclass
class Chat:
    """A conversation on a console. Everything except answers goes to ``notes``.

    ``stopped``: True if Ctrl-C stopped the last answer. ``left``: True after /exit.
    """

    decoder: Decoder
    conversation: Conversation
    console: Console
    notes: Console = field(default_factory=standard_error)
    stopped: bool = False
    left: bool = False

    def begin(self) -> None:
        """Check system message, rule and drafter before the first question with a greeting that gets no answer."""
        prompt = self.conversation.encode("Hello")
        self.decoder.engine.steps(prompt, replace(self.decoder.config, max_new_tokens=1))
        if self.decoder.tokenizer.chat_template is None:
            say(self.notes, "note: the target lacks a chat template, so it continues the messages joined by newlines")

    def talk(self) -> None:
        """Answer typed lines until Ctrl-D or /exit; Ctrl-C at the prompt clears the line."""
        with suppress(ImportError):  # missing on Windows
            import readline  # noqa: F401  # gives `input` line editing and a history
        while not self.left:
            try:
                self._take(self._typed())
            except KeyboardInterrupt:
                say(self.notes, "", "Ctrl-D leaves")
            except EOFError:
                say(self.notes, "")
                return
            except UserError as error:
                say_error(self.notes, str(error))

    def _typed(self) -> str:
        """Return a typed line. Redirected output gets only the answers; the prompt then goes to the notes."""
        if sys.stdout.isatty():
            return input("> ")
        self.notes.print("> ", end="")
        return input("")

    def answer_lines(self, lines: Iterable[str]) -> bool:
        """Answer each line that is not blank, with an empty line between; return False if Ctrl-C stopped an answer."""
        answered = False
        for line in lines:
            is_question = bool(line.strip()) and not line.startswith("/")
            if is_question and answered:
                say(self.console, "")
            answered = answered or is_question
            self._take(line.rstrip("\r\n"))
            if self.left or self.stopped:
                break
        return not self.stopped

    def _take(self, line: str) -> None:
        """Run a command, or answer a question that is not blank."""
        if line.startswith("/"):
            self._obey(line.strip())
        elif line.strip():
            self._answer(line)

    def _obey(self, command: str) -> None:
        """Run a command; UserError if it is unknown."""
        if command == "/help":
            say(self.notes, *COMMANDS.splitlines())
        elif command == "/reset":
            self.conversation.reset()
            say(self.notes, "a new conversation begins")
        elif command == "/undo":
            question = self.conversation.undo()
            say(self.notes, "nothing to take back" if question is None else f"taken back: {question}")
        elif command == "/exit":
            self.left = True
        else:
            raise UserError(
                f"unknown command {command.split()[0]}: /help lists all; a space in front makes it a question"
            )

    def _answer(self, question: str) -> None:
        """Show the answer and its figures."""
        steps = self.conversation.ask(question)
        tally, tokens = Tally(), list[int]()
        with CtrlC() as ctrl_c:
            self.decoder.show(_noted(ctrl_c.until_asked(steps), tokens), self.console, tally)
        self.stopped = ctrl_c.asked
        told = summary(tally, self.decoder.label)
        if not tokens:
            told = "stopped before the first token; the question is dropped"
        elif self.stopped:
            told += "; stopped"
        elif len(tokens) == self.conversation.answer_limit and tokens[-1] not in self.decoder.config.eos_token_ids:
            told += f"; cut off at {len(tokens)} tokens"
        say(self.notes, told, style="dim")


def _noted(steps: Iterable[Step], tokens: list[int]) -> Iterator[Step]:
    """Yield the steps and append their tokens to ``tokens``."""
    for step in steps:
        tokens += step.tokens
        yield step
