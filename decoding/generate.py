"""THE decoding loop: propose, verify, commit. Every drafter, rule and batch goes through it, plain decoding too."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.clock import PhaseClock
from decoding.drafters.base import Drafter, DraftRequest, TextStart
from decoding.metrics import StepCount
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.policies import PLAIN, Budget, FixedPolicy, Policy
from decoding.rules.history import History
from decoding.rules.proposal import Proposal
from decoding.rules.sampling import GeneratorSource, HistoryRows, SamplingConfig, adjusted_logits, probabilities
from decoding.rules.tree import TokenTree, fetch_tokens
from decoding.rules.verify import GREEDY, Rule, Verdict, lossless_rule
from decoding.stopping import StopCheck, TextDecoder
from decoding.token_ids import check_ids

_REHEARSALS = 100
"""Times the prompts are there for a rehearsal, which ends when its policy has seen enough."""


@dataclass(frozen=True)
class DecodingConfig:
    """How to decode. With ``rule`` None the rule is greedy at temperature 0, else the lossless one that fits.

    The text at place i (from 0) of a batch is decoded with the seed ``seed + i``, whatever stands beside it.
    ``logprobs`` asks for the log-probability of each new token under the target itself, before any sampling control.
    """

    max_new_tokens: int = 128
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rule: Rule | None = None
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    logprobs: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: give at least 1")
        if self.rule is not None and self.sampling.greedy != (self.rule is GREEDY):
            wanted = "temperature 0" if self.rule is GREEDY else "a temperature above 0"
            raise ValueError(f"the {self.rule.name} rule needs {wanted}; it is {self.sampling.temperature:g}")
        if "" in self.stop_strings:
            raise ValueError("a stop string is empty: give at least one character")

    @property
    def label(self) -> str:
        """Whether the texts are distributed as the target's own: lossless, or lossy."""
        return "lossless" if self.rule is None else self.rule.label


class Step(NamedTuple):
    """One turn of the loop for one text: one target pass, and what came of it.

    ``tokens`` are the tokens emitted, of which the first ``accepted`` were drafted and the last, unless the text ended
    first, was written by the target. ``offered`` is the depth that could have been accepted, and ``room`` the depth
    that the text could still hold. The first step of a text is its prefill: one token, nothing offered. Seconds are the
    text's share: those of the pass over its rows.
    """

    tokens: tuple[int, ...]
    accepted: int
    offered: int
    drafted: int
    draft_seconds: float
    verify_seconds: float
    total_seconds: float
    room: int = 0
    is_prefill: bool = False
    logprobs: tuple[float, ...] = ()

    @property
    def counts(self) -> StepCount:
        """What the acceptance figures are made of."""
        return StepCount(len(self.tokens), self.accepted, self.offered, self.drafted, self.room)


@dataclass(frozen=True)
class Generation:
    """A finished text: its new tokens, and the steps that made them."""

    tokens: tuple[int, ...]
    steps: tuple[Step, ...]

    @staticmethod
    def of(steps: Sequence[Step]) -> "Generation":
        return Generation(tuple(token for step in steps for token in step.tokens), tuple(steps))


def decode_steps(
    target: CausalLM,
    drafter: Drafter | None,
    prompt: Sequence[int],
    config: DecodingConfig,
    tokenizer: TextDecoder | None = None,
    policy: Policy | None = None,
    cache: PreallocatedCache | None = None,
) -> Iterator[Step]:
    """Decode one prompt (token ids) step by step, as each target pass is done. Without a drafter: plain decoding.

    A ``cache`` of ``target.new_cache`` that is handed from one call to the next, also after a call that was broken off,
    spares running again what the prompt shares with the text before. The call before can then not be gone on with.
    """
    # What does not fit is refused here, not when the first step is asked for.
    batch = _Batch(target, drafter, [prompt], config, tokenizer, policy, 1, cache, None)
    return (step for _, step in batch.run())


def decode(
    target: CausalLM,
    drafter: Drafter | None,
    prompt: Sequence[int],
    config: DecodingConfig,
    tokenizer: TextDecoder | None = None,
    policy: Policy | None = None,
) -> Generation:
    """Decode one prompt to its end."""
    return Generation.of(tuple(decode_steps(target, drafter, prompt, config, tokenizer, policy)))


def decode_batch_steps(
    target: CausalLM,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int,
    tokenizer: TextDecoder | None = None,
    policy: Policy | None = None,
    seeds: Sequence[int] | None = None,
) -> Iterator[tuple[int, Step]]:
    """Decode prompts, ``batch_size`` at a time: (place of the prompt, from 0; its next step).

    Rows accept different lengths and end at different times; a row that ends makes room for the next prompt.
    ``seeds`` gives each text one of its own, in place of those that its config gives by places.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: give at least 1")
    return _Batch(target, drafter, prompts, config, tokenizer, policy, min(batch_size, len(prompts)), None, seeds).run()


def decode_batch(
    target: CausalLM,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int,
    tokenizer: TextDecoder | None = None,
    policy: Policy | None = None,
) -> list[Generation]:
    """Decode prompts to their ends, in their order."""
    steps: list[list[Step]] = [[] for _ in prompts]
    for place, step in decode_batch_steps(target, drafter, prompts, config, batch_size, tokenizer, policy):
        steps[place].append(step)
    return [Generation.of(of_one) for of_one in steps]


class _Text:
    """One text being decoded."""

    def __init__(self, place: int, prompt: Sequence[int], seed: int, config: DecodingConfig, target: CausalLM) -> None:
        self.place = place
        self.tokens = list(map(int, prompt))
        self.prompt_length = len(prompt)
        self.finished = False
        self.hidden = torch.empty(0)
        # Two streams of one seed: what is drafted does not shift what the target draws.
        self.source = GeneratorSource.from_seed(seed, "verify")
        self.draft_source = GeneratorSource.from_seed(seed, "draft")
        self.history = History(config.sampling, len(prompt), target.vocab_size, target.device)

    def room(self, max_new_tokens: int) -> int:
        """Tokens it may still grow by."""
        return self.prompt_length + max_new_tokens - len(self.tokens)

    def emit(self, tokens: tuple[int, ...], max_new_tokens: int, stop: StopCheck) -> tuple[int, ...]:
        """Append up to the text's end, if the end is among them."""
        room = self.room(max_new_tokens)
        kept, ended = stop.cut(self.tokens[self.prompt_length :], tokens[:room])
        self.tokens += kept
        self.finished = ended or len(kept) >= room
        return kept


class _Batch:
    """The rows being decoded, and the prompts that wait for one. Row i of the batch is ``texts[i]``."""

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int]],
        config: DecodingConfig,
        tokenizer: TextDecoder | None,
        policy: Policy | None,
        rows: int,
        cache: PreallocatedCache | None,
        seeds: Sequence[int] | None,
    ) -> None:
        for prompt in prompts:
            check_prompt(target, prompt, config)
        if drafter and config.rule:
            config.rule.check(drafter.kinds(config.sampling), drafter.chains_only)
        longest = max((len(prompt) for prompt in prompts), default=0) + config.max_new_tokens
        self.target, self.config, self.drafter = target, config, drafter
        self.policy: Policy = policy or FixedPolicy()
        self.stop = StopCheck(config.eos_token_ids, config.stop_strings, tokenizer)
        seeds = range(config.seed, config.seed + len(prompts)) if seeds is None else seeds
        self.waiting = deque(zip(range(len(prompts)), prompts, seeds, strict=True))
        self.texts: list[_Text] = []
        self.rows = rows
        self.session = drafter.open(target, config.sampling, rows, longest) if drafter else None
        self.serves_calls = cache is not None
        nodes = drafter.max_nodes if drafter else 1
        self.cache = cache if cache is not None else target.new_cache(longest + nodes, rows)

    def run(self) -> Iterator[tuple[int, Step]]:
        """Until every prompt is decoded."""
        if self.drafter:
            self.policy.begin(self.drafter.budgets, self.rows, self._rehearse)
        lease = self.cache.take()
        while self.waiting or self.texts:
            self.cache.check(lease)
            yield from self._refill()
            while self.texts and not any(text.finished for text in self.texts):
                self.cache.check(lease)
                places = [text.place for text in self.texts]
                yield from zip(places, self._step(), strict=True)

    def _rehearse(self, policy: Policy, rows: int) -> Iterator[object]:
        """Decode the waiting prompts again and again by another policy, for its measurement: the texts go nowhere."""
        prompts = [prompt for _, prompt, _ in self.waiting] * _REHEARSALS
        config = replace(self.config, stop_strings=())
        return _Batch(self.target, self.drafter, prompts, config, None, policy, rows, None, None).run()

    def _refill(self) -> list[tuple[int, Step]]:
        """Give the rows of finished texts to waiting prompts; close the gaps where none wait."""
        free = [row for row, text in enumerate(self.texts) if text.finished]
        free += range(len(self.texts), self.rows)
        taken = free[: len(self.waiting)]
        for row in reversed(free[len(taken) :]):
            if row < len(self.texts):
                self._close_gap(row)
        for row in taken:
            text = _Text(*self.waiting.popleft(), self.config, self.target)
            self.texts[row : row + 1] = [text]
            if self.session:
                self.session.admit(row, TextStart(text.prompt_length, text.draft_source))
        return self._prefill(taken) if taken else []

    def _close_gap(self, row: int) -> None:
        last = len(self.texts) - 1
        if row != last:
            self.texts[row] = self.texts[last]
            self.cache.move(last, row)
            if self.session:
                self.session.move(last, row)
        del self.texts[last]

    @torch.inference_mode()
    def _prefill(self, rows: Sequence[int]) -> list[tuple[int, Step]]:
        """Run the prompts of these rows and emit their first tokens."""
        clock = PhaseClock(self.target.device)
        prompts = [self.texts[row].tokens for row in rows]
        reused = self.cache.rewind(prompts[0]) if self.serves_calls else 0
        if reused:
            output = self.target.append([prompts[0][reused:]], self.cache)
        else:
            for row in rows:
                self.cache.truncate(row, 0)
            output = self.target.prefill(prompts, self.cache, rows)
        clock.mark()
        texts = [self.texts[row] for row in rows]
        proposals = [Proposal.root_only(text.tokens[-1], self.target.device) for text in texts]
        verdicts = self._decide(texts, proposals, output.logits[:, None])
        (verify_seconds,) = clock.phases()
        share = 1 / len(rows)
        steps = []
        for index, (text, verdict) in enumerate(zip(texts, verdicts, strict=True)):
            text.hidden = output.hidden[index]
            self._remember(text.tokens)
            logprobs = self._logprobs(proposals[index].tree, verdict, output.logits[index, None])
            emitted = text.emit((verdict.token,), self.config.max_new_tokens, self.stop)
            seconds = verify_seconds * share, clock.total() * share
            steps.append((text.place, Step(emitted, 0, 0, 0, 0.0, *seconds, is_prefill=True, logprobs=logprobs)))
        return steps

    @torch.inference_mode()
    def _step(self) -> list[Step]:
        """Propose, verify, commit: one target pass for all rows."""
        clock = PhaseClock(self.target.device)
        texts = self.texts
        budget = self._budget()
        proposals = self._propose(budget)
        clock.mark()
        starts = self.cache.lengths[: len(texts)]
        output = self.target.verify([proposal.tree for proposal in proposals], self.cache)
        clock.mark()
        verdicts = self._decide(texts, proposals, output.logits)
        if self.session and budget != PLAIN:
            self.session.observe(
                proposals, [output.logits[row, : len(proposal.tree)] for row, proposal in enumerate(proposals)]
            )
        draft_seconds, verify_seconds = clock.phases()
        steps = [
            self._commit(row, proposals[row].tree, verdict, starts[row], output.hidden[row], output.logits[row])
            for row, verdict in enumerate(verdicts)
        ]
        total_seconds = clock.total()
        if self.drafter:
            counts = [step.counts for step in steps]
            self.policy.observe(budget, len(texts), counts, draft_seconds, verify_seconds, total_seconds)
        draft, verify, total = (seconds / len(texts) for seconds in (draft_seconds, verify_seconds, total_seconds))
        return [step._replace(draft_seconds=draft, verify_seconds=verify, total_seconds=total) for step in steps]

    def _budget(self) -> Budget:
        """What the policy chooses, which is not asked where no text has room for a draft."""
        if self.drafter is None or not any(map(self._draft_room, self.texts)):
            return PLAIN
        return self.policy.choose(self.drafter.budgets, len(self.texts))

    def _draft_room(self, text: _Text) -> int:
        """The deepest draft that could be emitted whole: the target writes one token itself."""
        return text.room(self.config.max_new_tokens) - 1

    def _propose(self, budget: Budget) -> list[Proposal]:
        depths = [min(budget.depth, self._draft_room(text)) for text in self.texts]
        if self.session is None or not any(depths):
            return [Proposal.root_only(text.tokens[-1], self.target.device) for text in self.texts]
        return self.session.propose(
            [
                DraftRequest(text.tokens, text.hidden, depth, budget.nodes)
                for text, depth in zip(self.texts, depths, strict=True)
            ]
        )

    def _decide(self, texts: Sequence[_Text], proposals: Sequence[Proposal], logits: Tensor) -> list[Verdict]:
        """A verdict for each row. ``logits``: (rows, nodes, vocab), shorter rows padded."""
        sampling = self.config.sampling
        trees = [proposal.tree for proposal in proposals]
        sizes = [len(tree) for tree in trees]
        equal = set(sizes) == {logits.shape[1]}
        flat = logits.flatten(0, 1) if equal else torch.cat([logits[row, :size] for row, size in enumerate(sizes)])
        history = None
        if sampling.needs_history:
            fetch_tokens(trees)
            history = HistoryRows.cat(
                [text.history.at(text.tokens, tree) for text, tree in zip(texts, trees, strict=True)]
            )
        if sampling.greedy:
            best = adjusted_logits(flat, sampling, history).argmax(-1).split(sizes)
            best_lists = fetch_tokens(trees, best)
            return [Verdict(*tree.descend(tokens)) for tree, tokens in zip(trees, best_lists, strict=True)]
        p = probabilities(flat, sampling, history).split(sizes)
        fetch_tokens(trees)
        return [self._rule_for(proposal)(proposal, p[row], texts[row].source) for row, proposal in enumerate(proposals)]

    def _rule_for(self, proposal: Proposal) -> Rule:
        # Where nothing is drafted there is no draft to judge, and every rule writes from p.
        return self.config.rule if self.config.rule and len(proposal.tree) > 1 else lossless_rule(proposal)

    def _commit(self, row: int, tree: TokenTree, verdict: Verdict, start: int, hidden: Tensor, logits: Tensor) -> Step:
        """Keep the accepted path's keys, drop the others, and let the text grow."""
        text = self.texts[row]
        path, room = verdict.path, self._draft_room(text)
        text.hidden = hidden[path[-1] if path else 0]
        self.cache.commit(row, start, (0, *path))
        tokens = (*(tree.token_list[node] for node in path), verdict.token)
        self._remember([*text.tokens, *tokens[:-1]])
        logprobs = self._logprobs(tree, verdict, logits)
        emitted = text.emit(tokens, self.config.max_new_tokens, self.stop)
        # What stands behind the end of a text that ends inside the block was neither offered nor accepted.
        cut = len(emitted) <= len(path)
        accepted = len(emitted) if cut else len(path)
        offered = len(emitted) if cut else tree.shape.max_depth
        return Step(emitted, accepted, offered, len(tree) - 1, 0.0, 0.0, 0.0, room, logprobs=logprobs[: len(emitted)])

    def _remember(self, tokens: Sequence[int]) -> None:
        if self.serves_calls:
            self.cache.text = tuple(tokens)

    def _logprobs(self, tree: TokenTree, verdict: Verdict, logits: Tensor) -> tuple[float, ...]:
        """Of the tokens of a verdict, under the target's own logits at the node before each."""
        if not self.config.logprobs:
            return ()
        tokens = [*(tree.token_list[node] for node in verdict.path), verdict.token]
        rows = logits[[0, *verdict.path]].float().log_softmax(-1)
        return tuple(rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist())


def check_prompt(target: CausalLM, prompt: Sequence[int], config: DecodingConfig) -> None:
    """Refuse what cannot be decoded: no token ids, none at all, unknown ones, more than the target's context holds."""
    check_ids(prompt, target.vocab_size)
    longest = len(prompt) + config.max_new_tokens
    if target.max_positions is not None and longest > target.max_positions:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and {config.max_new_tokens} new ones make {longest}, but the target's "
            f"context holds {target.max_positions}: shorten the prompt or lower max_new_tokens"
        )
