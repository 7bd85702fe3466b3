"""`headstart generate` on a target whose text is known: what goes where, the gain, both texts beside each other."""

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from typer.testing import CliRunner, Result
from writing_models import LINE, write_alphabet

from decoding.drafters import PromptLookupDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import RULES
from trainer.cli import app
from trainer.commands.beside import verdict
from trainer.commands.decode import Decoder
from trainer.terminal.exit_codes import ExitCode

TEXT = f"{LINE}\x1b{LINE}"[:40]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_alphabet(tmp_path_factory.mktemp("alphabet"))


def generate(target: Path, *more: str) -> Result:
    words = ["generate", "--target", str(target), "--dtype", "fp32", "--prompt", "Go", "--max-new-tokens", "40", *more]
    return CliRunner().invoke(app, words)


def test_standard_output_holds_the_text_alone_as_the_model_wrote_it(target: Path) -> None:
    for more in ([], ["--drafter", "lookup"], ["--drafter", "lookup", "--no-gain"]):
        result = generate(target, *more)
        assert result.exit_code == 0 and result.stdout == f"{TEXT}\n"
        assert "tokens per target pass" in result.stderr


def test_the_gain_is_that_over_a_few_plain_tokens_measured_before(target: Path) -> None:
    told = generate(target, "--drafter", "lookup").stderr
    assert "× plain decoding (" in told and "tokens/s, measured over 24 tokens before)" in told
    assert "plain decoding (" not in generate(target, "--drafter", "lookup", "--no-gain").stderr
    assert "×" not in generate(target).stderr, "plain decoding gains nothing over itself"


def test_without_the_gain_nothing_but_the_text_is_decoded(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[int] = []
    steps = Engine.steps

    def counted(engine: Engine, prompt: Sequence[int], config: DecodingConfig) -> Iterator[Step]:
        for step in steps(engine, prompt, config):
            run.append(len(step.tokens))
            yield step

    monkeypatch.setattr(Engine, "steps", counted)
    generate(target, "--drafter", "lookup", "--no-gain")
    assert sum(run) == 40
    run.clear()
    generate(target, "--drafter", "lookup")
    assert sum(run) >= 40 + 8 + 25


def test_compared_in_a_pipe_both_texts_come_one_after_the_other_with_a_verdict(target: Path) -> None:
    result = generate(target, "--drafter", "lookup", "--compare")
    assert result.exit_code == 0
    assert result.stdout == f"plain decoding:\n{TEXT}\nprompt lookup (lossless):\n{TEXT}\n"
    assert "× plain decoding (" in result.stderr and "measured over" not in result.stderr
    assert result.stderr.splitlines()[-1] == "same text, 40 tokens"


def test_a_comparison_without_a_drafter_is_refused(target: Path) -> None:
    result = generate(target, "--compare")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "error: --compare shows a drafter beside plain decoding: give --drafter or --plan" in result.stderr


@pytest.mark.parametrize("compare", [[], ["--compare"]])
def test_ctrl_c_ends_the_text_and_its_figures_are_still_printed(
    target: Path, monkeypatch: pytest.MonkeyPatch, compare: list[str]
) -> None:
    """The signal comes inside a pass; nothing is decoded after that pass."""
    verify, passes = CausalLM.verify, list[int]()

    def interrupted(*given: object) -> object:
        passes.append(len(passes))
        if len(passes) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return verify(*given)  # type: ignore[arg-type]  # handed on

    monkeypatch.setattr(CausalLM, "verify", interrupted)
    monkeypatch.setattr(Decoder, "warm_up", lambda *_: None)
    result = generate(target, "--drafter", "lookup", "--no-gain", *compare)
    assert result.exit_code == ExitCode.STOPPED and len(passes) == 4
    assert LINE[:4] in result.stdout and LINE[:20] not in result.stdout
    assert "prompt lookup (lossless): " in result.stderr
    if compare:
        assert "same text as far as both were written" in result.stderr


# --- the verdict on two texts -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    target = CausalLM(tiny_model(vocab=128))
    return Decoder(Engine(target, PromptLookupDrafter(3)), byte_tokenizer(), DecodingConfig(8), "prompt lookup")


def test_equal_texts_are_the_same_also_where_one_was_stopped(decoder: Decoder) -> None:
    assert verdict(decoder, [1], [2, 3, 4], [2, 3, 4]) == "same text, 3 tokens"
    assert verdict(decoder, [1], [2, 3, 4], [2, 3]) == "same text as far as both were written, 2 tokens"


@pytest.mark.parametrize(
    ("margin", "why"),
    [
        (2e-5, "2e-05 apart: a tie within the rounding of float32; --dtype fp32 decides it"),
        (0.5, "0.5 apart, more than rounding in float32 explains: 'headstart verify' looks for the fault"),
    ],
)
def test_greedy_texts_that_differ_say_where_and_whether_rounding_can_be_why(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, margin: float, why: str
) -> None:
    monkeypatch.setattr("trainer.commands.beside.margin_of", lambda *_: margin)
    assert verdict(decoder, [1], [2, 3, 4], [2, 5]) == (
        f"the texts differ from token 2 on, where the target's logits of the two tokens are {why}"
    )


def test_the_distance_is_that_of_the_target_s_own_logits(decoder: Decoder) -> None:
    plain = Engine(decoder.engine.target).decode([1, 2], DecodingConfig(3)).tokens
    other = (*plain[:2], (plain[2] + 1) % 128)
    assert "more than rounding in float32 explains" in verdict(decoder, [1, 2], plain, other)


def test_sampled_texts_are_compared_by_what_their_rule_promises(decoder: Decoder) -> None:
    sampled = replace(decoder, config=DecodingConfig(8, SamplingConfig(temperature=1.0)))
    assert "both the target's own distribution" in verdict(sampled, [1], [2], [3])
    lossy = replace(decoder, config=DecodingConfig(8, SamplingConfig(temperature=1.0), RULES["typical"]))
    assert "the rule is lossy" in verdict(lossy, [1], [2], [2])
