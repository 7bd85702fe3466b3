"""Options that several commands share, each with its name, type and help in one place.

A rare option is hidden: the help gives its name alone, docs/reference/commands.md all of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from typer import Argument, BadParameter, Option

# --- lists ------------------------------------------------------------------------------------------------------------

Number = TypeVar("Number", int, float)


def names(text: Any) -> Sequence[str]:
    """Read names with commas between them, each kept once. A default is no text, and is returned as it is."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(","))) if isinstance(text, str) else tuple(text)


def whole_numbers(text: Any) -> Sequence[int]:
    """Read whole numbers of at least 1 with commas between them, as `names` reads names."""
    return _numbers(text, int, "whole numbers of at least 1")


def numbers(text: Any) -> Sequence[float]:
    """Read numbers above 0 with commas between them, as `names` reads names."""
    return _numbers(text, float, "numbers above 0")


def _numbers(text: Any, kind: type[Number], wanted: str) -> Sequence[Number]:
    try:
        values = tuple(dict.fromkeys(kind(each) for each in names(text)))
    except ValueError:
        values = (kind(0),)
    if not all(0 < value < math.inf for value in values):
        raise BadParameter(f"{text} does not list {wanted}, with commas between them")
    return values


# --- recipes ----------------------------------------------------------------------------------------------------------

Overrides = Annotated[list[str] | None, Argument(help="Values over the recipe's, each section.key=value.")]

# --- the target -------------------------------------------------------------------------------------------------------

TARGET_HELP = "Hub id or folder of the target"
Target = Annotated[str, Option(metavar="MODEL", help=f"{TARGET_HELP}; 'quickstart' is the embedded default.")]
DTYPE_HELP = "Type of the target's weights; bf16, fp16, fp32, or fast: bf16 where the device multiplies it, else fp32."
Dtype = Annotated[str, Option(metavar="TYPE", help=DTYPE_HELP, hidden=True)]
Trusted = Annotated[bool, Option(help="Run code that comes with a hub model.", hidden=True)]


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """Options that say how a target is loaded."""

    dtype: Dtype = "fast"
    trust_remote_code: Trusted = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadingOptions):
    """Options of a command that cannot do without a target."""

    target: Target


# --- drafting ---------------------------------------------------------------------------------------------------------

SPEC = "NAME[:PATH]"
DRAFTERS = "such as lookup, heads:PATH or draft:PATH,tokens=4 (all: docs/reference/commands.md)"
Drafter = Annotated[str | None, Option(metavar=SPEC, help=f"Drafter, plain decoding if not given; {DRAFTERS}.")]
PlanFile = Annotated[
    Path | None,
    Option(
        metavar="FILE", help="plan.json of 'headstart plan', whose choice drafts, in place of --drafter.", hidden=True
    ),
]
Rule = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Acceptance rule; by default the lossless one that keeps the most drafted tokens. Lossless are greedy, "
        "token, sampled-verify, recursive, top-k, block and traversal; typical is lossy.",
        hidden=True,
    ),
]

# --- prompts and texts ------------------------------------------------------------------------------------------------

QUESTIONS_HELP = ".jsonl or .parquet file of prompts."
"""Help of prompts that `decoding.measure.questions` reads."""
PROMPTS_HELP = ".jsonl file, one prompt per line"
PromptField = Annotated[
    str | None, Option(metavar="NAME", help="Field of the prompt; found by name if not given.", hidden=True)
]
TemplateKwargs = Annotated[
    str | None,
    Option(
        metavar="JSON", help="""Variables of the chat template, such as '{"enable_thinking": false}'.""", hidden=True
    ),
]
Limit = Annotated[int, Option(min=1, help="Number of prompts.")]
MaxNewTokens = Annotated[int, Option(min=1, help="Longest continuation, in tokens.")]
Rounds = Annotated[int, Option(min=1, help="Times that each method decodes each prompt.", hidden=True)]

# --- sampling ---------------------------------------------------------------------------------------------------------

Temperature = Annotated[float, Option(help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float, Option(help="Nucleus sampling; 1 switches it off.", hidden=True)]
Stop = Annotated[list[str] | None, Option(help="Stop string; may be given several times.", hidden=True)]
Seed = Annotated[int, Option(help="Seed of the sampling; same seed, same text.", hidden=True)]

# --- output -----------------------------------------------------------------------------------------------------------

JsonFile = Annotated[
    str | None,
    Option(
        "--json",
        metavar="FILE",
        help="File for all findings as JSON; '-' prints them in place of the text.",
        hidden=True,
    ),
]

# --- commands that ask a server ---------------------------------------------------------------------------------------

ServedName = Annotated[str | None, Option(metavar="NAME", help="The endpoint's name for the target.", hidden=True)]
Concurrency = Annotated[int, Option(min=1, help="Requests to each endpoint at a time.", hidden=True)]
Timeout = Annotated[float, Option(min=0.001, help="Seconds to wait for one answer of the endpoint.", hidden=True)]
