"""The command line: what it prints, its exit codes, its one-line errors."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from typer.main import get_command
from typer.testing import CliRunner

from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.measure.questions import read_prompts
from decoding.model.fingerprint import prompts_fingerprint, stored_fingerprint, tokenizer_fingerprint
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import load_tokenizer
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import SAMPLED_VERIFY
from trainer.cli import app
from trainer.commands.artefact_options import ExportOptions, ImportOptions, PushOptions, ServeCommandOptions
from trainer.commands.guarded import guarded
from trainer.commands.options import ChatOptions, CompareOptions, EvaluateOptions, GenerateOptions, PlanOptions
from trainer.commands.proof_options import DiagnoseOptions, DoctorOptions, VerifyOptions
from trainer.commands.training_options import RealignOptions, RegenerateOptions
from trainer.terminal.exit_codes import ExitCode

CLI = CliRunner()
README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a draft, heads, and two prompts, on disk."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("target", 0), ("draft", 1)):
        tiny_model(vocab=128, seed=seed, max_position_embeddings=256).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    MedusaHeads.for_target(tiny_model(vocab=128), MedusaConfig(16, 128)).save_pretrained(folder / "heads")
    (folder / "prompts.jsonl").write_text('{"prompt": "def f(x):"}\n{"prompt": "import "}\n')
    return folder


def run(*arguments: str) -> tuple[int, str]:
    result = CLI.invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("speculator", ["draft:PATH/draft", "PATH/heads", "lookup", None])
def test_generate_ends_with_what_speculation_gained(models: Path, speculator: str | None) -> None:
    paths = ["--drafter", speculator.replace("PATH", str(models))] if speculator else []
    code, output = run(
        "generate", "--target", str(models / "target"), *paths, "--prompt", "def f", "--max-new-tokens", "12",
        "--dtype", "fp32",
    )  # fmt: skip
    assert code == 0
    assert "tokens per target pass" in output and "tokens/s" in output
    assert ("× plain decoding" in output) == bool(speculator)
    assert "lossless" in output


def test_generate_writes_the_same_greedy_text_with_and_without_a_draft(models: Path) -> None:
    base = ["generate", "--target", str(models / "target"), "--prompt", "class A", "--max-new-tokens", "16"]
    base += ["--dtype", "fp32", "--no-gain"]
    _, plain = run(*base)
    _, speculated = run(*base, "--drafter", f"draft:{models}/draft")
    assert plain.split(" plain decoding (")[0] == speculated.split(" draft model, 4 tokens (")[0]


def test_a_target_spread_by_device_map_writes_the_same_text(models: Path) -> None:
    """On a machine without GPUs there is nothing to spread over."""
    base = ["generate", "--target", str(models / "target"), "--drafter", str(models / "draft"), "--prompt", "class A"]
    base += ["--max-new-tokens", "16", "--dtype", "fp32", "--no-gain"]
    texts = [run(*base, *more)[1].split(" draft model, 4 tokens")[0] for more in ([], ["--device-map", "auto"])]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("command", ["generate", "evaluate", "regenerate", "realign"])
def test_every_command_that_decodes_hands_the_device_map_on(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def load(*given: Any, device_map: str | None = None, **named: Any) -> Any:
        raise ValueError(f"asked to spread by {device_map}")

    monkeypatch.setattr("trainer.commands.target.load_model", load)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "def f{i}"}}\n' for i in range(4)))
    options = {
        "generate": ["--prompt", "ab"],
        "evaluate": ["--prompts", str(prompts), "--output", str(tmp_path / "out")],
        "regenerate": ["--prompts", str(prompts), "--output", str(tmp_path / "out.jsonl")],
        "realign": ["--prompts", str(prompts), "--output", str(tmp_path / "out"), "--draft", str(models / "draft")],
    }
    code, output = run(command, "--target", str(models / "target"), "--device-map", "auto", *options[command])
    assert (code, output) == (2, "error: asked to spread by auto")


@pytest.mark.parametrize("command", ["generate", "evaluate", "regenerate", "realign", "plan", "verify", "diagnose"])
def test_every_command_that_decodes_says_where_graphs_cannot_be(models: Path, tmp_path: Path, command: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "def f{i}"}}\n' for i in range(4)))
    given, output = ["--prompts", str(prompts)], ["--output", str(tmp_path / "out")]
    options = {
        "generate": ["--prompt", "ab"],
        "evaluate": [*given, *output],
        "regenerate": [*given, "--output", str(tmp_path / "out.jsonl")],
        "realign": [*given, *output, "--draft", str(models / "draft")],
        "plan": [*given, *output, "--drafter", "lookup"],
        "verify": given,
        "diagnose": [*given, f"draft:{models / 'draft'}", "--endpoint", "http://localhost:1/v1", "--model", "m"],
    }
    code, told = run(command, "--target", str(models / "target"), "--static", "graphs", *options[command])
    assert code == 2
    assert told.startswith("error: static is graphs, which only a CUDA device records, and the model runs on cpu: give")


def test_steps_of_fixed_shapes_write_the_same_text(models: Path) -> None:
    base = ["generate", "--target", str(models / "target"), "--drafter", f"draft:{models}/draft", "--prompt", "class A"]
    base += ["--max-new-tokens", "16", "--dtype", "fp32", "--no-gain"]
    texts = [run(*base, "--static", mode)[1].split(" draft model, 4 tokens")[0] for mode in ("off", "eager", "auto")]
    assert texts[0] == texts[1] == texts[2]


def test_typical_acceptance_is_called_lossy(models: Path) -> None:
    _, output = run(
        "generate", "--target", str(models / "target"), "--drafter", "lookup", "--rule", "typical",
        "--temperature", "1", "--prompt", "ab", "--max-new-tokens", "8",
    )  # fmt: skip
    assert "prompt lookup (lossy)" in output


def test_a_draft_tree_takes_the_place_of_the_chain(models: Path) -> None:
    _, output = run(
        "generate", "--target", str(models / "target"), "--drafter",
        f"draft-tree:{models}/draft,depth=3,width=2,nodes=7", "--prompt", "ab", "--max-new-tokens", "8", "--policy",
        "heuristic",
    )  # fmt: skip
    assert "draft model, tree of 6 (lossless)" in output


def test_every_option_reaches_the_decoder(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[DecodingConfig, str]] = []
    steps = Engine.steps

    def spy(engine: Engine, prompt: Any, config: DecodingConfig) -> Iterator[Step]:
        calls.append((config, engine.policy.name))
        return steps(engine, prompt, config)

    monkeypatch.setattr(Engine, "steps", spy)
    run(
        "generate", "--target", str(models / "target"), "--drafter", "lookup", "--prompt", "ab", "--no-gain",
        "--policy", "heuristic", "--rule", "sampled-verify", "--max-new-tokens", "5", "--temperature", "0.7", "--top-k",
        "9", "--top-p", "0.8", "--min-p", "0.1", "--typical-p", "0.9", "--repetition-penalty", "1.2",
        "--presence-penalty", "0.3", "--frequency-penalty", "0.4", "--stop", "a", "--stop", "b", "--seed", "3",
    )  # fmt: skip
    sampling = SamplingConfig(0.7, 9, 0.8, 0.1, 0.9, 1.2, 0.3, 0.4)
    assert calls == [(DecodingConfig(5, sampling, SAMPLED_VERIFY, (0,), ("a", "b"), seed=3), "heuristic")]


def test_the_warm_up_of_eight_tokens_is_not_what_a_policy_learns_from(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, str]] = []
    steps = Engine.steps

    def spy(engine: Engine, prompt: Any, config: DecodingConfig) -> Iterator[Step]:
        calls.append((config.max_new_tokens, engine.policy.name))
        return steps(engine, prompt, config)

    monkeypatch.setattr(Engine, "steps", spy)
    run(
        "generate", "--target", str(models / "target"), "--drafter", "lookup", "--prompt", "ab", "--policy",
        "heuristic", "--max-new-tokens", "9",
    )  # fmt: skip
    # Checked before anything is measured; warmed up; measured without the drafter; and written.
    assert calls == [(9, "heuristic"), (8, "fixed"), (9, "heuristic"), (9, "heuristic")]


OPTIONS = [
    ChatOptions,
    CompareOptions,
    DiagnoseOptions,
    DoctorOptions,
    EvaluateOptions,
    ExportOptions,
    GenerateOptions,
    ImportOptions,
    PlanOptions,
    PushOptions,
    RealignOptions,
    RegenerateOptions,
    ServeCommandOptions,
    VerifyOptions,
]


@pytest.mark.parametrize("options", OPTIONS)
def test_defaults_and_help_of_the_options_stand_in_one_place(options: type) -> None:
    name = re.sub("(?<=[a-z])(?=[A-Z])", "-", options.__name__.removesuffix("Options")).lower()
    command = get_command(app).commands[name]  # type: ignore[attr-defined]  # a group's
    shown = {option.name: (option.default, option.required) for option in command.params if option.name != "help"}
    assert shown.keys() == {field.name for field in fields(options)}
    for field in fields(options):
        required = field.default is MISSING
        assert shown[field.name] == (None if required else field.default, required)
    assert all(option.help for option in command.params)


def test_a_report_says_what_it_measured_and_how_and_no_path_or_secret(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "ghp_" + 30 * "a"
    words = [
        "evaluate", "--target", str(models / "target"), "--drafter", f"heads:{models}/heads", "--prompts",
        str(models / "prompts.jsonl"), "--limit", "2", "--max-new-tokens", "4", "--dtype", "fp32", "--output",
        str(tmp_path), "--settings", "greedy", "--title", f"of {models}/target with {secret}",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["/opt/zoe/bin/headstart", *words])
    code, _ = run(*words)
    assert code == 0
    written = (tmp_path / "report.json").read_text()
    report = json.loads(written)
    tokenizer = load_tokenizer(str(models / "target"))
    assert report["fingerprints"] == {
        "target": stored_fingerprint(models / "target"),
        "heads:heads": stored_fingerprint(models / "heads"),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "prompts": prompts_fingerprint(read_prompts(models / "prompts.jsonl", tokenizer, 2, None, None)),
    }
    assert report["command"].startswith(
        "headstart evaluate --target target --drafter heads:heads --prompts prompts.jsonl "
    )
    assert report["settings"]["policies"] == ["fixed"]  # a default, in words
    assert report["settings"]["max_new_tokens"] == 4 and report["settings"]["dtype"] == "fp32"
    page = (tmp_path / "report.html").read_text()
    for leak in (secret, str(models), str(tmp_path), "zoe"):
        assert leak not in written and leak not in page
    assert report["command"].replace("'", "&#39;") in page and report["fingerprints"]["heads:heads"] in page


ERRORS = {
    "a target that is not there": (
        ["generate", "--target", "./nowhere", "--prompt", "a"],
        "there is no folder ./nowhere",
    ),
    "a prompt longer than the context": (
        ["generate", "--target", "TARGET", "--prompt", "a" * 300],
        "a prompt of 300 tokens and 128 new ones make 428, but the target's context holds 256",
    ),
    "a negative temperature": (
        ["generate", "--target", "TARGET", "--prompt", "a", "--temperature", "-1"],
        "temperature is -1.0: give 0 for greedy decoding, or a positive number",
    ),
    "a rule that is none": (
        ["generate", "--target", "TARGET", "--prompt", "a", "--rule", "strict"],
        "no rule is called 'strict': choose one of greedy, token",
    ),
    "a rule for sampling only": (
        ["generate", "--target", "TARGET", "--prompt", "a", "--rule", "block"],
        "the block verification rule needs a temperature above 0",
    ),
    "a policy that is none": (
        ["generate", "--target", "TARGET", "--prompt", "a", "--policy", "bold"],
        "no policy is called 'bold': choose one of fixed, heuristic",
    ),
    "a drafter that is none": (
        ["generate", "--target", "TARGET", "--drafter", "lokup", "--prompt", "a"],
        "no drafter is called 'lokup': choose one of heads, draft, draft-tree, parallel, lookup, lookahead, cascade",
    ),
    "an option that a drafter has not": (
        ["generate", "--target", "TARGET", "--drafter", "draft-tree:x,deep=3", "--prompt", "a"],
        "the drafter draft-tree has no option 'deep': choose among depth, width, nodes",
    ),
    "a drafter without its weights": (
        ["generate", "--target", "TARGET", "--drafter", "draft-tree:depth=3", "--prompt", "a"],
        "'draft-tree:depth=3' lacks the path of the weights: give draft-tree:PATH",
    ),
    "a recipe that is not there": (["train", "nowhere.yaml"], "there is no recipe nowhere.yaml"),
    "an export of nothing": (["export", "nowhere", "out", "--format", "vllm"], "nowhere"),
    "a push of nothing": (["push", "nowhere", "org/name"], "nowhere"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_one_line_and_exit_code_two(models: Path, case: str) -> None:
    arguments, complaint = ERRORS[case]
    places = {"TARGET": str(models / "target"), "HEADS": str(models / "heads")}
    result = CLI.invoke(app, [places.get(word, word) for word in arguments])
    assert result.exit_code == ExitCode.BAD_INPUT
    assert complaint in " ".join(result.output.split())
    assert len(result.output.strip().splitlines()) == 1
    assert "Traceback" not in result.output


def test_debug_shows_the_traceback(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_DEBUG", "0")
    result = CLI.invoke(app, ["--debug", "generate", "--target", "./nowhere", "--prompt", "a"])
    assert result.exit_code == ExitCode.BAD_INPUT and "Traceback" in result.output


def test_no_secret_and_no_control_character_of_a_file_reaches_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise ValueError("no https://u:hf_0123456789abcdefABCD@host/x?token=swordfish in \x1b[31m\u202ex")

    assert guarded(work) == 2
    assert capsys.readouterr().err == "error: no https://(withheld)@host/x?token=(withheld) in [31mx\n"
