"""GGUF exports in real llama.cpp have our texts, counts, logits and tokens; two controls must differ.

Needs the environment that `make engines` creates; `make test` creates it as well.
"""

import io
import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml
from changed_folders import with_config
from llama_cpp_server import llama_cpp
from rich.console import Console
from test_gguf import LLAMA3, QWEN2, sentencepiece_like
from tiny_models import tiny_model
from tiny_training import write_rows
from tokenizers import Regex, pre_tokenizers
from trained_pair import bpe_tokenizer, deepened, fit_eagle3, sentences, train_dspark, train_pair
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from decoding.drafters import DraftModelDrafter, DSparkDrafter, Eagle3Drafter
from decoding.generate import DecodingConfig, Engine
from decoding.measure.compare import compare, read_evaluation
from decoding.measure.proof.greedy import margin_of
from decoding.measure.proof.reference import EngineText
from decoding.measure.results import as_json
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids, load_dspark, load_eagle3, load_model, load_tokenizer
from trainer.cli import app
from trainer.commands.evaluate_served import run_evaluate_served
from trainer.commands.options import EvaluateOptions, RegenerateOptions
from trainer.commands.regenerate import run_regenerate
from trainer.data.dataset import load_dataset
from trainer.export.exporter import NO_PROMPTS, export
from trainer.recipe.common import DataSection
from trainer.servers.answers import CONTROLS
from trainer.servers.client import ServedModel
from trainer.servers.connection import Endpoint
from trainer.servers.texts import Scorer, rounding_or_rule

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from engines import LLAMA_CPP, ROOT, LlamaCppCase, serve_llama_cpp

pytestmark = pytest.mark.skipif(
    not LLAMA_CPP.is_file(), reason="runs in the engines' own environment, by `make engines`"
)

VERIFY = ROOT / "docs" / "how-to" / "verify.md"
TYPES = ("f32", "f16", "bf16", "q8_0")
PROMPTS, MAX_NEW_TOKENS, DRAFT_TOKENS = 12, 48, 4
TEXTS = (
    *sentences(4, seed=2),
    Path(__file__).read_text(encoding="utf-8")[:3000],
    "  Ann's\t12345 egg-s,\n\n\n   DON'T she'll  1 22 333\r\n  ",
    "Zoë has ½ naïve café… 数字 12 卵 🦆🦆 e\u0301 ²³",
    "Tim<|end|>Eve has 9 fans.<|end|>",
    "",
)
SLOWED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 64}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "tied": ("llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **SLOWED}}),
    "yarn": ("qwen3", {"head_dim": 32, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **STRETCHED}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
}
DSPARK: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dspark, two layers that fill in": {"layers": 2, "sample_from_anchor": False, "confidence": False},
    "dspark, few tokens": {"vocabulary": 60},
    "dflash": {"layers": 2, "markov_rank": 0, "sample_from_anchor": False},
}
REREAD: dict[str, dict[str, Any]] = {
    "dflash, causal windows": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
    "dflash, windows": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "is_causal": False},
    "dflash, yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **STRETCHED}},
}
"""Settings with which the DFlash draft's weights are read differently. The draft is then worse, but the same here and
in llama.cpp.
"""
EAGLE3: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3, few tokens and norms": {"vocabulary": 60, "norm_before_residual": True, "norm_before_fc": True},
}
EAGLE3_REREAD: dict[str, dict[str, Any]] = {
    "eagle3, norm before the residual": {"norm_before_residual": True},
    "eagle3, other layers": {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]},
    "eagle3, llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **SLOWED}},
    "eagle3, yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **STRETCHED}},
}
Row = dict[str, Any]


def split_by(*parts: Any) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE whose tokens cross the borders of words, digits and lines, so that the pre-tokenizer
    matters.
    """
    tokenizer = bpe_tokenizer([*TEXTS, "12345 " * 99], use_regex=False)
    by_words = not any(isinstance(part, pre_tokenizers.Split) for part in parts)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, last])
    return tokenizer


def sentencepiece() -> PreTrainedTokenizerFast:
    """Make a BPE with byte fallback, merged in the order of its tokens, that begins texts with <s> and a space."""
    words = ["▁A", "nn", "▁Ann", "ha", "▁h", "as", "▁ha", "▁has", "gg", "egg", "▁egg", "▁▁", "▁▁▁▁", "12"]
    letters = "AEBTZabcdefghijklmnopqrstuvwxyz0123456789.,'"
    known = {"▁", *letters, *words}
    pairs = [(word[:cut], word[cut:]) for word in words for cut in range(1, len(word))]
    return sentencepiece_like([pair for pair in pairs if known.issuperset(pair)], letters=letters)


TOKENIZERS = {
    "gpt-2": split_by,
    "smollm": lambda: split_by(pre_tokenizers.Digits(individual_digits=True)),
    "qwen2": lambda: split_by(pre_tokenizers.Split(Regex(QWEN2), "isolated")),
    "smaug-bpe": lambda: split_by(pre_tokenizers.Split(Regex(LLAMA3), "isolated")),
    "sentencepiece": sentencepiece,
}


class Desk:
    """A trained pair, and random models with other architectures and tokenizers, as folders and as GGUF files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pair = train_pair(folder)
        self.target, self.draft = (CausalLM(load_model(str(path), torch.float32)) for path in self.pair)
        self.tokenizer = load_tokenizer(str(self.pair[0]))
        self.ends = eos_token_ids(self.target.model, self.tokenizer)
        cut = [self.tokenizer(text)["input_ids"] for text in sentences(PROMPTS, seed=5)]
        self.prompts = [tokens[: 4 + place] for place, tokens in enumerate(cut)]
        self.probed = tuple(tuple(tokens[:count]) for tokens in cut[:3] for count in (1, 9, len(tokens)))
        self.random: dict[str, CausalLM] = {}

    def file(self, source: Path, name: str, type: str = "f32") -> Path:
        return export(source, self.folder / "gguf" / name, "gguf", type=type, prompts=NO_PROMPTS).folder / "model.gguf"

    def random_file(self, name: str, tokenizer: PreTrainedTokenizerFast, family: str, **changes: Any) -> Path:
        """Write the file of a random model with large weights, so that logits differ by whole numbers."""
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "initializer_range": 0.1}
        rows = self.target.vocab_size + 8  # transformers adds one token to every tokenizer of a qwen2
        model = tiny_model(family, rows, **{**sizes, "max_position_embeddings": 256, **changes})
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
        model.save_pretrained(self.folder / name)
        tokenizer.save_pretrained(self.folder / name)
        self.random[name] = CausalLM(model)
        return self.file(self.folder / name, name)

    def with_other_embeddings(self) -> Path:
        """Return the trained draft, in which each token has the embedding of the token before it."""
        folder = self.folder / "damaged"
        shutil.copytree(self.pair[1], folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        with torch.no_grad():
            embeddings = model.get_input_embeddings().weight
            embeddings.copy_(embeddings.roll(1, dims=0))
        model.save_pretrained(folder)
        return self.file(folder, "damaged-gguf")

    def dspark_cases(self, targets: dict[str, Path]) -> list[LlamaCppCase]:
        """Return the cases: the first draft in every type, each with a target file of the same type."""
        found, drafts = [], dict[str, Path]()
        for name, section in DSPARK.items():
            trained = train_dspark(self.folder, self.pair[0], name, block_size=DRAFT_TOKENS, **section)
            drafts[name] = trained
            own = DSparkDrafter(load_dspark(trained, self.target), DRAFT_TOKENS)
            for type in TYPES if name == "dspark" else ("f32",):
                file, method = self.file(trained, f"{name}-{type}", type), name.partition(",")[0]
                found.append(LlamaCppCase(f"{name} {type}", targets[type], file, DRAFT_TOKENS, own, method=method))
        for name, changes in REREAD.items():
            shutil.copytree(drafts["dflash"], folder := self.folder / name)
            config = json.loads((folder / "config.json").read_text()) | changes
            (folder / "config.json").write_text(json.dumps(config))
            own = DSparkDrafter(load_dspark(folder, self.target), DRAFT_TOKENS)
            file = self.file(folder, f"{name}-gguf")
            found.append(LlamaCppCase(f"{name} f32", targets["f32"], file, DRAFT_TOKENS, own, method="dflash"))
        return found

    def eagle3_cases(self, target: Path, model: CausalLM) -> list[LlamaCppCase]:
        """Return cases of drafts for a target of eight layers; the first draft is also read with other settings."""
        file, folders = self.file(target, "deep-gguf"), dict[str, Path]()
        for name, settings in EAGLE3.items():
            folders[name] = fit_eagle3(self.folder / name, target, **settings)
        for name, changes in EAGLE3_REREAD.items():
            shutil.copytree(folders["eagle3"], folder := self.folder / name)
            with_config(**changes)(folder)
            folders[name] = folder
        found = []
        for name, folder in folders.items():
            own = Eagle3Drafter(load_eagle3(folder, model), DRAFT_TOKENS)
            draft = export(folder, self.folder / "gguf" / name, "gguf", target=str(target), prompts=NO_PROMPTS).folder
            found.append(LlamaCppCase(name, file, draft / "model.gguf", DRAFT_TOKENS, own, method="eagle3"))
        return found

    def cases(self) -> list[LlamaCppCase]:
        target, draft = (
            {type: self.file(folder, f"{kind}-{type}", type) for type in TYPES}
            for kind, folder in zip(("target", "draft"), self.pair, strict=True)
        )
        own = DraftModelDrafter(self.draft, DRAFT_TOKENS)
        found = [LlamaCppCase(f"plain {type}", target[type], probed=self.probed) for type in TYPES]
        found += [LlamaCppCase(f"draft {type}", target[type], draft[type], drafter=own) for type in TYPES]
        found += self.dspark_cases(target)
        found.append(LlamaCppCase("damaged", target["f32"], self.with_other_embeddings(), drafter=own))
        for name, (family, changes) in ARCHITECTURES.items():
            found.append(
                LlamaCppCase(name, self.random_file(name, bpe_tokenizer(), family, **changes), probed=self.probed)
            )
        for name, make in TOKENIZERS.items():
            found.append(LlamaCppCase(f"split {name}", self.random_file(f"split-{name}", make(), "llama"), texts=TEXTS))
        return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def found(desk: Desk) -> dict[str, Row]:
    """Return the rows of all cases by name, from one process of llama.cpp."""
    rows = serve_llama_cpp(desk.target, desk.cases(), desk.prompts, MAX_NEW_TOKENS, desk.ends)
    return {row["artefact"]: row for row in rows}


@pytest.fixture(scope="module")
def eagle3(desk: Desk) -> dict[str, Row]:
    """Return the rows of EAGLE-3 drafts, with a target whose layers lie among others that change nothing."""
    target = deepened(desk.folder / "deep", desk.pair[0], kept=(0, 2, 4))
    model = CausalLM(load_model(str(target), torch.float32))
    rows = serve_llama_cpp(model, desk.eagle3_cases(target, model), desk.prompts, MAX_NEW_TOKENS, desk.ends)
    return {row["artefact"]: row for row in rows}


def test_plain_decoding_writes_our_text_a_token_a_pass(found: dict[str, Row]) -> None:
    row = found["plain f32"]
    assert row["engine"] == "llama.cpp" and row["equal"] == row["prompts"] == PROMPTS
    assert row["theirs"] == row["ours"]
    assert len({tuple(text) for text in row["texts"]}) > 3, "the texts differ"
    assert sum(text[-1] == 0 for text in row["texts"]) > 1, "some end before they are cut"


def test_a_trained_draft_writes_our_text_in_as_many_passes_as_here(found: dict[str, Row]) -> None:
    row = found["draft f32"]
    assert row["equal"] == row["prompts"] == PROMPTS
    assert row["theirs"] == row["ours"]
    accepted, passes = row["theirs"]["accepted"], row["theirs"]["passes"]
    assert len(accepted) == DRAFT_TOKENS and 0 < accepted[0] < passes, "neither none nor all"
    assert row["ended"] > 0, "texts end inside a draft, where llama.cpp counts otherwise"
    assert row["theirs"]["passes"] < found["plain f32"]["theirs"]["passes"]


@pytest.mark.parametrize("type", TYPES)
def test_every_type_speculates_without_loss_against_its_own_target(
    desk: Desk, found: dict[str, Row], type: str
) -> None:
    """The exception is near-ties in q8_0, because llama.cpp rounds products for one token differently from products for
    several tokens.
    """
    plain, drafted = found[f"plain {type}"], found[f"draft {type}"]
    for prompt, text, own in zip(desk.prompts, drafted["texts"], plain["texts"], strict=True):
        margin = margin_of(desk.target, prompt, text, own)
        assert margin is None or (type == "q8_0" and isinstance(margin, float) and margin < 0.2)
    assert sum(drafted["theirs"]["accepted"]) > 0.1 * drafted["theirs"]["drafted"]


@pytest.mark.parametrize(
    "name", [*(f"{name} f32" for name in (*DSPARK, *REREAD)), "dspark f16", "dspark bf16", "dspark q8_0"]
)
def test_a_dspark_draft_writes_our_text_in_as_many_passes_as_here(found: dict[str, Row], name: str) -> None:
    """Rounding changes no drafted token here, so the counts equal those of the unrounded draft."""
    row = found[name]
    assert row["equal"] == row["prompts"] == PROMPTS
    assert row["theirs"] == row["ours"]
    accepted, passes = row["theirs"]["accepted"], row["theirs"]["passes"]
    if (read := name.removesuffix(" f32")) in REREAD:
        others = [found[f"{other} f32"]["theirs"] for other in ("dflash", *REREAD) if other != read]
        assert accepted[0] > 0 and row["theirs"] not in others, "llama.cpp reads the settings"
        return
    assert len(accepted) == DRAFT_TOKENS and 0 < accepted[1] < accepted[0] <= passes, "neither none nor all"
    assert row["theirs"]["drafted"] == DRAFT_TOKENS * passes


@pytest.mark.parametrize("name", [*EAGLE3, *EAGLE3_REREAD])
def test_an_eagle3_draft_writes_our_text_in_as_many_passes_as_here(
    found: dict[str, Row], eagle3: dict[str, Row], name: str
) -> None:
    row = eagle3[name]
    assert row["texts"] == found["plain f32"]["texts"] and row["equal"] == PROMPTS
    assert row["theirs"] == row["ours"]
    accepted, passes = row["theirs"]["accepted"], row["theirs"]["passes"]
    others = [eagle3[other]["theirs"] for other in eagle3 if other != name]
    assert accepted[0] > 0 and row["theirs"] not in others, "llama.cpp reads the settings"
    if name in EAGLE3:
        assert len(accepted) == DRAFT_TOKENS and 0 < accepted[2] < accepted[1] < accepted[0] < passes


def test_a_damaged_draft_shows_in_the_counts_and_not_in_the_text(found: dict[str, Row]) -> None:
    row = found["damaged"]
    assert row["equal"] == PROMPTS
    assert sum(row["theirs"]["accepted"]) < sum(row["ours"]["accepted"]) / 2


@torch.inference_mode()
def error_of(model: CausalLM, probed: tuple[tuple[int, ...], ...], logprobs: list[list[float]]) -> float:
    """Return the largest difference of a log-probability."""
    ours = torch.stack([model.model(torch.tensor([text])).logits[0, -1].log_softmax(-1) for text in probed])
    return float((ours - torch.tensor(logprobs)).abs().max())


def test_logits_are_ours_within_rounding(desk: Desk, found: dict[str, Row]) -> None:
    errors = {type: error_of(desk.target, desk.probed, found[f"plain {type}"]["logprobs"]) for type in TYPES}
    assert errors["f32"] < 1e-3
    assert all(1e-3 < errors[type] < 1 for type in ("bf16", "q8_0")), errors


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_and_scaling_has_our_logits(desk: Desk, found: dict[str, Row], name: str) -> None:
    assert error_of(desk.random[name], desk.probed, found[name]["logprobs"]) < 1e-3


@pytest.mark.parametrize("name", TOKENIZERS)
def test_llama_cpp_splits_texts_as_the_tokenizer_does(desk: Desk, found: dict[str, Row], name: str) -> None:
    tokenizer = load_tokenizer(str(desk.folder / f"split-{name}"))
    for text, tokens in zip(TEXTS, found[f"split {name}"]["tokenised"], strict=True):
        assert tokens == tokenizer(text)["input_ids"], text
    assert len({str(found[f"split {other}"]["tokenised"]) for other in TOKENIZERS}) == len(TOKENIZERS), "they differ"


def test_a_draft_of_a_gguf_file_serves_with_that_very_file(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the dequantised weights of the file, the server's counts equal our counts; with the file itself, texts
    differ only by rounding.
    """
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    original = desk.file(desk.pair[0], "original", "q8_0")
    trained = train_dspark(desk.folder, original, "of-a-file", block_size=DRAFT_TOKENS)
    exported = export(trained, tmp_path / "draft", "gguf", type="f32", prompts=NO_PROMPTS)
    assert exported.commands[0].argv[:3] == ("llama-server", "-m", str(original))
    recorded = json.loads((exported.folder / "provenance.json").read_text())["target"]
    assert (recorded["file"], recorded["quantisation"]) == ("model.gguf", "Q8_0")
    target, draft = CausalLM(load_model(str(original), torch.float32)), exported.folder / "model.gguf"
    own = DSparkDrafter(load_dspark(trained, target), DRAFT_TOKENS)
    files = {"f32": desk.file(original, "dequantised"), "original": original}
    cases = [LlamaCppCase(name, file, draft, DRAFT_TOKENS, own, method="dspark") for name, file in files.items()]
    exact, quantised = serve_llama_cpp(target, cases, desk.prompts, MAX_NEW_TOKENS, desk.ends)
    assert exact["equal"] == PROMPTS and exact["theirs"] == exact["ours"] and sum(exact["theirs"]["accepted"]) > 0
    assert sum(quantised["theirs"]["accepted"]) > 0.8 * sum(quantised["ours"]["accepted"])
    texts = [EngineText(*map(tuple, pair)) for pair in zip(desk.prompts, quantised["texts"], strict=True)]
    wrong = [replace(text, tokens=(*text.tokens[:9], text.tokens[9] ^ 1, *text.tokens[10:])) for text in texts]
    server = llama_cpp(original, draft, DRAFT_TOKENS, method="dspark")
    with server as address, ServedModel(Endpoint(address=address, model="any")) as served:
        scorer = Scorer(served, CONTROLS, desk.tokenizer("a")["input_ids"][-1])
        found = [rounding_or_rule(scorer, each, DRAFT_TOKENS + 1, desk.ends) for each in (texts, wrong)]
    assert [finding.status for finding in found] == ["ok", "problem"], found
    assert found[0].figures["places"] == sum(len(text.tokens) - 1 for text in texts)


# --- measured from outside --------------------------------------------------------------------------------------------


def test_a_server_is_measured_from_outside_with_its_draft_and_without(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    target, draft = (desk.file(folder, f"outside-{index}") for index, folder in enumerate(desk.pair))
    rows = [{"prompt": text[:40]} for text in sentences(4, seed=9)]
    asked: dict[str, Any] = {"concurrency": (1, 4), "max_new_tokens": 24, "settings": ("greedy",), "model": "any"}
    source = write_rows(tmp_path / "prompts.jsonl", rows)
    with llama_cpp(target, draft) as endpoint, llama_cpp(target) as baseline:
        asked |= {"endpoint": endpoint, "baseline_endpoint": baseline}
        options = EvaluateOptions(prompts=source, output=tmp_path / "out", **asked)
        report = as_json(run_evaluate_served(options, Console(file=io.StringIO())))
    every = {(row["method"], row["batch_size"]): row for row in (*report["rows"], *report["grid"])}
    assert every.keys() == {(name, load) for name in ("served", "plain") for load in (1, 4)}
    for (name, load), row in every.items():
        figures = row["latency"]
        assert figures["requests"] == 4 and figures["counted"] and 1 <= figures["under_way"] <= load + 1e-9
        assert figures["tpot_ms"]["p50"] > 0 and 0 < figures["ttft_ms"]["p50"] < 60_000
        assert row["tokens_per_second"]["value"] > 0 and (row["acceptance_length"] is not None) == (name == "served")
    row = every["served", 1]
    reached = [share["value"] for share in row["reached"]]
    assert len(reached) == 3 and 0 < reached[1] <= reached[0] < 1
    assert row["acceptance_length"] == pytest.approx(1 + sum(reached))
    assert row["identical_to_plain"]["identical"] == row["identical_to_plain"]["of"] == 4
    assert compare(read_evaluation(tmp_path / "out"), read_evaluation(tmp_path / "out"), "plain", "served").rows


def test_the_ci_job_of_the_docs_verifies_a_server_that_speculates(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    (job,) = re.findall(r"```yaml\n(.*?)```", VERIFY.read_text(), re.DOTALL)
    steps = yaml.safe_load(job)["jobs"]["lossless"]["steps"]
    (line,) = [step["run"] for step in steps if step.get("run", "").startswith("headstart verify")]
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": text[:40]} for text in sentences(4, seed=9)])
    target, draft = (desk.file(folder, f"ci-{index}") for index, folder in enumerate(desk.pair))
    with llama_cpp(target, draft) as endpoint:
        line = line.replace("http://localhost:8000/v1", endpoint).replace("ORG/NAME", str(desk.pair[0]))
        done = CliRunner().invoke(app, [*shlex.split(line)[1:], "--max-new-tokens", "16"])
    assert done.exit_code == 0, done.output
    suite = ElementTree.parse(tmp_path / "verified.xml").getroot()[0]
    assert suite.get("failures") == "0" and "greedy identity" in {case.get("name") for case in suite}


def test_training_reads_the_very_tokens_that_a_server_wrote(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text[:40]} for text in sentences(3, seed=9)])
    answers = tmp_path / "answers.jsonl"
    with llama_cpp(desk.file(desk.pair[0], "answering")) as address:
        asked = RegenerateOptions(prompts=prompts, output=answers, endpoint=[address], model="any", temperature=0.0)
        summary = run_regenerate(replace(asked, max_new_tokens=60), Console(file=io.StringIO()))
    assert (summary.answered, summary.texts_alone) == (3, 0)
    dataset = load_dataset(str(answers), DataSection(train="", heldout=""), desk.tokenizer)
    config = DecodingConfig(60, eos_token_ids=desk.ends)
    for example in dataset.examples:
        prompt, trained = (example.tokens[example.trained == kept].tolist() for kept in (False, True))
        assert tuple(trained) == Engine(desk.target).decode(prompt, config).tokens
    assert any(example.tokens[-1] in desk.ends for example in dataset.examples), "ends are trained"
