"""Messages of long commands during their work."""

import io

from rich.console import Console

from trainer.terminal.console import ProgressBar


class Clock:
    """A clock that advances when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(heard: io.StringIO) -> list[str]:
    return heard.getvalue().splitlines()


def bar(heard: io.StringIO, clock: Clock, total: int | None, completed: int = 0, active: bool = True) -> ProgressBar:
    console = Console(file=heard, width=40)
    return ProgressBar(console, "answering [/b]", total, completed, active=active, clock=clock)


def test_without_a_terminal_a_line_comes_every_15_seconds_and_not_sooner() -> None:
    heard, clock = io.StringIO(), Clock()
    with bar(heard, clock, 1792, completed=72) as progress:
        for second in range(1, 41):
            clock.now = 100.0 + second
            progress.advance(2)
            progress.update(note="310 tokens/s")
    assert lines_of(heard) == [
        # 30 in 15 s; the earlier 72 do not count for the pace, so 1,690 more take 845 s
        "answering [/b]: 102/1,792, 310 tokens/s, about 14 min left",
        "answering [/b]: 132/1,792, 310 tokens/s, about 14 min left",
    ]


def test_on_a_terminal_a_bar_is_drawn_in_location_of_lines_and_brackets_stay() -> None:
    heard, clock = io.StringIO(), Clock()
    console = Console(file=heard, width=120, force_terminal=True)
    with ProgressBar(console, "answering [/b]", 10, clock=clock) as progress:
        clock.now += 60
        progress.update(3, note="[/c] 5 tokens/s")
    assert "answering [/b]" in heard.getvalue() and "[/c] 5 tokens/s" in heard.getvalue()
    assert "3/10" in heard.getvalue() and "about" not in heard.getvalue()
