"""A server scores its greedy texts in passes of two widths: differences due to rounding pass,
and a wrong rule fails.
"""

import math
from dataclasses import dataclass, field

import pytest
from scripted_endpoint import Reply, Request, serve

from decoding.measure.proof.finding import Finding, judged, undecided
from decoding.measure.proof.reference import EngineText
from trainer.servers.client import ServedModel
from trainer.servers.connection import Endpoint
from trainer.servers.texts import CHECK, Scorer, explained, rounding_or_rule

PROMPT, FORCED, EOS = (7, 8, 9), 5, (0, 6)
TEXT = EngineText(PROMPT, (1, 1, 1, 1, 1, 1, 2, 1, 1, 0))


@dataclass
class CachingServer:
    """A server in which token 1 is ``gap`` better than token 2, and ``shift`` less in passes over four tokens; the text
    ends with 6.
    """

    gap: float
    shift: float = 0.0
    caches: bool = True
    tells_ids: bool = True
    held: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def __call__(self, request: Request) -> Reply:
        body = request.body
        assert body["max_tokens"] == 1 and body["temperature"] == 0, "nothing is drafted"
        assert body["logit_bias"] == {str(FORCED): 1000} and body["top_k"] == -1
        prompt = body["prompt"]
        kept = len(self.held) if self.caches and body["cache_prompt"] and prompt[: len(self.held)] == self.held else 0
        self.held, width = prompt, len(prompt) - kept
        self.widths.append(width)
        scores = {1: -0.5, 2: -0.5 - self.gap + (self.shift if width == 4 else 0.0), 6: -9.0}
        if len(prompt) == len(PROMPT) + len(TEXT.tokens) - 1:
            scores |= {6: -0.1}
        if width == 4 and self.shift == math.inf:
            scores = {3: -0.5, 4: -0.6}  # no token is equally good in both passes
        best = [{**({"id": token} if self.tells_ids else {}), "logprob": score} for token, score in scores.items()]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": kept}}
        told = {"content": [{"id": FORCED, "logprob": 0.0, "top_logprobs": best}]}
        choice = {"index": 0, "text": "a", "finish_reason": "length", "logprobs": told}
        return 200, {"choices": [choice], "usage": usage}


def found(server: CachingServer, text: EngineText = TEXT) -> Finding:
    with serve(server) as endpoint, ServedModel(Endpoint(address=endpoint.address, model="tiny")) as served:
        return rounding_or_rule(Scorer(served, {"top_k": -1}, FORCED), [text], 4, EOS)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_a_gap_that_the_width_of_a_pass_can_change_is_rounding() -> None:
    server = CachingServer(gap=0.1, shift=0.3)
    finding = found(server)
    assert (
        finding.status == "ok" and "8 of these 9 tokens; the scores of the other tokens are up to 0.1" in finding.found
    )
    assert "by up to 0.3, and the best token changes at 2 of 3 places: the texts differ by rounding" in finding.found
    assert server.widths[:10] == [3, *[1] * 9], "the prompt, and each token alone"
    assert sorted([server.widths[10:14], server.widths[14:]]) == [[3, 1, 4, 4], [3, 2, 4]], "up to places 9 and 6"


def test_a_gap_beyond_what_the_width_changes_is_a_fault() -> None:
    finding = found(CachingServer(gap=0.5, shift=0.3))
    assert finding.status == "problem" and finding.found.endswith("the rule, or its cache, is wrong")
    assert found(CachingServer(gap=0.5)).status == "problem", "widths change nothing here"
    for shift in (9.0, math.inf):
        broken = found(CachingServer(gap=5.0, shift=shift))
        assert broken.status == "problem" and broken.found.endswith("is wrong"), "passes over four tokens are broken"
    unknown = EngineText(PROMPT, (*[1] * 6, 4, 0))
    assert found(CachingServer(gap=0.1, shift=0.3), unknown).figures["widest_gap"] == float("inf")


def test_texts_that_the_server_writes_without_a_draft_have_nothing_to_explain() -> None:
    server = CachingServer(gap=0.1)
    finding = found(server, EngineText(PROMPT, (*[1] * 9, 0)))  # all end tokens count as equal
    assert finding.status == "ok" and "also writes 9 of these 9 tokens; passes over 4 tokens change" in finding.found


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (CachingServer(0.1, caches=False), "it computed 4 tokens at a time, not 1"),
        (CachingServer(0.1, tells_ids=False), "it reports no scores by token id"),
    ],
)
def test_a_server_that_cannot_be_asked_leaves_it_open(server: CachingServer, reason: str) -> None:
    finding = found(server)
    assert finding.status == "open" and reason in finding.found


@pytest.mark.parametrize(
    ("evidence", "quantised", "status"),
    [
        (judged(CHECK, True, "", largest_change=0.4), False, "note"),
        (judged(CHECK, True, "", largest_change=0.2), False, "problem"),
        (judged(CHECK, True, "", largest_change=0.2), True, "note"),
        (judged(CHECK, False, "", largest_change=0.4), True, "problem"),
        (undecided(CHECK, ""), True, "problem"),
    ],
)
def test_a_fault_is_a_note_only_if_the_server_proves_that_it_rounds_so(
    evidence: Finding, quantised: bool, status: str
) -> None:
    identity = judged("greedy identity", False, "2 tokens are wrong", widest_fault=0.3)
    assert explained(identity, evidence, quantised).status == status
