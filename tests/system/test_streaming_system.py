"""A run on a streamed set, started as users start it: two processes fetch it once, and a killed run ends with equal
weights.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_hub import FakeHub, Repository, serve
from safetensors.torch import load_file
from whole_runs import (
    TWO_PROCESSES,
    checkpoint_steps,
    kill_group,
    losses,
    run,
    running,
    steps_done,
    wait_until,
    write_recipe,
    write_workshop,
)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve() as fake:
        yield fake


def test_two_processes_fetch_a_set_once_and_go_on_after_kill_9_to_the_weights_of_a_run_on_its_files(
    hub: FakeHub, tmp_path: Path
) -> None:
    workshop = write_workshop(tmp_path / "workshop")
    lines = (workshop / "train.jsonl").read_bytes().splitlines(keepends=True)
    files = {f"data/train-{shard}-of-3.jsonl": b"".join(lines[5 * shard :][:5]) for shard in range(3)}
    hub.repositories["datasets/zoe/set"] = Repository("public")
    hub.repositories["datasets/zoe/set"].commit(files)
    home = tmp_path / "home"
    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": None, "HF_HUB_DISABLE_XET": "1"}
    settings["HEADSTART_CACHE"] = str(home / "headstart")
    small = ["training.micro_batch_size=4"]
    recipe = write_recipe(workshop, "medusa", workshop / "files", steps=12)
    run([*TWO_PROCESSES, recipe, *small], workshop)

    streamed = write_recipe(workshop, "medusa", workshop / "streamed", steps=12)
    command = [*TWO_PROCESSES, streamed, *small, "data.train=zoe/set", "data.streaming=true"]
    slow = ["evaluation.every=7", "evaluation.max_new_tokens=90"]
    with running([*command, *slow], workshop, **settings) as process:
        wait_until(lambda: steps_done(workshop / "streamed") >= 7, process)
        kill_group(process)
    assert checkpoint_steps(workshop / "streamed")[-1] == 5
    shards = [path for path in hub.asked("/data/") if path.startswith("GET")]
    first = [path for path in shards if path.endswith("train-0-of-3.jsonl")]
    assert len(shards) == len(first) + 2 and len(first) == 2, "one of the processes reads; the first shard's kind, too"
    hub.requests.clear()
    run(command, workshop, **settings)
    assert {*hub.asked("zoe")} == {"GET /api/datasets/zoe/set"}, "the second start asks for the commit alone"
    assert losses(workshop / "streamed") == losses(workshop / "files")
    ours, theirs = (load_file(workshop / name / "final" / "model.safetensors") for name in ("streamed", "files"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    kept = [path for path in home.rglob("*") if path.is_file() and path.stat().st_size]
    assert sorted(path.name for path in kept) == ["SHA256SUMS", "account.json", "sequences.arrow"]
