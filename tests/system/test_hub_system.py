"""The page on the Hub: its commands, run as users run them, with the variables that the Hub's client reads itself."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from fake_hub import TOKEN, folder_on, serve
from test_readme import ROOT, commands
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from warm_program import warm_program

from decoding.model.heads import MedusaConfig, MedusaHeads

PAGE = (ROOT / "docs" / "artefacts.md").read_text()


def test_what_is_pushed_is_decoded_with_by_its_revision_online_and_offline(tmp_path: Path) -> None:
    """The second time nothing is asked of the Hub, whatever its branch became."""
    target = tiny_model("llama", vocab=128)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    MedusaHeads.for_target(target, MedusaConfig(16, 128)).save_pretrained(tmp_path / "runs/heads/final")
    push, generate = commands(PAGE.partition("## The Hub")[2].partition("## Imports")[0])

    with serve() as hub:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(tmp_path / "home"),
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        folder_on(hub, "ORG/TARGET", tmp_path / "target")
        tiny = "--max-new-tokens 8 --dtype fp32"
        with warm_program(environment) as warm:
            said = output_of(warm.run(shlex.split(push), tmp_path, 120))
            commit = hub.repositories["ORG/HEADS"].refs["main"]
            assert f"read it as ORG/HEADS@{commit}" in said
            assert set(hub.repositories["ORG/HEADS"].files()) == {"README.md", "config.json", "model.safetensors"}
            first = output_of(warm.run(shlex.split(f"{generate} {tiny}"), tmp_path, 120))
        hub.repositories["ORG/HEADS"].commit({"config.json": b"{}"})
        hub.requests.clear()
        words = shlex.split(f"{generate} {tiny}".replace("@main", f"@{commit}"))
        again = subprocess.run(
            [sys.executable, "-m", "trainer.cli", *words[1:]],
            cwd=tmp_path,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert output_of(again).splitlines()[0] == first.splitlines()[0]
        assert hub.requests == []


def output_of(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the standard output of a command that must have gone well, and kept the token to itself."""
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return done.stdout
