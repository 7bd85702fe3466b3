"""The commands `headstart generate`, which streams one text, and `headstart chat`, which runs one conversation."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decoding.conversation import Conversation
from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.model.loading import eos_token_ids
from decoding.policies import default_policy, named_policy
from decoding.prompts import encode_prompt
from decoding.rules.sampling import SamplingConfig
from decoding.speculation import named_rule
from decoding.text import Step, Tally
from trainer.commands.models import load_models, read_specs, read_tokenizer
from trainer.commands.options import ChatOptions, DecodingOptions, GenerateOptions
from trainer.commands.plan import asked_or_planned
from trainer.terminal.console import say, say_error, standard_error, standard_output, waiting
from trainer.terminal.streaming import CtrlC, legend, show_steps, shows_styles, summary


def run_generate(options: GenerateOptions, console: Console | None = None) -> bool:
    """Stream the text to the console, and print its figures on standard error. Return False if Ctrl-C stopped the text
    early.
    """
    console = console or standard_output()
    decoder = read_decoder(options)
    prompt = encode_prompt(options.prompt, decoder.tokenizer, chat=True)
    steps = decoder.engine.steps(prompt, decoder.config)
    decoder.show_legend(console)
    tally = Tally()
    with CtrlC() as ctrl_c:
        decoder.show(ctrl_c.until_asked(steps), console, tally)
    say(standard_error(), summary(tally, decoder.label), style="dim")
    return not ctrl_c.asked


@dataclass(frozen=True)
class Decoder:
    """A target, its drafter (called ``name``), and the settings with which both decode texts."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    config: DecodingConfig
    name: str

    @property
    def label(self) -> str:
        """The drafter's name, and a label that says whether the rule is lossless or lossy."""
        return f"{self.name} ({self.config.label})"

    def show_legend(self, console: Console) -> None:
        """Print what the text styles mean, if the console has styles and there is a drafter."""
        if self.engine.drafter is not None and shows_styles(console):
            say(console, legend())

    def show(self, steps: Iterable[Step], console: Console, tally: Tally) -> None:
        """Show the text of each step immediately, and count the steps in the tally."""
        coloured = self.engine.drafter is not None
        show_steps(console, tally.watch(steps), self.tokenizer, self.config.eos_token_ids, coloured)


def read_decoder(options: DecodingOptions) -> Decoder:
    """Load the target, and the drafter that the options or the plan name."""
    given = [] if options.drafter is None else [options.drafter]
    drafters = asked_or_planned(given, options.plan, options, (options.temperature,), (1,), standard_error())
    config = DecodingConfig(
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingConfig(options.temperature),
        rule=named_rule(options.rule) if options.rule else None,
        stop_strings=tuple(options.stop or ()),
        seed=options.seed or 0,
    )
    with waiting(f"loading {options.target}"):
        models = load_models(options, read_specs(drafters), read_tokenizer(options.target, options))
    config = replace(config, eos_token_ids=eos_token_ids(models.target.model, models.tokenizer))
    name, loaded = next(iter(models.drafters.items()), ("plain decoding", None))
    policy = named_policy(default_policy(options.seed))
    engine = Engine(models.target, loaded, policy, models.tokenizer)
    return Decoder(engine, models.tokenizer, config, name)


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
        """Check the system message, the rule and the drafter before the first question: encode a greeting, and do not
        answer it.
        """
        prompt = self.conversation.encode("Hello")
        self.decoder.engine.steps(prompt, replace(self.decoder.config, max_new_tokens=1))
        if self.decoder.tokenizer.chat_template is None:
            say(self.notes, "note: the target has no chat template, so it continues the messages, joined by newlines")

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
        """Return a typed line.

        If output is redirected, only the answers go there, and the input prompt goes to the notes.
        """
        if sys.stdout.isatty():
            return input("> ")
        self.notes.print("> ", end="")
        return input("")

    def answer_lines(self, lines: Iterable[str]) -> bool:
        """Answer each line that is not blank, with empty lines between answers; return False if Ctrl-C stopped an
        answer.
        """
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
        """Run a command; raise UserError if it is unknown."""
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
                f"unknown command {command.split()[0]}: /help lists the commands; a question must not begin with /"
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
    """Yield the steps unchanged, and append their tokens to ``tokens``."""
    for step in steps:
        tokens += step.tokens
        yield step
