"""The parts of the page as HTML: both texts, the running figures, the histogram, the split of the time, one step."""

from collections.abc import Iterable
from html import escape
from itertools import groupby

from decoding.generate import Step
from decoding.measure.markdown import visible
from decoding.stream import Piece, Tally
from trainer.demo.race import Decode, Race
from trainer.demo.tree import tree_of

_PARTS = (("draft", "draft"), ("verify", "target pass"), ("overhead", "overhead"))


def marked(pieces: Iterable[Piece], kind: str = "") -> str:
    """Return pieces of text, the drafted ones in spans; ``kind`` is a further class of all of them."""
    found = []
    for drafted, group in groupby(pieces, key=lambda piece: piece.drafted):
        names = " ".join(filter(None, ("drafted" if drafted else "own", kind)))
        found.append(f'<span class="{names}">{escape(visible("".join(piece.text for piece in group)))}</span>')
    return "".join(found)


def texts(race: Race | None) -> str:
    """Return both texts beside each other, each under its figures."""
    plain = _side("Plain", "plain", None if race is None else race.plain)
    label = None if race is None else race.config.label
    speculative = _side("Speculative", "speculative", None if race is None else race.speculative, label)
    return f'<div class="sides">{plain}{speculative}</div>'


def _side(title: str, name: str, decode: Decode | None, label: str | None = None) -> str:
    badge = f'<span class="badge {label}">{label}</span>' if label else ""
    body, figures = "", "–"
    if decode is not None:
        body = marked(piece for pieces in decode.texts for piece in pieces)
        figures = _figures_of(decode.tally)
    head = f'<header><h3>{title}{badge}</h3><p class="rate">{figures}</p></header>'
    return f'<section class="side" id="{name}">{head}<div class="scroll"><div class="text">{body}</div></div></section>'


def _figures_of(tally: Tally) -> str:
    return (
        f"<b>{tally.tokens_per_second:.0f}</b> tokens/s · {tally.tokens} tokens in {tally.passes} "
        f"pass{'' if tally.passes == 1 else 'es'}"
    )


def summary(race: Race | None) -> str:
    """Return the gain so far, and at the end whether the texts are the same."""
    if race is None:
        return ""
    tally, speedup = race.speculative.tally, race.speedup
    share = f"{tally.accepted / tally.drafted:.0%}" if tally.drafted else "–"
    tiles = (
        ("speed-up", "–" if speedup is None else f"{speedup:.2f}×", "tokens/s over plain decoding"),
        ("tokens per pass", f"{tally.tokens_per_pass:.2f}", "plain decoding: 1"),
        ("accepted", share, f"{tally.accepted} of {tally.drafted} drafted tokens"),
    )
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd><p>{note}</p></div>" for name, value, note in tiles)
    return f'<dl class="tiles">{shown}</dl>{verdict(race)}'


def verdict(race: Race) -> str:
    """Return the comparison of the finished texts, one sentence; nothing before the end."""
    ending = race.ending
    if ending is None:
        return ""
    lossy = race.config.label == "lossy"
    dtype = str(race.models.target.dtype).removeprefix("torch.")
    place = ending.alike + 1
    if ending.verdict == "equal":
        told = f"Same text: all {ending.alike} tokens are equal."
    elif ending.verdict == "stopped":
        told = f"Stopped. The first {ending.alike} tokens are equal."
    elif ending.verdict == "sampled" and lossy:
        told = "This rule is lossy: its texts follow another distribution than the target's."
    elif ending.verdict == "sampled":
        told = f"Another sample from token {place} on. The rule is lossless: the distribution is the target's own."
    elif ending.verdict == "near-tie":
        told = (
            f"The texts part at token {place}, a near-tie: the target's logits of the two tokens there are "
            f"{ending.margin:.3g} apart, which a pass over several tokens may round the other way in {dtype}. "
            "Started with --dtype fp32, the texts are equal."
        )
    else:
        told = f"The texts part at token {place}, and rounding in {dtype} does not explain it: please report a fault."
    kind = {"equal": "good", "fault": "bad"}.get(ending.verdict, "lossy" if lossy else "plain")
    return f'<p class="verdict {kind}" data-verdict="{ending.verdict}">{told}</p>'


def charts(race: Race | None) -> str:
    """Return the histogram of accepted lengths and the split of the time of a token."""
    if race is None:
        return ""
    return f'<div class="charts">{histogram(race.speculative.tally)}{split(race)}</div>'


def histogram(tally: Tally) -> str:
    """Return the number of passes by the drafted tokens that they accepted, as columns."""
    longest = max(tally.lengths, default=0)
    most = max(tally.lengths.values(), default=0)
    columns = "".join(
        f'<li title="{count} of {tally.passes} passes accepted {length}">'
        f'<span class="count">{count or ""}</span>'
        f'<span class="bar" style="height:{100 * count / most if most else 0:.1f}%"></span>'
        f'<span class="length">{length}</span></li>'
        for length, count in ((length, tally.lengths.get(length, 0)) for length in range(longest + 1))
    )
    return (
        '<section class="chart"><h3>Accepted drafted tokens per pass</h3>'
        f'<ul class="columns" aria-label="passes by accepted tokens">{columns}</ul></section>'
    )


def split(race: Race) -> str:
    """Return the milliseconds of a token in draft, target pass and overhead, for both decodes on one scale."""
    rows = [("plain", race.plain.tally), ("speculative", race.speculative.tally)]
    each = [(name, tally, 1000 * tally.total_seconds / tally.tokens if tally.tokens else 0.0) for name, tally in rows]
    longest = max(milliseconds for *_, milliseconds in each) or 1.0
    lines = "".join(
        f'<li><span class="name">{name}</span><span class="track">{_parts(tally, longest)}</span>'
        f'<span class="value">{milliseconds:.2f} ms</span></li>'
        for name, tally, milliseconds in each
    )
    keys = "".join(f'<span class="key {name}">{told}</span>' for name, told in _PARTS)
    rows_and_keys = f'<ul class="split">{lines}</ul><p class="keys">{keys}</p>'
    return f'<section class="chart"><h3>Time per token</h3>{rows_and_keys}</section>'


def _parts(tally: Tally, longest: float) -> str:
    drafts = tally.draft_seconds if tally.drafted else 0.0  # plain decoding asks for no draft, which takes time too
    overhead = tally.overhead_seconds + tally.draft_seconds - drafts
    seconds = {"draft": drafts, "verify": tally.verify_seconds, "overhead": overhead}
    parts = []
    for name, told in _PARTS:
        milliseconds = 1000 * seconds[name] / tally.tokens if tally.tokens else 0.0
        parts.append(
            f'<span class="part {name}" style="width:{100 * milliseconds / longest:.2f}%" '
            f'title="{told}: {milliseconds:.2f} ms per token"></span>'
        )
    return "".join(parts)


def step_view(race: Race | None, number: int) -> str:
    """Return step ``number`` (0: the prefill) of the speculative decode: its tree, and the text with its tokens."""
    if race is None or not race.speculative.steps:
        return '<p class="empty">Each pass of the target is drawn here once a prompt runs.</p>'
    decode, tokenizer = race.speculative, race.models.tokenizer
    place = min(max(number, 0), len(decode.steps) - 1)
    step = decode.steps[place]
    before = marked((piece for pieces in decode.texts[:place] for piece in pieces), "before")
    now = marked(decode.texts[place], "now")
    drawing = tree_of(step, lambda token: str(tokenizer.decode([token]))) or ""
    told = _told(step, place, len(decode.steps) - 1)
    return (
        f'<p class="told" data-pass="{place}">{told}</p><div class="drawing" tabindex="0">{drawing}</div>'
        f'<div class="scroll"><div class="text">{before}{now}</div></div>'
    )


def _told(step: Step, place: int, last: int) -> str:
    if step.is_prefill:
        return "The prefill: the target read the prompt and wrote the first token."
    told = f"Pass {place} of {last}: "
    if step.tree is None:
        return f"{told}nothing was drafted, the target wrote one token."
    own = "the target wrote the next one" if len(step.tokens) > step.accepted else "the text ended"
    return f"{told}{step.drafted} tokens drafted, {step.accepted} accepted, and {own}."


def legend() -> str:
    """Return the meaning of the colours."""
    told = {
        "drafted": "drafted, accepted by the target",
        "own": "written by the target",
        "dropped": "drafted, dropped",
    }
    return '<p class="legend">' + "".join(f'<span class="swatch {n}">{t}</span>' for n, t in told.items()) + "</p>"


def notice(sentence: str, kind: str = "note") -> str:
    """Return a sentence for the line under the buttons; nothing for an empty one."""
    return f'<p class="notice {kind}" role="status">{escape(sentence)}</p>' if sentence else ""
