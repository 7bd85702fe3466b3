"""Policies: the rows of a step, the draft that writes them, and that a resumed run trains on the same rows."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from loss_references import divergence
from scripted_drafters import ScriptedDrafter
from tiny_models import naive_greedy, tiny_model
from tiny_policies import DATA, PROMPTS, draft, orders_of, policy_of, source_of, target, training_of, writer_of
from tiny_training import Recorder, interrupt, medusa_on, tiny_tokenizer, train_toy
from torch import Tensor
from torch.nn import functional as F

from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads
from trainer.data.batch import Batch, BatchSource, Example, IndexedExample, Offline, collate
from trainer.drafts.distill import DistillObjective, OnlineTeacher
from trainer.drafts.on_policy import AnswerSource, GeneratedText, WindowFiles
from trainer.drafts.start import InitialDraft
from trainer.heads.medusa1 import MedusaObjective, decoding_copy
from trainer.processes import Process
from trainer.recipe.common import LossSection
from trainer.recipe.draft import DraftSection, PolicySection
from trainer.recipe.heads import HeadsSection
from trainer.run.loop import Interrupted

ALL = range(8)
MIXED: dict[str, Any] = {"offline": 0.25, "target": 0.25, "loop": 0.5}


def written_in(folder: Path, done: int = 0) -> list[GeneratedText]:
    return WindowFiles(folder, tiny_tokenizer(), 100).read(done)


def batches(source: BatchSource, steps: Sequence[int], positions: Sequence[int] = ALL) -> list[list[IndexedExample]]:
    """Return the batches that the loop receives from a source."""
    found = []
    for step in steps:
        if source.writes_at(step):
            source.write(step, positions)
        found.append(source.examples_at(step, positions))
    return found


def kinds_at(folder: Path, policy: PolicySection, steps: int, batch_size: int = 8) -> list[Counter[str]]:
    training = training_of(steps=steps, batch_size=batch_size, micro_batch_size=batch_size)
    source = source_of(folder, policy, training)
    return [Counter(source._kinds(step)) for step in range(steps)]


# --- shares ---------------------------------------------------------------------------------------------------------


def test_a_policy_of_offline_alone_gives_the_batches_of_the_data_and_never_writes(tmp_path: Path) -> None:
    source = source_of(tmp_path, policy_of(offline=2.0))
    assert not any(source.writes_at(step) for step in range(6))
    assert batches(source, range(6)) == [Offline(DATA, 8, 0).examples_at(step, ALL) for step in range(6)]
    assert not list(tmp_path.iterdir())


def test_a_step_has_as_many_rows_of_a_kind_as_its_share_says_give_or_take_one(tmp_path: Path) -> None:
    policy = policy_of(offline=1, target=2, loop=4.5)
    counts = kinds_at(tmp_path, policy, steps=400)
    shares = policy.shares
    for kind, share in shares.items():
        assert all(abs(step[kind] - 8 * share) < 1 for step in counts)
        assert sum(step[kind] for step in counts) / 400 == pytest.approx(8 * share, abs=0.05)


# --- rows -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_row_is_what_it_is_called(tmp_path: Path) -> None:
    """Greedily, the rows are: the row of the data; the target's answer; and the same answer, trained only at corrected
    tokens.
    """
    source = source_of(tmp_path, policy_of(**MIXED, temperature=0))
    (rows,) = batches(source, [0])
    kinds = source._kinds(0)
    assert Counter(kinds) == {"offline": 2, "target": 2, "loop": 4}
    for kind, row, own in zip(kinds, rows, Offline(DATA, 8, 0).examples_at(0, ALL), strict=True):
        prompt = PROMPTS[own.example_index]
        if kind == "offline":
            assert row == own
            continue
        answer = naive_greedy(target().model, prompt, 12)
        answer = answer[: answer.index(1) + 1] if 1 in answer else answer
        assert row.example.tokens.tolist() == [*prompt, *answer] and row.example_index == -1
        assert row.example.prompt_length == len(prompt) and not any(row.example.trained[: len(prompt)])
        if kind != "loop":
            assert all(row.example.trained[len(prompt) :])
    corrected = [row for kind, row in zip(kinds, rows, strict=True) if kind == "loop"]
    assert 0 < sum(sum(row.example.trained) for row in corrected) < sum(len(row.example.tokens) for row in corrected)


def test_texts_are_written_for_several_steps_by_the_draft_as_it_is_at_the_first(tmp_path: Path) -> None:
    asked: list[int] = []

    def draft_now() -> CausalLM:
        """Return the draft: at first the target itself, of which nothing is rejected, and later another model."""
        asked.append(len(asked))
        return target() if len(asked) == 1 else draft()

    policy = policy_of(loop=1, temperature=0, every=4)
    source = source_of(tmp_path, policy, draft_now=draft_now)
    assert [step for step in range(6) if source.writes_at(step)] == [0, 4]
    batches(source, range(6))
    assert len(asked) == 2
    assert not any(text.rejected for text in written_in(tmp_path, 0))
    assert any(text.rejected for text in written_in(tmp_path, 4))
    assert {text.step for text in written_in(tmp_path, 4)} == {4, 5}, "nothing is written for steps behind the last"


# --- training -------------------------------------------------------------------------------------------------------


class Distilling:
    """A tiny draft that learns from a tiny target by a policy with four rows per step;
    each run has separate objects.
    """

    def __init__(self, folder: Path, **policy: Any) -> None:
        self._folder, self._policy = folder, policy_of(**{**MIXED, "max_new_tokens": 8, **policy})
        self.recorder = Recorder()
        self.objective = self._fresh()

    def _fresh(self) -> DistillObjective:
        taught = target()
        return DistillObjective(
            taught, OnlineTeacher(taught), tiny_tokenizer(), InitialDraft(draft().model, None), DraftSection()
        )

    def train(self, **training: Any) -> list[Tensor]:
        """Train to the end, or until the recorder stops the run; return the weights."""
        self.objective = self._fresh()
        writer = self.objective.decoding_copy
        settings = {"steps": 7, "batch_size": 4, "micro_batch_size": 4, **training}
        source = source_of(self._folder / "generated", self._policy, training_of(**settings), writer)
        train_toy(self._folder / "checkpoints", self.objective, self.recorder, source, **settings)
        return [parameter.detach() for parameter in self.objective.module.parameters()]


# --- recipes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_trains_the_same_rows(tmp_path: Path, processes: int) -> None:
    policy = policy_of(**MIXED, every=2)
    whole = batches(source_of(tmp_path / "one", policy), range(4))
    for process in range(processes):
        share = range(process, 8, processes)
        source = source_of(tmp_path / "all", policy, process=process, processes=processes)
        assert batches(source, range(4), share) == [[step[position] for position in share] for step in whole]
    assert sorted(written_in(tmp_path / "all", 2)) == written_in(tmp_path / "one", 2)


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Tensor], dict[int, float]]:
    """Return the weights and losses of a run without a stop."""
    run = Distilling(tmp_path_factory.mktemp("whole"), every=3)
    return run.train(), run.recorder.losses


@pytest.mark.parametrize("stop_at", range(1, 7))
def test_a_run_stopped_after_any_step_goes_on_as_if_it_had_not_been(
    tmp_path: Path, whole: tuple[list[Tensor], dict[int, float]], stop_at: int
) -> None:
    """Texts are written for three steps at a time: inside a window they are read, and at its beginning they are written
    again.
    """
    (weights, losses), stopped = whole, Distilling(tmp_path, every=3)
    stopped.recorder.actions[stop_at] = interrupt
    with pytest.raises(Interrupted):
        stopped.train()
    stopped.recorder.actions.clear()
    torch.rand(17)
    random.random()
    assert same(stopped.train(), weights) and list(stopped.recorder.losses) == [1, 2, 3, 4, 5, 6, 7]
    assert stopped.recorder.losses == losses and len(set(losses.values())) == 7


# --- the texts: whose they are, where they are learnt from, their files -----------------------------------------------


@cache
def plain(place: int) -> tuple[int, ...]:
    """Return the target's twelve greedy tokens after a prompt."""
    return naive_greedy(target().model, PROMPTS[place], 12)


@pytest.mark.parametrize("kind", ["target", "loop"])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_at_temperature_0_target_and_loop_write_what_the_target_writes_greedily(
    kind: AnswerSource, batch_size: int
) -> None:
    writer = writer_of(policy_of(loop=1, temperature=0, batch_size=batch_size), ends=())
    for text in writer.write(orders_of(kind), draft()):
        prompt = PROMPTS[text.position]
        assert text.tokens == (*prompt, *plain(text.position)) and text.answer == text.tokens[-12:]
        assert text.example_index == text.position and text.prompt_length == len(prompt)


def test_what_is_rejected_is_where_the_target_corrected_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chains are: right, wrong, right · wrong at once · all right · two tokens, the second wrong · nothing.

    The target writes t0 first. Then t1 is accepted and t2 corrected; t3 corrected; t4 t5 t6 accepted and t7 is a
    bonus; t8 is accepted and t9 corrected; t10 and t11 come without a draft.
    """
    t = plain(0)
    wrong = [(token + 1) % 16 for token in t]
    drafter = ScriptedDrafter(
        ((0, 1, 2), (t[1], wrong[2], t[3])),
        ((0, 1, 2), (wrong[3], t[4], t[5])),
        ((0, 1, 2), (t[4], t[5], t[6])),
        ((0, 1), (t[8], wrong[9])),
    )
    monkeypatch.setattr("trainer.drafts.distill.named_drafter", lambda name, draft, tokens: drafter)
    (text,) = writer_of(policy_of(loop=1, temperature=0), ends=()).write(orders_of("loop", 1), draft())
    assert text.answer == t and text.prompt_length == 3
    assert text.rejected == (3 + 2, 3 + 3, 3 + 9)
    places = [place for place, trained in enumerate(text.example("rejected").trained) if trained]
    assert places == [5, 6, 12]
    assert text.example("all") == Example((*PROMPTS[0], *t), (False,) * 3 + (True,) * 12, 3)


@pytest.mark.parametrize("kind", ["target", "loop"])
def test_what_a_text_says_does_not_depend_on_those_beside_it(kind: AnswerSource) -> None:
    """This is true at temperature 1, alone and with other texts, in either order, in batches of any size."""
    orders = orders_of(kind)
    together = writer_of(policy_of(loop=1)).write(orders, draft())
    assert writer_of(policy_of(loop=1, batch_size=3)).write(orders[::-1], draft()) == together
    for order, text in zip(orders, together, strict=True):
        assert writer_of(policy_of(loop=1)).write([order], draft()) == [text]
    assert len({text.answer for text in together}) > 4


TEXT = GeneratedText(4, 2, 7, "loop", 2, (14, 15, 4, 5, 6), (3,))


def files_in(folder: Path, process: int = 0, processes: int = 1, kept_steps: int = 100) -> WindowFiles:
    return WindowFiles(folder, tiny_tokenizer(), kept_steps, Process(process, processes))


def test_texts_that_are_written_again_by_another_number_of_processes_stand_there_once(tmp_path: Path) -> None:
    for process in (0, 1):
        files_in(tmp_path, process, 2).write(4, [TEXT._replace(position=process)])
        files_in(tmp_path, process, 2).write(6, [TEXT._replace(step=6, position=process)])
    files_in(tmp_path).write(4, [TEXT])
    assert files_in(tmp_path).read(4) == [TEXT] and len(files_in(tmp_path).read(6)) == 2


HEADS = HeadsSection(num_heads=3, markov_rank=4)
COUNTING = Example(tuple(i % 16 for i in range(20)), (True,) * 20, 0)


def disturb(objective: MedusaObjective, seed: int = 0) -> None:
    """Add noise to all trained parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def disturbed(section: HeadsSection, dtype: torch.dtype = torch.float32, seed: int = 0) -> MedusaObjective:
    """Return the objective of such heads on a tiny Llama, which is the same for every call."""
    objective = medusa_on(CausalLM(tiny_model("llama").to(dtype)), section)
    objective.module.to(dtype)
    disturb(objective, seed)
    return objective


class HeadLogits(NamedTuple):
    """The logits of one head at its labels, the target's logits for the same tokens, and the labels."""

    logits: Tensor
    target: Tensor
    labels: Tensor


def all_logits(objective: MedusaObjective, batch: Batch) -> list[HeadLogits]:
    """Return the logits of every head on a batch of one row in which every token is trained."""
    (inputs,) = objective.inputs(batch, step=0)
    heads, tokens, found = objective.module.heads, batch.tokens[0], []
    assert len(batch.tokens) == 1 and bool(batch.trained.all())
    lm_head = objective._states.lm_head
    for k, head in enumerate(heads.heads):
        x = head.features(inputs.hidden[0, : -(k + 2)])
        logits = F.linear(x, lm_head if head.lm_head is None else head.lm_head.weight)
        if heads.markov is not None:
            logits = logits + heads.markov(tokens[k + 1 : -1])
        found.append(HeadLogits(logits, F.linear(inputs.hidden[0, k + 1 : -1], lm_head), tokens[k + 2 :]))
    return found


def assert_same_gradients(objective: MedusaObjective, batch: Batch, expected: Tensor) -> None:
    """Compare the gradients of a weighted sum of the losses with respect to all trained parameters."""
    trained = list(objective.module.parameters())
    weights = torch.linspace(0.5, 2, len(expected), dtype=expected.dtype)
    losses, _, total = objective.module(*objective.inputs(batch, step=0), weights)
    assert torch.allclose(losses, expected, rtol=0, atol=1e-9)
    ours, theirs = (torch.autograd.grad(loss, trained) for loss in (total, (expected * weights).sum()))
    for gradient, right in zip(ours, theirs, strict=True):
        assert torch.allclose(gradient, right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("term", ["cross_entropy", "forward_kl"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_losses_and_gradients_are_those_of_all_logits_at_once(rank: int, shared: bool, term: str) -> None:
    section = HeadsSection(num_heads=3, markov_rank=rank, shared_lm_head=shared, loss=LossSection(**{term: 1}))
    objective, batch = disturbed(section, torch.float64), collate([COUNTING])
    expected = [
        F.cross_entropy(logits, labels, reduction="sum")
        if term == "cross_entropy"
        else divergence(logits, target, "forward_kl")
        for logits, target, labels in all_logits(objective, batch)
    ]
    assert_same_gradients(objective, batch, torch.stack(expected))


def blind_model() -> Any:
    """Make a model whose embeddings are all equal."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight[:1].expand(16, -1).clone())
    return model


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_learns_from_the_token_before_what_no_state_tells(tmp_path: Path, optimizer: str) -> None:
    """The target's states are the same for all tokens, so heads alone can only guess, but the bias can count."""
    found = []
    for rank in (0, 8):
        objective = medusa_on(CausalLM(blind_model()), HeadsSection(num_heads=2, markov_rank=rank))
        recorder, settings = Recorder(), {"steps": 80, "learning_rate": 5e-2, "checkpoint_every": 1000}
        texts = [Example(tuple((start + i) % 16 for i in range(20)), (True,) * 20, 0) for start in range(16)]
        train_toy(tmp_path / str(rank), objective, recorder, texts, optimizer=optimizer, **settings)
        found.append([recorder.figures[80][f"top1/head_{k}"] for k in range(2)])
    assert max(found[0]) < 0.3 and found[1] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "shared"), [(0, False), (4, False), (4, True)])
def test_saved_heads_reload_bit_equal(tmp_path: Path, rank: int, shared: bool, dtype: torch.dtype) -> None:
    section = HeadsSection(num_heads=3, markov_rank=rank, shared_lm_head=shared)
    objective = medusa_on(CausalLM(tiny_model("llama").to(dtype)), section)
    disturb(objective)
    objective.save(tmp_path)
    loaded = MedusaHeads.from_pretrained(tmp_path)
    expected = decoding_copy(objective.module.heads, dtype)
    assert loaded.config.markov_rank == rank and loaded.config == expected.config
    ours, theirs = loaded.state_dict(), expected.state_dict()
    assert ("markov.output.weight" in ours) == bool(rank) and ours.keys() == theirs.keys()
    assert all(ours[name].dtype == dtype and torch.equal(ours[name], theirs[name]) for name in ours)
