"""A process that imports the `headstart` program and the repository's scripts once, and forks for each run.

Loading torch, transformers and the commands takes most of the time of a command on a tiny model. Each command still has
a separate process, arguments, folder, output and exit code; its environment is that of the forking process, with
changes. ``accelerate launch`` and ``torchrun`` are the real launchers, except that they fork what they would start. If
this file is run as a program, it reads {"words", "folder", "output", "seconds", "changes"}, one object per line. It
writes the process id, and later the exit code, into the pipe ``output``.code.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class Run:
    """A command that was started, with the part of `subprocess.Popen` that tests need."""

    stderr = None  # output goes into a file, not into a pipe

    def __init__(self, output: Path) -> None:
        self._answers, self._output = output.with_suffix(".code").open(), output
        self.pid = int(self._answers.readline())
        """The id is also the id of the process group."""
        self.returncode: int | None = None

    def send_signal(self, signal: int) -> None:
        os.kill(self.pid, signal)

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; the caller of `start` has set a time limit."""
        if self.returncode is None:
            with self._answers:
                self.returncode = int(self._answers.readline())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait()
        said, complained = (self._output.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
        return said, complained


class WarmProgram:
    """The forking process, from the point of view of a test."""

    def __init__(self, process: "subprocess.Popen[str]", outputs: Path) -> None:
        self._process, self._outputs, self._asked = process, outputs, 0

    def start(
        self, words: Sequence[str], folder: Path, seconds: int, changes: Mapping[str, str | None] | None = None
    ) -> Run:
        """Start a command line that begins with ``headstart``, ``accelerate launch``, ``torchrun``, ``-c`` or a script.

        After ``seconds`` it is killed. ``changes`` are changes of the environment, where None removes a variable; these
        must not be variables that are read on import.
        """
        assert self._process.stdin is not None
        self._asked += 1
        output = self._outputs / str(self._asked)
        os.mkfifo(output.with_suffix(".code"))
        asked = {"words": list(words), "folder": str(folder), "output": str(output), "seconds": seconds}
        asked["changes"] = dict(changes or {})
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Run(output)

    def run(
        self, words: Sequence[str], folder: Path, seconds: int, changes: Mapping[str, str | None] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        run = self.start(words, folder, seconds, changes)
        said, complained = run.communicate()
        return subprocess.CompletedProcess(words, run.wait(), said, complained)


@contextlib.contextmanager
def warm_program(environment: Mapping[str, str]) -> Iterator[WarmProgram]:
    """Start the forking process; it ends with the block."""
    with (
        tempfile.TemporaryDirectory() as outputs,
        subprocess.Popen(
            [sys.executable, __file__], env=dict(environment), stdin=subprocess.PIPE, text=True
        ) as process,
    ):
        yield WarmProgram(process, Path(outputs))
        assert process.stdin is not None
        process.stdin.close()


def _load() -> None:
    """Import what the commands import when they run."""
    import trainer.commands

    for module in pkgutil.iter_modules(trainer.commands.__path__, "trainer.commands."):
        importlib.import_module(module.name)
    for name in ("trainer.cli", "trainer.export", "trainer.run.train", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise every process would traverse, and so copy, all of this at each garbage collection


def _run(asked: Mapping[str, Any]) -> int:
    """Run a command in this process, which has no other task; return the exit code."""
    os.setpgid(0, 0)
    signal.alarm(asked["seconds"])
    os.chdir(asked["folder"])
    for name, value in asked["changes"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(asked["output"] + suffix, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), target)
    try:
        _run_program(*asked["words"])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _run_program(*words: str) -> None:
    """Run a command line as the interpreter would."""
    program, *arguments = words[1:] if words[0] == "-u" else words  # launchers put this before a script
    sys.argv = [program, *arguments]
    if program == "headstart":
        from trainer.cli import main

        main()
    elif program == "accelerate":
        import accelerate.commands.launch as accelerate

        _fork_the_launched()
        accelerate.simple_launcher = _run_the_launched
        del sys.argv[1]
        accelerate.main()
    elif program == "torchrun":
        from torch.distributed.run import main as launch

        _fork_the_launched()
        launch()
    elif program == "-c":
        del sys.argv[1]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    elif program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _fork_the_launched() -> None:
    """Make the launcher of torch, which accelerate also uses, fork its processes."""
    import torch.distributed.run as torchrun

    launcher = torchrun.elastic_launch

    def forking(config: Any, entrypoint: str) -> Any:
        config.start_method = "fork"
        return launcher(config, _run_program)

    torchrun.elastic_launch = forking


def _run_the_launched(options: argparse.Namespace) -> None:
    """Act as the single process that accelerate's simplest launcher would start."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, environment = prepare_simple_launcher_cmd_env(options)
    os.environ.update(environment)
    _run_program(*command[1:])


def _fork_for(asked: Mapping[str, Any]) -> None:
    """Run a command in a child process, while another process waits for it."""
    if os.fork():
        return
    child = os.fork()
    if child:
        with open(asked["output"] + ".code", "w") as answers:
            print(child, file=answers, flush=True)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # processes that the command launched and left running
            print(code, file=answers, flush=True)
        os._exit(0)
    code = 1
    try:
        code = _run(asked)
    except BaseException:  # noqa: BLE001  # printed, as an interpreter that ends prints it
        sys.excepthook(*sys.exc_info())
    finally:  # a child must never return to the loop of the forking process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _load()
    for line in sys.stdin:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # processes whose commands have ended
                pass
        _fork_for(json.loads(line))
