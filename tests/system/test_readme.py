"""Every command and program in the README and the docs, run on tiny models; figures held against their JSON."""

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
PYTHON = (ROOT / "docs" / "python.md").read_text()
TRAINING = (ROOT / "docs" / "training.md").read_text()
DRAFTS = (ROOT / "docs" / "drafts.md").read_text()
PAGES = {  # page: the least number of links and paths in it
    "README.md": 20,
    "PAPERS.md": 0,
    "docs/artefacts.md": 0,
    "docs/drafts.md": 3,
    "docs/drafts-measured.md": 1,
    "docs/measured.md": 3,
    "docs/multi-node.md": 1,
    "docs/python.md": 6,
    "docs/training.md": 5,
}
_TINY_RECIPE = (
    "training.steps=2 training.batch_size=2 training.micro_batch_size=2 data.max_length=64 evaluation.prompts=1 "
    "evaluation.max_new_tokens=4 tracking=none"
)
TINY = {  # what makes a command quick, behind its own words
    "headstart train": _TINY_RECIPE,
    "headstart features": _TINY_RECIPE,
    "headstart plan-training": _TINY_RECIPE,
    "headstart realign": "--steps 2 --batch-size 2 --max-new-tokens 12",
    "headstart regenerate": "--limit 2 --max-new-tokens 12 --batch-size 2",
    "accelerate launch": "training.steps=1 training.batch_size=2 training.micro_batch_size=2 evaluation.prompts=1 "
    "evaluation.max_new_tokens=4",
    "headstart evaluate": "--limit 1 --max-new-tokens 6",
    "headstart generate": "--max-new-tokens 8",
    "pip install": "--dry-run --no-deps --no-build-isolation",
}


def commands(text: str) -> list[str]:
    """The lines of a page's shell blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line]


COMMANDS = commands(README)


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
    for name in ("train.jsonl", "test.jsonl", "prompts.jsonl"):
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
    assert len(COMMANDS) == 11
    assert COMMANDS[:3] == ["pip install .", "make demo", "make test"]  # the last two are run by .ci/run itself


def test_every_command_of_the_readme_runs_in_the_order_given(desk: Path, environment: dict[str, str]) -> None:
    run(COMMANDS[0], ROOT, environment)
    for command in COMMANDS[3:]:
        run(command, desk, environment)
    assert (desk / "runs" / "measured" / "report.html").is_file()
    assert (desk / "exported" / "heads" / "README.md").is_file()
    _run_the_python_block(README, desk, environment)
    assert "accepted of" in _run_the_python_block(PYTHON, desk, environment)  # with the heads trained above


def test_every_command_of_the_page_on_training_runs_in_the_order_given(desk: Path, environment: dict[str, str]) -> None:
    found = commands(TRAINING)
    assert len(found) == 9
    for command in found:
        run(command, desk, environment)
    assert (desk / "runs" / "stored" / "final" / "model.safetensors").is_file()
    quick = TRAINING.replace("changes = [", f"changes = [*{_TINY_RECIPE.split()}, ")
    _run_the_python_block(quick, desk, environment)
    assert (desk / "runs" / "python" / "final" / "model.safetensors").is_file()


def test_every_command_of_the_page_on_drafts_runs_in_the_order_given(desk: Path, environment: dict[str, str]) -> None:
    found = commands(DRAFTS)
    assert len(found) == 10
    for command in found:
        unhurried = " draft.check_costs=false" * ("recipes/any/draft" in command)
        short = " draft.policy.max_new_tokens=8" * ("on-policy" in command)
        run(command + unhurried + short, desk, environment)
    assert (desk / "runs" / "realigned" / "realigned.json").is_file()


def run(command: str, desk: Path, environment: dict[str, str]) -> None:
    words = shlex.split(command.replace("ORG/HEADS", REPOSITORY))
    words += TINY.get(" ".join(words[:2]), "").split()
    done = subprocess.run(words, cwd=desk, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert TOKEN not in done.stdout + done.stderr


def _run_the_python_block(page: str, desk: Path, environment: dict[str, str]) -> str:
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=desk, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _publisher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("publish_results", ROOT / "scripts" / "publish_results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "count"), [("quickstart", 3), ("drafters", 1), ("policies", 1)])
def test_the_figures_of_the_pages_are_those_of_one_committed_report(name: str, count: int) -> None:
    publisher = _publisher()
    assert publisher.PLACES.keys() == {"quickstart", "drafters", "policies"}
    blocks = [(page, mark, write) for page, marked in publisher.PLACES[name].items() for mark, write in marked]
    assert len(blocks) == count
    found = sorted((ROOT / "benchmarks" / "results").glob(f"*/{name}.json"))
    reports = [json.loads(path.read_text()) for path in found]
    assert len(reports) >= (name == "quickstart")
    if not reports:
        assert all(
            publisher.block(mark, publisher.UNPUBLISHED) in (ROOT / page).read_text() for page, mark, _ in blocks
        )
        return
    assert any(
        all(publisher.block(mark, write(report)) in (ROOT / page).read_text() for page, mark, write in blocks)
        for report in reports
    )


def test_the_tables_of_drafters_and_policies_hold_every_row_with_its_figures() -> None:
    publisher = _publisher()
    figure = {"value": 2.0, "low": 1.5, "high": 2.5}
    told = {"hardware": {"processor": "P", "cores": 2, "threads": 2}, "commit": "c", "dtype": "float32"}
    told |= {"parameters": 7_000_000, "prompts": 3, "rounds": 1, "max_new_tokens": 8}
    drafter = {"setting": "greedy", "spec": "lookup", "tokens_per_pass": figure, "speedup_of_totals": figure}
    drafter["identical_to_plain"] = {"identical": 2, "of": 3}
    written = publisher.drafters_table({**told, "rows": [drafter]})
    assert "| greedy | lookup | 2.00 [1.50, 2.50] | 2.00× [1.50, 2.50] | 2/3 |" in written
    policy = {"target": "t", "temperature": 0.0, "batch_size": 8, "drafter": "lookup", "better": "fixed"}
    policy |= {"speedup": {"fixed": figure, "measured": figure}, "measured_over_better": figure}
    written = publisher.policies_table({**told, "rows": [policy]})
    assert "| t | 0 | 8 | lookup | 2.00× | 2.00× | 2.00 [1.50, 2.50] of fixed |" in written


def test_the_readme_names_every_machine_that_figures_come_from_and_says_which_are_missing() -> None:
    folders = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert folders == {"amd-epyc-2-cores"}, "figures of another machine: the README's limits must name it"
    assert "two CPU cores (AMD EPYC)" in README and "No GPU has been measured yet." in README


def test_publishing_renews_a_marked_block_and_refuses_a_page_without_it() -> None:
    publisher = _publisher()
    page = f"above\n{publisher.block('table', 'old')}\nbelow\n"
    assert publisher.renewed(page, "table", "new") == f"above\n{publisher.block('table', 'new')}\nbelow\n"
    with pytest.raises(ValueError, match="has 0 blocks between the marks of 'headline': give it one"):
        publisher.renewed(page, "headline", "new")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_name_that_a_page_points_to_exists(page: str) -> None:
    path = ROOT / page
    text = path.read_text()
    links = [path.parent / link for link in re.findall(r"\]\((?!http)([^)]+)\)", text)]
    paths = [ROOT / found for found in re.findall(r"`((?:decoding|trainer|scripts|recipes|docs)/[\w./-]*)`", text)]
    assert len(links) + len(paths) >= PAGES[page]
    assert [found for found in (*links, *paths) if not found.exists()] == []
    dotted = re.findall(r"`((?:decoding|trainer)(?:\.\w+)+)`", text)
    assert [name for name in dotted if not _exists(name)] == []


def test_every_page_is_checked() -> None:
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= PAGES.keys()


def _exists(dotted: str) -> bool:
    """True for a module, and for a name that a module's file defines."""
    *parents, name = dotted.split(".")
    for module in (ROOT.joinpath(*parents, name), ROOT.joinpath(*parents)):
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                own = module.name == name
                return own or re.search(rf"^(?:def|class) {name}\b|^{name}\b.*=", file.read_text(), re.M) is not None
    return False
