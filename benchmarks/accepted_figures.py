"""Figures of `accepted.py` from its records: tokens per target pass, paired ratios, speed-ups, with 95% intervals.

Intervals resample the prompts and, if there are several, the training seeds. Two arms are compared on the prompts and
seeds that both of them have, pair by pair.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accepted_arms import ARMS, GREEDY, Arm
from torch import Tensor

from decoding.measure.results import as_json, figure_of
from decoding.metrics import Estimate, ratio_of_rates, resampled

PLAIN, PEER = "plain", "assisted"

Counts = Mapping[int, Mapping[int, tuple[float, float]]]
"""For each training seed and prompt, (tokens emitted, target passes)."""
Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Return the records of a file; a last line cut short by a kill is ignored."""
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def append_record(path: Path, record: Record) -> None:
    """Append a record; a line cut short by a kill is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and not (whole := path.read_bytes()).endswith(b"\n") and whole:
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def counts_of(records: Iterable[Record], spec: str, arm: str, drafting: str, prompt_set: str, setting: str) -> Counts:
    """Collect an arm's counts from decoding in batches; a prompt that was decoded twice counts once."""
    place = {"arm": arm, "drafting": drafting, "set": prompt_set, "setting": setting}
    wanted = {"part": "acceptance", "spec": spec, **place}
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for record in records:
        if all(record.get(key) == value for key, value in wanted.items()):
            for place, (tokens, passes) in enumerate(record["counts"], start=record["first"]):
                found.setdefault(record["seed"], {})[place] = (tokens, passes)
    return found


def tokens_per_pass(counts: Counts) -> Estimate:
    """Estimate tokens per target pass over all seeds and prompts."""
    values = _table(counts, list(counts), _common(counts.values()))
    return resampled((values,), lambda sums: sums[0][:, 0] / sums[0][:, 1])


def ratio(ours: Counts, theirs: Counts) -> Estimate | None:
    """Estimate the paired ratio of two arms' tokens per target pass; None if they share no prompt or no seed."""
    seeds = [seed for seed in ours if seed in theirs]
    prompts = _common([side[seed] for side in (ours, theirs) for seed in seeds])
    if not prompts or not seeds:
        return None
    tables = _table(ours, seeds, prompts), _table(theirs, seeds, prompts)
    return resampled(tables, lambda s: s[0][:, 0] / s[0][:, 1] * s[1][:, 1] / s[1][:, 0])


def _common(decoded: Iterable[Mapping[int, Any]]) -> list[int]:
    """Return the prompts that all entries contain."""
    sets = [set(by_prompt) for by_prompt in decoded]
    return sorted(set.intersection(*sets)) if sets else []


def _table(counts: Counts, seeds: Sequence[int], prompts: Sequence[int]) -> Tensor:
    """Return the counts as (seeds, prompts, 2)."""
    return torch.tensor([[counts[seed][prompt] for prompt in prompts] for seed in seeds], dtype=torch.float64)


def speed_of(records: Iterable[Record], key: str, target: str, prompt_set: str, setting: str) -> Record | None:
    """Compute a method's tokens per target pass and speed-ups at batch 1 from its turns; None if it has no turn."""
    wanted = {"part": "speed", "target": target, "set": prompt_set, "setting": setting}
    turns: dict[int, Record] = {}
    for record in records:
        if all(record.get(name) == value for name, value in wanted.items()) and key in record["runs"]:
            turns[record["prompt"]] = record["runs"]
    if not turns:
        return None
    mine = [runs[key] for runs in turns.values()]

    def over(other: str) -> Record | None:
        both = [(run[:2], runs[other][:2]) for run, runs in zip(mine, turns.values(), strict=True) if other in runs]
        return plain_json(ratio_of_rates([(*ours, *theirs) for ours, theirs in both])) if both else None

    counts = {0: {prompt: (runs[key][2], runs[key][3]) for prompt, runs in turns.items()}}
    drafted = sum(run[3] for run in mine) > 0
    return {
        "tokens_per_second": sum(run[0] for run in mine) / sum(run[1] for run in mine),
        "tokens_per_pass": plain_json(tokens_per_pass(counts)) if drafted else None,
        "over_plain": over(PLAIN),
        "over_assisted": over(PEER),
        "same_as_plain": sum(run[4] for run in mine) if setting == GREEDY else None,
    }


def plain_json(estimate: Estimate | None) -> Record | None:
    """Return an estimate as JSON values."""
    found: Record | None = None if estimate is None else as_json(figure_of(estimate))
    return found


def key_of(arm: str, drafting: str) -> str:
    return f"{arm} | {drafting}"


def summary(records: Sequence[Record], arms: Mapping[str, Arm] = ARMS) -> list[Record]:
    """Return a row per measured arm, way of drafting, prompt set and setting."""
    sets, targets = (list(dict.fromkeys(each[key] for each in records if key in each)) for key in ("set", "target"))
    rows = []
    for name, arm in arms.items():
        for drafting, how in arm.draftings.items():
            for prompt_set in sets:
                for setting in how.settings:
                    row = _row(records, arms, (name, drafting, prompt_set, setting), targets)
                    rows += [row] if row else []
    return rows


def _row(
    records: Sequence[Record], arms: Mapping[str, Arm], place: tuple[str, str, str, str], targets: Sequence[str]
) -> Record | None:
    name, drafting, prompt_set, setting = place
    counts = counts_of(records, arms[name].draftings[drafting].spec, *place)
    key = key_of(name, drafting)
    speed = {target: speed_of(records, key, target, prompt_set, setting) for target in targets}
    if not counts and not any(speed.values()):
        return None
    baseline = arms[name].baseline
    compared = None
    if baseline is not None and counts:
        same = drafting if drafting in arms[baseline].draftings else next(iter(arms[baseline].draftings))
        spec = arms[baseline].draftings[same].spec
        compared = ratio(counts, counts_of(records, spec, baseline, same, prompt_set, setting))
    return {
        **dict(zip(("arm", "drafting", "set", "setting"), place, strict=True)),
        "seeds": len(counts),
        "tokens_per_pass": plain_json(tokens_per_pass(counts)) if counts else None,
        "baseline": baseline,
        "over_baseline": plain_json(compared),
        "speed": {target: each for target, each in speed.items() if each},
    }
