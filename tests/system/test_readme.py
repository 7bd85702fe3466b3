"""Every command and program in the README, run on tiny models; its figures, held against the JSON they come from."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fake_hub import REPOSITORY, TOKEN, serve
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip() for language, block in BLOCKS if language == "sh" for line in block.splitlines() if line
]
TINY = {  # what makes a command of the README quick, behind its own words
    "headstart train": "training.steps=2 training.batch_size=2 training.micro_batch_size=2 data.max_length=64 "
    "evaluation.prompts=1 evaluation.max_new_tokens=4 tracking=none",
    "accelerate launch": "training.steps=1 training.batch_size=2 training.micro_batch_size=2 evaluation.prompts=1 "
    "evaluation.max_new_tokens=4",
    "headstart evaluate": "--limit 1 --max-new-tokens 6",
    "headstart generate": "--max-new-tokens 8",
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository's recipes and scripts, a tiny model called ORG/NAME, and data."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("recipes", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "ORG").mkdir()
    tiny_model(vocab=128, max_position_embeddings=512).save_pretrained(folder / "ORG" / "NAME")
    byte_tokenizer().save_pretrained(folder / "ORG" / "NAME")
    row = json.dumps({"prompt": "What is 3 + 4?", "answer": "3 + 4 = 7, so the answer is 7."})
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text(f"{row}\n" * 4)
    return folder


@pytest.fixture(scope="module")
def environment(desk: Path) -> Iterator[dict[str, str]]:
    """A cache of its own with a target trained for one step, the fake Hub, and this interpreter's commands."""
    with serve() as hub:
        yield {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HEADSTART_CACHE": str(desk / "cache"),
            "HEADSTART_QUICKSTART_STEPS": "1",
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }


def test_the_readme_names_its_commands() -> None:
    assert len(COMMANDS) == 10
    assert COMMANDS[:2] == ["make demo", "make test"]  # run by .ci/run itself


@pytest.mark.system
def test_every_command_of_the_readme_runs_in_the_order_given(desk: Path, environment: dict[str, str]) -> None:
    for command in COMMANDS[2:]:
        words = shlex.split(command.replace("ORG/HEADS", REPOSITORY))
        words += TINY.get(" ".join(words[:2]), "").split()
        done = subprocess.run(words, cwd=desk, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert TOKEN not in done.stdout + done.stderr
    assert (desk / "runs" / "measured" / "report.html").is_file()
    assert (desk / "exported" / "heads" / "README.md").is_file()
    _run_the_python_block(desk, environment)


def _run_the_python_block(desk: Path, environment: dict[str, str]) -> None:
    (program,) = [block for language, block in BLOCKS if language == "python"]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=desk, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "accepted of" in done.stdout


def _publisher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("publish_results", ROOT / "scripts" / "publish_results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_figures_are_those_of_a_committed_report() -> None:
    publisher = _publisher()
    blocks = [
        publisher.readme_block(json.loads(path.read_text()))
        for path in sorted((ROOT / "benchmarks" / "results").glob("*/quickstart.json"))
    ]
    assert len(blocks) >= 1
    assert any(block in README for block in blocks)


def test_every_file_the_readme_points_to_is_there() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    paths = re.findall(r"`((?:decoding|trainer|scripts|recipes)/[\w./-]*)`", README)
    assert len(links) >= 4 and len(paths) >= 15
    assert [path for path in (*links, *paths) if not (ROOT / path).exists()] == []
