"""Every command and program in the README and the docs, run on tiny models.

All but one are forks of a process that has done the imports.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted_endpoint
import torch
from fake_hub import REPOSITORY, TOKEN, FakeHub, folder_on, serve
from speculating_server import SpeculatingServer
from test_quickstart import install_embedded
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from warm_program import WarmProgram, warm_program

from decoding.drafters import DraftModelDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_model
from trainer.terminal.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = (ROOT / "docs" / "how-to" / "python.md").read_text()
TRAINING = (ROOT / "docs" / "how-to" / "heads.md").read_text()
DRAFTS = (ROOT / "docs" / "how-to" / "drafts.md").read_text()
PLAN = (ROOT / "docs" / "how-to" / "plan.md").read_text()
EVALUATE = (ROOT / "docs" / "how-to" / "evaluate.md").read_text()
SERVING = (ROOT / "docs" / "how-to" / "serving.md").read_text()
DATA = (ROOT / "docs" / "how-to" / "data.md").read_text()
MACHINES = (ROOT / "docs" / "how-to" / "machines.md").read_text()
ONE_GPU = (ROOT / "docs" / "how-to" / "one-gpu.md").read_text()
VERIFY = (ROOT / "docs" / "how-to" / "verify.md").read_text()
EXTEND = (ROOT / "docs" / "how-to" / "extend.md").read_text()
TARGETS = (ROOT / "docs" / "reference" / "targets.md").read_text()
_TINY_RECIPE = (
    "training.steps=2 training.batch_size=2 training.micro_batch_size=2 data.max_length=64 evaluation.prompts=1 "
    "evaluation.best_prompts=8 evaluation.tree_prompts=1 evaluation.max_new_tokens=4 tracking=none"
)
TINY = {  # words that make a command quick, appended to it
    "headstart train": _TINY_RECIPE,
    "headstart plan": "--limit 2 --max-new-tokens 12 --batch-size 1",
    "headstart realign": "--steps 2 --max-new-tokens 12 training.batch_size=2 training.micro_batch_size=2",
    "headstart regenerate": "--limit 2 --max-new-tokens 12 --batch-size 2",
    "accelerate launch": "training.steps=1 training.batch_size=2 training.micro_batch_size=2 evaluation.prompts=1 "
    "evaluation.tree_prompts=1 evaluation.max_new_tokens=4 data.max_rows=4",
    "headstart evaluate": "--limit 1 --max-new-tokens 6",
    "headstart generate": "--max-new-tokens 8",
    "headstart chat": "--max-new-tokens 8",
    "headstart diagnose": "--limit 4 --max-new-tokens 24",
    "headstart verify": "--limit 2 --max-new-tokens 8 --draws 40",
    "pip install": "--dry-run --no-deps --no-build-isolation",
}

VISITED = """
import os, signal, sys, threading, time, urllib.request
from trainer.cli import main

def visit():
    while "the demo is at" not in open("/proc/self/fd/2").read():
        time.sleep(0.05)
    with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[-1]}/", timeout=60) as answer:
        print(answer.read().decode())
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=visit, daemon=True).start()
main()
"""  # the program with a visitor who presses Ctrl-C

MAIN = "; from trainer.cli import main; main()"
PIPED = "import os; os.dup2(os.open('asked.txt', 0), 0)" + MAIN
"""The program with a file as standard input."""
QUICK = "import functools as f, trainer.commands.plan as p; p.PlanConfig = f.partial(p.PlanConfig, seconds=.1)" + MAIN
"""The program with plans that measure for only a moment."""


def commands(text: str) -> list[str]:
    """Return the lines of a page's shell blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line]


COMMANDS = commands(README)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the repository's recipes and scripts, a tiny model called ORG/NAME, and data."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("recipes", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "ORG").mkdir()
    tiny_model(vocab=130, head_dim=32, max_position_embeddings=512).save_pretrained(folder / "ORG" / "NAME")
    byte_tokenizer().save_pretrained(folder / "ORG" / "NAME")
    row = json.dumps({"prompt": "What is 3 + 4?", "answer": "3 + 4 = 7, so the answer is 7."})
    for name, rows in (("train.jsonl", 4), ("test.jsonl", 20), ("prompts.jsonl", 4)):  # 20 rows fill a context of 256
        (folder / name).write_text(f"{row}\n" * rows)
    return folder


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with serve() as hub:
        yield hub


@pytest.fixture(scope="module")
def environment(desk: Path, hub: FakeHub) -> dict[str, str]:
    """Return an environment with separate caches, a tiny embedded target, the fake Hub, and this interpreter's
    commands.
    """
    install_embedded(desk / "packages")
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{desk / 'packages'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "HEADSTART_CACHE": str(desk / "cache"),
        "HF_HOME": str(desk / "home"),
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture(scope="module")
def warm(environment: dict[str, str]) -> Iterator[WarmProgram]:
    with warm_program(environment) as program:
        yield program


def test_the_readme_names_its_commands() -> None:
    assert len(COMMANDS) == 9
    assert COMMANDS[:3] == ["pip install .", "make demo", "make test"]  # the last two are run by .ci/run itself


def test_every_page_with_commands_or_a_program_is_one_that_a_test_runs() -> None:
    """The tutorial has a separate test."""
    marked = re.compile(r"^ *```(?:sh|bash|shell|console|python)$", re.MULTILINE)
    found = {path for path in (ROOT / "docs").rglob("*.md") if marked.search(path.read_text())}
    run_here = (PYTHON, TRAINING, DRAFTS, PLAN, EVALUATE, SERVING, DATA, MACHINES, ONE_GPU, VERIFY, EXTEND, TARGETS)
    assert len(found) >= 10
    assert [path for path in sorted(found) if path.read_text() not in run_here] == [ROOT / "docs" / "tutorial.md"]


def test_every_command_of_the_readme_runs_in_the_order_given(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    run(COMMANDS[0], ROOT, environment)
    for command in COMMANDS[3:]:
        run(command, desk, environment, warm)
    assert (desk / "runs" / "measured" / "report.html").is_file()
    assert (desk / "exported" / "draft" / "README.md").is_file()
    _run_the_python_block(README, desk, warm)


def test_every_command_of_the_page_on_training_runs_in_the_order_given(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    found = commands(TRAINING)
    assert len(found) == 9
    for command in found:
        run(command, desk, environment, warm)
    quick = TRAINING.replace("changes = [", f"changes = [*{_TINY_RECIPE.split()}, ")
    _run_the_python_block(quick, desk, warm)
    assert (desk / "runs" / "python" / "final" / "model.safetensors").is_file()
    assert "lossless" in _run_the_python_block(EXTEND, desk, warm)
    assert "accepted of" in _run_the_python_block(PYTHON, desk, warm)  # with the heads trained above


def test_every_command_of_the_page_on_drafts_runs_in_the_order_given(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    found = commands(DRAFTS)
    assert len(found) == 14
    for command in found:
        small = " draft.policy.max_new_tokens=8" * ("on-policy" in command)
        small += " draft.eagle3.taps=[0]" * ("any/eagle3" in command)  # for a target of two layers
        run(command + small, desk, environment, warm)
    assert (desk / "runs" / "realigned" / "realigned.json").is_file()
    assert (desk / "exported" / "one-forward" / "README.md").is_file()
    assert (desk / "runs" / "second" / "generated" / "after-00000000-process-0-of-1.jsonl").is_file()


def test_every_command_of_the_page_on_data_runs_on_a_table_of_other_names(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    table = 'wording,number\n"What is 3 + 4,\nor 4 + 3?",1\n,2\nWhat is 5 + 6?,3\n\n'  # two lines; empty
    (desk / "questions.csv").write_text(table, encoding="utf-8-sig")  # as Excel writes it
    _run_the_python_block(DATA, desk, warm)
    found = commands(DATA)
    assert len(found) == 6
    chats = desk / "ORG" / "CHATS"  # nearly uniform, so that some of its prompts end
    tiny_model(vocab=130, head_dim=32, max_position_embeddings=512, initializer_range=0.05).save_pretrained(chats)
    byte_tokenizer(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    ).save_pretrained(chats)
    for command in (*found[:3], *(each.replace("ORG/NAME", "ORG/CHATS") for each in found[3:])):
        run(command, desk, environment, warm)
    answered = [json.loads(line)["prompt"] for line in (desk / "own-answers.jsonl").read_text().splitlines()]
    assert answered == ["What is 3 + 4,\nor 4 + 3?", "What is 5 + 6?"]
    assert (desk / "runs" / "own" / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("page", "runs"),
    [
        (MACHINES, ("stored", "cached", "tapped")),
        (ONE_GPU.partition("## Measure your GPU")[0], ("evening", "evening-draft")),  # the rest: test_gpu_suite.py
    ],
    ids=("machines", "one GPU"),
)
def test_every_command_of_a_page_on_hardware_runs_in_the_order_given(
    page: str, runs: tuple[str, ...], desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    found = commands(page)
    assert len(found) == 3
    for command in found:  # on the answers that the README's command writes
        run(command, desk, environment, warm)
    assert all((desk / "runs" / name / "final" / "model.safetensors").is_file() for name in runs)


def test_every_command_of_the_page_on_plans_runs_in_the_order_given(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    found = commands(PLAN)
    assert len(found) == 5
    for command in found:  # with the heads that the page on training trains
        run(command, desk, environment, warm)
    assert (desk / "runs" / "plan" / "plan.json").is_file()


def test_every_command_that_shows_decoding_in_a_terminal_runs_in_the_order_given(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    *alone, into_file, from_pipe = commands(PYTHON.partition("## On a web page")[0])
    assert len(alone) == 2
    for command in alone:  # with the heads that the page on training trains
        run(command, desk, environment, warm)
    shown, file = into_file.split(" > ")
    done = warm.run([*shlex.split(shown), *TINY["headstart generate"].split()], desk, seconds=240)
    assert done.returncode == 0 and done.stdout and done.stderr.count("tokens per target pass") == 1, done.stderr
    asked, shown = from_pipe.removesuffix(" > answers.txt").split(" | ")
    (desk / "asked.txt").write_text(subprocess.run(["bash", "-c", asked], capture_output=True, text=True).stdout)
    words = [*shlex.split(shown)[1:], *TINY["headstart chat"].split()]
    done = warm.run(["-c", PIPED, *words], desk, seconds=240)
    assert done.returncode == 0 and done.stdout and done.stderr.count("tokens per target pass") == 2, done.stderr
    assert file == "answer.txt" and from_pipe.endswith(" > answers.txt")


def test_every_command_of_the_page_on_serving_runs_in_the_order_given(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    export, *of_the_hub = commands(SERVING)
    assert len(of_the_hub) == 2  # run by the next test
    assert "vllm serve " in run(export, desk, environment, warm)  # with the heads and the plan of the pages before


def test_what_is_pushed_is_decoded_with_by_its_revision_online_and_offline(
    desk: Path, environment: dict[str, str], warm: WarmProgram, hub: FakeHub
) -> None:
    """The second time, in a process that starts offline, nothing is requested from the Hub, even if the branch has
    moved.
    """
    folder_on(hub, "ORG/TARGET", desk / "ORG" / "NAME")
    push, generate = commands(SERVING.partition("## The Hub")[2].partition("## Safety")[0])
    pushed = run(push, desk, environment, warm)  # the heads that the page on training trains
    commit = hub.repositories[REPOSITORY].refs["main"]
    assert f"use it as {REPOSITORY}@{commit}" in pushed
    generate += " --dtype fp32"
    online = run(generate, desk, environment, warm)
    hub.repositories[REPOSITORY].commit({"config.json": b"{}"})
    hub.requests.clear()
    offline = run(generate.replace("@main", f"@{commit}"), desk, environment | {"HF_HUB_OFFLINE": "1"})
    assert offline.splitlines()[0] == online.splitlines()[0]
    assert hub.requests == []


def test_every_command_of_the_page_on_evaluating_runs_in_the_order_given(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    found = commands(EVALUATE)
    assert len(found) == 3
    for command in found:
        run(command, desk, environment, warm)
    report = json.loads((desk / "runs" / "grid" / "report.json").read_text())
    cells = {(row["batch_size"], row["context"]) for row in (*report["rows"], *report["grid"])}
    assert cells == {(1, 128), (1, 256), (8, 128), (8, 256)}


def test_every_command_of_the_page_on_diagnoses_runs_beside_a_server(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    train, export, diagnose = commands(VERIFY)[2:]
    for command in (train, export):
        run(command, desk, environment, warm)
    target, draft = (
        CausalLM(load_model(str(desk / name), torch.float32)) for name in ("ORG/NAME", "exported/diagnosed")
    )
    tokenizer = byte_tokenizer()
    server = SpeculatingServer(target, tokenizer, DraftModelDrafter(draft, 3), lambda messages: ())
    with scripted_endpoint.serve(server) as endpoint:
        run(diagnose.replace("http://localhost:8000", endpoint.address.removesuffix("/v1")), desk, environment, warm)
    assert len(endpoint.requests) > 10


def test_every_command_of_the_page_on_targets_runs_in_the_order_given(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    found = commands(TARGETS)
    assert len(found) == 4
    for command in found:
        run(command, desk, environment, warm)
    told = json.loads((desk / "runs" / "doctor.json").read_text())
    assert told["problems"] == 0
    of_heads = {finding["check"]: finding["status"] for finding in list(told["findings"].values())[-2]}
    assert of_heads == dict.fromkeys(("heads", "origin", "decoding"), "ok")


def test_every_command_of_the_page_on_the_demo_serves_it_until_ctrl_c(desk: Path, warm: WarmProgram) -> None:
    pytest.importorskip("gradio")
    found = commands(PYTHON.partition("## On a web page")[2])
    assert len(found) == 2
    for command in found:  # the embedded target; then one with the heads that the page on training trains
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        done = warm.run(["-c", VISITED, *shlex.split(command)[1:], "--port", str(port)], desk, seconds=240)
        assert f"the demo is at http://127.0.0.1:{port}/" in done.stderr
        assert done.returncode == ExitCode.STOPPED and "Headstart demo" in done.stdout, done.stderr


def test_every_command_of_the_page_on_verifying_runs_in_the_order_given(
    desk: Path, environment: dict[str, str], warm: WarmProgram
) -> None:
    found = commands(VERIFY)[:2]
    assert len(commands(VERIFY)) == 5
    for command in found:
        run(command, desk, environment, warm)
    assert json.loads((desk / "runs" / "verified.json").read_text())["verdict"] == "PASS"


def run(command: str, desk: Path, environment: dict[str, str], warm: WarmProgram | None = None) -> str:
    """Run a command that must succeed and must not print the token; return its standard output."""
    words = shlex.split(re.sub("ORG/(HEADS|DRAFT)", REPOSITORY, command))
    words += TINY.get(" ".join(words[:2]), "").split()
    if "evaluate" in words and "--batch-size" in words:
        words[words.index("--limit") + 1] = "8"  # as many as fit in the largest batch
    if warm is not None and words[0] in ("headstart", "accelerate"):
        done = warm.run(["-c", QUICK, *words[1:]] if words[1] == "plan" else words, desk, seconds=240)
    else:
        done = subprocess.run(words, cwd=desk, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert TOKEN not in done.stdout + done.stderr
    return done.stdout


def _run_the_python_block(page: str, desk: Path, warm: WarmProgram) -> str:
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    done = warm.run(["-c", program], desk, seconds=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
