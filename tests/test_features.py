"""Features on disk: they are what the target would give, and no fault of a disk or a user goes by unseen."""

import io
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from tiny_models import tiny_model
from tiny_training import tiny_tokenizer, toy_examples
from torch import Tensor

from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import fingerprint
from decoding.model.forward import capture_lm_head_input
from trainer.data.batch import Batch, Example, collate
from trainer.files.folders import ShardLayout
from trainer.heads.medusa import MedusaObjective
from trainer.processes import ALONE, Process
from trainer.recipe.heads import FeaturesSection, HeadsSection, StatesDtype
from trainer.target import features
from trainer.target import store as stores
from trainer.target.features import (
    LARGEST_KL,
    FeatureIdentity,
    FeatureStore,
    FeatureWriter,
    StoredFeatures,
    ensure_features,
    quantised,
)
from trainer.target.loading import OnlineTarget, Target
from trainer.target.store import ensure_store, estimate_bytes

EXAMPLES = toy_examples(12)  # of 4 to 12 tokens
SHARD_TOKENS = 30  # three shards of EXAMPLES
FAMILIES = ["llama", "gpt2", "qwen3-moe", "gemma3", "granite"]


def identity_of(
    target: CausalLM, examples: Sequence[Example] = EXAMPLES, states: StatesDtype = "target"
) -> FeatureIdentity:
    section = FeaturesSection(folder="features", states=states)
    return FeatureIdentity.of(target, fingerprint(target.model), tiny_tokenizer(), examples, section)


def write(
    target: CausalLM,
    folder: Path,
    states: StatesDtype = "target",
    writer: type[FeatureWriter] = FeatureWriter,
    process: Process = ALONE,
) -> FeatureStore:
    """Complete features of EXAMPLES."""
    identity = identity_of(target, states=states)
    return FeatureStore(
        folder, identity, ensure_store(writer(target, identity), EXAMPLES, folder, SHARD_TOKENS, process)
    )


class BreakingOff(FeatureWriter):
    """Ends at the last example."""

    def compute_columns(self, batch: Batch) -> dict[str, Tensor]:
        if len(EXAMPLES) - 1 in batch.examples:
            raise KeyboardInterrupt
        return super().compute_columns(batch)


def heard() -> tuple[Process, io.StringIO]:
    said = io.StringIO()
    return Process(console=Console(file=said, width=200)), said


def alone(target: CausalLM, tokens: Sequence[int]) -> Tensor:
    """What the lm_head reads when these tokens are all there is."""
    with torch.no_grad(), capture_lm_head_input(target.model) as captured:
        target.model(torch.tensor([list(tokens)]), use_cache=False)
    return captured[0][0]


@pytest.fixture
def stored(tiny_llama: CausalLM, tmp_path: Path) -> FeatureStore:
    return write(tiny_llama, tmp_path)


def written_at(folder: Path) -> dict[str, int]:
    """When each file was written; a file that is written anew is another file."""
    return {path.name: path.stat().st_ino for path in folder.glob("*.safetensors")}


# What is stored


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stored_state_is_what_the_lm_head_reads_when_the_example_stands_alone(family: str, tmp_path: Path) -> None:
    target = CausalLM(tiny_model(family))
    hidden = write(target, tmp_path).hidden(collate([EXAMPLES[i] for i in (7, 0, 11)], (7, 0, 11)))
    assert (hidden[1, len(EXAMPLES[0].tokens) :] == 0).all(), "padding"
    for row, index in enumerate((7, 0, 11)):
        expected = alone(target, EXAMPLES[index].tokens.tolist())
        torch.testing.assert_close(hidden[row, : len(expected)], expected, rtol=1e-5, atol=1e-5)


def test_documents_packed_into_one_example_are_stored_as_if_each_stood_alone(
    tiny_llama: CausalLM, tmp_path: Path
) -> None:
    first, second = EXAMPLES[3].tokens.tolist(), EXAMPLES[6].tokens.tolist()
    both = (*first, *second)
    packed = [Example(both, (True,) * len(both), 0, (len(first), len(second))), EXAMPLES[0]]
    identity = identity_of(tiny_llama, packed)
    layout = ensure_store(FeatureWriter(tiny_llama, identity), packed, tmp_path, SHARD_TOKENS)
    hidden = FeatureStore(tmp_path, identity, layout).hidden(collate(packed[:1], (0,)))[0]
    expected = torch.cat([alone(tiny_llama, first), alone(tiny_llama, second)])
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_states_in_int8_by_hand() -> None:
    """A largest magnitude of 254 makes a scale of 2; a token of zeros has no scale, and stays zeros."""
    rounded, scale = quantised(torch.tensor([[254.0, -3.0, 2.9, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert rounded.dtype == torch.int8 and rounded.tolist() == [[127, -2, 1, 0], [0, 0, 0, 0]]
    assert scale.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("taps", [(), (0, 1)])
def test_states_that_change_the_teacher_are_measured_before_they_are_written(
    taps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Int8 changes an outlier's neighbours: one number 10,000 times the others leaves them nothing."""
    model = tiny_model("llama", num_hidden_layers=4, initializer_range=0.02)
    whole = Target("tiny", torch.float32, "x", tiny_tokenizer(), CausalLM(model))

    def said_of(states: StatesDtype, folder: str) -> str:
        process, said = heard()
        ensure_features(whole, EXAMPLES, FeaturesSection(folder=str(tmp_path / folder), states=states), process, taps)
        return said.getvalue()

    told = r"states in {} change the target's distribution by ([\d.e-]+) nats \(mean KL of \d+ tokens\)"
    changes, together = {}, Mock(side_effect=features.on_first)
    monkeypatch.setattr(features, "on_first", together)
    for states in ("int8", "bf16"):
        found = re.search(told.format(states), said_of(states, states))
        assert found is not None
        changes[states] = float(found[1])
        assert "nats" not in said_of(states, states), "they are written already"
    assert together.call_count == 4, "processes that see different folders must still wait for one another"
    assert 0 < changes["bf16"] < changes["int8"] < LARGEST_KL and "nats" not in said_of("target", "target")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] += 500.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight *= 1e6
    with pytest.raises(UserError, match=r"nats .* at most 0\.01 is accepted: set features\.states=bf16"):
        said_of("int8", "refused")
    assert not (tmp_path / "refused").exists()


def test_heads_learn_from_features_what_they_learn_from_the_target(tiny_llama: CausalLM, tmp_path: Path) -> None:
    section = HeadsSection.model_validate({"num_heads": 2, "markov_rank": 3})
    states = StoredFeatures(write(tiny_llama, tmp_path), tiny_llama.model.config, torch.device("cpu"))
    batch = collate([EXAMPLES[i] for i in (9, 2, 5)], (9, 2, 5))
    sums = []
    for source in (OnlineTarget(tiny_llama), states):
        torch.manual_seed(0)
        objective = MedusaObjective(source, section, 10, torch.float32)
        found = objective.module(*objective.inputs(batch, 0))
        found.total.backward()
        gradients = [parameter.grad for parameter in objective.module.parameters()]
        sums.append((found.losses, found.hits, gradients))
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_similar_length_run_together_as_each_row_alone(
    tiny_llama: CausalLM, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of up to 30 tokens, with little padding; states come back in the batch's order."""
    examples = EXAMPLES
    if packed:
        pairs = zip(EXAMPLES[::2], EXAMPLES[1::2], strict=True)
        examples = [
            Example([*a.tokens, *b.tokens], [*a.trained, *b.trained], 0, (len(a.tokens), len(b.tokens)))
            for a, b in pairs
        ]
    batch, online = collate(examples), OnlineTarget(tiny_llama)
    monkeypatch.setattr("trainer.target.loading._ENOUGH", 30)
    run, shapes = tiny_llama.model.forward, list[tuple[int, int]]()
    monkeypatch.setattr(
        tiny_llama.model, "forward", lambda **given: shapes.append(given["input_ids"].shape) or run(**given)
    )
    found = online.tapped(batch, (0, 1))
    assert len(shapes) > 2
    assert sum(rows * longest for rows, longest in shapes) < batch.tokens.numel()
    for row, example in enumerate(examples):
        length = len(example.tokens)
        alone = online.tapped(collate([example]), (0, 1))
        for whole, single in zip(found, alone, strict=True):
            torch.testing.assert_close(whole[row, :length], single[0, :length], rtol=1e-4, atol=1e-4)


# Shards


def test_a_shard_holds_whole_examples_and_a_long_one_has_a_shard_of_its_own() -> None:
    layout = ShardLayout((3, 4, 3, 20, 5, 5), shard_rows=10)
    assert layout.shards == [range(3), range(3, 4), range(4, 6)]
    assert [layout.num_rows(shard) for shard in range(3)] == [10, 20, 10]
    assert layout.find(2) == (0, slice(7, 10))
    assert layout.find(3) == (1, slice(0, 20))
    assert layout.find(5) == (2, slice(5, 10))


def test_a_run_that_breaks_off_keeps_the_shards_it_finished_and_a_whole_store_is_left_as_it_is(
    tiny_llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tiny_llama, tmp_path, writer=BreakingOff)
    before = written_at(tmp_path)
    assert 1 < len(before) < 4
    identity = write(tiny_llama, tmp_path).identity
    whole = written_at(tmp_path)
    assert before.items() < whole.items() and len(whole) == 4  # three shards and the weights
    monkeypatch.setattr(FeatureWriter, "compute_columns", None)
    ensure_store(FeatureWriter(tiny_llama, identity), EXAMPLES, tmp_path, shard_rows=50)  # as other shards were begun
    assert written_at(tmp_path) == whole


# Faults


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def unseal(path: Path) -> None:
    path.with_name(f"{path.name}.sha256").unlink()


@pytest.mark.parametrize(
    ("fault", "name"),
    [(damage, "shard-00002.safetensors"), (truncate, "weights.safetensors"), (unseal, "shard-00000.safetensors")],
)
def test_a_bad_file_is_named_and_it_alone_is_written_again(
    tiny_llama: CausalLM, stored: FeatureStore, tmp_path: Path, fault: Any, name: str
) -> None:
    batch = collate(EXAMPLES, range(12))
    expected, before = stored.hidden(batch), written_at(tmp_path)
    fault(tmp_path / name)
    process, said = heard()
    assert torch.equal(write(tiny_llama, tmp_path, process=process).hidden(batch), expected)
    assert f"features: {name} was damaged or incomplete and is written again" in said.getvalue()
    after = written_at(tmp_path)
    assert {file for file in before if before[file] != after[file]} <= {name}


@pytest.mark.parametrize("content", ["{", '{"lengths": []}'])
def test_a_manifest_that_cannot_be_read_stops_the_run_and_loses_nothing(
    tiny_llama: CausalLM, stored: FeatureStore, tmp_path: Path, content: str
) -> None:
    """Taken for a new folder, it would be written over, whosever it is."""
    (tmp_path / "manifest.json").write_text(content)
    before = written_at(tmp_path)
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read \(.*\): .* remove this file"):
        write(tiny_llama, tmp_path)
    assert written_at(tmp_path) == before and (tmp_path / "manifest.json").read_text() == content
    (tmp_path / "manifest.json").unlink()
    write(tiny_llama, tmp_path)
    assert written_at(tmp_path) == before


@pytest.mark.parametrize("what", ["tokenizer", "data", "dtype", "states"])
def test_features_made_with_something_else_are_refused_by_its_name_before_anything_is_said_of_them(
    tiny_llama: CausalLM, stored: FeatureStore, tmp_path: Path, what: str
) -> None:
    other = replace(stored.identity, **{what: "float64"})
    was, now = getattr(stored.identity, what), getattr(other, what)
    difference = f"other {what}" if what in ("target", "tokenizer", "data") else f"{what} {was} and not {now}"
    process, said = heard()
    with pytest.raises(ValueError, match=rf"features made with {difference}: give features.folder another folder"):
        ensure_store(FeatureWriter(tiny_llama, other), EXAMPLES, tmp_path, SHARD_TOKENS, process)
    assert said.getvalue() == ""


def test_an_identity_changes_with_the_target_the_tokenizer_and_each_token(tiny_llama: CausalLM) -> None:
    base = identity_of(tiny_llama)
    first = EXAMPLES[0]
    changed = [Example((*first.tokens[:-1], (first.tokens[-1] + 1) % 16), first.trained, 0), *EXAMPLES[1:]]
    assert identity_of(tiny_llama, changed).data != base.data
    assert identity_of(tiny_llama, EXAMPLES[::-1]).data != base.data
    assert identity_of(tiny_llama, [Example(first.tokens, first.trained, 0, (1, 3)), *EXAMPLES[1:]]).data != base.data
    assert identity_of(CausalLM(tiny_model(seed=1))).target != base.target
    words = ("<unk>", "<eos>", "<user>", "<assistant>", *"bacdefghijkl")
    section = FeaturesSection(folder="features")
    other = FeatureIdentity.of(tiny_llama, base.target, tiny_tokenizer(words=words), EXAMPLES, section)
    assert other.tokenizer != base.tokenizer and other.data == base.data


# The disk


def disk_with(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    usage = shutil.disk_usage("/")._replace(free=int(free))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)


@pytest.mark.parametrize(("states", "size"), [("target", 64), ("int8", 16 + 4)])
def test_the_estimate_is_what_the_files_take(
    tiny_llama: CausalLM, tmp_path: Path, states: StatesDtype, size: int
) -> None:
    """12 examples of 87 tokens at 16 fp32 numbers.

    In int8 a token is 16 bytes and its scale.
    """
    identity = write(tiny_llama, tmp_path, states=states).identity
    estimate = estimate_bytes(EXAMPLES, identity)
    assert estimate == 87 * size + 16 * 16 * 4
    taken = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert estimate < taken < estimate + 4 * 400  # of four files' headers


def test_a_disk_that_is_too_small_is_refused_before_a_shard_is_written(
    tiny_llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take 8 KB, and a quarter of a GB is kept free."""
    disk_with(monkeypatch, free=stores._SPARE_BYTES)
    with pytest.raises(ValueError, match=r"would take 0.00 GB more, but .* has 0.27 GB free.*data.max_rows"):
        write(tiny_llama, tmp_path)
    assert not written_at(tmp_path)
    disk_with(monkeypatch, free=1e9)
    write(tiny_llama, tmp_path)
    disk_with(monkeypatch, free=0)
    write(tiny_llama, tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="kept in reserve"):
        write(tiny_llama, tmp_path)
