"""The command `headstart generate`: one text, alone or beside plain decoding."""

from collections.abc import Sequence

from rich.console import Console

from decoding.model.loading import load_tokenizer
from decoding.prompts import encode_prompt
from decoding.tally import Tally
from trainer.commands.answers import show_answer, show_legend
from trainer.commands.beside import run_beside
from trainer.commands.decode import Decoder, read_decoder
from trainer.commands.options import GenerateOptions
from trainer.quickstart import resolve
from trainer.terminal.console import say, standard_error, standard_output
from trainer.terminal.figures import summary
from trainer.terminal.interrupts import CtrlC
from trainer.terminal.waiting import waiting


def run_generate(options: GenerateOptions, console: Console | None = None) -> bool:
    """Stream the text on the console, and print its figures on standard error; return False if Ctrl-C stopped it."""
    console = console or standard_output()
    if options.compare and options.drafter is None and options.plan is None:
        raise ValueError("--compare shows a drafter beside plain decoding: give --drafter or --plan")
    context = None
    if options.plan is not None:  # the plan's choice depends on the prompt's length
        tokenizer = load_tokenizer(resolve(options.target), options.trust_remote_code)
        context = len(encode_prompt(options.prompt, tokenizer, options.chat))
    decoder = read_decoder(options, context)
    prompt = encode_prompt(options.prompt, decoder.tokenizer, options.chat)
    if options.compare and decoder.drafts:
        return run_beside(decoder, prompt, console)
    return _stream(decoder, prompt, console, options.gain)


def _stream(decoder: Decoder, prompt: Sequence[int], console: Console, gain: bool) -> bool:
    steps = decoder.engine.steps(prompt, decoder.config)  # bad input is found before anything is measured
    plain = None
    if gain and decoder.drafts:
        with waiting("measuring plain decoding"):
            plain = decoder.plain_speed(prompt)
        steps = decoder.engine.steps(prompt, decoder.config)
    show_legend(decoder, console)
    tally = Tally()
    with CtrlC() as ctrl_c:
        show_answer(decoder, ctrl_c.until_asked(steps), console, tally, plain)
    say(standard_error(), summary(tally, plain, decoder.label), style="dim")
    return not ctrl_c.asked
