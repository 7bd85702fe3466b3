"""Samples of decoded texts that tell which tokens came from the draft."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.generate import Step
from decoding.measure.evaluate import Measurement, cells_of
from decoding.measure.methods import Method, Run
from decoding.measure.records import Cell, Record
from decoding.measure.redact import without_secrets
from decoding.stream import stream_pieces

_PROMPT_CHARACTERS = 400
_OF_A_SETTING = 2
_MOST = 4


def samples_of(
    measurement: Measurement, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Return up to four texts of the first cell, two of a setting, by its fastest drafter, of different tasks.

    Each has its setting, method, task, the end of its prompt, and ``pieces``: [text, True if it was drafted].
    """
    cell = cells_of(measurement.config)[0]
    found: list[dict[str, Any]] = []
    for setting in dict.fromkeys(method.setting for method in measurement.methods):
        if (method := _fastest(measurement, rows, setting)) is not None:
            found += islice(_texts(measurement, cell, method, tokenizer), _OF_A_SETTING)
    return found[:_MOST]


def _fastest(measurement: Measurement, rows: Sequence[Mapping[str, Any]], setting: str) -> Method | None:
    speeds = {
        row["method"]: row["tokens_per_second"]["value"] or 0.0
        for row in rows
        if row["setting"] == setting and row["shape"] is not None
    }
    name = max(speeds, key=lambda method: speeds[method], default=None)
    return next((each for each in measurement.methods if (each.setting, each.name) == (setting, name)), None)


def _texts(
    measurement: Measurement, cell: Cell, method: Method, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """Yield a method's texts, the first of each task before the others, without those that hold a secret."""
    source = measurement.source
    places = {name: place for place, name in enumerate(source.ids)}
    by_task: dict[str | None, list[tuple[Record, int]]] = {}
    for record in sorted(measurement.records.by_key.values(), key=lambda record: record.key.wave):
        key = record.key
        if (key.cell, key.setting, key.method, key.turn, key.round) == (cell, method.setting, method.name, 0, 0):
            for row, prompt in enumerate(record.prompts):
                by_task.setdefault(source.tasks[places[prompt]], []).append((record, row))
    firsts = [texts[0] for texts in by_task.values()]
    others = [text for texts in by_task.values() for text in texts[1:]]
    for record, row in (*firsts, *others):
        place = places[record.prompts[row]]
        pieces = pieces_of(record.runs[row], tokenizer, measurement.config.eos_token_ids)
        written = "".join(text for text, _ in pieces)
        if without_secrets(written) != written:  # spread over pieces, it cannot be withheld alone
            continue
        prompt = without_secrets(str(tokenizer.decode(list(source.prompt(place, cell.context)))))
        yield {
            "setting": method.setting,
            "method": method.name,
            "task": source.tasks[place],
            "prompt": prompt[-_PROMPT_CHARACTERS:],
            "pieces": pieces,
        }


def pieces_of(run: Run, tokenizer: PreTrainedTokenizerBase, hidden: Sequence[int] = ()) -> list[list[Any]]:
    """Return a run's text as [text, True if drafted], neighbours of one origin joined; ``hidden`` tokens left out."""
    pieces: list[list[Any]] = []
    for piece in stream_pieces(_steps(run), tokenizer, hidden=hidden):
        if pieces and pieces[-1][1] == piece.drafted:
            pieces[-1][0] += piece.text
        else:
            pieces.append([piece.text, piece.drafted])
    return pieces


def _steps(run: Run) -> Iterator[Step]:
    """Yield the steps of a run: the prefill's token, then each pass with its accepted tokens first."""
    yield Step(run.tokens[:1], 0, 0, 0, is_prefill=True)
    at = 1
    for count in run.counts:
        yield Step(run.tokens[at : at + count.emitted], count.accepted, count.offered, count.drafted)
        at += count.emitted
