"""Exit codes of real processes, the sentence with which each process ends, the page that lists the codes, and what
must be found before a target is loaded, which may take minutes.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import COMMANDS, examples, run
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from tiny_training import write_rows
from typer.testing import CliRunner

from trainer.cli import app
from trainer.commands.usage import guarded
from trainer.servers.connection import Connection
from trainer.terminal.exit_codes import ExitCode, exit_code_line

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, signal, sys, types, typer
from decoding.errors import UserError
work = types.ModuleType("trainer.commands.demo")
def run_demo(options):
    {act}
work.run_demo = run_demo
sys.modules["trainer.commands.demo"] = work  # in place of the command's own, whose imports take seconds
from trainer.cli import main
main()
"""
"""A process of ``headstart`` whose command ``demo`` does what the test chooses."""

FOREVER = "while True: print('x' * 1000)"
RICH = "from trainer.terminal.console import say, standard_output\n    while True: say(standard_output(), 'x')"


def end_of(act: str, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", PROGRAM.format(act=act), *words, "demo"]
    return subprocess.run(program, capture_output=True, text=True, cwd=ROOT, **options)  # type: ignore[call-overload, no-any-return]  # keywords of subprocess


@pytest.mark.parametrize(
    ("act", "code", "sentence"),
    [
        ("print('done')", ExitCode.DONE, ""),
        ("raise typer.Exit(1)", ExitCode.FAILED, ""),
        ("raise UserError('depth is 0', 'use 1')", ExitCode.BAD_INPUT, "error: depth is 0: use 1\n"),
        ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", ExitCode.STOPPED, "stopped by Ctrl-C\n"),
    ],
)
def test_an_end_has_its_code_and_at_most_one_sentence(act: str, code: ExitCode, sentence: str) -> None:
    done = end_of(act)
    assert (done.returncode, done.stderr) == (code, sentence)


@pytest.mark.parametrize("kind", ["AssertionError", "ValueError"])
def test_an_internal_error_keeps_its_traceback_in_a_file_and_debug_prints_it(tmp_path: Path, kind: str) -> None:
    hidden = "hf_0123456789abcdefABCD"
    act = f"raise {kind}('no {hidden} here')"
    environment = {"TMPDIR": str(tmp_path), "PATH": "", "PYTHONPATH": str(ROOT)}
    done = end_of(act, env=environment)
    assert done.returncode == ExitCode.INTERNAL_ERROR
    (kept,) = tmp_path.iterdir()
    assert done.stderr == (
        f"error: internal error, {kind}: no (withheld) here: the traceback is in {kept}; "
        "'headstart --debug COMMAND ...' prints the traceback\n"
    )
    text = kept.read_text()
    assert text.startswith("Traceback") and "run_demo" in text and hidden not in text
    assert kept.stat().st_mode & 0o077 == 0
    shown = end_of(act, "--debug", env=environment)
    assert shown.returncode == ExitCode.INTERNAL_ERROR and shown.stderr.startswith("Traceback")
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("error", ["MemoryError()", "RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')"])
def test_full_memory_has_a_code_and_a_remedy(error: str) -> None:
    done = end_of(f"raise {error}")
    assert done.returncode == ExitCode.OUT_OF_MEMORY
    assert done.stderr.startswith("error: out of memory (") and "use smaller batches or shorter texts" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("act", [FOREVER, RICH])
def test_a_reader_that_ends_early_ends_the_command_quietly(act: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(act=act), "demo"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
        assert process.stdout is not None and process.stdout.read(1) == b"x"
        process.stdout.close()
        assert process.wait() == ExitCode.CLOSED_PIPE
        errors.seek(0)
        assert errors.read() == ""


def test_streams_that_the_caller_has_closed_are_empty() -> None:
    act = "assert sys.stdin.read() == ''; print('x'); sys.stderr.write('y'); os._exit(5)"
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", PROGRAM.format(act=act), "demo"]
    assert subprocess.run(closing, cwd=ROOT, check=False).returncode == 5


def test_a_connection_that_a_server_closed_is_no_closed_output() -> None:
    done = end_of("raise BrokenPipeError(32, 'Broken pipe')")
    assert done.returncode == ExitCode.BAD_INPUT and done.stderr.startswith(
        "error: [Errno 32] Broken pipe: the traceback"
    )


def test_what_the_operating_system_answers_is_bad_input_with_a_traceback_in_a_file() -> None:
    done = end_of("open('nowhere')")
    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stderr.startswith("error: [Errno 2] No such file or directory: 'nowhere': the traceback is in ")
    done = end_of("raise OSError('of a library')")
    assert done.returncode == ExitCode.INTERNAL_ERROR


def test_a_terminated_command_that_saves_nothing_ends_as_the_system_does() -> None:
    done = end_of("os.kill(os.getpid(), signal.SIGTERM); signal.pause()")
    assert (128 - done.returncode, done.stderr) == (ExitCode.TERMINATED, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_in_this_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command passes its work to `guarded`, which the tests above cover, and `guarded` also encloses the whole
    program.
    """

    def ends(work: Callable[[], None], *_: object) -> int:
        return 33 if "run.<locals>" in work.__qualname__ else guarded(work)

    monkeypatch.setattr("trainer.commands.usage.guarded", ends)
    assert CliRunner().invoke(app, shlex.split(examples(name)[0])[1:]).exit_code == 33


def test_a_command_that_resumes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise KeyboardInterrupt

    assert guarded(work, resumes=True) == ExitCode.STOPPED
    assert capsys.readouterr().err == "stopped by Ctrl-C: start the same command again to resume\n"


def test_the_page_and_the_help_list_every_code() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(str(code.value), code.short, code.meaning) for code in ExitCode]
    assert exit_code_line().startswith("0 done, 1 a check failed, 2 bad input, 70 ")


# --- before a target is loaded ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a target without weights, whose template rejects system messages, a draft, and files of prompts."""
    folder = tmp_path_factory.mktemp("folder")
    rejecting = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    byte_tokenizer(rejecting + "{{ m.content }}{% endfor %}").save_pretrained(folder / "target")
    tiny_model(vocab=128).save_pretrained(folder / "draft")
    (folder / "old").mkdir()
    write_rows(folder / "old" / "runs-0.jsonl", [{"provenance": {"identity": {"limit": 1}}}])
    write_rows(folder / "good.jsonl", [{"prompt": "a"}] * 3)
    write_rows(folder / "system.jsonl", [{"prompt": "a", "system": "S"}])
    write_rows(folder / "wording.jsonl", [{"wording": "a"}] * 3)
    three = '{"prompt": "a"}\n{"prompt": 3}\n\n{"prompt"\n{"wording": "b"}\n'
    (folder / "three.jsonl").write_text(three)
    (folder / "many.jsonl").write_text(three + "1\n" * 99)
    return folder


EVALUATE, PLAN = "evaluate --output out --prompts", "plan --output out --prompts good.jsonl"
VERIFY, SERVED = "verify --prompts", "verify --prompts none.jsonl --model m --endpoint"
DIAGNOSE = "diagnose draft:draft --prompts"
REGENERATE, CHOSEN = (f"regenerate --output out --target target --prompts{name}" for name in ("", " none.jsonl"))
ASKED = "regenerate --output out --model m --prompts none.jsonl --endpoint"
REJECTED = "the chat template rejects this prompt: no system"
THREE = r"rows of three.jsonl that are not prompts: 3 \(2, 4, 5\); the first error: three.jsonl, "
THREE += "line 2: field 'prompt' contains int, not text or messages: correct or omit the row$"
FOUND = {
    f"{EVALUATE} system.jsonl": REJECTED,
    f"{EVALUATE} good.jsonl --task c": "--task is 'c', but",
    f"{EVALUATE} none.jsonl --drafter nothing": "no drafter is called 'nothing'",
    "evaluate --output old --prompts none.jsonl": "old/runs-0.jsonl contains runs with",
    "evaluate --output old --prompts none.jsonl --restart": "none.jsonl is not there",
    **{f"{words} none.jsonl --drafter heads:./gone": "there is no folder ./gone" for words in (EVALUATE, VERIFY)},
    f"{PLAN} --drafter heads:./gone": "there is no folder ./gone",
    "chat --drafter heads:./gone": "there is no folder ./gone",
    f"{PLAN} --drafter lookup --drafter lookup": "--drafter lookup is given twice",
    f"{PLAN} --drafter lookup --batch-size much": "'--batch-size': much is not a",
    f"{VERIFY} none.jsonl": "none.jsonl is not there",
    f"{VERIFY} system.jsonl": REJECTED,
    f"{VERIFY} none.jsonl --top-p 2": "'--top-p': Input should be less than or equal to 1",
    f"{VERIFY} none.jsonl --model m": "--model m needs an --endpoint",
    f"{VERIFY} none.jsonl --temperature 0 --rule token": "needs sampling",
    f"{SERVED} http://x/v1 --rule token": "--drafter and --rule do nothing",
    f"{SERVED} nowhere": "--endpoint is not a server's address",
    "chat --rule none-such": "no rule is called 'none-such'",
    'chat --chat-template-kwargs {"a":1}': "chat_template_kwargs has a, which the chat template does not read: omit it",
    **{f"{words} system.jsonl --endpoint http://x/v1 --model m": REJECTED for words in (VERIFY, DIAGNOSE)},
    f"{DIAGNOSE} none.jsonl --endpoint nowhere --model m": "--endpoint is not a server's address",
    f"{DIAGNOSE} none.jsonl --endpoint http://x/v1": "pass it as --model",
    f"{DIAGNOSE} none.jsonl --exported nowhere": "a server cannot load nowhere",
    "diagnose lookup --prompts none.jsonl": "does not have trained weights",
    f"{DIAGNOSE} system.jsonl": REJECTED,
    f"{DIAGNOSE} good.jsonl --metrics nowhere.txt": "neither a file nor an address",
    f"{DIAGNOSE} good.jsonl --metrics http://zoe:secret@127.0.0.1": r"--metrics cannot be read \(InvalidURL\)",
    "realign --draft draft --output out --prompts three.jsonl": THREE,
    "regenerate --output out --prompts none.jsonl": "--target to decode in this process, or --endpoint",
    f"{ASKED} http://x/v1 --drafter lookup": "--drafter does nothing with --endpoint",
    f"{ASKED} http://x/v1,nowhere": "--endpoint is not a server's address",
    f"{REGENERATE} self:9,turns=2 --endpoint http://x/v1 --model m": "a server writes first turns only",
    f"{CHOSEN} --chat-template-kwargs []": r"chat_template_kwargs is \[\]: pass a JSON object",
    f"{CHOSEN} --timeout 3": "--timeout does nothing without --endpoint",
    f"{CHOSEN} --top-p 2": "top_p is 2.0: use",
    f"{CHOSEN} --drafter nothing": "no drafter is called 'nothing'",
    f"{CHOSEN} --drafter heads:./gone": "there is no folder ./gone",
    f"{CHOSEN} --dtype int3": "int3",
    "regenerate --output draft --target target --prompts none.jsonl": "--output draft is a folder: name a .jsonl file",
    f"{REGENERATE} good.jsonl --n 2": "n is 2, but at temperature 0 all answers are equal",
    f"{REGENERATE} three.jsonl": THREE,
    f"{REGENERATE} self:9,except=three.jsonl": THREE,
    f"{REGENERATE} many.jsonl": r"not prompts: 102 \(2, 4, 5, 6, 7, .*, 22, …\); the first error",
    f"{REGENERATE} wording.jsonl": "not prompts: 3 .*; it has wording: rename the prompt's field, or .* commands$",
}


@pytest.mark.parametrize("words", FOUND)
def test_what_is_wrong_in_options_and_files_is_found_before_a_target_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    opened = list[Connection]()
    monkeypatch.setattr("trainer.commands.models.load_model", lambda *_, **__: pytest.fail("it loads the target"))
    monkeypatch.setattr("trainer.servers.client.Connection", lambda at: opened.append(Connection(at)) or opened[-1])
    monkeypatch.chdir(folder)
    code, said = run(*words.split(), *([] if words.startswith("regenerate") else ["--target", "target"]))
    assert code == ExitCode.BAD_INPUT and re.search(FOUND[words], said)
    assert not (folder / "out").exists() and all(connection.client.is_closed() for connection in opened)
