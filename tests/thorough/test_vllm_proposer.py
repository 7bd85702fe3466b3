"""Our heads as a proposer of vLLM, in a simulated engine: they read the states of the right step and request."""

import json
import sys
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.vocabulary import d2t_of
from trainer.export.vllm_proposer import HeadsProposer, looked_up

SIZE, VOCAB, HEADS, LONGEST = 8, 12, 3, 64
CHAIN = tuple((0,) * depth for depth in range(1, HEADS + 1))


class Sampler(nn.Module):
    def forward(self, logits: Tensor, sampling_metadata: Any) -> None:
        pass


class RejectionSampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sampler = Sampler()

    def forward(self, metadata: Any, draft_probs: None, logits: Tensor, sampling_metadata: Any) -> None:
        self.sampler(logits=logits, sampling_metadata=sampling_metadata)


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(SIZE, VOCAB, bias=False)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("sampler", Sampler), ("rejection_sampler", RejectionSampler)):
        module = ModuleType(name)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, f"vllm.v1.sample.{name}", module)


def write_heads(folder: Path, **changes: Any) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(MedusaConfig(SIZE, VOCAB, HEADS, 1, CHAIN, **changes))
    for parameter in heads.parameters():
        nn.init.normal_(parameter)
    if heads.lm_head is not None:
        heads.d2t.copy_(d2t_of(range(1, VOCAB, 2)))
    heads.save_pretrained(folder)
    return heads


def proposer(given: Any, tokens: int = HEADS, hidden_size: int = SIZE, vocab_size: int = VOCAB) -> HeadsProposer:
    model = SimpleNamespace(get_hidden_size=lambda: hidden_size, get_vocab_size=lambda: vocab_size)
    speculative = SimpleNamespace(num_speculative_tokens=tokens)
    additional = {"headstart": given}
    return HeadsProposer(
        SimpleNamespace(model_config=model, speculative_config=speculative, additional_config=additional)
    )


def state_before(text: list[int]) -> Tensor:
    """Return the state from which the last token of a text was written, which is different for every text."""
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(hash(tuple(text[:-1])) % (1 << 60)))


def own_chain(heads: MedusaHeads, target: Target, text: list[int]) -> list[int]:
    """Return the chain that the heads in `decoding` draft after a text."""
    tokens = text[-1:]
    for k in range(HEADS):
        before = torch.tensor(tokens[-1]) if heads.markov is not None else None
        best = int(heads.head_logits(k, state_before(text), target.lm_head, before).argmax())
        tokens.append(best if heads.output_tokens is None else int(heads.output_tokens[best]))
    return tokens[1:]


class Request:
    def __init__(self, random: Random) -> None:
        self.text = [random.randrange(VOCAB) for _ in range(random.randint(2, 20))]
        self.left, self.unread, self.draft = random.randint(1, 30), random.randint(0, 2), list[int]()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_rank": 3},
        {"shared_lm_head": True, "markov_rank": 3, "linear": True},
        {"shared_lm_head": True, "markov_rank": 3, "draft_vocab_size": VOCAB // 2},
    ],
)
def test_two_hundred_requests_that_come_go_and_are_preempted_never_read_another_state(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    heads, target, random = write_heads(tmp_path, **changes), Target(), Random(0)
    drafting, sampler = proposer({"heads": str(tmp_path)}), RejectionSampler()
    drafting.load_model(target)
    waiting, running, compared = [Request(random) for _ in range(200)], list[Request](), 0
    while waiting or running:
        running += [waiting.pop() for _ in range(min(len(waiting), 8 - len(running), random.randint(0, 3)))]
        for request in running:
            if random.random() < 0.05:  # preempted: its draft is lost, and its text is read again
                request.unread, request.draft = random.randint(1, 2), []
            request.draft = request.draft[: random.randint(0, 2 * HEADS)]  # trimmed if no room is left for it
        drafted, states, sampled = [], list[Tensor](), list[list[int]]()
        for request in running:
            drafted.append(len(request.draft))
            tokens = [*request.draft[: random.randint(0, HEADS)], random.randrange(VOCAB)]
            states += [state_before([*request.text, *request.draft[:place], 0]) for place in range(drafted[-1] + 1)]
            sampled.append([] if request.unread else tokens)
            request.unread, request.draft = max(request.unread - 1, 0), []
            request.text, request.left = request.text + sampled[-1], request.left - len(sampled[-1])
        if not running:
            continue
        logits = target.compute_logits(torch.stack(states))
        if any(drafted):
            sampler(SimpleNamespace(num_draft_tokens=drafted), None, logits, None)
        else:
            sampler.sampler(logits=logits, sampling_metadata=None)
        if random.random() < 0.2:  # log-probabilities of a prompt
            target.compute_logits(torch.randn(random.randint(1, 9), SIZE))
        if random.random() < 0.9:  # otherwise no text has room for a draft
            array = np.zeros((len(running), LONGEST), np.int32)
            for row, request in enumerate(running):
                array[row, : len(request.text)] = request.text
            drafts = drafting.propose(sampled, np.array([len(request.text) for request in running]), array)
            for request, tokens, draft in zip(running, sampled, drafts, strict=True):
                assert draft == (own_chain(heads, target, request.text) if tokens else [])
                request.draft, compared = draft, compared + len(draft)
        running = [request for request in running if request.left > 0]
    assert compared > 3000


def test_a_step_that_vllm_sampled_otherwise_than_read_is_an_error(tmp_path: Path) -> None:
    write_heads(tmp_path)
    drafting, target, sampler = proposer({"heads": str(tmp_path)}), Target(), Sampler()
    drafting.load_model(target)
    array, counts = np.ones((2, LONGEST), np.int32), np.array([4, 4])
    sampler(logits=target.compute_logits(torch.zeros(3, SIZE)), sampling_metadata=None)
    with pytest.raises(RuntimeError, match="2 requests with 0 drafted tokens do not match 3 states"):
        drafting.propose([[1], [1]], counts, array)
    with pytest.raises(RuntimeError, match="sampled without computing a state"):
        drafting.propose([[1], [1]], counts, array)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),  # the latest occurrence; the continuation ends with the text
        ([7, 7, 7], [7, 7, 7, 7]),  # it touches the end of the text, and repeats further
        ([1, 2, 3, 4], []),
        ([1, 2], []),
    ],
)
def test_a_lookup_continues_the_latest_earlier_occurrence(text: list[int], expected: list[int]) -> None:
    assert looked_up(torch.tensor(text), 2, 4) == expected


def test_a_text_that_repeats_is_looked_up_and_the_heads_draft_for_the_others(tmp_path: Path) -> None:
    heads, target, sampler = write_heads(tmp_path), Target(), Sampler()
    drafting = proposer({"heads": str(tmp_path), "ngram": 2, "depth": 2}, tokens=5)
    drafting.load_model(target)
    texts = [[1, 2, 3, 4, 5, 6, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8]]
    sampler(logits=target.compute_logits(torch.stack([state_before(text) for text in texts])), sampling_metadata=None)
    drafts = drafting.propose([[2], [8]], np.array([8, 8]), np.array(texts, np.int32))
    assert drafts == [[3, 4, 5, 6, 1], own_chain(heads, target, texts[1])[:2]]


def test_what_does_not_fit_is_one_sentence_before_a_weight_is_read(tmp_path: Path) -> None:
    write_heads(tmp_path)
    folder = str(tmp_path)
    for given, sizes, complaint in [
        (None, {}, r"has headstart None: use --additional-config '\{\"headstart\":\{\"heads\":FOLDER\}\}'"),
        ({"heads": folder, "depth": 0}, {}, "'depth': 0.*depth and ngram of at least 1"),
        ({"heads": folder, "tree": 1}, {}, "'tree': 1"),
        ({"heads": "/nowhere"}, {}, "/nowhere contains no headstart heads"),
        ({"heads": folder}, {"hidden_size": 16}, "have hidden_size 8, but the target has 16: use heads that"),
        ({"heads": folder}, {"vocab_size": 13}, "have vocab_size 12, but the target has 13"),
        ({"heads": folder}, {"tokens": 4}, "num_speculative_tokens is 4 but there are 3 heads: use at most 3"),
        ({"heads": folder, "depth": 4, "ngram": 2}, {"tokens": 5}, r"headstart\.depth is 4 but there are 3"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            proposer(given, **sizes)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"heads.0.blocks.1.linear.bias in .* has shape None, unlike config.json"):
        proposer({"heads": folder}).load_model(Target())
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        proposer({"heads": folder}).load_model(Target())
