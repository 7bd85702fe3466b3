"""Texts written during the training: whose they are, where they are learnt from, their files."""

from functools import cache
from pathlib import Path

import pytest
from scripted_drafters import ScriptedDrafter
from tiny_models import naive_greedy
from tiny_policies import PROMPTS, draft, orders_of, policy_of, target, writer_of
from tiny_training import tiny_tokenizer

from trainer.data.batch import Example
from trainer.drafts.on_policy import GeneratedText, Origin, WindowFiles
from trainer.processes import Process


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
    monkeypatch.setattr("trainer.drafts.distill.named_drafter", lambda name, draft, tokens: drafter)
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
