"""Stores on disk: training on the target's stored states or best logits has the same result as training on the
target.
"""

import errno
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
from loss_references import divergence
from rich.console import Console
from tiny_models import full_forward, tiny_model
from tiny_training import tiny_tokenizer, toy_examples
from torch import Tensor

from decoding.errors import UserError
from decoding.files.fingerprint import fingerprint
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import capture_lm_head_input
from trainer.data.batch import Batch, Example, collate
from trainer.files.folders import ShardLayout
from trainer.heads.medusa1 import MedusaObjective
from trainer.learning.fused import fused_loss
from trainer.learning.losses import LossMix, SampledTailTeacher
from trainer.processes import ALONE, Process
from trainer.recipe.common import Divergence
from trainer.recipe.draft import TeacherSection
from trainer.recipe.heads import FeaturesSection, HeadsSection, StatesDtype
from trainer.target import features, teacher_cache
from trainer.target import store as stores
from trainer.target.features import (
    LARGEST_KL,
    FeatureOrigin,
    FeatureStore,
    FeatureWriter,
    StoredFeatures,
    ensure_features,
    quantised,
)
from trainer.target.loading import OnlineTarget, Target
from trainer.target.store import ensure_store, estimate_bytes
from trainer.target.teacher_cache import TeacherOrigin, TeacherStore, TeacherWriter, sample_tail

EXAMPLES = toy_examples(12)  # of 4 to 12 tokens
SHARD_TOKENS = 30  # three shards of EXAMPLES
FAMILIES = ["llama", "gpt2", "qwen3-moe", "gemma3", "granite"]


def identity_of(
    target: CausalLM, examples: Sequence[Example] = EXAMPLES, states: StatesDtype = "target"
) -> FeatureOrigin:
    section = FeaturesSection(folder="features", states=states)
    return FeatureOrigin.of(target, fingerprint(target.model), tiny_tokenizer(), examples, section)


def write(
    target: CausalLM,
    folder: Path,
    states: StatesDtype = "target",
    writer: type[FeatureWriter] = FeatureWriter,
    process: Process = ALONE,
) -> FeatureStore:
    """Write the complete features of EXAMPLES."""
    origin = identity_of(target, states=states)
    return FeatureStore(folder, origin, ensure_store(writer(target, origin), EXAMPLES, folder, SHARD_TOKENS, process))


class BreakingOff(FeatureWriter):
    """A writer that breaks off at the last example."""

    def compute_columns(self, batch: Batch) -> dict[str, Tensor]:
        if len(EXAMPLES) - 1 in batch.examples:
            raise KeyboardInterrupt
        return super().compute_columns(batch)


def heard() -> tuple[Process, io.StringIO]:
    said = io.StringIO()
    return Process(console=Console(file=said, width=200)), said


def alone(target: CausalLM, tokens: Sequence[int]) -> Tensor:
    """Return the input of the lm_head in a pass over only these tokens."""
    with torch.no_grad(), capture_lm_head_input(target.model) as captured:
        target.model(torch.tensor([list(tokens)]), use_cache=False)
    return captured[0][0]


@pytest.fixture
def stored(tiny_llama: CausalLM, tmp_path: Path) -> FeatureStore:
    return write(tiny_llama, tmp_path)


def written_at(folder: Path) -> dict[str, int]:
    """Return the time at which each file was written, which shows whether a file was written again."""
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
    origin = identity_of(tiny_llama, packed)
    layout = ensure_store(FeatureWriter(tiny_llama, origin), packed, tmp_path, SHARD_TOKENS)
    hidden = FeatureStore(tmp_path, origin, layout).hidden(collate(packed[:1], (0,)))[0]
    expected = torch.cat([alone(tiny_llama, first), alone(tiny_llama, second)])
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_states_in_int8_by_hand() -> None:
    """A largest magnitude of 254 gives a scale of 2; a token of zeros has scale 0 and stays zero."""
    rounded, scale = quantised(torch.tensor([[254.0, -3.0, 2.9, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert rounded.dtype == torch.int8 and rounded.tolist() == [[127, -2, 1, 0], [0, 0, 0, 0]]
    assert scale.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("taps", [(), (0, 1)])
def test_states_that_change_the_teacher_are_measured_before_they_are_written(
    taps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Int8 changes the neighbours of an outlier: next to a number that is 10,000 times larger, they become 0."""
    model = tiny_model("llama", num_hidden_layers=4, initializer_range=0.02)
    whole = Target("tiny", torch.float32, "x", tiny_tokenizer(), CausalLM(model))

    def said_of(states: StatesDtype, folder: str) -> str:
        process, said = heard()
        ensure_features(whole, EXAMPLES, FeaturesSection(folder=str(tmp_path / folder), states=states), process, taps)
        return said.getvalue()

    told = r"states in {} change the target's distribution by ([\d.e-]+) nats \(mean KL over \d+ tokens\)"
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
    """Groups have up to 30 tokens with little padding; the states are returned in the order of the batch."""
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
    origin = write(tiny_llama, tmp_path).origin
    whole = written_at(tmp_path)
    assert before.items() < whole.items() and len(whole) == 4  # three shards and the weights
    monkeypatch.setattr(FeatureWriter, "compute_columns", None)
    ensure_store(FeatureWriter(tiny_llama, origin), EXAMPLES, tmp_path, shard_rows=50)  # other shards
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
    """If the folder were treated as new, it would be overwritten, whatever it contains."""
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
    other = replace(stored.origin, **{what: "float64"})
    was, now = getattr(stored.origin, what), getattr(other, what)
    difference = f"other {what}" if what in ("target", "tokenizer", "data") else f"{what} {was} and not {now}"
    process, said = heard()
    with pytest.raises(ValueError, match=rf"features made with {difference}: set features.folder to another folder"):
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
    other = FeatureOrigin.of(tiny_llama, base.target, tiny_tokenizer(words=words), EXAMPLES, section)
    assert other.tokenizer != base.tokenizer and other.data == base.data


# The disk


def disk_with(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    usage = shutil.disk_usage("/")._replace(free=int(free))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)


@pytest.mark.parametrize(("states", "size"), [("target", 64), ("int8", 16 + 4)])
def test_the_estimate_is_what_the_files_take(
    tiny_llama: CausalLM, tmp_path: Path, states: StatesDtype, size: int
) -> None:
    """There are 12 examples with 87 tokens of 16 fp32 numbers. In int8 a token takes 16 bytes and a scale."""
    origin = write(tiny_llama, tmp_path, states=states).origin
    estimate = estimate_bytes(EXAMPLES, origin)
    assert estimate == 87 * size + 16 * 16 * 4
    taken = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert estimate < taken < estimate + 4 * 400  # the size of the headers of four files


def test_a_disk_that_is_too_small_is_refused_before_a_shard_is_written(
    tiny_llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The features take 8 KB, and a quarter of a GB must stay free."""
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


LABELLED = [int(collate([example]).labelled(1).sum()) for example in EXAMPLES]
SHARD_ROWS = 12  # four shards of EXAMPLES


def teacher_origin(
    target: CausalLM, examples: Sequence[Example] = EXAMPLES, top_k: int = 3, tail: int = 2, temperature: float = 1.0
) -> TeacherOrigin:
    section = TeacherSection(folder="anywhere", top_k=top_k, tail=tail)
    return TeacherOrigin.of(target, fingerprint(target.model), tiny_tokenizer(), examples, section, temperature)


def write_cache(
    target: CausalLM, folder: Path, shard_rows: int = SHARD_ROWS, examples: Sequence[Example] = EXAMPLES, **options: Any
) -> TeacherStore:
    """Write and open a complete cache."""
    origin = teacher_origin(target, examples, **options)
    layout = ensure_store(TeacherWriter(target, origin), examples, folder, shard_rows)
    return TeacherStore(folder, origin, layout)


def batch_of(*indices: int) -> Batch:
    return collate([EXAMPLES[index] for index in indices], indices)


def logits_at(target: CausalLM, indices: Sequence[int]) -> Tensor:
    """Return the target's logits at the labelled positions of these examples, each of which runs separately."""
    rows = []
    for index in indices:
        labelled = collate([EXAMPLES[index]]).labelled(1)[0]
        rows.append(full_forward(target.model, EXAMPLES[index].tokens.tolist())[labelled])
    return torch.cat(rows)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What is stored


def tokens_of(teacher: SampledTailTeacher) -> Tensor:
    assert teacher.known.tokens is not None
    return teacher.known.tokens


@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), ("gpt2", 2.0), ("gemma2", 1.0), ("granite", 2.0)])
def test_the_best_logits_are_the_models_own_where_the_next_token_is_trained(
    family: str, temperature: float, tmp_path: Path
) -> None:
    changes = {"final_logit_softcapping": 2.0} if family == "gemma2" else {}
    target = CausalLM(tiny_model(family, **changes))
    found = write_cache(target, tmp_path, temperature=temperature).for_batch(batch_of(7, 0, 11))
    scores, tokens = logits_at(target, (7, 0, 11)) / temperature, tokens_of(found)
    assert len(tokens) == LABELLED[7] + LABELLED[0] + LABELLED[11]
    torch.testing.assert_close(found.known.logits, scores.gather(1, tokens), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.known.log_total, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens[:, :3], scores.topk(3).indices) and found.temperature == temperature
    assert not (tokens[:, 3:, None] == tokens[:, None, :3]).any()


def test_logits_come_back_to_the_bit_and_are_divided_by_the_temperature_in_fp32(tmp_path: Path) -> None:
    """A third of a bf16 number is not a bf16 number."""
    target = CausalLM(tiny_model().bfloat16())
    examples = sorted(EXAMPLES, key=lambda example: -len(example.tokens))  # as they are run
    store = write_cache(target, tmp_path, shard_rows=1000, examples=examples, temperature=3.0)
    batch = collate(examples, range(12))
    found = store.for_batch(batch)
    with torch.inference_mode():
        logits = target.model(**batch.model_inputs(), use_cache=False).logits[batch.labelled(1)].float()
    known = found.known
    assert torch.equal(known.logits, logits.gather(1, tokens_of(found)) / 3) and known.logits.dtype == torch.float32
    assert known.log_total is not None and torch.equal(known.log_total, (logits / 3).logsumexp(-1))


def test_ids_beyond_two_bytes_come_back(tmp_path: Path) -> None:
    target = CausalLM(tiny_model(vocab=70_000))
    found = write_cache(target, tmp_path, examples=EXAMPLES[:2], top_k=40, tail=5).for_batch(batch_of(0, 1))
    logits, tokens = logits_at(target, (0, 1)), tokens_of(found)
    assert torch.equal(tokens[:, :40], logits.topk(40).indices) and (tokens >= 1 << 16).any()
    torch.testing.assert_close(found.known.logits, logits.gather(1, tokens), rtol=1e-5, atol=1e-5)
    for vocab_size, size in ((65_536, 244), (65_537, 304)):  # of 60 tokens in bf16
        assert TeacherOrigin("", "", "", vocab_size, "bfloat16", top_k=48, tail=12, temperature=1.0).row_bytes == size


def test_an_example_without_a_trained_token_has_no_rows_and_is_not_run(
    tiny_llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[int] = []
    compute = TeacherWriter.compute_columns

    def compute_columns(self: TeacherWriter, batch: Batch) -> dict[str, Tensor]:
        run.extend(batch.examples)
        return compute(self, batch)

    monkeypatch.setattr(TeacherWriter, "compute_columns", compute_columns)
    nothing = Example((9,) * 40, (False,) * 40, 0)
    examples = [nothing, *EXAMPLES[:3], nothing]
    store = write_cache(tiny_llama, tmp_path, examples=examples)
    assert sorted(run) == [1, 2, 3]
    packed = Example((1, 2, 3, 4, 5, 6, 7), (True, False, True, True, True, False, True), 0, (3, 1, 3))
    assert teacher_origin(tiny_llama).num_rows(packed) == 2, "tokens 3 and 4 begin documents"
    found = store.for_batch(collate([nothing, EXAMPLES[0], nothing], (0, 1, 4)))
    assert len(tokens_of(found)) == LABELLED[0]
    assert len(tokens_of(store.for_batch(collate([nothing], (0,))))) == 0


# The sample


def test_tokens_are_drawn_as_often_as_the_distribution_without_the_best_says() -> None:
    """Evenly spread numbers draw each token as often as its probability requires, to within one draw."""
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 2
    best = scores.topk(4).indices
    numbers = ((torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000).expand(3, -1)
    drawn = sample_tail(scores, best, numbers)
    counts = torch.stack([torch.bincount(row, minlength=50) for row in drawn])
    expected = 10_000 * scores.scatter(1, best, -torch.inf).softmax(-1)
    assert (counts - expected).abs().max() <= 1.01 and (counts.gather(1, best) == 0).all()


@pytest.mark.parametrize("others", [1, 3, 41])
def test_a_best_token_at_the_end_of_the_vocabulary_is_not_drawn_by_rounding(others: int) -> None:
    """In fp32, some numbers of equal shares add up to a little more than 1, and other numbers to a little less."""
    scores = torch.tensor([[1.0] * others + [9.0]])
    last = torch.tensor([[1 - 2**-53]], dtype=torch.float64)
    assert sample_tail(scores, torch.tensor([[others]]), last).tolist() == [[others - 1]]


@pytest.mark.parametrize(("kind", "temperature"), [("forward_kl", 1.0), ("forward_kl", 2.0), ("acceptance", 1.0)])
def test_a_fine_sample_gives_the_loss_and_the_gradient_of_the_whole_vocabulary(
    tiny_llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Divergence, temperature: float
) -> None:
    """With 20,000 evenly spread draws per row, each share is off by less than 1 in 20,000."""
    spread = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    monkeypatch.setattr(teacher_cache, "_uniforms", lambda index, rows, tail: spread.expand(rows, -1))
    rows = write_cache(tiny_llama, tmp_path, tail=20_000, temperature=temperature).for_batch(batch_of(3, 8))
    hidden = torch.randn(len(tokens_of(rows)), 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight = torch.randn(16, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found, expected = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = fused_loss(found, weight, tokens_of(rows)[:, 0], LossMix({kind: 1.0}, temperature), rows).loss
    whole = divergence(expected @ weight.T, logits_at(tiny_llama, (3, 8)).double(), kind, temperature)
    torch.autograd.backward([loss, whole])
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=2e-3)
    torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=2e-3)


def test_draws_of_an_example_do_not_depend_on_its_neighbours_and_differ_between_examples(
    tiny_llama: CausalLM, tmp_path: Path
) -> None:
    """The same text occurs twice, in a cache with one shard and in a cache with many shards."""
    examples = [*EXAMPLES, EXAMPLES[8]]
    one, many = (write_cache(tiny_llama, tmp_path / str(rows), rows, examples, tail=30) for rows in (1000, 4))
    batch = collate(examples, range(13))
    assert torch.equal(tokens_of(one.for_batch(batch)), tokens_of(many.for_batch(batch)))
    (best, tail), (same, other) = (
        tokens_of(one.for_batch(collate([EXAMPLES[8]], (index,)))).split((3, 30), 1) for index in (8, 12)
    )
    assert torch.equal(best, same) and not torch.equal(tail, other)


# Writing


def test_any_number_of_processes_and_a_run_broken_off_write_the_same_files(
    tiny_llama: CausalLM, tmp_path: Path
) -> None:
    writer = TeacherWriter(tiny_llama, teacher_origin(tiny_llama))

    class BreakingOff(TeacherWriter):
        def compute_columns(self, batch: Batch) -> dict[str, Tensor]:
            if len(EXAMPLES) - 1 in batch.examples:
                raise KeyboardInterrupt
            return super().compute_columns(batch)

    ensure_store(writer, EXAMPLES, tmp_path / "one", SHARD_ROWS)
    for process in (1, 0, 2):
        ensure_store(writer, EXAMPLES, tmp_path / "three", SHARD_ROWS, Process(process, 3))
    with pytest.raises(KeyboardInterrupt):
        ensure_store(BreakingOff(tiny_llama, writer.origin), EXAMPLES, tmp_path / "broken", SHARD_ROWS)
    begun = files_of(tmp_path / "broken")
    ensure_store(writer, EXAMPLES, tmp_path / "broken", SHARD_ROWS)
    whole = files_of(tmp_path / "one")
    assert 2 < len(begun) < len(whole) and len(whole) > 8  # including the manifest, and a seal for each shard
    assert whole == files_of(tmp_path / "three") == files_of(tmp_path / "broken")


# Other caches


def test_a_whole_cache_on_a_disk_that_cannot_be_written_is_read_and_another_is_refused(
    tiny_llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cache(tiny_llama, tmp_path)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("trainer.files.folders.FileLock.acquire", read_only)
    monkeypatch.setattr(Path, "write_text", read_only)
    write_cache(tiny_llama, tmp_path)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(OSError, match="cannot be written"):
        write_cache(tiny_llama, tmp_path)


@pytest.mark.parametrize("top_k", [16, 48])
def test_a_cache_that_leaves_no_rest_to_draw_from_is_refused(tiny_llama: CausalLM, top_k: int) -> None:
    expected = rf"draft\.teacher\.top_k is {top_k}, but the target has 16 tokens: lower top_k"
    with pytest.raises(ValueError, match=expected):
        teacher_origin(tiny_llama, top_k=top_k)
    assert teacher_origin(tiny_llama, top_k=15).row_bytes == 17 * (2 + 4) + 4
