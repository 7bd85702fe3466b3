"""Answers from a real server, requested as a user would."""

import json
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_training import tiny_tokenizer, write_rows
from whole_runs import HEADSTART, run, running, wait_until

SERVE = str(Path(sys.executable).with_name("transformers"))
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} "
    "{% if message['role'] == 'assistant' %}<eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
PROMPTS: list[str | list[str]] = [["a b", "c"], "d e f", "g h", ["i", "j k"], "l"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random target with a chat template, whose texts depend on their prompts."""
    folder = tmp_path_factory.mktemp("desk")
    tiny_model(seed=3, eos_token_id=1).save_pretrained(folder / "chat")
    tiny_tokenizer(CHAT_TEMPLATE).save_pretrained(folder / "chat")
    write_rows(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    return folder


def regenerate(desk: Path, *words: str) -> str:
    return run([*HEADSTART, "regenerate", *words], desk)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def served(desk: Path, model: str) -> Iterator[str]:
    """Run `transformers serve` with one model; yield the base address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [SERVE, "serve", str(desk / model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]

    def is_up() -> bool:
        with suppress(OSError):
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200)
        return False

    with running([*command, "--dtype", "float32"], desk) as process:
        wait_until(is_up, process)
        yield f"http://127.0.0.1:{port}/v1"


def test_a_real_server_and_this_process_give_the_same_greedy_answers(desk: Path) -> None:
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package, reason=f"transformers serve and its client need {package}")
    common = ["--prompts", "prompts.jsonl", "--limit", "8", "--max-new-tokens", "12"]
    regenerate(desk, "--target", "chat", "--dtype", "fp32", "--output", "own.jsonl", *common)
    with served(desk, "chat") as address:
        served_by = ["--endpoint", address, "--model", str(desk / "chat"), "--concurrency", "4"]
        regenerate(desk, *served_by, "--output", "served.jsonl", *common)
    own, other = rows(desk / "own.jsonl"), rows(desk / "served.jsonl")
    for row in own:
        del row["answer_tokens"]  # a server does not report this
    assert other == own
    assert len(own) >= 4 and len({json.dumps(row) for row in own}) == len(own)
