"""The wheel works in an environment without this repository: the command runs, and training works."""

import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from whole_runs import DEADLINE, ROOT, environment, write_recipe, write_workshop

FILES = ("pyproject.toml", "README.md", "LICENSE", "decoding", "trainer")


@pytest.fixture(scope="module")
def headstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in a new environment, which uses the other packages of this environment but not its
    headstart.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in FILES:  # not built in place, because setuptools leaves a folder behind
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True, timeout=DEADLINE)
    (wheel,) = folder.glob("headstart-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True, timeout=DEADLINE)
    python = folder / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True, timeout=DEADLINE)
    (packages,) = (folder / "env" / "lib").glob("python3*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env" / "bin" / "headstart"


def finish(folder: Path, *command: str | Path) -> str:
    env = environment(PYTHONPATH="")
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_installed_wheel_says_its_version_and_trains_three_steps(headstart: Path, tmp_path: Path) -> None:
    assert finish(tmp_path, headstart, "--version").strip() == f"headstart {metadata.version('headstart')}"
    recipe = write_recipe(write_workshop(tmp_path), "medusa", tmp_path / "run", steps=3)
    assert f"finished: {tmp_path / 'run' / 'final'}" in finish(tmp_path, headstart, "train", recipe)
    code = (
        "import pathlib as p, importlib.util as u; print(*p.Path(u.find_spec('decoding').origin).parent.rglob('*.j2'))"
    )
    templates = finish(tmp_path, headstart.parent / "python", "-c", code).split()
    assert templates and all(path.startswith(str(headstart.parent.parent)) for path in templates)


def test_the_image_installs_the_same_project_with_extras_that_it_has() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    installs = [line for line in lines if "--constraint requirements.lock" in line]
    extras = yaml.safe_load(installs[0].split('".')[1].rstrip('"'))
    known = metadata.metadata("headstart").get_all("Provides-Extra") or []
    assert len(installs) == 2 and installs[0] == installs[1] and set(extras) <= set(known)
