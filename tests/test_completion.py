"""Completion by TAB: what each option offers, in a real bash too, and the names it offers are those that are taken."""

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from decoding.drafters.registry import _FIRSTS, REGISTRY
from decoding.measure.methods import SETTINGS
from decoding.model.dtypes import DTYPES
from decoding.model.fixed_shapes import CHOICES
from decoding.policies import _POLICIES
from decoding.rules.verify import RULES
from trainer.commands import values
from trainer.commands.completion import cut, read_line
from trainer.commands.recipe_keys import override
from trainer.export.adapted import ADAPTER, MERGED
from trainer.export.formats import FORMATS
from trainer.export.serve import SERVERS
from trainer.recipe.common import DataSection

BASH = shutil.which("bash")
ROOT = Path(__file__).resolve().parents[1]


# --- values -----------------------------------------------------------------------------------------------------------


def test_the_names_offered_are_those_that_the_code_takes() -> None:
    assert {name: tuple(entry.options) for name, entry in REGISTRY.items()} == dict(values.DRAFTERS)
    assert {name for name, entry in REGISTRY.items() if entry.weights is None} == set(values.WITHOUT_WEIGHTS)
    assert values.drafter("hybrid:x,of=") == [f"hybrid:x,of={name}" for name in _FIRSTS]
    assert tuple(DTYPES) == values.DTYPES and tuple(CHOICES) == values.STATIC and tuple(RULES) == values.RULES
    assert tuple(_POLICIES) == values.POLICIES and SETTINGS == values.SETTINGS
    assert tuple(FORMATS) == values.FORMATS and FORMATS["gguf"].types == values.GGUF_TYPES
    assert (MERGED, ADAPTER) == values.ADAPTERS and SERVERS == values.SERVERS
    hints = {name: field.annotation for name, field in DataSection.model_fields.items()}
    assert hints["format"].__args__ == values.DATA_FORMATS and hints["bad_rows"].__args__ == values.BAD_ROWS


def test_a_drafter_is_completed_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "heads").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "rows.jsonl").touch()
    assert values.drafter("look") == ["lookup", "lookahead"]
    assert values.drafter("dr") == ["draft:", "draft-tree:"]
    assert values.drafter("heads:") == ["heads:runs/"]
    assert values.drafter("heads:runs/") == ["heads:runs/heads/"]
    assert values.drafter("draft-tree:x,") == [f"draft-tree:x,{name}=" for name in ("depth", "width", "nodes")]
    assert values.drafter("draft-tree:x,depth=3,w") == ["draft-tree:x,depth=3,width="]
    assert "draft-tree:x,depth=3,depth=" not in values.drafter("draft-tree:x,depth=3,")
    assert values.drafter("lookup:ng") == ["lookup:ngram="]
    assert values.drafter("run") == ["runs/"]
    assert values.drafter("heads:nowhere/") == values.drafter("nothing") == []


def test_targets_are_the_embedded_one_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert values.target("") == ["quickstart", "models/"] and values.target("q") == ["quickstart"]


def test_a_list_is_completed_at_its_last_comma_without_what_it_has() -> None:
    settings = values.some_of("greedy", "sampling", "typical")
    assert settings("gr") == ["greedy"] and settings("greedy,") == ["greedy,sampling", "greedy,typical"]


def test_a_recipes_keys_are_those_of_its_kind(tmp_path: Path) -> None:
    context = SimpleNamespace(params={"recipe": str(ROOT / "recipes" / "any" / "draft.yaml")})

    def complete(text: str) -> list[str]:
        return override(context, text)  # type: ignore[arg-type]  # no more of a context is looked at

    assert complete("dra") == ["draft."] and complete("hea") == [] and complete("training.ste") == ["training.steps="]
    assert complete("quantise=") == ["quantise=int8", "quantise=null"] and complete("training.steps=") == []
    assert complete("data.bad_rows=s") == ["data.bad_rows=stop", "data.bad_rows=skip"]
    assert complete("data.packing=") == ["data.packing=true", "data.packing=false"]
    assert complete("nothing.") == complete("name.x") == complete("kin") == []
    context.params["recipe"] = str(tmp_path / "none.yaml")
    assert complete("hea") == ["heads."] and complete("dra") == ["draft."]


# --- bash -------------------------------------------------------------------------------------------------------------


def test_bash_cuts_at_colons_and_equal_signs_and_its_pieces_are_joined() -> None:
    line = read_line(["headstart", "generate", "--drafter", "heads", ":", "runs/he"], 5)
    assert line == (["generate", "--drafter"], "heads:runs/he", "runs/he")
    assert cut("heads:runs/heads/", line) == "runs/heads/"
    line = read_line(["headstart", "generate", "--drafter", "=", "draft", ":", "x,tokens", "=", "4,sa"], 8)
    assert line == (["generate"], "--drafter=draft:x,tokens=4,sa", "4,sa")
    assert cut("draft:x,tokens=4,sampled=", line) == "4,sampled="
    line = read_line(["headstart", "generate", "--drafter", "heads", ":"], 4)
    assert line == (["generate", "--drafter"], "heads:", "") and cut("heads:runs/", line) == "runs/"
    assert read_line(["headstart", "generate", "--prompt", '"two words"', ""], 4).words[-1] == "two words"
    assert read_line(["headstart", "generate", "--prompt", '"open wor'], 3).incomplete == "open wor"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell that has this checkout's ``headstart`` on its path."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "headstart").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m trainer.cli "$@"\n')
    (folder / "headstart").chmod(0o755)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path, "HOME": str(folder)}


ASK = """
eval "$(headstart --show-completion)"
compopt() { echo "no blank"; }
COMP_WORDS=("$@") COMP_CWORD=$(( $# - 1 ))
_headstart_completion headstart
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "replies"),
    [
        ("headstart gen", ["generate"]),
        ("headstart generate --drafter draft : x,to", ["no blank", "x,tokens="]),
        ("headstart generate --rule t", ["token", "top-k", "traversal", "typical"]),
        ("headstart train recipes/any/draft.yaml training.ste", ["no blank", "training.steps="]),
        ("headstart train recipes/", [""]),  # bash's own files
    ],
)
def test_bash_is_given_replies_by_the_script_that_is_printed(
    program: dict[str, str], words: str, replies: list[str]
) -> None:
    asked = ["bash", "--norc", "--noprofile", "-c", ASK, "bash", *words.split(" ")]
    done = subprocess.run(asked, env=program, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == replies and not done.stderr


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_at_a_terminal_tab_completes_once_it_is_installed(program: dict[str, str], tmp_path: Path) -> None:
    """The command is that of the page on completion; the terminal is a new one."""
    (install,) = re.findall(r"```bash\n(.*)\n```", (ROOT / "docs" / "reference" / "completion.md").read_text())
    subprocess.run(["bash", "-c", f"{install}; true"], env=program, check=True, capture_output=True, cwd=tmp_path)
    (tmp_path / "runs" / "quick").mkdir(parents=True)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe("bash", ["bash", "--noprofile", "-i"], {**program, "TERM": "dumb"})
    shown: list[str] = []
    try:
        ask(terminal, shown, 'PS1="$ "; echo rea""dy\n', "ready")  # a long prompt would push the line aside
        ask(terminal, shown, "headstart generate --drafter hea\t", "--drafter heads:")
        ask(terminal, shown, "\t", "heads:runs/")
        ask(terminal, shown, "\t", "heads:runs/quick/")
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def ask(terminal: int, shown: list[str], keys: str, expected: str) -> None:
    """Type the keys; wait until the terminal's text, gathered in ``shown``, holds what is expected."""
    os.write(terminal, keys.encode())
    while expected not in "".join(shown):
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, f"{expected!r} did not come: {''.join(shown)!r}"
        shown.append(os.read(terminal, 4096).decode())


def test_completing_loads_neither_torch_nor_the_libraries_around_it(program: dict[str, str]) -> None:
    ask = "import sys, trainer.cli as cli\ntry: cli.main()\nexcept SystemExit: pass\n"
    ask += "print(*{'torch', 'transformers', 'datasets', 'typer.rich_utils'} & sys.modules.keys())"
    line = {"COMP_WORDS": "headstart\ngenerate\n--drafter\nhea", "COMP_CWORD": "3"}
    environment = {**program, **line, "_HEADSTART_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["heads:"]


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef headstart"), ("fish", "complete --command headstart")])
def test_the_other_shells_get_typers_scripts(program: dict[str, str], shell: str, mark: str) -> None:
    environment = {**program, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    asked = [sys.executable, "-m", "trainer.cli", "--show-completion", shell]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    assert mark in done.stdout
    words = {"_TYPER_COMPLETE_ARGS": "headstart generate --drafter look", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environment = {**program, **words, "_HEADSTART_COMPLETE": f"complete_{shell}"}
    done = subprocess.run(asked[:3], env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "lookup" in done.stdout and "lookahead" in done.stdout
