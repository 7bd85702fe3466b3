"""The target's states in the loop: a drafter with taps receives, exactly once, the states of each token that was run.

Targets compute in float64, where sums in another order differ by 1e-14; in float32 they differ by more than 1e-5.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scripted_drafters import HostileDrafter, RandomPolicy
from tiny_dspark import states_at
from tiny_models import naive_greedy, positions_run, tiny_model
from torch import Tensor

from decoding.drafters import Drafter, DraftSession
from decoding.drafters.base import DraftRequest, TextStart
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import ModelOutput
from decoding.policies import Budget
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, ProposalKind
from decoding.text import Generation

PROMPTS = ([3, 1, 4, 1, 5], [7], [2, 7, 1, 8] * 6, [6, 6], [9, 8, 7, 6, 5, 4, 3, 2, 1], [0])
COUNT = 14


class Reading(Drafter):
    """A wrapper of another drafter, whose session asserts that the states it receives equal the target's states."""

    name = "reading"

    def __init__(self, drafter: Drafter, taps: tuple[int, ...] = (0,)) -> None:
        self.drafter, self.taps = drafter, taps
        self.handed = 0

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return self.drafter.budgets

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return self.drafter.kinds(sampling)

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "ReadingSession":
        return ReadingSession(self, target, self.drafter.open(target, sampling, rows, max_length))


class ReadingSession:
    def __init__(self, drafter: Reading, target: CausalLM, session: DraftSession) -> None:
        self._drafter, self._target, self._session = drafter, target, session
        self._states: dict[int, list[Tensor]] = {}

    def admit(self, row: int, start: TextStart) -> None:
        self._session.admit(row, start)
        self._states[row] = []

    def move(self, row: int, to: int) -> None:
        self._session.move(row, to)
        self._states[to] = self._states.pop(row)

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        self._session.observe(proposals, logits)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for row, request in enumerate(requests):
            assert request.hidden is None or request.hidden.isfinite().all()
            if request.states is not None:
                self._states[row].append(request.states)
                self._drafter.handed += len(request.states)
            wanted = states_at(self._target, request.tokens, self._drafter.taps)[:-1]
            torch.testing.assert_close(torch.cat(self._states[row]), wanted, rtol=0, atol=1e-6)
        return self._session.propose(requests)


def double(**settings: Any) -> CausalLM:
    return CausalLM(tiny_model("llama", **settings).double())


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return double()


def hostile(target: CausalLM, chains: bool = False) -> HostileDrafter:
    right = [[*prompt, *naive_greedy(target.model, prompt, COUNT)] for prompt in PROMPTS]
    return HostileDrafter(1, right[0], chains=chains, others=right[1:])


@pytest.mark.parametrize(("batch_size", "chains"), [(1, True), (4, False)])
def test_every_token_that_was_run_comes_with_its_states(target: CausalLM, batch_size: int, chains: bool) -> None:
    """Branches are accepted and rejected, some steps have no draft, and rows end, are refilled and move."""
    eos = (naive_greedy(target.model, PROMPTS[1], COUNT)[5],)
    for policy_seed in range(2):
        drafter = Reading(hostile(target, chains))
        config = DecodingConfig(COUNT, eos_token_ids=eos)
        texts = Engine(target, drafter, RandomPolicy(policy_seed)).decode(PROMPTS, config, batch_size=batch_size)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            plain = naive_greedy(target.model, prompt, COUNT)
            assert text.tokens == plain[: plain.index(eos[0]) + 1 if eos[0] in plain else COUNT]
        assert drafter.handed > sum(map(len, PROMPTS))


def test_a_prompt_that_continues_a_cached_text_comes_with_all_its_states(target: CausalLM) -> None:
    """The states are kept with the cache.

    After a turn of another drafter, which kept no states, the text runs again.
    """
    kept, text, held = target.new_cache(8), [3, 1, 4], 0
    for turn in range(5):
        drafter = Reading(hostile(target)) if turn != 2 else None
        with positions_run(target.model) as run:
            steps = list(Engine(target, drafter).steps(text, DecodingConfig(6), cache=kept))
        written = Generation.of(steps).tokens
        assert written == naive_greedy(target.model, text, 6)
        prefilled = next(place for place, _ in enumerate(run) if sum(run[: place + 1]) >= len(text) - held)
        assert sum(run[: prefilled + 1]) == len(text) - held
        held = len(text) + len(written) - 1 if turn != 2 else held  # the last token was written, but never run
        text = [*text, *written, 2]


def test_one_cache_serves_drafters_that_read_other_layers() -> None:
    """`Reading` compares the states of every request with the target's states after the layers in its ``taps``."""
    target, text = double(num_hidden_layers=4), [3, 1, 4]
    kept = target.new_cache(8)
    for taps in ((0,), (1, 2), (0,)):
        drafter = Reading(hostile(target), taps)
        list(Engine(target, drafter).steps(text, DecodingConfig(6), cache=kept))
        assert drafter.handed >= len(text)
        text = [*kept.text, 5]


def test_states_of_a_cut_and_appended_text_are_those_of_one_pass() -> None:
    target, text = CausalLM(tiny_model("llama").double(), static="eager"), [3, 1, 4, 1, 5, 9, 2, 6]
    cache = target.new_cache(16)
    assert cache.rewind(text, (0,)) == 0
    cache.text, cache.states = text, list(target.prefill([text], cache, taps=(0,)).states)
    other = [*text[:5], 7, 7, 7]
    assert cache.rewind(other, (0,)) == 5 == sum(map(len, cache.states))
    output = target.append([other[5:]], cache, taps=(0,))
    wanted = states_at(target, other, (0,))
    torch.testing.assert_close(torch.cat([*cache.states, *output.states]), wanted, rtol=0, atol=1e-6)


def test_states_outlive_the_outputs_of_a_target_with_static_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step overwrites these outputs, even if nothing is drafted in between."""
    target = CausalLM(tiny_model("llama").double(), static="eager")
    last = list[ModelOutput]()

    def overwriting(run: Callable[..., ModelOutput]) -> Callable[..., ModelOutput]:
        def outputs(*given: Any, **named: Any) -> ModelOutput:
            for each in last:
                for states in (each.hidden, *each.states):
                    states.fill_(torch.nan)
            last[:] = [run(*given, **named)]
            return last[0]

        return outputs

    for name in ("verify", "append"):
        monkeypatch.setattr(target, name, overwriting(getattr(target, name)))
    drafter = Reading(hostile(target))
    texts = Engine(target, drafter, RandomPolicy(0)).decode(PROMPTS[:3], DecodingConfig(COUNT), batch_size=2)
    assert [text.tokens for text in texts] == [naive_greedy(target.model, prompt, COUNT) for prompt in PROMPTS[:3]]
    kept, text = target.new_cache(64), PROMPTS[0]
    for _ in range(3):
        written = Generation.of(list(Engine(target, drafter).steps(text, DecodingConfig(4), cache=kept))).tokens
        assert written == naive_greedy(target.model, text, 4)
        text = [*text, *written, 2, 3]
