"""One run of answering: conversations to a backend, outcomes to the answer file, and a count of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from trainer.data.answers import AnswerFile, Backend, FailedConversation, Outcome
from trainer.data.conversations import OpenConversation
from trainer.terminal.progress import ProgressBar


@dataclass
class Summary:
    """Counts of one run.

    ``reasoned``: answers with reasoning; ``reasoned_only``: those with nothing else. ``other_models``: conversations
    that ask for another model than the one that answered.
    """

    rows: int
    before: int
    answered: int = 0
    answers: int = 0
    tokens: int = 0
    truncated: int = 0
    unasked: int = 0
    reasoned: int = 0
    reasoned_only: int = 0
    other_models: int = 0
    dropped: int = 0
    empty: int = 0
    failed: int = 0
    seconds: float = 0.0

    def count(self, outcome: Outcome) -> None:
        if isinstance(outcome, FailedConversation):
            self.empty += outcome.problem == "empty"
            self.dropped += outcome.problem == "truncated"
            self.failed += outcome.problem == "failed"
            return
        self.answered += 1
        self.answers += len(outcome.answers)
        self.tokens += outcome.tokens
        self.truncated += outcome.truncated
        self.unasked += len(outcome.conversation.turns) - len(outcome.answers)
        reasoned = [answer for answer in outcome.answers if "reasoning_content" in answer]
        self.reasoned += len(reasoned)
        self.reasoned_only += sum(not answer["content"].strip() and "tool_calls" not in answer for answer in reasoned)
        asked, answered_by = outcome.conversation.model, outcome.model
        self.other_models += None not in (asked, answered_by) and asked != answered_by

    @property
    def set_aside(self) -> int:
        """Conversations without an answer to train on."""
        return self.dropped + self.empty + self.failed


def answer(
    backend: Backend, conversations: Sequence[OpenConversation], answers: AnswerFile, console: Console
) -> Summary:
    """Answer the conversations that the file lacks, and write each outcome as it comes; returns the counts."""
    wanted = {conversation.key for conversation in conversations}
    summary = Summary(len(conversations), len(wanted & answers.done))
    tokens = 0
    with ProgressBar(console, "answering", len(conversations), summary.before) as bar:

        def note() -> str:
            return f"{summary.answered / bar.seconds:,.1f} answers/s, {tokens / bar.seconds:,.0f} tokens/s"

        def on_tokens(count: int) -> None:
            nonlocal tokens
            tokens += count
            bar.update(note=note())

        for outcomes in backend.outcomes(conversations, answers.done, on_tokens):
            for outcome in answers.add(outcomes):
                summary.count(outcome)
                bar.advance()
        summary.seconds = bar.seconds
    answers.finish()
    return summary
