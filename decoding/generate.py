"""THE decoding loop: propose, verify, commit. Plain decoding, every drafter, every rule and batches all use it.

`decoding.reference` implements the same steps, numbered in the same way, for a single text and without caches.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.clock import PhaseClock
from decoding.drafters.base import Drafter, DraftRequest, DraftSession, TextStart
from decoding.errors import UserError
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import ModelOutput
from decoding.policies import NO_DRAFT, Budget, FixedPolicy, Policy
from decoding.rules.decide import decide
from decoding.rules.sampling import History, HistoryRows, SamplingConfig
from decoding.rules.tree import Proposal, TokenTree, fetch_tokens
from decoding.rules.verify import GREEDY, Rule, Verdict
from decoding.text import Generation, Step, StopCheck, Text, TextDecoder, check_prompt

Seeds = Sequence[int] | None
"""A seed for each text of a batch; None means that the seeds follow from `DecodingConfig.seed`."""


@dataclass(frozen=True)
class DecodingConfig:
    """Settings of decoding.

    If ``rule`` is None, the rule is greedy at temperature 0; at a higher temperature it is the lossless rule that fits
    the draft. Text i (from 0) of a batch is decoded with the seed ``seed + i``, independently of the other texts. With
    ``logprobs``, each step contains the log-probabilities of its tokens under the target, before any sampling control.
    With ``trees``, each step contains its drafted tree.
    """

    max_new_tokens: int = 128
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rule: Rule | None = None
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    logprobs: bool = False
    trees: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: use at least 1")
        if self.rule is not None and self.sampling.greedy != (self.rule is GREEDY):
            wanted = "temperature 0" if self.rule is GREEDY else "a temperature above 0"
            raise UserError(
                f"the {self.rule.name} rule needs {wanted}, but the temperature is {self.sampling.temperature:g}"
            )
        if "" in self.stop_strings:
            raise UserError("a stop string is empty: use at least one character")

    @property
    def label(self) -> str:
        """ "lossless" if the rule preserves the target's distribution, and otherwise "lossy"."""
        return "lossless" if self.rule is None else self.rule.label


class DecodingBatch:
    """The texts that are being decoded (row i is ``texts[i]``) and the prompts that wait for a row."""

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        policy: Policy,
        stop: StopCheck,
        prompts: Sequence[Sequence[int]],
        config: DecodingConfig,
        rows: int = 1,
        seeds: Seeds = None,
        cache: PreallocatedCache | None = None,
    ) -> None:
        """Decode ``rows`` texts at a time. For the other arguments and the errors see `Engine.steps`."""
        for prompt in prompts:
            check_prompt(target, prompt, config.max_new_tokens)
        # The sizes of drafts that the drafter supports on this target; the policy chooses among them.
        self.budgets: tuple[Budget, ...] = ()
        if drafter:
            target.check_drafts(drafter.name, bool(drafter.chains))
            self.budgets = drafter.budgets_on(target)
        if drafter and config.rule:
            config.rule.check(drafter.kinds(config.sampling), self.budgets == drafter.chains)
        self.target, self.drafter, self.policy, self.stop, self.config = target, drafter, policy, stop, config
        seeds = range(config.seed, config.seed + len(prompts)) if seeds is None else seeds
        # (index, prompt, seed) of the prompts that wait for a row.
        self.waiting = deque(zip(range(len(prompts)), prompts, seeds, strict=True))
        # The texts in progress, without gaps: texts[i] has row i of the cache, of the session and of each pass.
        self.texts: list[Text] = []
        self.rows = rows  # maximum number of texts decoded together
        # The drafter reads the states of these layers at every cached token.
        self.taps = () if drafter is None else drafter.taps
        # Length, in tokens, of the longest text that any of the prompts may become.
        self.longest = max((len(prompt) for prompt in prompts), default=0) + config.max_new_tokens
        # The time when the last step ended (infinite during a step), which shows whether anyone reads the stream.
        self.last_step = time.monotonic()
        # True if the caller passed the cache: later calls reuse the text in it, so the tokens and states must be kept.
        self.serves_calls = cache is not None
        # Number of nodes of the largest tree, including the root.
        self._nodes = drafter.max_nodes if drafter else 1
        try:
            self._open(cache)
        finally:  # a batch that has not begun must not block other batches
            target.turns.give_back(self)

    def _open(self, cache: PreallocatedCache | None) -> None:
        """Open the drafter's session and a cache; if the target is static, first wait until its only cache is free.

        Raises UserError if the target or the length does not fit the drafter.
        """
        target = self.target
        if target.is_static:
            target.turns.take(self)
        with target.lock:
            # The drafter's work on these rows; None for plain decoding.
            self.session: DraftSession | None = None
            if self.drafter is not None:
                self.session = self.drafter.open(target, self.config.sampling, self.rows, self.longest)
            self.cache = target.new_cache(self.longest + self._nodes, self.rows, self) if cache is None else cache

    def run(self) -> Iterator[tuple[int, Step]]:
        """Decode until every prompt is finished; yield (index of the prompt, its next step)."""
        try:
            if self.target.is_static:  # other calls have used these caches since they were made
                self._open(self.cache if self.serves_calls else None)
            lease = self.cache.take()
            while self.waiting or self.texts:
                with self._turn(lease):
                    steps = self._refill()
                    self.target.prepare(self.cache, len(self.texts), [self._nodes], self.longest, self.taps)
                yield from steps
                while self.texts and not any(text.finished for text in self.texts):
                    with self._turn(lease):
                        steps = [(text.index, step) for text, step in zip(self.texts, self._step(), strict=True)]
                    yield from steps
        finally:
            self.target.turns.give_back(self)

    @contextmanager
    def _turn(self, lease: int) -> Iterator[None]:
        """Lock the model against other threads for one step."""
        with self.target.lock:
            self.cache.check(lease)
            self.last_step = math.inf  # a step in progress never times out
            yield
            self.last_step = time.monotonic()

    @torch.inference_mode()
    def _step(self) -> list[Step]:
        """Propose, verify, commit: one target pass for all rows."""
        clock = PhaseClock(self.target.device)
        # 1. Propose: drafts of the size that the policy chooses; no drafts if no text has room.
        budget = self.policy.choose(self.budgets, len(self.texts)) if self.drafter and any(self._rooms()) else NO_DRAFT
        proposals = self._propose(budget)
        clock.mark()
        # 2. Verify.
        starts = self.cache.lengths[: len(self.texts)]
        output = self.target.verify([proposal.tree for proposal in proposals], self.cache, taps=self.taps)
        clock.mark()
        # 3. Commit: decide which drafted tokens are kept, then update drafter, texts, cache and policy.
        verdicts = self._decide(self.texts, proposals, output.logits)
        if self.session and budget != NO_DRAFT:
            self.session.observe(
                proposals, [output.logits[row, : len(proposal.tree)] for row, proposal in enumerate(proposals)]
            )
        if self.drafter:
            ends = torch.tensor([(0, *verdict.path)[-1] for verdict in verdicts])[:, None, None]
            last = output.hidden.take_along_dim(ends.to(output.hidden.device, non_blocking=True), 1)
            for row, text in enumerate(self.texts):
                text.hidden = last[row, 0]
        steps = [
            self._commit(row, proposals[row].tree, verdict, starts[row], output) for row, verdict in enumerate(verdicts)
        ]
        seconds = *clock.phases(), clock.total()
        if self.drafter:
            self.policy.observe(budget, [step.counts for step in steps], *seconds)
        return [step.timed(*(second / len(steps) for second in seconds)) for step in steps]

    def _rooms(self) -> list[int]:
        """Return how many tokens may be drafted in each row: none if accepted tokens must first be cached."""
        return [0 if self.cache.is_full(row) else text.draft_room for row, text in enumerate(self.texts)]

    def _propose(self, budget: Budget) -> list[Proposal]:
        """Draft a tree for each row; the tree is the root alone if there is no drafter or no room."""
        depths = [min(budget.depth, room) for room in self._rooms()]
        if self.session is None or not any(depths):
            return [Proposal.root_only(text.tokens[-1], self.target.device) for text in self.texts]
        # A target without trees needs this limit too: under a limit of depth alone, nodes would be left for branches.
        sizes = [budget.nodes if self.target.no_trees is None else depth + 1 for depth in depths]
        return self.session.propose(
            [
                DraftRequest(text.tokens, text.hidden, depth, nodes, text.hand_over_states())
                for text, depth, nodes in zip(self.texts, depths, sizes, strict=True)
            ]
        )

    def _decide(self, texts: Sequence[Text], proposals: Sequence[Proposal], logits: Tensor) -> list[Verdict]:
        """Return a verdict for each row. ``logits``: (rows, nodes, vocab), with shorter rows padded."""
        config = self.config
        history = None
        if config.sampling.needs_history:
            fetch_tokens([proposal.tree for proposal in proposals])
            history = HistoryRows.cat(
                [text.history.at(text.tokens, proposal.tree) for text, proposal in zip(texts, proposals, strict=True)]
            )
        return decide(proposals, logits, config.sampling, config.rule, history, [text.source for text in texts])

    def _commit(self, row: int, tree: TokenTree, verdict: Verdict, start: int, output: ModelOutput) -> Step:
        """Keep the keys of the accepted path, drop the others, and append the new tokens to the text."""
        text = self.texts[row]
        path, room = verdict.path, text.draft_room
        kept = (0, *path)
        self.cache.commit(row, start, kept)
        tokens = (*(tree.token_list[node] for node in path), verdict.token)
        if self.serves_calls:  # the keys of the root are cached as well
            self.cache.text += (text.tokens[-1], *tokens[:-1])
        if self.taps:
            states = _nodes(output.states[row], kept)
            # Copy the states if the target is static: its next step may overwrite its outputs before the next draft.
            # Copy them also if the cache serves several calls: it keeps the states, and a view would keep the states of
            # all nodes alive.
            self._keep_states(text, states.clone() if self.target.is_static or self.serves_calls else states)
        logprobs = self._logprobs(tree, verdict, output.logits[row])
        emitted = text.emit(tokens, self.stop)
        # Tokens after the end of a text do not count as offered or accepted.
        cut = len(emitted) <= len(path)
        accepted = len(emitted) if cut else len(path)
        offered = len(emitted) if cut else tree.shape.max_depth
        refused = () if cut or not tree.shape.is_chain else tuple(tree.token_list[1 + len(path) :])
        step = Step(
            emitted, accepted, offered, len(tree) - 1, room=room, logprobs=logprobs[: len(emitted)], refused=refused
        )
        if not self.config.trees or len(tree) == 1:
            return step
        # Copied to the host, because the next draft in fixed shapes overwrites the tokens on the device.
        return step._replace(tree=TokenTree.of_list(tree.token_list, tree.shape), path=path[:accepted])

    def _refill(self) -> list[tuple[int, Step]]:
        """Give the rows of finished texts to waiting prompts; if no prompt waits, move the last rows into the gaps."""
        free = [row for row, text in enumerate(self.texts) if text.finished]
        free += range(len(self.texts), self.rows)
        taken = free[: len(self.waiting)]
        for row in reversed(free[len(taken) :]):
            if row < (last := len(self.texts) - 1):
                self.texts[row] = self.texts[last]
                self.cache.move(last, row)
                if self.session:
                    self.session.move(last, row)
            if row <= last:
                del self.texts[last]
        for row in taken:
            index, prompt, seed = self.waiting.popleft()
            history = History(self.config.sampling, len(prompt), self.target.vocab_size, self.target.device)
            text = Text(index, prompt, seed, self.config.max_new_tokens, history)
            self.texts[row : row + 1] = [text]
            if self.session:
                self.session.admit(row, TextStart(text.prompt_length, text.draft_source))
        return self._prefill(taken) if taken else []

    @torch.inference_mode()
    def _prefill(self, rows: Sequence[int]) -> list[tuple[int, Step]]:
        """Run the prompts of these rows and emit their first tokens: step 0."""
        clock = PhaseClock(self.target.device)
        prompts = [self.texts[row].tokens for row in rows]
        reused = self.cache.rewind(prompts[0], self.taps) if self.serves_calls else 0
        if reused:
            output = self.target.append([prompts[0][reused:]], self.cache, self.taps)
        else:
            for row in rows:
                self.cache.truncate(row, 0)
            output = self.target.prefill(prompts, self.cache, rows, taps=self.taps)
        clock.mark()
        texts = [self.texts[row] for row in rows]
        proposals = [Proposal.root_only(text.tokens[-1], self.target.device) for text in texts]
        verdicts = self._decide(texts, proposals, output.logits[:, None])
        (verify_seconds,) = clock.phases()
        share = 1 / len(rows)
        # As in `_commit`: a static target's next step overwrites the outputs of `append`.
        copied = bool(reused) and self.target.is_static
        steps = []
        for index, (text, verdict) in enumerate(zip(texts, verdicts, strict=True)):
            text.hidden = output.hidden[index].clone() if copied else output.hidden[index]
            if self.serves_calls:
                self.cache.text = list(text.tokens)
            if self.taps:
                for states in self.cache.states:
                    text.keep_states(states)
                self._keep_states(text, output.states[index].clone() if copied else output.states[index])
            logprobs = self._logprobs(proposals[index].tree, verdict, output.logits[index, None])
            emitted = text.emit((verdict.token,), self.stop)
            step = Step(emitted, 0, 0, 0, is_prefill=True, logprobs=logprobs)
            steps.append((text.index, step.timed(0.0, verify_seconds * share, clock.total() * share)))
        return steps

    def _keep_states(self, text: Text, states: Tensor) -> None:
        """Keep the states at the latest cached tokens for the drafter, and for later calls with this cache."""
        text.keep_states(states)
        if self.serves_calls:
            self.cache.states.append(states)

    def _logprobs(self, tree: TokenTree, verdict: Verdict, logits: Tensor) -> tuple[float, ...]:
        """Return the log-probability of each token of a verdict, from the target's logits at the previous node."""
        if not self.config.logprobs:
            return ()
        tokens = [*(tree.token_list[node] for node in verdict.path), verdict.token]
        rows = logits[[0, *verdict.path]].float().log_softmax(-1)
        return tuple(rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist())


def _nodes(hidden: Float[Tensor, "nodes hidden"], kept: Sequence[int]) -> Float[Tensor, "kept hidden"]:
    """Return the states at the nodes ``kept`` of one row; the numbers of the nodes increase."""
    if list(kept) == list(range(len(kept))):
        return hidden[: len(kept)]
    return hidden[torch.tensor(kept).to(hidden.device, non_blocking=True)]


@dataclass(frozen=True, eq=False)
class Engine:
    """A target and a drafter (None: plain decoding), ready to decode.

    Only the policy has state: it may adapt from text to text. The tokenizer is needed only for stop strings. Several
    threads may share an engine; their steps alternate. A target with static shapes has only one cache, so a call waits
    until the previous call has ended. A stream that nobody has read for 10 seconds ends if another call is waiting for
    the cache.
    """

    target: CausalLM
    drafter: Drafter | None = None
    policy: Policy = field(default_factory=FixedPolicy)
    tokenizer: TextDecoder | None = None

    @overload
    def steps(
        self, prompt: Sequence[int], config: DecodingConfig, *, cache: PreallocatedCache | None = None
    ) -> Iterator[Step]: ...
    @overload
    def steps(
        self, prompt: Sequence[Sequence[int]], config: DecodingConfig, *, batch_size: int, seeds: Seeds = None
    ) -> Iterator[tuple[int, Step]]: ...
    def steps(
        self,
        prompt: Any,
        config: DecodingConfig,
        *,
        batch_size: int | None = None,
        seeds: Seeds = None,
        cache: PreallocatedCache | None = None,
    ) -> Iterator[Any]:
        """Decode one prompt of token ids, or many with ``batch_size``; yield each step after its target pass.

        One prompt yields its steps; many prompts yield pairs (index of the prompt from 0, its next step). Each row may
        accept a different number of tokens, and the next prompt takes the row of a finished text. ``seeds`` replaces
        the seeds that the texts of a batch get from the config.

        A ``cache`` from ``target.new_cache`` may be passed from call to call, even if a call was interrupted. The
        target then skips the prefix that a prompt shares with the previous text; drafts read the whole prompt. The
        earlier call cannot be continued afterwards. `Conversation` passes its cache from turn to turn.

        Raises UserError at the call, not at the first step, if the prompts, the rule or the drafter do not fit.
        """
        if batch_size is not None and batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: use at least 1")
        if batch_size is None and isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], list | tuple):
            raise UserError(f"{len(prompt)} prompts need a batch_size: set how many prompts are decoded together")
        if batch_size is not None and cache is not None:
            raise UserError("both cache and batch_size are set: set only one")
        prompts = [prompt] if batch_size is None else prompt
        rows = min(batch_size or 1, len(prompts))
        stop = StopCheck(config.eos_token_ids, config.stop_strings, self.tokenizer)
        batch = DecodingBatch(self.target, self.drafter, self.policy, stop, prompts, config, rows, seeds, cache)
        return (step for _, step in batch.run()) if batch_size is None else batch.run()

    @overload
    def decode(self, prompt: Sequence[int], config: DecodingConfig) -> Generation: ...
    @overload
    def decode(
        self, prompt: Sequence[Sequence[int]], config: DecodingConfig, *, batch_size: int, seeds: Seeds = None
    ) -> list[Generation]: ...
    def decode(
        self, prompt: Any, config: DecodingConfig, *, batch_size: int | None = None, seeds: Seeds = None
    ) -> Generation | list[Generation]:
        """Decode a prompt to the end of its text, or many prompts as in `steps`; results are in the prompts' order."""
        if batch_size is None:
            return Generation.of(tuple(self.steps(prompt, config)))
        steps: list[list[Step]] = [[] for _ in prompt]
        for index, step in self.steps(prompt, config, batch_size=batch_size, seeds=seeds):
            steps[index].append(step)
        return [Generation.of(of_one) for of_one in steps]
