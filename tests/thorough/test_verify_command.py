"""The command `headstart verify`: PASS and FAIL with their exit codes, in this process and on a server."""

# ruff: noqa: F811  # a fixture comes by the name that it is imported under
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
from loopback import NAME, served
from planted_faults import Disturbed, planted, tiny_prompts, tiny_target, usual_end
from test_cli import (
    models,  # noqa: F401  # fixtures
    run,
)
from test_evaluate_served import environment  # noqa: F401  # a fixture
from test_registry import (
    SPECS,
    target,  # noqa: F401
)
from test_registry import models as drafts  # noqa: F401
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.drafters.registry import REGISTRY, DrafterLoader, parse_drafter
from decoding.generate import DecodingConfig, Engine
from decoding.measure.proof.prove import Effort, EngineWriter, prove
from decoding.measure.proof.reference import Reference
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig

QUICK = ["--limit", "2", "--max-new-tokens", "6", "--draws", "30"]
SAMPLED = SamplingConfig(1.0)


def verify(models: Path, *words: str, quick: list[str] = QUICK) -> tuple[int, str]:
    given = ["--target", str(models / "target"), "--prompts", str(models / "prompts.jsonl"), *quick, *words]
    return run("verify", *given)


ONE_OF_EACH = {name: next(text for text in SPECS if text.partition(":")[0] == name) for name in REGISTRY}


@pytest.mark.parametrize("name", REGISTRY)
def test_every_drafter_of_the_registry_passes_at_temperature_one(drafts: Path, target: CausalLM, name: str) -> None:
    spec = parse_drafter(ONE_OF_EACH[name].replace("PATH", str(drafts)))
    engine = Engine(target, DrafterLoader(target, byte_tokenizer()).load(spec))
    config = DecodingConfig(10, SAMPLED)
    prompts = [tuple(b"ab ab ab a"), tuple(b"abc")]
    effort = Effort(max_new_tokens=10, draws=25, draw_prompts=1)
    findings = list(prove(Reference(target, SAMPLED), EngineWriter(engine, config, 8), prompts, effort))
    assert len(findings) == 7
    assert all(finding.passed for finding in findings), [finding for finding in findings if not finding.passed]


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (fault, "mean log-probability")
        for fault in (
            "q altered after sampling",
            "top-p on the draft's side only",
            "a sampling temperature 1.3 times the one asked for",
            "argmax drafts accepted by a softmax q",
        )
    ],
)
def test_each_other_fault_is_caught_by_its_test(fault: str, test: str) -> None:
    model, prompts = tiny_target(), tiny_prompts(8)
    end = usual_end(model, SAMPLED, prompts, 16)
    (chosen,) = [each for each in planted(model, SAMPLED, (end,), 64) if each.name == fault]
    effort = Effort(max_new_tokens=16, draws=50, rounds=12)
    failures = [found.check for found in prove(chosen.reference, chosen.writer, prompts, effort) if not found.passed]
    assert failures[0] == test


def test_engines_of_this_process_pass_and_the_file_has_every_figure(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "verified.json"
    code, output = verify(
        models, "--drafter", f"draft:{models}/draft", "--drafter", "lookup", "--rule", "sampled-verify", "--json",
        str(file),
    )  # fmt: skip
    assert code == 0 and re.search(r"PASS: all 14 checks .*open", output)
    report = json.loads(file.read_text())
    assert report["verdict"] == "PASS"
    assert report["findings"].keys() == {"draft model, 4 tokens", "prompt lookup"}
    by_test = {found["check"]: found["figures"] for found in report["findings"]["prompt lookup"]}
    assert by_test["greedy identity"]["identical"] == 2 and "p_value" not in by_test["greedy identity"]
    assert by_test["mean log-probability"]["p_value"] > 1e-6 and by_test["mean log-probability"]["tokens"] == 12
    assert str(models) not in file.read_text()


@contextmanager
def a_server(models: Path, drafter: bool, heat: float = 1.0) -> Iterator[list[str]]:
    model = CausalLM(tiny_model(vocab=128, max_position_embeddings=256))
    engine = Engine(model, Disturbed(model) if drafter else None)
    with served(engine, (0,), heat) as address:
        yield ["--endpoint", address, "--model", f"/srv/models/{NAME}"]


def test_a_right_server_passes_and_one_of_another_temperature_fails_with_code_one(models: Path, tmp_path: Path) -> None:
    file, junit = tmp_path / "verified.json", tmp_path / "new" / "verified.xml"
    with a_server(models, drafter=True) as words:
        code, output = verify(models, *words, "--json", str(file), "--junit", str(junit))
    assert code == 0 and re.search(r"PASS: all 8 checks .*open", output)  # with so few draws
    assert "the server reports token ids" in output
    assert json.loads(file.read_text())["findings"].keys() == {f"{NAME}, served"} and "/srv" not in file.read_text()
    suite = ElementTree.parse(junit).getroot()[0]
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == (f"{NAME}, served", "8", "0")
    assert f"({len(suite.findall('testcase/skipped'))} open)" in output
    with a_server(models, drafter=False, heat=4.0) as words:
        longer = ["--limit", "2", "--max-new-tokens", "48", "--draws", "30"]
        code, output = verify(models, *words, "--temperature", "0.2", "--junit", str(junit), quick=longer)
    assert code == 1 and "problem: mean log-probability: p < " in output and "ok: greedy identity" in output, output
    failed = ElementTree.parse(junit).getroot()[0].findall("testcase[failure]")
    assert "mean log-probability" in [case.get("name") for case in failed]
    assert (failed[0][0].get("message") or "").startswith("p < ")
