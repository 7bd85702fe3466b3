"""Whole training runs as users start them: launched, killed, resumed, distributed and tracked;
then the results decode.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from whole_runs import (
    DEADLINE,
    DIRECT,
    ONE_PROCESS,
    ROOT,
    STEPS,
    TWO_PROCESSES,
    checkpoint_steps,
    environment,
    finish,
    losses,
    metrics,
    provenance,
    run,
    running,
    steps_done,
    wait_until,
    write_recipe,
    write_workshop,
)

from trainer.terminal.exit_codes import ExitCode


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def medusa_run(workshop: Path) -> Path:
    """Train heads without interruption in one process."""
    output = workshop / "straight"
    said = run([*DIRECT, write_recipe(workshop, "medusa", output)], workshop)
    assert f"finished: {output / 'final'}" in said
    return output


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGTERM, ExitCode.TERMINATED), (signal.SIGINT, ExitCode.STOPPED)])
def test_a_signal_to_stop_saves_and_exits_with_its_code_and_one_line(
    workshop: Path, stop: signal.Signals, code: ExitCode
) -> None:
    output = workshop / f"stopped-{stop.name}"
    recipe = write_recipe(workshop, "medusa", output, steps=100_000)
    with running([*DIRECT, recipe, "checkpoint.every=100000"], workshop) as process:
        wait_until(lambda: steps_done(output) >= 3, process)
        process.send_signal(stop)
        _, said = process.communicate(timeout=DEADLINE)
    assert process.returncode == code
    (step,) = checkpoint_steps(output)
    last = said.strip().splitlines()[-1]
    assert "\ntiny medusa: medusa for " in said and "Traceback" not in said
    expected = f"stopped at step {step} of 100000; the state is saved: start the same command again to resume"
    assert last == expected and steps_done(output) == step


def test_two_processes_train_as_one_and_stop_and_resume_together(workshop: Path, medusa_run: Path) -> None:
    """Each step has eight sequences, two micro batches of two in each process.

    After a SIGTERM in the middle, the run resumes to its end.
    """
    output = workshop / "distributed"
    recipe = write_recipe(workshop, "medusa", output)
    command = [*TWO_PROCESSES, recipe, "training.micro_batch_size=2"]
    with running([*command, "evaluation.every=8", "evaluation.max_new_tokens=90"], workshop) as process:
        wait_until(lambda: steps_done(output) >= 8, process)
        process.send_signal(signal.SIGTERM)  # the launcher forwards it to both processes
        process.communicate(timeout=DEADLINE)
    assert process.returncode != 0
    stopped_at = checkpoint_steps(output)[-1]
    assert 8 <= stopped_at == steps_done(output) < STEPS and not (output / "final").exists()
    run(command, workshop)
    assert provenance(output)["num_processes"] == 2 and provenance(output)["steps"] == STEPS
    together = losses(output)
    assert list(together) == list(range(1, STEPS + 1))
    assert together == pytest.approx(losses(medusa_run), abs=1e-4)
    assert metrics(output)[-1]["tokens"] == metrics(medusa_run)[-1]["tokens"]
    assert len([line for line in metrics(output) if "loss" in line]) == STEPS  # one process writes


@contextmanager
def trap() -> Iterator[tuple[str, list[bytes]]]:
    """Start a server that replaces the whole network and records who connects."""
    calls: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                calls.append(connection.recv(200))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}", calls
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5)


TRACKIO = """
class Run:
    name = "tiny medusa"
    def log(self, values, step=None): print("trackio", step, sorted(values), flush=True)
    def finish(self): pass

class config:
    @staticmethod
    def update(values, allow_val_change): print("trackio has", values["training.steps"], values["name"], flush=True)

def init(project, name, resume): return print("trackio", project, name, flush=True) or Run()
"""


def test_figures_go_to_each_tracker_that_is_installed_and_wandb_without_a_key_calls_nobody(
    workshop: Path, tmp_path: Path
) -> None:
    """A stand-in replaces trackio, and mlflow is missing."""
    pytest.importorskip("wandb", reason="the tracker is an optional extra")
    (tmp_path / "trackio-1.0.dist-info").mkdir()
    (tmp_path / "trackio-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trackio\nVersion: 1.0\n")
    (tmp_path / "trackio.py").write_text(TRACKIO)
    marker = "s3cret-m4rker-that-must-not-leak"
    output = tmp_path / "tracked"
    recipe = write_recipe(workshop, "medusa", output, steps=3)
    with trap() as (address, calls):
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), address)
        nowhere = {"HF_ENDPOINT": address, "WANDB_BASE_URL": address, "HF_HUB_OFFLINE": None, "NO_PROXY": None}
        home = {"HOME": str(tmp_path / "home"), "HF_TOKEN": marker}
        home["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))
        done = finish([*DIRECT, recipe, "tracking=[trackio,mlflow,wandb]"], tmp_path, **proxies, **nowhere, **home)
        assert done.returncode == 0 and calls == [], done.stderr
        asked = finish([*DIRECT, recipe, "target=org/none"], tmp_path, **proxies, **nowhere, **home)
        assert asked.returncode == 2 and calls  # the trap does record connections
    assert "mlflow is not installed, so it gets no figures: pip install mlflow" in done.stderr
    assert done.stdout.startswith("trackio headstart tiny medusa\ntrackio has 3 tiny medusa\ntrackio 1 ['grad_norm'")
    assert "trackio 3 ['heldout/acceptance_1'" in done.stdout
    (offline,) = tmp_path.glob("**/offline-run-*")
    (written,) = offline.glob("*.wandb")
    assert written.stat().st_size > 1000 and b"loss/head_0" in written.read_bytes()
    assert list(losses(output)) == [1, 2, 3] and marker not in done.stdout + done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and marker.encode() in path.read_bytes()]


def test_a_sigterm_to_the_accelerate_launcher_stops_the_trainer_too_with_its_state_saved(workshop: Path) -> None:
    output = workshop / "orphan"
    command = [*ONE_PROCESS, write_recipe(workshop, "medusa", output), "training.steps=4000", "checkpoint.every=4000"]
    with running(command, workshop) as process:
        wait_until(lambda: steps_done(output) >= 3, process)
        process.terminate()  # the launcher dies from it and does not forward it
        process.wait(timeout=DEADLINE)
        deadline = time.monotonic() + DEADLINE
        while not checkpoint_steps(output):
            assert time.monotonic() < deadline, "the trainer went on without its launcher"
            time.sleep(0.01)
    assert checkpoint_steps(output)[-1] < 4000


def test_what_a_gpu_is_asked_to_kill_and_resume_runs_on_a_cpu_too(tmp_path: Path) -> None:
    script = ROOT / "tests" / "gpu" / "killed_and_resumed.py"
    assert run([sys.executable, str(script), str(tmp_path)], tmp_path).count("resumed, exported and decoded") == 3
