"""Goals that the figures of `accepted.py` are held against: each with the arm that comes nearest, and the figure."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from accepted_arms import ALL, GREEDY, MEDUSA, SAMPLED

Row = dict[str, Any]
HEADS = {name for name, arm in ALL.items() if arm.recipe == "medusa1"}
DRAFTS = {name for name, arm in ALL.items() if arm.recipe == "draft"}
FIRST, BESIDE, CODE = "gsm8k/test", "spec_bench", "humaneval"
HYBRID, LOOKUP = "with lookup", "lookup"
OVER_PLAIN = {"small": {GREEDY: 2.2, SAMPLED: 1.5}, "wide": {GREEDY: 2.5, SAMPLED: 1.8}}
OVER_ASSISTED = {GREEDY: 1.8, SAMPLED: 1.5}


def goals(rows: Sequence[Row]) -> list[Row]:
    """Compare the figures with the goals; ``measured`` is None where nothing was measured.

    Goals of heads are met by their trees alone, without a lookup.
    """
    targets = list(dict.fromkeys(target for row in rows for target in row["speed"]))
    trees = [row for row in rows if "tree" in row["drafting"] and not row["drafting"].startswith(HYBRID)]
    tokens = "heads over Medusa-1, tokens per pass"
    found = [
        _goal(f"{tokens}, {name}, greedy", 1.15, trees, _over_baseline, (name, GREEDY), HEADS)
        for name in (FIRST, BESIDE)
    ]
    found.append(_goal(f"heads, tokens per pass, {FIRST}, T=1", 2.2, trees, _tokens, (FIRST, SAMPLED), HEADS))
    for target in targets:
        size = "wide" if "widened" in target else "small"
        if size == "small":
            found += _heads_speed(trees, target)
        for setting in (GREEDY, SAMPLED):
            for over, wanted in (("over_plain", OVER_PLAIN[size][setting]), ("over_assisted", OVER_ASSISTED[setting])):
                name = f"drafts, {over.replace('_', ' ')}, {FIRST}, {setting}, {target}"
                found.append(_goal(name, wanted, rows, _speed(target, over), (FIRST, setting), DRAFTS))
        found += _hybrids(rows, target)
    return found


def _heads_speed(rows: Sequence[Row], target: str) -> list[Row]:
    """Return the goals of the heads' tokens/s: over Medusa-1's, over plain decoding, and nowhere clearly below it."""
    over_plain = _speed(target, "over_plain")
    found = []
    for name in (FIRST, BESIDE):
        base = _best(rows, over_plain, (name, GREEDY), {MEDUSA})
        goal = _goal(f"heads over Medusa-1, tokens/s, {name}, greedy", 1.1, rows, over_plain, (name, GREEDY), HEADS)
        measured = None if base is None or goal["measured"] is None else goal["measured"] / (over_plain(base) or 1)
        found.append({**goal, "measured": measured, "met": measured is not None and measured >= 1.1})
    found.append(_goal(f"heads over plain, {FIRST}, T=1", 1.35, rows, over_plain, (FIRST, SAMPLED), HEADS))
    chosen = _best(rows, over_plain, (FIRST, SAMPLED), HEADS)
    if chosen is not None:
        same = [row for row in rows if (row["arm"], row["drafting"]) == (chosen["arm"], chosen["drafting"])]
        worst = [value for row in same if (value := over_plain(row)) is not None]
        name = f"heads over plain, {chosen['arm']}, {chosen['drafting']}, at its worst"
        found.append({"goal": name, "wanted": 0.98, "measured": min(worst), "met": min(worst) >= 0.98})
    return found


def _hybrids(rows: Sequence[Row], target: str) -> list[Row]:
    """Return for each place the best hybrid's speed-up over the better of its parts: ≥ 0.97, and above 1 on code."""
    over_plain, found = _speed(target, "over_plain"), []
    for place in dict.fromkeys((row["set"], row["setting"]) for row in rows):
        hybrid = _best((row for row in rows if row["drafting"].startswith(HYBRID)), over_plain, place, set(ALL))
        if hybrid is None:
            continue
        alone = [row for row in rows if not row["drafting"].startswith(HYBRID)]
        parts = [_best(alone, over_plain, place, {arm}) for arm in (hybrid["arm"], LOOKUP)]
        better = max((over_plain(part) or 0 for part in parts if part is not None), default=0)
        wanted = 1.0 if place[0] == CODE else 0.97
        measured = (over_plain(hybrid) or 0) / better if better else None
        name = f"hybrid over the better of its parts, {hybrid['arm']}, {', '.join(place)}, {target}"
        found.append({"goal": name, "wanted": wanted, "measured": measured, "met": (measured or 0) >= wanted})
    return found


Figure = Callable[[Row], float | None]


def _goal(name: str, wanted: float, rows: Iterable[Row], figure: Figure, place: tuple[str, str], arms: set[str]) -> Row:
    row = _best(rows, figure, place, arms)
    measured = None if row is None else figure(row)
    by = None if row is None else f"{row['arm']}, {row['drafting']}"
    return {"goal": name, "wanted": wanted, "measured": measured, "by": by, "met": (measured or 0) >= wanted}


def _best(rows: Iterable[Row], figure: Figure, place: tuple[str, str], arms: set[str]) -> Row | None:
    """Return these arms' row at a place (prompt set, setting) with the highest figure; None if none has it."""
    mine = [row for row in rows if (row["set"], row["setting"]) == place and row["arm"] in arms]
    return max((row for row in mine if figure(row) is not None), key=lambda row: figure(row) or 0, default=None)


def _value(estimate: Row | None) -> float | None:
    return None if estimate is None else estimate["value"]


def _over_baseline(row: Row) -> float | None:
    return _value(row["over_baseline"])


def _tokens(row: Row) -> float | None:
    return _value(row["tokens_per_pass"])


def _speed(target: str, over: str) -> Figure:
    return lambda row: _value(row["speed"].get(target, {}).get(over))
