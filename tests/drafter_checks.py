"""Every drafter of the project on tiny models, and checks of the promises that all drafters must keep."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from scripted_drafters import RandomPolicy
from tiny_dspark import states_at, tiny_dflash, tiny_dspark
from tiny_eagle3 import tiny_eagle3
from tiny_models import naive_greedy
from torch import Tensor

from decoding.drafters import (
    CascadeDrafter,
    Drafter,
    DraftModelDrafter,
    DraftSession,
    DraftTreeDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    Eagle3TreeDrafter,
    HybridDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    PromptLookupDrafter,
)
from decoding.drafters.base import DraftRequest, TextStart
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import lm_head_input
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, TokenTree
from decoding.rules.verify import SAMPLED_VERIFY

PROMPTS = ([1, 2, 3, 1, 2], [5], [7, 7, 0, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8], [4, 4])
ROOM = 96
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0))
FEW = (0, 2, 3)
"""Tokens of a reduced vocabulary."""


def nudged_heads(
    target: CausalLM, markov_rank: int = 0, count: int = 2, writes: Sequence[int] | None = None
) -> MedusaHeads:
    """Make heads that predict almost like the target's lm_head, so they are sometimes right; a bias reads the previous
    token.
    """
    shared, few = writes is not None, None if writes is None else len(writes)
    sizes = target.hidden_size, target.vocab_size, count, 1, ((0,),), shared, markov_rank
    heads = MedusaHeads.for_target(target.model, MedusaConfig(*sizes, draft_vocab_size=few))
    if writes is not None:
        heads.write_only(writes, target.model.get_output_embeddings().weight)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in heads.markov.parameters() if heads.markov is not None else ():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return heads


def nearly(draft: CausalLM) -> CausalLM:
    """Make a smaller draft for a draft: a copy whose lm_head is mixed with noise, so that it is often right and often
    wrong.
    """
    model = copy.deepcopy(draft.model)
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight += 0.25 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight)
    return CausalLM(model, draft.output_tokens, draft.static)


DRAFTERS: dict[str, Callable[[CausalLM, CausalLM], Drafter]] = {
    "chain": lambda target, draft: DraftModelDrafter(draft, 3),
    "likeliest chain": lambda target, draft: DraftModelDrafter(draft, 3, sampled=False),
    "draft tree": lambda target, draft: DraftTreeDrafter(draft, 3, 3, 12),
    "heads": lambda target, draft: MedusaDrafter(nudged_heads(target), TREE),
    "likeliest heads": lambda target, draft: MedusaDrafter(nudged_heads(target), TREE, sampled=False),
    "Markov heads": lambda target, draft: MedusaDrafter(nudged_heads(target, 3), TREE),
    "Markov heads of few tokens": lambda target, draft: MedusaDrafter(nudged_heads(target, 3, writes=FEW), TREE),
    "DSpark chain": lambda target, draft: DSparkDrafter(tiny_dspark(target, 3)),
    "DSpark tree of few tokens": lambda target, draft: DSparkDrafter(tiny_dspark(target, 3, writes=FEW), tree=TREE),
    "DFlash of few tokens": lambda target, draft: DSparkDrafter(tiny_dflash(target, 3, writes=FEW)),
    "DSpark tree": lambda target, draft: DSparkDrafter(tiny_dspark(target, 3, num_hidden_layers=2), tree=TREE),
    "likeliest DFlash": lambda target, draft: DSparkDrafter(tiny_dflash(target, 3), sampled=False),
    "EAGLE-3 chain": lambda target, draft: Eagle3Drafter(tiny_eagle3(target), 3),
    "EAGLE-3 tree of few tokens": lambda target, draft: Eagle3Drafter(tiny_eagle3(target, writes=FEW), tree=TREE),
    "likeliest EAGLE-3 tree": lambda target, draft: Eagle3Drafter(tiny_eagle3(target), tree=TREE, sampled=False),
    "EAGLE-3 best tree": lambda target, draft: Eagle3TreeDrafter(tiny_eagle3(target), 3, 3, 12),
    "lookup": lambda target, draft: PromptLookupDrafter(4, branches=2),
    "lookahead": lambda target, draft: LookaheadDrafter(3, 3, 3),
    "cascade": lambda target, draft: CascadeDrafter(draft, nearly(draft), 4, 2),
    "likeliest cascade": lambda target, draft: CascadeDrafter(draft, nearly(draft), 4, 2, sampled=False),
    "hybrid": lambda target, draft: HybridDrafter(DraftTreeDrafter(draft, 2, 2, 6), PromptLookupDrafter(3), 0.0),
    "drawn hybrid": lambda target, draft: HybridDrafter(
        MedusaDrafter(nudged_heads(target, 3), TREE), PromptLookupDrafter(2, branches=2)
    ),
    "DSpark hybrid": lambda target, draft: HybridDrafter(
        DSparkDrafter(tiny_dspark(target, 3), tree=TREE), PromptLookupDrafter(4)
    ),
}
"""Functions from a target and a draft to a drafter of each kind."""
OF_A_DRAFT = ["chain", "likeliest chain", "draft tree", "cascade", "likeliest cascade"]


def hidden_before(target: CausalLM, text: Sequence[int]) -> Tensor:
    """Return the input of the lm_head from which the last token of a text was written; zeros for a first token."""
    if len(text) == 1:
        return torch.zeros(target.hidden_size)
    with torch.inference_mode():
        return lm_head_input(target.model, {"input_ids": torch.tensor([list(text[:-1])])})[0, -1]


def request(tokens: Sequence[int], depth: int = 99, nodes: int = 999) -> DraftRequest:
    return DraftRequest(list(tokens), torch.empty(0), depth, nodes)


def opened(
    drafter: Drafter,
    target: CausalLM,
    sampling: SamplingConfig | None = None,
    prompt_length: int = 1,
    seed: int = 0,
    rows: int = 1,
) -> DraftSession:
    """Open a session with a text in every row."""
    session = drafter.open(target, sampling or SamplingConfig(), rows, ROOM)
    for row in range(rows):
        session.admit(row, TextStart(prompt_length, GeneratorSource.from_seed(seed + row)))
    return session


class Follower:
    """A session that is called in the same way as by the loop: with the target's states at the tokens since a row's
    last request.
    """

    def __init__(
        self, drafter: Drafter, target: CausalLM, sampling: SamplingConfig | None = None, seed: int = 0, rows: int = 1
    ) -> None:
        self.session = opened(drafter, target, sampling, 1, seed, rows)
        self.target, self.taps = target, drafter.taps
        self.known = [0] * rows

    def propose(self, *texts: Sequence[int], depths: Sequence[int] = (), nodes: Sequence[int] = ()) -> list[Proposal]:
        requests = []
        for row, text in enumerate(texts):
            bounds = depths[row] if depths else 99, nodes[row] if nodes else 999
            states = states_at(self.target, text, self.taps)[self.known[row] : -1] if self.taps else None
            requests.append(DraftRequest(list(text), hidden_before(self.target, text), *bounds, states))
            self.known[row] = len(text) - 1
        return self.session.propose(requests)

    def move(self, row: int, to: int) -> None:
        self.session.move(row, to)
        self.known[to] = self.known[row]


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """Return the tree as the set of its paths of tokens, which start below the root."""
    return {tuple(tree.token_list[at] for at in tree.shape.path(node)) for node in range(1, len(tree))}


def accept_some(proposal: Proposal, chance: random.Random, vocab: int = 16) -> list[int]:
    """Return a random path of the tree and a token after it, which may be a rejected one, because lossy rules may write
    such a token.
    """
    tree = proposal.tree
    node = chance.randrange(len(tree))
    refused = [tree.token_list[child] for child in tree.shape.children[node]]
    path = [tree.token_list[ancestor] for ancestor in tree.shape.path(node)]
    return [*path, chance.choice([*refused, chance.randrange(vocab)])]


def assert_same(proposal: Proposal, wanted: Proposal) -> None:
    assert proposal.tree.token_list == wanted.tree.token_list and proposal.tree.shape == wanted.tree.shape
    if len(wanted.tree) == 1:  # nothing was drafted, so the kind does not matter
        return
    assert proposal.kind is wanted.kind
    if wanted.q is not None:
        assert proposal.q is not None
        torch.testing.assert_close(proposal.q, wanted.q, rtol=0, atol=1e-5)


def check_bounds(drafter: Drafter, target: CausalLM, sampling: SamplingConfig, seed: int) -> None:
    """Check on random texts, bounds and logits that each tree has the right root and keeps to the bounds."""
    chance = random.Random(seed)
    follower = Follower(drafter, target, sampling, seed)
    text = [chance.randrange(16) for _ in range(chance.randint(1, 12))]
    for _ in range(6):
        depth, nodes = chance.choice([0, 1, 2, 3, 5, 99]), chance.choice([1, 2, 3, 5, 9, 17, 40, 999])
        (proposal,) = follower.propose(text, depths=[depth], nodes=[nodes])
        tree = proposal.tree
        assert tree.token_list[0] == text[-1]
        assert tree.shape.max_depth <= min(depth, drafter.max_depth)
        assert len(tree) <= min(nodes, drafter.max_nodes)
        assert len(paths(tree)) == len(tree) - 1, "no path twice"
        if proposal.q is not None:
            assert proposal.q.shape == (len(proposal.q_rows), target.vocab_size)
        if chance.random() < 0.8:
            follower.session.observe([proposal], [torch.randn(len(tree), target.vocab_size)])
        text += accept_some(proposal, chance)


class Digits:
    """A decoder that writes each of sixteen tokens as one hexadecimal digit."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token:x}" for token in token_ids)


def check_greedy(target: CausalLM, drafter: Drafter, count: int = 12) -> None:
    """Check that texts equal plain greedy decoding: alone, in batches, with any policy, with penalties, and if they end
    inside a block.
    """
    plain = [naive_greedy(target.model, prompt, count) for prompt in PROMPTS]
    for batch_size, length in ((1, count), (3, count), (3, 1), (2, 2)):
        texts = Engine(target, drafter).decode(PROMPTS, DecodingConfig(length), batch_size=batch_size)
        assert [text.tokens for text in texts] == [text[:length] for text in plain]
    texts = Engine(target, drafter, RandomPolicy(0)).decode(PROMPTS, DecodingConfig(count), batch_size=3)
    assert [text.tokens for text in texts] == plain
    config = DecodingConfig(count, stop_strings=(Digits().decode(plain[0][5:7]),))
    texts = Engine(target, drafter, tokenizer=Digits()).decode(PROMPTS, config, batch_size=3)
    for prompt, text, whole in zip(PROMPTS, texts, plain, strict=True):
        ends = (
            end for end in range(1, count) if Digits().decode([*prompt, *whole[:end]]).endswith(config.stop_strings)
        )
        assert text.tokens == whole[: next(ends, count)]
    eos = tuple({text[6] for text in plain})
    ended = [text[: next(at for at, token in enumerate(text) if token in eos) + 1] for text in plain]
    texts = Engine(target, drafter).decode(PROMPTS, DecodingConfig(count, eos_token_ids=eos), batch_size=3)
    assert [text.tokens for text in texts] == ended
    sampling = SamplingConfig(repetition_penalty=1.4)
    text = Engine(target, drafter).decode(PROMPTS[0], DecodingConfig(count, sampling))
    assert text.tokens == naive_greedy(target.model, PROMPTS[0], count, 1.4)


def check_static_shapes(target: CausalLM, drafter: Drafter, sampling: SamplingConfig) -> None:
    """Check that texts and accepted tokens are the same with dynamic and with static shapes, and that some tokens are
    accepted.
    """
    prompts, config = [[3, 1, 4], [5], [9, 2, 6, 5, 3]], DecodingConfig(24, sampling)
    found = [
        [
            (text.tokens, [step.accepted for step in text.steps])
            for text in Engine(each, drafter).decode(prompts, config, batch_size=2)
        ]
        for each in (target, target.with_static("eager"))
    ]
    assert found[0] == found[1] and sum(sum(accepted) for _, accepted in found[0]) > 3


def check_to_the_last_position(target: CausalLM, drafter: Drafter) -> None:
    """Check that a text that ends at the last of a target's 80 positions equals plain greedy decoding."""
    prompts = [[1, 2, 3], list(range(16)) * 4]
    texts = Engine(target, drafter).decode(prompts, DecodingConfig(16), batch_size=2)
    assert [text.tokens for text in texts] == [naive_greedy(target.model, prompt, 16) for prompt in prompts]


def check_text_of_the_seed(target: CausalLM, drafter: Drafter) -> None:
    """Check that sampled verification, which draws once per token from a separate stream, writes the text of plain
    decoding.
    """
    config = DecodingConfig(20, SamplingConfig(1.2, top_p=0.9, repetition_penalty=1.3), SAMPLED_VERIFY, seed=7)
    drafted = Engine(target, drafter).decode(PROMPTS, config, batch_size=3)
    plain = Engine(target).decode(PROMPTS, replace(config, rule=None), batch_size=3)
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]
