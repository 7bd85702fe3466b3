"""`headstart generate` on targets whose texts are known: what goes where, and Ctrl-C."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_cli import models as models
from typer.testing import CliRunner, Result
from writing_models import LINE, write_alphabet

from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import ModelOutput
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import RULES
from trainer.cli import app
from trainer.terminal.exit_codes import ExitCode

TEXT = f"{LINE}\x1b{LINE}"[:40]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_alphabet(tmp_path_factory.mktemp("alphabet"))


def generate(target: Path, *more: str) -> Result:
    words = ["generate", "--target", str(target), "--dtype", "fp32", "--prompt", "Go", "--max-new-tokens", "40", *more]
    return CliRunner().invoke(app, words)


def test_standard_output_holds_the_text_alone_as_the_model_wrote_it(target: Path) -> None:
    for more in ([], ["--drafter", "lookup"]):
        result = generate(target, *more)
        assert result.exit_code == 0 and result.stdout == f"{TEXT}\n"
        assert "tokens per target pass" in result.stderr and "(lossless)" in result.stderr


@pytest.mark.parametrize("drafter", ["draft:PATH/draft", "PATH/heads", "draft-tree:PATH/draft,depth=3,width=2,nodes=7"])
def test_every_kind_of_weights_writes_the_greedy_text(models: Path, drafter: str) -> None:
    words = ["generate", "--target", str(models / "target"), "--prompt", "class A", "--max-new-tokens", "16"]
    words += ["--dtype", "fp32"]
    plain, drafted = (
        CliRunner().invoke(app, [*words, *more]) for more in ([], ["--drafter", drafter.replace("PATH", str(models))])
    )
    assert plain.exit_code == drafted.exit_code == 0 and plain.stdout == drafted.stdout


def test_every_option_reaches_the_decoder(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[DecodingConfig] = []
    steps = Engine.steps

    def spy(engine: Engine, prompt: Sequence[int], config: DecodingConfig) -> Iterator[Step]:
        configs.append(config)
        return steps(engine, prompt, config)

    monkeypatch.setattr(Engine, "steps", spy)
    sampled = ["--rule", "sampled-verify", "--temperature", "0.7", "--seed", "3"]
    generate(target, "--drafter", "lookup", *sampled, "--stop", "1", "--stop", "2")
    own = DecodingConfig(40, SamplingConfig(0.7), RULES["sampled-verify"], (0,), ("1", "2"), seed=3)
    assert configs == [own]


def test_ctrl_c_ends_the_text_and_its_figures_are_still_printed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes inside a pass; nothing is decoded after that pass."""
    verify, passes = CausalLM.verify, list[int]()

    def interrupted(*given: Any, **named: Any) -> ModelOutput:
        passes.append(len(passes))
        if len(passes) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return verify(*given, **named)

    monkeypatch.setattr(CausalLM, "verify", interrupted)
    result = generate(target, "--drafter", "lookup")
    assert result.exit_code == ExitCode.STOPPED and len(passes) == 4
    assert LINE[:4] in result.stdout and LINE[:20] not in result.stdout
    assert "prompt lookup (lossless): " in result.stderr
