"""An answer of a decoder on a console, as `headstart generate` and `headstart chat` show it."""

from collections.abc import Iterable

from rich.console import Console

from decoding.generate import Step
from decoding.tally import Tally
from trainer.commands.decode import Decoder
from trainer.terminal.console import say
from trainer.terminal.figures import PlainSpeed, live_line
from trainer.terminal.streaming import has_colours, is_live, legend, show_steps


def show_legend(decoder: Decoder, console: Console) -> None:
    """Say which style means which origin, where there are styles and a drafter."""
    if decoder.drafts and is_live(console) and has_colours(console):
        say(console, legend())


def show_answer(
    decoder: Decoder, steps: Iterable[Step], console: Console, tally: Tally, plain: PlainSpeed | None
) -> None:
    """Show the text of steps as soon as they are done, above a live line of figures; count them in the tally."""
    hidden, status = decoder.config.eos_token_ids, lambda: live_line(tally, plain)
    show_steps(console, tally.watch(steps), decoder.tokenizer, hidden, status, coloured=decoder.drafts)
