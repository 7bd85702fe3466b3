"""Options that several commands share, each with its name, type and help in one place.

An option with a ``rich_help_panel`` is a rare one: `trainer.commands.help` shows it in the full help only.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainer.commands import values
from trainer.commands.help import DRAFTING, MEASURING, OUTPUT, PROMPTS, SAMPLING, SERVER, TARGET
from trainer.commands.recipe_keys import override
from trainer.commands.values import DTYPES, POLICIES, RULES, STATIC, joined

# --- recipes ----------------------------------------------------------------------------------------------------------

Overrides = Annotated[
    list[str] | None, Argument(help="Values over the recipe's, each section.key=value.", autocompletion=override)
]

# --- the target -------------------------------------------------------------------------------------------------------

TARGET_HELP = "Hub id or folder of the target"
Target = Annotated[
    str,
    Option(
        metavar="MODEL",
        help=f"{TARGET_HELP}; 'quickstart' is the embedded default.",
        autocompletion=values.target,
    ),
]
DTYPE_HELP = f"Type of the target's weights; {joined(DTYPES)}."
Dtype = Annotated[
    str,
    Option(
        metavar="TYPE",
        help=f"{DTYPE_HELP} On a CPU with AVX512-BF16 or AMX, bf16 is the fast one.",
        rich_help_panel=TARGET,
        autocompletion=values.one_of(*DTYPES),
    ),
]
Static = Annotated[
    str,
    Option(
        metavar="MODE",
        help="Steps of target and drafts in fixed shapes; graphs (CUDA), compile (torch.compile), eager (neither), or "
        "off. auto is graphs on a GPU, where the target allows them, and else off. The texts are the same.",
        rich_help_panel=TARGET,
        autocompletion=values.one_of(*STATIC),
    ),
]
DeviceMap = Annotated[
    str | None,
    Option(
        metavar="auto",
        help="auto spreads a target that fits no single GPU over all of them; by default one holds it.",
        rich_help_panel=TARGET,
        autocompletion=values.one_of("auto"),
    ),
]
Trusted = Annotated[bool, Option(help="Run code that comes with a hub model.", rich_help_panel=TARGET)]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the target."""

    target: Target
    dtype: Dtype = "bf16"
    static: Static = "auto"
    device_map: DeviceMap = None
    trust_remote_code: Trusted = False


# --- drafting ---------------------------------------------------------------------------------------------------------

SPEC = "NAME[:PATH]"
DRAFTERS = (
    "Written NAME[:PATH][,option=value,...], such as heads:PATH, draft:PATH,tokens=4, draft-tree:PATH,depth=5, "
    "parallel:PATH, lookup, lookahead, cascade:PATH, hybrid:PATH, other-tokenizer:PATH; 'headstart drafters' lists "
    "them with their options."
)
Drafter = Annotated[
    str | None,
    Option(metavar=SPEC, help=f"Drafter, or plain decoding if not given. {DRAFTERS}", autocompletion=values.drafter),
]
PlanFile = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="plan.json of 'headstart plan'; its choice drafts where no --drafter is given, and the measured policy "
        "starts from its costs.",
        rich_help_panel=DRAFTING,
    ),
]
Policy = Annotated[
    str,
    Option(
        metavar="NAME",
        help=f"Policy for the amount to draft; {joined(POLICIES)}.",
        rich_help_panel=DRAFTING,
        autocompletion=values.one_of(*POLICIES),
    ),
]
Rule = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Acceptance rule; by default the lossless one that keeps the most drafted tokens. One of "
        f"{joined(RULES)}; typical is lossy, the others are lossless.",
        rich_help_panel=DRAFTING,
        autocompletion=values.one_of(*RULES),
    ),
]

# --- prompts and texts ------------------------------------------------------------------------------------------------

QUESTIONS_HELP = ".jsonl or .parquet file, one prompt per line; or a folder of one data set."
"""Help of prompts that `decoding.measure.questions` reads."""
PROMPTS_HELP = ".jsonl file, one prompt per line"
PromptField = Annotated[
    str | None,
    Option(metavar="NAME", help="Field of the prompt; found by name if not given.", rich_help_panel=PROMPTS),
]
PromptTokens = Annotated[
    int | None, Option(min=1, help="Take only the first tokens of each text.", rich_help_panel=PROMPTS)
]
Chat = Annotated[bool, Option(help="Use the tokenizer's chat template, if it has one.", rich_help_panel=PROMPTS)]
Limit = Annotated[int, Option(min=1, help="Number of prompts.")]
MaxNewTokens = Annotated[int, Option(min=1, help="Longest continuation, in tokens.")]
BatchSize = Annotated[
    int, Option(min=1, help="Prompts decoded at a time; of a target in this process.", rich_help_panel=MEASURING)
]
Rounds = Annotated[int, Option(min=1, help="Times that each method decodes each prompt.", rich_help_panel=MEASURING)]

# --- sampling ---------------------------------------------------------------------------------------------------------

Temperature = Annotated[float, Option(help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int, Option(help="Top-k sampling; 0 switches it off.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, Option(help="Nucleus sampling; 1 switches it off.", rich_help_panel=SAMPLING)]
MinP = Annotated[
    float,
    Option(help="Least share of the best token's probability to keep; 0 switches it off.", rich_help_panel=SAMPLING),
]
TypicalP = Annotated[float, Option(help="Typical sampling; 1 switches it off.", rich_help_panel=SAMPLING)]
RepetitionPenalty = Annotated[
    float,
    Option(help="Penalty on tokens in prompt and output; 1 switches it off.", rich_help_panel=SAMPLING),
]
PresencePenalty = Annotated[
    float, Option(help="Subtracted once from the logits of tokens in the output.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float, Option(help="Subtracted from a token's logit per occurrence in the output.", rich_help_panel=SAMPLING)
]
Stop = Annotated[list[str] | None, Option(help="Stop string; may be given several times.", rich_help_panel=SAMPLING)]
Seed = Annotated[int, Option(help="Seed of the sampling; same seed, same text.", rich_help_panel=SAMPLING)]

# --- output -----------------------------------------------------------------------------------------------------------

JsonFile = Annotated[
    str | None,
    Option(
        "--json",
        metavar="FILE",
        help="File for all findings as JSON; '-' prints them in place of the text.",
        rich_help_panel=OUTPUT,
    ),
]

# --- commands that ask a server ---------------------------------------------------------------------------------------

ServedName = Annotated[
    str | None, Option(metavar="NAME", help="The endpoint's name for the target.", rich_help_panel=SERVER)
]
Concurrency = Annotated[int, Option(min=1, help="Requests to each endpoint at a time.", rich_help_panel=SERVER)]
Retries = Annotated[int, Option(min=0, help="Times that a failed request is tried again.", rich_help_panel=SERVER)]
Timeout = Annotated[
    float, Option(min=0.001, help="Seconds to wait for one answer of the endpoint.", rich_help_panel=SERVER)
]
KeyVariable = Annotated[
    str,
    Option(
        metavar="NAME",
        help="Environment variable with the endpoint's key; 'none' is sent if it is not set.",
        rich_help_panel=SERVER,
    ),
]
