"""The web demo without its page: races, forms, visitors, and the HTML of their texts and figures."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import naive_greedy, tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.drafters import Drafter, DraftModelDrafter, DraftTreeDrafter, PromptLookupDrafter
from decoding.engine import Engine
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.policies import FixedPolicy
from decoding.stream import Piece, Tally, decode_text
from trainer.demo import race as racing
from trainer.demo import views
from trainer.demo.form import AUTOMATIC, LONGEST_PROMPT, MOST_NEW_TOKENS, Form, fitting_rules, race_of
from trainer.demo.race import Ending, Models, Race
from trainer.demo.visitors import Visitors

TOKENIZER = byte_tokenizer()
FORM = Form(prompt="abcabcab", drafter="tree", depth=3, nodes=8, max_new_tokens=24)


def models_of(target: CausalLM) -> Models:
    draft = CausalLM(tiny_model(vocab=128, seed=1))
    twin = DraftModelDrafter(target if not target.is_static else CausalLM(target.model), (1, 1, 1))
    drafters: dict[str, Drafter] = {
        "lookup": PromptLookupDrafter(),
        "tree": DraftTreeDrafter(draft, 3, 3, 8),
        "twin": twin,
    }
    return Models.of(target, TOKENIZER, drafters)


@pytest.fixture(scope="module")
def models() -> Models:
    return models_of(CausalLM(tiny_model(vocab=128)))


@pytest.fixture
def visitors(models: Models) -> Visitors:
    return Visitors(models)


def finished(race: Race) -> Race:
    while race.advance(0.001):
        pass
    return race


@pytest.mark.parametrize("drafter", ["lookup", "tree", "twin"])
def test_both_texts_of_a_greedy_race_are_plain_decodings(models: Models, drafter: str) -> None:
    race = finished(race_of(models, replace(FORM, drafter=drafter, depth=3, nodes=4)))
    expected = naive_greedy(models.target.model, race.prompt, 24)
    assert race.plain.tokens == race.speculative.tokens == expected
    assert race.ending == Ending(24, "equal") and race.finished and not race.stopped


@pytest.mark.parametrize("drafter", ["lookup", "tree"])
def test_a_race_takes_the_steps_of_the_engine_and_their_figures(models: Models, drafter: str) -> None:
    race = finished(race_of(models, replace(FORM, drafter=drafter)))
    engine = Engine(models.target, models.drafters[drafter], FixedPolicy(3, 8), TOKENIZER)
    steps = engine.decode(race.prompt, replace(race.config, trees=True)).steps
    mine = race.speculative
    assert [(step.tokens, step.accepted, step.path) for step in mine.steps] == [
        (step.tokens, step.accepted, step.path) for step in steps
    ]
    assert any(step.tree is not None for step in mine.steps) and all(step.tree is None for step in race.plain.steps)
    assert mine.tally == Tally.of(mine.steps) and mine.tally.passes == len(steps) - 1
    assert len(mine.texts) == len(mine.steps)
    assert "".join(piece.text for pieces in mine.texts for piece in pieces) == decode_text(mine.tokens, TOKENIZER)


def test_every_tree_keeps_to_the_bounds_of_the_form(models: Models) -> None:
    def sizes(form: Form) -> tuple[int, int]:
        steps = finished(race_of(models, form)).speculative.steps
        trees = [step.tree for step in steps if step.tree is not None]
        return max(tree.shape.max_depth for tree in trees), max(map(len, trees))

    assert sizes(FORM)[1] == 8 and sizes(replace(FORM, nodes=7))[1] == 5, "it drafts trees of 3, 5 and 8 nodes"
    assert sizes(replace(FORM, depth=1)) == (1, 3)
    twin = replace(FORM, drafter="twin")
    assert (sizes(twin), sizes(replace(twin, depth=2))) == ((3, 4), (2, 3))


class Timed:
    """A decode of given seconds a step, which writes its name."""

    def __init__(self, name: str, seconds_of_a_step: float, steps: int, log: list[str]) -> None:
        self.name, self.step, self.left, self.log = name, seconds_of_a_step, steps, log
        self.seconds, self.finished = 0.0, False

    def advance(self) -> None:
        self.seconds, self.left = self.seconds + self.step, self.left - 1
        self.finished = self.left == 0
        self.log.append(self.name)

    def close(self) -> None:
        pass


def test_the_decode_that_has_spent_less_time_takes_the_next_step(models: Models, monkeypatch: Any) -> None:
    race, log = race_of(models, FORM), list[str]()
    race.plain, race.speculative = Timed("p", 1.0, 6, log), Timed("s", 2.0, 2, log)  # type: ignore[assignment]
    monkeypatch.setattr(race, "_compare", lambda: Ending(0, "equal"))
    assert race.advance(3.5) and log == ["p", "s", "p"], "a look after 3.5 seconds of decoding or more"
    assert not race.advance(100.0) and log == ["p", "s", "p", "p", "s", "p", "p", "p"]


def test_texts_that_part_are_judged_by_the_targets_margin(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    race = finished(race_of(models, FORM))
    last = race.speculative.steps[-1]
    other = (last.tokens[-1] + 1) % 128
    race.speculative.steps[-1] = last._replace(tokens=(*last.tokens[:-1], other))
    ending = race._compare()
    assert ending.verdict == "fault" and ending.alike == 23 and ending.margin is not None and ending.margin > 0.01
    monkeypatch.setattr(racing, "near_tie", lambda dtype: ending.margin)
    assert race._compare().verdict == "near-tie"
    race.speculative.steps.pop()
    assert race._compare().verdict == "fault", "no rounding ends a text"
    race.stopped, race.plain.finished = True, False
    assert race._compare().verdict == "stopped"


def test_a_sampled_race_writes_the_text_of_its_seed_and_its_label(models: Models) -> None:
    sampled = replace(FORM, drafter="lookup", depth=10, nodes=11, temperature=1.0, seed=3)
    race = finished(race_of(models, sampled))
    assert race.ending == Ending(24, "equal"), "sampled verify draws as plain decoding does"
    assert race.plain.tokens != finished(race_of(models, replace(sampled, seed=4))).plain.tokens
    lossy = finished(race_of(models, replace(sampled, rule="typical")))
    assert lossy.config.label == "lossy" and lossy.plain.tokens == race.plain.tokens
    assert 'class="badge lossy">lossy' in views.texts(lossy) and 'class="badge lossless">lossless' in views.texts(race)
    assert lossy.ending is not None and (
        lossy.ending.verdict == "equal" or "another distribution" in views.verdict(lossy)
    )


def test_steps_of_fixed_shapes_race_on_two_caches() -> None:
    models = models_of(CausalLM(tiny_model(vocab=128), static="eager"))
    assert models.plain_target is not models.target and models.plain_target.model is models.target.model
    models.warm_up()
    race = finished(race_of(models, FORM))
    assert race.ending == Ending(24, "equal")


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"prompt": None}, "the prompt is empty"),
        ({"prompt": "a" * 90}, "a prompt of 90 tokens and 24 new ones make 114, but the target's context holds 96"),
        ({"prompt": "a" * (LONGEST_PROMPT + 1)}, f"the prompt has {LONGEST_PROMPT + 1} characters"),
        ({"prompt": "\ud800"}, "the prompt is not UTF-8 text"),
        ({"drafter": "owl"}, "no drafter is called 'owl': choose one of lookup, tree, twin"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": None}, "temperature is empty"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "warm"}, "temperature is warm: give a number"),
        ({"max_new_tokens": 0}, f"max new tokens is 0: give a whole number from 1 to {MOST_NEW_TOKENS}"),
        ({"max_new_tokens": 10**9}, f"max new tokens is 1e+09: give a whole number from 1 to {MOST_NEW_TOKENS}"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": 10**400}, f"seed is 1{39 * '0'}: give a number"),
        ({"depth": 0}, "depth is 0"),
        ({"drafter": "lookup", "depth": 3, "nodes": 1}, "nodes is 1"),
        ({"rule": "owl"}, "no rule is called 'owl'"),
        ({"rule": "typical"}, "the typical acceptance rule needs a temperature above 0; it is 0"),
        ({"rule": "greedy", "temperature": 1}, "the greedy rule needs temperature 0; it is 1"),
        ({"rule": "token", "temperature": 1}, "the token rejection rule takes"),
    ],
)
def test_a_bad_entry_is_one_sentence(models: Models, entry: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        race_of(models, replace(FORM, **entry))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_only_rules_that_fit_are_offered_and_each_of_them_runs(models: Models) -> None:
    for name, drafter in models.drafters.items():
        assert [rule for _, rule in fitting_rules(drafter, 0.0)] == [AUTOMATIC, "greedy"]
        offered = dict(fitting_rules(drafter, 0.8))
        assert {"automatic (lossless)": AUTOMATIC, "typical (lossy)": "typical"}.items() <= offered.items()
        assert sum("lossy" in label for label in offered) == 1
        for rule in offered.values():
            form = replace(FORM, drafter=name, nodes=4, temperature=0.8, rule=rule, max_new_tokens=8)
            assert len(finished(race_of(models, form)).speculative.tokens) == 8
    assert "token" not in dict(fitting_rules(models.drafters["lookup"], 1.0)).values()
    assert "token" in dict(fitting_rules(models.drafters["twin"], 1.0)).values()


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> "weakref.WeakSet[PreallocatedCache]":
    """Every cache that is made from now on, while it lives."""
    made: weakref.WeakSet[PreallocatedCache] = weakref.WeakSet()
    new_cache = CausalLM.new_cache

    def counted(self: CausalLM, *args: Any, **kwargs: Any) -> PreallocatedCache:
        cache = new_cache(self, *args, **kwargs)
        made.add(cache)
        return cache

    monkeypatch.setattr(CausalLM, "new_cache", counted)
    return made


def alive(caches: "weakref.WeakSet[PreallocatedCache]") -> int:
    gc.collect()
    return len(caches)


def begun(frames: Iterator[Race], looks: int = 3) -> Race:
    """Take a few looks at a race, which must not be at its end."""
    race = next(frames)
    for _ in range(looks):
        race = next(frames)
    assert not race.finished
    return race


@pytest.fixture
def one_step_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.demo.visitors.FRAME_SECONDS", 1e-9)


@pytest.mark.usefixtures("one_step_a_look")
def test_two_visitors_decode_what_each_decodes_alone(visitors: Visitors) -> None:
    forms = replace(FORM, drafter="twin", depth=3, nodes=4), replace(FORM, drafter="tree", prompt="xyzxyz", seed=1)
    alone = [finished(race_of(visitors.models, form)) for form in forms]
    both = [visitors.run(name, form) for name, form in zip("ab", forms, strict=True)]
    races, most = [begun(frames, 1) for frames in both], visitors.decoding
    while any(next(frames, None) for frames in both):
        pass
    assert most == 2 and visitors.decoding == 0 and visitors.present == 2
    for race, expected in zip(races, alone, strict=True):
        assert race.ending == Ending(24, "equal") and race.speculative.tokens == expected.speculative.tokens
        assert [step.path for step in race.speculative.steps] == [step.path for step in expected.speculative.steps]
    assert visitors.race("a") is races[0] and visitors.race("b") is races[1]


@pytest.mark.usefixtures("one_step_a_look")
@pytest.mark.parametrize("goes", ["closes the stream", "leaves", "both"])
def test_one_who_goes_in_mid_stream_leaves_nothing(visitors: Visitors, caches: Any, goes: str) -> None:
    frames = visitors.run("a", FORM)
    begun(frames)
    assert alive(caches) == 3 and visitors.decoding == 1, "of the target twice, and of the draft"
    if goes != "closes the stream":
        visitors.leave("a")
    if goes != "leaves":
        frames.close()  # type: ignore[attr-defined]
    assert alive(caches) == 0 and visitors.decoding == 0
    assert (visitors.race("a") is None) == (goes != "closes the stream")
    assert list(visitors.run("a", FORM))[-1].ending == Ending(24, "equal"), "the next one is served"


def test_one_who_leaves_while_the_race_is_made_leaves_nothing(
    visitors: Visitors, caches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_meanwhile(models: Models, form: Form) -> Race:
        visitors.leave("a")
        return race_of(models, form)

    monkeypatch.setattr("trainer.demo.visitors.race_of", left_meanwhile)
    assert list(visitors.run("a", FORM)) == []
    assert alive(caches) == 0 and visitors.decoding == visitors.present == 0


@pytest.mark.usefixtures("one_step_a_look")
def test_a_finished_or_stopped_race_keeps_its_steps_and_no_cache(visitors: Visitors, caches: Any) -> None:
    frames = visitors.run("a", FORM)
    begun(frames)
    visitors.stop("a")
    (race,) = frames
    assert race.stopped and race.ending is not None and race.ending.verdict == "stopped"
    assert race.speculative.steps and views.step_view(race, 1)
    assert alive(caches) == 0 and visitors.decoding == 0 and visitors.race("a") is race
    ended = list(visitors.run("a", FORM))[-1]
    assert ended.finished and alive(caches) == 0


@pytest.mark.usefixtures("one_step_a_look")
def test_a_new_run_takes_the_place_of_the_visitors_last_one(visitors: Visitors) -> None:
    first = visitors.run("a", FORM)
    race = begun(first)
    second = visitors.run("a", FORM)
    assert race.stopped and visitors.race("a") is not race
    assert len(list(first)) == 1 and list(second)[-1].finished


def test_a_bad_entry_loses_nothing(visitors: Visitors) -> None:
    race = list(visitors.run("a", FORM))[-1]
    with pytest.raises(ValueError, match="the prompt is empty"):
        visitors.run("a", replace(FORM, prompt=""))
    assert visitors.race("a") is race and not race.stopped


def test_the_last_race_of_the_earliest_visitor_is_forgotten_first(visitors: Visitors) -> None:
    short = replace(FORM, drafter="lookup", max_new_tokens=1)
    for number in range(66):
        visitors.run(str(number % 65), short)
    assert visitors.present == 64 and visitors.race("1") is None and visitors.race("0") is not None


def test_text_is_marked_by_its_origin_and_escaped() -> None:
    pieces = [Piece("<b>", True), Piece("&", True), Piece(" own", False)]
    assert views.marked(pieces) == '<span class="drafted">&lt;b&gt;&amp;</span><span class="own"> own</span>'
    assert 'class="drafted now"' in views.marked(pieces, "now")
    assert views.marked([Piece("\u202eمی\u200cخواهم\x1b", False)]) == '<span class="own">می\u200cخواهم</span>'
    assert "<i>" not in views.notice("bad <i>")


def test_figures_of_a_race_are_those_of_its_steps(models: Models) -> None:
    race = finished(race_of(models, replace(FORM, drafter="twin", depth=3, nodes=4)))
    tally = race.speculative.tally
    assert tally.lengths == {3: 5, 2: 1}, "a draft that is the target is accepted whole, up to the text's end"
    page = views.summary(race)
    assert f"<dd>{23 / 6:.2f}</dd>" in page and "17 of 17 drafted tokens" in page and f"{race.speedup:.2f}×" in page
    assert "Same text: all 24 tokens are equal." in page and 'data-verdict="equal"' in page
    columns = views.histogram(tally)
    assert columns.count("<li") == 4 and 'title="5 of 6 passes accepted 3"' in columns
    parts = views.split(race)
    assert parts.count('class="part draft"') == 2 and f"{1000 * tally.total_seconds / tally.tokens:.2f} ms" in parts
    assert "<b>" in views.texts(race) and f"{race.plain.tally.tokens_per_second:.0f}" in views.texts(race)


def test_a_step_is_shown_with_its_tree_and_its_own_tokens(models: Models) -> None:
    race = finished(race_of(models, FORM))
    steps = race.speculative.steps
    prefill, first = views.step_view(race, 0), views.step_view(race, 1)
    assert "The prefill" in prefill and "<svg" not in prefill
    assert first.count('class="node') == len(steps[1].tree or ()) + 1 and "the target wrote the next one" in first
    assert first.count("now") == views.marked(race.speculative.texts[1], "now").count("now") > 0
    assert views.step_view(race, 99) == views.step_view(race, len(steps) - 1)
    assert "once a prompt runs" in views.step_view(None, 3)


def test_a_page_without_a_race_has_all_its_parts_empty() -> None:
    assert views.texts(None).count("–") == 2 and views.summary(None) == views.charts(None) == views.notice("") == ""
