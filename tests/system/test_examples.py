"""The programs in examples/, run as users run them, on a target trained in seconds: each shows what it claims."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from trained_pair import sentences, train_pair
from whole_runs import finish

from decoding import DecodingConfig, Engine, HeadstartModel
from decoding.model.loading import eos_token_ids, load_tokenizer
from decoding.text import stream_pieces

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROMPT = "Ann has 12 apples."
QUICK = [
    "dtype=fp32",
    "training.steps=30",
    "training.batch_size=8",
    "training.micro_batch_size=8",
    "data.max_length=48",
    "evaluation.prompts=1",
    "evaluation.tree_prompts=1",
    "evaluation.prompt_tokens=4",
    "evaluation.max_new_tokens=4",
]


class Desk(NamedTuple):
    """A folder with a trained target, a draft of it and its data, in which the examples run."""

    folder: Path
    target: Path
    draft: Path

    def run(self, name: str, *words: str, **changes: str | None) -> str:
        """Run an example; return what it printed."""
        command = [sys.executable, str(EXAMPLES / name), *words]
        done = finish(command, self.folder, HEADSTART_CACHE=str(self.folder / "cache"), **changes)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    @property
    def recipe(self) -> list[str]:
        """Return overrides for quick training on this desk's target and data."""
        data = [f"data.{name}={self.folder / name}.jsonl" for name in ("train", "heldout")]
        return [f"target={self.target}", *data, *QUICK]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    return Desk(folder, *train_pair(folder))


def figure(pattern: str, text: str) -> float:
    """Return the only figure that matches the group of the pattern."""
    (found,) = re.findall(pattern, text, re.M)
    return float(found)


def test_the_table_of_the_examples_names_each_of_them_with_what_it_prints() -> None:
    table = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert len(files) == 6 and set(re.findall(r"^\| \[`(\w+\.py)`\]", table, re.M)) == files
    for name in files:
        assert f"python examples/{name}" in table and f"python examples/{name}\n" in (EXAMPLES / name).read_text()


def test_decode_writes_the_text_of_generate_and_colours_the_drafted_tokens(desk: Desk) -> None:
    words = ["--target", str(desk.target), "--drafter", f"draft:{desk.draft}", "--prompt", PROMPT]
    words += ["--max-new-tokens", "24"]
    printed = desk.run("decode.py", *words, FORCE_COLOR="1", TERM="xterm", NO_COLOR=None)
    assert "the text of transformers' generate: equal" in printed
    model = HeadstartModel.from_pretrained(str(desk.target), f"draft:{desk.draft}", dtype=torch.float32)
    tokenizer = load_tokenizer(str(desk.target))
    eos = eos_token_ids(model.target.model, tokenizer)
    steps = Engine(model.target, model.drafter).steps(
        tokenizer(PROMPT)["input_ids"], DecodingConfig(24, eos_token_ids=eos)
    )
    pieces = list(stream_pieces(steps, tokenizer, hidden=eos))
    green = re.findall(r"\x1b\[32m(.*?)\x1b\[0m", printed)
    assert green == [piece.text for piece in pieces if piece.drafted] and len(green) > 5
    assert PROMPT + "".join(piece.text for piece in pieces) in re.sub(r"\x1b\[\d+m", "", printed)
    assert "a batch of 3, lossless: " in printed and "per-position acceptance 1: " in printed
    assert "\x1b" not in desk.run("decode.py", *words, FORCE_COLOR=None)


def test_train_heads_trains_heads_that_keep_the_text(desk: Desk) -> None:
    printed = desk.run("train_heads.py", *desk.recipe, "output=heads", "heads.num_heads=2")
    assert "the heads are in heads/final" in printed and (desk.folder / "heads/final/config.json").is_file()
    assert "the same texts: True" in printed
    assert figure(r"^([\d.]+) tokens per target pass; plain decoding writes 1\.00", printed) > 1.2
    assert "head 1: its token was kept in" in printed


def test_train_draft_distils_a_draft_and_measures_its_lengths(desk: Desk) -> None:
    short = desk.folder / "examples" / "train_draft.py"
    short.parent.mkdir()
    (desk.folder / "recipes").symlink_to(ROOT / "recipes")
    short.write_text((EXAMPLES / short.name).read_text().replace("max_new_tokens=64", "max_new_tokens=16"))
    printed = desk.run(str(short), *desk.recipe, "output=drafted")
    assert (desk.folder / "drafted/final/model.safetensors").is_file()
    found = re.findall(r"^(\d) drafted tokens: the same texts, ([\d.]+) tokens per target pass, ", printed, re.M)
    assert [tokens for tokens, _ in found] == ["2", "4", "6"]
    assert all(1 <= float(per_pass) <= int(tokens) + 1 for tokens, per_pass in found)


def test_own_drafter_is_forty_lines_and_drafts_from_its_texts_without_changing_the_answer(desk: Desk) -> None:
    source = (EXAMPLES / "own_drafter.py").read_text()
    _, drafter, _ = re.split(r"^# --- .* -+$", source, flags=re.M)
    assert 20 < sum(bool(line.strip()) for line in drafter.splitlines()) <= 40
    (desk.folder / "known.txt").write_text("\n".join(sentences(300)))
    (desk.folder / "strange.txt").write_text("zyx wvu " * 20)
    words = ["--target", str(desk.target), "--prompt", PROMPT, "--max-new-tokens", "24"]
    printed = {name: desk.run("own_drafter.py", *words, "--corpus", f"{name}.txt") for name in ("known", "strange")}
    per_pass = {}
    for name, text in printed.items():
        assert text.count("lossless: the same text") == 2 and "ANOTHER" not in text
        per_pass[name] = figure(r"T=0, .*text, ([\d.]+) tokens per target pass", text)
    assert per_pass["known"] > 1.5 and per_pass["known"] > per_pass["strange"]


def test_own_rule_proves_one_rule_refutes_its_mistake_and_labels_the_lossy_one(desk: Desk) -> None:
    words = ["--target", str(desk.target), "--drafter", f"draft:{desk.draft},tokens=3", "--prompt", PROMPT]
    mine, careless, lossy, *used = desk.run("own_rule.py", *words, "--max-new-tokens", "24").splitlines()
    assert re.fullmatch(r"my rejection, called lossless: off by [\d.]+e-1\d over 48 drafts, proved lossless", mine)
    assert re.match(r"careless rejection, called lossless: off by 0\.\d over 48 drafts, NOT lossless: ", careless)
    assert re.match(r"among the best 3, called lossy: off by 0\.\d over 288 drafts, NOT lossless: ", lossy)
    labels = [re.sub(r"[\d.]+ tokens", "tokens", line) for line in used]
    assert labels == [
        "the default rule: lossless, tokens per target pass",
        "my rejection: lossless, tokens per target pass",
        "among the best 3: lossy, tokens per target pass",
    ]


def test_own_model_trains_heads_for_a_class_that_transformers_does_not_have(desk: Desk) -> None:
    printed = desk.run("own_model.py", "--steps", "3", "--output", "own", *QUICK[1:], "data.max_rows=4")
    assert (desk.folder / "own/heads/final/config.json").is_file()
    assert "the text of transformers' generate: equal" in printed
    assert figure(r"^([\d.]+) tokens per target pass", printed) >= 1
