"""Exported drafts are read correctly by a real transformers 4."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from older_readers import DRAFTS, PROBE, VOCABULARY
from tiny_models import full_forward, tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.files.stored import cache_root
from decoding.model.loading import load_tokenizer
from trainer.export.exporter import export
from trainer.files.folders import write_folder

PINNED = ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.0")
TEXT = "a ~b"
SPECIAL = ["~", "^"]
STRIPPED = "llama, llama3"
TOLERANCE = 1e-6
"""Tolerance relative to the largest logit, for models with experts, because the experts' outputs are added in another
order. All other models are equal to the bit.
"""


@pytest.fixture(scope="module")
def version_4() -> Path:
    """Return the folder with the old packages, which is kept from run to run; it is complete or does not exist."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = cache_root() / "-".join([python, *(package.replace("==", "-") for package in PINNED)])

    def install(into: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(into), *PINNED]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"

    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_folder(folder, install)
    return folder


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export every draft of `older_readers`, in folders numbered in their order,
    and one draft without the older keys.
    """
    root, sources = tmp_path_factory.mktemp("drafts"), tmp_path_factory.mktemp("sources")
    for number, (family, changes) in enumerate(DRAFTS.values()):
        source = sources / str(number)
        tiny_model(family, vocab=VOCABULARY, **changes).save_pretrained(source)
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
        tokenizer.save_pretrained(source)
        export(source, root / str(number), "draft")
    shutil.copytree(root / str(list(DRAFTS).index(STRIPPED)), root / "stripped")
    config = json.loads((root / "stripped" / "config.json").read_text())
    older = {key: config.pop(key) for key in ("rope_theta", "rope_scaling")}
    assert older["rope_theta"] == 5e5
    (root / "stripped" / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def read(version_4: Path, drafts: Path) -> dict[str, Any]:
    """Return what `reads_with_version_4` prints; further packages that it needs come from this environment."""
    script = Path(__file__).with_name("reads_with_version_4.py")
    environment = {**os.environ, "PYTHONPATH": str(version_4), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(drafts), json.dumps(PROBE), TEXT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert content["version"] == "4.57.6", "the subprocess runs the old version"
    found: dict[str, Any] = content["read"]
    return found


def test_version_4_reads_every_exported_draft_as_the_same_model_and_tokenizer(
    drafts: Path, read: dict[str, Any]
) -> None:
    assert len(read) == len(DRAFTS) + 1 > 10
    differing = {}
    for number, (name, (family, changes)) in enumerate(DRAFTS.items()):
        logits = full_forward(tiny_model(family, vocab=VOCABULARY, **changes), PROBE)
        found = read[str(number)]
        difference = ((torch.tensor(found["logits"]) - logits).abs().max() / logits.abs().max()).item()
        if difference > (TOLERANCE if "moe" in name else 0):
            differing[name] = difference
        tokenizer = load_tokenizer(str(drafts / str(number)))
        assert found["ids"] == tokenizer(TEXT)["input_ids"] and SPECIAL[0] in found["special"], name
        assert found["special"] == sorted(tokenizer.all_special_tokens), name
    assert not differing


def test_without_the_older_keys_version_4_reads_another_model_in_silence(read: dict[str, Any]) -> None:
    """This is the fault that the exported keys prevent."""
    whole, other = (torch.tensor(read[name]["logits"]) for name in (str(list(DRAFTS).index(STRIPPED)), "stripped"))
    assert (whole - other).abs().max() > 0.1
