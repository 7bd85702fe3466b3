"""`headstart generate --compare`: plain decoding and a drafter side by side, and whether they wrote the same."""

from collections.abc import Sequence

from rich.console import Console

from decoding.measure.evaluate import margin_of
from decoding.measure.proof.reference import near_tie
from decoding.rules.tree import common_length
from trainer.commands.answers import show_legend
from trainer.commands.decode import Decoder
from trainer.terminal.columns import Columns, Lane, fits_columns, in_turns, one_by_one
from trainer.terminal.console import say, standard_error
from trainer.terminal.figures import PlainSpeed, summary
from trainer.terminal.interrupts import CtrlC
from trainer.terminal.streaming import StreamedText
from trainer.terminal.waiting import waiting


def run_beside(decoder: Decoder, prompt: Sequence[int], console: Console) -> bool:
    """Decode the prompt plainly and with the drafter; print both texts and the figures; return False after Ctrl-C.

    On a terminal that is wide enough the texts grow in two columns, elsewhere one after the other.
    """
    decoder.engine.steps(prompt, decoder.config)  # bad input is found before anything is decoded
    with waiting("warming up"):
        decoder.warm_up(prompt)
    show_legend(decoder, console)
    hidden = decoder.config.eos_token_ids
    with CtrlC() as ctrl_c:
        steps = decoder.plain.steps(prompt, decoder.plain_config), decoder.engine.steps(prompt, decoder.config)
        plain, drafted = (
            Lane(name, ctrl_c.until_asked(each), decoder.tokenizer, hidden, drafts)
            for name, each, drafts in zip(("plain decoding", decoder.label), steps, (False, True), strict=True)
        )
        _show([plain, drafted], console, decoder.engine.target.is_static)
    speed = PlainSpeed(plain.tally.tokens_per_second) if plain.tally.passes else None
    say(standard_error(), summary(drafted.tally, speed, decoder.label), style="dim")
    say(standard_error(), verdict(decoder, prompt, plain.tokens, drafted.tokens))
    return not ctrl_c.asked


def _show(lanes: Sequence[Lane], console: Console, is_static: bool) -> None:
    """Run the lanes to their ends, in columns if they fit. A target of fixed shapes decodes one text at a time."""
    if not fits_columns(console, len(lanes)):
        for lane in lanes:
            say(console, f"{lane.name}:")
            with StreamedText(console, lane.speed, coloured=lane.drafts) as text:
                for _, pieces in one_by_one([lane]):
                    text.add(pieces)
        return
    with Columns(console, lanes) as columns:
        for lane, pieces in one_by_one(lanes) if is_static else in_turns(lanes):
            columns.add(lane, pieces)


def verdict(decoder: Decoder, prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]) -> str:
    """Return a sentence that says whether two texts of one prompt are the same, and if not, why."""
    config, target = decoder.config, decoder.engine.target
    if not config.sampling.greedy:
        if config.label == "lossless":
            return "sampled texts: each has its own draws, both the target's own distribution"
        return "sampled texts: the rule is lossy, its texts have another distribution than the target's own"
    common = common_length(plain, drafted)
    if common == min(len(plain), len(drafted)):
        whole = len(plain) == len(drafted)
        return f"same text, {common} tokens" if whole else f"same text as far as both were written, {common} tokens"
    dtype = str(target.dtype).removeprefix("torch.")
    told = f"the texts differ from token {common + 1} on"
    if config.sampling.needs_history:
        return f"{told}; --dtype fp32 shows whether rounding in {dtype} is the cause"
    margin = margin_of(target, prompt, drafted, plain)
    assert isinstance(margin, float), "the texts differ at a token"
    told += f", where the target's logits of the two tokens are {margin:.3g} apart"
    if margin <= near_tie(target.dtype):
        return f"{told}: a tie within the rounding of {dtype}; --dtype fp32 decides it"
    return f"{told}, more than rounding in {dtype} explains: 'headstart verify' looks for the fault"
