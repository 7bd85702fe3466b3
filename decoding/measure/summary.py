"""Rows of a report: the figures of each method, computed only from the records."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from decoding.measure.figures import PLAIN, TRANSFORMERS
from decoding.measure.methods import Method, Run
from decoding.measure.records import GridCell, Record, Records
from decoding.measure.results import Figure, Quartiles, Report, ReportRow, SameTexts, TimeSplit, figure_of, quartiles_of
from decoding.metrics import StepCount, acceptance, predicted_speedup, ratio_of_rates, ratio_of_sums
from decoding.model.cost_curve import pass_over


def figures_of(
    records: Records, methods: Sequence[Method], cells: Sequence[GridCell], tasks: Mapping[str, str | None]
) -> Report:
    """Return a report in which only the rows and counts are set.

    The report's ``rows`` are for the first of ``cells``, and its ``grid`` is for all other cells. ``tasks`` maps
    question ids to tasks.
    """
    # The cost curve was measured on one text at a time.
    curve = records.cost_curve if cells[0].batch_size == 1 else None
    names = [task for task in dict.fromkeys(tasks.values()) if task is not None]
    first = cells[0]
    by_task = {task: {question for question, own in tasks.items() if own == task} for task in names}
    too_long: Counter[str] = Counter()
    for (cell, _, _, setting), ids in records.left_out.items():
        too_long[setting] += len(ids) if cell == first else 0
    return Report(
        prompts=len(
            {(key.turn, id_) for key, record in records.by_key.items() if key.cell == first for id_ in record.prompts}
        ),
        later_turns_left_out=max(too_long.values(), default=0),
        seconds=sum(
            run.first_seconds + run.decode_seconds for record in records.by_key.values() for run in record.runs
        ),
        cost_curve_ms={size: 1000 * seconds for size, seconds in (records.cost_curve or {}).items()},
        rows=tuple(_rows(records, methods, first, curve)),
        grid=tuple(row for cell in cells[1:] for row in _rows(records, methods, cell)),
        tasks=tuple(
            replace(row, task=task) for task in names for row in _rows(records, methods, first, curve, by_task[task])
        ),
    )


def _rows(
    records: Records,
    methods: Sequence[Method],
    cell: GridCell,
    curve: Mapping[int, float] | None = None,
    ids: set[str] | None = None,
) -> list[ReportRow]:
    """Return a row for each method with records in the cell. Waves count only if all their questions are in ``ids``."""
    by_method: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records.by_key.values(), key=lambda record: record.key[1:]):
        if record.key.cell == cell and (ids is None or ids.issuperset(record.prompts)):
            by_method.setdefault((record.key.setting, record.key.method), []).append(record)
    return [
        _row(records, method, cell, by_method, curve)
        for method in methods
        if (method.setting, method.name) in by_method
    ]


def _row(
    records: Records,
    method: Method,
    cell: GridCell,
    by_method: Mapping[tuple[str, str], Sequence[Record]],
    curve: Mapping[int, float] | None,
) -> ReportRow:
    mine, plain, peer = (by_method.get((method.setting, name), ()) for name in (method.name, PLAIN, TRANSFORMERS))
    row = ReportRow(
        method.setting,
        method.name,
        method.label,
        method.temperature,
        cell.batch_size,
        cell.context,
        drafter=method.drafter,
        artefact=method.artefact,
        rule=method.rule,
        shape=method.shape,
        drafts=method.drafts,
        policy=method.policy,
        prompts=len({(record.key.turn, prompt) for record in mine for prompt in record.prompts}),
        tokens_per_second=figure_of(ratio_of_sums(list(_by_wave(mine).values()))),
        tokens_per_second_with_prefill=figure_of(ratio_of_sums(list(_by_wave(mine, True).values()))),
        speedup_of_totals=_of_totals(mine, plain),
        speedup=_of_pairs(mine, plain),
        speedup_with_prefill_of_totals=_of_totals(mine, plain, with_prefill=True),
        speedup_with_prefill=_of_pairs(mine, plain, with_prefill=True),
        speedup_over_transformers_of_totals=_of_totals(mine, peer),
        speedup_over_transformers=_of_pairs(mine, peer),
        identical_to_plain=_compared_to_plain(records, mine) if method.temperature == 0 else None,
    )
    if not any(run.counts for record in mine for run in record.runs):
        return row
    # Greedy rounds repeat the same text, so they add observations of time but not of acceptance.
    return _with_acceptance(row, [record for record in mine if method.temperature > 0 or record.key.round == 0], curve)


def _compared_to_plain(records: Records, mine: Sequence[Record]) -> SameTexts:
    """Compare greedy texts with the texts of plain decoding."""
    margins = [margin for record in mine for margin in records.margins.get(record.key, (None,) * len(record.runs))]
    early = margins.count("ended")
    gaps = tuple(sorted(margin for margin in margins if isinstance(margin, float)))
    largest = gaps[-1] if gaps else None if early else 0.0
    return SameTexts(margins.count(None), len(margins), largest, early, gaps)


# --- speed ------------------------------------------------------------------------------------------------------------


def tokens_and_seconds(record: Record, with_prefill: bool = False) -> tuple[float, float]:
    """Return the number of tokens in a record's texts, and the seconds that these texts took."""
    tokens = sum(len(run.tokens) if with_prefill else run.decode_tokens for run in record.runs)
    seconds = sum(run.decode_seconds + (run.first_seconds if with_prefill else 0.0) for run in record.runs)
    return float(tokens), seconds


def _by_wave(records: Sequence[Record], with_prefill: bool = False) -> dict[int, tuple[float, float]]:
    """Return (tokens, seconds) of each wave. Both are summed over turns and rounds, which are not independent."""
    by_wave: dict[int, tuple[float, float]] = {}
    for record in records:
        tokens, seconds = by_wave.get(record.key.wave, (0.0, 0.0))
        more = tokens_and_seconds(record, with_prefill)
        by_wave[record.key.wave] = tokens + more[0], seconds + more[1]
    return by_wave


def _of_totals(mine: Sequence[Record], other: Sequence[Record], with_prefill: bool = False) -> Figure | None:
    """Return the total tokens per second of ``mine`` divided by the tokens per second of ``other``; prompts are
    weighted by their numbers of tokens.
    """
    if not mine or not other:
        return None
    ours, theirs = _by_wave(mine, with_prefill), _by_wave(other, with_prefill)
    return figure_of(ratio_of_rates([(*ours[wave], *theirs[wave]) for wave in ours if wave in theirs]))


def _of_pairs(mine: Sequence[Record], other: Sequence[Record], with_prefill: bool = False) -> Quartiles | None:
    """Return quartiles of the ratios ``mine`` / ``other`` of tokens per second in paired runs, all of equal weight."""
    if not mine or not other:
        return None
    pairs = {_repetition(record): tokens_and_seconds(record, with_prefill) for record in other}
    ratios = []
    for record in mine:
        tokens, seconds = tokens_and_seconds(record, with_prefill)
        other_tokens, other_seconds = pairs.get(_repetition(record), (0.0, 0.0))
        if min(tokens, seconds, other_tokens, other_seconds) > 0:
            ratios.append(tokens / seconds / (other_tokens / other_seconds))
    return quartiles_of(ratios)


def _repetition(record: Record) -> tuple[int, int, int]:
    """Return the key by which two methods' runs of the same wave are paired."""
    return record.key.wave, record.key.turn, record.key.round


# --- acceptance -------------------------------------------------------------------------------------------------------


def _with_acceptance(row: ReportRow, records: Sequence[Record], curve: Mapping[int, float] | None) -> ReportRow:
    """Add a method's acceptance figures, its time split, and the speed-up predicted from the costs."""
    runs = [run for record in records for run in record.runs]
    by_question: dict[str, list[StepCount]] = {}  # a question's turns and rounds are not independent
    for record in records:
        for prompt, run in zip(record.prompts, record.runs, strict=True):
            by_question.setdefault(prompt, []).extend(run.counts)
    figures = acceptance(list(by_question.values()))
    split, predicted = None, None
    if total := sum(run.decode_seconds for run in runs):
        draft, verify = sum(run.draft_seconds for run in runs), sum(run.verify_seconds for run in runs)
        overhead = total - draft - verify
        split = TimeSplit(draft / total, verify / total, overhead / total)
        if curve:
            predicted = _predicted(runs, figures.tokens_per_pass.value, curve, draft, overhead)
    return replace(
        row,
        passes=figures.passes,
        tokens_per_pass=figure_of(figures.tokens_per_pass),
        acceptance_length=figures.acceptance_length,
        reached=tuple(map(figure_of, figures.reached)),
        ended_in_draft=figures.ended_in_draft,
        conditional_acceptance=tuple(map(figure_of, figures.conditional)),
        unconditional_acceptance=tuple(map(figure_of, figures.unconditional)),
        accepted_per_drafted=figure_of(figures.accepted_per_drafted),
        accepted_length_histogram={str(length): count for length, count in figures.length_histogram.items()},
        time_split=split,
        predicted_speedup=predicted,
    )


def _predicted(runs: Sequence[Run], tokens: float, curve: Mapping[int, float], draft: float, overhead: float) -> float:
    """Return the speed-up predicted from the measured times of drafting and overhead, and from the cost curve of
    passes.
    """
    plain_step = pass_over(curve, 1)
    # Policies and lookups change the size of the draft from step to step.
    sizes = Counter(count.drafted + 1 for run in runs for count in run.counts)
    passes = max(1, sizes.total())
    verify = sum(pass_over(curve, size) * times for size, times in sizes.items()) / passes
    return predicted_speedup(tokens, draft / passes / plain_step, verify / plain_step, overhead / passes / plain_step)
