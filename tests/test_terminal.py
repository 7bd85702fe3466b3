"""Texts on consoles: coloured on a terminal and plain elsewhere, without escape characters from models; Ctrl-C ends a
text.
"""

import io
import os
import re
import signal
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from test_stream import Utf8

from decoding.text import Step, Tally
from trainer.terminal.console import say, say_error, standard_output
from trainer.terminal.streaming import CtrlC, show_steps, shows_styles, summary

SHOWN = "a\x1b[2J\x07\x7f\x9b1m می\u200cخواهم\u202e\u2066\u200f 👨\u200d👩\u200d👧"
SGR = re.compile(r"\x1b\[[0-9;]*m")


class Screen(io.StringIO):
    """A file that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def console_on(file: io.StringIO, **options: object) -> Console:
    given = {"file": file, "width": 30, "height": 10, "color_system": "standard", **options}
    return standard_output(**given)


@pytest.fixture(autouse=True)
def a_terminal_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def step(tokens: bytes, accepted: int = 0, seconds: float = 1.0, is_prefill: bool = False) -> Step:
    return Step(tuple(tokens), accepted, accepted, accepted, 0.0, 0.0, seconds, is_prefill=is_prefill)


STEPS = [step(b"a", is_prefill=True), step(b"bcd", 2), step(b"e\nf", 2), step(b"\x1b[31mg", 0)]


# --- control characters -----------------------------------------------------------------------------------------------


def test_no_text_that_a_console_prints_has_a_control_character_and_all_else_stays() -> None:
    screen = Screen()
    console = console_on(screen, width=80, color_system=None)
    table = Table("name")
    table.add_row(Text(f"in a table {SHOWN}"))
    console.print(table)
    say(console, f"in a line {SHOWN}", Text(f"styled {SHOWN}", style="green"))
    assert not set("\x1b\x07\x7f\x9b\u202e\u2066\u200f") & set(screen.getvalue())
    assert screen.getvalue().count("a[2J1m می\u200cخواهم 👨\u200d👩\u200d👧") == 3


# --- a growing text ---------------------------------------------------------------------------------------------------


PLAIN = "abcde\nf[31mg\n"


def test_on_a_terminal_tokens_are_coloured_by_origin_and_send_no_escape_of_their_own() -> None:
    screen = Screen()
    show_steps(console_on(screen), STEPS, Utf8())
    runs = ((1, "a"), (32, "b"), (32, "c"), (1, "d"), (32, "e"))
    begin = "".join(f"\x1b[{style}m{letters}\x1b[0m" for style, letters in runs)
    assert screen.getvalue().startswith(begin), "target, draft, target, draft"
    assert SGR.sub("", screen.getvalue()) == PLAIN


@pytest.mark.parametrize("without", ["a drafter", "colours", "a clever terminal", "a terminal"])
def test_without_styles_the_visible_text_alone_is_written(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"colours": {"NO_COLOR": "1"}, "a clever terminal": {"TERM": "dumb"}, "a terminal": {"FORCE_COLOR": "1"}}
    for name, value in changes.get(without, {}).items():
        monkeypatch.setenv(name, value)
    file = io.StringIO() if without == "a terminal" else Screen()
    console = standard_output(file=file, width=30)
    show_steps(console, STEPS, Utf8(), coloured=without != "a drafter")
    assert file.getvalue() == PLAIN and shows_styles(console) == (without == "a drafter")


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_figures_name_tokens_per_pass_and_speed_and_there_are_none_before_the_first_pass() -> None:
    prefill = step(b"a", is_prefill=True)
    tally = Tally.of([prefill, step(b"bcd", 2, 0.5), step(b"efgh", 3, 0.5)])
    told = "draft (lossless): 3.50 tokens per target pass (5 of 7 tokens drafted), 7 tokens/s"
    assert summary(tally, "draft (lossless)") == told
    assert summary(Tally.of([prefill]), "lookup") == "lookup: no token after the prefill"


# --- Ctrl-C and waiting -----------------------------------------------------------------------------------------------


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_ends_the_items_behind_the_running_one_and_closes_their_generator() -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            for item in range(9):
                if item == 2:
                    press()
                yield item
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGINT)
    with CtrlC() as ctrl_c:
        assert list(ctrl_c.until_asked(items())) == [0, 1, 2] and closed == [True]
        assert list(ctrl_c.until_asked(items())) == [], "nothing begins behind it"
    assert ctrl_c.asked and signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_block_at_once_and_one_outside_of_it_is_what_it_was() -> None:
    reached = []
    with CtrlC() as ctrl_c:
        press()
        reached.append(1)
        press()
        reached.append(2)
    assert ctrl_c.asked and reached == [1]
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """A shell starts background jobs of a script (``&``) in this way,
    because Ctrl-C is meant for the foreground job.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with CtrlC() as ctrl_c:
            press()
        assert not ctrl_c.asked and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# --- what a user wrote is printed as it is; other libraries say nothing of their own ----------------------------------


BRACKETS = "a[/x] :smile: [red]b"


def test_a_console_prints_brackets_and_colons_as_they_are() -> None:
    heard = io.StringIO()
    console = standard_output(file=heard, width=200, force_terminal=True, no_color=True)
    table = Table(BRACKETS, title=BRACKETS)
    table.add_row(BRACKETS)
    console.print(BRACKETS)
    console.print(table)
    assert heard.getvalue().count(BRACKETS) == 4


def test_an_error_keeps_the_brackets_of_what_it_names_behind_a_red_word() -> None:
    heard = io.StringIO()
    say_error(Console(file=heard, width=20, force_terminal=True, color_system="standard"), f"{BRACKETS} is wrong")
    assert heard.getvalue() == f"\x1b[1;31merror:\x1b[0m {BRACKETS} is wrong\n"
