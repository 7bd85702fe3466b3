"""Samples of decoded texts, in which the tokens from the draft are marked."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

from transformers import PreTrainedTokenizerBase

from decoding.measure.figures import value_of
from decoding.measure.measurement import Measurement, cells_of
from decoding.measure.methods import Run
from decoding.measure.records import GridCell, RunKey
from decoding.measure.redact import without_secrets
from decoding.measure.results import ReportRow, Sample
from decoding.text import Step, stream_pieces

_PROMPT_CHARACTERS = 400
_OF_A_SETTING = 2
_MOST = 4


def samples_of(measurement: Measurement, rows: Sequence[ReportRow], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return up to four texts of the first cell: two for each setting, by the setting's fastest drafter, on different
    tasks.
    """
    cell = cells_of(measurement.config)[0]
    samples: list[Sample] = []
    for setting in dict.fromkeys(row.setting for row in rows):
        drafted = [row for row in rows if row.setting == setting and row.shape is not None]
        if drafted:
            fastest = max(drafted, key=lambda row: value_of(row.tokens_per_second) or 0.0)
            samples += islice(_texts(measurement, cell, setting, fastest.method, tokenizer), _OF_A_SETTING)
    return samples[:_MOST]


def _texts(
    measurement: Measurement, cell: GridCell, setting: str, method: str, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Sample]:
    """Yield a method's texts, the first text of each task before all others; skip texts that contain a secret."""
    source = measurement.source
    index_of = {name: index for index, name in enumerate(source.ids)}
    texts: list[tuple[int, int, Run]] = []
    seen: Counter[str | None] = Counter()
    for key, record in sorted(measurement.records.by_key.items(), key=lambda item: item[0].wave):
        if key == RunKey(cell, key.wave, 0, setting, method, 0):
            for prompt, run in zip(record.prompts, record.runs, strict=True):
                task = source.tasks[index_of[prompt]]
                texts.append((min(seen[task], 1), index_of[prompt], run))
                seen[task] += 1
    for _, index, run in sorted(texts, key=lambda text: text[0]):
        pieces = pieces_of(run, tokenizer, measurement.config.eos_token_ids)
        written = "".join(text for text, _ in pieces)
        if without_secrets(written) != written:  # a secret may span several pieces, so the whole text is dropped
            continue
        prompt = without_secrets(str(tokenizer.decode(list(source.prompt(index, cell.context)))))
        yield Sample(setting, method, source.tasks[index], prompt[-_PROMPT_CHARACTERS:], pieces)


def pieces_of(run: Run, tokenizer: PreTrainedTokenizerBase, hidden: Sequence[int] = ()) -> tuple[tuple[str, bool], ...]:
    """Return a run's text as pieces (text, True if it was drafted), without the ``hidden`` tokens.

    Neighbouring tokens of the same origin form one piece.
    """
    by_origin = groupby(stream_pieces(_steps(run), tokenizer, hidden=hidden), key=attrgetter("drafted"))
    return tuple(("".join(piece.text for piece in pieces), drafted) for drafted, pieces in by_origin)


def _steps(run: Run) -> Iterator[Step]:
    """Yield the steps of a run: first the prefill with its token, then each pass with its tokens."""
    yield Step(run.tokens[:1], 0, 0, 0, is_prefill=True)
    at = 1
    for count in run.counts:
        yield Step(run.tokens[at : at + count.emitted], count.accepted, count.offered, count.drafted)
        at += count.emitted
