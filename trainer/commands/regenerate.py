"""Self-distillation's data: the target answers the prompts of a file itself, and its answers are what is trained on.

Medusa-2 calls it self-distillation (2401.10774, section 2.3.2): where the target's training data is not at hand, or it
was tuned by reinforcement, heads trained on other people's answers learn a distribution that is not the target's.
"""

import importlib.util
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter, DraftModelDrafter, MedusaDrafter
from decoding.generate import DecodingConfig, check_prompt, decode_batch_steps
from decoding.measure.machine import commit, versions
from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.loading import eos_token_ids, load_draft, load_heads, load_model, load_tokenizer, parse_dtype
from decoding.prompts import encode_prompt
from decoding.rules.sampling import SamplingConfig
from trainer.commands.options import RegenerateOptions
from trainer.data.answers import Answered, AnswerFile, Backend, Outcome, SetAside
from trainer.data.chat import read_answer
from trainer.data.conversations import Conversation, Key, read_conversations
from trainer.files.folders import sha256_of
from trainer.quickstart import resolve
from trainer.run.train import ensure_built
from trainer.terminal.console import say, standard_error, standard_output
from trainer.terminal.progress import ProgressBar

GROUP = 4
"""Batches that are decoded and written together: more keep the rows of a batch full, fewer lose less to a kill."""
TURN = 2**32
"""How far the seeds of one turn and of the next are apart: further than a file has rows."""


class TargetBackend:
    """The target in this process, speculating if it has a drafter.

    Conversations are decoded in groups that are the same in every run of the same command, so that a run that was
    killed and started again writes, bit for bit, what it would have written: in bf16 what stands beside a text in a
    batch can decide between two tokens that are equally good. The texts of a group whose first conversation has the
    index i are decoded with the seeds seed + i, seed + i + 1, ...; later turns with seeds of their own.
    """

    def __init__(
        self,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None,
        config: DecodingConfig,
        batch_size: int,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: give at least 1")
        self._target, self._tokenizer, self._drafter = target, tokenizer, drafter
        self._config, self._batch_size = config, batch_size

    def outcomes(
        self, conversations: Sequence[Conversation], done: Container[Key], on_tokens: Callable[[int], None]
    ) -> Iterator[list[Outcome]]:
        """A group at a time; groups that are done are left out."""
        size = GROUP * self._batch_size
        for start in range(0, len(conversations), size):
            group = conversations[start : start + size]
            if any(conversation.key not in done for conversation in group):
                yield self._answer(group, on_tokens)

    def _answer(self, group: Sequence[Conversation], on_tokens: Callable[[int], None]) -> list[Outcome]:
        """Turn by turn, each for all conversations of the group that have come so far."""
        texts = [_Text(conversation) for conversation in group]
        for turn in range(max(len(conversation.turns) for conversation in group)):
            ready = [(text, prompt) for text in texts if text.is_open and (prompt := self._prompt(text))]
            config = replace(self._config, seed=self._config.seed + group[0].index + turn * TURN)
            generations = self._decode([prompt for _, prompt in ready], config, on_tokens)
            for (text, prompt), generation in zip(ready, generations, strict=True):
                self._take(text, prompt, generation)
        return [text.outcome() for text in texts]

    def _prompt(self, text: "_Text") -> tuple[int, ...] | None:
        """What the text's next answer follows, or None where that cannot be decoded."""
        conversation = text.conversation
        try:
            prompt = encode_prompt(conversation.open_after(text.answers), self._tokenizer, conversation.chat)
            check_prompt(self._target, prompt, self._config)
        except (TemplateError, ValueError) as error:
            text.problem = str(error)
            return None
        return prompt

    def _decode(
        self, prompts: Sequence[tuple[int, ...]], config: DecodingConfig, on_tokens: Callable[[int], None]
    ) -> list[tuple[int, ...]]:
        tokens: list[tuple[int, ...]] = [()] * len(prompts)
        if not prompts:
            return tokens
        for place, step in decode_batch_steps(self._target, self._drafter, prompts, config, self._batch_size):
            tokens[place] += step.tokens
            on_tokens(len(step.tokens))
        return tokens

    def _take(self, text: "_Text", prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        text.truncated = tokens[-1] not in self._config.eos_token_ids
        written = list(tokens if text.truncated else tokens[:-1])
        text.answers.append(read_answer(self._tokenizer, written, text.truncated))
        text.answer_tokens.append(tokens)
        text.differing += not self._reads_back(text, prompt, written)

    def _reads_back(self, text: "_Text", prompt: tuple[int, ...], written: list[int]) -> bool:
        """Whether training, which tokenizes the text, will see the tokens that the target read and wrote."""
        if not text.conversation.chat:
            tokens: list[int] = self._tokenizer(text.answers[-1], add_special_tokens=False)["input_ids"]
            return tokens == written
        closed: Any = self._tokenizer.apply_chat_template(
            text.conversation.with_answers(text.answers), return_dict=True
        )
        expected = [*prompt, *written]
        return bool(closed["input_ids"][: len(expected)] == expected)


class _Text:
    """A conversation under way."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.answers: list[str] = []
        self.answer_tokens: list[tuple[int, ...]] = []
        self.differing = 0
        self.truncated = False
        self.problem: str | None = None

    @property
    def is_open(self) -> bool:
        """Nothing is said after an answer that was cut off, or that is empty."""
        broken_off = self.problem is not None or self.truncated or "" in self.answers
        return not broken_off and len(self.answers) < len(self.conversation.turns)

    def outcome(self) -> Outcome:
        if self.problem is not None:
            return SetAside(self.conversation, "failed", self.problem)
        tokens = sum(map(len, self.answer_tokens))
        written = tuple(self.answer_tokens)
        return Answered(self.conversation, tuple(self.answers), tokens, self.truncated, written, self.differing)


@dataclass
class Summary:
    """What one run did. ``differing``: answers that give other tokens when tokenized again; only known in process."""

    rows: int
    before: int
    answered: int = 0
    answers: int = 0
    tokens: int = 0
    truncated: int = 0
    unasked: int = 0
    dropped: int = 0
    empty: int = 0
    failed: int = 0
    differing: int | None = None
    seconds: float = 0.0

    def count(self, outcome: Outcome) -> None:
        if isinstance(outcome, SetAside):
            self.empty += outcome.problem == "empty"
            self.dropped += outcome.problem == "truncated"
            self.failed += outcome.problem == "failed"
            return
        self.answered += 1
        self.answers += len(outcome.answers)
        self.tokens += outcome.tokens
        self.truncated += outcome.truncated
        self.unasked += len(outcome.conversation.turns) - len(outcome.answers)
        if outcome.differing is not None:
            self.differing = (self.differing or 0) + outcome.differing

    @property
    def set_aside(self) -> int:
        """Conversations without an answer to train on."""
        return self.dropped + self.empty + self.failed

    def table(self) -> Table:
        table = Table(title="regenerated", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        figures: dict[str, str | int | None] = {
            "conversations asked for": self.rows,
            "answered before": self.before,
            "answered now": self.answered,
            "answers": self.answers,
            "mean tokens of an answer": f"{self.tokens / self.answers:.1f}" if self.answers else None,
            "cut off, kept": self.truncated,
            "later turns left out behind a cut-off answer": self.unasked or None,
            "cut off, set aside": self.dropped,
            "empty, set aside": self.empty,
            "failed, set aside": self.failed,
            "answers that tokenize differently": self.differing,
            "tokens/s": f"{self.tokens / self.seconds:.0f}" if self.tokens else None,
        }
        for name, value in figures.items():
            if value is not None:
                table.add_row(name, str(value))
        return table


def run_regenerate(options: RegenerateOptions, console: Console | None = None) -> Summary:
    """Answer what is not answered yet; prints and returns what was done."""
    watched, console = console or standard_error(), console or standard_output()
    sampling = SamplingConfig(temperature=options.temperature, top_p=options.top_p)
    _check(options, sampling)
    backend, made_by = _target(options, sampling) if options.endpoint is None else _endpoint(options)
    chat = made_by.pop("chat")
    prompts = resolve(options.prompts)
    conversations = read_conversations(prompts, options.prompt_field, options.limit, options.n, chat)
    settings = {
        "prompts_sha256": sha256_of(Path(prompts)),
        "prompt_field": options.prompt_field,
        "chat": chat,
        **made_by,
        "n": options.n,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "keep_truncated": options.keep_truncated,
    }
    about = {"prompts": Path(prompts).name, "commit": commit(), "versions": versions()}
    with AnswerFile(options.output, settings, about, options.keep_truncated) as answers:
        summary = _run(backend, conversations, answers, watched)
    console.print(summary.table())
    answers.check_not_empty()
    aside = f"; why some were set aside: {answers.set_aside_path}" if summary.set_aside else ""
    say(console, f"written: {options.output}{aside}")
    return summary


def _run(backend: Backend, conversations: Sequence[Conversation], answers: AnswerFile, console: Console) -> Summary:
    wanted = {conversation.key for conversation in conversations}
    summary = Summary(len(conversations), len(wanted & answers.done))
    tokens = 0
    with ProgressBar(console, "answering", len(conversations), summary.before) as bar:

        def on_tokens(count: int) -> None:
            nonlocal tokens
            tokens += count
            bar.update(note=f"{tokens / bar.seconds:,.0f} tokens/s")

        for outcomes in backend.outcomes(conversations, answers.done, on_tokens):
            for outcome in answers.add(outcomes):
                summary.count(outcome)
                bar.advance()
        summary.seconds = bar.seconds
    answers.finish()
    return summary


def _check(options: RegenerateOptions, sampling: SamplingConfig) -> None:
    if (options.target is None) == (options.endpoint is None):
        raise ValueError("give --target for a model in this process, or --endpoint with --model for one that is served")
    if options.endpoint is not None and options.model is None:
        raise ValueError("--endpoint serves models by name: say which with --model")
    if options.endpoint is not None and (options.heads or options.draft):
        raise ValueError("--heads and --draft speed up a --target in this process; an --endpoint decodes as it likes")
    if options.endpoint is not None and options.device_map:
        raise ValueError("--device-map spreads a --target in this process; an --endpoint places its model itself")
    if options.endpoint is None and options.completions:
        raise ValueError("--completions is the choice of an --endpoint; a --target goes by its chat template")
    if options.heads and options.draft:
        raise ValueError("--heads and --draft were asked for: give one of them")
    if options.n < 1:
        raise ValueError(f"n is {options.n}: give at least 1 answer for each prompt")
    if options.n > 1 and sampling.greedy:
        raise ValueError(f"n is {options.n} at temperature 0, where all answers are the same: give a temperature")


def _target(options: RegenerateOptions, sampling: SamplingConfig) -> tuple[Backend, dict[str, Any]]:
    """The target in this process, and what makes its answers what they are."""
    assert options.target is not None
    ensure_built(options.target)
    name, trusted = resolve(options.target), options.trust_remote_code
    dtype = parse_dtype(options.dtype)
    target = CausalLM(load_model(name, dtype, trust_remote_code=trusted, device_map=options.device_map))
    tokenizer = load_tokenizer(name, trusted)
    drafter: Drafter | None = None
    if options.heads:
        drafter = MedusaDrafter(load_heads(options.heads, target))
    elif options.draft:
        drafter = DraftModelDrafter(load_draft(options.draft, target, tokenizer, trusted), (1,) * options.draft_tokens)
    config = DecodingConfig(
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        eos_token_ids=eos_token_ids(target.model, tokenizer),
        seed=options.seed,
    )
    chat = tokenizer.chat_template is not None
    backend = TargetBackend(target, tokenizer, drafter, config, options.batch_size)
    fingerprint = stored_fingerprint(name, trusted)
    return backend, {"chat": chat, "dtype": options.dtype, "target_fingerprint": fingerprint}


def _endpoint(options: RegenerateOptions) -> tuple[Backend, dict[str, Any]]:
    """A served model; its address is not kept, for it may move, and may hold a secret."""
    if importlib.util.find_spec("openai") is None:
        raise ValueError("an --endpoint is asked by the openai package: pip install 'headstart[endpoint]'")
    from trainer.target.endpoint import EndpointBackend

    return EndpointBackend(options), {"chat": not options.completions, "model": options.model}
