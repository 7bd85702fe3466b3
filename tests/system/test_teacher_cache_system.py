"""A teacher cache as a user makes it: killed in the middle and gone on with, or written by two processes."""

from pathlib import Path

import yaml
from tiny_models import counting_model
from tiny_training import counting_text, recipe_content, tiny_tokenizer, write_rows
from whole_runs import HEADSTART, TWO_PROCESSES, run, running, wait_until

ROWS, LENGTH = 3000, 24
SHARDS = 69  # 44 rows of 23 positions in a shard of 1,024


def write_recipe(workshop: Path, name: str) -> str:
    content = recipe_content(workshop, "draft", micro_batch_size=4)
    content["output"] = str(workshop / f"{name}-run")
    content["draft"] = {"teacher": {"folder": str(workshop / name), "top_k": 3, "tail": 2, "shard_tokens": 1024}}
    path = workshop / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def shards_of(folder: Path) -> dict[str, bytes]:
    """The shards that are finished, and their seals."""
    return {path.name: path.read_bytes() for seal in folder.glob("shard-*.sha256") for path in _with_shard(seal)}


def _with_shard(seal: Path) -> tuple[Path, Path]:
    return seal, seal.with_suffix("")


def test_a_killed_run_goes_on_and_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    counting_model().save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    write_rows(tmp_path / "train.jsonl", [{"text": counting_text(row, LENGTH)} for row in range(ROWS)])
    write_rows(tmp_path / "heldout.jsonl", [{"text": "a b c d e f g h"}])
    killed = tmp_path / "killed"
    command = [*HEADSTART, "train", write_recipe(tmp_path, "killed")]
    with running(command, tmp_path) as process:
        wait_until(lambda: len(shards_of(killed)) >= 6, process)
        process.kill()
        process.wait()
    before = shards_of(killed)
    assert 6 <= len(before) < 2 * SHARDS
    said = run(command, tmp_path)
    assert f"teacher logits: {ROWS * (LENGTH - 1):,} positions in" in said and "positions/s" in said

    run([*TWO_PROCESSES, write_recipe(tmp_path, "two")], tmp_path)
    whole = shards_of(killed)
    assert len(whole) == 2 * SHARDS and before.items() < whole.items()
    assert whole == shards_of(tmp_path / "two")
