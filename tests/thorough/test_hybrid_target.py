"""The commands as users run them on a hybrid target, and their messages for families that cannot verify drafts."""

import json
import re
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from target_families import family_model
from tiny_models import tiny_model
from tiny_tokenizer import TOOL_TEMPLATE, byte_tokenizer
from typer.testing import CliRunner

from decoding.model.causal_lm import CausalLM
from trainer.cli import app

ANY = Path(__file__).resolve().parents[2] / "recipes" / "any"
DATA = "data.train=rows.jsonl data.heldout=rows.jsonl data.max_length=64 dtype=fp32 name=x"
STEPS = "training.steps=2 training.batch_size=2 training.micro_batch_size=2 evaluation.max_new_tokens=8"
DSPARK = "draft.dspark.mask_token=^ draft.dspark.markov_rank=4"
PROMPTS = "--prompts rows.jsonl --max-new-tokens 8"
FEW = f"{PROMPTS} --limit 2 --dtype fp32"
BOTH = "--drafter heads:heads/final --drafter dspark:dspark/final"
THINKING = "{% if enable_thinking %}think;{% endif %}"
RUNS = (
    (f"train {ANY}/markov.yaml output=heads features.folder=states", "finished: heads/final"),
    (f"train {ANY}/draft.yaml output=own", "qwen3_next keeps a recurrent state, which can follow only one path, so"),
    (f"train {ANY}/draft.yaml output=draft draft.init.from_model=small", "draft/final"),
    (f"train {ANY}/dspark.yaml output=dspark {DSPARK}", "dspark/final"),
    (f"train {ANY}/medusa2.yaml output=two", "qwen3_next does not support adapters"),
    (f"train {ANY}/medusa1.yaml output=dry --dry-run", "states of one decoded text, stored twice"),
    (
        f"evaluate {FEW} --drafter heads:heads/final,tree=0/1/0.0 --drafter draft:draft/final --output measured",
        "greedy texts are identical",
    ),
    (f"plan {FEW} --batch-size 1 {BOTH} --output plan", "written: plan/plan.json"),
    (f"verify {PROMPTS} --draws 40 --drafter dspark:dspark/final --dtype fp32", "PASS: all"),
    (f"regenerate {FEW} --drafter heads:heads/final,tree=0/1/0.0/0.1/0.0.0 --output new.jsonl", "written: new.jsonl"),
    ("data inspect rows.jsonl data.chat_template_kwargs.enable_thinking=true", "think;user:0. How are you?"),
    ("generate --prompt Hi --drafter dspark:dspark/final --max-new-tokens 8", "(lossless)"),
    ("chat --drafter lookup --max-new-tokens 8", "(lossless)"),
    ("export dspark/final shown --format dspark", "2/2 texts are equal"),
)


def run(words: str, **options: str) -> str:
    AcceleratorState._reset_state(True)
    given = [f"target=hybrid {DATA} {STEPS}" if words.startswith("train") else "--target hybrid"]
    result = CliRunner().invoke(app, " ".join([words, *given]).split(), **options)
    assert "internal error" not in result.output, result.output
    return " ".join(result.output.split())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"prompt": f"{i}. How are you?", "answer": "I am well, thank you."} for i in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_model(vocab=128, num_hidden_layers=1).save_pretrained("small")
    byte_tokenizer(TOOL_TEMPLATE).save_pretrained("small")
    return tmp_path


def write(family: str) -> None:
    family_model(family, vocab=128).save_pretrained("hybrid")
    byte_tokenizer(THINKING + TOOL_TEMPLATE).save_pretrained("hybrid")


def test_every_command_runs_on_a_hybrid_or_says_what_it_can_be_used_for(here: Path) -> None:
    write("qwen3_next")
    for words, wanted in RUNS:
        assert wanted in (said := run(words, input="Hi\n")), f"{words}: {said[-2000:]}"
    rows = json.loads(Path("measured/report.json").read_text())["rows"]
    heads = next(row for row in rows if row["artefact"] == "heads")
    assert (heads["method"], heads["shape"], heads["rule"]) == ("markov, chain of 2", "chain", "greedy")
    run(f'regenerate {FEW} --chat-template-kwargs {{"enable_thinking":true}} --output thought.jsonl')
    plain, thought = (Path(f"{name}.jsonl").read_text() for name in ("new", "thought"))
    assert plain != thought and thought
    (about,) = here.glob("thought.jsonl.*")
    assert json.loads(about.read_text())["settings"]["chat_template_kwargs"] == '{"enable_thinking":true}'


@pytest.mark.parametrize(("family", "recipes"), [("qwen3_next", ["medusa1", "dspark"]), ("rwkv", [])])
def test_the_doctor_suggests_no_recipe_that_refuses_the_target(here: Path, family: str, recipes: list[str]) -> None:
    write(family)
    assert re.findall(r"recipes/any/(\w+)\.yaml", run("doctor --no-decode")) == recipes


def test_a_family_that_verifies_no_draft_is_trained_on_without_evaluations(here: Path) -> None:
    write("rwkv")
    said = run(f"train {ANY}/medusa1.yaml output=heads")
    assert "rwkv keeps its state outside" in said and "set evaluation.prompts=0 to train anyway" in said
    assert "heads/final" in run(f"train {ANY}/medusa1.yaml output=heads evaluation.prompts=0")
    assert "rwkv keeps a recurrent state" in run(
        f"train {ANY}/draft.yaml output=own evaluation.prompts=0 evaluation.keep=last"
    )
    assert "it cannot verify drafts: decode and measure the rwkv model" in run(
        f"evaluate {FEW} --drafter lookup --output out"
    )
    assert "written" in run(f"evaluate {FEW} --output out")


@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        # Delta rule: 4 heads of 8 x 8, and 4 places of (2 + 2) x 8 + 4 x 8 channels. Mamba-2: 8 heads of 8 x 8, and 4
        # places of 64 + 2 x 8 channels, in each of two layers. A convolution of 3 places of 32 channels.
        ("qwen3_next", 4 * 8 * 8 + 4 * 64),
        ("falcon_h1", 2 * (8 * 8 * 8 + 4 * 80)),
        ("lfm2", 3 * 32),
        ("llama4_text", 0),
    ],
)
def test_the_bytes_of_a_text_s_states_are_those_of_its_layers(family: str, numbers: int) -> None:
    assert CausalLM(family_model(family)).state_bytes() == 4 * numbers
