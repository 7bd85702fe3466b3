"""A teacher cache: the target's own logits come back to the bit, its sample is fair, and no other cache is taken."""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_references import divergence
from tiny_models import full_forward, tiny_model
from tiny_training import tiny_tokenizer, toy_examples
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import fingerprint
from trainer.data.batch import Batch, Example, collate
from trainer.learning.fused import fused_loss
from trainer.learning.losses import LossMix
from trainer.processes import Process
from trainer.recipe.common import Divergence
from trainer.recipe.draft import TeacherSection
from trainer.target import teacher_cache
from trainer.target.store import ensure_store
from trainer.target.teacher_cache import TeacherIdentity, TeacherStore, TeacherWriter, sample_tail

EXAMPLES = toy_examples(12)  # of 4 to 12 tokens, some of them trained
LABELLED = [int(collate([example]).labelled(1).sum()) for example in EXAMPLES]
SHARD_ROWS = 12  # four shards of EXAMPLES


def identity_of(
    target: CausalLM, examples: Sequence[Example] = EXAMPLES, top_k: int = 3, tail: int = 2, temperature: float = 1.0
) -> TeacherIdentity:
    section = TeacherSection(folder="anywhere", top_k=top_k, tail=tail)
    return TeacherIdentity.of(target, fingerprint(target.model), tiny_tokenizer(), examples, section, temperature)


def write(
    target: CausalLM, folder: Path, shard_rows: int = SHARD_ROWS, examples: Sequence[Example] = EXAMPLES, **options: Any
) -> TeacherStore:
    """A complete cache."""
    identity = identity_of(target, examples, **options)
    layout = ensure_store(TeacherWriter(target, identity), examples, folder, shard_rows)
    return TeacherStore(folder, identity, layout)


def batch_of(*indices: int) -> Batch:
    return collate([EXAMPLES[index] for index in indices], indices)


def logits_at(target: CausalLM, indices: Sequence[int]) -> Tensor:
    """The target's own at the labelled positions of these examples, each run alone."""
    rows = []
    for index in indices:
        labelled = collate([EXAMPLES[index]]).labelled(1)[0]
        rows.append(full_forward(target.model, EXAMPLES[index].tokens.tolist())[labelled])
    return torch.cat(rows)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What is stored


@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), ("gpt2", 2.0), ("gemma2", 1.0), ("granite", 2.0)])
def test_the_best_logits_are_the_models_own_where_the_next_token_is_trained(
    family: str, temperature: float, tmp_path: Path
) -> None:
    changes = {"final_logit_softcapping": 2.0} if family == "gemma2" else {}
    target = CausalLM(tiny_model(family, **changes))
    found = write(target, tmp_path, temperature=temperature).for_batch(batch_of(7, 0, 11))
    scores = logits_at(target, (7, 0, 11)) / temperature
    assert len(found.tokens) == LABELLED[7] + LABELLED[0] + LABELLED[11]
    torch.testing.assert_close(found.logits, scores.topk(3).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_total, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.tail_logits, scores.gather(1, found.tail_tokens), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.tokens, scores.topk(3).indices) and found.temperature == temperature
    assert not (found.tail_tokens[:, :, None] == found.tokens[:, None]).any()


def test_logits_come_back_to_the_bit_and_are_divided_by_the_temperature_in_fp32(tmp_path: Path) -> None:
    """A third of a bf16 number is no bf16 number."""
    target = CausalLM(tiny_model().bfloat16())
    examples = sorted(EXAMPLES, key=lambda example: -len(example.tokens))  # as they are run
    store = write(target, tmp_path, shard_rows=1000, examples=examples, temperature=3.0)
    batch = collate(examples, range(12))
    found = store.for_batch(batch)
    with torch.inference_mode():
        logits = target.model(**batch.model_inputs(), use_cache=False).logits[batch.labelled(1)].float()
    tokens = torch.cat((found.tokens, found.tail_tokens), 1)
    assert torch.equal(torch.cat((found.logits, found.tail_logits), 1), logits.gather(1, tokens) / 3)
    assert torch.equal(found.log_total, (logits / 3).logsumexp(-1)) and found.logits.dtype == torch.float32


def test_ids_beyond_two_bytes_come_back(tmp_path: Path) -> None:
    target = CausalLM(tiny_model(vocab=70_000))
    found = write(target, tmp_path, examples=EXAMPLES[:2], top_k=40, tail=5).for_batch(batch_of(0, 1))
    logits = logits_at(target, (0, 1))
    assert torch.equal(found.tokens, logits.topk(40).indices) and (found.tokens >= 1 << 16).any()
    torch.testing.assert_close(found.tail_logits, logits.gather(1, found.tail_tokens), rtol=1e-5, atol=1e-5)
    for vocab_size, size in ((65_536, 244), (65_537, 304)):  # of 60 tokens in bf16
        assert TeacherIdentity("", "", "", vocab_size, "bfloat16", top_k=48, tail=12, temperature=1.0).row_bytes == size


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
    store = write(tiny_llama, tmp_path, examples=examples)
    assert sorted(run) == [1, 2, 3]
    packed = Example((1, 2, 3, 4, 5, 6, 7), (True, False, True, True, True, False, True), 0, (3, 1, 3))
    assert identity_of(tiny_llama).num_rows(packed) == 2, "tokens 3 and 4 begin documents"
    found = store.for_batch(collate([nothing, EXAMPLES[0], nothing], (0, 1, 4)))
    assert len(found.tokens) == LABELLED[0]
    assert store.for_batch(collate([nothing], (0,))).tokens.shape == (0, 3)


# The sample


def test_tokens_are_drawn_as_often_as_the_distribution_without_the_best_says() -> None:
    """Numbers evenly spread hit each token as often as it is probable, to within one."""
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 2
    best = scores.topk(4).indices
    numbers = ((torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000).expand(3, -1)
    drawn = sample_tail(scores, best, numbers)
    counts = torch.stack([torch.bincount(row, minlength=50) for row in drawn])
    expected = 10_000 * scores.scatter(1, best, -torch.inf).softmax(-1)
    assert (counts - expected).abs().max() <= 1.01 and (counts.gather(1, best) == 0).all()


@pytest.mark.parametrize("others", [1, 3, 41])
def test_a_best_token_at_the_end_of_the_vocabulary_is_not_drawn_by_rounding(others: int) -> None:
    """Of equal shares in fp32 some numbers make a little more than 1 together, some less."""
    scores = torch.tensor([[1.0] * others + [9.0]])
    last = torch.tensor([[1 - 2**-53]], dtype=torch.float64)
    assert sample_tail(scores, torch.tensor([[others]]), last).tolist() == [[others - 1]]


@pytest.mark.parametrize(("kind", "temperature"), [("forward_kl", 1.0), ("forward_kl", 2.0), ("acceptance", 1.0)])
def test_a_fine_sample_gives_the_loss_and_the_gradient_of_the_whole_vocabulary(
    tiny_llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Divergence, temperature: float
) -> None:
    """Draws spread evenly, 20,000 a row, are off by less than 1 in 20,000 each."""
    spread = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    monkeypatch.setattr(teacher_cache, "_uniforms", lambda index, rows, tail: spread.expand(rows, -1))
    rows = write(tiny_llama, tmp_path, tail=20_000, temperature=temperature).for_batch(batch_of(3, 8))
    hidden = torch.randn(len(rows.tokens), 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight = torch.randn(16, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found, expected = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = fused_loss(found, weight, rows.tokens[:, 0], LossMix({kind: 1.0}, temperature), rows).loss
    whole = divergence(expected @ weight.T, logits_at(tiny_llama, (3, 8)).double(), kind, temperature)
    torch.autograd.backward([loss, whole])
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=2e-3)
    torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=2e-3)


def test_draws_of_an_example_do_not_depend_on_its_neighbours_and_differ_between_examples(
    tiny_llama: CausalLM, tmp_path: Path
) -> None:
    """The same text twice, in a cache of one shard and in one of many."""
    examples = [*EXAMPLES, EXAMPLES[8]]
    one, many = (write(tiny_llama, tmp_path / str(rows), rows, examples, tail=30) for rows in (1000, 4))
    batch = collate(examples, range(13))
    assert torch.equal(one.for_batch(batch).tail_tokens, many.for_batch(batch).tail_tokens)
    twice = [one.for_batch(collate([EXAMPLES[8]], (index,))) for index in (8, 12)]
    assert torch.equal(twice[0].tokens, twice[1].tokens)
    assert not torch.equal(twice[0].tail_tokens, twice[1].tail_tokens)


# Writing


def test_any_number_of_processes_and_a_run_broken_off_write_the_same_files(
    tiny_llama: CausalLM, tmp_path: Path
) -> None:
    writer = TeacherWriter(tiny_llama, identity_of(tiny_llama))

    class BreakingOff(TeacherWriter):
        def compute_columns(self, batch: Batch) -> dict[str, Tensor]:
            if len(EXAMPLES) - 1 in batch.examples:
                raise KeyboardInterrupt
            return super().compute_columns(batch)

    ensure_store(writer, EXAMPLES, tmp_path / "one", SHARD_ROWS)
    for process in (1, 0, 2):
        ensure_store(writer, EXAMPLES, tmp_path / "three", SHARD_ROWS, Process(process, 3))
    with pytest.raises(KeyboardInterrupt):
        ensure_store(BreakingOff(tiny_llama, writer.identity), EXAMPLES, tmp_path / "broken", SHARD_ROWS)
    begun = files_of(tmp_path / "broken")
    ensure_store(writer, EXAMPLES, tmp_path / "broken", SHARD_ROWS)
    whole = files_of(tmp_path / "one")
    assert 2 < len(begun) < len(whole) and len(whole) > 8  # with the manifest, and a seal for each shard
    assert whole == files_of(tmp_path / "three") == files_of(tmp_path / "broken")


# Other caches


def test_a_whole_cache_on_a_disk_that_cannot_be_written_is_read_and_another_is_refused(
    tiny_llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tiny_llama, tmp_path)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("trainer.files.folders.FileLock.acquire", read_only)
    monkeypatch.setattr(Path, "write_text", read_only)
    write(tiny_llama, tmp_path)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(OSError, match="cannot be written"):
        write(tiny_llama, tmp_path)


@pytest.mark.parametrize("top_k", [16, 48])
def test_a_cache_that_leaves_no_rest_to_draw_from_is_refused(tiny_llama: CausalLM, top_k: int) -> None:
    expected = rf"draft\.teacher\.top_k is {top_k}, but the target has 16 tokens: lower it"
    with pytest.raises(ValueError, match=expected):
        identity_of(tiny_llama, top_k=top_k)
    assert identity_of(tiny_llama, top_k=15).row_bytes == 17 * (2 + 4) + 4
