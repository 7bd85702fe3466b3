"""The command `headstart generate`: stream one text. `headstart chat` uses its `Decoder` too."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decoding.generate import DecodingConfig, Engine
from decoding.model.loading import eos_token_ids
from decoding.policies import default_policy, named_policy
from decoding.prompts import encode_prompt
from decoding.rules.sampling import SamplingConfig
from decoding.speculation import named_rule
from decoding.stream import Tally
from decoding.text import Step
from trainer.commands.models import load_models
from trainer.commands.options import DecodingOptions, GenerateOptions
from trainer.commands.plan import asked_or_planned
from trainer.terminal.console import say, standard_error, standard_output, waiting
from trainer.terminal.streaming import CtrlC, legend, show_steps, shows_styles, summary


def run_generate(options: GenerateOptions, console: Console | None = None) -> bool:
    """Stream the text to the console and its figures to standard error; return False if Ctrl-C stopped it."""
    console = console or standard_output()
    decoder = read_decoder(options)
    prompt = encode_prompt(options.prompt, decoder.tokenizer, chat=True)
    steps = decoder.engine.steps(prompt, decoder.config)
    decoder.show_legend(console)
    tally = Tally()
    with CtrlC() as ctrl_c:
        decoder.show(ctrl_c.until_asked(steps), console, tally)
    say(standard_error(), summary(tally, decoder.label), style="dim")
    return not ctrl_c.asked


@dataclass(frozen=True)
class Decoder:
    """A target with a drafter (called ``name``), and the settings of its texts."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    config: DecodingConfig
    name: str

    @property
    def label(self) -> str:
        """The drafter's name and the rule's label, lossless or lossy."""
        return f"{self.name} ({self.config.label})"

    def show_legend(self, console: Console) -> None:
        """Print what the text styles mean, if the console has styles and there is a drafter."""
        if self.engine.drafter is not None and shows_styles(console):
            say(console, legend())

    def show(self, steps: Iterable[Step], console: Console, tally: Tally) -> None:
        """Show the text of each step at once, and count the steps in the tally."""
        coloured = self.engine.drafter is not None
        show_steps(console, tally.watch(steps), self.tokenizer, self.config.eos_token_ids, coloured)


def read_decoder(options: DecodingOptions) -> Decoder:
    """Load the target and the given drafter, or else the plan's drafter."""
    given = [] if options.drafter is None else [options.drafter]
    drafters = asked_or_planned(given, options.plan, options, (options.temperature,), (1,), standard_error())
    with waiting(f"loading {options.target}"):
        models = load_models(options, drafters)
    name, loaded = next(iter(models.drafters.items()), ("plain decoding", None))
    config = DecodingConfig(
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingConfig(options.temperature),
        rule=named_rule(options.rule) if options.rule else None,
        eos_token_ids=eos_token_ids(models.target.model, models.tokenizer),
        stop_strings=tuple(options.stop or ()),
        seed=options.seed or 0,
    )
    policy = named_policy(default_policy(options.seed))
    engine = Engine(models.target, loaded, policy, models.tokenizer)
    return Decoder(engine, models.tokenizer, config, name)
