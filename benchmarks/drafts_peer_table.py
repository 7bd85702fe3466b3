"""The goals of `drafts_peer.py`, and its table."""

from typing import Any

from peer_acceptance import DRAFT_TOKENS, TEMPERATURES
from rich.table import Table

from decoding.measure.figures import number

OURS = "Headstart"
SPEED_WANTED = 1.5


def goals(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Faster by half, and acceptance that no interval puts below the peer's."""
    speed = results["settings"][name]["ratio"]
    found = [{"goal": "tokens/s over TRL's", "wanted": SPEED_WANTED, "measured": speed, "met": speed >= SPEED_WANTED}]
    for temperature, ratio in results["over_peer"][name].items():
        goal = f"tokens per pass over TRL's, {temperature}"
        found.append({"goal": goal, "wanted": 1.0, "measured": ratio["value"], "met": ratio["high"] >= 1.0})
    return found


def table(results: dict[str, Any]) -> Table:
    """An arm a row; the untrained student first."""
    shown = Table(title=f"{DRAFT_TOKENS} tokens drafted; medians and 95% intervals")
    for column in (
        "arm",
        "trained tokens/s (micro batch)",
        "ratio",
        "peak GiB",
        "tokens/pass greedy",
        "T=1",
        "over TRL's greedy",
        "T=1",
    ):
        shown.add_column(column)
    for arm, by_temperature in results["acceptance"].items():
        name, _, side = arm.partition(": ")
        figures = [_interval(by_temperature[each]["tokens_per_pass"]) for each in TEMPERATURES]
        speed, ratio, peak, compared = "", "", "", ["", ""]
        if side:
            setting = results["settings"][name]
            size = setting["micro_batch_size"][side]
            speed = f"{setting['tokens_per_second'][side][str(size)]:,.0f} ({size})"
            peak = number(setting["peak_gib"][side])
            if side == OURS:
                ratio = f"{setting['ratio']:.2f}×"
                compared = [_interval(results["over_peer"][name][each], 3) for each in TEMPERATURES]
        shown.add_row(arm, speed, ratio, peak, *figures, *compared)
    return shown


def _interval(estimate: dict[str, float], digits: int = 2) -> str:
    return "{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]".format(**estimate, digits=digits)
