"""Policies: which rows a step has, by which draft they are written, and that a run which goes on trains the same."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_drafters import ScriptedDrafter
from tiny_models import naive_greedy
from tiny_policies import DATA, PROMPTS, draft, orders_of, policy_of, source_of, target, training_of, writer_of
from tiny_training import Recorder, interrupt, tiny_tokenizer, train_toy
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import BatchSource, Example, Offline, PlacedExample
from trainer.drafts.distill import DistillObjective, OnlineTeacher
from trainer.drafts.on_policy import GeneratedText, Origin, WindowFiles
from trainer.drafts.start import InitialDraft
from trainer.processes import Process
from trainer.recipe.draft import DraftSection, PolicySection
from trainer.run.loop import Interrupted

ALL = range(8)
MIXED: dict[str, Any] = {"offline": 0.25, "target": 0.25, "loop": 0.5}


def written_in(folder: Path, done: int = 0) -> list[GeneratedText]:
    return WindowFiles(folder, tiny_tokenizer(), 100).read(done)


def batches(source: BatchSource, steps: Sequence[int], positions: Sequence[int] = ALL) -> list[list[PlacedExample]]:
    """What the loop gets of a source."""
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
    """Greedily: the data's own row; the target's answer; the target's again, learnt where it corrected."""
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
        """The target itself, of which nothing is refused, and then another."""
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
    """A tiny draft that learns from a tiny target by a policy, four rows a step; each run has objects of its own."""

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
        """To the end, or to where the recorder stops it; returns the weights."""
        self.objective = self._fresh()
        writer = self.objective.writing_draft
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
    """Weights and losses of a run that nothing stopped."""
    run = Distilling(tmp_path_factory.mktemp("whole"), every=3)
    return run.train(), run.recorder.losses


@pytest.mark.parametrize("stop_at", range(1, 7))
def test_a_run_stopped_after_any_step_goes_on_as_if_it_had_not_been(
    tmp_path: Path, whole: tuple[list[Tensor], dict[int, float]], stop_at: int
) -> None:
    """Texts for three steps at a time: within a window they are read, at its beginning they are written again."""
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
    """The target's own twelve tokens behind a prompt, greedily."""
    return naive_greedy(target().model, PROMPTS[place], 12)


@pytest.mark.parametrize("kind", ["target", "loop"])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_at_temperature_0_target_and_loop_write_what_the_target_writes_greedily(kind: Origin, batch_size: int) -> None:
    writer = writer_of(policy_of(loop=1, temperature=0, batch_size=batch_size), ends=())
    for text in writer.write(orders_of(kind), draft()):
        prompt = PROMPTS[text.position]
        assert text.tokens == (*prompt, *plain(text.position)) and text.answer == text.tokens[-12:]
        assert text.place == text.position and text.prompt_length == len(prompt)


def test_what_is_rejected_is_where_the_target_corrected_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of three: right, wrong, right · wrong at once · all right · of two, the second wrong · nothing.

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
    monkeypatch.setattr("trainer.drafts.job.named_drafter", lambda name, draft, tokens: drafter)
    (text,) = writer_of(policy_of(loop=1, temperature=0), ends=()).write(orders_of("loop", 1), draft())
    assert text.answer == t and text.prompt_length == 3
    assert text.rejected == (3 + 2, 3 + 3, 3 + 9)
    places = [place for place, trained in enumerate(text.example("rejected").trained) if trained]
    assert places == [5, 6, 12]
    assert text.example("all") == Example((*PROMPTS[0], *t), (False,) * 3 + (True,) * 12, 3)


@pytest.mark.parametrize("kind", ["target", "loop"])
def test_what_a_text_says_does_not_depend_on_those_beside_it(kind: Origin) -> None:
    """At temperature 1, alone and among others, in an order or the other, in batches of any size."""
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
