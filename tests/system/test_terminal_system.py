"""`headstart generate` and `headstart chat` on a real terminal, with real processes, keys and signals."""

import re

import pytest
from pseudo_terminal import CTRL_C, CTRL_D, headstart_on_terminal
from writing_models import write_alphabet

from trainer.terminal.exit_codes import ExitCode

LONG = "20000"
"""More tokens than any test waits for."""
CONTROLS = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a target that writes the alphabet and an escape character again and again."""
    return str(write_alphabet(tmp_path_factory.mktemp("alphabet")))


def test_a_chat_goes_on_after_ctrl_c_in_an_answer_and_ends_by_ctrl_d(target: str) -> None:
    words = ["chat", "--target", target, "--dtype", "fp32", "--drafter", "lookup", "--max-new-tokens", LONG]
    with headstart_on_terminal(words) as terminal:
        assert b"starting" in terminal.wait_for("loading"), "something is shown before anything is imported"
        terminal.wait_for("/help lists the commands")
        legend = terminal.wait_for("> ")
        assert b"\x1b[32mgreen\x1b[0m: accepted draft tokens" in legend
        terminal.press(b"One?\n")
        for shown in ("\x1b[1m", "\x1b[32m"):
            terminal.wait_for(shown)
        terminal.press(CTRL_C)
        terminal.wait_for("; stopped")
        terminal.wait_for("> ")
        terminal.press(b"/undo\n")
        terminal.wait_for("taken back: One?")
        terminal.wait_for("> ")
        terminal.press(b"Two?\n")
        terminal.wait_for("\x1b[32m")
        terminal.press(CTRL_C)
        terminal.wait_for("; stopped")
        terminal.wait_for("> ")
        terminal.press(CTRL_D)
        assert terminal.exit_code() == 0


def test_ctrl_c_ends_generate_with_the_figures_of_what_was_written(target: str) -> None:
    words = ["generate", "--target", target, "--dtype", "fp32", "--drafter", "lookup", "--prompt", "Go"]
    with headstart_on_terminal([*words, "--max-new-tokens", LONG]) as terminal:
        terminal.wait_for("the target's own tokens")
        terminal.wait_for("\x1b[32m")
        terminal.press(CTRL_C)
        terminal.wait_for("prompt lookup (lossless): ")
        terminal.wait_for(" tokens per target pass")
        assert terminal.exit_code() == ExitCode.STOPPED
    assert b"Traceback" not in terminal.output and b"stopped by Ctrl-C" not in terminal.output
    sequences = set(CONTROLS.findall(terminal.output))
    assert all(sequence[-1:] in b"mKAhl" for sequence in sequences), "colours, erased lines, and the cursor"
    assert b"\x1b" not in CONTROLS.sub(b"", terminal.output), "no escape of the model's"
