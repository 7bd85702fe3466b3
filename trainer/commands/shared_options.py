"""Options that several commands share, each defined once with name, type and help.

Rare options are hidden: the help lists only their names, and docs/reference/commands.md explains them.
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
    """Parse comma-separated names and drop repeated names. Defaults are not strings and are returned unchanged."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(","))) if isinstance(text, str) else tuple(text)


def whole_numbers(text: Any) -> Sequence[int]:
    """Parse comma-separated whole numbers of at least 1; duplicates and defaults are treated as in `names`."""
    return _numbers(text, int, "whole numbers of at least 1")


def numbers(text: Any) -> Sequence[float]:
    """Parse comma-separated numbers above 0; duplicates and defaults are treated as in `names`."""
    return _numbers(text, float, "numbers above 0")


def _numbers(text: Any, kind: type[Number], wanted: str) -> Sequence[Number]:
    try:
        values = tuple(dict.fromkeys(kind(name) for name in names(text)))
    except ValueError:
        values = (kind(0),)
    if not all(0 < value < math.inf for value in values):
        raise BadParameter(f"{text} is not a comma-separated list of {wanted}")
    return values


# --- recipes ----------------------------------------------------------------------------------------------------------

Overrides = Annotated[list[str] | None, Argument(help="Changes to the recipe, each as section.key=value.")]

# --- the target -------------------------------------------------------------------------------------------------------

TARGET_HELP = "Hub id or folder of the target"
Target = Annotated[str, Option(metavar="MODEL", help=f"{TARGET_HELP}; 'quickstart' is the embedded target.")]
DTYPE_HELP = "Type of the target's weights: bf16, fp16, fp32, or fast (bf16 if the device supports it, otherwise fp32)."
Dtype = Annotated[str, Option(metavar="TYPE", help=DTYPE_HELP, hidden=True)]
Trusted = Annotated[bool, Option(help="Run code that comes with a Hub model.", hidden=True)]
BatchInvariant = Annotated[
    bool, Option(help="Write exactly the texts of plain decoding even in bf16 and fp16; this is slower.", hidden=True)
]


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """Options that say how to load a target."""

    dtype: Dtype = "fast"
    trust_remote_code: Trusted = False
    batch_invariant: BatchInvariant = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadingOptions):
    """Options of a command that needs a target."""

    target: Target


# --- drafting ---------------------------------------------------------------------------------------------------------

SPEC = "NAME[:PATH]"
DRAFTERS = "such as lookup, heads:PATH or draft:PATH,tokens=4 (all: docs/reference/commands.md)"
Drafter = Annotated[str | None, Option(metavar=SPEC, help=f"Drafter; by default none (plain decoding); {DRAFTERS}.")]
PlanFile = Annotated[
    Path | None, Option(metavar="FILE", help="plan.json of 'headstart plan', used to choose the drafter.", hidden=True)
]
Rule = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Acceptance rule; by default the lossless rule that accepts the most tokens. Lossless: greedy, token, "
        "sampled-verify, recursive, top-k, block, traversal. Lossy: typical.",
        hidden=True,
    ),
]

# --- prompts and texts ------------------------------------------------------------------------------------------------

QUESTIONS_HELP = ".jsonl or .parquet file of prompts."
"""Help for prompts that `decoding.measure.questions` reads."""
PROMPTS_HELP = ".jsonl file with one prompt"
PromptField = Annotated[
    str | None,
    Option(metavar="NAME", help="Field that contains the prompt; by default a field with a known name.", hidden=True),
]
TemplateKwargs = Annotated[
    str | None,
    Option(
        metavar="JSON", help="""Variables of the chat template, such as '{"enable_thinking": false}'.""", hidden=True
    ),
]
Limit = Annotated[int, Option(min=1, help="Number of prompts.")]
MaxNewTokens = Annotated[int, Option(min=1, help="Longest continuation in tokens.")]
Rounds = Annotated[int, Option(min=1, help="Number of times each method decodes each prompt.", hidden=True)]

# --- sampling ---------------------------------------------------------------------------------------------------------

Temperature = Annotated[float, Option(help="Sampling temperature; 0 is greedy.")]
Stop = Annotated[list[str] | None, Option(help="Stop string; repeatable.", hidden=True)]
Seed = Annotated[int, Option(help="Sampling seed; the same seed repeats the text.", hidden=True)]

# --- output -----------------------------------------------------------------------------------------------------------

JsonFile = Annotated[
    str | None,
    Option(
        "--json", metavar="FILE", help="File for all findings as JSON; '-' prints JSON instead of text.", hidden=True
    ),
]

# --- commands that query a server -------------------------------------------------------------------------------------

ServedName = Annotated[str | None, Option(metavar="NAME", help="The endpoint's name for the target.", hidden=True)]
Concurrency = Annotated[int, Option(min=1, help="Number of concurrent requests to each endpoint.", hidden=True)]
Timeout = Annotated[
    float, Option(min=0.001, help="Longest silence of the endpoint during an answer, in seconds.", hidden=True)
]
